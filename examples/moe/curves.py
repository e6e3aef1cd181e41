"""Draw runs: ``python examples/moe/curves.py runs/moe-dense runs/moe-sparse PICTURE``.

On the left the validation losses, on the right the load of the most popular expert of each layer. A run is a folder of
``CSVLogger``; of several versions the last one is drawn.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw", "series"]

COLOURS = ("#2a6fb0", "#d9822b", "#4c9f50", "#8a5fb0")
LOSS, LOAD = "val/loss", "/load_max_over_mean"


def series(run: Path) -> dict[str, dict[int, float]]:
    """Return what a run has logged: by name, a value by step.

    Raises:
        ValueError: There is no validation loss.
    """
    files = sorted(run.glob("version_*/metrics.csv"), key=lambda file: int(file.parent.name.partition("_")[2]))
    if not files:
        raise ValueError(f"`{run}` has no version_*/metrics.csv. Give the folder of a run with a `CSVLogger`.")
    found: dict[str, dict[int, float]] = {}
    with files[-1].open() as rows:
        for row in csv.DictReader(rows):
            for name, value in row.items():
                if value and name not in ("epoch", "step"):
                    found.setdefault(name, {})[int(row["step"]) + 1] = float(value)
    if LOSS not in found:
        raise ValueError(f"`{files[-1]}` has no column `{LOSS}`. Let the run come to its first validation.")
    return found


def draw(runs: list[Path]) -> Figure:
    """Return a picture with a line for each run, and one for each layer with experts."""
    from matplotlib.figure import Figure  # installed with `.[dev]` only

    figure = Figure(figsize=(10, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for run, colour in zip(runs, COLOURS, strict=False):
        logged = series(run)
        losses = logged[LOSS]
        left.plot(list(losses), list(losses.values()), color=colour, marker=".", label=run.name.removeprefix("moe-"))
        step, loss = list(losses.items())[-1]
        left.annotate(f"{loss:.3f}", (step, loss), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
        layers = [name for name in logged if name.endswith(LOAD)]
        for name, layer_colour in zip(layers, COLOURS, strict=False):
            label = name.removeprefix("moe/").removesuffix(LOAD)
            right.plot(list(logged[name]), list(logged[name].values()), color=layer_colour, label=label)
    left.set_ylabel("validation loss (nats per byte)")
    right.set_ylabel("load of the most popular expert,\nby the mean load")
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    left.legend(frameon=False)
    if right.lines:
        right.legend(frameon=False, fontsize=7)
    return figure


def main() -> None:
    """Draw the runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of CSVLogger")
    parser.add_argument("picture", type=Path, help="file to write, .png or .svg")
    args = parser.parse_args()
    draw(args.runs).savefig(args.picture, dpi=100)


if __name__ == "__main__":
    main()
