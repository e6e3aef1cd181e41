"""Boxes of a tensor, and the part of a tensor that a rank has: integers, but for two functions that copy values.

Words: a *box* is a rectangular piece of a tensor; a *part* is what a rank has of it, one box or several, one behind the
other along a dimension. A packed matrix, such as a fused query-key-value projection of which every section is cut, has
several.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

import torch

__all__ = ["Box", "Part", "boxes_in", "boxes_of_range", "covers"]


class Box(NamedTuple):
    """A rectangular piece of a tensor: elements ``offsets[d] .. offsets[d] + sizes[d]`` of dimension ``d``.

    Attributes:
        offsets: Where it begins, by dimension.
        sizes: Its shape.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of the box in its tensor."""
        return tuple(slice(offset, offset + size) for offset, size in zip(self.offsets, self.sizes, strict=True))

    def is_inside(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of a shape has all of the box."""
        return len(self.offsets) == len(self.sizes) == len(shape) and all(
            0 <= offset <= offset + extent <= size and (extent > 0 or size == 0)
            for offset, extent, size in zip(self.offsets, self.sizes, shape, strict=True)
        )


@dataclass(frozen=True)
class Part:
    """The part of a parameter that a rank has: boxes, concatenated along a dimension.

    Example:
        Rows 4 to 7 of a matrix: ``Part.along((8, 6), 0, (4, 4))``. Rank 1 of 2 of a packed query, key and value of 8
        rows each: ``Part.along((24, 6), 0, (4, 4), (12, 4), (20, 4))``. One corner: ``Part((8, 6), (Box((4, 3), (4,
        3)),))``.

    Attributes:
        whole: Shape of the whole parameter.
        boxes: The boxes, in their order in the rank's tensor.
        dim: Along which they are concatenated.
    """

    whole: tuple[int, ...]
    boxes: tuple[Box, ...]
    dim: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "whole", tuple(self.whole))
        object.__setattr__(self, "boxes", tuple(Box(tuple(offsets), tuple(sizes)) for offsets, sizes in self.boxes))

    @classmethod
    def along(cls, whole: Sequence[int], dim: int, *ranges: tuple[int, int]) -> Part:
        """Return the part that has ranges of one dimension, given by start and length, and all of the others."""
        dim = dim + len(whole) if dim < 0 else dim
        boxes = [
            Box(
                tuple(start if axis == dim else 0 for axis in range(len(whole))),
                tuple(length if axis == dim else size for axis, size in enumerate(whole)),
            )
            for start, length in ranges
        ]
        return cls(tuple(whole), tuple(boxes), dim)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the rank's tensor."""
        sizes = list(self.boxes[0].sizes)
        sizes[self.dim] = sum(box.sizes[self.dim] for box in self.boxes)
        return tuple(sizes)

    @property
    def is_valid(self) -> bool:
        """Whether all boxes lie in the whole, and can be concatenated."""
        if not self.boxes or not 0 <= self.dim < len(self.whole):
            return False
        others = {box.sizes[: self.dim] + box.sizes[self.dim + 1 :] for box in self.boxes}
        return len(others) == 1 and all(box.is_inside(self.whole) for box in self.boxes)

    @property
    def has_first(self) -> bool:
        """Whether it has the first element of the whole."""
        return any(not any(box.offsets) for box in self.boxes)

    def read(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the part of a whole tensor: a view of one box, a copy of several."""
        views = [whole[box.slices] for box in self.boxes]
        return views[0] if len(views) == 1 else torch.cat(views, self.dim)

    def write(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Copy a part into its place in a whole tensor."""
        start = 0
        for box in self.boxes:
            length = box.sizes[self.dim]
            whole[box.slices].copy_(part.narrow(self.dim, start, length))
            start += length

    def places(self, inner: Box) -> Iterator[tuple[slice, Box]]:
        """Yield the places in the whole of a box of the part.

        Yields:
            A range of ``inner`` along ``dim``, and its box of the whole.
        """
        low, high = inner.offsets[self.dim], inner.offsets[self.dim] + inner.sizes[self.dim]
        ends = accumulate((box.sizes[self.dim] for box in self.boxes), initial=0)
        for box, (first, last) in zip(self.boxes, pairwise(ends), strict=True):
            start, stop = max(low, first), min(high, last)
            if start < stop:
                offsets = [begin + offset for begin, offset in zip(box.offsets, inner.offsets, strict=True)]
                offsets[self.dim] = box.offsets[self.dim] + start - first
                sizes = [*inner.sizes]
                sizes[self.dim] = stop - start
                yield slice(start - low, stop - low), Box(tuple(offsets), tuple(sizes))


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Cut the flat range ``[start, stop)`` of a row-major ``shape`` into boxes, in flat order."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield Box((start,), (stop - start,)) if shape else Box((), ())
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:
        yield from _boxes_in_row(shape, last, start - last * row, stop - last * row)
        return
    yield from _boxes_in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield Box((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]))
    yield from _boxes_in_row(shape, last, 0, stop - last * row)


def boxes_in(shape: Sequence[int], part: Part | None, start: int, stop: int) -> Iterator[Box]:
    """Cut the flat range ``[start, stop)`` of a part of a tensor into boxes of the tensor; None: of all of it."""
    for inner in boxes_of_range(shape if part is None else part.shape, start, stop):
        yield from (inner,) if part is None else (box for _, box in part.places(inner))


def _boxes_in_row(shape: Sequence[int], index: int, start: int, stop: int) -> Iterator[Box]:
    for offsets, sizes in boxes_of_range(shape[1:], start, stop):
        yield Box((index, *offsets), (1, *sizes))


def covers(parts: Iterable[tuple[Sequence[int], Sequence[int]]], shape: Sequence[int]) -> bool:
    """Whether boxes ``(offsets, sizes)`` have every element of a tensor among them."""
    if not shape:
        return any(True for _ in parts)
    begins: dict[int, set[int]] = {0: set(), shape[0]: set()}
    ends: dict[int, set[int]] = {}
    known = list(parts)
    for number, (offsets, sizes) in enumerate(known):
        begins.setdefault(offsets[0], set()).add(number)
        ends.setdefault(offsets[0] + sizes[0], set()).add(number)
    active: set[int] = set()
    cuts = sorted(cut for cut in begins.keys() | ends.keys() if 0 <= cut <= shape[0])
    for start, _ in pairwise(cuts):
        active |= begins.get(start, set())
        active -= ends.get(start, set())
        if not covers([(known[number][0][1:], known[number][1][1:]) for number in active], shape[1:]):
            return False
    return True
