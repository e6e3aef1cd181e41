"""Places by themselves: what lies where, whose it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_zero.engine.engine import ZeroEngine


def _model() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 5))
    model.append(model[1])
    return model


def test_a_parameter_has_one_place_and_all_of_its_names() -> None:
    engine = ZeroEngine(2, units=["Linear"])
    model = engine.shard(_model())
    places = engine._state.param_index
    for name, param in model.named_parameters():
        buffer, index = places.of(param)
        assert buffer.params[index] is param
        assert places.name(param) == name
        assert param in places
        assert any(buffer is one for one in places.unit_of(buffer).buffers)
    assert places.names[id(model[1].weight)] == ("1.weight", "2.weight")
    assert places.buffers == [buffer for unit in engine.internals.fits.units for buffer in unit.buffers]
    engine.close()


def test_units_are_those_of_the_parameters_in_their_order() -> None:
    engine = ZeroEngine(2, units=["Linear"])
    model = engine.shard(_model())
    places = engine._state.param_index
    units = [places.unit_of(places.of(layer.weight)[0]) for layer in (model[0], model[1])]
    assert places.units_of([model[1].weight, model[0].bias, torch.ones(1)]) == units
    assert places.units_of([model[1].bias]) == units[1:]
    engine.close()


def test_a_tensor_of_nobody_is_refused_by_its_shape() -> None:
    engine = ZeroEngine(2)
    engine.shard(_model())
    stranger = torch.ones(2, 7)
    assert stranger not in engine._state.param_index
    with pytest.raises(ValueError, match=r"A tensor of shape \(2, 7\) is not a parameter of the sharded module"):
        engine._state.param_index.of(stranger)
    engine.close()
