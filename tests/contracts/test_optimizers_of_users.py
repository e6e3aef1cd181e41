"""Optimizers that users subclass, order and reach into step as PyTorch's do, or an error says why not."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.errors import ShardedGradientError
from lightning_zero.sharding import Sharding
from tests import worlds
from tests.references import TinyGPT, token_loss


class Decayed(torch.optim.SGD):
    """Writes parameters behind the step of the class that it extends."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param.mul_(0.9)
        return loss


class Perturbed(torch.optim.SGD):
    """Keeps states of the shape that parameters and gradients have in a method of its own."""

    def perturb(self) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    noise = torch.full(param.shape, 0.5)
                    noise += torch.full(param.grad.shape, 0.25)
                    param.add_(noise * param.grad.sign())


class Numbered(torch.optim.SGD):
    """Takes a factor of the step in front of the closure."""

    def step(self, factor: Any = 1.0, closure: Any = None) -> Any:  # type: ignore[override]
        loss = closure() if closure is not None else None
        with torch.no_grad():
            for param in self.param_groups[0]["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=factor * 0.01)
        return loss


def _factors(rank: int, world: int) -> None:
    engine = ZeroEngine(1)
    module = engine.shard(torch.nn.Linear(2, 1, bias=False))
    optimizer: Any = engine.attach(Numbered(module.parameters()))
    before = engine.full_param(module.weight)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = module(torch.ones(1, 2)).sum()
        loss.backward()
        return loss

    closure()
    optimizer.step(0.5)
    optimizer.step(0.5, closure)
    optimizer.step(1.0, closure=closure)
    torch.testing.assert_close(engine.full_param(module.weight), before - 0.02)
    engine.close()


class Accumulating(torch.optim.SGD):
    """Steps and drops gradients in every second call."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return super().step(closure) if self.calls % 2 == 0 else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.calls % 2 == 0:
            super().zero_grad(set_to_none)


class GradientMomentum(torch.optim.SGD):
    """Keeps a part of the gradient."""

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.mul_(0.5)


class KeepsZeros(torch.optim.SGD):
    """Decays parameters without a gradient of their own, because theirs is zero."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none)


def _of_turns(module: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Freeze one parameter behind the first step: it still has a gradient then."""
    next(module.parameters()).requires_grad_(False)


def _interleaved(module: nn.Module) -> list[nn.Parameter]:
    params = list(module.parameters())
    return params[1::2] + params[::2]


class Projected(torch.optim.SGD):
    """Has methods that need whole parameters."""

    def project(self) -> None:
        for param in self.param_groups[0]["params"]:
            self.state[param]["before"] = param.data.clone()
            param.data.div_(param.data.norm())

    def center(self) -> None:
        for param in self.param_groups[0]["params"]:
            param.data.sub_(param.data.mean())


Program = Callable[[nn.Module, torch.optim.Optimizer, int], None]


def _pointed(module: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 1:
        state = optimizer.state[list(module.parameters())[4]]
        state["exp_avg"].data = state["exp_avg"].data * -20


def _perturbed(module: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    assert isinstance(optimizer, Perturbed)
    optimizer.perturb()


def _projected(module: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    assert isinstance(optimizer, Projected)
    optimizer.project()
    assert all(type(state["before"]) is torch.Tensor for state in vars(optimizer)["state"].values())


CASES: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], Program | None]] = {
    "writes-behind-super": (lambda module: Decayed(module.parameters(), lr=0.01), None),
    "method": (lambda module: Perturbed(module.parameters(), lr=0.01), _perturbed),
    "norm-in-method": (lambda module: Projected(module.parameters(), lr=0.01), _projected),
    "zero_grad-accumulates": (lambda module: Accumulating(module.parameters(), lr=0.01), None),
    "zero_grad-momentum": (lambda module: GradientMomentum(module.parameters(), lr=0.01), None),
    "zero_grad-zeros": (lambda module: KeepsZeros(module.parameters(), lr=0.01, weight_decay=1.0), _of_turns),
    "interleaved": (lambda module: torch.optim.AdamW(_interleaved(module), lr=0.01, fused=True), None),
    "state-pointed": (lambda module: torch.optim.AdamW(module.parameters(), lr=0.01, fused=True), _pointed),
}


def _trained(rank: int, world: int, case: str, options: dict[str, Any]) -> float:
    make, program = CASES[case]
    worlds.seed()
    plain = TinyGPT(depth=2)
    module = copy.deepcopy(plain)
    engine = ZeroEngine(units=["Block"], **options)
    engine.shard(module)
    pairs: Sequence[tuple[nn.Module, torch.optim.Optimizer]] = [(plain, make(plain)), (module, make(module))]
    engine.attach(pairs[1][1])
    for model, optimizer in pairs:
        for step in range(3):
            token_loss(model, 0, step).backward()  # the same on all ranks
            optimizer.step()
            if program is not None:
                program(model, optimizer, step)
            optimizer.zero_grad()
    largest = max(
        float((engine.full_param(mine) - theirs).detach().abs().max())
        for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True)
    )
    engine.close()
    return largest


OPTIONS: dict[str, dict[str, Any]] = {
    "stage0": {"stage": 0},
    "stage1": {"stage": 1},
    "stage1-cpu": {"stage": 1, "offload": "cpu"},
    "stage2-cpu-now": {"stage": 2, "offload": "cpu", "step": "now"},
    "stage3": {"stage": 3},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_a_step_that_writes_behind_that_of_its_base_class_counts(options: str) -> None:
    assert max(worlds.run(_trained, 2, "writes-behind-super", OPTIONS[options])) < 1e-6


def test_a_number_in_front_of_the_closure_is_no_closure() -> None:
    worlds.run(_factors, 2)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("case", ["zero_grad-accumulates", "zero_grad-momentum", "zero_grad-zeros"])
def test_the_optimizers_own_zero_grad_is_called(case: str, options: str) -> None:
    assert max(worlds.run(_trained, 2, case, OPTIONS[options])) < 1e-6


@pytest.mark.parametrize("options", ["stage1", "stage3"])
def test_shapes_in_a_method_are_those_of_the_segments_that_it_changes(options: str) -> None:
    assert max(worlds.run(_trained, 2, "method", OPTIONS[options])) < 1e-6


@pytest.mark.parametrize("options", ["stage0", "stage1", "stage3"])
def test_norms_in_a_method_are_those_of_the_whole(options: str) -> None:
    assert max(worlds.run(_trained, 2, "norm-in-method", OPTIONS[options])) < 1e-6


class Measured(torch.optim.Optimizer):
    """Measures and changes its states in methods and in a property."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            average = self.state[param].setdefault("average", torch.zeros_like(param))
            assert type(average) is torch.Tensor
            param.sub_(average.mul_(0.9).add_(param.grad), alpha=0.1)

    def norm(self) -> torch.Tensor:
        return self._norm()

    def _norm(self) -> torch.Tensor:
        return torch.stack([state["average"].norm() for state in self.state.values()]).norm()

    @property
    def last_norm(self) -> torch.Tensor:
        return self.state[self.param_groups[0]["params"][-1]]["average"].norm()

    @torch.no_grad()
    def clip(self) -> None:
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            assert state["average"].shape == param.shape
            state["before"] = state["average"].clone().view(-1)
            state["average"].div_(state["average"].norm())
            param.add_(state["average"], alpha=0.1)

    def mean(self) -> torch.Tensor:
        return torch.stack([state["average"].mean() for state in self.state.values()])


def _norms_of_states(rank: int, world: int, stage: int) -> None:
    worlds.seed()
    module = nn.Linear(3, 3)
    plain = copy.deepcopy(module)
    engine = ZeroEngine(stage)
    engine.shard(module)
    optimizer, expected = Measured(module.parameters()), Measured(plain.parameters())
    engine.attach(optimizer)
    for model, one in ((module, optimizer), (plain, expected)):
        for number in range(2):
            model(torch.full((1, 3), 1.0 + number)).square().sum().backward()
            one.step()
            one.zero_grad()
    torch.testing.assert_close(optimizer.norm(), expected.norm())
    torch.testing.assert_close(optimizer.last_norm, expected.last_norm)
    torch.testing.assert_close(optimizer._norm(), expected.norm())
    assert all(type(value) is torch.Tensor for value in optimizer.state_dict()["state"][0].values())
    for one in (optimizer, expected):
        one.clip()
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(engine.full_param(mine), theirs.detach())
    torch.testing.assert_close(optimizer.norm(), expected.norm())
    if stage:
        with pytest.raises(ShardedGradientError, match="`mean` needs a whole optimizer state"):
            optimizer.mean()
    optimizer.state_dict()
    assert all(type(value) is torch.Tensor for state in vars(optimizer)["state"].values() for value in state.values())
    engine.close()


@pytest.mark.parametrize("stage", [0, 1, 3], ids="stage{}".format)
def test_norms_of_states_in_methods_and_properties_are_those_of_whole_states(stage: int) -> None:
    worlds.run(_norms_of_states, 2, stage)


def _sums_in_method(rank: int, world: int) -> None:
    engine = ZeroEngine(3)
    optimizer: Any = engine.attach(Projected(engine.shard(nn.Linear(2, 3)).parameters(), lr=0.1))
    with pytest.raises(ShardedGradientError, match="`mean` needs a whole parameter"):
        optimizer.center()
    engine.close()


def test_sums_in_a_method_are_refused() -> None:
    worlds.run(_sums_in_method, 2)


def test_a_state_that_is_pointed_to_other_memory_counts() -> None:
    assert max(worlds.run(_trained, 2, "state-pointed", {"stage": 0})) < 1e-6
    assert max(worlds.run(_trained, 1, "state-pointed", {"stage": 3})) < 1e-6


def test_steps_in_the_backward_take_parameters_in_any_order() -> None:
    assert max(worlds.run(_trained, 2, "interleaved", {"stage": 2, "step": "backward"})) < 1e-6


def _refusals(rank: int, world: int) -> list[str]:
    found = []
    engine = ZeroEngine(2, units=["Block"], step="backward")
    module = engine.shard(TinyGPT(depth=1))
    params = list(module.parameters())
    optimizer = engine.attach(torch.optim.AdamW(params))
    for call in (
        lambda: optimizer.zero_grad(set_to_none=False),
        lambda: engine.attach(torch.optim.SGD([*params, params[0]], lr=0.1)),
    ):
        try:
            call()
        except ValueError as error:
            found.append(str(error))
    return found


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_what_the_engine_would_step_otherwise_is_refused() -> None:
    for zeroed, twice in worlds.run(_refusals, 2):
        assert "`step='backward'` has none to keep" in zeroed
        assert "twice in a group" in twice


class Zeroing(torch.optim.SGD):
    """Drops gradients in a method of its own."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)


def _zeroed_while_waiting(rank: int, world: int, options: dict[str, Any], set_to_none: bool) -> None:
    worlds.seed()
    module, plain = (nn.Linear(3, 2, bias=False) for _ in range(2))
    plain.load_state_dict(module.state_dict())
    engine = ZeroEngine(**options)
    with mock.patch.dict("os.environ", {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}):
        engine.shard(module)
    optimizers = Zeroing(module.parameters(), lr=0.1), Zeroing(plain.parameters(), lr=0.1)
    engine.attach(optimizers[0])

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, microbatch: Callable[..., Any]) -> None:
        model(torch.ones(1, 3)).sum().backward()
        with microbatch(last=False):
            model(torch.full((1, 3), 2.0)).sum().backward()
        optimizer.zero_grad(set_to_none)
        with microbatch(last=False):
            model(torch.full((1, 3), 3.0)).sum().backward()
        with microbatch(last=True):
            model(torch.full((1, 3), 4.0)).sum().backward()
        optimizer.step()

    train(module, optimizers[0], engine.microbatch)
    train(plain, optimizers[1], lambda last: contextlib.nullcontext())
    torch.testing.assert_close(engine.full_param(module.weight), plain.weight.detach())
    engine.close()


@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zeros"])
@pytest.mark.parametrize("stage", [0, 1, "node"], ids="stage-{}".format)
def test_the_optimizers_own_zero_grad_drops_gradients_that_wait(stage: Any, set_to_none: bool) -> None:
    options = {"stage": Sharding(params="node", grads="node")} if stage == "node" else {"stage": stage}
    worlds.run(_zeroed_while_waiting, 2, options, set_to_none)
