"""A forecast beside the memory that a run has logged."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from lightning_zero.forecast.settings import SettingForecast

__all__ = ["FORECAST_PEAK", "ForecastPeak", "comparison", "forecast_peak", "logged_memory"]

FORECAST_PEAK = "memory/forecast_peak_GiB"
_GIB = 2.0**30
_PREFIX, _SUFFIX = "memory/", "_GiB"
_COMPARED = (
    "parameters",
    "optimizer",
    "host_parameters",
    "host_optimizer",
    "disk_parameters",
    "disk_optimizer",
    "peak",
)


def logged_memory(path: Path) -> dict[str, float]:
    """Return the most that a run has logged of each ``memory/*_GiB``, in GiB, without the ends of the names.

    Args:
        path: Folder with TensorBoard's events, or with ``metrics.csv`` of ``CSVLogger``, or that file.

    Raises:
        ValueError: There is no such log, or no row of ``ZeroMonitor`` in it.
        RuntimeError: tensorboard is not installed.
    """
    table = path / "metrics.csv" if path.is_dir() else path
    if table.is_file() and table.suffix == ".csv":
        found = _of_table(table)
    elif path.is_dir() and any(path.glob("events.out.tfevents.*")):
        found = _of_events(path)
    else:
        raise ValueError(
            f"`--compare={path}` has no log of a run. Name the folder that a logger has written, which has"
            " `events.out.tfevents.*` or `metrics.csv`."
        )
    if not found:
        raise ValueError(
            f"`--compare={path}` has no memory in it. Train with `ZeroMonitor` among the callbacks, for at least"
            " `log_every_n_steps` steps."
        )
    return found


def _of_table(path: Path) -> dict[str, float]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return _highest((name, float(value)) for row in rows for name, value in row.items() if _is_memory(name) and value)


def _of_events(path: Path) -> dict[str, float]:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise RuntimeError("`--compare` needs tensorboard to read events: `pip install tensorboard`.") from error
    events = EventAccumulator(str(path), size_guidance={"scalars": 0})
    events.Reload()
    names = [name for name in events.Tags()["scalars"] if _is_memory(name)]
    return _highest((name, float(event.value)) for name in names for event in events.Scalars(name))


def _is_memory(name: str | None) -> bool:
    return name is not None and name.startswith(_PREFIX) and name.endswith(_SUFFIX)


def _highest(values: Iterable[tuple[str, float]]) -> dict[str, float]:
    most: dict[str, float] = {}
    for name, value in values:
        short = name.removeprefix(_PREFIX).removesuffix(_SUFFIX)
        most[short] = max(value, most.get(short, value))
    return most


def comparison(forecast: SettingForecast, logged: dict[str, float]) -> str:
    """Return a table: the forecast of a setting, the logged memory (GiB), and their difference in percent.

    Gradients are left out: rows are logged behind the step, which frees them at stages 2 and 3. A log is that of rank
    0, so that of a pipeline is compared with the forecast of its stage 0.
    """
    ours_of = forecast.of_rank_0
    unit, size = ("GiB", _GIB) if ours_of["peak"] >= _GIB else ("MiB", _GIB / 1024)
    lines = [f"{unit:<16}{'forecast':>12}{'measured':>12}{'measured is':>16}"]
    if forecast.peak_by_stage:
        lines.insert(0, "Both are those of rank 0, in pipeline stage 0.")
    for name in _COMPARED:
        ours, theirs = ours_of.get(name, 0) / size, logged.get(name)
        theirs = None if theirs is None else theirs * _GIB / size
        if theirs is None and name.startswith(("host_", "disk_")):
            continue
        measured = "not logged" if theirs is None else f"{theirs:.4f}"
        lines.append(f"{name:<16}{ours:>12.4f}{measured:>12}{_difference(ours, theirs):>16}".rstrip())
    if "peak" not in logged:
        lines.append("A peak is logged on GPUs alone.")
    return "\n".join(lines)


def _difference(ours: float, theirs: float | None) -> str:
    if theirs is None or not ours:
        return ""
    percent = 100 * (theirs / ours - 1)
    return "the same" if abs(percent) < 0.05 else f"{abs(percent):.1f} % {'more' if percent > 0 else 'less'}"


class ForecastPeak(NamedTuple):
    """The peak of a forecast.

    Attributes:
        gib: The peak in GiB.
        world_size: Number of ranks that it is for.
    """

    gib: float
    world_size: int


def forecast_peak(path: Path) -> ForecastPeak:
    """Return the peak of rank 0 in a forecast of ``estimate --json=true``: that of the run's own setting.

    Raises:
        ValueError: The file is no such forecast.
    """
    try:
        content = json.loads(path.read_text())
        own = next(row for row in content["settings"] if row["is_own"])
        peak = [*own.get("peak_by_stage", ()), own["peak_bytes"]][0]
        return ForecastPeak(float(peak) / _GIB, int(content["world_size"]))
    except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        raise ValueError(
            f"`ZeroMonitor(forecast={str(path)!r})` is no forecast ({type(error).__name__}: {error}). Write one with"
            " `python -m lightning_zero estimate --config=run.yaml --world=8 --json=true > forecast.json`."
        ) from error
