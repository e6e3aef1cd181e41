"""What an engine was made with, and what it is made of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.config import Communication, MixedPrecision, Offload
from lightning_zero.engine.access.param_index import ParamIndex
from lightning_zero.engine.buffers.parameter import owner_of
from lightning_zero.engine.sharded_module import EngineOptions, ShardedModule
from lightning_zero.engine.units.unit import Unit
from lightning_zero.sharding import ShardedOver, ShardingScope

OPTIONS = EngineOptions(
    stage=3,
    units=["Linear"],
    communication=Communication(),
    precision=MixedPrecision(),
    device=None,
    process_group=None,
    parts_group=None,
    offload=None,
    step="auto",
    moments="fp32",
)
NOTHING = ShardedOver.from_stage(0)
GRADIENTS = replace(NOTHING, grads=ShardingScope.WORLD)

ALONE: dict[str, tuple[dict[str, Any], ShardedOver]] = {
    "resident": ({}, NOTHING),
    "offloaded": ({"offload": Offload(optimizer="cpu")}, GRADIENTS),
    "offloaded-stage1": ({"offload": Offload(optimizer="cpu"), "stage": 1}, NOTHING),
    "offloaded-parameters": ({"offload": Offload(optimizer="cpu", params="cpu")}, ShardedOver.from_stage(3)),
    "in-the-backward": ({"step": "backward"}, GRADIENTS),
}


@pytest.mark.parametrize("name", list(ALONE))
def test_a_rank_alone_releases_only_what_is_stored_elsewhere(name: str) -> None:
    changes, expected = ALONE[name]
    options = replace(OPTIONS, **changes)
    assert options.sharding(1) == expected
    assert options.sharding(2) == ShardedOver.from_stage(options.stage)


def test_options_that_are_not_known_are_refused() -> None:
    with pytest.raises(ValueError, match="`stage=4` is not a ZeRO stage"):
        replace(OPTIONS, stage=4)


class _Owner:
    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    def param_name(self, param: nn.Parameter) -> str:
        return self.unit.name

    def touch(self, param: nn.Parameter) -> bool:
        return True

    def own_dtype(self, param: nn.Parameter) -> torch.dtype:
        return torch.float32

    def show_original(self, param: nn.Parameter) -> None:
        raise AssertionError("asked for values")

    def show_gradient(self, param: nn.Parameter) -> None:
        """Do nothing."""

    def write_gradient(self, param: nn.Parameter, grad: torch.Tensor | None) -> None:
        """Do nothing."""


def test_every_parameter_gets_an_owner_that_lives_as_long_as_the_module_is_sharded() -> None:
    module, places = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 5)), ParamIndex()
    sharded = ShardedModule(
        module,
        OPTIONS,
        None,
        grid=None,
        node=None,
        awaited=set(),
        param_index=places,
        close_windows=lambda: None,
        owner=_Owner,
    )
    for name, param in module.named_parameters():
        owner = owner_of(param)
        assert owner is not None
        assert name.startswith(owner.param_name(param))
    assert sharded.world_communicator is sharded.communicator
    assert sharded.parts is None
    sharded.close()
    assert module(torch.ones(2, 3)).shape == (2, 5)  # without hooks
