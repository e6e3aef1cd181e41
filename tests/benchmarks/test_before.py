from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import before

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_steps_of_two_checkouts_are_timed_in_turns() -> None:
    timings = before.measure(ROOT, model="tiny", tokens=64, stage=3, pairs=3)
    assert len(timings.ours) == len(timings.theirs) == 3
    assert timings.disagreement == 0.0


class _FakeWorld:
    """Steps whose losses are those of no other world."""

    made = 0

    def __init__(self, *_: Any) -> None:
        _FakeWorld.made += 1
        self._loss = float(_FakeWorld.made)

    def step(self, number: int) -> tuple[float, list[float]]:
        return 0.1, [self._loss]

    def close(self) -> None:
        pass


def test_commits_that_train_differently_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(before, "_World", _FakeWorld)
    with pytest.raises(RuntimeError, match="losses of the two commits differ"):
        before.measure(ROOT, model="tiny", tokens=64, stage=1, pairs=1)
