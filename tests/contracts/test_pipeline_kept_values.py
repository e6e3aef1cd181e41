"""What steps assign to blocks, and read of them in unusual ways, in stages as on one rank."""

from __future__ import annotations

import pickle
import sys
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_zero import PipelineError
from lightning_zero.config import Pipeline
from lightning_zero.lightning.strategy import ZeroStrategy
from tests.contracts.test_pipeline_kept_numbers import (
    EPOCH,
    CountedInContainers,
    Counting,
    LoggedInSomeBatches,
    ReadByAHook,
    assert_as_one_rank,
    fit,
)
from tests.contracts.test_pipeline_late_values import WIDTH, Block, Program, batches
from tests.lightning_programs import seeded, trainer
from tests.sampling import sample
from tests.worlds import run


class Tempered(Block):
    temperature = 1.0

    def forward(self, x: Tensor) -> Any:
        return super().forward(x * self.temperature)


class Anneals(Program):
    block = Tempered

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for block in self.blocks:
            block.temperature = max(0.5, 0.8 * block.temperature)
        return loss


class CountsOwn(Block):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return super().forward(x / self.calls)


class Resets(Program):
    block = CountsOwn

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for block in self.blocks:
            block.calls = 0
        return loss


class Routed(Block):
    def __init__(self) -> None:
        super().__init__()
        for name in ("load", "bias"):
            self.register_buffer(name, torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        x = super().forward(x + self.bias)
        self.load = self.load + x.detach().abs().mean((0, 1))
        return x


class Balances(Program):
    block = Routed

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for block in self.blocks:
            block.bias = block.bias + 0.1 * (block.load.mean() - block.load)
            block.load = torch.zeros_like(block.load)
        return loss


class RoutedInPlace(Routed):
    def forward(self, x: Tensor) -> Any:
        x = Block.forward(self, x + self.bias)
        self.load += x.detach().abs().mean((0, 1))
        return x


class BalancesInPlace(Program):
    block = RoutedInPlace

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for block in self.blocks:
            block.bias += 0.1 * (block.load.mean() - block.load)
            block.load.zero_()
        return loss


class ExitsOnNan(Program):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if not torch.isfinite(loss):
            sys.exit(1)
        return loss


class SavesOnNan(Program):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if not torch.isfinite(loss):
            self.trainer.save_checkpoint("broken.ckpt")
        return loss


class ReadsManyValues(Program):
    block = Counting

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.body(self.embedding(batch))
        predicted = self.head(hidden).repeat(1, 1, 20).flatten().tolist()
        assert len(predicted) > 1000
        return self.loss(hidden, batch) * self.blocks[0].temperature


class ReadsBehindAnError(Program):
    """A tensor cannot be made of others without values, so the step cannot be described to its end."""

    block = Counting

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.last = pickle.loads(pickle.dumps(torch.tensor([loss.detach(), 1.0])))
        return loss * self.blocks[0].temperature


class OfTwoLengths(ReadsBehindAnError):
    lengths = (5, 5, 5, 7)


class Cools(Block):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.temperature *= 0.9
        self.calls += 1
        return super().forward(x * self.temperature / self.calls)


class ReadsNumbersOfInstances(Program):
    block = Cools

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("temperature", self.blocks[0].temperature, **EPOCH)
        self.log("calls", float(self.blocks[0].calls), **EPOCH)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("validated", super().training_step(batch, batch_idx) * self.blocks[0].temperature, **EPOCH)


class Sums(Block):
    def __init__(self) -> None:
        super().__init__()
        self.stats: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        self.stats["load"] = self.stats.get("load", 0.0) + x.detach().abs().mean()
        self.aux = getattr(self, "aux", 0.0) + x.detach().abs().mean()
        return x


class Pops(Program):
    block = Sums

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        total = sum(block.stats.pop("load") + block.aux for block in self.blocks)
        for block in self.blocks:
            del block.aux
        return loss / (1.0 + total)


class ReadsLateInside(Counting):
    before: tuple[Any, ...] = ()

    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        if self.calls > 2:
            self.late = 0.5
        return x * getattr(self.before[0], "late", 1.0) if self.before else x


class LateReadByABlock(Program):
    block = ReadsLateInside

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].before = (self.blocks[0],)


class StatsInside(Block):
    before: tuple[Any, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.stats = {"calls": 0}

    def forward(self, x: Tensor) -> Any:
        self.stats["calls"] += 1
        return super().forward(x) / (self.before[0].stats["calls"] if self.before else 1)


class DictReadByABlock(Program):
    block = StatsInside

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].before = (self.blocks[0],)


class Warming(Block):
    owner: Any = ()

    def __init__(self) -> None:
        super().__init__()
        self.is_warm = True

    def forward(self, x: Tensor) -> Any:
        self.is_warm = self.owner[0].global_step < 4
        return super().forward(x)


class HookOfAFlag(Program):
    block, scale = Warming, 1.0

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.owner = (self,)
        self.blocks[0].register_forward_hook(self.note)

    def note(self, module: Any, args: Any, output: Any) -> None:
        self.scale = 0.1 if module.is_warm else 1.0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.scale


class ReadByAPreHook(ReadByAHook):
    def __init__(self) -> None:
        Program.__init__(self)
        self.blocks[0].register_forward_pre_hook(self.before)

    def before(self, module: Any, args: Any) -> None:
        self.scale = module.temperature


class Seen(Block):
    seen: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Any:
        return x + super().forward(x) / (1 + len(self.seen))


class RebindsATuple(Program):
    block = Seen

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            block.seen = (*block.seen, 1)
        return super().training_step(batch, batch_idx)


class EveryThird(Block):
    owner: Any = ()
    calls = 0

    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        if self.calls % 3 == 0:
            self.owner[0].log("norm", x.detach().norm(), **EPOCH)
        self.calls += 1
        return x


class LogsByItsOwnCount(LoggedInSomeBatches):
    block = EveryThird


class Scaled(Counting):
    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        return super().forward(x) * scale


class PassesAnAttribute(Program):
    block, lengths = Scaled, (5, 5, 5, 7)

    def body(self, hidden: Tensor) -> Tensor:
        scale = 1.0
        for block in self.blocks:
            hidden = block(hidden, scale)
            scale = block.temperature
        return hidden


class CountedInPieces(CountedInContainers):
    """The blocks count in containers, in every micro-batch once."""


class HookedInPieces(CountedInContainers):
    """So they do if hooks are run where other stages pass over them."""

    def __init__(self) -> None:
        super().__init__()
        self.shape: tuple[int, ...] = ()
        for block in self.blocks:
            block.register_forward_hook(self.note)

    def note(self, module: Any, args: Any, output: Any) -> None:
        self.shape = tuple(output.shape)


class WeighsByItsGradient(Program):
    norm = 1.0

    def note(self, grad: Tensor) -> None:
        self.norm = grad.norm().item()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.head(self.body(self.embedding(batch)))
        logits.register_hook(self.note)
        return F.cross_entropy(logits.flatten(0, 1), batch.flatten()) / (1.0 + self.norm)


class PrintsOnTheLastRank(Program):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if torch.distributed.get_rank() == 3:
            print(f"{loss.item():.3f}")
        return loss


class Numbers(Program):
    """The loop over the blocks sets their numbers, also of those that the first stages do not come to."""

    def body(self, hidden: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            block.index = index
            hidden = block(hidden)
        return hidden


class ScaledByAHook(Block):
    owner: Any = ()

    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        if x.requires_grad:
            x.register_hook(lambda grad: grad * self.owner[0].scale)
        return x


class SetsBehind(Program):
    block, scale = ScaledByAHook, 1.0

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.owner = (self,)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.scale = 1.0 / (1.0 + batch.double().mean().item())
        return loss


class BalancesByData(Program):
    block = Routed

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for block in self.blocks:
            block.bias.data.add_(0.1 * (block.load.mean() - block.load))
            block.load = torch.zeros_like(block.load)
        return loss


class AnnealsInParts(Program):
    block = Tempered

    def pipeline_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden: Tensor = self.embedding(batch)
        return hidden

    def pipeline_loss(self, output: Tensor, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(output, batch)
        for block in self.blocks:
            block.temperature = max(0.5, 0.8 * block.temperature)
        return loss

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.pipeline_loss(self.body(self.embedding(batch)), batch, batch_idx)


class MaskedForAWhile(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mask: Any = None

    def forward(self, x: Tensor) -> Any:
        return super().forward(x if self.mask is None else x * self.mask)


class SetsAndClears(Program):
    block = MaskedForAWhile

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            block.mask = 1.0 + (batch % 2).double().unsqueeze(-1)
        try:
            return super().training_step(batch, batch_idx)
        finally:
            for block in self.blocks:
                block.mask = None


class FollowsInside(Counting):
    before: tuple[Any, ...] = ()

    def inner(self, x: Tensor) -> Tensor:
        scale = self.before[0].temperature if self.before else 1.0
        return self.second(torch.tanh(self.first(x) * scale))

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        self.temperature = 1.0 / self.calls
        return x + checkpoint(self.inner, x, use_reentrant=False)


class ReadInsideACheckpoint(Program):
    """A function that the backward runs again reads a number of a block of another stage."""

    block = FollowsInside

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].before = (self.blocks[0],)


class Remembers(Block):
    memory: Any = None

    def forward(self, x: Tensor) -> Any:
        x = super().forward(x + self.memory)
        self.memory = x.detach().mean((0, 1))
        return x


class ForgetsSometimes(Program):
    """The step sets attributes in front of the blocks, in some batches."""

    block = Remembers

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx % 3 == 0:
            for block in self.blocks:
                block.memory = torch.zeros(WIDTH, dtype=torch.float64)
        return super().training_step(batch, batch_idx)


class ForgetsSometimesBehind(Program):
    block = Remembers

    def on_train_start(self) -> None:
        for block in self.blocks:
            block.memory = torch.zeros(WIDTH, dtype=torch.float64)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx % 3 == 0:
            for block in self.blocks:
                block.memory = torch.zeros(WIDTH, dtype=torch.float64)
        return loss


class SumsInFront(Block):
    aux: Any = None

    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        self.aux = self.aux + x.pow(2).mean()
        return x


class ResetsInFront(Program):
    block = SumsInFront

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            block.aux = torch.zeros((), dtype=torch.float64)
        loss = super().training_step(batch, batch_idx)
        return loss + 0.1 * sum(block.aux for block in self.blocks)


class Consumed(Block):
    mask: Any = None

    def forward(self, x: Tensor) -> Any:
        mask, self.mask = self.mask, None
        return super().forward(x) * mask


class SetsAndConsumes(Program):
    block = Consumed

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            block.mask = 1.0 + (batch % 2).double().unsqueeze(-1)
        return super().training_step(batch, batch_idx)


class FirstStepIsSmall(Program):
    def on_train_start(self) -> None:
        for block in self.blocks:
            block.fresh = True

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        is_first = hasattr(self.blocks[0], "fresh")
        for block in self.blocks:
            if hasattr(block, "fresh"):
                del block.fresh
                block.used = True
        return super().training_step(batch, batch_idx) * (0.1 if is_first else 1.0)


class CollectsInBackwards(Program):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.norms: dict[str, float] = {}
        for number, block in enumerate(self.blocks):
            block.register_full_backward_hook(partial(self.note, number))

    def note(self, number: int, module: Any, inputs: Any, outputs: Any) -> None:
        self.calls += 1
        self.norms[f"{number}-{self.calls}"] = outputs[0].norm().item()


class SetsBehindLater(SetsBehind):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = Program.training_step(self, batch, batch_idx)
        if self.global_step >= 2:
            self.scale = 0.8 * self.scale
        return loss


IN_PIECES = (
    CountedInPieces,
    HookedInPieces,
    ReadsBehindAnError,
    ReadsNumbersOfInstances,
    LogsByItsOwnCount,
    ResetsInFront,
    SetsAndConsumes,
    SetsAndClears,
    ReadInsideACheckpoint,
    CollectsInBackwards,
)
PROGRAMS = {
    cls.__name__: cls
    for cls in (
        Anneals,
        Resets,
        Balances,
        BalancesInPlace,
        ExitsOnNan,
        SavesOnNan,
        ReadsManyValues,
        ReadsBehindAnError,
        OfTwoLengths,
        ReadsNumbersOfInstances,
        Pops,
        ReadInsideACheckpoint,
        BalancesByData,
        AnnealsInParts,
        ForgetsSometimes,
        ForgetsSometimesBehind,
        FirstStepIsSmall,
        LateReadByABlock,
        HookOfAFlag,
        ReadByAPreHook,
        RebindsATuple,
        LogsByItsOwnCount,
        PassesAnAttribute,
    )
}


@pytest.mark.parametrize("name", sample([*PROGRAMS], "Anneals", "ReadsManyValues", "HookOfAFlag"))
def test_stages_train_and_log_as_one_rank(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert_as_one_rank(fit, PROGRAMS[name])


def test_numbers_in_a_container_of_a_block_that_a_later_block_reads_are_refused() -> None:
    with pytest.raises(PipelineError, match="`blocks.0` lies on an earlier pipeline stage, and keeps in its attribute"):
        run(fit, 2, DictReadByABlock)


def test_an_attribute_that_is_set_behind_the_blocks_and_read_in_a_backward_is_refused() -> None:
    with pytest.raises(
        PipelineError,
        match="`scale` of `SetsBehind` is changed by code after the blocks of `blocks` and read in the backward",
    ):
        run(fit, 2, SetsBehind)


def _fit_on_four(rank: int, world: int) -> list[int]:
    strategy = ZeroStrategy(stage=1, pipeline=Pipeline(stages=4, partition="uniform", microbatches=4))
    module = seeded(Numbers)
    trainer(rank, world, strategy, max_epochs=1).fit(module, DataLoader(batches(), batch_size=None))  # type: ignore[arg-type]
    return [vars(module.blocks[rank])["index"]]  # type: ignore[arg-type]


def test_attributes_that_the_loop_over_the_blocks_sets_train_on_four_stages() -> None:
    assert run(_fit_on_four, 4) == [[0], [1], [2], [3]]


def _fit_in_pieces(
    rank: int, world: int, program: type[Program], schedule: str
) -> tuple[dict[str, float], dict[str, Tensor]]:
    pipeline = None
    if world > 1:
        pipeline = Pipeline(stages=2, partition="uniform", microbatches=2, schedule=schedule)  # type: ignore[arg-type]
    data = batches() if world > 1 else [half for one in batches() for half in one.split(2)]
    strategy = ZeroStrategy(stage=1, pipeline=pipeline)
    fitted = trainer(rank, world, strategy, precision="64-true", accumulate_grad_batches=1 if world > 1 else 2)
    module = seeded(program)
    fitted.fit(module, DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    logged = {key: value.item() for key, value in fitted.callback_metrics.items()}
    return logged, {name: strategy.full_param(param).clone() for name, param in module.named_parameters()}


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
@pytest.mark.parametrize("name", [one.__name__ for one in IN_PIECES])
def test_micro_batches_train_as_one_rank_that_accumulates(name: str, schedule: str) -> None:
    program = {one.__name__: one for one in IN_PIECES}[name]
    assert_as_one_rank(_fit_in_pieces, program, schedule)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_step_that_reads_what_its_own_backward_collects_is_right_or_refused(schedule: str) -> None:
    _, weights = run(_fit_in_pieces, 1, WeighsByItsGradient, schedule)[0]
    if schedule == "gpipe":
        with pytest.raises(PipelineError, match="in this schedule the forwards of later micro-batches run before"):
            run(_fit_in_pieces, 2, WeighsByItsGradient, schedule)
        return
    for key, value in run(_fit_in_pieces, 2, WeighsByItsGradient, schedule)[1][1].items():
        torch.testing.assert_close(value, weights[key], rtol=0.0, atol=1e-9)


def _fit_of_copies(rank: int, world: int) -> float:
    pipeline = Pipeline(stages=2, partition="uniform", microbatches=2)
    strategy = ZeroStrategy(stage=3, pipeline=pipeline, timeout=30)
    fitted = trainer(rank, world, strategy, max_epochs=1)
    module = seeded(PrintsOnTheLastRank)
    fitted.fit(module, DataLoader(batches(), batch_size=None))  # type: ignore[arg-type]
    return float(sum(strategy.full_param(param).double().sum() for param in module.parameters()))


def test_a_copy_that_reads_a_value_alone_describes_as_the_others() -> None:
    assert len(set(run(_fit_of_copies, 4))) == 1
