"""Tensors that autograd saves have their values in backward, and go with their graph."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.units.unit import UnitState
from tests import worlds
from tests.references import Block, TinyGPT, token_loss


def _engine(module: nn.Module, stage: int = 3, **options: Any) -> ZeroEngine:
    engine = ZeroEngine(stage, units=options.pop("units", ["Block"]), **options)
    engine.shard(module)
    return engine


def _states(engine: ZeroEngine) -> set[UnitState]:
    return {unit.state for unit in engine.internals.fits.units}


class _Remembers(Block):
    """Its loss leaves by a side attribute."""

    def forward(self, x: Tensor) -> Tensor:
        self.penalty = self.up.weight.square().sum() + (self.inner(x) ** 2).sum()
        return x


def _side(rank: int, world: int) -> None:
    module = TinyGPT(blocks=[_Remembers(), _Remembers()])
    engine = _engine(module)
    with engine.scope("training_step"):
        module(torch.zeros(1, 2, dtype=torch.long))
        loss = module.blocks[0].penalty + module.blocks[1].penalty
    loss.backward()
    plain = TinyGPT(blocks=[_Remembers(), _Remembers()])
    with torch.no_grad():
        for mine, theirs in zip(plain.parameters(), module.parameters(), strict=True):
            mine.copy_(engine.full_param(theirs))
    plain(torch.zeros(1, 2, dtype=torch.long))
    (plain.blocks[0].penalty + plain.blocks[1].penalty).backward()
    for mine, theirs in zip(plain.parameters(), module.parameters(), strict=True):
        found = engine.full_grad(theirs)
        assert (found is None) == (mine.grad is None)
        assert found is None or torch.equal(found, mine.grad)
    engine.close()


def test_a_loss_that_leaves_by_a_side_attribute_gathers_again_in_backward() -> None:
    worlds.run(_side, 2)


def _outer_hooks(rank: int, world: int) -> int:
    """Saved-tensor hooks of somebody else go on working around a scope."""
    packed = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.shape)
        return tensor.clone()

    module = TinyGPT()
    engine = _engine(module)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), engine.scope("training_step"):
        loss = token_loss(module, rank, 0)
    loss.backward()
    mine = [engine.full_grad(param) for param in module.parameters()]
    engine.internals.fits.detach()
    with engine.scope("training_step"):
        loss = token_loss(module, rank, 0)
    loss.backward()
    assert all(torch.equal(a, engine.full_grad(param)) for a, param in zip(mine, module.parameters(), strict=True))
    engine.close()
    return len(packed)


def test_saved_tensor_hooks_around_a_step_are_called() -> None:
    assert min(worlds.run(_outer_hooks, 2)) > 0


class _Exponent(nn.Module):
    """Autograd saves the result of ``exp``, which knows the graph that saves it."""

    def __init__(self, between: Callable[[Tensor], Any] = lambda y: None) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.between = between
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).exp()
        z = y * 2
        self.between(y)
        return self.last(z)


class _Alive:
    """Lives as long as the graph that it was hung into."""

    def __call__(self, gradient: Tensor) -> None: ...


def _without_backward(rank: int, world: int, stage: int) -> tuple[bool, bool]:
    seen: list[weakref.ref[_Alive]] = []

    def watch(y: Tensor) -> None:
        alive = _Alive()
        y.register_hook(alive)
        seen.append(weakref.ref(alive))

    module = _Exponent(watch)
    engine = _engine(module, stage, units=["Linear"])
    gc.disable()
    with engine.scope("training_step"):
        loss = module(torch.ones(2, 4)).sum()
    was_alive = seen[0]() is not None
    del loss
    is_alive = seen[0]() is not None
    gc.enable()
    engine.close()
    return was_alive, is_alive


@pytest.mark.parametrize("stage", [2, 3])
def test_the_graph_of_a_loss_without_backward_goes_with_the_loss(stage: int) -> None:
    assert worlds.run(_without_backward, 2, stage) == [(True, False)] * 2


def _changed_in_place(rank: int, world: int, stage: int) -> None:
    module = _Exponent(lambda y: y.add_(1))
    engine = _engine(module, stage, units=["Linear"])
    with engine.scope("training_step"):
        loss = module(torch.ones(2, 4)).sum()
    loss.backward()


@pytest.mark.parametrize("stage", [2, 3])
def test_a_saved_tensor_that_was_changed_is_refused_as_in_plain_pytorch(stage: int) -> None:
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: \[torch.FloatTensor \[2, 4\]\]"):
        worlds.run(_changed_in_place, 2, stage)


class _Pair(nn.Module):
    """Two layers that make a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, index: int) -> Tensor:
        return self.layers[index](x.exp()).exp().sum()  # type: ignore[no-any-return]


class _AroundPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.pair = _Pair()

    def forward(self, x: Tensor, index: int) -> Tensor:
        return self.pair(self.first(x), index)  # type: ignore[no-any-return]


def _stepped_between(rank: int, world: int, stage: int, deferred: bool, stepped: str) -> list[Tensor]:
    """Step all parameters, or those of the other layer, between the forward and the backward of layer 1."""
    module = _AroundPair()
    engine = _engine(module, stage, units=["_Pair"], step="deferred" if deferred else "now")
    optimizer = engine.attach(torch.optim.SGD(module.get_submodule(stepped).parameters(), lr=0.1))
    with engine.scope("training_step"):
        first, second = (module(torch.ones(2, 4), index) for index in (0 if stepped else 1, 1))
    first.backward()
    optimizer.step()
    optimizer.zero_grad()
    second.backward()
    found = [engine.full_grad(param).clone() for param in module.pair.layers[1].parameters()]
    engine.close()
    return found


@pytest.mark.parametrize("deferred", [False, True], ids=["at-once", "deferred"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_between_a_forward_and_its_backward_is_refused_as_in_plain_pytorch(stage: int, deferred: bool) -> None:
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: \[torch.FloatTensor \[4, 4\]\]"):
        worlds.run(_stepped_between, 2, stage, deferred, "")


@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_of_other_parameters_of_the_unit_is_none_of_its_backward(stage: int) -> None:
    worlds.seed()
    module = _AroundPair()
    module(torch.ones(2, 4), 1).backward()
    for found in worlds.run(_stepped_between, 2, stage, False, "pair.layers.0"):
        assert all(torch.equal(a, b.grad) for a, b in zip(found, module.pair.layers[1].parameters(), strict=True))


def _read_by_program(rank: int, world: int) -> list[Tensor | None]:
    """Return gradients of a graph of which a program has read the saved tensors before its backward."""
    worlds.seed()
    module = nn.Sequential(Block(), Block())
    engine = _engine(module)
    grads: list[Tensor | None] = []
    for reads in (False, True):
        loss = module(torch.ones(2, 6)).square().sum()
        nodes = [loss.grad_fn] if reads else []
        while nodes:
            node = nodes.pop()
            for name in [name for name in dir(node) if name.startswith("_saved_")]:
                getattr(node, name)
            nodes += [following for following, _ in getattr(node, "next_functions", ()) if following is not None]
        loss.backward()
        grads += [engine.full_grad(param) for param in module.parameters()]
        module.zero_grad()
    engine.close()
    return grads


def test_a_program_may_read_saved_tensors_before_the_backward() -> None:
    for grads in worlds.run(_read_by_program, 2):
        plain, read = grads[: len(grads) // 2], grads[len(grads) // 2 :]
        assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(plain, read, strict=True))
