"""The communicators of a grid, and the flat buffers that are cut over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from lightning_zero.comm.communicator import Communicator
from lightning_zero.engine.buffers.group import BufferGroup, NodeLevels
from lightning_zero.grid import Grid, ParamAxes
from lightning_zero.sharding import ShardedOver, ShardingScope

__all__ = ["GridGroups"]


class GridGroups:
    """The groups over which flat buffers are cut. Collective: all ranks of the engine make the same ones.

    Args:
        grid: The ranks as a grid; None: every buffer is cut over all ranks.
        everyone: Of all ranks of the engine.
        sharding: Returns the scopes in which tensors are kept sharded over a number of ranks.
        node: Ranks per node, where something is sharded over those of a node; neighbours.
    """

    def __init__(
        self, grid: Grid | None, everyone: Communicator, sharding: Callable[[int], ShardedOver], *, node: int = 1
    ) -> None:
        self._all = BufferGroup.of_all(everyone)
        if node > 1:
            assert grid is None
            self._all = replace(self._all, nodes=_levels(everyone, node))
        self._sharding = sharding
        self._groups: dict[str, BufferGroup] = {}
        self._grid = grid
        if grid is not None:
            self._all = replace(self._all, divisor=grid.data_ranks)
            for name, ranks in grid.groups.items():
                communicator = everyone if ranks is None else everyone.along(ranks)
                self._groups[name] = BufferGroup(communicator, everyone, grid.data_ranks)

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
        sharding = self._sharding(self.group(name).communicator.world_size)
        return replace(sharding, optim=ShardingScope.WORLD) if self._grid is not None else sharding


def _levels(everyone: Communicator, node: int) -> NodeLevels:
    """Return the communicators inside nodes of so many neighbours, and over them. Collective: all ranks."""
    first, place = everyone.rank // node * node, everyone.rank % node
    inner, outer = everyone.ranks[first : first + node], everyone.ranks[place::node]
    return NodeLevels(everyone.among(inner, is_across=False), everyone.among(outer, is_across=True))
