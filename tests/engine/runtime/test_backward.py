"""Backwards reduce once, whatever they build and whatever runs inside them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from lightning_zero.engine.engine import ZeroEngine
from tests import worlds
from tests.references import Block, TinyGPT, token_loss


def _engine(module: nn.Module, stage: int = 3, **options: Any) -> ZeroEngine:
    engine = ZeroEngine(stage, units=options.pop("units", ["Block"]), **options)
    engine.shard(module)
    return engine


def _graph(rank: int, world: int, stage: int) -> None:
    """A gradient penalty: the first backward builds a graph and reduces nothing."""
    module = nn.Sequential(Block(), Block())
    engine = _engine(module, stage)
    inputs = torch.ones(2, 6, requires_grad=True)
    with engine.scope("training_step"):
        out = module(inputs)
        (grad,) = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        loss = grad.square().sum()
    loss.backward()
    assert engine.grad_norm() > 0
    calls = engine.stats().calls["reduce_scatter"]
    assert calls == sum(1 for unit in engine.internals.fits.units if unit.buffers)
    engine.close()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_backward_that_builds_a_graph_reduces_nothing(stage: int) -> None:
    worlds.run(_graph, 2, stage)


class _Nested(torch.autograd.Function):
    """Runs a backward of its own inside the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        (x,) = ctx.saved_tensors
        inner = x.detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.module(inner), grad)
        return inner.grad, None


def _checkpoint(module: nn.Module, x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(module, x, use_reentrant=True)


def _checkpoint_twice(module: nn.Module, x: Tensor) -> Tensor:
    return _checkpoint(lambda y: _checkpoint(module, y), x)  # type: ignore[arg-type]


NESTED: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "checkpoint": _checkpoint,
    "checkpoint-in-checkpoint": _checkpoint_twice,
    "function": lambda module, x: _Nested.apply(x, module),
}


class _NestedGPT(TinyGPT):
    """Every gradient but the first unit's comes from a nested backward, and the loss is made outside of the root."""

    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = self.call(block, hidden)
        return self.call(nn.Sequential(self.norm, self.head), hidden)


def _nested(rank: int, world: int, stage: int, name: str) -> None:
    def run(call: Callable[[nn.Module, Tensor], Tensor]) -> tuple[list[Tensor | None], dict[str, int]]:
        worlds.seed()
        module = _NestedGPT(call)
        engine = ZeroEngine(stage, units=("Block",))
        engine.shard(module)
        optimizer = engine.attach(torch.optim.AdamW(module.parameters(), lr=0.01))
        grads: list[Tensor | None] = []
        for step in range(3):  # the second follows a list, the third two backwards that are added
            for part in range(1 + step // 2):
                token_loss(module, rank, 10 * step + part).backward()
            grads += [engine.full_grad(param) for param in module.parameters()]
            engine.clip_grad_norm(optimizer, 0.1)
            optimizer.step()
            optimizer.zero_grad()
        calls = dict(engine.stats().calls)
        engine.close()
        return grads, calls

    plain, expected = run(lambda module, x: module(x))
    nested, calls = run(NESTED[name])
    assert all(torch.equal(a, b) for a, b in zip(plain, nested, strict=True) if a is not None and b is not None)
    assert [a is None for a in plain] == [b is None for b in nested]
    assert calls["reduce_scatter"] == expected["reduce_scatter"]


@pytest.mark.parametrize("name", list(NESTED))
@pytest.mark.parametrize("stage", range(4))
def test_backwards_inside_a_backward_reduce_nothing_of_their_own(stage: int, name: str) -> None:
    worlds.run(_nested, 2, stage, name)


class _Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


LAST: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(6),
    "layer norm": lambda: nn.LayerNorm(6),
    "gain": _Gain,
}


def _again(rank: int, world: int, stage: int, last: str) -> None:
    """Clip the gradients of a backward, and run it once more on the graph that was retained."""
    worlds.seed()
    module = nn.Sequential(nn.Linear(4, 6), LAST[last]())
    plain = copy.deepcopy(module)
    engine = _engine(module, stage, units=[])
    engine.attach(torch.optim.SGD(module.parameters(), lr=0.1))
    for one in (module, plain):
        loss = (one(torch.randn(5, 4, generator=torch.Generator().manual_seed(1))) - 1.0).square().mean()
        loss.backward(retain_graph=True)
        nn.utils.clip_grad_norm_(one.parameters(), 0.1)
        (0.5 * loss).backward()
    for param, expected in zip(module.parameters(), plain.parameters(), strict=True):
        found = engine.full_grad(param)
        assert found is not None
        assert expected.grad is not None
        assert torch.allclose(found, expected.grad, atol=1e-6)
    engine.close()


@pytest.mark.parametrize("last", list(LAST))
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_second_backward_of_a_graph_reads_whole_parameters(stage: int, last: str) -> None:
    """They were segments, because a program had used gradients in between."""
    worlds.run(_again, 2, stage, last)
