"""Tables that forwards of blocks keep outside of their modules: caches of functions, globals, class attributes.

A stage passes over modules of others by forwards on tensors without values, which would fill a cache with such tensors.
"""

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


class OfBufferBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.linspace(1.0, 2.0, 6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        if "buffer" not in TABLES:
            TABLES["buffer"] = self.frequencies.cos()
        return super().forward(x * TABLES["buffer"])


class OfBuffer(Cached):
    """Caches a table of a module buffer."""

    block = OfBufferBlock


class FilledBefore(GlobalTable):
    """Fills its cache before the first step."""

    def on_fit_start(self) -> None:
        width = self.embedding.embedding_dim
        TABLES[width] = _table(width)


CASES = [GlobalTable, CachedFunction, CachedPair, CachedView, ClassTable, OfWeights, OfInput, OfRandom, OfBuffer]


@pytest.mark.parametrize("make", sample(CASES, GlobalTable, OfBuffer), ids=lambda one: one.__name__)
def test_tables_that_forwards_of_blocks_cache_are_refused_by_name(make: Any) -> None:
    """The error named another cause."""
    with pytest.raises(BaseException, match="leaves tensors outside of its modules .* or fill a cache before"):
        run(_fit_anew, 2, make, {"stages": 2}, batches())


@pytest.mark.parametrize("schedule", sample(("gpipe", "interleaved_1f1b"), "gpipe"))
def test_a_cache_that_is_filled_before_the_first_step_is_used(schedule: str) -> None:
    expected = run(_fit_anew, 1, FilledBefore, {}, batches())[0]
    options = {"stages": 2, "microbatches": 1 if schedule == "gpipe" else 2, "schedule": schedule}
    for found in run(_fit_anew, 2, FilledBefore, options, batches()):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)
