"""A layout is arithmetic: what it says about random shapes is compared with a buffer that is painted by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from lightning_zero.layout import SHARD_ALIGN, FlatLayout, Slot

SHAPES: dict[str, list[tuple[int, ...]]] = {
    "one-element": [(1,)],
    "no-dimension": [(), (), ()],
    "zero-elements": [(0,), (3, 0, 2), (5,), (0, 7)],
    "only-zero-elements": [(0,)],
    "no-parameters": [],
    "exact": [(32,), (64,), (32, 8)],
    "odd": [(11, 6), (6,), (1,), (), (12, 6), (63,), (1000,), (0,)],
    "small-then-large": [(1,), (4097,)],
} | {
    f"random{seed}": [
        tuple(random.Random(100 * seed + index).choices([0, 1, 2, 3, 7, 16, 33], k=index % 4)) for index in range(9)
    ]
    for seed in range(4)
}

shapes = pytest.mark.parametrize("shapes", list(SHAPES.values()), ids=list(SHAPES))


def build(shapes: Sequence[tuple[int, ...]], world: int, align: int = 32) -> FlatLayout:
    return FlatLayout.build([(f"p{index}", shape) for index, shape in enumerate(shapes)], world, align)


def covered(layout: FlatLayout) -> list[int]:
    """How many slots lie on each element of the buffer."""
    buffer = [0] * layout.padded_numel
    for slot in layout.slots:
        for element in range(slot.offset, slot.stop):
            buffer[element] += 1
    return buffer


@shapes
def test_segments_tile_every_parameter_exactly_once(shapes: list[tuple[int, ...]]) -> None:
    for world in range(1, 10):
        layout = build(shapes, world)
        for index, slot in enumerate(layout.slots):
            pieces = [layout.segment(index, rank) for rank in range(world)]
            elements = [element for piece in pieces for element in range(piece.start, piece.stop)]
            assert elements == list(range(slot.numel))
            assert sum(piece.numel for piece in pieces) == slot.numel


@shapes
def test_a_segment_lies_in_the_shard_of_its_rank(shapes: list[tuple[int, ...]]) -> None:
    for world in range(1, 10):
        layout = build(shapes, world)
        for rank in range(world):
            lo, hi = layout.shard_range(rank)
            for segment in layout.segments(rank):
                if segment.numel:
                    offset = layout.slots[segment.slot_index].offset
                    assert lo <= offset + segment.start < offset + segment.stop <= hi


@shapes
def test_gaps_are_exactly_what_no_parameter_covers(shapes: list[tuple[int, ...]]) -> None:
    for world in range(1, 10):
        layout = build(shapes, world)
        buffer = covered(layout)
        assert max(buffer) <= 1
        painted = {element for lo, hi in layout.gaps() for element in range(lo, hi)}
        assert painted == {element for element, count in enumerate(buffer) if not count}
        assert sum(hi - lo for lo, hi in layout.gaps()) == layout.padded_numel - layout.numel
        assert all(lo < hi for lo, hi in layout.gaps())


@shapes
def test_shards_are_equal_aligned_and_never_empty(shapes: list[tuple[int, ...]]) -> None:
    for world in range(1, 10):
        layout = build(shapes, world)
        assert layout.shard_numel * world == layout.padded_numel
        assert layout.shard_numel > 0
        assert layout.shard_numel % SHARD_ALIGN == 0
        ranges = [layout.shard_range(rank) for rank in range(world)]
        assert ranges[0][0] == 0
        assert ranges[-1][1] == layout.padded_numel
        assert all(before[1] == after[0] for before, after in zip(ranges, ranges[1:], strict=False))


@shapes
@pytest.mark.parametrize("align", [1, 32, 64])
def test_slots_start_aligned_and_in_order(shapes: list[tuple[int, ...]], align: int) -> None:
    layout = build(shapes, 3, align)
    assert [slot.offset % align for slot in layout.slots] == [0] * len(shapes)
    assert [slot.shape for slot in layout.slots] == shapes
    assert all(before.stop <= after.offset for before, after in zip(layout.slots, layout.slots[1:], strict=False))


@shapes
def test_padding_is_less_than_one_alignment_per_slot_and_rank(shapes: list[tuple[int, ...]]) -> None:
    for world in range(1, 10):
        layout = build(shapes, world)
        assert layout.padded_numel - layout.numel <= 32 * len(shapes) + world * SHARD_ALIGN


@shapes
def test_the_slots_do_not_depend_on_the_world(shapes: list[tuple[int, ...]]) -> None:
    assert len({build(shapes, world).slots for world in range(1, 10)}) == 1


@shapes
def test_json_gives_the_same_layout_back(shapes: list[tuple[int, ...]]) -> None:
    layout = build(shapes, 3)
    assert FlatLayout.from_json(layout.to_json()) == layout


def test_a_parameter_without_dimensions_has_one_element() -> None:
    assert build([()], 2).slots == (Slot(name="p0", shape=(), offset=0, numel=1),)


@pytest.mark.parametrize("world", [0, -1])
def test_a_world_without_ranks_is_refused(world: int) -> None:
    with pytest.raises(ValueError, match=rf"`world_size={world}` must be at least 1"):
        build([(3,)], world)
