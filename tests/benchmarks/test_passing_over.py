"""What a pipeline stage's host does besides computing, in small."""

from __future__ import annotations

import pytest
from torch import nn

from benchmarks import passing_over


@pytest.mark.parametrize("kind", passing_over.KINDS)
def test_what_is_passed_over_has_a_row(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = nn.Linear.forward
    monkeypatch.setattr(passing_over, "WIDTH", 64)
    monkeypatch.setattr(passing_over, "TOKENS", 8)
    row = passing_over.measure("gpt", 8, 2, kind)
    assert row.variant == f"gpt-8-{kind}/last of 4"
    assert float(row.ratio) > 0.0
    assert nn.Linear.forward is forward  # of other models
