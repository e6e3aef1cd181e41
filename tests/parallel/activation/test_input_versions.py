"""Inputs of checkpointed calls that a program changes between the forward and the backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.config import ActivationCheckpointing
from lightning_zero.parallel.activation.checkpointing import checkpoint_activations

POLICIES = ("full", "selective", "offload")
WIDTH = 4

Values = dict[str, Any]


class Block(nn.Module):
    """Does with the values of all blocks what the model says."""

    def __init__(self, act: Callable[[Tensor, Values], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.act = act

    def forward(self, x: Tensor, *, values: Values) -> Tensor:
        return torch.tanh(self.linear(self.act(x, values)))


class Model(nn.Module):
    def __init__(self, act: Callable[[Tensor, Values], Tensor], between: Callable[[Values], None]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(act) for _ in range(3)])
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        values: Values = {"scale": torch.full((WIDTH,), 2.0), "sum": torch.zeros(2), "list": []}
        for block in self.blocks:
            x = block(x, values=values)
            self.between(values)
        loss: Tensor = x.square().mean() + values["sum"].sum() + sum(one.mean() for one in values["list"])
        return loss


def _leave(values: Values) -> None:
    """Change nothing."""


def _shifts(x: Tensor, values: Values) -> Tensor:
    return x + values["scale"]


def _adds_up(x: Tensor, values: Values) -> Tensor:
    values["sum"][0] += x.mean()
    values["sum"].add_(x.square().mean())
    return x + len(values["sum"])


def _collects(x: Tensor, values: Values) -> Tensor:
    values["list"].append(x)
    return x + sum(values["list"])


def _change_scale(values: Values) -> None:
    values["scale"].mul_(0.5)


def _forget(values: Values) -> None:
    values["list"] = [one * 2 for one in values["list"][-1:]]


def _train(model: Model, policy: Any) -> dict[str, Tensor]:
    model = copy.deepcopy(model)
    if policy is not None:
        checkpoint_activations(model, ActivationCheckpointing(policy=policy, modules=["Block"]))
    torch.manual_seed(1)
    model(torch.randn(3, WIDTH)).backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("act", "between"),
    [(_adds_up, _leave), (_collects, _leave), (_collects, _forget)],
    ids=["sums", "lists", "lists-between"],
)
def test_blocks_may_add_to_sums_and_lists(
    policy: Any, act: Callable[[Tensor, Values], Tensor], between: Callable[[Values], None]
) -> None:
    model = Model(act, between)
    expected, found = _train(model, None), _train(model, policy)
    assert expected.keys() == found.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, msg=name)


def test_offloaded_inputs_have_the_values_of_their_forward() -> None:
    model = Model(_shifts, _change_scale)
    for name, grad in _train(model, None).items():
        torch.testing.assert_close(_train(model, "offload")[name], grad)


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_a_changed_value_that_a_block_reads_is_refused(policy: Any) -> None:
    with pytest.raises(RuntimeError, match=r"`values\['scale'\]`, an argument of the checkpointed module `Block`"):
        _train(Model(_shifts, _change_scale), policy)


def test_what_is_added_is_added_once() -> None:
    """A recomputation adds to copies."""
    kept: list[Values] = []
    model = Model(lambda x, values: _collects(_adds_up(x, values), values), kept.append)
    expected = _train(model, None)
    once = [(values["sum"].detach().clone(), len(values["list"])) for values in kept[-1:]]
    found = _train(model, "full")
    assert [len(values["list"]) for values in kept[-1:]] == [once[0][1]]
    torch.testing.assert_close(kept[-1]["sum"].detach(), once[0][0])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("read", [
    lambda one: one + 1, lambda one: one.clone(), lambda one: float(one[0]), lambda one: torch.cat([one, one]),
    lambda one: torch.zeros(WIDTH).copy_(one), lambda one: one.view(2, 2).sum(), lambda one: one.tolist(),
    lambda one: torch.zeros(WIDTH).add_(one), lambda one: bool((one > 0).all()),
], ids=["add", "clone", "float", "cat", "copy", "view", "tolist", "add_", "bool"])  # fmt: skip
def test_every_way_to_read_is_seen(read: Callable[[Tensor], Any]) -> None:
    def act(x: Tensor, values: Values) -> Tensor:
        read(values["scale"])
        return x

    with pytest.raises(RuntimeError, match="was changed in place after the module was called"):
        _train(Model(act, _change_scale), "full")


@pytest.mark.parametrize(
    "use",
    [lambda one: one.shape, lambda one: one[1:].mul_(2), lambda one: one.view(2, 2).zero_(), lambda one: one.dtype],
    ids=["shape", "slice", "view", "dtype"],
)
def test_shapes_and_changes_are_no_reads(use: Callable[[Tensor], Any]) -> None:
    def act(x: Tensor, values: Values) -> Tensor:
        use(values["scale"])
        return x

    model = Model(act, _change_scale)
    torch.testing.assert_close(_train(model, "full"), _train(model, None))


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("write", [
    lambda total, x: total.mul_(x), lambda total, x: torch.nn.functional.silu(total, inplace=True),
    lambda total, x: total.add_(x).clamp_(-1.0, 1.0), lambda total, x: total.add_(total.view(3, WIDTH).clone()),
], ids=["mul", "silu", "clamp", "own-copy"])  # fmt: skip
def test_a_write_that_depends_on_what_was_changed_is_refused(
    write: Callable[[Tensor, Tensor], Any], policy: Any
) -> None:
    """Its backward would have the values that the first run has left."""

    def act(x: Tensor, values: Values) -> Tensor:
        write(values["total"], torch.sigmoid(x))
        return x

    class Sums(Model):
        def forward(self, x: Tensor) -> Tensor:
            values = {"total": x.detach() * 1.0 + 0.5}
            for block in self.blocks:
                x = block(x, values=values)
            return x.square().mean() + values["total"].square().mean()

    model = Sums(act, _leave)
    with pytest.raises(RuntimeError, match=r"`values\['total'\]`, an argument of the checkpointed module `Block`"):
        _train(model, policy)


def test_new_tensors_of_the_shape_of_a_sum_are_no_reads() -> None:
    def act(x: Tensor, values: Values) -> Tensor:
        values["sum"].add_(values["sum"].new_ones(2)).add_(torch.zeros_like(values["sum"]))
        return x

    model = Model(act, _leave)
    torch.testing.assert_close(_train(model, "full"), _train(model, None))


class Opaque:
    """Of a class that is registered without names for what it holds."""

    def __init__(self, scale: Tensor) -> None:
        self.scale = scale


torch.utils._pytree.register_pytree_node(Opaque, lambda one: ([one.scale], None), lambda leaves, _: Opaque(*leaves))


@pytest.mark.parametrize("is_changed", [False, True])
def test_arguments_of_registered_classes_may_have_no_names(is_changed: bool) -> None:
    class Holds(Model):
        def forward(self, x: Tensor) -> Tensor:
            held = Opaque(torch.ones(WIDTH))
            for block in self.blocks:
                x = block(x, values=held)
                if is_changed:
                    held.scale.mul_(2)
            return x.square().mean()

    model = Holds(lambda x, held: x + held.scale, _leave)
    if is_changed:
        with pytest.raises(RuntimeError, match="`tensor 1`, an argument of the checkpointed module"):
            _train(model, "full")
        return
    torch.testing.assert_close(_train(model, "full"), _train(model, None))
