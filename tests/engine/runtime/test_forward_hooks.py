"""Forwards gather their units and leave nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from lightning_zero.config import Communication
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.units.unit import UnitState
from tests import worlds
from tests.references import TinyGPT, token_loss


def _engine(module: nn.Module, stage: int = 3, **options: Any) -> ZeroEngine:
    engine = ZeroEngine(stage, units=options.pop("units", ["Block"]), **options)
    engine.shard(module)
    return engine


def _states(engine: ZeroEngine) -> set[UnitState]:
    return {unit.state for unit in engine.internals.fits.units}


def _given_back(rank: int, world: int, prefetch: int) -> None:
    module = TinyGPT()
    engine = _engine(module, communication=Communication(prefetch=prefetch))
    for step in range(3):
        assert _states(engine) == {UnitState.SHARDED}
        with engine.scope("training_step"):
            loss = token_loss(module, rank, step)
            assert engine.internals.fits.units[0].state is UnitState.UNSHARDED
            assert {unit.state for unit in engine.internals.fits.units[1:]} == {UnitState.SHARDED}
        assert _states(engine) == {UnitState.SHARDED}
        loss.backward()
        assert _states(engine) == {UnitState.SHARDED}
        assert engine.stats().memory["gathered"] == 0
        with torch.no_grad():
            module(torch.zeros(1, 2, dtype=torch.long))
        assert _states(engine) == {UnitState.SHARDED}
    engine.close()


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_every_unit_is_given_back_after_forward_and_backward(prefetch: int) -> None:
    worlds.run(_given_back, 2, prefetch)


def _other_module(rank: int, world: int) -> None:
    """A child of the root is called without the root."""
    module = TinyGPT()
    engine = _engine(module)
    out = module.blocks[0](torch.ones(1, 6))
    assert _states(engine) == {UnitState.SHARDED}
    out.sum().backward()
    assert engine.full_grad(module.blocks[0].up.weight) is not None
    assert engine.full_grad(module.blocks[1].up.weight) is None
    engine.close()


def test_a_unit_may_be_called_by_itself() -> None:
    worlds.run(_other_module, 2)


def _checkpointed(rank: int, world: int, reentrant: bool) -> None:
    def run(checkpoints: bool) -> list[Tensor | None]:
        worlds.seed()

        def body(self: TinyGPT, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant)
            return x

        module = TinyGPT()
        if checkpoints:
            module.body = body.__get__(module)  # type: ignore[method-assign]
        engine = _engine(module)
        token_loss(module, rank, 0).backward()
        grads = [engine.full_grad(param) for param in module.parameters()]
        assert _states(engine) == {UnitState.SHARDED}
        engine.close()
        return grads

    plain, checkpointed = run(False), run(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, checkpointed, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_forward_gathers_again(reentrant: bool) -> None:
    worlds.run(_checkpointed, 2, reentrant)
