"""Forwards of modules that were verified compute with parts; nobody else trains them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.boxes import Part
from lightning_zero.engine.buffers.part_parameter import PartParameter, show_as_whole, show_parts
from lightning_zero.errors import PartialParameterError
from lightning_zero.lightning.part_forwards import LocalAttributes, PartsForward, TensorRun, compute_with_parts

PART = Part.along((4, 3), 0, (2, 2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 2, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.first(x))


def _cut(model: Model, run: TensorRun, names: tuple[str, ...] = ("block",)) -> Model:
    compute_with_parts(model, names, run)
    show_as_whole(dict(model.named_parameters()), {"block.0.weight": PART})
    return model


def test_a_chosen_module_computes_with_the_part() -> None:
    model, plain = Model(), Model()
    plain.load_state_dict(model.state_dict())
    _cut(model, TensorRun(2))
    weight, x = model.block[0].weight, torch.randn(5, 3)
    result = model(x)
    assert torch.equal(result, plain(x))
    assert type(weight) is PartParameter
    assert weight.shape == (4, 3)
    with pytest.raises(PartialParameterError, match=r"`linear` needs the whole parameter `block\.0\.weight`"):
        model.block[0](x)
    result.sum().backward()
    plain(x).sum().backward()
    show_parts(model.parameters())
    assert torch.equal(weight.grad, plain.block[0].weight.grad)


def test_an_error_in_a_forward_leaves_the_face_on() -> None:
    model = _cut(Model(), TensorRun(2))
    with pytest.raises(RuntimeError):
        model.block(torch.ones(7))
    assert type(model.block[0].weight) is PartParameter


def test_children_of_a_root_compute_with_parts() -> None:
    model = _cut(Model(), TensorRun(2), ("",))
    assert model.block(torch.ones(1, 3)).shape == (1, 2)
    assert model(torch.ones(1, 3)).shape == (1, 2)


def test_a_copy_computes_with_its_own_parameters() -> None:
    model = Model()
    compute_with_parts(model, ["block"], TensorRun(2))
    other = copy.deepcopy(model)
    assert isinstance(other.block.forward, PartsForward)
    assert other.block.forward.module is other.block
    assert other.block.forward.params[0] is other.block[0].weight
    with torch.no_grad():
        other.block[0].weight.zero_()
    assert not other(torch.ones(1, 3)).any()
    assert model(torch.ones(1, 3)).any()


def test_nobody_trains_it_behind_the_run() -> None:
    run = TensorRun(2)
    model = _cut(Model(), run)
    run.is_running = False
    with pytest.raises(PartialParameterError, match="is cut over 2 ranks by an earlier Trainer"):
        model(torch.ones(1, 3))
    with torch.no_grad():
        assert model(torch.ones(1, 3)).shape == (1, 2)


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_compiled_modules_compute_with_parts(is_wrapped: bool) -> None:
    model = Model()
    if is_wrapped:
        model.block = torch.compile(model.block, backend="eager", fullgraph=True)  # type: ignore[assignment]
    else:
        model.block.compile(backend="eager", fullgraph=True)
    inner = model.block._orig_mod if is_wrapped else model.block
    compute_with_parts(model, ["block"], TensorRun(2))
    name = next(name for name, _ in model.named_parameters() if name.endswith("0.weight"))
    show_as_whole(dict(model.named_parameters()), {name: PART})
    assert model(torch.ones(1, 3)).shape == (1, 2)
    assert type(inner[0].weight) is PartParameter  # type: ignore[index]


class Counting(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.out_features


@pytest.mark.parametrize("name", ["", "0"])
def test_attributes_are_local_in_forwards_alone(name: str) -> None:
    model = nn.Sequential(Counting(1, 4))
    before = LocalAttributes(model)
    model[0].out_features = 2
    (changed,) = before.changed()
    assert (changed.whole, changed.local) == (4, 2)
    compute_with_parts(model, [name], TensorRun(2), [changed])
    changed.settle()
    changed.settle()  # the module goes to another engine
    again, x = copy.deepcopy(model), torch.ones(1, 1)
    for one in (model, again):
        assert torch.equal(one(x), nn.Linear.forward(one[0], x) * 2)
        assert one[0].out_features == 4
    model[0].out_features = 3  # by the program
    assert torch.equal(model(x), nn.Linear.forward(model[0], x) * 3)
    assert (model[0].out_features, again[0].out_features) == (3, 4)
