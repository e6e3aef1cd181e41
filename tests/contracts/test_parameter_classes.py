"""Subclasses of ``nn.Parameter`` keep their class and attributes, and train as on a replica."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.checkpoint.state import load_model_state, model_state
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.errors import ReleasedParameterError
from tests import worlds
from tests.references import Case, train
from tests.sampling import sample

WIDTH = 4


class Plain(nn.Parameter):
    """Nothing of its own."""


class Slotted(nn.Parameter):
    """Has another memory layout than a parameter."""

    __slots__ = ("bits",)
    bits: int


class Made(nn.Parameter):
    """Is made in its own way, and has attributes and a property."""

    def __new__(cls, *shape: int, scale: float = 2.0) -> Made:
        made: Made = torch.Tensor._make_subclass(cls, torch.randn(*shape), True)
        made.scale = torch.tensor(scale)
        return made

    def __init__(self, *shape: int, scale: float = 2.0) -> None:
        pass

    @property
    def scaled(self) -> torch.Tensor:
        return self * self.scale

    def __deepcopy__(self, memo: Any) -> Made:
        copied = Made(*self.shape)
        copied.data = self.data.clone()
        copied.scale = self.scale.clone()
        return copied


class Counting(nn.Parameter):
    """Sees every function that is called with it."""

    calls = 0

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        Counting.calls += 1
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Of(torch.Tensor):
    """A tensor class that ``nn.Parameter`` keeps."""

    def __deepcopy__(self, memo: Any) -> Any:
        return nn.Parameter(self.as_subclass(torch.Tensor).detach().clone().as_subclass(Of))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = Plain(torch.randn(WIDTH, WIDTH))
        self.slotted = Slotted(torch.randn(WIDTH))
        self.slotted.bits = 7
        self.made = Made(WIDTH)
        self.counting = Counting(torch.randn(WIDTH, WIDTH))
        self.of = nn.Parameter(torch.randn(WIDTH).as_subclass(Of))
        self.frozen = Plain(torch.randint(-3, 3, (WIDTH, WIDTH), dtype=torch.int8), requires_grad=False)
        self.frozen.kind = "int8"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _expect_classes(self)
        x = torch.nn.functional.linear(x, self.plain, self.slotted) * self.made.scaled
        return torch.tanh(x @ self.counting + self.of + x @ self.frozen.to(x.dtype)).as_subclass(torch.Tensor)


def _expect_classes(block: Block) -> None:
    found = [type(param) for param in block.parameters()]
    assert found == [Plain, Slotted, Made, Counting, Of, Plain], found
    assert (block.slotted.bits, float(block.made.scale), block.frozen.kind) == (7, 2.0, "int8")


def _build() -> nn.Module:
    return nn.Sequential(Block(), Block())


def _loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * rank + step)
    loss: torch.Tensor = module(torch.randn(3, WIDTH, generator=generator)).square().mean()
    return loss


def _adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-4)


def _program(trainer: Any) -> None:
    train(trainer, loss=_loss, optimizer=_adamw, max_norm=0.5)
    train(trainer, loss=_loss, optimizer=_adamw, micro_batches=2)


def _check(rank: int, world: int, options: dict[str, Any]) -> dict[str, str]:
    case = Case(build=_build, program=_program, units=("Block",), options=options, tolerance=1e-6)
    return case.check(rank, world)


@pytest.mark.parametrize("world", sample([1, 2, 3], 2))
@pytest.mark.parametrize("options", sample([{}, {"step": "deferred"}], {}), ids=["now", "deferred"])
def test_subclasses_of_parameters_train_as_on_a_replica(world: int, options: dict[str, Any]) -> None:
    assert worlds.run(_check, world, options) == [{}] * world


def _keeps_classes(rank: int, world: int, stage: int) -> None:
    module = _build()
    values = {name: value.clone() for name, value in module.state_dict().items()}
    engine = ZeroEngine(stage, units=("Block",))
    engine.shard(module)
    optimizer = engine.attach(_adamw(module))
    first: Any = module[0]
    assert all(
        isinstance(param, kind)
        for param, kind in zip(first.parameters(), [Plain, Slotted, Made, Counting, Of, Plain], strict=True)
    )
    assert (first.slotted.bits, float(first.made.scale), first.frozen.kind) == (7, 2.0, "int8")
    if stage == 3 and world > 1:
        for param in first.parameters():
            with pytest.raises(ReleasedParameterError, match="gathered"):
                param.sum()
        with pytest.raises(ReleasedParameterError, match="0.made"):
            copy.deepcopy(first.made)
    with engine.gathered(module):
        _expect_classes(first)
        copied: Any = copy.deepcopy(module)
    assert type(copied[0].made) is Made
    assert type(copied[0].frozen) is Plain
    assert torch.equal(copied[1].frozen, values["1.frozen"])
    load_model_state(engine, module, model_state(engine, module))
    _loss(module, rank, 0).backward()
    assert isinstance(first.plain, Plain)
    engine.clip_grad_norm(optimizer, 1.0)
    assert isinstance(first.plain, Plain)
    if stage < 3:
        again = pickle.loads(pickle.dumps(first.plain))
        assert torch.equal(again, first.plain)
    optimizer.step()
    engine.unshard()
    _expect_classes(first)
    assert torch.equal(first.frozen, values["0.frozen"].to(torch.int8))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", sample([1, 2], 2))
def test_a_subclass_of_a_parameter_comes_back_whenever_the_parameter_is_whole(stage: int, world: int) -> None:
    worlds.run(_keeps_classes, world, stage)
