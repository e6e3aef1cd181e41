"""The attached optimizers: whose window is open, whether gradients were dropped."""

from __future__ import annotations

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
    windows = [engine._attached.of(optimizer) for optimizer in (first, second)]
    engine.open_window(first)
    assert [window.is_open for window in windows] == [True, False]
    engine.open_window(second)
    assert [window.is_open for window in windows] == [False, True]
    engine.close()


def test_a_read_gradient_opens_the_window_of_its_optimizer_or_none() -> None:
    engine, model, first, second = _trained()
    windows = [engine._attached.of(optimizer) for optimizer in (first, second)]
    assert model[2].weight.grad is not None
    assert [window.is_open for window in windows] == [False, False]
    assert model[1].weight.grad is not None
    assert [window.is_open for window in windows] == [False, True]
    engine._attached.close()
    assert [window.is_open for window in windows] == [False, False]
    engine.close()


def test_an_optimizer_of_nobody_is_refused() -> None:
    engine, model, *_ = _trained()
    with pytest.raises(RuntimeError, match="`SGD` is not attached to the engine"):
        engine._attached.of(torch.optim.SGD(model.parameters(), lr=0.1))
    engine.close()


def test_gradients_that_were_dropped_before_are_not_dropped_twice() -> None:
    engine, model, _, second = _trained()
    engine.begin_gradients()
    model(torch.ones(2, 3)).sum().backward()
    second.zero_grad()
    assert model[1].weight.grad is not None
    engine.end_gradients()
    second.zero_grad()
    assert model[1].weight.grad is None
    engine.begin_gradients()
    with pytest.raises(PipelineError, match="are not dropped by `optimizer.zero_grad"):
        engine.end_gradients()
    engine.close()
