"""The part of a parameter that a tensor rank has. Pure integers, but for two functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from lightning_zero.boxes import Part

__all__ = ["Kind", "ParamRecord", "Sections", "sections_of"]

Kind = Literal["cut", "whole", "partial"]


@dataclass(frozen=True)
class Sections:
    """A dimension that is cut: each of its sections, one behind the other, is divided over the ranks.

    A plain cut has one section; packed query, key and value have three.
    """

    dim: int
    sizes: tuple[int, ...]

    def divides(self, size: int) -> bool:
        """Say whether every section can be divided over ``size`` ranks."""
        return all(section % size == 0 for section in self.sizes)

    def ranges(self, rank: int, size: int) -> list[tuple[int, int]]:
        """Return start and length of each range of the dimension that ``rank`` of ``size`` has."""
        starts = [0, *accumulate(self.sizes)]
        return [
            (start + rank * (section // size), section // size)
            for start, section in zip(starts, self.sizes, strict=False)
        ]


@dataclass(frozen=True, kw_only=True)
class ParamRecord:
    """Where the values of one rank's parameter lie in the whole parameter.

    Attributes:
        names: All names of the parameter; the first is its own, others are those of tied modules.
        shape: Of the whole parameter.
        kind: ``"cut"``: every rank has a part, with the gradient of the part. ``"whole"``: every rank has all values
            and the whole gradient. ``"partial"``: every rank has all values, and the gradient is the ranks' sum.
        sections: The cut; None where every rank has all values.
        rank: This rank in the tensor group.
        size: Number of ranks in the tensor group.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    kind: Kind
    sections: Sections | None
    rank: int
    size: int

    @property
    def name(self) -> str:
        """The parameter's own name."""
        return self.names[0]

    @property
    def part(self) -> Part | None:
        """The part of the whole parameter that this rank has; None: all of it."""
        if self.sections is None:
            return None
        return Part.along(self.shape, self.sections.dim, *self.sections.ranges(self.rank, self.size))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's part."""
        return self.shape if self.part is None else self.part.shape

    def local(self, whole: Tensor) -> Tensor:
        """Return a copy of this rank's part of the whole tensor."""
        part = whole.detach() if self.part is None else self.part.read(whole.detach())
        return part.clone(memory_format=torch.contiguous_format)

    def write_into(self, whole: Tensor, local: Tensor) -> None:
        """Copy this rank's part into its place in the whole tensor."""
        if self.part is None:
            whole.copy_(local)
        else:
            self.part.write(whole, local)


def sections_of(owners: Sequence[int], size: int) -> tuple[int, ...] | None:
    """Return the sections that give each position of a dimension to its owner, or None if no sections do.

    Args:
        owners: Of each position, the rank that has it.
        size: Number of ranks.
    """
    runs: list[list[int]] = []  # owner, length
    for owner in owners:
        if runs and runs[-1][0] == owner:
            runs[-1][1] += 1
        else:
            runs.append([owner, 1])
    rounds = [runs[start : start + size] for start in range(0, len(runs), size)]
    if not all([owner for owner, _ in one] == list(range(size)) for one in rounds):
        return None
    if not all(_are_equal(length for _, length in one) for one in rounds):
        return None
    return tuple(size * one[0][1] for one in rounds)


def _are_equal(values: Iterable[int]) -> bool:
    return len(set(values)) == 1
