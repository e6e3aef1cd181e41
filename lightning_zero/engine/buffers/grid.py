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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from lightning_zero.comm.communicator import Communicator

__all__ = ["Box", "BufferGroup", "Grid", "ParamAxes"]


@dataclass(frozen=True)
class Box:
    """The part of a parameter that a rank has: elements ``offsets[d] .. offsets[d] + shape[d]`` of dimension ``d``.

    Attributes:
        whole: Shape of the whole parameter.
        offsets: Where the part begins, by dimension.
    """

    whole: tuple[int, ...]
    offsets: tuple[int, ...]

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

    Attributes:
        groups: The ranks of each group that this rank is in, by name; the same names in the same order on all ranks.
            None: all ranks of the engine.
        data_ranks: Number of ranks with different data.
        params: The parameters, by first name. Others are cut over all ranks of the engine, and have the factor 1.
    """

    groups: Mapping[str, dist.ProcessGroup | None]
    data_ranks: int
    params: Mapping[str, ParamAxes] = field(default_factory=dict)

    def facts(self) -> dict[str, str]:
        """Return the facts that must agree on all ranks."""
        params = {f"the axes of `{name}`": axes.fact for name, axes in self.params.items()}
        return {"the groups of `grid`": ", ".join(self.groups), "`grid.data_ranks`": str(self.data_ranks), **params}

    def check(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Refuse names and boxes that fit no parameter.

        Args:
            shapes: Of the parameters on this rank, by first name.

        Raises:
            ValueError: One does not fit.
        """
        if self.data_ranks < 1:
            raise ValueError(f"`grid.data_ranks={self.data_ranks}` must be at least 1.")
        for name, axes in self.params.items():
            if name not in shapes:
                raise ValueError(f"`grid` names the parameter `{name}`, which the module does not have.")
            if axes.group not in self.groups:
                known = ", ".join(f"'{group}'" for group in self.groups)
                raise ValueError(
                    f"`grid` cuts `{name}` over the group '{axes.group}', which it does not have. Use one of {known}."
                )
            if axes.box is not None:
                axes.box.check(name, shapes[name])


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
