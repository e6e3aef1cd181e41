"""A pipeline's schedule as a picture and in words, from the plan that a run uses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from PIL import Image, ImageDraw

from lightning_zero.config import Pipeline
from lightning_zero.parallel.pipeline.schedule.plan import Span, bubble_share, compute_order, simulate

__all__ = ["draw_schedule", "pipeline"]

_FORWARD = ((66, 133, 200), (120, 175, 225), (40, 95, 160), (160, 200, 235))  # by chunk of the stage
_BACKWARD = ((90, 160, 90), (145, 200, 140), (60, 120, 60), (180, 220, 175))
_WEIGHT = ((225, 150, 70), (240, 185, 125), (180, 110, 40), (250, 210, 165))
_BUBBLE = (225, 225, 225)
_COLOURS = {"forward": _FORWARD, "backward": _BACKWARD, "backward_input": _BACKWARD, "backward_weight": _WEIGHT}
_LETTERS = {"forward": "F", "backward": "B", "backward_input": "B", "backward_weight": "W"}
_HEIGHT, _MARGIN, _LABEL = 36, 8, 64


def pipeline(
    stages: int = 4,
    microbatches: int = 8,
    *,
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zb_h1"] = "1f1b",
    chunks: int | None = None,
    forward: float = 1.0,
    backward: float = 2.0,
    weight: float | None = None,
    plot: Path | None = None,
) -> None:
    """Show the schedule of a pipeline: a row per stage, a block per micro-batch, the time without work in grey.

    Args:
        stages: Number of stages.
        microbatches: Micro-batches of a step.
        schedule: As in ``Pipeline``.
        chunks: Chunks of the model on every stage.
        forward: Time of a stage's forward.
        backward: Time of a stage's backward.
        weight: The part of it for gradients of weights, where the schedule computes them apart; by default one half.
        plot: Picture to write (``.png``); without it the schedule is printed.

    Raises:
        ValueError: A time is not above 0, or an option does not fit the others.
    """
    _check_times(forward, backward, weight)
    options = Pipeline(stages=stages, microbatches=microbatches, schedule=schedule, chunks=chunks)
    orders = compute_order(options.schedule, stages, options.num_chunks, microbatches)
    scale = stages / options.num_chunks  # a chunk is a part of a stage
    part = None if weight is None else weight * scale
    _, spans = simulate(orders, options.num_chunks, forward=forward * scale, backward=backward * scale, weight=part)
    if plot is not None:
        draw_schedule(spans, stages).save(plot)
    else:
        print("\n".join(_words(spans, stages)))
    print(f"bubble: {bubble_share(spans):.1%} of the time; (p - 1) / (m + p - 1) is"
          f" {(stages - 1) / (microbatches + stages - 1):.1%}")  # fmt: skip


def _check_times(forward: float, backward: float, weight: float | None) -> None:
    for name, seconds in (("forward", forward), ("backward", backward)):
        if not 0 < seconds < math.inf:
            raise ValueError(f"`--{name}={seconds:g}` must be a time above 0.")
    if weight is not None and not 0 < weight < backward:
        raise ValueError(
            f"`--weight={weight:g}` must be above 0 and below `--backward={backward:g}`, of which it is a part."
        )


def _words(spans: list[Span], stages: int) -> list[str]:
    """Return one line per stage: ``F1.0`` is the forward of chunk 1, micro-batch 0, ``W`` are gradients of weights."""
    rows = []
    for rank in range(stages):
        own = [span.action for span in spans if span.rank == rank]
        rows.append(f"stage {rank}: " + " ".join(f"{_LETTERS[one.kind]}{one.chunk}.{one.microbatch}" for one in own))
    return rows


def draw_schedule(spans: list[Span], stages: int) -> Image.Image:
    """Return a picture of a simulated run."""
    end = max(span.stop for span in spans)
    shortest = min(span.stop - span.start for span in spans)
    unit = 22 / shortest  # pixels per unit of time
    width = int(end * unit) + _LABEL + 2 * _MARGIN
    image = Image.new("RGB", (width, stages * (_HEIGHT + _MARGIN) + _MARGIN), "white")
    draw = ImageDraw.Draw(image)
    for rank in range(stages):
        top = _MARGIN + rank * (_HEIGHT + _MARGIN)
        draw.text((_MARGIN, top + _HEIGHT // 3), f"stage {rank}", fill="black")
        draw.rectangle((_LABEL, top, _LABEL + end * unit, top + _HEIGHT), fill=_BUBBLE)
    for span in spans:
        _draw_block(draw, span, stages, unit)
    return image


def _draw_block(draw: ImageDraw.ImageDraw, span: Span, stages: int, unit: float) -> None:
    top = _MARGIN + span.rank * (_HEIGHT + _MARGIN)
    colours = _COLOURS[span.action.kind]
    left, right = _LABEL + span.start * unit, _LABEL + span.stop * unit
    colour = colours[span.action.chunk // stages % len(colours)]
    draw.rectangle((left, top, right, top + _HEIGHT), fill=colour, outline="white")
    draw.text((left + 4, top + _HEIGHT // 3), str(span.action.microbatch), fill="black")
