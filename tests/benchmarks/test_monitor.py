"""Steps with and without a monitor, in small."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import monitor
from benchmarks.monitor import Fit
from tests import worlds


def _fit(rank: int, world: int, folder: str) -> list[float]:
    return monitor.fit(rank, Fit(model="tiny", tokens=64, world_size=world, pairs=3), folder)


def test_steps_with_a_monitor_write_rows_in_turns(tmp_path: Path) -> None:
    (seconds,) = worlds.run(_fit, 1, str(tmp_path))
    assert len(seconds) == 2 * (monitor.WARMUP_PAIRS + 3)
    (table,) = tmp_path.rglob("metrics.csv")
    steps = [int(line.split(",")[place]) for place in _place(table) for line in table.read_text().splitlines()[1:]]
    assert steps == [0, 3, 4, 7, 8]


def _place(table: Path) -> list[int]:
    return [table.read_text().splitlines()[0].split(",").index("step")]


@pytest.mark.parametrize(("cost", "verdict"), [(1.0, "ok"), (1.2, "MISSED")])
def test_the_ratio_is_that_of_steps_with_a_monitor(cost: float, verdict: str) -> None:
    of_pair = [cost, 1.0, 1.0, cost]  # the kind that begins changes
    row = monitor.row_of(Fit(pairs=20), [one * (1 + 0.001 * place) for place, one in enumerate(of_pair * 11)])
    assert float(row.ratio) == pytest.approx(cost, abs=0.02)
    assert (row.what, row.bound, row.verdict) == ("monitor", "1.01", verdict)
