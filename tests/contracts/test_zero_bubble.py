"""Backwards in two halves train a pipeline to the bits of whole ones."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero.config import Pipeline, Schedule
from lightning_zero.lightning.strategy import ZeroStrategy
from lightning_zero.parallel.pipeline.schedule.weight_gradients import WeightGradients
from tests.contracts.test_pipeline_parity import fit
from tests.contracts.test_pipeline_programs import Program
from tests.contracts.test_pipeline_programs import _fit as fit_program
from tests.sampling import sample
from tests.worlds import run


def _fit(
    rank: int, world: int, zero: int, schedule: Schedule, stages: int, case: dict[str, Any]
) -> tuple[dict[str, Tensor], int]:
    """Train two steps of four batches; return weights, and how many gradients were brought later."""
    brought: list[Any] = []
    backward = torch.autograd.backward

    def counted(roots: Any, *args: Any, **kwargs: Any) -> None:
        brought.extend(root for root in roots if not isinstance(root, Tensor))
        backward(roots, *args, **kwargs)

    strategy = {
        "stage": zero,
        "pipeline": Pipeline(stages=stages, microbatches=4, schedule=schedule),
        "activation_checkpointing": case.get("checkpointing"),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd, "backward", counted)
        weights, _ = fit(rank, world, strategy, "gpt", case.get("model", {}), 2, case.get("program", {}))
    return weights, len(brought)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"model": {"tied": True}},
    "adamw": {"model": {"optimizer": "adamw"}},
    "bf16": {"program": {"precision": "bf16-mixed"}},
    "full": {"checkpointing": {"policy": "full"}},
    "selective": {"checkpointing": {"policy": "selective"}},
    "offload": {"checkpointing": {"policy": "offload"}},
}
WORLDS = [(2, 2, zero, name) for zero in (0, 1, 2, 3) for name in CASES] + [(4, 1, 1, "plain"), (4, 2, 3, "bf16")]
KEPT = [(2, 2, 3, "plain")]


def _name(case: Any) -> str:
    stages, copies, zero, name = case
    return f"pp{stages}-dp{copies}-zero{zero}-{name}"


@pytest.mark.parametrize("case", sample(WORLDS, *KEPT), ids=_name)
@pytest.mark.slow
def test_zero_bubble_has_the_bits_of_1f1b(case: Any) -> None:
    stages, copies, zero, name = case
    expected = run(_fit, stages * copies, zero, "1f1b", stages, CASES[name], timeout_s=240.0)
    found = run(_fit, stages * copies, zero, "zb_h1", stages, CASES[name], timeout_s=240.0)
    for (weights, num_later), (others, num_whole) in zip(found, expected, strict=True):
        assert num_later > 0 == num_whole
        for param, value in others.items():
            assert torch.equal(weights[param], value), param


class RaisesLater(Program):
    """Fails on the second stage in the second half of a backward."""

    def on_train_start(self) -> None:
        if self.trainer.global_rank == 1:
            patch = pytest.MonkeyPatch()

            def bring(*args: Any) -> None:
                patch.undo()
                raise KeyError("the weights of the second stage")

            patch.setattr(WeightGradients, "bring", bring)


def _ended(rank: int, world: int, zero: int) -> tuple[str, float]:
    """Return the error that a rank ends with, and how long the fit took."""
    options: dict[str, Any] = {"stage": zero, "pipeline": Pipeline(stages=2, schedule="zb_h1"), "timeout": 20.0}
    started, told = time.monotonic(), ""
    try:
        fit_program(rank, world, RaisesLater, options, {}, True)
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    gc.collect()  # as at the end of the process, whose connections end with it
    return told, time.monotonic() - started


@pytest.mark.parametrize("zero", sample((1, 3), 1))
def test_an_error_in_the_second_half_ends_all_stages(zero: int) -> None:
    (first, first_s), (second, second_s) = run(_ended, 2, zero)
    assert second == "KeyError: 'the weights of the second stage'"
    assert "the weights of the second stage" in first
    assert max(first_s, second_s) < 20.0  # before the timeout


def test_the_plan_says_when_gradients_are_reduced() -> None:
    assert Pipeline(schedule="zb_h1").reduces_once
    with pytest.raises(ValueError, match="`reduce='microbatch'` does not work with `schedule='zb_h1'`: a backward"):
        ZeroStrategy(stage=3, pipeline=Pipeline(schedule="zb_h1", reduce="microbatch"))
    with pytest.raises(ValueError, match="`microbatches=2` leaves stages of `schedule='zb_h1'` without work"):
        Pipeline(stages=4, microbatches=2, schedule="zb_h1")
