"""Hooks in the graph gather a unit before its backward and give it back behind it."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.runtime.backward_hooks import tensors_in
from lightning_zero.engine.units.unit import UnitState
from tests import worlds
from tests.references import TinyGPT, token_loss

# -- Giving back in backward -------------------------------------------------------------------------------------------


class _Checkpointed(TinyGPT):
    """Recomputes each block."""

    reentrant = False

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def _frozen_norms(rank: int, world: int, reentrant: bool, retains: bool) -> float:
    """Return the largest difference of weights after three steps of a model whose norms are frozen."""
    worlds.seed()
    module = _Checkpointed()
    module.reentrant = reentrant
    for name, param in module.named_parameters():
        param.requires_grad_("norm" not in name)
    plain = copy.deepcopy(module)
    engine = ZeroEngine(stage=3)
    engine.shard(module)
    optimizers = [torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.1) for one in (module, plain)]
    engine.attach(optimizers[0])
    for step in range(3):
        losses = [token_loss(module, rank, step), *(token_loss(plain, other, step) / world for other in range(world))]
        for loss in losses:
            if retains:
                (0.5 * loss).backward(retain_graph=True)
            (loss * (0.5 if retains else 1.0)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(module.parameters(), plain.parameters(), strict=True)
    largest = max(float((engine.full_param(own) - whole).detach().abs().nan_to_num(9.0).max()) for own, whole in pairs)
    engine.close()
    return largest


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("retains", [False, True])
def test_a_recomputed_unit_with_frozen_layers_stays_until_its_inputs_have_gradients(
    reentrant: bool, retains: bool
) -> None:
    assert max(worlds.run(_frozen_norms, 2, reentrant, retains)) < 1e-6


# -- Tensors of an output ----------------------------------------------------------------------------------------------

x, y = torch.ones(1), torch.zeros(2)


@dataclass
class _Output:
    logits: Tensor
    more: Any = None


class _Named(NamedTuple):
    first: Tensor
    second: Any


OUTPUTS: dict[str, tuple[Any, list[Tensor]]] = {
    "tensor": (x, [x]),
    "tuple": ((x, (y,)), [x, y]),
    "list": ([x, None, [y]], [x, y]),
    "dict": ({"a": x, "b": {"c": y}}, [x, y]),
    "named-tuple": (_Named(x, {"k": y}), [x, y]),
    "dataclass": (_Output(x, [y]), [x, y]),
    "object": (SimpleNamespace(a=x, b=SimpleNamespace(c=y)), [x, y]),
    "nothing": ((None, 1, 2.0, "text", True), []),
    "type": (_Output, []),
    "module": (nn.Linear(1, 1), []),
}


@pytest.mark.parametrize("name", list(OUTPUTS))
def test_tensors_are_found_in_whatever_a_forward_returns(name: str) -> None:
    value, expected = OUTPUTS[name]
    found = list(tensors_in(value))
    assert [id(tensor) for tensor in found] == [id(tensor) for tensor in expected]


def test_an_object_that_holds_itself_ends() -> None:
    loop = SimpleNamespace(x=x)
    loop.itself = loop
    assert x is next(tensors_in(loop))
    assert len(list(tensors_in(loop))) < 10


def _engine(module: nn.Module, stage: int = 3, **options: Any) -> ZeroEngine:
    engine = ZeroEngine(stage, units=options.pop("units", ["Block"]), **options)
    engine.shard(module)
    return engine


def _states(engine: ZeroEngine) -> set[UnitState]:
    return {unit.state for unit in engine.internals.fits.units}


def _frozen(rank: int, world: int) -> None:
    """A unit without any gradient of its own passes gradients on, and is given back."""
    module = TinyGPT()
    module.blocks[1].requires_grad_(False)
    module.blocks[2].up.requires_grad_(False)
    engine = _engine(module)
    for step in range(2):
        token_loss(module, rank, step).backward()
        assert _states(engine) == {UnitState.SHARDED}
    assert engine.full_grad(module.blocks[1].up.weight) is None
    assert engine.full_grad(module.blocks[2].down.weight) is not None
    assert engine.full_grad(module.embedding.weight) is not None
    engine.close()


def test_units_with_frozen_parameters_pass_gradients_on() -> None:
    worlds.run(_frozen, 2)


class _Passing(nn.Module):
    """Returns a result, and another tensor that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), other


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.block = _Passing()

    def forward(self, x: Tensor) -> Tensor:
        result, other = self.block(x, self.before(x).tanh())
        return (result + other).square().sum()


def _passed_on(rank: int, world: int) -> list[int]:
    """Return the gathers of each step, whose backward comes to the other tensor behind the block."""
    worlds.seed()
    module = _Branches()
    engine = _engine(module, units=["_Passing"])
    calls = [0]
    for _ in range(3):
        with engine.scope("training_step"):
            loss = module(torch.ones(2, 4, requires_grad=True))
        loss.backward(retain_graph=True)
        loss.backward()
        assert _states(engine) == {UnitState.SHARDED}
        calls.append(engine.stats().calls["all_gather"])
    engine.close()
    return [one - other for one, other in zip(calls[1:], calls, strict=False)]


def test_a_unit_with_all_gradients_is_not_gathered_for_a_tensor_that_it_passes_on() -> None:
    """The root and the block are gathered once in the forward, and once in each of two backwards."""
    assert worlds.run(_passed_on, 2) == [[6, 6, 6]] * 2


# -- Graphs that a module keeps ----------------------------------------------------------------------------------------


def _kept_by_module(rank: int, world: int, stage: int) -> bool:
    """Keep an output on the module that made it; say whether both are collected."""
    module = nn.Sequential(nn.Linear(2, 2))
    engine = ZeroEngine(stage)
    engine.shard(module)
    module.output = module(torch.ones(1, 2))
    alive = weakref.ref(module)
    engine.close()
    del module, engine
    gc.collect()
    return alive() is None


@pytest.mark.parametrize("stage", [1, 2])
def test_a_module_that_keeps_its_output_is_collected(stage: int) -> None:
    assert all(worlds.run(_kept_by_module, 1, stage))
