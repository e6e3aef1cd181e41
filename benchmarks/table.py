"""Rows of results: printed one per line and appended to ``benchmarks/results/*.csv``."""

from __future__ import annotations

import csv
import datetime
import platform
import subprocess
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch

__all__ = ["Row", "append", "heading"]

RESULTS = Path(__file__).parent / "results"
_ROOT = Path(__file__).parents[1]


def device_name() -> str:
    """Return the name of the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def commit() -> str:
    """Return the short hash of the checkout, with a plus when files other than results differ from it."""
    short = _git("rev-parse", "--short", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)benchmarks/results")
    return f"{short}+" if short and changed else short or "unknown"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=_ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _today() -> str:
    return datetime.datetime.now(tz=datetime.UTC).date().isoformat()


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured thing; numbers are text as printed. ``ratio`` is to the opponent, ``lo`` to ``hi`` its interval."""

    what: str
    variant: str
    shape: str
    dtype: str
    world: int
    metric: str
    unit: str
    p20: str = ""
    p50: str = ""
    p80: str = ""
    ratio: str = ""
    lo: str = ""
    hi: str = ""
    bound: str = ""
    verdict: str = ""
    device: str = field(default_factory=device_name)
    torch: str = torch.__version__
    commit: str = field(default_factory=commit)
    date: str = field(default_factory=_today)

    def __str__(self) -> str:
        """Return one line of the printed table."""
        interval = f"{self.lo} .. {self.hi}" if self.lo else ""
        return _LINE.format(
            self.what, self.variant, self.shape, self.p20, self.unit, self.ratio, interval, self.bound, self.verdict
        )


_LINE = "{:<12} {:<16} {:<14} {:>9} {:<5} {:>6}  {:<14} {:>5}  {}"


def heading() -> str:
    """Return the line above printed rows."""
    return _LINE.format("what", "variant", "shape", "p20", "unit", "ratio", "95 % interval", "bound", "verdict")


def append(rows: list[Row], name: str) -> None:
    """Append rows to ``results/<name>.csv``, with a header when the file is new."""
    path = RESULTS / f"{name}.csv"
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Row)], lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
