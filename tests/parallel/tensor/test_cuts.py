from __future__ import annotations

import pytest
import torch

from lightning_zero.parallel.tensor.cuts import ParamRecord, Sections, sections_of


def _record(rank: int, size: int, dim: int, sections: tuple[int, ...], shape: tuple[int, ...]) -> ParamRecord:
    return ParamRecord(names=("w",), shape=shape, kind="cut", sections=Sections(dim, sections), rank=rank, size=size)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("dim", "sections", "shape"),
    [(0, (8,), (8, 3)), (1, (8,), (3, 8)), (0, (16, 8, 8), (32, 3)), (2, (4, 4), (2, 3, 8)), (0, (8,), (8,))],
)
def test_boxes_of_all_ranks_tile_the_parameter(
    size: int, dim: int, sections: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    whole = torch.randn(shape)
    count, rebuilt = torch.zeros(shape), torch.full(shape, float("nan"))
    for rank in range(size):
        record = _record(rank, size, dim, sections, shape)
        local = record.local(whole)
        assert tuple(local.shape) == record.local_shape
        assert record.part is not None
        pieces = []
        for box in record.part.boxes:
            count[box.slices] += 1
            pieces.append(whole[box.slices])
        assert torch.equal(torch.cat(pieces, dim), local)
        record.write_into(rebuilt, local)
    assert torch.equal(count, torch.ones(shape))
    assert torch.equal(rebuilt, whole)


def test_a_whole_parameter_is_no_part() -> None:
    record = ParamRecord(names=("b",), shape=(4,), kind="partial", sections=None, rank=1, size=2)
    assert record.part is None
    assert record.local_shape == (4,)


@pytest.mark.parametrize(
    ("owners", "expected"),
    [
        ([0, 0, 1, 1], (4,)),
        ([0, 1, 0, 1], (2, 2)),
        ([0, 0, 1, 1, 0, 1, 0, 1], (4, 2, 2)),
        ([1, 1, 0, 0], None),
        ([0, 0, 1], None),
        ([0, 0, 0, 1], None),
        ([0, 1, 0], None),
    ],
)
def test_sections_are_read_from_owners(owners: list[int], expected: tuple[int, ...] | None) -> None:
    assert sections_of(owners, 2) == expected
