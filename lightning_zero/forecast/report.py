"""A forecast as a table, as JSON and as a picture."""

from __future__ import annotations

import json
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

from lightning_zero.forecast.settings import MemoryForecast, SettingForecast

__all__ = ["aligned", "check_picture", "draw", "json_of", "new_figure", "table"]

_UNITS = {"MiB": 2**20, "GiB": 2**30}
_KINDS = ("parameters", "gradients", "optimizer", "gathered", "activations", "workspace", "buffers")
_COLOURS = ("#4285c8", "#e1964b", "#5aa05a", "#9fc5e8", "#c27ba0", "#b7b7b7", "#8e7cc3")


def table(forecast: MemoryForecast, memory: int | None = None) -> str:
    """Return a row per setting, with the bytes of a rank, and the notes; ``>`` marks the setting that was asked for.

    Bytes on disks have a column if there are any.

    Args:
        forecast: The forecast.
        memory: Bytes of the device: a column says which settings fit.
    """
    head = ["", "setting", "params", "grads", "optim", "acts", "other", "peak", "at", "host", "disk", "sent", "across"]
    unit = _unit(forecast)
    rows = [_row(one, memory, _UNITS[unit]) for one in forecast.settings]
    if memory is not None:
        head.append("fits")
    if not any(sum(one.disk.values()) for one in forecast.settings):
        place = head.index("disk")
        head, rows = _without(place, head), [_without(place, row) for row in rows]
    lines = aligned([head, *rows], left=(0, 1, head.index("at")))
    title = (
        f"{unit} per rank at the peak of a step, on {forecast.world_size} rank(s), precision {forecast.precision}; sent"
        " per step, and across nodes where a scope says so"
    )
    return "\n".join([title, *lines, *forecast.notes])


def _row(one: SettingForecast, memory: int | None, unit: int) -> list[str]:
    parts = one.at_peak
    engine = [parts[kind] for kind in ("parameters", "gradients", "optimizer")]
    other = sum(parts.get(kind, 0) for kind in ("gathered", "workspace", "buffers"))
    sizes = [_size(nbytes, unit) for nbytes in (*engine, parts.get("activations", 0), other, one.peak_bytes)]
    row = [">" if one.is_own else "", str(one.setting), *sizes, _place(one)]
    row += [_size(nbytes, unit) for nbytes in (sum(one.host.values()), sum(one.disk.values()), one.sent_bytes)]
    row.append("-" if one.sent_across_nodes is None else _size(one.sent_across_nodes, unit))
    return row if memory is None else [*row, "yes" if one.peak_bytes <= memory else "no"]


def _without(place: int, row: list[str]) -> list[str]:
    return [*row[:place], *row[place + 1 :]]


def _place(one: SettingForecast) -> str:
    """Return where the peak is: the part of the step, the module, and the stage of a pipeline."""
    stage = "" if one.pipeline_stage is None else f" (pipeline stage {one.pipeline_stage})"
    return f"{one.phase} {one.module}{stage}".strip()


def _unit(forecast: MemoryForecast) -> str:
    most = max(one.peak_bytes for one in forecast.settings)
    return "GiB" if most >= _UNITS["GiB"] else "MiB"


def _size(nbytes: int, unit: int) -> str:
    return f"{nbytes / unit:.2f}"


def json_of(forecast: MemoryForecast, memory: int | None = None) -> str:
    """Return the forecast as JSON, in bytes; ``fastest`` is the number of the fastest setting that fits."""
    content: dict[str, Any] = forecast.as_dict()
    if memory is not None:
        fastest = forecast.fastest(memory)
        content |= {"memory": memory, "fastest": None if fastest is None else list(forecast.settings).index(fastest)}
    return json.dumps(content, indent=2)


def aligned(rows: Sequence[Sequence[str]], left: Container[int]) -> list[str]:
    """Return lines in columns: those of ``left`` begin below one another, the others end so."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def check_picture(path: Path) -> None:
    """Check that a picture can be written, before anything is computed for it.

    Raises:
        ValueError: The folder does not exist, or the ending of the name is no format of a picture.
        RuntimeError: matplotlib is not installed.
    """
    if not path.parent.is_dir():
        raise ValueError(f"`--plot {path}`: the folder `{path.parent}` does not exist.")
    _, canvas = _matplotlib()
    formats = canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise ValueError(f"`--plot {path}` must end with a format of pictures: {', '.join(sorted(formats))}.")


def _matplotlib() -> tuple[Any, Any]:
    """Return matplotlib's figure and canvas."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError("`--plot` needs matplotlib: `pip install matplotlib`.") from error
    return Figure, FigureCanvasAgg


def new_figure(path: Path, size: tuple[float, float]) -> Any:
    """Return an empty figure of matplotlib that is to be written to ``path``; ``size`` is in inches.

    Raises:
        ValueError: See ``check_picture``.
        RuntimeError: matplotlib is not installed.
    """
    check_picture(path)
    make, canvas = _matplotlib()
    figure = make(figsize=size)
    canvas(figure)
    return figure


def draw(forecast: MemoryForecast, path: Path, memory: int | None = None) -> None:
    """Write a picture: a bar per setting, its parts at the peak, and a line for the memory of the device.

    Raises:
        ValueError: The folder does not exist, or the ending of the name is no format of a picture.
        RuntimeError: matplotlib is not installed.
    """
    names, unit = [str(one.setting) for one in forecast.settings], _UNITS[_unit(forecast)]
    figure = new_figure(path, (9, 1.2 + 0.34 * len(names)))
    axes = figure.add_subplot()
    starts = [0.0] * len(names)
    for kind, colour in zip(_KINDS, _COLOURS, strict=True):
        sizes = [one.at_peak.get(kind, 0) / unit for one in forecast.settings]
        axes.barh(names, sizes, left=starts, color=colour, label=kind)
        starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    if memory is not None:
        axes.axvline(memory / unit, color="black", linestyle="--", label="memory of the device")
    axes.invert_yaxis()
    axes.set_xlabel(f"{_unit(forecast)} per rank at the peak, {forecast.world_size} rank(s), {forecast.precision}")
    axes.legend(loc="lower right", fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
