"""Draw the bytes per parameter of each ZeRO stage: ``python -m benchmarks.stages PICTURE``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["bytes_per_parameter", "draw"]

WORLDS = (1, 2, 4, 8, 16, 32, 64)
AT_BARS = 8
PARTS = {"parameters": "#2a6fb0", "gradients": "#d9822b", "masters and optimizer states": "#4c9f50"}


def bytes_per_parameter(stage: int, world: int) -> dict[str, float]:
    """Return the bytes of each part on a rank, for 16-bit parameters with fp32 gradients under AdamW."""
    share = 1 / world
    return {
        "parameters": 2 * (share if stage >= 3 else 1),
        "gradients": 4 * (share if stage >= 2 else 1),
        "masters and optimizer states": 12 * (share if stage >= 1 else 1),
    }


def draw() -> Figure:
    """Return a picture: the parts of each stage on eight ranks, and their sums on more and more ranks."""
    from matplotlib.figure import Figure  # installed with `.[dev]` only

    figure = Figure(figsize=(10, 3.4), layout="constrained")
    bars, lines = figure.subplots(1, 2)
    for stage in range(4):
        left = 0.0
        for part, nbytes in bytes_per_parameter(stage, AT_BARS).items():
            bars.barh(
                f"stage {stage}", nbytes, left=left, color=PARTS[part], label=part if stage == 0 else f"_{part}{stage}"
            )
            left += nbytes
        bars.text(left + 0.2, stage, f"{left:.4g}", va="center", fontsize=9)
    bars.invert_yaxis()
    bars.set_xlim(0, 20)
    bars.set_xlabel(f"bytes per parameter on each of {AT_BARS} ranks")
    bars.legend(fontsize=8, frameon=False, loc="lower right")
    for stage, colour in enumerate(("#777777", "#4c9f50", "#d9822b", "#2a6fb0")):
        sums = [sum(bytes_per_parameter(stage, world).values()) for world in WORLDS]
        lines.plot(WORLDS, sums, marker="o", markersize=3, color=colour, label=f"stage {stage}")
    lines.set_xscale("log", base=2)
    lines.set_xticks(WORLDS, [str(world) for world in WORLDS])
    lines.set_ylim(0.0, 25.0)
    lines.set_xlabel("ranks")
    lines.set_ylabel("bytes per parameter on each")
    lines.legend(fontsize=8, frameon=False, loc="upper right")
    for axes in (bars, lines):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> None:
    """Draw the stages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, help="file to write, .png or .svg")
    draw().savefig(parser.parse_args().picture, dpi=100)


if __name__ == "__main__":
    main()
