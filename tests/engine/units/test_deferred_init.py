from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.units.deferred_init import Registration, defer_values, deferred_params, deferred_values
from tests import worlds


@dataclass(frozen=True)
class Sevens:
    places: tuple[Registration, ...]

    def load(self, engine: Any) -> None:
        for record in engine.records():
            if any(record.parameter is place.tensor for place in self.places):
                start, stop = (position - record.own_range[0] for position in record.save_range)
                record.master()[start:stop] = 7.0
        engine.internals.checkpoints.complete_masters()
        engine.internals.checkpoints.publish()


class Counted(nn.Linear):
    initialised = 0

    def reset_parameters(self) -> None:
        Counted.initialised += not self.weight.is_meta
        super().reset_parameters()


def _model(*keys: str) -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(Counted(3, 5), nn.Linear(5, 2))
    defer_values(model, Sevens(tuple(Registration(f"0.{key}", model[0], key) for key in keys)))
    return model


def _shard(rank: int, world: int, stage: int, keys: tuple[str, ...]) -> tuple[int, list[float]]:
    Counted.initialised = 0
    model, engine = _model(*keys), ZeroEngine(stage)
    engine.shard(model)
    assert deferred_values(model) == []
    return Counted.initialised, [engine.full_param(param).mean().item() for param in model[0].parameters()]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_module_all_of_whose_values_wait_is_not_initialised(stage: int) -> None:
    assert worlds.run(_shard, 2, stage, ("weight", "bias")) == [(0, [7.0, 7.0])] * 2


def test_a_module_some_of_whose_values_wait_is_initialised_first() -> None:
    for initialised, (weight, bias) in worlds.run(_shard, 2, 3, ("weight",)):
        assert initialised == 1
        assert weight == 7.0
        assert abs(bias) < 1.0


def test_a_tied_parameter_waits_under_all_its_names() -> None:
    model = _model("weight")
    model.append(nn.Linear(3, 5, device="meta"))
    model[2].weight = model[0].weight
    assert deferred_params(model) == {(id(model[0]), "weight"), (id(model[2]), "weight")}


def test_a_part_that_was_taken_out_is_named() -> None:
    model = _model("weight", "bias")
    model[0].bias = None
    with pytest.raises(ValueError, match="`0.bias` waits for its pretrained values, and was taken out of the module"):
        deferred_values(model)
