"""Activation checkpointing in pipeline stages, where the activations of several micro-batches wait at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero.config import Pipeline, Schedule
from lightning_zero.lightning.strategy import ZeroStrategy
from lightning_zero.parallel.activation.checkpointing import forecast_of
from tests.contracts.test_pipeline_programs import Dropout, Program, _loader
from tests.lightning_programs import seeded, trainer
from tests.sampling import sample
from tests.worlds import run

SCHEDULES: tuple[Schedule, ...] = ("1f1b", "gpipe", "interleaved_1f1b", "zb_h1")
CASES = [
    (make, zero, schedule, policy)
    for make in (Program, Dropout)
    for zero in (1, 2, 3)
    for schedule in SCHEDULES
    for policy in ("full", "selective", "offload")
]
FAST = [(Dropout, 3, "1f1b", "offload")]


def _name(case: Any) -> str:
    return f"{case[0].__name__}-stage{case[1]}-{case[2]}-{case[3]}"


def _fit(
    rank: int, world: int, make: Any, zero: int, schedule: Schedule, checkpointing: Any
) -> tuple[dict[str, Tensor], Any]:
    pipeline = Pipeline(stages=2, schedule=schedule)
    strategy = ZeroStrategy(stage=zero, pipeline=pipeline, activation_checkpointing=checkpointing)
    lightning = trainer(rank, world, strategy, max_epochs=2, accumulate_grad_batches=2)
    module = seeded(make)
    lightning.fit(module, _loader(1, 0))
    forecast = forecast_of(module)
    chosen = None if forecast is None else (forecast.policy, forecast.needed())
    return {name: strategy.full_param(param) for name, param in module.named_parameters()}, chosen


def _assert_equal_bits(found: list[Any], expected: list[Any]) -> None:
    for (mine, _), (theirs, _) in zip(found, expected, strict=True):
        assert all(torch.equal(mine[name], value) for name, value in theirs.items())


@pytest.mark.world(2)
@pytest.mark.parametrize("case", sample(CASES, *FAST), ids=_name)
def test_policies_give_the_bits_of_a_pipeline_without(case: Any) -> None:
    make, zero, schedule, policy = case
    _assert_equal_bits(run(_fit, 2, make, zero, schedule, {"policy": policy}), run(_fit, 2, make, zero, schedule, None))


@pytest.mark.world(2)
@pytest.mark.parametrize("schedule", sample(SCHEDULES, "1f1b"))
def test_auto_counts_the_micro_batches_that_wait_and_all_stages_take_one_policy(schedule: Schedule) -> None:
    expected = run(_fit, 2, Dropout, 3, schedule, None)
    found = run(_fit, 2, Dropout, 3, schedule, {"policy": "auto", "budget_bytes": 10**9})
    _assert_equal_bits(found, expected)
    needed = [chosen[1] for _, chosen in found]
    assert [chosen[0] for _, chosen in found] == ["none", "none"]
    # The last stage goes backward first: fewer of its activations wait, but for "gpipe", which turns when all are done.
    assert (needed[0][0] > needed[1][0]) == (schedule != "gpipe")
    found = run(_fit, 2, Dropout, 3, schedule, {"policy": "auto", "budget_bytes": needed[0][2]})
    _assert_equal_bits(found, expected)
    assert [chosen[0] for _, chosen in found] == ["full", "full"]
