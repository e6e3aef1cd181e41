"""Loops that write and read weights between steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.contracts.programs.steps import Program, attached, forward_backward, plain_loop
from tests.references import Trainer, clone_weights, token_loss


def clamped(trainer: Trainer) -> None:
    optimizer = attached(trainer)
    for step in range(3):
        optimizer.zero_grad()
        forward_backward(trainer, step)
        optimizer.step()
        with trainer.gathered(trainer.module, write="all"), torch.no_grad():
            for parameter in trainer.module.parameters():
                parameter.clamp_(-0.2, 0.2)


def clamped_in_the_open(trainer: Trainer) -> None:
    optimizer = attached(trainer)
    for step in range(3):
        optimizer.zero_grad()
        forward_backward(trainer, step)
        optimizer.step()
        with torch.no_grad():
            for parameter in trainer.module.parameters():
                parameter.clamp_(-0.2, 0.2)


def clamped_before_the_step(trainer: Trainer) -> None:
    """The write happens between backward and step."""
    optimizer = attached(trainer)
    for step in range(3):
        optimizer.zero_grad()
        forward_backward(trainer, step)
        with trainer.gathered(trainer.module, write="all"), torch.no_grad():
            for parameter in trainer.module.parameters():
                parameter.clamp_(-0.2, 0.2)
        optimizer.step()


def _swap_averages(trainer: Trainer, averages: dict[str, Tensor], gathered: bool) -> None:
    """Update the averages, evaluate with them and put the weights back."""

    def swap() -> None:
        for name, parameter in trainer.module.named_parameters():
            kept = parameter.data.clone()
            parameter.data.copy_(averages[name])
            averages[name] = kept

    def both(action: Callable[[], None]) -> None:
        if gathered:
            with trainer.gathered(trainer.module, write="all"):
                action()
        else:
            action()

    def update() -> None:
        for name, parameter in trainer.module.named_parameters():
            averages.setdefault(name, parameter.data.clone()).lerp_(parameter.data, 0.5)

    both(update)
    both(swap)
    trainer.module.eval()
    with torch.no_grad(), trainer.scope("validation_step"):
        trainer.losses.append(token_loss(trainer.module, trainer.rank, 99))
    trainer.module.train()
    both(swap)


def swapped_averages(gathered: bool) -> Program:
    def program(trainer: Trainer) -> None:
        optimizer = attached(trainer)
        averages: dict[str, Tensor] = {}
        for step in range(3):
            optimizer.zero_grad()
            forward_backward(trainer, step)
            optimizer.step()
            _swap_averages(trainer, averages, gathered)

    return program


def state_dict_loaded(trainer: Trainer) -> None:
    optimizer = attached(trainer)
    with trainer.gathered(trainer.module):
        start = clone_weights(trainer.module)
    for step in range(4):
        optimizer.zero_grad()
        forward_backward(trainer, step)
        optimizer.step()
        if step == 1:
            with trainer.gathered(trainer.module, write="all"):
                trainer.module.load_state_dict(start)


def state_dict_loaded_in_the_open(trainer: Trainer) -> None:
    start = clone_weights(trainer.module)
    optimizer = attached(trainer)
    for step in range(4):
        optimizer.zero_grad()
        forward_backward(trainer, step)
        optimizer.step()
        if step == 1:
            trainer.module.load_state_dict(start)


def written_by_one_rank(trainer: Trainer) -> None:
    optimizer = attached(trainer)
    for step in range(3):
        with trainer.gathered(trainer.module.head.weight, write="rank0"), torch.no_grad():
            if trainer.rank == 0:
                trainer.module.head.weight.mul_(0.5)
        optimizer.zero_grad()
        forward_backward(trainer, step)
        optimizer.step()


def sampled_by_one_rank(trainer: Trainer) -> None:
    """Rank 0 generates until an end that the others do not know."""
    optimizer = attached(trainer)
    for step in range(3):
        optimizer.zero_grad()
        forward_backward(trainer, step)
        optimizer.step()
        with trainer.gathered(trainer.module), torch.no_grad():
            ids = torch.ones(1, 1, dtype=torch.long)
            while trainer.rank == 0 and ids.shape[1] < 4 + step:
                ids = torch.cat([ids, trainer.module(ids)[:, -1:].argmax(-1)], 1)
            trainer.losses.append(ids)


def validated_between(trainer: Trainer) -> None:
    optimizer = attached(trainer)
    for step in range(4):
        trainer.module.eval()
        with torch.inference_mode() if step % 2 else torch.no_grad(), trainer.scope("validation_step"):
            trainer.losses.append(token_loss(trainer.module, trainer.rank, 50 + step).clone())
        trainer.module.train()
        optimizer.zero_grad()
        forward_backward(trainer, step)
        optimizer.step()


def validated_before_attach(trainer: Trainer) -> None:
    with torch.inference_mode(), trainer.scope("validation_step"):
        trainer.losses.append(token_loss(trainer.module, trainer.rank, 7).clone())
    plain_loop(trainer)


def interrupted(trainer: Trainer) -> None:
    """A forward and a backward that end with an error leave nothing behind."""
    optimizer = attached(trainer)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    for step in range(3):
        handle = trainer.module.blocks[1].down.register_forward_pre_hook(fail)
        with pytest.raises(ZeroDivisionError), trainer.scope():
            token_loss(trainer.module, trainer.rank, 77)
        handle.remove()
        optimizer.zero_grad()
        forward_backward(trainer, step)
        optimizer.step()


def dropout(trainer: Trainer) -> None:
    """The engine draws no random number of the user's generators."""
    torch.manual_seed(trainer.rank)
    trainer.module.body = _with_dropout(trainer.module.body)  # type: ignore[method-assign]
    plain_loop(trainer)
    trainer.losses.append(torch.rand(3))


def _with_dropout(body: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: F.dropout(body(F.dropout(x)))
