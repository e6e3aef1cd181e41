"""Steps in the backward give the bits of steps after it, and gradients never pile up."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from lightning_zero.config import MixedPrecision, Offload
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.lightning.strategy import ZeroStrategy
from tests import worlds
from tests.contracts.test_offload import OPTIMIZERS, PRECISIONS, _loss
from tests.lightning_programs import Net, assert_equal, loader, seeded, trainer, weights
from tests.references import Block, TinyGPT, difference, token_loss, train, train_zero
from tests.sampling import sample

PLACEMENTS: list[dict[str, Any]] = [
    {},
    {"offload": "cpu"},
    {"offload": Offload(optimizer="cpu", fraction=0.5)},
]
AT_STAGE_3 = [{"offload": Offload(optimizer="cpu", params="cpu")}]
CASES = [
    (world, stage, precision, optimizer)
    for world in (1, 2)
    for stage in (1, 2, 3)
    for precision in PRECISIONS
    for optimizer in ("adamw", "sgd")
]


class Uneven(TinyGPT):
    """Skips a block on some ranks in some steps, and one always: units that are not complete everywhere."""

    def __init__(self) -> None:
        super().__init__(depth=4, tied=True)
        self.calls = 0

    def body(self, x: Tensor) -> Tensor:
        self.calls += 1
        for index, block in enumerate(self.blocks[:3]):
            if index != self.calls % 3 or torch.distributed.get_rank() == 0:
                x = block(x)
        return x


def _compare(rank: int, world: int, stage: int, precision: str, optimizer: str) -> list[str]:
    found = []
    for build in (TinyGPT, Uneven):
        program = partial(train, loss=partial(_loss, precision != "fp32"), optimizer=OPTIMIZERS[optimizer], steps=4)
        options = {"stage": stage, "precision": PRECISIONS[precision], "units": ["Block"]}
        expected = train_zero(build, program, rank, world, **options)
        for placement in PLACEMENTS + (AT_STAGE_3 if stage == 3 else []):
            actual = train_zero(build, program, rank, world, **options, **placement, step="backward")
            found.append(difference(actual, expected))
    return found


@pytest.mark.parametrize(
    "case",
    sample(CASES, (2, 2, "fp32", "sgd")),
    ids=lambda case: "{}ranks-stage{}-{}-{}".format(*case),
)
def test_steps_in_the_backward_have_the_same_bits(case: tuple[int, int, str, str]) -> None:
    world, stage, precision, optimizer = case
    for found in worlds.run(_compare, world, stage, precision, optimizer):
        assert not any(found), found


# -- Memory ------------------------------------------------------------------------------------------------------------

WIDTH, DEPTH = 32, 10


def _peak(rank: int, world: int, stage: int, lowered: bool) -> tuple[int, int]:
    """Return the most bytes of gradients, and those of a unit."""
    precision = PRECISIONS["bf16-mixed" if lowered else "fp32"]
    engine = ZeroEngine(stage, units=["Linear"], precision=precision, step="backward")
    module = engine.shard(nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)]))
    optimizer = engine.attach(torch.optim.AdamW(module.parameters()))
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=lowered):
            loss = module(torch.ones(2, WIDTH)).float().square().mean()
        loss.backward()
        optimizer.step()
        assert engine.stats().memory["gradients"] == 0
        optimizer.zero_grad()
    return engine._state.sharded.store.peak("gradients"), WIDTH * WIDTH * 4


@pytest.mark.parametrize("world", sample([1, 2], 2))
def test_at_most_two_units_of_gradients_are_alive(world: int) -> None:
    for stage in (2, 3):
        for lowered in (False, True):
            for peak, unit in worlds.run(_peak, world, stage, lowered):
                assert peak <= 2 * unit + (unit // world if world > 1 else 0)  # and the shard that is being reduced


# -- What cannot be exact ----------------------------------------------------------------------------------------------


class Started:
    """An engine after the first backward."""

    def __init__(self, stage: int = 2, **options: Any) -> None:
        self.engine = ZeroEngine(stage, units=["Block"], step="backward", **options)
        self.module = self.engine.shard(TinyGPT())
        self.optimizer = self.engine.attach(torch.optim.AdamW(self.module.parameters()))
        self.backward()

    def backward(self) -> None:
        token_loss(self.module, self.engine.rank, 0).backward()

    def lowered(self) -> None:
        self.optimizer.param_groups[0]["lr"] *= 0.5
        self.optimizer.step()


MISUSE: list[tuple[Callable[[Started], Any], str]] = [
    (lambda run: run.engine.clip_grad_norm(run.optimizer, 1.0), "Clipping by norm does not work with `step='back"),
    (lambda run: run.engine.clip_grad_value(run.optimizer, 1.0), "Clipping by value does not work"),
    (lambda run: run.engine.grad_norm(), "The norm of all gradients does not work"),
    (lambda run: run.engine.unscale(run.optimizer, 0.5), "Scaling of the loss does not work"),
    (lambda run: run.engine.microbatch(last=False).__enter__(), "Accumulating gradients over micro-batches"),
    (lambda run: run.engine.full_grad(run.module.head.weight), "Reading gradients does not work"),
    (lambda run: run.module.head.weight.grad, "Reading the gradient of `head.weight` does not work"),
    (lambda run: run.module.zero_grad(), "Reading the gradient of `.*` does not work"),
    (lambda run: (run.optimizer.step(), run.module.head.weight.grad), "Reading the gradient of `head.weight`"),
    (lambda run: setattr(run.module.head.weight, "grad", None), "Dropping the gradient of `head.weight` between"),
    (lambda run: delattr(run.module.head.weight, "grad"), "Dropping the gradient of `head.weight` between"),
    (lambda run: setattr(run.module.head.weight, "grad", torch.ones(3)), "Assigning the gradient of `head.weight`"),
    (lambda run: run.engine.full_param(run.module.head.weight), "cannot be read or saved before `optimizer.step"),
    (lambda run: run.engine.records(), "cannot be read or saved before `optimizer.step"),
    (lambda run: run.optimizer.zero_grad(), "`zero_grad` was called between backward and `optimizer.step"),
    (lambda run: run.backward(), "`optimizer.step\\(\\)` is missing|is used between its step in"),
    (lambda run: (run.optimizer.step(), run.backward()), "`optimizer.zero_grad\\(\\)` is missing"),
    (Started.lowered, "`lr` was changed from 0.001 to 0.0005 between backward and"),
    (lambda run: run.optimizer.step(lambda: 0.0), "which `step='backward'` excludes"),
    (lambda run: run.engine.attach(*[torch.optim.SGD(run.module.parameters())] * 2), "is for one optimizer, got 2"),
    (lambda run: run.engine.attach(torch.optim.RMSprop(run.module.parameters())), "got `RMSprop`"),
    (lambda run: run.engine.attach(torch.optim.AdamW(run.module.parameters(), foreach=True)), "without `foreach`"),
]


def _misuse(rank: int, world: int) -> None:
    for stage in (2, 3):
        for act, message in MISUSE:
            run = Started(stage)
            if stage == 3 and "grad" in message and "head" in message:
                continue  # a released parameter: seen below
            with pytest.raises((ValueError, RuntimeError), match=message):
                act(run)
    for options, message in (({"stage": 0}, "does not work with `stage=0`"),):
        with pytest.raises(ValueError, match=message):
            ZeroEngine(**options, step="backward").shard(TinyGPT())


def test_what_needs_all_gradients_is_refused_by_name() -> None:
    worlds.run(_misuse, 2)


def _zeroed_by_the_module(rank: int, world: int) -> list[str]:
    """A loop in which `module.zero_grad()` drops gradients, or another way that PyTorch has."""
    ways: list[Callable[[nn.Module, Optimizer], Any]] = [
        lambda module, optimizer: optimizer.zero_grad(),
        lambda module, optimizer: module.zero_grad(),
        lambda module, optimizer: module.zero_grad(set_to_none=False),
        lambda module, optimizer: [child.zero_grad() for child in module.children()],
        lambda module, optimizer: [setattr(param, "grad", None) for param in module.parameters()],
        lambda module, optimizer: (module.zero_grad(), optimizer.zero_grad()),
    ]
    found = []
    for stage in (1, 3):
        outcomes = []
        for zero in ways:

            def program(run: Any, zero: Any = zero) -> None:
                optimizer = torch.optim.AdamW(run.module.parameters(), lr=1e-2)
                run.attach(optimizer)
                for step in range(2):
                    run.backward(token_loss(run.module, run.rank, step))
                    optimizer.step()
                    zero(run.module, optimizer)

            outcomes.append(train_zero(partial(TinyGPT, depth=1), program, rank, world, stage=stage, step="backward"))
        found += [difference(outcome, outcomes[0]) for outcome in outcomes[1:]]
    return found


def test_module_zero_grad_drops_gradients_that_were_stepped_in_the_backward() -> None:
    for found in worlds.run(_zeroed_by_the_module, 2):
        assert not any(found), found


def _refused(rank: int, world: int) -> None:
    engine = ZeroEngine(2, step="backward")
    module = engine.shard(nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2)))
    groups = [{"params": module[1].parameters()}, {"params": module[0].parameters()}]
    optimizer = engine.attach(torch.optim.AdamW(groups))
    with pytest.raises(ValueError, match="`0.weight` has a sparse gradient"):
        module(torch.tensor([1])).sum().backward()
    flat = engine._state.attached.of(optimizer)._flat_step
    assert flat is not None
    assert not any(flat.has_calls(buffer) for buffer in engine._state.buffers)
    engine.close()


def test_nothing_is_planned_for_a_unit_that_is_refused() -> None:
    worlds.run(_refused, 1)


def _clamped(rank: int, world: int, offload: str | None) -> None:
    run = Started(offload=offload)
    run.optimizer.step()
    run.optimizer.zero_grad()

    def clamp(*_: Any) -> None:
        for param in run.module.parameters():
            param.data.clamp_(-0.01, 0.01)

    run.optimizer.register_step_post_hook(clamp)
    run.engine.attach(run.optimizer)
    run.backward()
    run.optimizer.step()
    assert all(run.engine.full_param(param).abs().max() < 0.0101 for param in run.module.parameters())


@pytest.mark.parametrize("offload", [None, "cpu"])
def test_a_hook_behind_the_step_sees_values_that_were_stepped_in_the_backward(offload: str | None) -> None:
    worlds.run(_clamped, 2, offload)


class Detached(Block):
    """Uses a weight once more, behind what brings its gradient."""

    def inner(self, x: Tensor) -> Tensor:
        mixed = F.linear(x.sin(), self.up.weight.detach())
        return super().inner(x + mixed[..., : x.shape[-1]])


def _comes_back(rank: int, world: int) -> list[str]:
    """Where a backward uses a weight after its step, it sees the old values or says so."""
    outcomes = []
    for stage in (2, 3):
        for precision in (MixedPrecision(), MixedPrecision(compute_dtype=torch.bfloat16)):
            results: list[Any] = []
            for step in ("now", "backward"):
                worlds.seed()
                engine = ZeroEngine(stage, units=["Detached"], precision=precision, step=step)
                module = engine.shard(TinyGPT(blocks=[Detached() for _ in range(2)]))
                optimizer = engine.attach(torch.optim.AdamW(module.parameters(), lr=0.1))
                lowered = precision.compute_dtype is not None
                with torch.autocast("cpu", torch.bfloat16, enabled=lowered):
                    loss = token_loss(module, rank, 0)
                try:
                    loss.backward()
                    optimizer.step()
                    results.append([engine.full_param(param) for param in module.parameters()])
                except RuntimeError as error:
                    results.append(str(error))
            if isinstance(results[1], str):
                outcomes.append("refused")
                assert "modified by an inplace operation" in results[1] or "is used between" in results[1]
            else:
                assert all(torch.equal(mine, theirs) for mine, theirs in zip(*results, strict=True))
                outcomes.append("equal")
    return outcomes


def test_a_backward_that_comes_back_to_a_stepped_unit_sees_old_values_or_says_so() -> None:
    (outcomes,) = worlds.run(_comes_back, 1)
    assert len(outcomes) == 4


# -- Through the Trainer -----------------------------------------------------------------------------------------------


class Watches(Net):
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        pass


class Validates(Net):
    def validation_step(self, batch: Any, index: int) -> Tensor:
        loss: Tensor = self.training_step(batch, index)
        return loss


def _validate(rank: int, world: int, stage: int) -> None:
    results = []
    for step in ("now", "backward"):
        run = trainer(rank, world, ZeroStrategy(stage=stage, step=step), val_check_interval=1)
        run.fit(seeded(Validates), loader(rank, world), loader(rank, world))
        results.append(weights(run))
    assert_equal(*results, what=stage)


@pytest.mark.parametrize("stage", sample([1, 2, 3], 3))
def test_a_fit_with_validation_steps_in_the_backward(stage: int) -> None:
    worlds.run(_validate, 2, stage)


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)


def _fit(rank: int, world: int) -> None:
    plain = trainer(rank, world, ZeroStrategy(stage=2))
    plain.fit(seeded(Net), loader(rank, world))
    for offload in (None, "cpu"):
        run = trainer(rank, world, ZeroStrategy(stage=2, offload=offload, step="backward"))
        run.fit(seeded(Net), loader(rank, world))
        assert_equal(weights(run), weights(plain), what=offload)
    refused: list[tuple[type[Net], dict[str, Any], str]] = [
        (Net, {"gradient_clip_val": 0.5}, "`gradient_clip_val=0.5`"),
        (Net, {"accumulate_grad_batches": 2}, "`accumulate_grad_batches=2`"),
        (Net, {"callbacks": GradientAccumulationScheduler({1: 4})}, "`GradientAccumulationScheduler`"),
        (Normed, {"callbacks": StochasticWeightAveraging(0.1)}, "`StochasticWeightAveraging` of a module with batch"),
        (Net, {"precision": "16-true"}, "precision='16-true'"),
        (Watches, {}, "an overridden `on_before_optimizer_step`"),
    ]
    for make, options, message in refused:
        with pytest.raises(ValueError, match=f"`step='backward'` does not work with {message}"):
            trainer(rank, world, ZeroStrategy(stage=2, step="backward"), **options).fit(
                seeded(make), loader(rank, world)
            )


def test_fits_step_in_the_backward_or_say_why_not() -> None:
    worlds.run(_fit, 2)
