"""The communicators of a grid, and the flat buffers that are cut over them.

Note [Nodes of a group]
    Where something is sharded over the ranks of a node, every group is divided into those of its ranks that lie on one
    node: see Note [Nodes of a grid] in ``sharding``. A group all of whose ranks lie on one node has one level. Where no
    node has several data ranks nothing can be sharded inside of one, and no group has two levels. Where some group has,
    one with a single rank per node has two as well: its first level is a copy, so that its gradients, too, cross nodes
    once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from lightning_zero.comm.communicator import Communicator
from lightning_zero.engine.buffers.group import BufferGroup, NodeLevels
from lightning_zero.engine.units.nodes import data_ranks_of_node
from lightning_zero.grid import Grid, ParamAxes
from lightning_zero.sharding import Nodes, ShardedOver, ShardingScope

__all__ = ["GridGroups"]


class GridGroups:
    """The groups over which flat buffers are cut. Collective: all ranks of the engine make the same ones.

    Args:
        grid: The ranks as a grid; None: every buffer is cut over all ranks.
        everyone: Of all ranks of the engine.
        sharding: Returns the scopes in which tensors are kept sharded over a number of ranks, given what a node is
            among them.
        nodes: The nodes on which the ranks lie; None if no scope needs them.

    Attributes:
        node_size: Data ranks of a node over which something is sharded; 1: there is no such node.
    """

    def __init__(
        self,
        grid: Grid | None,
        everyone: Communicator,
        sharding: Callable[[int, ShardingScope], ShardedOver],
        nodes: Nodes | None = None,
    ) -> None:
        self._grid = grid
        self._sharding = sharding
        self._nodes = nodes
        named = {} if grid is None else dict(grid.groups)
        communicators = {name: everyone if ranks is None else everyone.along(ranks) for name, ranks in named.items()}
        divisor = everyone.world_size if grid is None else grid.data_ranks
        groups = {name: one.ranks for name, one in communicators.items()}
        self.node_size = 1 if nodes is None else data_ranks_of_node(nodes, everyone.ranks, groups.values(), divisor)
        # - Groups
        self._levels: dict[tuple[int, ...], NodeLevels | None] = {}  # by the ranks of a group
        self._all = BufferGroup(everyone, everyone, divisor, self._divide(everyone, everyone))
        self._groups = {
            name: BufferGroup(one, everyone, divisor, self._divide(one, everyone))
            for name, one in communicators.items()
        }

    def _divide(self, group: Communicator, everyone: Communicator) -> NodeLevels | None:
        """Return the two levels of a group; None: it has one. Collective: the ranks of the group."""
        ranks = tuple(group.ranks)
        if ranks not in self._levels:
            is_divided = self._scopes(group).has_nodes
            self._levels[ranks] = _levels(group, self._by_node(group), everyone) if is_divided else None
        return self._levels[ranks]

    def _scopes(self, group: Communicator) -> ShardedOver:
        return self._sharding(group.world_size, self._node_scope(group))

    def _by_node(self, group: Communicator) -> list[list[int]]:
        assert self._nodes is not None
        return self._nodes.divide(group.ranks)

    def _node_scope(self, group: Communicator) -> ShardingScope:
        """Return the scope that a node has among the ranks of a group."""
        if self._nodes is None or len(self._by_node(group)) == 1:
            return ShardingScope.WORLD
        return ShardingScope.NODE if self.node_size > 1 else ShardingScope.NONE

    @property
    def data_ranks(self) -> int:
        """Number of ranks with different data."""
        return self._all.divisor

    def axes(self, names: Sequence[str]) -> dict[str, ParamAxes]:
        """Return the axes of parameters on the grid, by first name; nothing without one."""
        num_ranks = self._all.everyone.world_size
        return {} if self._grid is None else {name: self._grid.axes(name, num_ranks) for name in names}

    def name_of(self, param: str) -> str | None:
        """Return the name of a parameter's group; None: all ranks."""
        axes = None if self._grid is None else self._grid.params.get(param)
        return None if axes is None else axes.group

    def group(self, name: str | None) -> BufferGroup:
        """Return a group by its name; None: all ranks."""
        return self._all if name is None else self._groups[name]

    def sharding(self, name: str | None) -> ShardedOver:
        """Return the tensors of a buffer that are kept sharded over its group.

        On a grid one rank steps an element, at every stage; see Note [Counted once] in ``grid``.
        """
        sharding = self._scopes(self.group(name).communicator)
        return replace(sharding, optim=ShardingScope.WORLD) if self._grid is not None else sharding


def _levels(group: Communicator, by_node: Sequence[Sequence[int]], everyone: Communicator) -> NodeLevels:
    """Return the communicators inside nodes, and over them. Collective: the ranks of the group."""
    rank = group.ranks[group.rank]
    inner = next(of_node for of_node in by_node if rank in of_node)
    outer = [of_node[inner.index(rank)] for of_node in by_node]
    return NodeLevels(everyone.among(inner, is_across=False), everyone.among(outer, is_across=True))
