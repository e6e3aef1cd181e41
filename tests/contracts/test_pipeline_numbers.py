"""Numbers that blocks count, return and keep are those of the stage that computes them: no old number is used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero.config import Pipeline
from lightning_zero.lightning.strategy import ZeroStrategy
from tests.contracts.test_pipeline_late_values import Block, Program, batches
from tests.lightning_programs import seeded, trainer
from tests.sampling import sample
from tests.worlds import run

PLAIN = {"stages": 2, "microbatches": 1, "schedule": "gpipe"}


class Validated(Program):
    """Has an evaluation between two epochs, which describes a step when blocks have counted already."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.training_step(batch, batch_idx))


class CountBlock(Block):
    """Returns how often it was called."""

    calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return super().forward(x), self.calls


class Counts(Validated):
    """Divides its loss by a number that its first block counts."""

    block = CountBlock

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden, counts = self.embedding(batch), []
        for block in self.blocks:
            hidden, calls = block(hidden)
            counts.append(calls)
        return self.loss(hidden, batch) / (1 + counts[0])


class WarmBlock(CountBlock):
    """Returns whether it is in its warm-up, and the weight of its auxiliary loss."""

    def forward(self, x: Tensor) -> Any:
        hidden, calls = super().forward(x)
        return hidden, {"aux": hidden.pow(2).mean(), "weight": min(1.0, calls / 3), "is_warm": calls < 3}


class Warm(Validated):
    """Weighs auxiliary losses by numbers that its blocks return, and decides by another one."""

    block = WarmBlock

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden, found = self.embedding(batch), []
        for block in self.blocks:
            hidden, one = block(hidden)
            found.append(one)
        loss = self.loss(hidden, batch)
        loss = loss + sum(one["weight"] * one["aux"] for one in found)
        return loss * 0.1 if found[0]["is_warm"] else loss


class CountEmbedding(nn.Embedding):
    calls = 0

    def forward(self, ids: Tensor) -> Any:
        self.calls += 1
        return super().forward(ids), 1.0 / self.calls


class EmbeddingCounts(Validated):
    """Scales its output by a number that its embedding counts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = CountEmbedding(11, 6)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden, scale = self.embedding(batch)
        return self.loss(self.body(hidden) * scale, batch)


class NextBlock(Block):
    """Is given a number of the block before."""

    calls = 0

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        self.calls += 1
        return super().forward(x) * scale, 1.0 / self.calls


class ToNext(Validated):
    block = NextBlock

    def body(self, hidden: Tensor) -> Tensor:
        scale = 1.0
        for block in self.blocks:
            hidden, scale = block(hidden, scale)
        return hidden


class LateBlock(Block):
    """Keeps a number that is the same in its first calls."""

    calls = 0
    temperature = 1.0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        self.temperature = 1.0 if self.calls < 3 else 0.5
        return super().forward(x)


class ReadsLate(Validated):
    """Multiplies its loss with a number that its first block keeps."""

    block = LateBlock

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.blocks[0].temperature


CASES = (Counts, Warm, EmbeddingCounts, ToNext, ReadsLate)


def _fit(rank: int, world: int, make: Any, options: dict[str, Any]) -> Any:
    strategy = ZeroStrategy(stage=1, pipeline=Pipeline(partition="uniform", **options) if options else None)
    module = seeded(make)
    loader = DataLoader(batches(), batch_size=None)
    trainer(rank, world, strategy, max_epochs=2, precision="64-true").fit(module, loader, loader)
    return {name: strategy.full_param(param).clone() for name, param in module.named_parameters()}


@pytest.mark.parametrize("make", sample(CASES, *CASES[:4]), ids=lambda one: one.__name__)
def test_numbers_that_blocks_count_are_those_without_a_pipeline(make: Any) -> None:
    """Later stages took those of a first call in every step."""
    expected = run(_fit, 1, make, {})[0]
    for found in run(_fit, 2, make, PLAIN):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)


@dataclass
class Info:
    calls: int


class InfoBlock(CountBlock):
    def forward(self, x: Tensor) -> Any:
        hidden, calls = super().forward(x)
        return hidden, Info(calls)


class ReturnsInfo(Program):
    """Divides its loss by a number in an object that its first block returns."""

    block = InfoBlock

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden, infos = self.embedding(batch), []
        for block in self.blocks:
            hidden, info = block(hidden)
            infos.append(info)
        return self.loss(hidden, batch) / infos[0].calls


def test_numbers_in_objects_are_refused_when_they_differ() -> None:
    with pytest.raises(BaseException, match=r"`blocks.0` .* returns a `Info` with numbers or strings that this stage"):
        run(_fit, 2, ReturnsInfo, PLAIN)
