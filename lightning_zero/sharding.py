"""The option ``stage``: over which ranks parameters, gradients and optimizer states are kept sharded.

Note [A stage is three scopes]
    ZeRO's stages say of parameters, gradients and optimizer states whether each is kept sharded (arXiv:1910.02054).
    Where nodes are connected by a slower network than the ranks of a node, the question is over which ranks: those of
    the node or all. ``Sharding`` answers it, and ``stage=0`` to ``3`` are rows of the same table, as are hybrid
    sharding (arXiv:2304.11277) and the secondary partition of ZeRO++ (arXiv:2306.10209)::

                                 params  grads   optim
        stage 0                  none    none    none
        stage 1                  none    none    world
        stage 2                  none    world   world
        stage 3                  world   world   world
        hybrid sharding          node    node    world
        secondary partition      node    world   world

Note [Optimizer states over all ranks]
    With several nodes the states are kept over all ranks wherever they are sharded at all: the all-reduce over the
    nodes that copies of them would need is a reduce-scatter and an all-gather. So the scope ``"node"`` of ``optim``
    means ``"world"``: as many bytes are sent (fewer for parameters of 16 bits), and one rank steps, counts and saves an
    element.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Any, Literal

from lightning_zero.option_checks import checked_fields, from_fields

__all__ = ["NodeRanks", "ShardedOver", "Sharding", "ShardingScope"]

_STAGE_USE = (
    "Use 0, 1, 2 or 3, or `Sharding(...)` for scopes of their own, for example `Sharding(params='node', grads='node',"
    " optim='world')`."
)
_NODE_USE = "Or give a number of neighbouring ranks that divides them, for example `params=4`."
_SCOPE_USE = "Use 'none', 'node', 'world' or a number of neighbouring ranks."


class ShardingScope(IntEnum):
    """The ranks over which something is kept sharded; true unless each rank keeps all of it.

    NONE:  Each rank by itself.
    NODE:  The ranks of a node, which are neighbours.
    WORLD: All ranks.
    """

    NONE = 0
    NODE = 1
    WORLD = 2

    def ranks(self, num_ranks: int, node: int) -> int:
        """Return the number of ranks of the scope, given those of all and of a node."""
        return {ShardingScope.NONE: 1, ShardingScope.NODE: node, ShardingScope.WORLD: num_ranks}[self]


@dataclass(frozen=True)
class NodeRanks:
    """The ranks of a node, as the launcher says.

    Attributes:
        number: Ranks per node.
        place: This rank among them; None if nothing says so.
    """

    number: int
    place: int | None = None


@dataclass(frozen=True)
class ShardedOver:
    """The scopes of a flat buffer."""

    params: ShardingScope
    grads: ShardingScope
    optim: ShardingScope

    @classmethod
    def from_stage(cls, stage: int) -> ShardedOver:
        """Return the scopes of a stage over all ranks."""
        scopes = (ShardingScope.WORLD if stage >= first else ShardingScope.NONE for first in (3, 2, 1))
        return cls(*scopes)

    @property
    def has_nodes(self) -> bool:
        """Whether something is kept sharded over the ranks of a node."""
        return ShardingScope.NODE in (self.params, self.grads, self.optim)


@checked_fields(use={"params": _SCOPE_USE, "grads": _SCOPE_USE, "optim": _SCOPE_USE})
@dataclass(frozen=True, kw_only=True)
class Sharding:
    """The ranks over which parameters, gradients and optimizer states are kept sharded.

    Each scope is ``"none"``, ``"node"``, a number of neighbouring ranks, or ``"world"``, and none is larger than the
    one behind it. ``"node"`` and numbers are the same ranks: there is one size of node.

    Args:
        params: Of parameters between their uses.
        grads: Of gradients between micro-batches. With ``"node"`` they are summed over the nodes once a step.
        optim: Of optimizer states and masters; ``"node"`` means ``"world"`` where there are several nodes.
    """

    params: Literal["none", "node", "world"] | int = "none"
    grads: Literal["none", "node", "world"] | int = "none"
    optim: Literal["none", "node", "world"] | int = "world"

    def __post_init__(self) -> None:
        for name, scope in self._scopes.items():
            if not isinstance(scope, str) and scope < 1:
                raise ValueError(f"`Sharding({name}={scope!r})` must be a number of ranks, 1 or more. {_SCOPE_USE}")
        numbers = {scope for scope in self._scopes.values() if not isinstance(scope, str) and scope > 1}
        if len(numbers) > 1 or (numbers and "node" in self._scopes.values()):
            raise ValueError(
                f"`{self}` has nodes of several sizes. Use one number of ranks, or 'node', for all scopes between"
                " 'none' and 'world'."
            )
        self._refuse_unless_nested()

    @classmethod
    def of(cls, stage: Any) -> Sharding:
        """Return the option ``stage``; given are a stage, a ``Sharding``, or a dict of its fields.

        Raises:
            ValueError: It is neither.
        """
        if isinstance(stage, dict):
            stage = from_fields(cls, stage)
        if isinstance(stage, cls):
            return stage
        if type(stage) is not int or stage not in (0, 1, 2, 3):
            raise ValueError(f"`stage={stage!r}` is not a ZeRO stage. {_STAGE_USE}")
        return _STAGES[stage]

    @property
    def stage(self) -> int:
        """The ZeRO stage that keeps the same of the three sharded, over whichever ranks."""
        return sum(scope not in ("none", 1) for scope in self._scopes.values())

    @property
    def option(self) -> int | Sharding:
        """The value of ``stage`` that says the same in the fewest words."""
        return next((stage for stage, scopes in _STAGES.items() if scopes == self), self)

    @property
    def has_nodes(self) -> bool:
        """Whether a scope is neither one rank nor all."""
        return any(scope not in ("none", 1, "world") for scope in self._scopes.values())

    @property
    def waits_in_node(self) -> bool:
        """Whether gradients may wait in a node for the last micro-batch."""
        return self.grads not in ("none", 1, "world")

    @property
    def uses_launcher(self) -> bool:
        """Whether the launcher says how many ranks a node has."""
        return "node" in self._scopes.values()

    def node_size(self, ranks: Sequence[int], node: NodeRanks | None) -> int:
        """Return how many of an engine's ranks are in a node; 1 where no scope needs one.

        Args:
            ranks: Of the engine, in ascending order.
            node: The ranks of a node as the launcher says.

        Raises:
            ValueError: Nobody says how many, or nodes would have different numbers of them.
        """
        if not self.has_nodes:
            return 1
        number = next((scope for scope in self._scopes.values() if not isinstance(scope, str) and scope > 1), None)
        if number is not None:
            if len(ranks) % number:
                raise ValueError(f"`{self}`: {number} ranks per node do not divide the {len(ranks)} ranks. {_NODE_USE}")
            return number
        if node is None:
            if len(ranks) == 1:
                return 1
            raise ValueError(
                f"`{self}` needs the number of ranks of a node, and the launcher has not set `LOCAL_WORLD_SIZE`."
                f" {_NODE_USE}"
            )
        sizes = Counter(rank // node.number for rank in ranks)
        if len(set(sizes.values())) > 1:
            raise ValueError(
                f"`{self}`: of the {len(ranks)} ranks, nodes of {node.number} (`LOCAL_WORLD_SIZE`) have different"
                f" numbers: {dict(sizes)}. Use nodes of equal size. {_NODE_USE}"
            )
        return next(iter(sizes.values()))

    def with_node(self, number: int) -> Sharding:
        """Return the same scopes with the number of ranks of a node in the place of ``"node"``."""
        return replace(self, **{name: number for name, scope in self._scopes.items() if scope == "node"})

    def over(self, num_ranks: int, node: int) -> ShardedOver:
        """Return the scopes on an engine's ranks; a node that is one rank, or all, is none.

        Args:
            num_ranks: Of the engine.
            node: Of them in a node.
        """
        params, grads, optim = (_resolved(scope, num_ranks, node) for scope in self._scopes.values())
        return ShardedOver(params, grads, ShardingScope.WORLD if optim else optim)

    @property
    def _scopes(self) -> dict[str, str | int]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def _refuse_unless_nested(self) -> None:
        """Refuse a scope that is larger than one behind it.

        Raises:
            ValueError: There is one.
        """
        names = list(self._scopes)
        for inner, outer in zip(names, names[1:], strict=False):
            if _rank(self._scopes[inner]) > _rank(self._scopes[outer]):
                raise ValueError(
                    f"`{self}` is not nested: `{inner}={self._scopes[inner]!r}` is sharded over more ranks than"
                    f" `{outer}={self._scopes[outer]!r}`. Use `params` within `grads` within `optim`, for example"
                    f" `{outer}={self._scopes[inner]!r}`."
                )

    def __str__(self) -> str:
        return f"Sharding({', '.join(f'{name}={scope!r}' for name, scope in self._scopes.items())})"


def _rank(scope: str | int) -> int:
    if scope == 1:
        return 0
    return {"none": 0, "world": 2}.get(str(scope), 1)


def _resolved(scope: str | int, num_ranks: int, node: int) -> ShardingScope:
    if scope in ("none", "world"):
        return ShardingScope.WORLD if scope == "world" else ShardingScope.NONE
    number = node if scope == "node" else int(scope)
    if number == 1:
        return ShardingScope.NONE
    return ShardingScope.WORLD if number == num_ranks else ShardingScope.NODE


_STAGES = {
    0: Sharding(params="none", grads="none", optim="none"),
    1: Sharding(params="none", grads="none", optim="world"),
    2: Sharding(params="none", grads="world", optim="world"),
    3: Sharding(params="world", grads="world", optim="world"),
}
