"""Weights that a program or a graph still sees when their unit is given back at stage 3 keep their values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_zero.config import Communication
from tests import worlds
from tests.references import Replica, Sharded, TinyGPT, Trainer, adamw, difference, outcome, tokens


def _penalties(trainer: Trainer) -> None:
    """Graphs of slopes are built outside of a scope, several before the first backward."""
    module: Any = trainer.module
    optimizer = adamw(module)
    trainer.attach(optimizer)

    def score(step: int) -> Tensor:
        x = F.one_hot(tokens(trainer.rank, step), 11).float()[..., :6].requires_grad_()
        with trainer.scope():
            value = module.head(module.norm(module.body(x))).logsumexp(-1).mean()
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        return value + slope.square().sum()

    for step in range(3):
        optimizer.zero_grad()
        losses = [score(2 * step), score(2 * step + 1)]
        for loss in losses:
            trainer.backward(loss, bare=step == 1)
        optimizer.step()


def _used_inside_gathered(trainer: Trainer) -> None:
    """A graph of weights that were used directly inside ``gathered`` is differentiated behind it."""
    module: Any = trainer.module
    optimizer = adamw(module)
    trainer.attach(optimizer)
    for step in range(3):
        optimizer.zero_grad()
        x = torch.ones(2, 6).requires_grad_()
        with trainer.gathered(module):
            loss = F.layer_norm(x, (6,), module.norm.weight).square().sum()
            loss = loss + (F.linear(x, module.blocks[0].up.weight) ** 2).sum()
        with torch.no_grad(), trainer.scope():
            module(tokens(trainer.rank, step))
        trainer.backward(loss)
        assert x.grad is not None
        trainer.losses.append(x.grad)
        optimizer.step()


def _kept_views(trainer: Trainer) -> None:
    """What ``gathered`` showed, and what a step returned, is read when it is over."""
    module: Any = trainer.module
    for step in range(2):
        with trainer.gathered(module):
            state = module.state_dict()
        with torch.no_grad(), trainer.scope():
            row, kept = module.blocks[0].up.weight[0], module.head.weight.detach()
        with torch.no_grad():
            module(tokens(trainer.rank, step))
        trainer.losses += [*(value.clone() for value in state.values()), row.clone(), kept.clone()]


def _identity(trainer: Trainer) -> None:
    """Hooks of the program's own keep what autograd saves."""
    module: Any = trainer.module
    optimizer = adamw(module)
    trainer.attach(optimizer)
    for step in range(3):
        optimizer.zero_grad()
        with trainer.scope(), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            loss = module(tokens(trainer.rank, step)).square().mean()
        with torch.no_grad(), trainer.scope():
            module(tokens(trainer.rank, step))
        trainer.backward(loss)
        optimizer.step()


PROGRAMS = {"penalties": _penalties, "gathered": _used_inside_gathered, "views": _kept_views, "hooks": _identity}


def _compared(rank: int, world: int, name: str, prefetch: int) -> str:
    worlds.seed()
    plain = Replica(TinyGPT(), rank, world)
    PROGRAMS[name](plain)
    worlds.seed()
    communication = Communication(prefetch=prefetch, timeout_s=20)
    zero = Sharded(TinyGPT(), rank, world, stage=3, units=["Block"], communication=communication)
    PROGRAMS[name](zero)
    found = difference(outcome(zero), outcome(plain), tolerance=1e-6)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    zero.engine.close()
    return found


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_weights_that_are_still_seen_keep_their_values(name: str) -> None:
    assert worlds.run(_compared, 2, name, 2) == ["", ""]


def _storages(rank: int, world: int) -> bool:
    """Training leaves no storage behind: the next gather takes the same one."""
    zero = Sharded(TinyGPT(), rank, world, stage=3, units=["Block"])
    optimizer = adamw(zero.module)
    zero.attach(optimizer)
    buffers = [buffer for unit in zero.engine.internals.fits.units for buffer in unit.buffers]
    before = [buffer.whole.flat.untyped_storage()._cdata for buffer in buffers]
    for step in range(3):
        with zero.scope():
            loss = zero.module(tokens(rank, step)).square().mean()
        zero.backward(loss)
        optimizer.step()
    after = [buffer.whole.flat.untyped_storage()._cdata for buffer in buffers]
    zero.engine.close()
    return before == after


def test_training_takes_the_same_memory_in_every_step() -> None:
    assert worlds.run(_storages, 2) == [True, True]
