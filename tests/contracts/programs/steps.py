"""Loops that differ in when they run backwards and steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer

from tests.references import WIDTH, Trainer, adamw, token_loss, tokens

Program = Callable[[Trainer], None]


def forward_backward(trainer: Trainer, step: int, **kwargs: Any) -> None:
    with trainer.scope():
        loss = token_loss(trainer.module, trainer.rank, step)
    trainer.backward(loss, **kwargs)


def attached(trainer: Trainer, optimizer: Optimizer | None = None) -> Optimizer:
    optimizer = optimizer or adamw(trainer.module)
    trainer.attach(optimizer)
    return optimizer


def plain_loop(trainer: Trainer) -> None:
    """No scope, no call of ours between attach and the end."""
    optimizer = attached(trainer)
    for step in range(4):
        optimizer.zero_grad()
        trainer.backward(token_loss(trainer.module, trainer.rank, step), bare=True)
        optimizer.step()


def attach_before_every_step(trainer: Trainer) -> None:
    for step in range(3):
        optimizer = attached(trainer, torch.optim.SGD(trainer.module.parameters(), lr=0.1, fused=True))
        forward_backward(trainer, step)
        optimizer.step()
        optimizer.zero_grad()


def several_backwards(trainer: Trainer) -> None:
    optimizer = attached(trainer)
    for step in range(3):
        for part in range(3):
            forward_backward(trainer, 3 * step + part)
        optimizer.step()
        optimizer.zero_grad()


def backward_twice_through_one_graph(trainer: Trainer) -> None:
    optimizer = attached(trainer)
    for step in range(3):
        with trainer.scope():
            loss = token_loss(trainer.module, trainer.rank, step)
        trainer.backward(loss, retain_graph=True)
        trainer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def two_forwards_then_two_backwards(trainer: Trainer) -> None:
    optimizer = attached(trainer)
    for step in range(3):
        with trainer.scope():
            first = token_loss(trainer.module, trainer.rank, 2 * step)
            second = token_loss(trainer.module, trainer.rank, 2 * step + 1)
        trainer.backward(first)
        trainer.backward(second)
        optimizer.step()
        optimizer.zero_grad()


def two_losses_summed(trainer: Trainer) -> None:
    optimizer = attached(trainer)
    for step in range(3):
        optimizer.zero_grad()
        with trainer.scope():
            loss = token_loss(trainer.module, trainer.rank, 2 * step)
            loss = loss + token_loss(trainer.module, trainer.rank, 2 * step + 1)
        trainer.backward(loss)
        optimizer.step()


def step_without_zero_grad(trainer: Trainer) -> None:
    optimizer = attached(trainer)
    for step in range(4):
        forward_backward(trainer, step)
        optimizer.step()


def zeros_instead_of_none(trainer: Trainer) -> None:
    optimizer = attached(trainer)
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        forward_backward(trainer, step)
        optimizer.step()


def step_with_closure(trainer: Trainer) -> None:
    optimizer = attached(trainer)
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            forward_backward(trainer, step)
            return trainer.losses[-1]

        optimizer.step(closure)


def step_twice(trainer: Trainer) -> None:
    optimizer = attached(trainer)
    for step in range(2):
        optimizer.zero_grad()
        forward_backward(trainer, step)
        optimizer.step()
        optimizer.step()


def backward_without_step(trainer: Trainer) -> None:
    optimizer = attached(trainer)
    for step in range(4):
        optimizer.zero_grad()
        forward_backward(trainer, step)
        if step % 2:
            optimizer.step()


def gradient_penalty(trainer: Trainer) -> None:
    optimizer = attached(trainer)
    for step in range(3):
        ids = tokens(trainer.rank, step)
        optimizer.zero_grad()
        with trainer.scope():
            embedded = F.one_hot(ids, 11).float()[..., :WIDTH].requires_grad_()
            score = trainer.module.head(trainer.module.norm(trainer.module.body(embedded))).logsumexp(-1).mean()
            (slope,) = torch.autograd.grad(score, embedded, create_graph=True)
            loss = score + (slope.flatten(1).norm(dim=1) - 1).square().mean()
        trainer.backward(loss)
        optimizer.step()


def _penalised(trainer: Trainer, step: int, blocks: Sequence[int], *, again: bool) -> Tensor:
    """Return a loss with a penalty on the slope at the blocks' input, and on the slope of the slope (``again``)."""
    ids = tokens(trainer.rank, step)
    x = F.one_hot(ids, 11).float()[..., :WIDTH].requires_grad_()
    hidden = x
    for index in blocks:
        hidden = trainer.module.blocks[index](hidden)
    score = trainer.module.head(trainer.module.norm(hidden)).logsumexp(-1).mean()
    (slope,) = torch.autograd.grad(score, x, create_graph=True)
    loss = score + slope.square().sum()
    if again:
        (slope,) = torch.autograd.grad(loss, hidden if blocks else x, create_graph=True)
        loss = loss + slope.square().sum()
    return loss


def steps_inside_a_scope(trainer: Trainer) -> None:
    """The root's parameters are whole in a scope; a forward behind a step in it uses the stepped ones."""
    optimizer = attached(trainer)
    for step in range(3):
        with trainer.scope():
            for part in range(3):
                loss = token_loss(trainer.module, trainer.rank, 3 * step + part)
                optimizer.zero_grad()
                trainer.backward(loss, bare=part == 1)
                trainer.losses.append(trainer.module.head.weight.detach().norm())
                optimizer.step()


def steps_while_a_graph_keeps_units(trainer: Trainer) -> None:
    optimizer = attached(trainer)
    for step in range(4):
        optimizer.zero_grad()
        forward_backward(trainer, step)
        with trainer.scope():
            loss = token_loss(trainer.module, trainer.rank, step + 50)
            (slope,) = torch.autograd.grad(loss, trainer.module.embedding.weight, create_graph=True)
        trainer.losses.append(slope.detach().norm())
        del loss, slope
        optimizer.step()


def penalties_between_plain_steps(trainer: Trainer, *, bare: bool, per_rank: bool) -> None:
    """The place of a reducing backward in one step is that of a penalty, over fewer blocks, in another."""
    optimizer = attached(trainer)
    for step in range(8):
        optimizer.zero_grad()
        if step % 4 < 2:
            with trainer.scope():
                loss = token_loss(trainer.module, trainer.rank, step)
        else:
            blocks = [(), (0,), (1, 2), (0, 2)][(step + trainer.rank * per_rank) % 4]
            with trainer.scope():
                loss = _penalised(trainer, step, blocks, again=step > 5)
        trainer.backward(loss, bare=bare)
        optimizer.step()


def graph_built_by_backward(trainer: Trainer) -> None:
    """A penalty on parameters' gradients; a step before had a reducing backward in the same place."""
    optimizer = attached(trainer)
    for step in range(6):
        optimizer.zero_grad()
        with trainer.scope():
            loss = token_loss(trainer.module, trainer.rank, step)
            if step % 3:
                params = [trainer.module.head.weight, trainer.module.blocks[step % 2].up.weight]
                slopes = torch.autograd.grad(loss, params, create_graph=True)
                loss = loss + sum(slope.square().sum() for slope in slopes)
        trainer.backward(loss, bare=True)
        optimizer.step()


def slopes_on_one_rank(trainer: Trainer) -> None:
    """One rank asks for the slope of an input in the middle of a step."""
    optimizer = attached(trainer)
    for step in range(5):
        optimizer.zero_grad()
        with trainer.scope():
            x = torch.ones(2, WIDTH, requires_grad=True)
            if trainer.rank == 0 and step % 2:
                trainer.losses += torch.autograd.grad(trainer.module.body(x).square().sum(), x)
            loss = token_loss(trainer.module, trainer.rank, step)
        trainer.backward(loss)
        optimizer.step()


def slopes_of_leaves_at_frozen_units(trainer: Trainer) -> None:
    trainer.module.blocks[0].up.requires_grad_(False)
    trainer.module.blocks[1].requires_grad_(False)
    optimizer = attached(trainer)
    for step in range(4):
        optimizer.zero_grad()
        x = torch.full((2, WIDTH), 0.1 * step, requires_grad=True)
        loss = trainer.module.blocks[step % 2](x).square().sum()
        trainer.losses += torch.autograd.grad(loss, x, create_graph=step > 1)
        forward_backward(trainer, step)
        optimizer.step()


def gradients_by_autograd_grad(trainer: Trainer) -> None:
    """Asks for the gradient of the input only; no parameter's gradient is written."""
    optimizer = attached(trainer)
    for step in range(3):
        optimizer.zero_grad()
        with trainer.scope():
            x = torch.ones(2, WIDTH, requires_grad=True)
            (slope,) = torch.autograd.grad(trainer.module.body(x).square().sum(), x)
        trainer.losses.append(slope)
        forward_backward(trainer, step)
        optimizer.step()
