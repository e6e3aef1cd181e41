"""Loops with several optimizers, groups, and parameters that are frozen for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from tests.contracts.programs.steps import attached, forward_backward
from tests.engine.optimizers import Lookahead, Momentum, ScheduleFree, Unfinished
from tests.references import WIDTH, Block, Trainer, token_loss


class Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(Block(), Block())
        self.critic = nn.Sequential(Block(), nn.Linear(WIDTH, 1))


@contextmanager
def _toggled(parameters: list[nn.Parameter]) -> Iterator[None]:
    for parameter in parameters:
        parameter.requires_grad_(False)
    yield
    for parameter in parameters:
        parameter.requires_grad_(True)


def alternating_optimizers(trainer: Trainer) -> None:
    generator, critic = trainer.module.generator, trainer.module.critic
    first = torch.optim.AdamW(generator.parameters(), lr=1e-2, eps=1e-4, fused=True)
    second = torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9, fused=True)
    trainer.attach(first, second)
    for step in range(6):
        noise = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * trainer.rank + step))
        optimizer, other = (first, critic) if step % 2 else (second, generator)
        with _toggled(list(other.parameters())):
            with trainer.scope():
                loss = critic(generator(noise)).mean() * (1 if step % 2 else -1) + critic(noise).square().mean()
            trainer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


def alternating_without_toggling(trainer: Trainer) -> None:
    """The other optimizer's gradients pile up until its own ``zero_grad``."""
    generator, critic = trainer.module.generator, trainer.module.critic
    optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-2, eps=1e-4, fused=True) for part in (generator, critic)]
    trainer.attach(*optimizers)
    for step in range(6):
        noise = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * trainer.rank + step))
        optimizer = optimizers[step % 2]
        optimizer.zero_grad()
        with trainer.scope():
            loss = critic(generator(noise)).square().mean()
        trainer.backward(loss)
        optimizer.step()


def two_optimizers_in_one_unit(trainer: Trainer) -> None:
    matrices = [parameter for parameter in trainer.module.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in trainer.module.parameters() if parameter.ndim < 2]
    optimizers = [
        torch.optim.AdamW(matrices, lr=1e-2, eps=1e-4, fused=True),
        torch.optim.SGD(vectors, lr=0.1, fused=True),
    ]
    trainer.attach(*optimizers)
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        forward_backward(trainer, step)
        for optimizer in optimizers:
            optimizer.step()


def decay_by_dimensions(trainer: Trainer) -> None:
    decayed = [parameter for parameter in trainer.module.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in trainer.module.parameters() if parameter.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0, "lr": 0.05}]
    optimizer = attached(trainer, torch.optim.AdamW(groups, lr=1e-2, eps=1e-4, fused=True))
    for step in range(3):
        optimizer.zero_grad()
        forward_backward(trainer, step)
        optimizer.step()


def part_of_the_parameters(trainer: Trainer) -> None:
    optimizer = attached(
        trainer, torch.optim.AdamW(trainer.module.blocks[1].parameters(), lr=1e-2, eps=1e-4, fused=True)
    )
    for step in range(3):
        optimizer.zero_grad()
        forward_backward(trainer, step)
        optimizer.step()


def unfrozen_later(trainer: Trainer) -> None:
    module = trainer.module
    module.blocks[0].requires_grad_(False)
    optimizer = attached(
        trainer, torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], eps=1e-4, fused=True)
    )
    for step in range(5):
        if step == 2:
            module.blocks[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(module.blocks[0].parameters()), "lr": 0.05})
        optimizer.zero_grad()
        forward_backward(trainer, step)
        optimizer.step()


def unfrozen_later_in_the_optimizer(trainer: Trainer) -> None:
    optimizer = attached(trainer)
    trainer.module.blocks[1].requires_grad_(False)
    for step in range(5):
        if step == 2:
            trainer.module.blocks[1].requires_grad_(True)
        optimizer.zero_grad()
        forward_backward(trainer, step)
        optimizer.step()


def frozen_later(trainer: Trainer) -> None:
    optimizer = attached(trainer)
    for step in range(4):
        if step == 2:
            trainer.module.blocks[1].requires_grad_(False)
        optimizer.zero_grad()
        forward_backward(trainer, step)
        optimizer.step()


def frozen_between_backward_and_step(trainer: Trainer) -> None:
    """A gradient that is there is stepped, whatever ``requires_grad`` says by then."""
    optimizer = attached(trainer)
    for step in range(4):
        optimizer.zero_grad()
        forward_backward(trainer, step)
        trainer.module.blocks[1].requires_grad_(False)
        optimizer.step()
        trainer.module.blocks[1].requires_grad_(True)


def frozen_with_a_gradient_left(trainer: Trainer) -> None:
    optimizer = attached(trainer)
    for step in range(4):
        if step == 2:
            trainer.module.blocks[1].requires_grad_(False)
        forward_backward(trainer, step)
        optimizer.step()


def learning_rate_schedule(trainer: Trainer) -> None:
    optimizer = attached(trainer)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    for step in range(4):
        optimizer.zero_grad()
        forward_backward(trainer, step)
        optimizer.step()
        scheduler.step()


def _evaluated(trainer: Trainer) -> None:
    trainer.module.eval()
    with torch.no_grad(), trainer.scope("validation_step"):
        trainer.losses.append(token_loss(trainer.module, trainer.rank, 100))
    trainer.module.train()


def schedule_free(trainer: Trainer) -> None:
    """The optimizer moves the parameters for evaluation and back, also before the first step."""
    optimizer = ScheduleFree(trainer.module.parameters(), lr=0.3)
    trainer.attach(optimizer)
    optimizer.eval()
    _evaluated(trainer)
    for step in range(6):
        optimizer.train()
        optimizer.zero_grad()
        forward_backward(trainer, step)
        if step == 4:  # between backward and step, gradients stay
            optimizer.eval()
            _evaluated(trainer)
            optimizer.train()
        optimizer.step()
        if step % 2:
            optimizer.eval()
            _evaluated(trainer)


def schedule_free_in_the_wrong_mode(trainer: Trainer) -> None:
    """The optimizer's own error; training goes on after it."""
    optimizer = ScheduleFree(trainer.module.parameters(), lr=0.3)
    trainer.attach(optimizer)
    for step in range(4):
        optimizer.zero_grad()
        forward_backward(trainer, step)
        if step != 1:
            optimizer.eval()
            with pytest.raises(RuntimeError, match=r"^call train\(\) before step\(\)$"):
                optimizer.step()
            optimizer.train()
        optimizer.step()
    optimizer.eval()
    _evaluated(trainer)


class Swapping(Momentum):
    """Keeps an average, and has methods that look at parameters, swap them and say something."""

    def swap(self) -> None:
        for param in self._params():
            shape = torch.empty(param.shape)
            param.data, self.state[param]["mean"] = self.state[param]["mean"].clone().view_as(shape), param.data.clone()

    @torch.no_grad()
    def update(self) -> None:
        for param in self._params():
            mean = self.state[param].setdefault("mean", param.detach().clone())
            mean.lerp_(param, 0.5)

    def swap_twice(self) -> None:
        self.swap()
        self.swap()

    def rate(self) -> float:
        return float(self.param_groups[0]["lr"])

    def sharpen(self) -> None:
        """Changes parameters by their gradients, as sharpness-aware minimization does."""
        norm = torch.stack([param.grad.norm() for param in self._params()]).norm()
        with torch.no_grad():
            for param in self._params():
                param.add_(param.grad * (0.05 / norm))

    def _params(self) -> list[nn.Parameter]:
        return [param for group in self.param_groups for param in group["params"] if param.requires_grad]


def methods_that_swap(trainer: Trainer) -> None:
    optimizer = Swapping(trainer.module.parameters())
    trainer.attach(optimizer)
    for step in range(5):
        optimizer.zero_grad()
        forward_backward(trainer, step)
        optimizer.step()
        optimizer.update()
        if trainer.rank == 0:
            assert optimizer.rate() == 0.1  # no collective
        optimizer.swap()
        _evaluated(trainer)
        optimizer.swap()
        optimizer.swap_twice()


def methods_that_use_gradients(trainer: Trainer) -> None:
    optimizer = Swapping(trainer.module.parameters())
    trainer.attach(optimizer)
    for step in range(4):
        optimizer.zero_grad()
        forward_backward(trainer, step)
        optimizer.sharpen()
        optimizer.zero_grad()
        forward_backward(trainer, step)
        optimizer.step()


class Reassigning(Momentum):
    """Points ``data`` to new tensors."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            param.data = param.data - self.param_groups[0]["lr"] * param.grad


def data_assigned_in_a_step(trainer: Trainer) -> None:
    optimizer = attached(trainer, Reassigning(trainer.module.parameters()))
    for step in range(3):
        optimizer.zero_grad()
        forward_backward(trainer, step)
        optimizer.step()


def lookahead(trainer: Trainer) -> None:
    optimizer = attached(trainer, Lookahead(torch.optim.AdamW(trainer.module.parameters(), eps=1e-4, foreach=False)))
    for step in range(7):
        optimizer.zero_grad()
        forward_backward(trainer, step)
        optimizer.step()


def wrapper_without_a_constructor(trainer: Trainer) -> None:
    optimizer = attached(trainer, Unfinished(torch.optim.SGD(trainer.module.parameters(), 0.1)))
    for step in range(4):
        optimizer.base.zero_grad()
        forward_backward(trainer, step)
        optimizer.step()
        for param in trainer.module.parameters():
            param.grad = None
