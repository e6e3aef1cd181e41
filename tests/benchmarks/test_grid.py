from __future__ import annotations

from fractions import Fraction

import pytest

from benchmarks.grid import DATA, TENSOR, draw, places
from lightning_zero.boxes import Part


@pytest.mark.parametrize(("data", "tensor"), [(4, 2), (1, 4), (3, 1)])
def test_the_ranks_of_a_grid_step_every_element_once(data: int, tensor: int) -> None:
    found = list(places(data, tensor))
    for shards in ([place.cut_shard for place in found], [place.whole_shard for place in found]):
        edges = sorted(shards)
        assert [start for start, _ in edges] == [0, *(stop for _, stop in edges[:-1])]
        assert edges[-1][1] == 1
    for place in found:
        assert place.part[0] <= place.cut_shard[0] < place.cut_shard[1] <= place.part[1]
        part = Part.along((tensor,), 0, (place.tensor_rank, 1))
        assert part.boxes[0].offsets == (place.part[0] * tensor,)


def test_the_picture_has_every_rank_and_its_shards() -> None:
    (axes,) = draw().axes
    texts = {text.get_text() for text in axes.texts}
    assert {f"rank {rank}" for rank in range(DATA * TENSOR)} <= texts
    bars = [patch for patch in axes.patches if getattr(patch, "get_height", int)() == 0.2]
    assert len(bars) == 6 * DATA * TENSOR
    widths = {round(patch.get_width() / 0.92, 3) for patch in bars}
    assert widths == {float(Fraction(1, DATA * TENSOR)), float(Fraction(1, TENSOR)), 1.0}
