"""Hooks between two steps that read what one pipeline stage alone has changed are refused: no old value in silence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_zero.config import Pipeline
from lightning_zero.lightning.strategy import ZeroStrategy
from tests.contracts.test_pipeline_late_values import Block, Program, batches
from tests.lightning_programs import seeded, trainer
from tests.sampling import sample
from tests.worlds import run

PLAIN = {"stages": 2, "microbatches": 1, "schedule": "gpipe"}


class UsesBlock(Block):
    """Counts, and keeps a tensor and a module buffer."""

    usage: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("usage", torch.zeros(6))
        self.last = torch.zeros(())
        self.count = 0

    def forward(self, x: Tensor) -> Any:
        hidden = super().forward(x)
        self.usage = 0.9 * self.usage + 0.1 * hidden.detach().mean((0, 1))
        self.last = hidden.detach().norm()
        self.count += 1
        return hidden


class ReadsUsage(Program):
    """Logs module buffers of its blocks when an epoch ends."""

    block = UsesBlock

    def on_train_epoch_end(self) -> None:
        for index, block in enumerate(self.blocks):
            self.log(f"usage{index}", block.usage.norm())


class ReadsLast(Program):
    """Logs tensors that its blocks keep."""

    block = UsesBlock

    def on_train_batch_end(self, *args: Any) -> None:
        for index, block in enumerate(self.blocks):
            self.log(f"last{index}", block.last)


class FeedsBack(Program):
    """Scales its next loss by numbers that its blocks count."""

    block = UsesBlock
    scale = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.scale

    def on_train_batch_end(self, *args: Any) -> None:
        self.scale = 1.0 + 0.1 * sum(block.count for block in self.blocks)


class ReadsAfterEvaluation(Program):
    """Logs a number that its blocks count in training, when an evaluation ends."""

    block = UsesBlock

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("ids", batch.double().mean() + 0 * self.body(self.embedding(batch)).sum())

    def on_validation_epoch_end(self) -> None:
        self.log("usage", self.blocks[0].usage.norm())


class GradientNorms(Program):
    """Collects norms of gradients in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: dict[str, float] = {}
        for index, block in enumerate(self.blocks):
            block.register_full_backward_hook(self.hook(index))

    def hook(self, index: int) -> Any:
        def note(module: Any, inputs: Any, outputs: Any) -> None:
            self.norms[f"gradient{index}"] = outputs[0].norm().item()

        return note


class LogsNorms(GradientNorms):
    """Logs the collected norms."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.log_dict(self.norms)


class SetsCount(Program):
    """Assigns what its blocks have changed before it reads it, and logs in the step."""

    block = UsesBlock

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.usage = torch.stack([block.usage for block in self.blocks]).norm()
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        for block in self.blocks:
            block.count = 0
        self.log("count", float(sum(block.count for block in self.blocks)))
        self.log("usage", self.usage)


class LogsInHooks(Program):
    """Logs norms of gradients where they are computed."""

    def __init__(self) -> None:
        super().__init__()
        for index, block in enumerate(self.blocks):
            block.register_full_backward_hook(self.hook(index))

    def hook(self, index: int) -> Any:
        return lambda module, inputs, outputs: self.log(f"gradient{index}", outputs[0].norm().item())


def _fit(rank: int, world: int, make: Any, options: dict[str, Any]) -> Any:
    strategy = ZeroStrategy(stage=1, pipeline=Pipeline(partition="uniform", **options) if options else None)
    lightning = trainer(rank, world, strategy, max_epochs=2, precision="64-true")
    module = seeded(make)
    loader = DataLoader(batches(), batch_size=None)
    lightning.fit(module, loader, loader if make is ReadsAfterEvaluation else None)
    logged = {name: value.item() for name, value in lightning.callback_metrics.items()}
    return logged, {name: strategy.full_param(param).clone() for name, param in module.named_parameters()}


OLD = "changed in a step on another pipeline stage, which runs the module"
REFUSED = (
    (ReadsUsage, f"`blocks.[02].usage` .* {OLD}"),
    (ReadsLast, f"`blocks.[02].last` .* {OLD}"),
    (ReadsAfterEvaluation, f"`blocks.0.usage` .* {OLD}"),
    (FeedsBack, f"`blocks.[02].count` .* {OLD}"),
    (LogsNorms, "`norms` of `LogsNorms` is read between two steps, and changed in the backward"),
)


@pytest.mark.parametrize("case", sample(REFUSED, *REFUSED), ids=lambda case: case[0].__name__)
def test_reads_of_what_one_stage_has_changed_are_refused(case: tuple[Any, str]) -> None:
    """Values of other stages were old ones, and numbers of hooks in backwards those of the last stage alone."""
    with pytest.raises(BaseException, match=case[1]):
        run(_fit, 2, case[0], PLAIN)


@pytest.mark.parametrize("make", [GradientNorms, SetsCount, LogsInHooks], ids=lambda one: one.__name__)
def test_programs_that_do_not_read_it_train_and_log_as_without_a_pipeline(make: Any) -> None:
    logged, expected = run(_fit, 1, make, {})[0]
    for found_logged, found in run(_fit, 2, make, PLAIN):
        assert found_logged == pytest.approx(logged)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)
