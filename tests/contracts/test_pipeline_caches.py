"""Tables that forwards of blocks keep outside of their modules: caches of functions, globals, class attributes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tests.contracts.test_pipeline_late_values import Block, Program, _fit, batches
from tests.sampling import sample
from tests.worlds import run

TABLES: dict[Any, Any] = {}


class Cached(Program):
    """Its blocks scale hidden states by a table."""


def _table(width: int) -> Tensor:
    """Return a table that is computed in several operations, some of them in place."""
    steps = torch.arange(width, dtype=torch.float64)
    table = torch.outer(steps.add(1.0).reciprocal_(), torch.ones(2, dtype=torch.float64))
    table[1:, 0] = 0.5
    table[0].mul_(0.25)
    return table.sum(-1).masked_fill_(steps > width - 2, 0.75)


class GlobalBlock(Block):
    def forward(self, x: Tensor) -> Any:
        key = x.shape[-1]
        if key not in TABLES:
            TABLES[key] = _table(key)
        return super().forward(x * TABLES[key])


class GlobalTable(Cached):
    block = GlobalBlock


@lru_cache
def _cached(width: int) -> Tensor:
    return _table(width)


class FunctionBlock(Block):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x * _cached(x.shape[-1]))


class CachedFunction(Cached):
    block = FunctionBlock


@lru_cache
def _pair(width: int) -> tuple[Tensor, Tensor]:
    angles = _table(width)
    return angles.sin(), angles.cos()[None, None]


class PairBlock(Block):
    def forward(self, x: Tensor) -> Any:
        sine, cosine = _pair(x.shape[-1])
        return super().forward(x * cosine + x.flip(-1) * sine)


class CachedPair(Cached):
    block = PairBlock


@lru_cache
def _view(width: int) -> Tensor:
    return _table(2 * width)[:width]


class ViewBlock(Block):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x * _view(x.shape[-1]))


class CachedView(Cached):
    """Caches a part of a tensor."""

    block = ViewBlock


class ClassBlock(Block):
    table: ClassVar[Tensor | None] = None

    def forward(self, x: Tensor) -> Any:
        if ClassBlock.table is None or len(ClassBlock.table) < x.shape[-1]:
            ClassBlock.table = _table(x.shape[-1])
        return super().forward(x * ClassBlock.table)


class ClassTable(Cached):
    block = ClassBlock


class OfWeightsBlock(Block):
    def forward(self, x: Tensor) -> Any:
        if "weights" not in TABLES:
            TABLES["weights"] = next(self.parameters()).detach().mean()
        return super().forward(x * TABLES["weights"])


class OfWeights(Cached):
    """Caches a value that depends on the weights of one block."""

    block = OfWeightsBlock


class OfInputBlock(Block):
    def forward(self, x: Tensor) -> Any:
        if "input" not in TABLES:
            TABLES["input"] = x.detach().mean()
        return super().forward(x * (1.0 + TABLES["input"]))


class OfInput(Cached):
    """Caches a value of its first input; a survey has zeros in its place."""

    block = OfInputBlock

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


class OfRandomBlock(Block):
    def forward(self, x: Tensor) -> Any:
        if "random" not in TABLES:
            TABLES["random"] = torch.rand(x.shape[-1], dtype=x.dtype)
        return super().forward(x * TABLES["random"])


class OfRandom(Cached):
    """Caches random numbers."""

    block = OfRandomBlock


def _forget() -> None:
    TABLES.clear()
    ClassBlock.table = None
    for function in (_cached, _pair, _view):
        function.cache_clear()


def _fit_anew(*args: Any) -> Any:
    _forget()
    try:
        return _fit(*args)
    finally:
        _forget()


CASES = [GlobalTable, CachedFunction, CachedPair, CachedView, ClassTable]


@pytest.mark.parametrize("make", sample(CASES, GlobalTable, CachedPair), ids=lambda one: one.__name__)
@pytest.mark.parametrize("schedule", sample(("gpipe", "interleaved_1f1b"), "gpipe"))
def test_tables_that_forwards_of_blocks_cache_are_those_of_all_stages(make: Any, schedule: str) -> None:
    """They were fakes of a forward that had been imagined, and the step was refused with another cause."""
    expected = run(_fit_anew, 1, make, {}, batches())[0]
    microbatches = 1 if schedule == "gpipe" else 2
    for found in run(_fit_anew, 2, make, {"stages": 2, "microbatches": microbatches, "schedule": schedule}, batches()):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize(
    "make", sample((OfWeights, OfInput, OfRandom), OfWeights, OfInput), ids=lambda one: one.__name__
)
def test_cached_values_that_another_stage_computes_are_refused(make: Any) -> None:
    """One that was made of the zeros of a survey would be wrong in silence."""
    with pytest.raises(BaseException, match="leaves tensors outside of its modules"):
        run(_fit_anew, 2, make, {"stages": 2}, batches())
