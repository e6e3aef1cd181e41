from __future__ import annotations

import pytest

from benchmarks.tensor_parallel import measure


@pytest.mark.slow
def test_both_sides_agree_and_take_turns() -> None:
    (row,) = measure(128, 1, 32, steps=4)
    assert row.variant == "tensor/dtensor"
    assert float(row.lo) <= float(row.ratio) <= float(row.hi)
