"""Draw a grid of data and tensor ranks, and which bytes go where: ``python -m benchmarks.grid PICTURE``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Place", "draw", "places"]

DATA, TENSOR = 4, 2
BLUE, ORANGE, GREY, LIGHT = "#2a6fb0", "#d9822b", "#b8b8b8", "#ececec"


@dataclass(frozen=True)
class Place:
    """A rank of a grid and the ranges that it steps, as fractions of the parameters' elements.

    Attributes:
        rank: Global rank.
        data_rank: Ranks with the same one have the same batches.
        tensor_rank: Ranks with the same one have the same parts of cut parameters.
        part: The part of the cut parameters that this rank computes with.
        cut_shard: The range of that part, as one of the whole, that it steps.
        whole_shard: The range of the parameters that are not cut, that it steps.
    """

    rank: int
    data_rank: int
    tensor_rank: int
    part: tuple[Fraction, Fraction]
    cut_shard: tuple[Fraction, Fraction]
    whole_shard: tuple[Fraction, Fraction]


def places(data: int, tensor: int) -> Iterator[Place]:
    """Yield the ranks of a grid: tensor ranks are neighbours."""
    for rank in range(data * tensor):
        data_rank, tensor_rank = divmod(rank, tensor)
        part = Fraction(tensor_rank, tensor)
        shard = part + Fraction(data_rank, data * tensor)
        yield Place(
            rank=rank,
            data_rank=data_rank,
            tensor_rank=tensor_rank,
            part=(part, part + Fraction(1, tensor)),
            cut_shard=(shard, shard + Fraction(1, data * tensor)),
            whole_shard=(Fraction(rank, data * tensor), Fraction(rank + 1, data * tensor)),
        )


def draw() -> Figure:
    """Return the picture of 4 data ranks with 2 tensor ranks each."""
    from matplotlib.figure import Figure  # installed with `.[dev]` only

    figure = Figure(figsize=(10, 6.4), layout="constrained")
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set_xlim(-1.1, 3.9)
    axes.set_ylim(DATA + 0.15, -0.55)
    for place in places(DATA, TENSOR):
        _draw_rank(axes, place)
    for tensor_rank in range(TENSOR):
        axes.text(_left(tensor_rank) + 0.5, -0.3, f"tensor rank {tensor_rank}", ha="center", weight="bold")
    for data_rank in range(DATA):
        axes.text(-0.15, data_rank + 0.4, f"data rank {data_rank}\nbatch {data_rank}", ha="right", va="center")
        _arrow(axes, (1.02, data_rank + 0.4), (1.38, data_rank + 0.4), ORANGE)
    for tensor_rank in range(TENSOR):
        for data_rank in range(DATA - 1):
            x = _left(tensor_rank) + 0.5
            _arrow(axes, (x, data_rank + 0.8), (x, data_rank + 1.02), BLUE)
    _draw_legend(axes)
    return figure


def _left(tensor_rank: int) -> float:
    return 1.4 * tensor_rank


def _draw_rank(axes: Axes, place: Place) -> None:
    from matplotlib.patches import Rectangle

    left, top = _left(place.tensor_rank), place.data_rank + 0.02
    axes.add_patch(Rectangle((left, top), 1, 0.78, fill=False, edgecolor="black"))
    axes.text(left + 0.04, top + 0.14, f"rank {place.rank}", fontsize=9, va="center")
    bars = ((0.25, place.part, place.cut_shard, BLUE), (0.52, (0, 1), place.whole_shard, GREY))
    for below, present, stepped, colour in bars:
        for (start, stop), face in (((0, 1), "white"), (present, LIGHT), (stepped, colour)):
            axes.add_patch(
                Rectangle(
                    (left + 0.04 + 0.92 * float(start), top + below), 0.92 * float(stop - start), 0.2,
                    facecolor=face, edgecolor="black", linewidth=0.5,
                )
            )  # fmt: skip


def _arrow(axes: Axes, start: tuple[float, float], stop: tuple[float, float], colour: str) -> None:
    axes.annotate("", stop, start, arrowprops={"arrowstyle": "<->", "color": colour, "linewidth": 2})


def _draw_legend(axes: Axes) -> None:
    from matplotlib.patches import Rectangle

    notes = (
        ("upper bar: cut parameters, C elements\nlower bar: all others, R elements", None),
        ("in the rank's layers when they compute", LIGHT),
        ("cut parameters whose masters and\noptimizer states the rank has", BLUE),
        ("the same of all others", GREY),
    )
    for row, (text, colour) in enumerate(notes):
        if colour is not None:
            axes.add_patch(Rectangle((2.55, 0.5 * row - 0.02), 0.14, 0.16, facecolor=colour, edgecolor="black"))
        axes.text(2.75 if colour else 2.55, 0.5 * row + 0.06, text, fontsize=9, va="center")
    sent = (
        ("between tensor ranks, in every region:\nsums of activations, 4 A (T-1)/T bytes\nper micro-batch", ORANGE),
        (
            "between data ranks, in every step:\ncut parameters and gradients,\n(p + g) C/T (D-1)/D bytes, stages 0-2",
            BLUE,
        ),
        (
            "between all ranks, in every step:\nother parameters and gradients,\n(p + g) R (N-1)/N bytes, stages 0-2",
            GREY,
        ),
    )
    for row, (text, colour) in enumerate(sent):
        y = 2.2 + 0.65 * row
        _arrow(axes, (2.52, y), (2.72, y), colour)
        axes.text(2.75, y, text, fontsize=9, va="center")


def main() -> None:
    """Draw the grid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, help="file to write, .png or .svg")
    draw().savefig(parser.parse_args().picture, dpi=100)


if __name__ == "__main__":
    main()
