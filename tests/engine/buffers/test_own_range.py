"""The own range: segments tile it, padding is what is left."""

from __future__ import annotations

import pytest
import torch

from lightning_zero.engine.buffers.own_range import OwnRange
from lightning_zero.layout import FlatLayout

SHAPES = [(11, 6), (6,), (), (0, 3), (5, 7)]
WORLD = 3

sharded = pytest.mark.parametrize("is_sharded", [True, False], ids=["shard", "whole"])


def _ranges(*, is_sharded: bool) -> list[OwnRange]:
    layout = FlatLayout.build([(f"p{index}", shape) for index, shape in enumerate(SHAPES)], WORLD)
    return [OwnRange(layout, rank, is_sharded=is_sharded) for rank in range(WORLD)]


@sharded
def test_segments_and_gaps_tile_the_range(is_sharded: bool) -> None:
    for own in _ranges(is_sharded=is_sharded):
        values = torch.zeros(own.numel)
        for index in range(len(SHAPES)):
            own.segment(index, values).add_(1)
        for lo, hi in own.gaps():
            values[lo:hi].add_(1)
        assert values.tolist() == [1.0] * own.numel


@sharded
def test_a_segment_has_the_elements_that_lie_at_its_place(is_sharded: bool) -> None:
    for own in _ranges(is_sharded=is_sharded):
        values = torch.arange(own.numel)
        for index, shape in enumerate(SHAPES):
            segment, (start, stop), (lo, hi) = own.segment(index, values), own.elements(index), own.place(index)
            assert segment.shape == ((stop - start,) if is_sharded else shape)
            assert torch.equal(segment.reshape(-1), values[lo:hi])


def test_the_elements_of_all_ranks_are_the_parameters() -> None:
    ranges = _ranges(is_sharded=True)
    for index, shape in enumerate(SHAPES):
        found = [element for own in ranges for element in range(*own.elements(index))]
        assert found == list(range(torch.Size(shape).numel()))


def test_neighbours_have_nothing_but_padding_between_them() -> None:
    (own, *_) = _ranges(is_sharded=False)
    assert own.is_next(0, 1)
    assert not own.is_next(0, 2)
    assert own.is_next(2, 4)  # the slot between has no elements


def test_slots_without_elements_are_not_missed() -> None:
    (own, *_) = _ranges(is_sharded=False)
    assert own.are_all({0, 1, 2, 4})
    assert not own.are_all({0, 1, 3, 4})
