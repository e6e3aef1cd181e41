"""The slot of every parameter in a flat buffer, and the range of it that each rank owns.

Pure integers: no tensors, no device, no process group. The same object serves every stage, placement and checkpoint.

Words: a *slot* is a parameter's place in the flat buffer; a *shard* is a rank's contiguous 1/N of the buffer; a
*segment* is the piece of one parameter inside one shard. Space between slots and behind the last one is *padding*.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import prod

__all__ = ["FlatLayout", "Segment", "Slot"]

SHARD_ALIGN = 8  # elements: 16 bytes for 16-bit dtypes, so that vector loads of a shard are aligned


@dataclass(frozen=True, kw_only=True)
class Slot:
    """The place of one parameter: elements ``[offset, offset + numel)`` of the flat buffer."""

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int

    @property
    def stop(self) -> int:
        """First element behind the slot."""
        return self.offset + self.numel


@dataclass(frozen=True)
class Segment:
    """Elements ``[start, stop)`` of a flattened parameter; empty when ``start == stop``."""

    slot_index: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class FlatLayout:
    """The slots of a flat buffer that is cut into ``world_size`` shards of equal length."""

    slots: tuple[Slot, ...]
    world_size: int
    padded_numel: int

    @classmethod
    def build(cls, named_shapes: Sequence[tuple[str, Sequence[int]]], world_size: int, align: int = 32) -> FlatLayout:
        """Place parameters one after the other.

        Args:
            named_shapes: Name and shape of every parameter, in order.
            world_size: Number of shards.
            align: Every slot starts at a multiple of this many elements (32 is 64 bytes in 16-bit dtypes: a
                parameter's kernels see the alignment that they see on a tensor of its own).
        """
        if world_size < 1:
            raise ValueError(f"`world_size={world_size}` must be at least 1.")
        slots: list[Slot] = []
        offset = 0
        for name, shape in named_shapes:
            numel = prod(shape)
            slots.append(Slot(name=name, shape=tuple(shape), offset=offset, numel=numel))
            offset = _round_up(offset + numel, align)
        end = slots[-1].stop if slots else 0
        return cls(
            slots=tuple(slots), world_size=world_size, padded_numel=_round_up(max(end, 1), world_size * SHARD_ALIGN)
        )

    @property
    def numel(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(slot.numel for slot in self.slots)

    @property
    def shard_numel(self) -> int:
        """Elements of one shard."""
        return self.padded_numel // self.world_size

    def shard_range(self, rank: int) -> tuple[int, int]:
        """Elements of the flat buffer that ``rank`` owns."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def segment(self, slot_index: int, rank: int) -> Segment:
        """Return the piece of one parameter in the shard of ``rank``; it may be empty."""
        slot = self.slots[slot_index]
        lo, hi = self.shard_range(rank)
        start = min(max(lo - slot.offset, 0), slot.numel)
        stop = min(max(hi - slot.offset, 0), slot.numel)
        return Segment(slot_index, start, stop)

    def segments(self, rank: int) -> list[Segment]:
        """Return the pieces of all parameters in the shard of ``rank``, one per slot."""
        return [self.segment(index, rank) for index in range(len(self.slots))]

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Yield the ranges of the flat buffer that are padding."""
        position = 0
        for slot in self.slots:
            if slot.offset > position:
                yield position, slot.offset
            position = slot.stop
        if self.padded_numel > position:
            yield position, self.padded_numel

    def to_json(self) -> str:
        """Return the layout as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> FlatLayout:
        """Read a layout that ``to_json`` wrote."""
        data = json.loads(text)
        slots = tuple(Slot(**{**slot, "shape": tuple(slot["shape"])}) for slot in data["slots"])
        return cls(slots=slots, world_size=data["world_size"], padded_numel=data["padded_numel"])


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
