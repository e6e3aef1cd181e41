"""Transforms of ``torch.func`` and forward-mode AD over sharded modules: right, or refused by name."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import (
    functional_call,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    stack_module_state,
    vjp,
    vmap,
)
from torch.utils._pytree import tree_leaves

from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.errors import ReleasedParameterError
from tests.references import Replica, Sharded, Trainer, difference
from tests.references import outcome as outcome_of
from tests.worlds import run


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.Sequential(Block(), Block())
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.blocks(self.first(x)))
        return result


def _x(seed: int = 5) -> Tensor:
    return (torch.arange(12.0) * seed).sin().view(3, 4)


def _values(module: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach() for name, param in module.named_parameters()}


def _dual(module: nn.Module) -> list[Tensor | None]:
    with forward_ad.dual_level():
        return list(forward_ad.unpack_dual(module(forward_ad.make_dual(_x(), torch.ones(3, 4)))))


def _ensemble(module: Any) -> Any:
    params, buffers = stack_module_state(list(module.blocks))
    base = copy.deepcopy(module.blocks[0]).to("meta")
    return vmap(lambda values, others: functional_call(base, (values, others), (_x(),)))(params, buffers)


def _ones(module: nn.Module) -> dict[str, Tensor]:
    return {name: torch.ones(param.shape) for name, param in module.named_parameters()}


Case = Callable[[Any], Any]
FORWARDS: dict[str, Case] = {  # of the module
    "vmap": lambda module: vmap(module)(_x()),
    "jvp": lambda module: jvp(module, (_x(),), (torch.ones(3, 4),)),
    "jacfwd": lambda module: jacfwd(module)(_x()),
    "dual": _dual,
    "functional_call": lambda module: functional_call(module, _ones(module), _x()),
}
GRADIENTS: dict[str, Case] = {  # of the module, with a backward in the transform
    "grad": lambda module: grad(lambda x: module(x).sum())(_x()),
    "vjp": lambda module: (lambda pair: [pair[0], pair[1](torch.ones(3, 1))])(vjp(module, _x())),
    "jacrev": lambda module: jacrev(module)(_x()),
    "hessian": lambda module: hessian(lambda x: module(x).sum())(_x()),
    "vmap of grad": lambda module: vmap(grad(lambda x: module(x).sum()))(_x()),
}
VALUES: dict[str, Case] = {  # of parameters
    "vmap": lambda module: vmap(lambda weight: weight * weight)(module.blocks[1].linear.weight),
    "jvp": lambda module: jvp(torch.sin, (module.first.weight,), (torch.ones(4, 4),)),
    "jvp of all": lambda module: jvp(
        lambda values: functional_call(module, values, _x()), (_values(module),), (_ones(module),)
    ),
    "vmap beside": lambda module: vmap(lambda x: x @ module.blocks[0].linear.weight)(_x()),
    "ensemble": _ensemble,
}
GRADIENTS_OF_VALUES: dict[str, Case] = {
    "grad": lambda module: grad(lambda weight: (weight * weight).sum())(module.blocks[1].linear.weight),
    "grad of all": lambda module: grad(lambda values: functional_call(module, values, _x()).sum())(_values(module)),
    "grad of the module's": lambda module: grad(lambda values: functional_call(module, values, _x()).sum())(
        dict(module.named_parameters())
    ),
    "of each sample": lambda module: vmap(
        grad(lambda values, x: functional_call(module, values, (x,)).sum()), (None, 0)
    )(_values(module), _x()),
}
ALL = [FORWARDS, GRADIENTS, VALUES, GRADIENTS_OF_VALUES]

WHERE: dict[str, tuple[Callable[[Any], Any], list[dict[str, Case]]]] = {  # and what works there at stage 3
    "outside": (lambda engine: contextlib.nullcontext(), [FORWARDS, GRADIENTS]),
    "training step": (lambda engine: engine.scope("training_step"), [FORWARDS, VALUES]),
    "validation step": (lambda engine: _together(torch.no_grad(), engine.scope("validation_step")), ALL),
    "gathered": (lambda engine: engine.gathered(engine.module), [FORWARDS, VALUES]),
    "gathered without gradients": (lambda engine: _together(torch.no_grad(), engine.gathered(engine.module)), ALL),
}


@contextlib.contextmanager
def _together(*contexts: Any) -> Any:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _call(rank: int, world: int, stage: int, where: str) -> None:
    torch.manual_seed(0)
    plain = Net()
    engine = ZeroEngine(stage, units=["Block"])
    module = engine.shard(copy.deepcopy(plain))
    optimizer = engine.attach(torch.optim.SGD(module.parameters(), lr=0.0))

    def step() -> None:
        loss = module(_x()).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.allclose(loss, plain(_x()).square().sum())

    step(), step()
    context, working = WHERE[where]
    for cases in ALL:
        for name, call in cases.items():
            if stage < 3 or cases in working:
                with context(engine):
                    found = call(module)
                for value, expected in zip(tree_leaves(found), tree_leaves(call(plain)), strict=True):
                    torch.testing.assert_close(value, expected, atol=1e-6, rtol=1e-5, msg=f"{where}, {name}")
            elif where == "outside":
                with context(engine), pytest.raises(ReleasedParameterError, match=r"lightning_zero\.gathered"):
                    call(module)
            else:
                with pytest.raises(RuntimeError, match=r"In a step use `torch\.autograd\.grad"), context(engine):
                    call(module)
            step()  # as if nothing had been


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3], ids="stage{}".format)
def test_transforms_are_right_or_refused(stage: int, where: str) -> None:
    run(_call, 2, stage, where)


def _train(trainer: Trainer) -> None:
    """Train on slopes of an energy, on many samples at once, and on a directional derivative."""
    module = trainer.module
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    trainer.attach(optimizer)
    for step in range(4):
        x = _x(10 * trainer.rank + step + 1)
        optimizer.zero_grad()
        if step % 2:
            loss = grad(lambda x: module(x).sum())(x).square().mean()
        else:
            loss = vmap(module)(x).square().mean() + jvp(module, (x,), (torch.ones(3, 4),))[1].square().mean()
        trainer.backward(loss)
        optimizer.step()


def _trains(rank: int, world: int, stage: int) -> None:
    torch.manual_seed(0)
    net = Net()
    outcomes = []
    for make in (Replica, lambda module, rank, world: Sharded(module, rank, world, stage=stage, units=["Block"])):
        trainer = make(copy.deepcopy(net), rank, world)
        _train(trainer)
        outcomes.append(outcome_of(trainer))
    assert not (found := difference(*outcomes, 1e-6)), found


@pytest.mark.parametrize("stage", [1, 3], ids="stage{}".format)
def test_transforms_train_as_the_reference(stage: int) -> None:
    run(_trains, 2, stage)


def test_transforms_see_the_values_of_deferred_steps() -> None:
    module = nn.Linear(2, 1, bias=False)
    engine = ZeroEngine(1, step="deferred")
    optimizer = engine.attach(torch.optim.SGD(engine.shard(module).parameters(), lr=0.5))
    before = module.weight.detach().clone()
    module(torch.ones(2)).sum().backward()
    optimizer.step()
    slope = grad(lambda weight: (weight * weight).sum())(module.weight)
    assert torch.equal(slope, 2 * (before - 0.5))
