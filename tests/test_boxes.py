from __future__ import annotations

import itertools
import random
from math import prod

import pytest
import torch

from lightning_zero.boxes import Box, Part, boxes_in, boxes_of_range, covers


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (1, 1, 5), (3, 1, 2), (4, 1, 2, 3), (0, 3)], ids=str)
def test_boxes_tile_every_range_in_flat_order(shape: tuple[int, ...]) -> None:
    whole = torch.arange(prod(shape)).view(shape)
    for start in range(whole.numel() + 1):
        for stop in range(start, whole.numel() + 1):
            cut = list(boxes_of_range(shape, start, stop))
            assert len(cut) <= max(1, 2 * len(shape) - 1)
            parts = [whole[box.slices].reshape(-1) for box in cut]
            assert torch.equal(torch.cat(parts) if parts else whole.view(-1)[:0], whole.view(-1)[start:stop])


@pytest.mark.parametrize("seed", range(20))
def test_boxes_cover_a_shape_if_every_element_is_in_one(seed: int) -> None:
    generator = random.Random(seed)
    shape = tuple(generator.randint(1, 4) for _ in range(generator.randint(0, 3)))
    cut = sorted({0, prod(shape), *(generator.randint(0, prod(shape)) for _ in range(3))})
    parts = [box for start, stop in itertools.pairwise(cut) for box in boxes_of_range(shape, start, stop)]
    assert covers(parts, shape)
    if parts:
        lost = parts.pop(generator.randrange(len(parts)))
        assert not covers([*parts, *parts], shape)
        assert covers([*parts, lost, lost], shape)


PARTS = [
    Part.along((8, 6), 0, (4, 4)),
    Part.along((12, 5), 0, (2, 2), (6, 2), (10, 2)),
    Part.along((5, 12), 1, (2, 2), (6, 2), (10, 2)),
    Part.along((3, 12, 2), -2, (10, 2), (0, 3)),
    Part.along((9,), 0, (0, 1), (4, 2)),
    Part((4, 6, 2), (Box((2, 0, 0), (2, 1, 2)), Box((2, 3, 0), (2, 2, 2))), 1),
]


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_ranges_of_a_part_are_boxes_of_the_whole(part: Part) -> None:
    whole = torch.arange(prod(part.whole)).view(part.whole)
    values = part.read(whole)
    assert part.is_valid
    assert tuple(values.shape) == part.shape
    numel = values.numel()
    for start, stop in itertools.combinations(range(numel + 1), 2):
        found = torch.cat([whole[box.slices].reshape(-1) for box in boxes_in(part.whole, part, start, stop)])
        assert sorted(found.tolist()) == sorted(values.reshape(-1)[start:stop].tolist())


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_what_is_written_into_a_whole_is_read_from_it(part: Part) -> None:
    values = torch.randn(part.shape)
    whole = torch.full(part.whole, float("nan"))
    part.write(whole, values)
    assert torch.equal(part.read(whole), values)
    assert whole.isnan().sum() == whole.numel() - values.numel()


@pytest.mark.parametrize(
    "part",
    [
        Part((8, 6), ()),
        Part.along((), 0, (0, 1)),
        Part.along((8, 6), 2, (0, 4)),
        Part.along((8, 6), 0, (4, 5)),
        Part.along((8, 6), 0, (-1, 2)),
        Part.along((8, 6), 0, (2, 0)),
        Part((8, 6), (Box((0, 0), (2, 6)),), 2),
        Part((8, 6), (Box((0,), (2,)),)),
        Part((8, 6), (Box((0, 0), (2, 6)), Box((4, 0), (2, 5)))),
    ],
    ids=str,
)
def test_parts_that_cannot_be_are_told(part: Part) -> None:
    assert not part.is_valid


def test_boxes_may_be_given_as_pairs() -> None:
    part = Part([8, 6], ([[4, 0], [4, 6]],))  # type: ignore[arg-type]
    assert part == Part.along((8, 6), 0, (4, 4)) == Part.along((8, 6), -2, (4, 4))
    assert hash(part) == hash(Part.along(torch.Size((8, 6)), 0, (4, 4)))


def test_one_part_has_the_first_element() -> None:
    assert Part.along((8, 6), 0, (4, 4), (0, 2)).has_first
    assert not Part.along((8, 6), 1, (1, 4)).has_first
