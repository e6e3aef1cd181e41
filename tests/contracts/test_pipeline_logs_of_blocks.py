"""Values that blocks log, or keep for the step to log, are logged as without a pipeline."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero.config import Pipeline
from lightning_zero.lightning.strategy import ZeroStrategy
from tests.contracts.test_pipeline_late_values import Block, Program, batches
from tests.lightning_programs import seeded, trainer
from tests.sampling import sample
from tests.worlds import run

PLAIN = {"stages": 2, "microbatches": 1, "schedule": "gpipe"}


class LogsBlock(Block):
    """Logs a norm under its own name and one that all blocks share, and numbers."""

    index = 0
    calls = 0
    owner: Any = ()

    def forward(self, x: Tensor) -> Any:
        hidden = super().forward(x)
        self.calls += 1
        (module,) = self.owner
        module.log(f"norm{self.index}", hidden.detach().norm(), on_step=True, on_epoch=True)
        module.log("norm", hidden.detach().norm(), on_step=True, on_epoch=True)
        module.log(f"calls{self.index}", float(self.calls))
        return hidden


class LogsEmbedding(nn.Embedding):
    owner: Any = ()

    def forward(self, ids: Tensor) -> Tensor:
        hidden = super().forward(ids)
        self.owner[0].log("embedding", hidden.detach().norm())
        return hidden


class BlocksLog(Program):
    """Has an embedding and blocks that log by a reference to it."""

    block = LogsBlock

    def __init__(self) -> None:
        super().__init__()
        self.embedding = LogsEmbedding(11, 6)
        self.embedding.owner = (self,)
        for index, block in enumerate(self.blocks):
            block.index, block.owner = index, (self,)


class KeepsBlock(Block):
    """Keeps values that the step logs."""

    calls = 0
    temperature = 1.0

    def forward(self, x: Tensor) -> Any:
        hidden = super().forward(x)
        self.calls += 1
        self.temperature = max(0.5, 1.0 - 0.1 * self.calls)
        self.load = hidden.detach().abs().mean((0, 1))
        self.entropy = self.load.mean()
        return hidden


class LogsKept(Program):
    """Logs what its blocks keep, and norms of hidden states, after the blocks."""

    block = KeepsBlock

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = [self.embedding(batch)]
        for block in self.blocks:
            hidden.append(block(hidden[-1]))
            self.log(f"between{len(hidden)}", hidden[-1].detach().norm())
        loss = self.loss(hidden[-1], batch)
        for index, block in enumerate(self.blocks):
            self.log(f"entropy{index}", block.entropy)
            self.log(f"load{index}", block.load.max())
            self.log(f"temperature{index}", block.temperature)
            self.log(f"hidden{index}", hidden[index].detach().norm())
        return loss


class HooksLog(Program):
    """Logs in hooks on its blocks that read values."""

    def __init__(self) -> None:
        super().__init__()
        for index, block in enumerate(self.blocks):
            block.register_forward_hook(self.hook(index))

    def hook(self, index: int) -> Any:
        return lambda module, args, output: self.log(f"norm{index}", output.detach().norm().item())


CASES = (BlocksLog, LogsKept, HooksLog)


def _fit(rank: int, world: int, make: Any, options: dict[str, Any]) -> Any:
    strategy = ZeroStrategy(stage=1, pipeline=Pipeline(partition="uniform", **options) if options else None)
    lightning = trainer(rank, world, strategy, max_epochs=2, precision="64-true")
    lightning.fit(seeded(make), DataLoader(batches(), batch_size=None))
    return {name: value.item() for name, value in lightning.callback_metrics.items()}


@pytest.mark.parametrize("make", sample(CASES, *CASES[:2]), ids=lambda one: one.__name__)
def test_values_of_blocks_are_logged_as_without_a_pipeline(make: Any) -> None:
    """Those of blocks of earlier stages were missing, old, or refused."""
    expected = run(_fit, 1, make, {})[0]
    for found in run(_fit, 2, make, PLAIN):
        assert found == pytest.approx(expected)


class LogsLateBlock(LogsBlock):
    """Logs from its third call on."""

    def forward(self, x: Tensor) -> Any:
        hidden = Block.forward(self, x)
        self.calls += 1
        if self.calls > 2:
            self.owner[0].log("norm", hidden.detach().norm())
        return hidden


class LogsLate(BlocksLog):
    block = LogsLateBlock


def test_blocks_that_log_from_a_later_batch_on_are_refused() -> None:
    with pytest.raises(BaseException, match="called on one pipeline stage alone, by a block or a hook on it"):
        run(_fit, 2, LogsLate, PLAIN)
