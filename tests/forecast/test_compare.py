from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_zero import Setting, SettingForecast, Sharding
from lightning_zero.forecast.compare import comparison, forecast_peak, logged_memory

GIB = 2**30


def _forecast(host: int = 0, **stages: Any) -> SettingForecast:
    return SettingForecast(
        setting=Setting(sharding=Sharding.of(2)),
        is_own=True,
        device={"parameters": 2 * GIB, "gradients": 0, "optimizer": 4 * GIB, "buffers": 0},
        host={"parameters": 0, "gradients": 0, "optimizer": host},
        peak_bytes=10 * GIB,
        at_peak={},
        phase="backward",
        module="",
        sent_bytes=0,
        sent_across_nodes=None,
        **stages,
    )


ROWS = [
    {"memory/parameters_GiB": 2.0, "memory/optimizer_GiB": 4.0, "memory/peak_GiB": 9.0, "time/step_s": 1.0},
    {"memory/parameters_GiB": 2.0, "memory/optimizer_GiB": 4.1, "memory/peak_GiB": 11.0, "time/step_s": 1.0},
]


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_the_highest_of_a_log_is_read(tmp_path: Path, kind: type[Any]) -> None:
    logger = kind(tmp_path)
    for step, row in enumerate(ROWS):
        logger.log_metrics(row, step=step)
    logger.finalize("success")
    found = logged_memory(Path(logger.log_dir))
    assert found == pytest.approx({"parameters": 2.0, "optimizer": 4.1, "peak": 11.0})


def test_a_table_has_a_row_for_each_that_was_logged() -> None:
    lines = comparison(_forecast(), {"parameters": 2.0, "optimizer": 4.1, "peak": 9.5}).splitlines()
    assert lines[0].split() == ["GiB", "forecast", "measured", "measured", "is"]
    assert lines[1].split() == ["parameters", "2.0000", "2.0000", "the", "same"]
    assert lines[2].split() == ["optimizer", "4.0000", "4.1000", "2.5", "%", "more"]
    assert lines[3].split() == ["peak", "10.0000", "9.5000", "5.0", "%", "less"]


def test_a_log_of_a_pipeline_is_compared_with_its_stage_0() -> None:
    """It was compared with the stage of the highest peak."""
    stages = [{"parameters": GIB, "optimizer": 2 * GIB}, {"parameters": 2 * GIB, "optimizer": 4 * GIB}]
    forecast = _forecast(pipeline_stage=1, peak_by_stage=[5 * GIB, 10 * GIB], persistent_by_stage=stages)
    lines = comparison(forecast, {"parameters": 1.0, "optimizer": 2.0, "peak": 5.0}).splitlines()
    assert lines[0] == "Both are those of rank 0, in pipeline stage 0."
    assert [line.split()[-2:] for line in lines[2:]] == [["the", "same"]] * 3


def test_host_memory_and_a_peak_that_was_not_logged() -> None:
    text = comparison(_forecast(GIB), {"parameters": 2.0, "optimizer": 4.0, "host_optimizer": 1.0})
    assert "host_optimizer        1.0000      1.0000        the same" in text
    assert "peak                 10.0000  not logged\n" in text
    assert text.endswith("A peak is logged on GPUs alone.")


def test_a_log_without_memory_or_none_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no log of a run"):
        logged_memory(tmp_path)
    (tmp_path / "metrics.csv").write_text("step,loss\n0,1.0\n")
    with pytest.raises(ValueError, match="Train with `ZeroMonitor` among the callbacks"):
        logged_memory(tmp_path / "metrics.csv")


def test_the_peak_of_a_forecast_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "forecast.json"
    rows: list[dict[str, Any]] = [{"is_own": False, "peak_bytes": GIB}, {"is_own": True, "peak_bytes": 3 * GIB}]
    path.write_text(json.dumps({"settings": rows, "world_size": 4}))
    assert forecast_peak(path) == (3.0, 4)
    rows[1]["peak_by_stage"] = [2 * GIB, 3 * GIB]
    path.write_text(json.dumps({"settings": rows, "world_size": 4}))
    assert forecast_peak(path) == (2.0, 4)  # `ZeroMonitor` measures on rank 0
    none = [{"is_own": True, "peak_bytes": None}]
    for text in ("{}", "[]", "no", *(json.dumps({"settings": some, "world_size": 4}) for some in (rows[:1], none))):
        path.write_text(text)
        with pytest.raises(ValueError, match="is no forecast"):
            forecast_peak(path)
    with pytest.raises(ValueError, match="estimate --config=run.yaml"):
        forecast_peak(tmp_path / "missing.json")
