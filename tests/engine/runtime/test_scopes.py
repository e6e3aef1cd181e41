"""Scopes end with an error, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from lightning_zero.engine.engine import ZeroEngine
from tests import worlds
from tests.references import Block, TinyGPT, token_loss


def _engine(module: nn.Module, stage: int = 3, **options: Any) -> ZeroEngine:
    engine = ZeroEngine(stage, units=options.pop("units", ["Block"]), **options)
    engine.shard(module)
    return engine


class _Fails(Block):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise KeyError("out of luck")
        return super().forward(x)


def _failure(rank: int, world: int, stage: int, in_scope: bool) -> None:
    """An error on all ranks at the same place leaves an engine that trains on."""
    module = TinyGPT(blocks=[Block(), _Fails(), Block()])
    engine = _engine(module, stage)
    optimizer = engine.attach(torch.optim.SGD(module.parameters(), lr=0.1))

    def loss(step: int) -> Tensor:
        if not in_scope:
            return token_loss(module, rank, step)
        with engine.scope("training_step"):
            return token_loss(module, rank, step)

    for step in range(4):
        module.blocks[1].fails = step in (0, 2)
        if module.blocks[1].fails:
            with pytest.raises(KeyError, match="out of luck"):
                loss(step)
            continue
        loss(step).backward()
        assert engine.grad_norm() > 0
        optimizer.step()
        optimizer.zero_grad()
    assert all(unit.uses == 0 for unit in engine.internals.fits.units)
    engine.close()


@pytest.mark.parametrize("in_scope", [False, True], ids=["bare", "scope"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_training_goes_on_after_an_error_in_a_forward(stage: int, in_scope: bool) -> None:
    worlds.run(_failure, 2, stage, in_scope)
