"""How long pipelines wait."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero.config import Pipeline
from lightning_zero.lightning.strategy import ZeroStrategy
from lightning_zero.parallel.pipeline.schedule.weight_gradients import WeightGradients
from tests.lightning_programs import trainer
from tests.worlds import run

STAGES, MICROBATCHES = 4, 16


class Sleep(torch.autograd.Function):
    """Takes a while in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grads[0], None


class RecordOwner(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return x if x.is_meta or type(x) is not Tensor else Sleep.apply(x, self.seconds)


class Sleepers(LightningModule):
    def __init__(self, chunks: int, seconds: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RecordOwner(seconds) for _ in range(chunks))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:  # the first step compares shapes and learns orders
            self.trainer.strategy.pipeline_timings(1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _bubble(rank: int, world: int, schedule: Any, seconds: float) -> float:
    pipeline = Pipeline(stages=STAGES, microbatches=MICROBATCHES, schedule=schedule)
    strategy = ZeroStrategy(stage=1, pipeline=pipeline)
    data = DataLoader(TensorDataset(torch.randn(4 * MICROBATCHES, 2)), MICROBATCHES)
    trainer(rank, world, strategy, max_epochs=1).fit(Sleepers(pipeline.num_chunks, seconds), data)
    return strategy.pipeline_timings(3)["pipeline/bubble_share"]


def _timings(rank: int, world: int) -> list[int]:
    strategy = ZeroStrategy(stage=1, pipeline=2)
    data = DataLoader(TensorDataset(torch.randn(8, 2)), 4)
    trainer(rank, world, strategy, max_epochs=1).fit(Sleepers(2, 0.0), data)
    steps = strategy._steps
    assert steps is not None
    found = []
    for steps.runner._p2p.lets_device_wait in (False, True):
        found.append(len(strategy.pipeline_timings(1)))
    return found


def test_times_of_stages_are_left_out_where_the_host_does_not_wait() -> None:
    """Over NCCL the device waits for messages: the host counted its launches as work."""
    assert run(_timings, 2) == [[3, 0]] * 2


class SleepsInValidation(Sleepers):
    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        for block in self.blocks:
            x = block(x)
        time.sleep(0.5)
        return x.square().mean()


def _timings_of_validation(rank: int, world: int) -> dict[str, float]:
    strategy = ZeroStrategy(stage=1, pipeline=2)
    data = DataLoader(TensorDataset(torch.randn(8, 2)), 4)
    trainer(rank, world, strategy, max_epochs=1).fit(SleepsInValidation(2, 0.0), data, data)
    return strategy.pipeline_timings(1)


def test_times_of_stages_are_those_of_training() -> None:
    """Validation counted as work, and the share of the bubble was below 0."""
    for timings in run(_timings_of_validation, 2):
        assert timings["pipeline/busy_s_1"] < 0.5
        assert timings["pipeline/bubble_share"] >= 0


def _bubble_of_halves(rank: int, world: int, seconds: float) -> float:
    """Measure the bubble of blocks whose gradients of weights take as long as their forward."""
    bring = WeightGradients.bring

    def sleep_and_bring(self: Any, key: Any) -> None:
        time.sleep(seconds)
        bring(self, key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightGradients, "bring", sleep_and_bring)
        return _bubble(rank, world, "zb_h1", seconds)


FORMULA = (STAGES - 1) / (MICROBATCHES + STAGES - 1)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_bubble_is_that_of_the_formula(schedule: str) -> None:
    shares = run(_bubble, STAGES, schedule, 0.2, timeout_s=120.0)  # a message alone takes up to 2 ms here
    assert shares == pytest.approx([FORMULA] * STAGES, rel=0.1)


@pytest.mark.slow
@pytest.mark.alone
def test_the_bubble_of_zero_bubble_is_that_of_the_formula() -> None:
    shares = run(_bubble_of_halves, STAGES, 0.2, timeout_s=120.0)
    assert shares == pytest.approx([(STAGES - 1) / (3 * MICROBATCHES + STAGES - 1)] * STAGES, rel=0.1)


@pytest.mark.slow
@pytest.mark.alone
def test_interleaved_chunks_make_the_bubble_smaller() -> None:
    shares = run(_bubble, STAGES, "interleaved_1f1b", 0.02, timeout_s=120.0)
    assert max(shares) < FORMULA
