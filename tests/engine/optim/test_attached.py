"""The attached optimizers: whose window is open, whether gradients were dropped."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.errors import PipelineError


def _trained() -> tuple[ZeroEngine, nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
    engine = ZeroEngine(2)
    model = engine.shard(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1), nn.Linear(1, 1)))
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.SGD([*model[0].parameters(), *model[1].parameters()], lr=0.1)
    engine.attach(first, second)
    model(torch.ones(2, 3)).sum().backward()
    return engine, model, first, second


def test_a_window_closes_those_that_show_the_same_parameters() -> None:
    engine, _, first, second = _trained()
    windows = [engine._state.attached.of(optimizer) for optimizer in (first, second)]
    engine.internals.steps.open_window(first)
    assert [window.is_open for window in windows] == [True, False]
    engine.internals.steps.open_window(second)
    assert [window.is_open for window in windows] == [False, True]
    engine.close()


def test_a_read_gradient_opens_the_window_of_its_optimizer_or_none() -> None:
    engine, model, first, second = _trained()
    windows = [engine._state.attached.of(optimizer) for optimizer in (first, second)]
    assert model[2].weight.grad is not None
    assert [window.is_open for window in windows] == [False, False]
    assert model[1].weight.grad is not None
    assert [window.is_open for window in windows] == [False, True]
    engine._state.attached.close()
    assert [window.is_open for window in windows] == [False, False]
    engine.close()


@pytest.mark.parametrize("inside", [False, True], ids=["between-steps", "in-a-scope"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_forward_of_a_module_below_a_unit_closes_windows(stage: int, inside: bool) -> None:
    engine = ZeroEngine(stage, units=["Sequential"])
    model = engine.shard(nn.Sequential(nn.Sequential(nn.Linear(3, 5), nn.Tanh()), nn.Linear(5, 1)))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    engine.attach(sgd)
    with engine.scope("training_step") if inside else nullcontext():
        model(torch.ones(2, 3)).sum().backward()
        assert model[0][0].weight.grad is not None
        assert engine._state.attached.of(sgd).is_open
        assert model[0][0](torch.ones(2, 3)).shape == (2, 5)
        assert not engine._state.attached.of(sgd).is_open
    engine.close()


def test_modules_of_others_close_no_window_and_the_hook_goes_with_it() -> None:
    engine, model, first, _ = _trained()
    engine.internals.steps.open_window(first)
    nn.Linear(1, 1)(torch.ones(1))
    assert engine._state.attached.of(first).is_open
    model(torch.ones(2, 3))
    assert not engine._state.attached.of(first).is_open
    assert engine._state.attached._forwards is None
    engine.close()


def test_an_optimizer_of_nobody_is_refused() -> None:
    engine, model, *_ = _trained()
    with pytest.raises(RuntimeError, match="`SGD` is not attached to the engine"):
        engine._state.attached.of(torch.optim.SGD(model.parameters(), lr=0.1))
    engine.close()


def test_gradients_that_were_dropped_before_are_not_dropped_twice() -> None:
    engine, model, _, second = _trained()
    engine.internals.steps.begin_gradients()
    model(torch.ones(2, 3)).sum().backward()
    second.zero_grad()
    assert model[1].weight.grad is not None
    engine.internals.steps.end_gradients()
    second.zero_grad()
    assert model[1].weight.grad is None
    engine.internals.steps.begin_gradients()
    with pytest.raises(PipelineError, match="are not dropped by `optimizer.zero_grad"):
        engine.internals.steps.end_gradients()
    engine.close()
