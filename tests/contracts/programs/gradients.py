"""Loops that see and edit gradients between backward and step."""

from __future__ import annotations

import torch
from torch import nn

from tests.contracts.programs.steps import attached, forward_backward, plain_loop
from tests.references import WIDTH, Trainer


def clipped_by_hand(trainer: Trainer) -> None:
    optimizer = attached(trainer)
    for step in range(3):
        optimizer.zero_grad()
        forward_backward(trainer, step)
        trainer.losses.append(nn.utils.clip_grad_norm_(trainer.module.parameters(), 0.1).clone())
        optimizer.step()


def clipped_by_value(trainer: Trainer) -> None:
    optimizer = attached(trainer)
    for step in range(3):
        optimizer.zero_grad()
        forward_backward(trainer, step)
        trainer.clip_grad_value(optimizer, 0.01)
        optimizer.step()


def clipped_by_value_by_hand(trainer: Trainer) -> None:
    optimizer = attached(trainer)
    for step in range(3):
        optimizer.zero_grad()
        forward_backward(trainer, step)
        nn.utils.clip_grad_value_(trainer.module.parameters(), 0.01)
        optimizer.step()


def edited_in_hooks(trainer: Trainer) -> None:
    for parameter in trainer.module.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05) * 2)
    plain_loop(trainer)


def edited_before_the_step(trainer: Trainer) -> None:
    optimizer = attached(trainer)
    for step in range(3):
        optimizer.zero_grad()
        forward_backward(trainer, step)
        for parameter in trainer.module.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-0.05, 0.05)
                parameter.grad.data.mul_(2)
                parameter.grad = parameter.grad.sign() * parameter.grad.abs().sqrt()
        optimizer.step()


def dropped_before_the_step(trainer: Trainer) -> None:
    """A gradient that the user takes away is not stepped."""
    optimizer = attached(trainer)
    for step in range(3):
        optimizer.zero_grad()
        forward_backward(trainer, step)
        trainer.module.head.weight.grad = None
        optimizer.step()


def whole_gradients_read(trainer: Trainer) -> None:
    optimizer = attached(trainer)
    for step in range(3):
        optimizer.zero_grad()
        forward_backward(trainer, step)
        for parameter in trainer.module.parameters():
            gradient = trainer.full_grad(parameter)
            trainer.losses.append(torch.zeros(()) if gradient is None else gradient)
        optimizer.step()


def norms_logged(trainer: Trainer) -> None:
    """What Lightning's ``grad_norm`` does in ``on_before_optimizer_step``."""
    optimizer = attached(trainer)
    for step in range(3):
        optimizer.zero_grad()
        forward_backward(trainer, step)
        norms = [p.grad.data.norm(2) for p in trainer.module.parameters() if p.grad is not None]
        trainer.losses.append(torch.stack([norm.clone() for norm in norms]))
        trainer.losses.append(torch.stack([p.grad.norm(float("inf")) for p in trainer.module.parameters()]))
        optimizer.step()


def norms_through_parameters_to_vector(trainer: Trainer) -> None:
    optimizer = attached(trainer)
    for step in range(3):
        optimizer.zero_grad()
        forward_backward(trainer, step)
        grads = [p.grad for p in trainer.module.parameters() if p.grad is not None]
        trainer.losses.append(nn.utils.get_total_norm(grads).clone())
        optimizer.step()


def bf16_weights_written_through_data(trainer: Trainer) -> None:
    """Writes that leave no trace on the parameter reach the fp32 masters of 16-bit parameters."""
    optimizer = attached(trainer)
    written = {name: torch.randn(p.shape).bfloat16() for name, p in trainer.module.named_parameters()}
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16), trainer.scope():
            x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step))
            loss = trainer.module.body(x).float().square().mean()
        trainer.backward(loss)
        optimizer.step()
        if step == 1:
            for name, parameter in trainer.module.named_parameters():
                parameter.data.copy_(written[name])
