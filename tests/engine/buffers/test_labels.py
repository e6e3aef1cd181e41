"""A trace says which unit is gathered, reduced, stepped and published."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lightning_zero.engine.buffers.labels import label
from lightning_zero.engine.engine import ZeroEngine
from tests import worlds
from tests.references import TinyGPT, token_loss


def _trace(rank: int, world: int, stage: int) -> set[str]:
    engine = ZeroEngine(stage, units=["Block"])
    module = engine.shard(TinyGPT())
    optimizer = engine.attach(torch.optim.AdamW(module.parameters()))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for step in range(2):
            token_loss(module, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {event.key for event in profiler.key_averages() if event.key.startswith("zero: ")}


@pytest.mark.parametrize("stage", [2, 3], ids="stage{}".format)
def test_a_profile_of_two_steps_names_the_units(stage: int) -> None:
    works = ("gather", "wait for", "reduce", "step", "publish") if stage == 3 else ("reduce", "step", "publish")
    for labels in worlds.run(_trace, 2, stage):
        assert {f"zero: {work} blocks.{block}" for work in works for block in (0, 1)} <= labels


def test_without_a_profiler_nothing_is_recorded() -> None:
    assert isinstance(label("gather", "blocks.0"), nullcontext)
