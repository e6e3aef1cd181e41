"""Segments of a few tensors of all shapes, each element its own position, and a directory that two ranks wrote."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from lightning_zero.checkpoint.planner import Segment, SegmentSavePlanner, SegmentWriter
from lightning_zero.layout import FlatLayout

__all__ = ["SHAPES", "expected", "save", "segments"]

SHAPES = {"embedding": (17, 59), "conv": (5, 3, 3, 7), "bias": (3,), "w": (32, 64), "scale": (), "nothing": (0, 4)}


def segments(rank: int, world: int, *, filled: bool) -> dict[str, Segment]:
    layout = FlatLayout.build(list(SHAPES.items()), world)
    segments = {}
    for slot, segment in zip(layout.slots, layout.segments(rank), strict=True):
        values = torch.arange(segment.start, segment.stop, dtype=torch.float32)
        local = values if filled else torch.full_like(values, -1.0)
        segments[f"model.{slot.name}"] = Segment(local, segment.start, torch.Size(slot.shape))
    return segments


def save(rank: int, world: int, path: str) -> None:
    paths: Any = {f"model.{name}": ("model", name) for name in [*SHAPES, "tied"]} | {"model.extra": ("model", "extra")}
    values: dict[str, Any] = dict(segments(rank, world, filled=True))
    if rank == world - 1:
        values["model.extra"] = {"of": "the last rank"}
    dcp.save(
        values,
        storage_writer=SegmentWriter(
            Path(path), aliases={"model.tied": "model.w"}, order=list(paths), world_size=world
        ),
        planner=SegmentSavePlanner(paths),
        no_dist=world == 1,
    )


def expected(name: str) -> torch.Tensor:
    return torch.arange(prod(SHAPES[name]), dtype=torch.float32).view(SHAPES[name])
