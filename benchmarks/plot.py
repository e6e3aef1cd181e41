"""Draw the ratios of ``benchmarks.run`` with their intervals and bounds: ``python -m benchmarks.plot PICTURE``.

Of every promise the row that was measured last, from ``benchmarks/results/step.csv``.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.table import RESULTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw", "latest"]

HELD, MISSED = "#2a6fb0", "#c0392b"


def latest(path: Path) -> list[dict[str, str]]:
    """Return the rows with a bound, the last one of each promise, in order of opponent and model."""
    with path.open(newline="") as file:
        found = {(row["shape"], row["variant"]): row for row in csv.DictReader(file) if row["bound"]}
    return sorted(found.values(), key=lambda row: (_opponent(row), row["shape"], row["variant"]))


def draw(rows: list[dict[str, str]]) -> Figure:
    """Return a picture: a line per promise, its ratio with the 95 % interval, its bound as a stroke."""
    from matplotlib.figure import Figure  # installed with `.[dev]` only

    figure = Figure(figsize=(8, 0.24 * len(rows) + 1.0), layout="constrained")
    axes = figure.subplots()
    for position, row in enumerate(rows):
        ratio, lo, hi, bound = (float(row[key]) for key in ("ratio", "lo", "hi", "bound"))
        colour = MISSED if row["verdict"] == "FAIL" else HELD
        axes.errorbar(ratio, position, xerr=[[ratio - lo], [hi - ratio]], fmt="o", markersize=4, color=colour)
        axes.plot([bound, bound], [position - 0.4, position + 0.4], color="black", linewidth=1.5)
    axes.set_yticks(range(len(rows)), [_label(row) for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(left=0.0)
    axes.axvline(1.0, color="lightgrey", linewidth=0.8, zorder=0)
    axes.set_xlabel("time of a step, engine / other side (95 % interval); black: at most; red: bound missed")
    return figure


def _opponent(row: dict[str, str]) -> str:
    return row["variant"].partition("/")[2]


def _label(row: dict[str, str]) -> str:
    engine, _, opponent = row["variant"].partition("/")
    model, _, tokens = row["shape"].partition("-")
    return f"stage {engine.removeprefix('engine')} / {opponent}, {model}, {tokens.removesuffix('tok')} tokens"


def main() -> None:
    """Draw the committed rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, help="file to write, .png or .svg")
    draw(latest(RESULTS / "step.csv")).savefig(parser.parse_args().picture, dpi=120)


if __name__ == "__main__":
    main()
