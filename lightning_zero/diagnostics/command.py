"""The command ``report``: a machine, its rates and working features, to be pasted into an issue."""

from __future__ import annotations

import json as json_format
from collections.abc import Callable
from functools import partial
from pathlib import Path

from lightning_zero.diagnostics import machine, rates

__all__ = ["report"]

Section = dict[str, str]


def report(disk: Path | None = None, *, ranks: int | None = None, measure: bool = True, json: bool = False) -> None:
    """Print versions, devices, settings, rates, and which features work here; made to be pasted into an issue.

    Takes some seconds. Nothing is written, but for 256 MiB below ``disk``, which leave no file behind. A part that
    fails is a line of the report.

    Args:
        disk: Directory on a local disk, as for ``Offload(path=...)``: its rates are measured.
        ranks: Processes between which collectives are measured; by default one per GPU, or two on a CPU.
        measure: Measure rates.
        json: Print JSON instead of text.
    """
    if ranks is not None and ranks < 2:
        raise ValueError(f"`--ranks={ranks}`: collectives are measured between at least 2 processes.")
    if disk is not None and not disk.is_dir():
        raise ValueError(f"`--disk={disk}` is not a directory. Give one on a local disk.")
    sections = {
        "versions": _tried("versions", machine.versions),
        "devices": _tried("devices", machine.devices),
        "settings": machine.settings(),
        "works": _tried("features", machine.features),
    }
    if measure:
        measured = {
            **_tried("copies and steps", rates.copies_and_steps),
            **_tried("collectives", partial(rates.collectives, ranks)),
        }
        if disk is not None:
            measured |= _tried(f"disk {disk}", partial(rates.disk, disk))
        sections["rates"] = measured
    print(json_format.dumps(sections, indent=1) if json else _text(sections))


def _tried(name: str, call: Callable[[], Section]) -> Section:
    try:
        return call()
    except Exception as error:  # the report is for machines on which something fails
        return {name: f"failed: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"}


def _text(sections: dict[str, Section]) -> str:
    lines = []
    for title, section in sections.items():
        width = max((len(name) for name in section), default=0)
        lines += [title, *(f"  {name:<{width}}  {value}" for name, value in section.items())]
        if not section:
            lines.append("  none")
    return "\n".join(lines)
