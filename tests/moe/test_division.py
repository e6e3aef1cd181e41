from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.boxes import Part
from lightning_zero.grid import Grid, ParamAxes
from lightning_zero.moe import MoE
from lightning_zero.moe.division import divide_experts, expert_layers, grid_of_experts
from lightning_zero.moe.exchange import ExpertRanks
from tests.worlds import run, seed

H, E = 4, 4


def _model(rank: int) -> nn.Module:
    seed(rank)  # the values of rank 0 count
    experts = [nn.Sequential(nn.Linear(H, 3), nn.ReLU(), nn.Linear(3, H)) for _ in range(E)]
    return nn.ModuleDict({"first": MoE(H, experts, E, k=2, use_residual=True), "second": MoE(H, experts[0], 2)})


def _divided(rank: int, world: int) -> Any:
    model = _model(rank)
    parts = divide_experts(model, ranks := ExpertRanks())
    grid = grid_of_experts(parts, None, world)
    values = {name: model.get_parameter(name).detach() for name in parts}
    return (
        values,
        parts,
        grid.params["first.experts.0.weight"].group,
        [one.experts.ranks is ranks for one in _layers(model)],
    )


def _layers(model: nn.Module) -> list[Any]:
    return list(expert_layers(model).values())


def test_a_rank_keeps_the_first_ranks_values_of_its_experts() -> None:
    whole = dict(_model(0).named_parameters())
    names = {name for name in whole if ".experts." in name}
    for rank, (values, parts, group, are_divided) in enumerate(run(_divided, 2)):
        assert values.keys() == parts.keys() == names
        for name, value in values.items():
            number = len(whole[name]) // 2
            assert torch.equal(value, whole[name][rank * number : (rank + 1) * number]), name
            assert parts[name].whole == tuple(whole[name].shape)
        assert group == "ranks with the same experts"
        assert are_divided == [True, True]


def test_experts_beside_tensor_ranks_keep_the_factor_of_their_gradients() -> None:
    cut, part = Part.along((4, 6), 0, (0, 2)), Part.along((E, 3), 0, (0, 2))
    params = {
        "cut": ParamAxes("data ranks", part=cut),
        "whole": ParamAxes("all ranks", 0.5),
        "experts.weight": ParamAxes("all ranks", 0.5),
        "experts.bias": ParamAxes("all ranks", 1.0),
    }
    around = Grid({"all ranks": None, "data ranks": None}, 2, params)
    grid = grid_of_experts({"experts.weight": part, "experts.bias": part}, None, 2, around)
    assert list(grid.groups) == ["all ranks", "data ranks", "ranks with the same experts"]
    assert grid.communicates
    assert grid.data_ranks == 2
    assert {name: grid.params[name] for name in ("cut", "whole")} == {name: params[name] for name in ("cut", "whole")}
    for name, factor in (("experts.weight", 0.5), ("experts.bias", 1.0)):
        assert grid.params[name] == ParamAxes("ranks with the same experts", factor, part, is_of_others=True)


def _twice(rank: int, world: int) -> str:
    model = _model(rank)
    divide_experts(model, ExpertRanks())
    assert "4 x Sequential over 2 ranks" in repr(model)
    with pytest.raises(ValueError, match="divided") as caught:
        divide_experts(model, ExpertRanks())
    return str(caught.value)


def test_divided_experts_are_not_divided_again() -> None:
    message = "`expert_parallel=2` cannot divide `first.experts`, whose experts are divided over 2 ranks already"
    assert all(text.startswith(message) for text in run(_twice, 2))


def _own_parameter(rank: int, world: int) -> None:
    model = _model(rank)
    model.get_submodule("first.experts").register_parameter("scale", nn.Parameter(torch.ones(3)))
    divide_experts(model, ExpertRanks())


def test_parameters_that_are_not_stacked_are_refused() -> None:
    with pytest.raises(ValueError, match=r"whose parameter `scale` has the shape \(3,\) and not one row for each of 4"):
        run(_own_parameter, 2)


def test_scripted_modules_are_no_experts() -> None:
    scripted = torch.jit.script(nn.Linear(H, H))
    assert list(expert_layers(nn.ModuleDict({"moe": MoE(H, nn.Linear(H, H), 2), "scripted": scripted}))) == [
        "moe.experts"
    ]


class ParamWrapper(nn.Module):
    """As that of peft for `target_parameters`."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


def _computed(rank: int, world: int, adapted: bool) -> str:
    model = MoE(H, nn.Linear(H, H), 2)
    if adapted:
        model.experts = ParamWrapper(ParamWrapper(model.experts))
    else:
        child, name = next((one, key) for one in model.experts.modules() for key in one._parameters)
        nn.utils.parametrize.register_parametrization(child, name, nn.Identity())
    try:
        divide_experts(nn.ModuleDict({"moe": model}), ExpertRanks())
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("adapted", "text"), [(True, "an adapter of peft"), (False, "a parametrization")])
def test_experts_with_computed_parameters_are_refused(adapted: bool, text: str) -> None:
    for message in run(_computed, 2, adapted):
        assert "`expert_parallel=2` cannot divide `moe.experts" in message
        assert text in message
