"""Code that a backward runs reads the attributes of its own micro-batch, though later forwards have set others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_zero.config import Pipeline
from lightning_zero.lightning.strategy import ZeroStrategy
from tests.contracts.test_pipeline_late_values import Block, Program, batches
from tests.lightning_programs import seeded, trainer
from tests.sampling import sample
from tests.worlds import run

MICROBATCHES = 4


class Masked(Block):
    """Reads the mask inside of a function that the backward runs again."""

    mask: Any = 1.0

    def read(self) -> Any:
        return self.mask

    def inner(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)) * self.read())

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=False)


class Sets(Program):
    block = Masked

    def set(self, block: Any, value: Tensor) -> None:
        block.mask = value

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for number, block in enumerate(self.blocks):
            self.set(block, 1.0 + (batch % (number + 2)).double().unsqueeze(-1))
        return super().training_step(batch, batch_idx)


class SetsANumber(Sets):
    def set(self, block: Any, value: Tensor) -> None:
        block.mask = 1.0 / (1.0 + self.num_steps)

    num_steps = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.num_steps += 1
        return super().training_step(batch, batch_idx)


class InADictionary(Sets):
    class block(Masked):
        def __init__(self) -> None:
            super().__init__()
            self.state: dict[str, Any] = {}

        def read(self) -> Any:
            return self.state["mask"]

    def set(self, block: Any, value: Tensor) -> None:
        block.state["mask"] = value


class ABuffer(Sets):
    class block(Masked):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", None, persistent=False)

        def read(self) -> Any:
            return self.kept

    def set(self, block: Any, value: Tensor) -> None:
        block.kept = value


class Reentrant(Sets):
    class block(Masked):
        def forward(self, x: Tensor) -> Tensor:
            return x + checkpoint(self.inner, x, use_reentrant=True)


class Hooked(Sets):
    """A hook on a gradient multiplies it by an attribute of the LightningModule, and of the block."""

    class block(Block):
        mask: Any = None

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            if x.requires_grad:
                x.register_hook(lambda grad: grad * self.mask)
            return x


class SetLate(Sets):
    def set(self, block: Any, value: Tensor) -> None:
        if self.global_step > 0:
            block.mask = value


class CountedInBackwards(Sets):
    """The forward counts, and the recomputation, on one rank and in stages."""

    class block(Masked):
        calls = 0

        def inner(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().inner(x)


class InAContext(Sets):
    class block(Masked):
        def __init__(self) -> None:
            super().__init__()
            self.context = SimpleNamespace(mask=None)

        def read(self) -> Any:
            return self.context.mask

    def set(self, block: Any, value: Tensor) -> None:
        block.context.mask = value


class SetsInTheLast(Sets):
    """The attribute begins to change in a later batch, and never in the first micro-batch."""

    num_steps = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.num_steps += 1
        if self.num_steps > MICROBATCHES and self.num_steps % MICROBATCHES == 0:
            for block in self.blocks:
                block.mask = 1.0 / (1.0 + self.num_steps)
        return Program.training_step(self, batch, batch_idx)


class TwoFunctions(Sets):
    """The second function that runs again reads what the first has kept."""

    class block(Block):
        def attend(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.first(x))
            self.gate = 0.5 + hidden.detach().sigmoid()
            return hidden

        def mix(self, hidden: Tensor) -> Tensor:
            return self.second(hidden * self.gate)

        def forward(self, x: Tensor) -> Tensor:
            hidden = checkpoint(self.attend, x, use_reentrant=False)
            return x + checkpoint(self.mix, hidden, use_reentrant=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return Program.training_step(self, batch, batch_idx)


FACTORS = {"one": 0.5, "two": 2.0}


class Adapters(Sets):
    """A dictionary gets another key with the same value."""

    num_steps = 0

    class block(Masked):
        def __init__(self) -> None:
            super().__init__()
            self.active: dict[str, float] = {}

        def read(self) -> Any:
            return sum(FACTORS[name] * weight for name, weight in self.active.items())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.num_steps += 1
        name = ("one", "two")[self.num_steps % 2]
        for block in self.blocks:
            block.active.clear()
            block.active[name] = 1.0
        return Program.training_step(self, batch, batch_idx)


class CountsTensors(Sets):
    class block(Masked):
        def __init__(self) -> None:
            super().__init__()
            self.calls = torch.zeros(())

        def inner(self, x: Tensor) -> Tensor:
            self.calls = self.calls + 1
            return super().inner(x)


PROGRAMS = {
    cls.__name__: cls
    for cls in (
        Sets,
        SetsANumber,
        InADictionary,
        ABuffer,
        Reentrant,
        Hooked,
        SetLate,
        CountedInBackwards,
        InAContext,
        SetsInTheLast,
        CountsTensors,
        TwoFunctions,
        Adapters,
    )
}
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1")


def _fit(
    rank: int, world: int, program: type[Program], schedule: str, stage: int
) -> tuple[list[int], dict[str, Tensor]]:
    pieces = batches((5,) * MICROBATCHES * 3)
    joined = [torch.cat(list(pieces[start : start + MICROBATCHES])) for start in range(0, len(pieces), MICROBATCHES)]
    pipeline = None
    if world > 1:
        pipeline = Pipeline(stages=2, partition="uniform", microbatches=MICROBATCHES, schedule=schedule)  # type: ignore[arg-type]
    strategy = ZeroStrategy(stage=stage, pipeline=pipeline)
    number = 1 if world > 1 else MICROBATCHES
    fitted = trainer(rank, world, strategy, max_epochs=2, precision="64-true", accumulate_grad_batches=number)
    module = seeded(program)
    fitted.fit(module, DataLoader(joined if world > 1 else pieces, batch_size=None))  # type: ignore[arg-type]
    weights = {name: strategy.full_param(param).clone() for name, param in module.named_parameters()}
    return [int(vars(block).get("calls", 0)) for block in module.blocks], weights


@pytest.mark.parametrize(
    "case",
    sample(
        [
            f"{name} {schedule} {stage}"
            for name in PROGRAMS
            for schedule in SCHEDULES
            for stage in (1, 3)
            if not (name == "SetsInTheLast" and schedule == "interleaved_1f1b")  # docs/pipeline.md
        ],
        "Sets 1f1b 1",
        "SetsANumber interleaved_1f1b 1",
        "Hooked zb_h1 1",
        "InADictionary gpipe 1",
        "SetLate 1f1b 1",
        "CountedInBackwards gpipe 1",
        "CountsTensors gpipe 1",
        "TwoFunctions 1f1b 1",
        "InAContext gpipe 1",
    ),
)
def test_backwards_find_the_attributes_of_their_micro_batch(case: str) -> None:
    name, schedule, stage = case.split()
    program = PROGRAMS[name]
    counts, weights = run(_fit, 1, program, schedule, int(stage))[0]
    for rank, (found_counts, found) in enumerate(run(_fit, 2, program, schedule, int(stage))):
        for key, value in weights.items():
            torch.testing.assert_close(found[key], value, rtol=0.0, atol=1e-9)
        own = [chunk for chunk in range(4) if (chunk % 2 if schedule.startswith("inter") else chunk // 2) == rank]
        assert [found_counts[block] for block in own] == [counts[block] for block in own]
