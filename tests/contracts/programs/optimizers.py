"""Loops with several optimizers, groups, and parameters that are frozen for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from tests.contracts.programs.steps import attached, forward_backward
from tests.references import WIDTH, Block, Trainer


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
