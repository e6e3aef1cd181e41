"""The closure of an optimizer's own step is code of the program: hooks find in it all that they find elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero import ZeroEngine
from lightning_zero.lightning.precision import LossScale
from lightning_zero.lightning.strategy import ZeroStrategy
from tests.lightning_programs import Net, Sgd, assert_equal, loader, parity, seeded, trainer, weights
from tests.worlds import count_collectives, run


class Momentum(torch.optim.Optimizer):
    """Has a step of its own, and methods beside it, as schedule-free ones have."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})
        self.is_training = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                state["exp_avg"].mul_(0.9).add_(param.grad)
                param.add_(state["exp_avg"], alpha=-group["lr"])
        return loss

    @torch.no_grad()
    def move(self, factor: float) -> None:
        for param in self.param_groups[0]["params"]:
            if param in self.state:
                param.add_(self.state[param]["exp_avg"], alpha=factor)


class Own(Net):
    def configure_optimizers(self) -> Any:
        return Momentum(self.parameters())


class ReadsAWeight(Own):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.seen = float(self.blocks[0].linear.weight.norm())  # type: ignore[operator]


class ReadsAState(Own):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for param in self.parameters():
            if param in optimizer.state:
                optimizer.state[param]["exp_avg"].mean()


class LooksAhead(Own):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.trainer.optimizers[0]
        optimizer.move(0.01)
        with torch.no_grad():
            self.ahead = float(self.loss(batch))
        optimizer.move(-0.01)
        return self.loss(batch)


class CallsLast(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        super().step()
        return closure() if closure is not None else None


class Ignores(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step()


class Manual(Net):
    kind: Any = CallsLast

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), lr=0.01)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class ManualIgnores(Manual):
    kind = Ignores


class Freezes(Sgd):
    """Freezes a part on one rank, when all is trained."""

    def on_train_end(self) -> None:
        if self.global_rank == 0:
            self.freeze()


class Extra(torch.optim.Optimizer):
    """Evaluates the closure again at a point further on (extragradient)."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if closure is None:
            return None
        with torch.enable_grad():
            loss = closure()
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        start = [param.detach().clone() for param in params]
        for param in params:
            param.add_(param.grad, alpha=-self.defaults["lr"])
        with torch.enable_grad():
            closure()
        for param, old in zip(params, start, strict=True):
            param.copy_(old - self.defaults["lr"] * param.grad)
        return loss


class ManualExtra(Manual):
    kind = Extra

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()

        def closure() -> Any:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)

    def configure_optimizers(self) -> Any:
        return Extra(self.parameters())


class HooksBefore(Sgd):
    """Its hook sees the gradients of the step before, and what it makes of them is dropped."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(self.halve)
        return optimizer

    def halve(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for param in self.parameters():
            if param.grad is not None:
                param.grad.mul_(0.5)


SCALED = {"precision": "16-true", "atol": 0.01, "stages": (2,), "ours": {"loss_scale": LossScale(init_scale=64.0)}}
CASES: dict[str, tuple[type[Net], dict[str, Any]]] = {
    "a weight": (ReadsAWeight, {"precision": "bf16-mixed", "atol": 0.05, "stages": (0, 1, 2)}),
    "a method": (LooksAhead, {"atol": 1e-5, "stages": (1, 2)}),
    "a scale": (Manual, SCALED),
    "no call": (ManualIgnores, SCALED),
    "two closures": (ManualExtra, {"atol": 1e-5, "stages": (1, 3)}),
    "a hook before": (HooksBefore, {"atol": 1e-6, "stages": (0, 2, 3)}),
    "the end": (Freezes, {"atol": 1e-6, "stages": (0, 2)}),
}


def _check(rank: int, world: int, name: str) -> None:
    make, options = CASES[name]
    parity(rank, world, make, max_epochs=1, **options)


@pytest.mark.parametrize("name", list(CASES))
def test_programs_train_as_under_ddp(name: str) -> None:
    run(_check, 2, name)


def _read(rank: int, world: int) -> None:
    trainer(rank, world, 2, max_epochs=1).fit(seeded(ReadsAState), loader(rank, world))


def test_states_that_a_hook_reads_are_no_plain_segments() -> None:
    with pytest.raises(RuntimeError, match="mean"):
        run(_read, 2)


class Foreach(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, foreach=True)


def _gathers(rank: int, world: int, make: type[Net]) -> int:
    with count_collectives() as ledger:
        trainer(rank, world, 2, max_epochs=2).fit(seeded(make), train_dataloaders=loader(rank, world))
    return ledger.calls["all_gather"]


def test_a_closure_gathers_nothing_more() -> None:
    assert run(_gathers, 2, Own)[0] == run(_gathers, 2, Foreach)[0]


class FreezesLater(Sgd):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.blocks[0].linear.bias.requires_grad_(False)  # type: ignore[union-attr,operator]


def _freezes(rank: int, world: int) -> None:
    found = []
    for step in ("auto", "backward"):
        strategy = ZeroStrategy(stage=2, units=["Block"], step=step)  # type: ignore[arg-type]
        fitted = trainer(rank, world, strategy, max_epochs=3)
        fitted.fit(seeded(FreezesLater), train_dataloaders=loader(rank, world))
        found.append(weights(fitted))
    assert_equal(found[1], found[0], 1e-6)


def _freezes_a_unit(rank: int, world: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)])
    engine = ZeroEngine(2, units=["Linear"], step="backward")
    engine.shard(module)
    optimizer = engine.attach(torch.optim.AdamW(module.parameters(), lr=0.1))
    before = None
    for number in range(4):
        if number == 1:
            module[0].requires_grad_(False)
            before = engine.full_param(module[0].weight).clone()  # type: ignore[arg-type]
        module(torch.full((2, 16), 1.0 + number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert before is not None
    assert torch.equal(engine.full_param(module[0].weight), before)  # type: ignore[arg-type]


@pytest.mark.parametrize("check", [_freezes, _freezes_a_unit])
def test_parameters_that_are_frozen_later_are_not_stepped_in_the_backward(check: Any) -> None:
    run(check, 2)
