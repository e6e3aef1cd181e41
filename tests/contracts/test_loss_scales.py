"""Loss scaling in programs that clip, skip, accumulate and step as they like, beside DDP without a scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero import ZeroEngine
from lightning_zero.config import Pipeline
from lightning_zero.lightning.precision import LossScale
from lightning_zero.lightning.strategy import ZeroStrategy
from tests.contracts.test_optimizers_with_closures import Ahead, Careful
from tests.lightning_programs import Net, Ranks, assert_equal, loader, parity, seeded, trainer, weights
from tests.sampling import sample
from tests.worlds import run


class Manual(Net):
    """Steps by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def clip(self, optimizer: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=1000.0, gradient_clip_algorithm="norm")


class Skipping(Manual):
    """Clips in each batch, steps in every second one; the others overflow in the second epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        is_skipped = batch_idx % 2 == 0
        self.manual_backward(self.loss(batch) * (float("inf") if is_skipped and self.current_epoch else 1.0))
        self.clip(optimizer)
        if not is_skipped:
            optimizer.step()
        optimizer.zero_grad(set_to_none=self.current_epoch == 0)


class Accumulating(Manual):
    """Clips in each of two micro-batches."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch) / 2)
        self.clip(optimizer)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


class Twice(Manual):
    """Steps twice behind a backward."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        optimizer.step()


class Saved(Manual):
    """Assigns gradients that it has kept of two losses, scaled as they were."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        kept = []
        for factor in (0.4, 0.6):
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch) * factor)
            kept.append([param.grad.clone() for param in self.parameters()])  # type: ignore[union-attr]
        optimizer.zero_grad()
        for param, first, second in zip(self.parameters(), *kept, strict=True):
            param.grad = first + second
        optimizer.step()


class Two(Manual):
    """Has two optimizers, which step behind one backward."""

    def configure_optimizers(self) -> Any:
        body = [*self.first.parameters(), *self.blocks.parameters()]
        return [torch.optim.SGD(params, lr=0.05) for params in (body, list(self.last.parameters()))]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        body, head = self.optimizers()  # type: ignore[misc]
        body.zero_grad()
        head.zero_grad()
        self.manual_backward(self.loss(batch))
        body.step()
        head.step()


class Slower(Two):
    """The head accumulates over two steps of the body, whose gradients are dropped after the next backward's begin."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        body, head = self.optimizers()  # type: ignore[misc]
        body.zero_grad()
        self.manual_backward(self.loss(batch))
        body.step()
        if batch_idx % 2:
            head.step()
            head.zero_grad()


PROGRAMS = {one.__name__: one for one in (Skipping, Accumulating, Twice, Saved, Two, Slower)}
SCALE = LossScale(init_scale=64.0, window=2)


def _check(rank: int, world: int, name: str, stages: tuple[int, ...]) -> None:
    if name == "Saved":  # stage 0 has PyTorch's own parameters, which take no fp32 gradient for 16 bits
        stages = tuple(stage or 3 for stage in stages)
    parity(rank, world, PROGRAMS[name], atol=0.01, stages=stages, precision="16-true", ours={"loss_scale": SCALE})


@pytest.mark.parametrize("name", list(PROGRAMS))
@pytest.mark.parametrize("stages", sample([(0, 2), (1, 3)], (0, 2)), ids=str)
def test_a_gradient_is_divided_by_the_scale_of_its_loss_once(name: str, stages: tuple[int, ...]) -> None:
    run(_check, 2, name, stages)


def _freeze(rank: int, world: int, stage: int) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    engine = ZeroEngine(stage=stage)  # type: ignore[arg-type]
    engine.shard(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    engine.attach(optimizer)
    steps = engine.internals.steps

    def backward(scale: float) -> None:
        loss = scale * module(torch.ones(1, 2)).sum()
        with steps.scaled(scale), engine.backward_scope():
            loss.backward()

    with engine.microbatch(last=False):
        backward(4.0)
    module[1].bias.requires_grad_(False)
    backward(8.0)
    steps.unscale(optimizer, 8.0)
    for param, num_micro_batches in ((module[0].bias, 2), (module[1].bias, 1)):
        grad = engine.full_grad(param)
        assert grad is not None
        one = engine.full_param(module[1].weight).sum(0) if param is module[0].bias else torch.ones(2)
        torch.testing.assert_close(grad, num_micro_batches * one)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_gradient_that_waits_is_divided_by_the_scale_of_its_loss_though_its_parameter_is_frozen(stage: int) -> None:
    run(_freeze, 1, stage)


class CarefulHalf(Net):
    """Has a loss that is large in the second batch, and steps that take the closure."""

    optimizer: Any = Careful

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) * (100 if batch_idx == 1 else 1)

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=0.01)


class AheadHalf(CarefulHalf):
    optimizer = Ahead


def _closures(rank: int, world: int, make: type[Net]) -> None:
    options: dict[str, Any] = {"precision": "16-true", "gradient_clip_val": 2.0, "stages": (0, 2)}
    parity(rank, world, make, atol=0.01, ours={"loss_scale": SCALE}, **options)


@pytest.mark.parametrize("make", sample([CarefulHalf, AheadHalf], AheadHalf))
def test_closures_of_optimizers_are_scaled(make: type[Net]) -> None:
    run(_closures, 2, make)


class Overflowing(AheadHalf):
    """Overflows in the second batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) * (float("inf") if batch_idx == 1 else 1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        self.weights = [*getattr(self, "weights", []), strategy.full_param(self.last.weight).clone()]


def _overflow(rank: int, world: int) -> None:
    module = seeded(Overflowing)
    fitted = trainer(rank, world, ZeroStrategy(stage=2, loss_scale=SCALE), precision="16-true", max_epochs=1)
    fitted.fit(module, loader(rank, world))
    before, behind_first, behind_second, behind_third = module.weights[:4]  # type: ignore[index]
    assert not torch.equal(before, behind_first)
    assert torch.allclose(behind_first, behind_second, atol=1e-6)
    assert behind_third.isfinite().all()
    assert not torch.equal(behind_second, behind_third)
    assert fitted.precision_plugin.scaler.skipped == 1  # type: ignore[union-attr]


def test_an_optimizer_that_calls_the_closure_has_no_gradients_where_they_overflow() -> None:
    run(_overflow, 2)


class Raw(Manual):
    """Steps past Lightning."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        self.manual_backward(self.loss(batch))
        optimizer.step()


class Unscaled(Manual):
    """Runs its backward past Lightning, on top of one that is scaled."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch))
        self.loss(batch).backward()
        optimizer.step()


def _refused(rank: int, world: int, make: type[Net]) -> None:
    fitted = trainer(rank, world, ZeroStrategy(stage=2, loss_scale=SCALE), precision="16-true", max_epochs=1)
    fitted.fit(seeded(make), loader(rank, world))


@pytest.mark.parametrize(
    ("make", "message"), [(Raw, "without `use_pl_optimizer=False`"), (Unscaled, "Call `self.manual_backward")]
)
def test_steps_with_gradients_of_the_wrong_scale_are_refused(make: type[Net], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        run(_refused, 2, make)


class Frozen(Net):
    """Trains chosen modules in the first epoch and all, or the same ones, behind it."""

    first_epoch = ("blocks.1", "last")
    later = ("first", "blocks.0", "blocks.1", "last")

    def on_train_epoch_start(self) -> None:
        names = self.first_epoch if self.current_epoch == 0 else self.later
        for name in ("first", "blocks.0", "blocks.1", "last"):
            self.get_submodule(name).requires_grad_(name in names)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class FrozenBehind(Frozen):
    first_epoch = later = ("first", "blocks.0")


# Gradual unfreezing behind steps that overflow, and a scale that grows.
FROZEN: dict[type[Frozen], LossScale] = {
    Frozen: LossScale(init_scale=2.0**18, hysteresis=1),
    FrozenBehind: LossScale(init_scale=4.0, window=2),
}


def _fit_in_stages(rank: int, world: int, make: type[Frozen]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    pieces = 2 if world == 1 else 1
    options: dict[str, Any] = {"stage": 0} if world == 1 else {"pipeline": Pipeline(stages=2, microbatches=2)}
    strategy = ZeroStrategy(loss_scale=FROZEN[make], **options)
    fitted = trainer(
        0, world, strategy, precision="16-true", accumulate_grad_batches=pieces, environment=Ranks(rank, world)
    )
    fitted.fit(seeded(make), loader(0, 1, size=64, batch=8 // pieces))
    return fitted.precision_plugin.scaler.state_dict(), weights(fitted)  # type: ignore[union-attr]


@pytest.mark.parametrize("make", sample(list(FROZEN), Frozen))
def test_stages_have_one_loss_scale_where_one_of_them_has_no_gradients(make: type[Frozen]) -> None:
    state, expected = run(_fit_in_stages, 1, make)[0]
    assert state["scale"] != FROZEN[make].init_scale
    for found, values in run(_fit_in_stages, 2, make):
        assert found == state
        assert_equal(values, expected, 1e-3)
