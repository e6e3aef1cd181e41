"""Parameters on a grid of ranks: over which ranks a flat buffer is cut, and which part of a parameter a rank has.

Note [A group per buffer]
    Every form of parallelism asks the engine for the same thing: a buffer is cut over a group of ranks of its own.
    Parameters that tensor parallelism cuts are cut over the data ranks; those that it leaves alone over all ranks;
    experts over the ranks that have the same experts. Parameters share a buffer only if their group is the same.

Note [One divisor]
    Sums of gradients are divided by the number of data ranks, whatever the group: tokens of all data ranks go through
    an expert, also where four ranks have it. Where each of T tensor ranks has the whole gradient of a parameter that is
    cut over all of them, the sum counts it T times: its ``factor`` is 1/T. A partial gradient, of which each has a
    summand, has the factor 1.

Note [Counted once]
    Of all ranks exactly one steps, counts and saves each element: on a grid optimizer states are always sharded, at
    stage 0 too, where they are for nothing more than on one axis (stages 0 and 1 send as many bytes, and have the same
    values). So norms, overflows and checkpoints are one sum over all ranks, and nothing in them asks for the group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import torch
import torch.distributed as dist

from lightning_zero.comm.communicator import Communicator

__all__ = ["ALL", "Box", "BufferGroup", "Grid", "GridPlaces", "ParamAxes", "check_places"]

ALL = "all ranks"  # the group of parameters that a grid does not name


@dataclass(frozen=True)
class Box:
    """The part of a parameter that a rank has: elements ``offsets[d] .. offsets[d] + shape[d]`` of dimension ``d``.

    Attributes:
        whole: Shape of the whole parameter.
        offsets: Where the part begins, by dimension.
    """

    whole: tuple[int, ...]
    offsets: tuple[int, ...]

    def of(self, whole: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return a view of a rank's part, which has a shape, of the whole parameter."""
        ends = [offset + size for offset, size in zip(self.offsets, shape, strict=True)]
        return whole[tuple(map(slice, self.offsets, ends))]

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Refuse a part that does not lie in the whole.

        Raises:
            ValueError: It does not.
        """
        ends = [offset + size for offset, size in zip(self.offsets, shape, strict=False)]
        is_inside = len(self.whole) == len(self.offsets) == len(shape) and all(
            offset >= 0 and end <= size for offset, end, size in zip(self.offsets, ends, self.whole, strict=True)
        )
        if not is_inside:
            raise ValueError(
                f"`grid` says that `{name}`, which has the shape {tuple(shape)} here, begins at {self.offsets} of a"
                f" parameter of shape {self.whole}: it does not lie in it. Give the box that this rank has."
            )


@dataclass(frozen=True)
class ParamAxes:
    """A parameter on a grid.

    Attributes:
        group: Name of the group over which its flat buffer is cut.
        factor: Multiplies its gradient on every rank; see Note [One divisor].
        box: The part that this rank has; None: all of it.
    """

    group: str
    factor: float = 1.0
    box: Box | None = None

    @property
    def fact(self) -> str:
        """The facts that are the same on all ranks, in words."""
        whole = "" if self.box is None else f", a part of {self.box.whole}"
        return f"cut over {self.group}, gradients times {self.factor}{whole}"


@dataclass(frozen=True)
class Grid:
    """The ranks of an engine as a grid.

    Parts of a parameter have the same shape on all ranks.

    Attributes:
        groups: The ranks of each group that this rank is in, by name; the same names in the same order on all ranks.
            None: all ranks of the engine.
        data_ranks: Number of ranks with different data.
        params: The parameters, by first name. Others are cut over all ranks of the engine, which have whole gradients:
            ranks with the same data count a gradient once.
    """

    groups: Mapping[str, dist.ProcessGroup | None]
    data_ranks: int
    params: Mapping[str, ParamAxes] = field(default_factory=dict)

    def facts(self) -> dict[str, str]:
        """Return the facts that must agree on all ranks."""
        params = {f"the axes of `{name}`": axes.fact for name, axes in self.params.items()}
        return {"the groups of `grid`": ", ".join(self.groups), "`grid.data_ranks`": str(self.data_ranks), **params}

    def axes(self, name: str, num_ranks: int) -> ParamAxes:
        """Return the axes of a parameter, named or not, on an engine of ``num_ranks``."""
        return self.params.get(name) or ParamAxes(ALL, self.data_ranks / num_ranks)

    def check(self, shapes: Mapping[str, Sequence[int]], ranks: Sequence[int]) -> None:
        """Refuse names, groups, numbers and boxes that cannot be.

        Args:
            shapes: Of the parameters on this rank, by first name.
            ranks: Of the engine.

        Raises:
            ValueError: One cannot.
        """
        if self.data_ranks < 1 or len(ranks) % self.data_ranks:
            raise ValueError(f"`grid.data_ranks={self.data_ranks}` must divide the {len(ranks)} ranks of the engine.")
        for name, group in self.groups.items():
            if group is not None and not isinstance(group, dist.ProcessGroup):
                raise ValueError(
                    f"`grid.groups['{name}']` is a `{type(group).__name__}`, not a process group that this rank is in."
                    " Make groups with `torch.distributed.new_group` or a `DeviceMesh`, each on all ranks."
                )
            if not set(_ranks_of(group, ranks)) <= set(ranks):
                raise ValueError(
                    f"`grid.groups['{name}']` has the ranks {_ranks_of(group, ranks)}, some of which the engine does"
                    f" not have: it has {list(ranks)}. Give a group inside of the engine's `process_group`."
                )
        for name, axes in self.params.items():
            if name not in shapes:
                raise ValueError(f"`grid` names the parameter `{name}`, which the module does not have.")
            if axes.group not in self.groups:
                known = ", ".join(f"'{group}'" for group in self.groups)
                raise ValueError(
                    f"`grid` cuts `{name}` over the group '{axes.group}', which it does not have. Use one of {known}."
                )
            if not (math.isfinite(axes.factor) and axes.factor > 0):
                raise ValueError(
                    f"`grid` gives `{name}` the factor {axes.factor}. Use 1, or 1 / T where T ranks have its whole"
                    " gradient."
                )
            if axes.box is not None:
                axes.box.check(name, shapes[name])

    def places(self, shapes: Mapping[str, Sequence[int]], ranks: Sequence[int]) -> GridPlaces:
        """Return where this rank's parameters lie, for ``check_places``."""
        groups = {name: _ranks_of(group, ranks) for name, group in self.groups.items()}
        found = {}
        for name, shape in shapes.items():
            axes = self.axes(name, len(ranks))
            box = axes.box or Box(tuple(shape), (0,) * len(shape))
            found[name] = (groups.get(axes.group, tuple(ranks)), box, tuple(shape))
        return GridPlaces(groups, found)


@dataclass(frozen=True)
class GridPlaces:
    """A rank's groups, by name, and its parameters: the ranks over which each is cut, its box, and the box's shape."""

    groups: Mapping[str, tuple[int, ...]]
    params: Mapping[str, tuple[tuple[int, ...], Box, tuple[int, ...]]]


def check_places(everyone: Mapping[int, GridPlaces]) -> None:
    """Refuse groups that ranks know differently, and parts that do not tile their parameters; given by rank.

    Raises:
        ValueError: The same on all ranks.
    """
    for name in next(iter(everyone.values())).groups:
        known = {rank: places.groups[name] for rank, places in everyone.items()}
        if len({len(ranks) for ranks in known.values()}) > 1:
            raise ValueError(f"`grid.groups['{name}']` has other sizes on other ranks: {known}. Divide ranks evenly.")
        if any(rank not in ranks or any(known[one] != ranks for one in ranks) for rank, ranks in known.items()):
            raise ValueError(f"`grid.groups['{name}']` is not the same group on its ranks: by rank it has {known}.")
    for name in next(iter(everyone.values())).params:
        parts = {places.params[name] for places in everyone.values()}
        groups = {ranks for ranks, _, _ in parts}
        whole = next(iter(parts))[1].whole
        boxes = [(box.offsets, shape) for _, box, shape in sorted(parts, key=lambda part: part[0])]
        numel = sum(math.prod(shape) for _, shape in boxes)
        overlaps = any(_overlap(one, other) for one, other in combinations(boxes, 2))
        if len(groups) < len(parts) or overlaps or numel != math.prod(whole):
            raise ValueError(
                f"The parts of `{name}` on the ranks of `grid` are no division of a parameter of shape {whole}: groups"
                f" of ranks {sorted(groups)} have boxes (offsets, shape) {boxes}. Give each group one box, so that"
                " together they have every element once. A parameter that is whole on all ranks is cut over all ranks."
            )


def _overlap(one: tuple[Sequence[int], Sequence[int]], other: tuple[Sequence[int], Sequence[int]]) -> bool:
    pairs = zip(*one, *other, strict=True)
    return all(max(mine, theirs) < min(mine + size, theirs + extent) for mine, size, theirs, extent in pairs)


def _ranks_of(group: dist.ProcessGroup | None, ranks: Sequence[int]) -> tuple[int, ...]:
    return tuple(ranks) if group is None else tuple(dist.get_process_group_ranks(group))


@dataclass(frozen=True, eq=False)
class BufferGroup:
    """The ranks over which a flat buffer is cut.

    Attributes:
        communicator: Of these ranks; they tile the buffer.
        everyone: Of all ranks, which have all elements of the model once.
        divisor: Of sums of gradients.
    """

    communicator: Communicator
    everyone: Communicator
    divisor: int

    @staticmethod
    def of_all(communicator: Communicator) -> BufferGroup:
        """Return the group of a buffer that is cut over all ranks, each of which has other data."""
        return BufferGroup(communicator, communicator, communicator.world_size)
