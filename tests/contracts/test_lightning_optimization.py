"""Optimizers, schedules, hooks and skipped steps work under the strategy as under ``strategy="ddp"``."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_zero.lightning.precision import LossScale
from lightning_zero.lightning.strategy import ZeroStrategy
from tests.lightning_programs import (
    STAGES,
    WORLD,
    Block,
    Net,
    Sgd,
    assert_equal,
    data,
    loader,
    parity,
    seeded,
    trainer,
    weights,
)
from tests.worlds import run


class Gan(LightningModule):
    """Two optimizers under manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, noise = batch
        generator, critic = self.optimizers()  # type: ignore[misc]
        self.toggle_optimizer(generator)
        loss = -self.critic(self.generator(noise)).mean()
        generator.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(generator, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        generator.step()
        self.untoggle_optimizer(generator)
        self.toggle_optimizer(critic)
        loss = self.critic(self.generator(noise).detach()).mean() - self.critic(real).mean()
        critic.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(critic, gradient_clip_val=0.05, gradient_clip_algorithm="value")
        critic.step()
        self.untoggle_optimizer(critic)

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.Adam(self.generator.parameters(), lr=0.01, fused=True),
            torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.9, fused=True),
        )


def gan(rank: int, world: int) -> None:
    parity(rank, world, Gan, atol=1e-6, reference="ddp_find_unused_parameters_true")


def test_gan_with_manual_optimization_equals_ddp() -> None:
    run(gan, WORLD)


class SometimesNone(Net):
    ranks: tuple[int, ...] = (0, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1 and self.global_rank in self.ranks:
            return None
        return super().training_step(batch, batch_idx)


class NoneOnOne(SometimesNone):
    ranks = (1,)


class ZeroOnOne(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scale = 0.0 if batch_idx == 1 and self.global_rank == 1 else 1.0
        return scale * super().training_step(batch, batch_idx)


def none_everywhere(rank: int, world: int) -> None:
    keep = [0, 2, 3]
    short = TensorDataset(*(torch.cat([t[8 * k : 8 * k + 8] for k in keep]) for t in data().tensors))
    plain = trainer(rank, world, "ddp", max_epochs=1)
    plain.fit(seeded(Net), loader(rank, world, dataset=short))
    one_zero = trainer(rank, world, "ddp", max_epochs=1)
    one_zero.fit(seeded(ZeroOnOne), loader(rank, world))
    expected, expected_one = weights(plain), weights(one_zero)
    for stage in STAGES:
        fitted = trainer(rank, world, stage, max_epochs=1)
        fitted.fit(seeded(SometimesNone), loader(rank, world))
        assert_equal(weights(fitted), expected, what=f"stage {stage}")
        fitted = trainer(rank, world, stage, max_epochs=1)
        fitted.fit(seeded(NoneOnOne), loader(rank, world))
        assert_equal(weights(fitted), expected_one, what=f"stage {stage}, one rank")


def test_training_step_that_returns_none_skips_the_step() -> None:
    run(none_everywhere, WORLD)


class Outputs(Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(sorted(outputs))


def none_to_callbacks(rank: int, world: int) -> None:
    for every in (1, 2):
        outputs = Outputs()
        fitted = trainer(rank, world, 2, max_epochs=1, callbacks=[outputs], accumulate_grad_batches=every)
        fitted.fit(seeded(NoneOnOne), loader(rank, world))
        assert outputs.seen == [["loss"], ["loss"] if rank == 0 else [], ["loss"], ["loss"]]


def test_a_step_that_returns_none_shows_no_loss_to_callbacks() -> None:
    """A learning rate finder counted a loss of zero."""
    run(none_to_callbacks, WORLD)


class Overrides(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.calls.append("backward")
        (2 * loss).backward()

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.calls.append("optimizer_step")
        optimizer_closure()
        optimizer.step()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.calls.append("optimizer_zero_grad")
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.calls.append("lr_scheduler_step")
        scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, fused=True)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def overrides(rank: int, world: int) -> None:
    parity(rank, world, Overrides)
    fitted = trainer(rank, world, 3, max_epochs=1, limit_train_batches=1)
    module = Overrides()
    fitted.fit(module, loader(rank, world))
    assert module.calls == ["optimizer_step", "optimizer_zero_grad", "backward", "lr_scheduler_step"]


def test_overridden_hooks_are_called() -> None:
    run(overrides, WORLD)


class Backwards(Sgd):
    """Uses gradients in an overridden ``backward``."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)
        self.use(loss)

    def use(self, loss: Tensor) -> None:
        raise NotImplementedError


class Clips(Backwards):
    def use(self, loss: Tensor) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class ClipsTwice(Backwards):
    def use(self, loss: Tensor) -> None:
        for value in (0.2, 0.1):
            nn.utils.clip_grad_norm_(self.parameters(), value)


class Masks(Backwards):
    def use(self, loss: Tensor) -> None:
        for param in self.parameters():
            assert param.grad is not None
            param.grad.mul_((torch.arange(param.numel()) % 2).view(param.shape))


class AsksWhetherNone(Backwards):
    def use(self, loss: Tensor) -> None:
        if all(param.grad is not None for param in self.parameters()):
            self.last.weight.grad = None


class Assigns(Backwards):
    def use(self, loss: Tensor) -> None:
        self.first.weight.grad = torch.ones_like(self.first.weight)


class StepsTwice(Backwards):
    def use(self, loss: Tensor) -> None:
        self.optimizers().step()  # type: ignore[union-attr]


class ReadsOnOne(Backwards):
    """Only rank 0 looks."""

    def use(self, loss: Tensor) -> None:
        if self.global_rank == 0:
            assert self.first.bias.grad is not None


class DropsBetween(Backwards):
    """The optimizer, or the module, drops the gradients of the first of two backwards."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(retain_graph=True)
        self.drop()
        (0.5 * loss).backward()
        self.use(loss)

    def drop(self) -> None:
        self.zero_grad()

    def use(self, loss: Tensor) -> None:
        pass


class OptimizerDropsBetween(DropsBetween):
    def drop(self) -> None:
        self.optimizers().zero_grad()  # type: ignore[union-attr]


class AddsToRead(DropsBetween):
    """A backward adds to gradients that were clipped, and the sum is clipped."""

    def drop(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.3)

    def use(self, loss: Tensor) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.3)


class RunsForward(Backwards):
    """Runs the model behind the backward, and changes gradients then."""

    def use(self, loss: Tensor) -> None:
        with torch.no_grad():
            self(torch.ones(2, 4))
        for param in self.parameters():
            if param.grad is not None:
                param.grad.mul_(0.5)


class _Manual(Backwards):
    """Under manual optimization, in which the scope of ``training_step`` is open in ``backward``."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class RunsForwardInManual(_Manual, RunsForward):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(6) for _ in range(6)])  # more than reductions that are in flight


class RunsForwardBeforeInManual(_Manual):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss + sum(param.square().sum() for param in self.parameters()) + 0 * self(torch.ones(2, 4)).sum()).backward()


class GathersBefore(Backwards):
    """Makes a collective in front of the backward, and another one behind it."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.all_gather(loss.detach())
        super().backward(loss)

    def use(self, loss: Tensor) -> None:
        self.log("loss", loss.detach(), sync_dist=True)
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class GathersInManual(_Manual, GathersBefore):
    pass


class Penalises(Backwards):
    """Takes the gradient of a gradient, and then a plain backward."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.inputs = batch[0].requires_grad_()
        return super().training_step((self.inputs, batch[1]), batch_idx)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (slope,) = torch.autograd.grad(loss, self.inputs, create_graph=True)
        (loss + slope.square().sum()).backward()
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class ReturnsNone(Backwards):
    """One rank has nothing to add in the second step; what its ``backward`` does to gradients counts all the same."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1 and self.global_rank == 1:
            return None if isinstance(self.trainer.strategy, ZeroStrategy) else 0 * loss
        return loss


class ClipsOfNothing(ReturnsNone, Clips):
    pass


class MasksOfNothing(ReturnsNone, Masks):
    pass


class RunsForwardBefore(Backwards):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss + self(torch.ones(2, 4)).mean()).backward()


def runs_forward_before(rank: int, world: int) -> None:
    for stage in STAGES:
        with pytest.raises(RuntimeError, match="A forward of the model runs inside of `LightningModule.backward`"):
            trainer(rank, world, stage, max_epochs=1).fit(RunsForwardBefore(), loader(rank, world))


def test_a_forward_before_the_backward_in_an_overridden_backward_is_refused() -> None:
    run(runs_forward_before, WORLD)


def uses_in_backward(rank: int, world: int, makes: Sequence[Callable[[], LightningModule]], every: int = 1) -> None:
    stages = STAGES if every == 1 else (0, 1)  # micro-batches of one rank, of which DDP shows the sum
    options = {"max_epochs": 1, "limit_train_batches": 2 * every, "accumulate_grad_batches": every}
    for make in makes:
        parity(rank, world, make, atol=1e-6, stages=stages, **options)


@pytest.mark.parametrize(
    ("make", "every"),
    [(one, 1) for one in (Clips, ClipsTwice, Masks, AsksWhetherNone, Assigns, StepsTwice, ReadsOnOne, RunsForward)]
    + [(one, 1) for one in (RunsForwardInManual, RunsForwardBeforeInManual, GathersBefore, GathersInManual, Penalises)]
    + [(one, 1) for one in (ClipsOfNothing, MasksOfNothing)]
    + [(one, 2) for one in (Clips, Masks, AsksWhetherNone, ReadsOnOne)],
)
def test_gradients_can_be_used_in_an_overridden_backward(make: Callable[[], LightningModule], every: int) -> None:
    """They were None there, and what the program did with them was lost."""
    run(uses_in_backward, WORLD, [make], every)


class Traced(Sgd):
    """Its ``backward`` is Lightning's, in a wrapper that says so."""

    @functools.wraps(LightningModule.backward)
    def backward(self, *args: Any, **kwargs: Any) -> None:
        LightningModule.backward(self, *args, **kwargs)
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)


def wrapped_backward(rank: int, world: int) -> None:
    parity(rank, world, Traced, atol=1e-6, max_epochs=1, limit_train_batches=2)


def test_gradients_can_be_used_in_a_wrapper_around_the_backward_of_lightning() -> None:
    run(wrapped_backward, WORLD)


class ReadsBetween(DropsBetween):
    def drop(self) -> None:
        assert self.first.bias.grad is not None


class ReadsBetweenOnOne(DropsBetween):
    """Only rank 0 looks between the backwards."""

    def drop(self) -> None:
        if self.global_rank == 0:
            assert self.first.bias.grad is not None


def two_backwards(rank: int, world: int, make: Callable[[], LightningModule]) -> None:
    """DDP does not reduce the second backward: there every rank has the batches of all."""
    options: dict[str, Any] = {"max_epochs": 1, "limit_train_batches": 2}
    reference = trainer(rank, world, "ddp", **options)
    reference.fit(seeded(make), loader(0, 1, batch=4 * world))
    for stage in STAGES:
        fitted = trainer(rank, world, stage, **options)
        fitted.fit(seeded(make), loader(rank, world))
        assert_equal(weights(fitted), weights(reference), 1e-6, f"stage {stage}")


@pytest.mark.parametrize("make", [DropsBetween, OptimizerDropsBetween, AddsToRead, ReadsBetween, ReadsBetweenOnOne])
def test_gradients_can_be_used_between_two_backwards_of_a_loss(make: Callable[[], LightningModule]) -> None:
    """The second one read segments in the place of weights."""
    run(two_backwards, WORLD, make)


@pytest.mark.parametrize("make", [Clips, DropsBetween, OptimizerDropsBetween, AddsToRead])
def test_gradients_can_be_used_in_an_overridden_backward_on_one_rank(make: Callable[[], LightningModule]) -> None:
    run(uses_in_backward, 1, [make])


class ReadsGradients(Net):
    """Reads gradients where Lightning says they may be read."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []
        self.wholes: list[Tensor] = []

    def on_after_backward(self) -> None:
        self.norms.append(float(self.first.weight.grad.norm()))  # type: ignore[union-attr]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(float(grad_norm(self, 2)["grad_2.0_norm_total"]))
        strategy = self.trainer.strategy
        if isinstance(strategy, ZeroStrategy):
            whole = strategy.full_grad(self.last.weight)
            assert whole is not None
            self.norms.append(float(strategy.grad_norm(optimizer)))
        else:
            whole = self.last.weight.grad
            assert whole is not None
            self.norms.append(math.sqrt(sum(float(p.grad.square().sum()) for p in self.parameters())))  # type: ignore[union-attr,misc]
        self.wholes.append(whole.clone())


def read_gradients(rank: int, world: int) -> None:
    def fit(strategy: Any) -> tuple[list[float], list[Tensor]]:
        fitted = trainer(rank, world, strategy, max_epochs=1)
        module = seeded(ReadsGradients)
        fitted.fit(module, loader(rank, world))
        assert isinstance(module, ReadsGradients)
        return module.norms, module.wholes

    norms, wholes = fit("ddp")
    for stage in STAGES:
        got_norms, got_wholes = fit(stage)
        assert got_norms == pytest.approx(norms, rel=1e-5), f"stage {stage}"
        assert all(torch.equal(a, b) for a, b in zip(got_wholes, wholes, strict=True)), f"stage {stage}"


def test_gradients_can_be_read_in_hooks() -> None:
    run(read_gradients, WORLD)


class Schedulers(Net):
    def configure_optimizers(self) -> Any:
        groups = [{"params": self.first.parameters(), "lr": 0.1, "name": "in"}, {"params": self.blocks.parameters()}]
        optimizer = torch.optim.SGD([*groups, {"params": self.last.parameters(), "momentum": 0.5}], lr=0.2, fused=True)
        by_step = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": by_step, "interval": "step", "frequency": 2}}


def schedulers(rank: int, world: int, folder: str) -> None:
    def options(name: str) -> dict[str, Any]:
        logger = CSVLogger(folder, name=name)
        return {"callbacks": LearningRateMonitor(), "logger": logger, "log_every_n_steps": 1}

    reference = trainer(rank, world, "ddp", **options("ddp"))
    reference.fit(seeded(Schedulers), loader(rank, world))
    for stage in STAGES:
        fitted = trainer(rank, world, stage, **options(str(stage)))
        fitted.fit(seeded(Schedulers), loader(rank, world))
        assert_equal(weights(fitted), weights(reference), what=f"stage {stage}")
        seen, expected = (t.callbacks[0].lrs for t in (fitted, reference))  # type: ignore[attr-defined]
        assert seen == expected


def test_schedulers_and_groups_equal_ddp(tmp_path: Path) -> None:
    run(schedulers, WORLD, str(tmp_path))


class Backboned(Net):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.blocks

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, fused=True)


def finetune(rank: int, world: int) -> None:
    def fit(strategy: Any) -> dict[str, Tensor]:
        callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda _: 1.5, verbose=False)
        fitted = trainer(rank, world, strategy, callbacks=callback, max_epochs=3)
        fitted.fit(seeded(Backboned), loader(rank, world))
        assert len(fitted.optimizers[0].param_groups) == 2
        return weights(fitted)

    expected = fit(0)
    start = dict(seeded(Backboned).named_parameters())
    assert not torch.equal(expected["blocks.0.linear.weight"], start["blocks.0.linear.weight"].detach())
    for stage in (1, 2, 3):
        assert_equal(fit(stage), expected, what=f"stage {stage}")


def test_backbone_finetuning_thaws_and_stages_agree() -> None:
    run(finetune, WORLD)


def finetune_again(rank: int, world: int, folder: str) -> None:
    def fit(stage: int, name: str, resume: str | None = None) -> dict[str, Tensor]:
        callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda _: 1.5, verbose=False)
        saver = ModelCheckpoint(f"{folder}/{name}", filename="{epoch}", save_top_k=-1)
        options: dict[str, Any] = {"max_epochs": 4, "enable_checkpointing": True}
        fitted = trainer(rank, world, stage, callbacks=[callback, saver], **options)
        fitted.fit(seeded(Backboned), loader(rank, world), ckpt_path=resume)
        return weights(fitted)

    for stage in STAGES:
        expected = fit(stage, str(stage))
        for epoch in (0, 2):
            path = f"{folder}/{stage}/epoch={epoch}.ckpt"
            assert_equal(fit(3 - stage, f"{stage}-{epoch}", path), expected, 1e-6, (stage, epoch))


def test_backbone_finetuning_resumes_before_and_after_it_thaws(tmp_path: Path) -> None:
    run(finetune_again, WORLD, str(tmp_path))


def finetune_once(rank: int, world: int) -> None:
    calls = []
    callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1)
    own = vars(callback)["finetune_function"] = lambda *args: calls.append(args)
    for _ in range(2):
        trainer(rank, world, 1, callbacks=callback, max_epochs=1).fit(seeded(Backboned), loader(rank, world))
        assert vars(callback)["finetune_function"] is own
    assert len(calls) == 2
    callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1)
    trainer(rank, world, 1, callbacks=callback, max_epochs=1).fit(seeded(Backboned), loader(rank, world))
    assert "finetune_function" not in vars(callback)


def test_a_finetuning_callback_has_its_own_function_again_behind_a_fit() -> None:
    run(finetune_once, 1)


class Rated(Sgd):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, fused=True)


def find_lr(rank: int, world: int, folder: str) -> None:
    def fit(strategy: Any, how: str) -> tuple[float, dict[str, Tensor]]:
        os.chdir(folder)
        finder = LearningRateFinder(num_training_steps=12, min_lr=1e-3, max_lr=0.5)
        fitted = trainer(
            rank, world, strategy, max_epochs=1, callbacks=[finder] if how == "callback" else [],
            default_root_dir=folder,
        )  # fmt: skip
        module = seeded(Rated)
        batches = loader(rank, world, size=64)
        if how == "tuner":
            found = Tuner(fitted).lr_find(module, batches, num_training=12, min_lr=1e-3, max_lr=0.5)
            assert found is not None
        fitted.fit(module, batches)
        return float(module.lr), weights(fitted)  # type: ignore[arg-type]

    for how in ("tuner", "callback"):
        lr, expected = fit("ddp", how)
        for stage in (0, 2, 3):
            got_lr, got = fit(stage, how)
            assert got_lr == pytest.approx(lr, rel=1e-5)
            assert_equal(got, expected, atol=1e-6, what=f"{how}, stage {stage}")


@pytest.mark.slow
def test_learning_rate_finder_leaves_the_fit_as_if_it_had_not_run(tmp_path: Path) -> None:
    run(find_lr, WORLD, str(tmp_path))


class NotElementwise(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def refuse_lbfgs(rank: int, world: int) -> None:
    for stage in (1, 2, 3):
        with pytest.raises(Exception, match="LBFGS"):
            trainer(rank, world, stage).fit(NotElementwise(), loader(rank, world))


def test_lbfgs_is_refused_by_name() -> None:
    run(refuse_lbfgs, WORLD)


def lbfgs_at_stage_0(rank: int, world: int) -> None:
    parity(rank, world, NotElementwise, atol=1e-6, stages=(0,), max_epochs=1, limit_train_batches=2)


def test_lbfgs_at_stage_0_equals_ddp() -> None:
    run(lbfgs_at_stage_0, WORLD)


class Overflows(Sgd):
    """The gradient of one rank is infinite in one step."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1 and self.global_rank == 1:
            loss = loss * float("inf")
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())  # type: ignore[union-attr]


class SkipsOne(Sgd):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


def overflow(rank: int, world: int, folder: str) -> list[Any]:
    def options(scale: float) -> dict[str, Any]:
        return {"max_epochs": 1, "plugins": [MixedPrecision("16-mixed", "cpu")]}

    def zero(stage: Any) -> ZeroStrategy:
        return ZeroStrategy(stage=stage, units=["Block"], loss_scale=LossScale(init_scale=64.0, hysteresis=1))

    scales = []
    for stage in STAGES:
        fitted = trainer(rank, world, zero(stage), **options(64.0))
        module = seeded(Overflows)
        fitted.fit(module, loader(rank, world))
        skipped = trainer(rank, world, zero(stage), **options(64.0))
        skipped.fit(seeded(SkipsOne), loader(rank, world))
        assert_equal(weights(fitted), weights(skipped), atol=1e-3, what=f"stage {stage}")
        assert all(value.isfinite().all() for value in weights(fitted).values())
        scales.append(module.scales)
        path = Path(folder) / f"scale{stage}.ckpt"
        fitted.save_checkpoint(path)
        resumed = trainer(rank, world, zero(stage), **options(64.0) | {"max_epochs": 2, "limit_train_batches": 1})
        module = seeded(Overflows)
        resumed.fit(module, loader(rank, world), ckpt_path=str(path))
        assert module.scales == [32.0]
    return scales


def test_overflow_on_one_rank_skips_the_step_on_all_and_the_scale_is_restored(tmp_path: Path) -> None:
    first, second = run(overflow, WORLD, str(tmp_path))
    assert first == second == [[64.0, 32.0, 32.0, 32.0]] * len(STAGES)


class Restarting(Net):
    """Reads and drops its moments in the second epoch, and assigns them in the third, through Lightning's wrapper."""

    def on_train_epoch_start(self) -> None:
        optimizer: Any = self.optimizers()
        assert hasattr(optimizer, "state")
        if self.current_epoch == 1:
            assert len(optimizer.state) == len(optimizer.state_dict()["state"]) > 0
            optimizer.state.clear()
            assert not optimizer.state
            assert not self.trainer.optimizers[0].state
        if self.current_epoch == 2:
            optimizer.state = {}  # of the wrapper alone, as under DDP
            assert (optimizer.state, bool(self.trainer.optimizers[0].state)) == ({}, True)


def _restarted(rank: int, world: int) -> None:
    parity(rank, world, Restarting, atol=1e-6, max_epochs=3)


def test_states_are_read_and_dropped_through_lightnings_wrapper() -> None:
    run(_restarted, WORLD)


def finetune_behind_an_evaluation(rank: int, world: int, folder: str) -> None:
    def fit(strategy: Any, path: str | None) -> dict[str, Tensor]:
        callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda _: 1.5, verbose=False)
        fitted = trainer(rank, world, strategy, callbacks=callback, max_epochs=2 if path is None else 1)
        module = seeded(Backboned)
        if path is not None:
            fitted.validate(module, loader(rank, world), ckpt_path=path, verbose=False)
        fitted.fit(module, loader(rank, world))
        if path is None:
            fitted.save_checkpoint(f"{folder}/thawed.ckpt")
        return weights(fitted)

    fit(1, None)
    found, start = fit(1, f"{folder}/thawed.ckpt"), torch.load(f"{folder}/thawed.ckpt", weights_only=False)
    frozen = "blocks.0.linear.weight"
    assert torch.equal(found[frozen], start["state_dict"][frozen])


def test_a_backbone_stays_frozen_in_a_fit_behind_an_evaluation_of_a_thawed_one(tmp_path: Path) -> None:
    run(finetune_behind_an_evaluation, WORLD, str(tmp_path))
