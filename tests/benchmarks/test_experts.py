from __future__ import annotations

import pytest
import torch

from benchmarks import experts
from benchmarks.experts import measure


def test_layer_and_loop_agree_and_take_turns() -> None:
    row = measure(16, 64, 16, 8, repeats=3, dtype=torch.float32)
    assert (row.variant, row.bound) == ("layer/loop", "0.7")
    assert float(row.lo) <= float(row.ratio) <= float(row.hi)


def test_a_layer_that_disagrees_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "K", 1)
    forward = experts._Loop.forward
    monkeypatch.setattr(experts._Loop, "forward", lambda self, x: 1.01 * forward(self, x))
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        measure(4, 64, 16, 8, repeats=3, dtype=torch.float32)
