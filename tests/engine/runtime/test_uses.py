"""Uses of parameters outside their module gather a unit, inside a scope."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from lightning_zero.engine.buffers.parameter import ReducedParameter, ReleasedParameter
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.units.unit import UnitState
from lightning_zero.errors import ReleasedParameterError
from tests import worlds
from tests.references import TinyGPT


def _engine(module: nn.Module, stage: int = 3, **options: Any) -> ZeroEngine:
    engine = ZeroEngine(stage, units=options.pop("units", ["Block"]), **options)
    engine.shard(module)
    return engine


def _states(engine: ZeroEngine) -> set[UnitState]:
    return {unit.state for unit in engine.internals.fits.units}


def _touched(rank: int, world: int) -> None:
    module = TinyGPT()
    engine = _engine(module)
    with engine.scope("training_step"):
        norm = module.blocks[1].up.weight.norm()
        assert type(module.blocks[1].up.weight) is ReducedParameter
        assert type(module.blocks[0].up.weight) is ReleasedParameter
        (norm + module.blocks[1].up.bias.sum()).backward()
    assert _states(engine) == {UnitState.SHARDED}
    weight = engine.full_param(module.blocks[1].up.weight)
    assert torch.allclose(engine.full_grad(module.blocks[1].up.weight), weight / weight.norm())
    with pytest.raises(ReleasedParameterError, match="blocks.1.up.weight"):
        module.blocks[1].up.weight.norm()
    engine.close()


def test_a_parameter_used_outside_its_module_is_gathered_inside_a_scope_only() -> None:
    worlds.run(_touched, 2)
