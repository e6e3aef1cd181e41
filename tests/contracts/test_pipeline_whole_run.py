"""Steps that do something else in stages than as a whole are refused: no old value is read in silence."""

from __future__ import annotations

import contextvars
import random
from itertools import count
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.errors import PipelineError
from tests.contracts.test_pipeline_late_values import Block, Program, _fit, batches
from tests.sampling import sample
from tests.worlds import run

NUMBERS: dict[str, float] = {"scale": 1.0}
LEVEL: contextvars.ContextVar[float] = contextvars.ContextVar("level", default=0.0)


def _pipeline(schedule: str = "1f1b") -> dict[str, Any]:
    return {"stages": 2, "schedule": schedule, "microbatches": 4}


class SetsGlobalBlock(Block):
    def forward(self, x: Tensor) -> Any:
        NUMBERS["scale"] = 1.0 + NUMBERS["scale"] / 2
        return super().forward(x)


class SetsGlobal(Program):
    """Scales its loss by a number that its blocks change in a global dictionary."""

    block = SetsGlobalBlock

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        NUMBERS["scale"] = 1.0
        loss = super().training_step(batch, batch_idx)
        return loss * NUMBERS["scale"]


def closure() -> Any:
    depth = 0

    def deeper() -> int:
        nonlocal depth
        depth += 1
        return depth

    def start() -> None:
        nonlocal depth
        depth = 0

    return deeper, start


DEEPER, START = closure()


class ClosureBlock(Block):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) / DEEPER()


class Closure(Program):
    """Has blocks that divide by their depth, which a closure counts."""

    block = ClosureBlock

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        START()
        return super().training_step(batch, batch_idx)


class LevelBlock(Block):
    def forward(self, x: Tensor) -> Any:
        LEVEL.set(LEVEL.get() + 0.5)
        return super().forward(x)


class Levels(Program):
    """Scales its loss by a context variable that its blocks change."""

    block = LevelBlock

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        LEVEL.set(1.0)
        return super().training_step(batch, batch_idx) * LEVEL.get()


class ClassNumberBlock(Block):
    total: ClassVar[float] = 0.0

    def forward(self, x: Tensor) -> Any:
        ClassNumberBlock.total = ClassNumberBlock.total + x.shape[1]
        return super().forward(x)


class ClassNumber(Program):
    """Divides its loss by a class attribute that its blocks change."""

    block = ClassNumberBlock

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ClassNumberBlock.total = 0.0
        return super().training_step(batch, batch_idx) / ClassNumberBlock.total


class IndexBlock(Block):
    """Sets its own index in an object that all blocks share; the next block reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.index = 0
        self.shared: Any = None

    def forward(self, x: Tensor) -> Any:
        before = self.shared.index
        self.shared.index = self.index
        return super().forward(x) * (1.0 + 0.1 * before)


class SharedIndex(Program):
    block = IndexBlock

    def __init__(self) -> None:
        super().__init__()
        shared = SimpleNamespace(index=0)
        for index, block in enumerate(self.blocks):
            block.index, block.shared = index + 1, shared

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.blocks[0].shared.index = 0
        return super().training_step(batch, batch_idx)


class NumberBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.length = 1

    def forward(self, x: Tensor) -> Any:
        self.length = x.shape[1]
        return super().forward(x)


class ReadsNumber(Program):
    """Divides its loss by a number that its first block keeps."""

    block = NumberBlock

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) / self.blocks[0].length


class NameBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.kind = "none"

    def forward(self, x: Tensor) -> Any:
        self.kind = "long" if x.shape[1] > 2 else "short"
        return super().forward(x)


class ReadsName(Program):
    """Decides by a string that its first block keeps."""

    block = NameBlock

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * 2 if self.blocks[0].kind == "long" else loss


class NormBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Any:
        return self.norm(super().forward(x).transpose(1, 2)).transpose(1, 2)


class ReadsStatistics(Program):
    """Adds statistics of its first block's norm to its loss."""

    block = NormBlock

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * (1.0 + self.blocks[0].norm.running_mean.pow(2).mean())


class ViewBlock(Block):
    def forward(self, x: Tensor) -> Any:
        hidden = super().forward(x)
        return torch.cat([hidden, 2 * hidden], -1)[..., : x.shape[-1]]


class StackBlock(Block):
    def forward(self, x: Tensor) -> Any:
        hidden = super().forward(x)
        return torch.stack([hidden, 2 * hidden])[0]


class ReadsBase(Program):
    """Adds the base of the view that its first block returns to its loss."""

    block = StackBlock

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.embedding(batch)
        first = self.blocks[0](hidden)
        hidden = first
        for block in self.blocks[1:]:
            hidden = block(hidden)
        base = first if first._base is None else first._base
        return self.loss(hidden, batch) + base.pow(2).mean()


class CountsInConfig(Program):
    """Scales its loss by a count that its blocks keep in the model's own object."""

    block = IndexBlock

    def __init__(self) -> None:
        super().__init__()
        self.state = SimpleNamespace(index=0.0)
        for index, block in enumerate(self.blocks):
            block.index, block.shared = index + 1, self.state

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.state.index = 0.0
        hidden = self.embedding(batch)
        for block in self.blocks[:2]:
            hidden = block(hidden)
        scale = 1.0 + self.state.index
        self.state.index = 0.0
        for block in self.blocks[2:]:
            hidden = block(hidden)
        return self.loss(hidden, batch) * scale


class CatchesRead(Program):
    """Catches the error of a parameter that another stage has, and goes on without it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        try:
            penalty = self.blocks[0].first.weight.pow(2).mean()
        except RuntimeError:
            penalty = loss * 0
        return loss + penalty


SILENT = (
    SetsGlobal,
    Closure,
    Levels,
    ClassNumber,
    SharedIndex,
    ReadsStatistics,
    ReadsBase,
    CountsInConfig,
)


@pytest.mark.parametrize("make", sample(SILENT, *SILENT[::2]), ids=lambda one: one.__name__)
def test_steps_that_do_something_else_in_stages_are_refused(make: Any) -> None:
    """They were trained with old values, in silence."""
    with pytest.raises(BaseException, match="does something else in pipeline stages than without a pipeline at"):
        run(_fit, 2, make, _pipeline(), batches())


def test_a_refused_read_that_a_step_catches_is_refused_by_its_own_cause() -> None:
    with pytest.raises(PipelineError, match=r"Parameter `blocks.0.first.weight` lies on pipeline stage 0"):
        run(_fit, 2, CatchesRead, _pipeline(), batches())


COUNT = count()


class SetsBefore(Program):
    """Sets a number in a global dictionary before the blocks, and reads it after them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        NUMBERS["scale"] = 1.0 + 0.5 * (batch_idx % 2)
        return super().training_step(batch, batch_idx) * NUMBERS["scale"]


class ReadsGlobalBlock(Block):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * NUMBERS["scale"]


class BlocksRead(SetsBefore):
    """Has blocks that read the number too."""

    block = ReadsGlobalBlock


class OwnClosure(Program):
    """Counts in a closure around the blocks."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        START()
        hidden = self.embedding(batch) * DEEPER()
        return self.loss(self.body(hidden), batch) / DEEPER()


class ReadsLevelBlock(Block):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * LEVEL.get()


class OwnLevels(Program):
    """Sets a context variable that its blocks read."""

    block = ReadsLevelBlock

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        LEVEL.set(0.5)
        return super().training_step(batch, batch_idx)


class LengthBlock(Block):
    """Sets the same number as all other blocks in an object that they share, and reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.shared: Any = None

    def forward(self, x: Tensor) -> Any:
        self.shared.index = x.shape[1]
        return super().forward(x) / self.shared.index


class SameNumber(Program):
    block = LengthBlock

    def __init__(self) -> None:
        super().__init__()
        shared = SimpleNamespace(index=0)
        for block in self.blocks:
            block.shared = shared


class AuxiliaryBlock(Block):
    aux: Any = None

    def forward(self, x: Tensor) -> Any:
        hidden = super().forward(x)
        self.aux = {"loss": hidden.pow(2).mean(), "count": 2}
        return hidden


class Auxiliary(Program):
    """Adds auxiliary losses that its blocks keep in their attributes."""

    block = AuxiliaryBlock

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + torch.stack([block.aux["loss"] for block in self.blocks]).sum()


class Taps(Program):
    """Adds what hooks on its blocks have kept."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []
        self.means: list[Tensor] = []
        for block in self.blocks:
            block.register_forward_hook(lambda module, args, output: self.outputs.append(output))
            block.first.register_forward_hook(lambda module, args, output: self.means.append(output.mean()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.outputs.clear()
        self.means.clear()
        loss = super().training_step(batch, batch_idx)
        return loss + sum(one.pow(2).mean() for one in self.outputs) + torch.stack(self.means).sum()


class Noise(Program):
    """Draws random numbers in front of the model."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        mask = torch.rand(batch.shape[1], 1, dtype=torch.float64) + random.random()
        return self.loss(self.body(self.embedding(batch) * mask), batch)


class Normed(Program):
    """Has norms with statistics in its blocks, which nobody reads."""

    block = NormBlock


class NeverRepeats(Program):
    """Uses a number that no two runs of the step have in common."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        factor = 2.0 ** (next(COUNT) % 64)
        return super().training_step(batch, batch_idx) * factor / factor


class NumberHead(nn.Linear):
    length = 1

    def forward(self, hidden: Tensor) -> Tensor:
        self.length = hidden.shape[1]
        return super().forward(hidden)


class HeadNumber(Program):
    """Divides its loss by a number that its head keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.head = NumberHead(6, 11)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) / self.head.length


class Views(Program):
    """Has blocks that return views with gaps, into which it writes."""

    block = ViewBlock

    def body(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
            hidden *= 1.5
        return hidden


class CatchesOwn(Program):
    """Catches an error of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        try:
            raise RuntimeError("no penalty")
        except RuntimeError:
            return loss * 0.5


ALIKE = (
    SetsBefore,
    ReadsNumber,
    ReadsName,
    BlocksRead,
    OwnClosure,
    OwnLevels,
    SameNumber,
    Auxiliary,
    Taps,
    Noise,
    Normed,
    NeverRepeats,
    HeadNumber,
    Views,
    CatchesOwn,
)


@pytest.mark.parametrize("make", sample(ALIKE, *ALIKE[::2]), ids=lambda one: one.__name__)
def test_steps_that_look_like_these_train_as_without_a_pipeline(make: Any) -> None:
    options = {"stages": 2, "microbatches": 1, "schedule": "gpipe"}
    expected = run(_fit, 1, make, {}, batches())[0]
    for found in run(_fit, 2, make, options, batches()):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)
