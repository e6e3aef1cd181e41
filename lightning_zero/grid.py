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

import torch.distributed as dist

from lightning_zero.boxes import Box, Part, covers

__all__ = ["ALL", "Grid", "GridPlaces", "ParamAxes", "check_places"]

ALL = "all ranks"  # the group of parameters that a grid does not name


@dataclass(frozen=True)
class ParamAxes:
    """A parameter on a grid.

    Attributes:
        group: Name of the group over which its flat buffer is cut.
        factor: Multiplies its gradient on every rank; see Note [One divisor].
        part: The part that this rank has; None: all of it.
        is_of_others: Whether its gradient on this rank is a sum over the tokens of other ranks as well, as an expert's.
    """

    group: str
    factor: float = 1.0
    part: Part | None = None
    is_of_others: bool = False

    @property
    def fact(self) -> str:
        """The facts that are the same on all ranks, in words."""
        whole = "" if self.part is None else f", a part of {self.part.whole}"
        others = ", with tokens of other ranks" if self.is_of_others else ""
        return f"cut over {self.group}, gradients times {self.factor}{others}{whole}"


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
        communicates: Whether modules exchange values with other ranks in their forwards, after ``engine.meet()``, so
            that every rank must run them.
    """

    groups: Mapping[str, dist.ProcessGroup | None]
    data_ranks: int
    params: Mapping[str, ParamAxes] = field(default_factory=dict)
    communicates: bool = False

    def facts(self) -> dict[str, str]:
        """Return the facts that must agree on all ranks."""
        params = {f"the axes of `{name}`": axes.fact for name, axes in self.params.items()}
        groups, communicates = ", ".join(self.groups), str(self.communicates)
        own = {"`grid.data_ranks`": str(self.data_ranks), "`grid.communicates`": communicates}
        return {"the groups of `grid`": groups, **own, **params}

    def axes(self, name: str, num_ranks: int) -> ParamAxes:
        """Return the axes of a parameter, named or not, on an engine of ``num_ranks``."""
        return self.params.get(name) or ParamAxes(ALL, self.data_ranks / num_ranks)

    def whole_shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a whole parameter, given that of this rank's."""
        part = self.params[name].part if name in self.params else None
        return tuple(shape) if part is None else part.whole

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
            if axes.part is not None:
                _check_part(name, axes.part, tuple(shapes[name]))

    def places(self, shapes: Mapping[str, Sequence[int]], ranks: Sequence[int]) -> GridPlaces:
        """Return where this rank's parameters lie, for ``check_places``."""
        groups = {name: _ranks_of(group, ranks) for name, group in self.groups.items()}
        found = {}
        for name, shape in shapes.items():
            axes = self.axes(name, len(ranks))
            group, part = groups.get(axes.group, tuple(ranks)), axes.part
            everything = Box((0,) * len(shape), tuple(shape))
            found[name] = (group, everything.sizes, (everything,)) if part is None else (group, part.whole, part.boxes)
        return GridPlaces(groups, found)


@dataclass(frozen=True)
class GridPlaces:
    """A rank's groups, by name, and its parameters: the ranks over which each is cut, its whole shape, its boxes."""

    groups: Mapping[str, tuple[int, ...]]
    params: Mapping[str, tuple[tuple[int, ...], tuple[int, ...], tuple[Box, ...]]]


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
        groups = sorted({ranks for ranks, _, _ in parts})
        whole = next(iter(parts))[1]
        boxes = [box for _, _, part in sorted(parts) for box in part]
        numel = sum(math.prod(box.sizes) for box in boxes)
        if len(groups) < len(parts) or numel != math.prod(whole) or not covers(boxes, whole):
            found = [tuple(map(tuple, part)) for _, _, part in sorted(parts)]
            raise ValueError(
                f"The parts of `{name}` on the ranks of `grid` are no division of a parameter of shape {whole}: groups"
                f" of ranks {groups} have boxes (offsets, sizes) {found}. Give each group one part, so that together"
                " they have every element once. A parameter that is whole on all ranks is cut over all ranks."
            )


def _check_part(name: str, part: Part, shape: tuple[int, ...]) -> None:
    """Refuse a part that cannot be.

    Raises:
        ValueError: It does not lie in the whole, or has another shape than the parameter here.
    """
    boxes = [tuple(box) for box in part.boxes]
    start = f"`grid` says that `{name}`, which has the shape {shape} here, is the boxes (offsets, sizes) {boxes}"
    if not part.is_valid:
        raise ValueError(
            f"{start} of a parameter of shape {part.whole}, concatenated along dimension {part.dim}: they do not lie in"
            " it, or do not fit together. Give the boxes that this rank has."
        )
    if part.shape != shape:
        raise ValueError(
            f"{start}, which have the shape {part.shape} together. Give the boxes that this rank has, in the order in"
            f" which they lie in the parameter, concatenated along dimension {part.dim}."
        )


def _ranks_of(group: dist.ProcessGroup | None, ranks: Sequence[int]) -> tuple[int, ...]:
    return tuple(ranks) if group is None else tuple(dist.get_process_group_ranks(group))
