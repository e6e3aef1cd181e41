"""Numbers that blocks keep, in stages as on one rank: whoever reads them, and whatever the step reads besides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_zero import PipelineError
from lightning_zero.config import Pipeline
from lightning_zero.lightning.strategy import ZeroStrategy
from tests.contracts.test_pipeline_late_values import Block, Program, batches
from tests.lightning_programs import seeded, trainer
from tests.sampling import sample
from tests.worlds import run

EPOCH: dict[str, Any] = {"on_step": False, "on_epoch": True}


class Counting(Block):
    calls, temperature = 0, 1.0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        self.temperature = 1.0 / self.calls
        return super().forward(x)


class ReadBehindAnItem(Program):
    block = Counting

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss.item(), **EPOCH)
        text = f"{loss:.3f}"
        assert np.isfinite(loss.detach().numpy()), text
        self.log("temperature", self.blocks[0].temperature, **EPOCH)
        return loss * self.blocks[0].temperature


class ReadOnOneWay(Program):
    block = Counting

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if torch.isfinite(loss):
            return loss * self.blocks[0].temperature
        raise ValueError("not finite")


class LoopsOverAValue(Program):
    block = Counting

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        error = loss.detach()
        while error.item() > 0.1:  # one is never below
            error = error * 0.5
        return loss * self.blocks[0].temperature if error > 1.0 else loss + error


class Contents(Block):
    def __init__(self) -> None:
        super().__init__()
        self.stats: Counter[str] = Counter()
        self.nested = {"one": {"calls": 0}}

    def forward(self, x: Tensor) -> Tensor:
        self.stats["calls"] += 1
        self.nested["one"]["calls"] += 1
        return x + super().forward(x) / (self.stats["calls"] + self.nested["one"]["calls"])


class CountedInContainers(Program):
    block = Contents


class ReadByAHook(Program):
    block, scale = Counting, 1.0

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].register_forward_hook(self.note)

    def note(self, module: Any, args: Any, output: Any) -> None:
        self.scale = module.temperature

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.scale


class Following(Counting):
    before: tuple[Any, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x * self.before[0].temperature if self.before else x


class ReadByALaterBlock(Program):
    block = Following

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].before = (self.blocks[0],)


class OfNumPy(Counting):
    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        return x, np.int64(self.calls), np.cos(self.temperature)


class ReturnedOfNumPy(Program):
    block = OfNumPy

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden, counts, cosines = self.embedding(batch), [], []
        for block in self.blocks:
            hidden, count, cosine = block(hidden)
            counts.append(count)
            cosines.append(cosine)
        assert isinstance(counts[0], np.int64)
        return self.loss(hidden, batch) * float(cosines[0]) / (1 + int(counts[0]))


class Dropping(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.drop.p = min(0.5, 0.1 * self.calls)
        return x


class RateOfDropout(Program):
    block = Dropping

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("p", self.blocks[0].drop.p, **EPOCH)
        return loss * (1.0 - self.blocks[0].drop.p)


class Late(Counting):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.calls > 2:
            self.late = 0.5
        return x


class AttributesThatComeLater(Program):
    block = Late

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if hasattr(self.blocks[1], "late"):
            loss = loss * 0.9
        return loss * getattr(self.blocks[0], "late", 1.0)


class Gated(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.ones((), dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.gate = 0.5 + x.detach().sigmoid().mean()
        return x


class TensorBehindAnItem(Program):
    block = Gated

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("gate", self.blocks[0].gate, **EPOCH)
        self.log("loss", loss.item(), **EPOCH)
        return loss


class ReadInARecomputation(Program):
    block = Gated

    def tail(self, hidden: Tensor) -> Tensor:
        return self.head(hidden * self.blocks[0].gate)

    def loss(self, hidden: Tensor, ids: Tensor) -> Tensor:
        logits: Any = checkpoint(self.tail, hidden, use_reentrant=False)
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


class Rarely(Block):
    owner: tuple[Any, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.owner[0].global_step % 3 == 0:
            self.owner[0].log("norm", x.detach().norm(), **EPOCH)
        return x


class LoggedInSomeBatches(Program):
    block = Rarely

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.owner = (self,)


class Flagged(Counting):
    def forward(self, x: Tensor, causal: bool = True) -> Any:
        x = super().forward(x)
        return x, self.calls < 3


class FlagsThatAreAlikeByChance(Program):
    block = Flagged
    lengths = (5, 5, 5, 7)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden, warm = self.embedding(batch), []
        for block in self.blocks:
            hidden, one = block(hidden, causal=True)
            warm.append(one)
        return self.loss(hidden, batch) * (0.1 if warm[0] else 1.0)


class Growing(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(1, 1, dtype=torch.float64), persistent=False)
        self.register_buffer("table", None)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.mask) < x.shape[1]:
            self.mask = torch.ones(x.shape[1], 1, dtype=x.dtype)
            self.table = torch.ones(x.shape[1], dtype=x.dtype)
        return super().forward(x) * self.mask[: x.shape[1]]


class BuffersThatGrow(Program):
    block, saves = Growing, True


class LoggedInBackwards(Program):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_full_backward_hook(lambda m, i, o: self.log("grad", o[0].norm().item(), **EPOCH))
            block.register_full_backward_hook(lambda m, i, o: self.log("last", o[0].norm().item()))


PROGRAMS = {
    cls.__name__: cls
    for cls in (
        ReadBehindAnItem,
        ReadOnOneWay,
        LoopsOverAValue,
        CountedInContainers,
        ReadByAHook,
        ReadByALaterBlock,
        ReturnedOfNumPy,
        RateOfDropout,
        AttributesThatComeLater,
        TensorBehindAnItem,
        ReadInARecomputation,
        LoggedInSomeBatches,
        FlagsThatAreAlikeByChance,
        BuffersThatGrow,
        LoggedInBackwards,
    )
}


class ReadOfABackward(Program):
    norm = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].register_full_backward_hook(self.note)

    def note(self, module: Any, grad_in: Any, grad_out: Any) -> None:
        self.norm = grad_out[0].norm().item()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) / (1.0 + self.norm)


def assert_as_one_rank(fitted: Callable[..., Any], *args: Any) -> None:
    """Require the logged values and the weights of two stages to be those of one rank.

    Args:
        fitted: Returns both, on a rank.
        args: Of it, behind rank and world.
    """
    logged, weights = run(fitted, 1, *args)[0]
    for found_logged, found in run(fitted, 2, *args):
        assert found_logged == pytest.approx(logged, abs=1e-6)
        for key, value in weights.items():
            torch.testing.assert_close(found[key], value, rtol=0.0, atol=1e-9)


def fit(rank: int, world: int, program: type[Program]) -> tuple[dict[str, float], dict[str, Tensor]]:
    pipeline = None
    if world > 1:
        pipeline = Pipeline(stages=2, partition="uniform", microbatches=1, schedule="gpipe")
    strategy = ZeroStrategy(stage=1, pipeline=pipeline)
    saves = getattr(program, "saves", False)
    fitted = trainer(rank, world, strategy, max_epochs=2, precision="64-true", enable_checkpointing=saves)
    module = seeded(program)
    lengths = getattr(program, "lengths", (5, 5, 5, 5))
    fitted.fit(module, DataLoader(batches(lengths), batch_size=None))  # type: ignore[arg-type]
    logged = {key: value.item() for key, value in fitted.callback_metrics.items()}
    return logged, {name: strategy.full_param(param).clone() for name, param in module.named_parameters()}


@pytest.mark.parametrize("name", sample([*PROGRAMS], "ReadBehindAnItem", "ReadByAHook", "LoggedInBackwards"))
def test_stages_train_and_log_as_one_rank(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert_as_one_rank(fit, PROGRAMS[name])


def test_a_step_that_reads_what_a_backward_on_one_stage_has_collected_is_refused() -> None:
    with pytest.raises(
        PipelineError, match="`norm` of `ReadOfABackward` is read in a step, and changed in the backward"
    ):
        run(fit, 2, ReadOfABackward)
