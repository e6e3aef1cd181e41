"""Tensors of which ranks have parts, in files of their own, read as whole tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_zero.boxes import Box, covers
from lightning_zero.checkpoint.planner import Segment
from lightning_zero.checkpoint.stored import StoredTensor

__all__ = ["Copies", "JoinedTensors", "Layout", "Piece", "are_copies", "flat_range", "row_major", "same"]

Copies = Literal["equal", "first"]
SAMPLE = 4096  # elements that are compared before all are read


@dataclasses.dataclass(frozen=True)
class Piece:
    """A box of a whole tensor, and the box of equal sizes that it is in a rank's tensor."""

    whole: Box
    part: Box


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the elements of the ranks' tensors lie in a whole tensor.

    Args:
        shape: Shape in which parts are boxes. The whole tensor has its elements in the same order.
        parts: Shape of each rank's tensor in the same dimensions.
        pieces: Of each rank. Pieces of several ranks are the same box, or have no element in common.
    """

    shape: tuple[int, ...]
    parts: tuple[tuple[int, ...], ...]
    pieces: tuple[tuple[Piece, ...], ...]

    @classmethod
    def copies(cls, shape: Sequence[int], num_ranks: int) -> Layout:
        """Return the layout of a tensor that every rank has whole."""
        box = Box((0,) * len(shape), tuple(shape))
        return cls(tuple(shape), (tuple(shape),) * num_ranks, ((Piece(box, box),),) * num_ranks)

    @classmethod
    def cut(cls, shape: Sequence[int], dim: int, widths: Sequence[Sequence[int]]) -> Layout:
        """Return the layout of a tensor whose sections along a dimension are cut.

        Args:
            shape: Of the whole tensor.
            dim: The dimension.
            widths: Of every section the extent that each rank has of it.
        """

        def box(start: int, extent: int) -> Box:
            starts = tuple(start if axis == dim else 0 for axis in range(len(shape)))
            return Box(starts, tuple(extent if axis == dim else size for axis, size in enumerate(shape)))

        num_ranks = len(widths[0])
        pieces: list[list[Piece]] = [[] for _ in range(num_ranks)]
        begin, ends = 0, [0] * num_ranks
        for section in widths:
            for rank, extent in enumerate(section):
                pieces[rank].append(Piece(box(begin, extent), box(ends[rank], extent)))
                begin += extent
                ends[rank] += extent
        parts = tuple(box(0, end).sizes for end in ends)
        return cls(
            tuple(shape), parts, tuple(tuple(piece for piece in own if prod(piece.whole.sizes)) for own in pieces)
        )

    def holders(self) -> dict[Box, list[tuple[int, Box]]]:
        """Return every box of the whole with the ranks that have it, and where it lies in their tensors."""
        found: dict[Box, list[tuple[int, Box]]] = {}
        for rank, pieces in enumerate(self.pieces):
            for piece in pieces:
                found.setdefault(piece.whole, []).append((rank, piece.part))
        return found

    def has_elements(self, rank: int) -> bool:
        """Whether a rank's tensor has elements."""
        return prod(self.parts[rank]) > 0

    @property
    def is_cut(self) -> bool:
        """Whether ranks have parts, not copies."""
        return any(part != self.shape for part in self.parts)

    @property
    def is_sound(self) -> bool:
        """Whether the pieces cover the whole once, and each rank's tensor once."""
        return _tiles(list(self.holders()), self.shape) and all(
            _tiles([piece.part for piece in pieces], shape)
            and all(piece.whole.sizes == piece.part.sizes for piece in pieces)
            for pieces, shape in zip(self.pieces, self.parts, strict=True)
        )

    def whole_shape(self, shapes: Sequence[torch.Size]) -> torch.Size | None:
        """Return the shape of the whole tensor, given those of the ranks' tensors; None if they do not fit.

        A fused matrix may be cut in a view of more dimensions, of which the last one is that of the matrix.
        """
        if all(tuple(shape) == part for shape, part in zip(shapes, self.parts, strict=True)):
            return torch.Size(self.shape)
        fits = all(
            len(shape) in (1, 2) and len(shape) < len(part) and tuple(shape) == _merged(part, len(shape))
            for shape, part in zip(shapes, self.parts, strict=True)
        )
        return torch.Size(_merged(self.shape, len(shapes[0]))) if fits else None


def _tiles(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    is_covered = prod(shape) == 0 or covers(boxes, shape)
    return (
        is_covered
        and sum(prod(box.sizes) for box in boxes) == prod(shape)
        and all(box.is_inside(shape) for box in boxes)
        and all(_common(one, other) is None for one, other in combinations(boxes, 2))
    )


def _merged(shape: Sequence[int], ndim: int) -> tuple[int, ...]:
    return (prod(shape),) if ndim == 1 else (prod(shape[:-1]), shape[-1])


def _common(one: Box, other: Box) -> Box | None:
    """Return the box of the elements that two boxes have in common; None if there are none."""
    starts = tuple(max(pair) for pair in zip(one.offsets, other.offsets, strict=True))
    ends = (
        min(first + extent, second + size)
        for first, extent, second, size in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return None if any(size <= 0 for size in sizes) else Box(starts, sizes)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


@dataclasses.dataclass(frozen=True)
class _Joined:
    layout: Layout
    holders: Mapping[Box, Sequence[tuple[int, Box]]]
    parts: Sequence[torch.Tensor]


class JoinedTensors:
    """Tensors whose parts are in files of several ranks; the source of their ``StoredTensor``s.

    Args:
        directory: The checkpoint.
        copies: For elements that several ranks have: ``"equal"`` refuses those that differ between ranks, ``"first"``
            takes those of the first rank.
    """

    def __init__(self, directory: Path, copies: Copies = "equal") -> None:
        self.directory = directory
        self.copies = copies
        self._tensors: dict[str, _Joined] = {}

    def add(self, key: str, layout: Layout, parts: Sequence[torch.Tensor]) -> StoredTensor:
        """Return the whole tensor of the ranks' parts; those without elements may have another dtype.

        Raises:
            ValueError: The parts have other shapes than the layout, or different dtypes.
        """
        shape = layout.whole_shape([part.shape for part in parts])
        dtypes = {part.dtype for part in parts if part.numel()} or {parts[0].dtype}
        if shape is None or len(dtypes) > 1:
            found = ", ".join(f"{tuple(part.shape)} {part.dtype}" for part in parts)
            raise ValueError(
                f"`{self.directory}`: the tensor ranks have parts of `{key}` of {found}, which do not make a tensor of"
                f" {layout.shape} cut into {', '.join(map(str, layout.parts))}. The files are not of one save, or the"
                " plan is another one."
            )
        self._tensors[key] = _Joined(layout, layout.holders(), parts)
        return StoredTensor(self, key, shape, dtypes.pop())

    def read(self, targets: Sequence[tuple[str, Segment]]) -> None:
        """Fill the local part of segments.

        Raises:
            ValueError: Elements that several ranks have differ.
        """
        for key, run in ((key, run) for key, target in targets for run in target.runs()):
            joined = self._tensors[key]
            for box, view in Segment(run.local, run.start, torch.Size(joined.layout.shape)).views():
                for place, holders in joined.holders.items():
                    common = _common(box, place)
                    if common is not None:
                        view[_relative(common, box).slices].copy_(self._values(key, holders, _relative(common, place)))

    def _values(self, key: str, holders: Sequence[tuple[int, Box]], inner: Box) -> torch.Tensor:
        """Return the values of a box of a piece."""
        joined = self._tensors[key]
        wanted = holders if self.copies == "equal" else holders[:1]
        values = [
            (rank, _box_of(joined.parts[rank], joined.layout.parts[rank], _moved(inner, part))) for rank, part in wanted
        ]
        first, whole = values[0]
        for rank, copy in values[1:]:
            if not _same_bits(whole, copy):
                raise ValueError(
                    f"`{self.directory}`: `{key}` has other values on tensor rank {rank} than on tensor rank {first},"
                    " although every rank has all of it. If they have drifted apart by rounding, which kernels that"
                    " are not deterministic do, `copies=first` takes those of the first rank."
                )
        return whole

    def identity(self, key: str) -> Any:
        """Return a key that is equal for two names of the same bytes."""
        return key


def _relative(box: Box, outer: Box) -> Box:
    return Box(tuple(mine - theirs for mine, theirs in zip(box.offsets, outer.offsets, strict=True)), box.sizes)


def _moved(box: Box, place: Box) -> Box:
    return Box(tuple(mine + theirs for mine, theirs in zip(box.offsets, place.offsets, strict=True)), box.sizes)


def _box_of(part: torch.Tensor, shape: Sequence[int], box: Box) -> torch.Tensor:
    """Return a box of a part that is viewed in a shape, from the flat range that has it."""
    strides = row_major(shape)
    start = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    stop = start + 1 + sum((size - 1) * stride for size, stride in zip(box.sizes, strides, strict=True))
    flat = flat_range(part, start, stop)
    return torch.as_strided(flat, box.sizes, strides, flat.storage_offset())


def flat_range(part: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return a range of a flattened tensor."""
    if not isinstance(part, StoredTensor):
        return part.detach().reshape(-1)[start:stop].contiguous()
    flat = torch.empty(stop - start, dtype=part.dtype, device="cpu")
    part.source.read([(part.key, Segment(flat, start, part.shape))])
    return flat


def are_copies(parts: Sequence[torch.Tensor]) -> bool:
    """Say whether tensors have the same values, which are not all one number: parts of a cut tensor have not."""
    if len({(part.shape, part.dtype) for part in parts}) > 1 or parts[0].numel() == 0:
        return False
    numel = parts[0].numel()
    for stop in (min(numel, SAMPLE), numel):  # most differ in their first elements
        first, *others = (flat_range(part, 0, stop) for part in parts)
        if not all(_same_bits(first, other) for other in others):
            return False
    return not torch.equal(first, first[:1].expand_as(first))


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))


def same(one: Any, other: Any) -> bool:
    """Say whether two values are equal: nested containers of tensors, which are compared by their bits, and others."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and _same_bits(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
