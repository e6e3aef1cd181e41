"""The range of a flat buffer that a rank steps: its shard where optimizer states are sharded, else the whole buffer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set

import torch

from lightning_zero.layout import FlatLayout

__all__ = ["OwnRange", "merge_written", "same_values"]


class OwnRange:
    """Elements ``[start, stop)`` of a flat buffer, and where the parameters' segments lie in them.

    Args:
        layout: Of the buffer.
        rank: Whose range it is.
        is_sharded: It is the rank's shard; else everything.
    """

    def __init__(self, layout: FlatLayout, rank: int, *, is_sharded: bool) -> None:
        self.start, self.stop = layout.shard_range(rank) if is_sharded else (0, layout.padded_numel)
        self.slots: Set[int] = frozenset(range(len(layout.slots)))  # of the buffer
        self._layout = layout
        self.is_shard = is_sharded  # the answer to "are optimizer states kept sharded?"; else it is everything
        self._segments = [
            (segment.start, segment.stop) if is_sharded else (0, slot.numel)
            for segment, slot in zip(layout.segments(rank), layout.slots, strict=True)
        ]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def elements(self, index: int) -> tuple[int, int]:
        """Return which elements of a parameter are in the range."""
        return self._segments[index]

    def place(self, index: int) -> tuple[int, int]:
        """Return where a parameter's segment lies in the range."""
        start, stop = self._segments[index]
        base = self._layout.slots[index].offset - self.start
        return base + start, base + stop

    def segment(self, index: int, values: torch.Tensor) -> torch.Tensor:
        """Return a parameter's piece of a tensor over the range: 1-D, or whole and in shape at stage 0."""
        slot = self._layout.slots[index]
        start, stop = self._segments[index]
        base = slot.offset - self.start
        piece = values[base + start : base + stop] if stop > start else values[:0]
        return piece if self.is_shard else piece.view(slot.shape)

    def is_next(self, index: int, other: int) -> bool:
        """Say whether nothing but padding lies between the segments of two slots, the second behind the first."""
        return all(start == stop for start, stop in self._segments[index + 1 : other])

    def are_all(self, indices: set[int]) -> bool:
        """Say whether the segments of some slots are all that have elements."""
        return all(index in indices or start == stop for index, (start, stop) in enumerate(self._segments))

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Yield where padding lies in the range; ranges may be empty."""
        for start, stop in self._layout.gaps():
            yield max(start - self.start, 0), max(min(stop, self.stop) - self.start, 0)


def same_values(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return where two tensors have the same values, as bool; NaN in both is the same: it is no write."""
    return (one == other) | ((one != one) & (other != other))


def merge_written(master: torch.Tensor, values: torch.Tensor, own: OwnRange, but_for: Iterable[int]) -> torch.Tensor:
    """Take over values that are not the rounded master's. Where they are on a device, the host does not wait for it.

    Args:
        master: The master: (own range,).
        values: The parameters' values; may be the compute shard itself: (own range,).
        own: The range.
        but_for: Slots that show the master itself.

    Returns:
        Whether there were any: () bool, where the master is.
    """
    rounded = master.to(values.dtype)
    if master.device.type == "cpu" and torch.equal(rounded, values):
        return torch.zeros((), dtype=torch.bool, device="cpu")
    is_same = same_values(rounded, values)
    for index in but_for:
        own.segment(index, is_same).fill_(True)
    torch.where(is_same, master, values, out=master)
    return is_same.all().logical_not()
