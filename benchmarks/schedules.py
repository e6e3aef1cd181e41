"""Draw the learning rates of the package's schedules: ``python -m benchmarks.schedules PICTURE``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from lightning_zero import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from lightning_zero.schedules import Schedule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SCHEDULES", "draw", "rates"]

STEPS = 100

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Schedule]] = {
    "LRRangeTest(min_lr=0.1, step_size=20)": lambda o: LRRangeTest(o, 0.1, 20),
    "the same, staircase=True": lambda o: LRRangeTest(o, 0.1, 20, lr_range_test_staircase=True),
    "OneCycle(0.1, 1.0, first_step_size=30, decay_lr_rate=1, decay_step_size=20)": lambda o: OneCycle(
        o, 0.1, 1.0, cycle_first_step_size=30, decay_lr_rate=1.0, decay_step_size=20
    ),
    "the same, cycle_first_stair_count=5": lambda o: OneCycle(
        o, 0.1, 1.0, cycle_first_step_size=30, cycle_first_stair_count=5, decay_lr_rate=1.0, decay_step_size=20
    ),
    "WarmupLR(max_lr=1.0, num_steps=30)": lambda o: WarmupLR(o, 0.0, 1.0, 30),
    "the same, warmup_type='linear'": lambda o: WarmupLR(o, 0.0, 1.0, 30, "linear"),
    "WarmupDecayLR(total_num_steps=100, max_lr=1.0, num_steps=30)": lambda o: WarmupDecayLR(o, STEPS, 0.0, 1.0, 30),
    "WarmupCosineLR(total_num_steps=100, num_steps=30)": lambda o: WarmupCosineLR(o, STEPS, 0.0, 30),
}
"""By label, in pairs that share a plot."""


def rates(make: Callable[[torch.optim.Optimizer], Schedule], steps: int = STEPS) -> list[float]:
    """Return the learning rate of each step."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = make(optimizer)
    values = []
    for _ in range(steps):
        values.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
    return values


def draw() -> Figure:
    """Return a picture: a plot for each pair of schedules."""
    from matplotlib.figure import Figure  # installed with `.[dev]` only

    figure = Figure(figsize=(10, 6), layout="constrained")
    plots = figure.subplots(2, 2).flat
    labels = list(SCHEDULES)
    for axes, pair in zip(plots, zip(labels[::2], labels[1::2], strict=True), strict=True):
        for label, colour in zip(pair, ("#2a6fb0", "#d9822b"), strict=True):
            axes.step(range(STEPS), rates(SCHEDULES[label]), where="post", color=colour, label=label)
        axes.set_ylim(bottom=0.0)
        axes.set_ylim(top=axes.get_ylim()[1] * 1.25)
        axes.legend(fontsize=7, loc="upper right", frameon=False)
        axes.set_xlabel("step")
        axes.set_ylabel("learning rate")
    return figure


def main() -> None:
    """Draw the schedules."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, help="file to write, .png or .svg")
    draw().savefig(parser.parse_args().picture, dpi=100)


if __name__ == "__main__":
    main()
