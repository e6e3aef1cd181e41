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

Note [Nodes of a grid]
    Where ranks are a grid, every group of ranks has nodes of its own: those of its ranks that lie on one node. With two
    tensor ranks a node of eight has four ranks of each data group, over which parts of parameters are sharded, and
    eight of the parameters that all tensor ranks have. A number counts data ranks, as it does without a grid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, Literal

from lightning_zero.option_checks import checked_fields, from_fields

__all__ = ["NodeRanks", "Nodes", "ShardedOver", "Sharding", "ShardingScope"]

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
    """The ranks of a node, as the launcher says; they are neighbours.

    Attributes:
        number: Ranks per node.
        place: This rank among them; None if nothing says so.

    Raises:
        ValueError: There is no such node.
    """

    number: int
    place: int | None = None

    def __post_init__(self) -> None:
        if self.number < 1:
            raise ValueError(f"`{self}`: a node has 1 rank or more. Use the ranks that were started on each node.")


@dataclass(frozen=True)
class Nodes:
    """The nodes on which the ranks of an engine lie.

    Attributes:
        of_rank: The number of the node of each rank of the default group, ascending.
        scopes: The option that asks for them, for errors.
    """

    of_rank: Mapping[int, int]
    scopes: Sharding

    def divide(self, ranks: Sequence[int], of: str = "") -> list[list[int]]:
        """Return some of the ranks node by node, those of a node in the order in which they are given.

        Args:
            ranks: The ranks.
            of: What they are, for the error.

        Raises:
            ValueError: Nodes have different numbers of them.
        """
        found: dict[int, list[int]] = {}
        for rank in ranks:
            found.setdefault(self.of_rank[rank], []).append(rank)
        if len({len(of_node) for of_node in found.values()}) > 1:
            numbers = {node: len(of_node) for node, of_node in found.items()}
            raise ValueError(
                f"`{self.scopes}`: nodes have different numbers of the {len(ranks)} ranks{of}: {numbers}. Use nodes of"
                f" equal size. {_NODE_USE}"
            )
        return list(found.values())


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

    def nodes(
        self, ranks: Sequence[int], node: NodeRanks | None, *, rank: int | None = None, ranks_per_batch: int = 1
    ) -> Nodes | None:
        """Return the nodes of an engine's ranks; None if no scope needs them.

        Args:
            ranks: Of the engine, in ascending order.
            node: The ranks of a node as the launcher says, which are neighbours.
            rank: This one.
            ranks_per_batch: Neighbours with the same data, which a number of ranks counts once.

        Raises:
            ValueError: Nobody says how many ranks a node has, a number does not divide them, or the ranks of this node
                are not neighbours.
        """
        if not self.has_nodes:
            return None
        number = next((scope for scope in self._scopes.values() if not isinstance(scope, str) and scope > 1), None)
        if number is not None:
            num_data = len(ranks) // ranks_per_batch
            if num_data % number:
                kind = "ranks" if ranks_per_batch == 1 else "data ranks"
                raise ValueError(f"`{self}`: {number} ranks per node do not divide the {num_data} {kind}. {_NODE_USE}")
            return Nodes({one: place // (number * ranks_per_batch) for place, one in enumerate(ranks)}, self)
        if node is None and len(ranks) > 1:
            raise ValueError(
                f"`{self}` needs the number of ranks of a node, and the launcher has not set `LOCAL_WORLD_SIZE`."
                f" {_NODE_USE}"
            )
        node = node or NodeRanks(1)
        if rank is not None and node.place is not None and node.place != rank % node.number:
            raise ValueError(
                f"`{self}`: the ranks of a node must be neighbours, and rank {rank} is number {node.place} of the"
                f" {node.number} of its node. Start the ranks node by node, as `torchrun` does."
            )
        return Nodes({one: one // node.number for one in ranks}, self)

    def over(self, node: ShardingScope) -> ShardedOver:
        """Return the scopes of a group of ranks.

        Args:
            node: The scope that those between ``"none"`` and ``"world"`` have there: a node with one of the ranks is
                none, and one with all of them the world.
        """
        params, grads, optim = (_resolved(scope, node) for scope in self._scopes.values())
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


def _resolved(scope: str | int, node: ShardingScope) -> ShardingScope:
    if scope in ("none", 1):
        return ShardingScope.NONE
    return ShardingScope.WORLD if scope == "world" else node


_STAGES = {
    0: Sharding(params="none", grads="none", optim="none"),
    1: Sharding(params="none", grads="none", optim="world"),
    2: Sharding(params="none", grads="world", optim="world"),
    3: Sharding(params="world", grads="world", optim="world"),
}
