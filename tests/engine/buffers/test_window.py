"""The step window of a flat buffer by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_zero.engine.buffers.parameter import ReducedParameter, ReleasedParameter, raw_grad
from lightning_zero.engine.buffers.sharded_gradient import ShardedGradient
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.errors import ShardedGradientError
from tests import worlds
from tests.engine.flat_buffers import (
    SHAPES,
    expected_gradient,
    found_gradient,
    numbered_buffer,
    reduce_fully,
    stages,
    values_of,
)
from tests.references import TinyGPT, token_loss, tokens


def _window(rank: int, world: int, stage: int) -> None:
    buffer = numbered_buffer(stage, torch.bfloat16, torch.bfloat16)
    if stage == 3:
        buffer.release()
    for index in (0, 1):
        buffer.gradients.accumulate(index, torch.full(SHAPES[index], float(rank)))
    reduce_fully(buffer)
    for index, param in enumerate(buffer.params):
        buffer.window.enter(index)
        buffer.window.show(index)
        start, stop = buffer.own_range.elements(index)
        assert (isinstance(param, ReducedParameter), param.dtype) == (True, torch.float32)
        shown = param.detach().as_subclass(torch.Tensor)
        assert shown.shape == ((stop - start,) if stage else SHAPES[index])
        assert param.shape == SHAPES[index]
        assert torch.equal(shown.reshape(-1), values_of(index, 0.25).reshape(-1)[start:stop])
        grad = param.grad
        assert (grad is not None) == (index in (0, 1))
        if grad is not None:
            assert (grad.shape, grad.dtype) == (param.shape, torch.float32)
            grad.mul_(3)
            buffer.window.strip(index)
            assert (type(param), type(raw_grad(param))) == (nn.Parameter, Tensor)
            with torch.no_grad():
                param.sub_(grad)
    for index, param in enumerate(buffer.params):
        buffer.leave_window(index)
        assert param.shape == SHAPES[index]
        assert raw_grad(param) is None
        assert type(param) is (ReleasedParameter if stage == 3 else ReducedParameter if index < 2 else nn.Parameter)
    buffer.close_window()
    assert found_gradient(buffer, 0) == expected_gradient(buffer, 0, 3 * (world - 1) / 2)
    start, stop = buffer.own_range.elements(0)
    expected = (values_of(0, 0.25) - 3 * (world - 1) / 2).reshape(-1)[start:stop]
    assert torch.equal(buffer.values.segment(0).reshape(-1), expected)


@stages
def test_the_window_shows_segments_and_keeps_what_was_done_to_gradients(stage: int) -> None:
    worlds.run(_window, 2, stage)


def _replaced(rank: int, world: int, stage: int) -> None:
    buffer = numbered_buffer(stage)
    for index in (0, 1):
        buffer.gradients.accumulate(index, torch.ones(SHAPES[index]))
    reduce_fully(buffer)

    def through_window(index: int, change: Callable[[nn.Parameter], Any]) -> None:
        buffer.window.enter(index)
        buffer.window.show(index)
        change(buffer.params[index])
        buffer.leave_window(index)

    through_window(0, lambda param: setattr(param, "grad", torch.full_like(param, 5.0)))
    assert found_gradient(buffer, 0) == expected_gradient(buffer, 0, 5.0)
    through_window(1, lambda param: setattr(param, "grad", None))
    assert buffer.gradients.has_grad == {0}
    assert found_gradient(buffer, 1) == expected_gradient(buffer, 1, 0.0)
    if stage:
        buffer.window.enter(0)
        buffer.window.show(0)
        with pytest.raises(ShardedGradientError):
            buffer.params[0].grad.mean()
        buffer.leave_window(0)


@stages
def test_a_gradient_that_is_assigned_or_dropped_in_the_window_counts(stage: int) -> None:
    worlds.run(_replaced, 2, stage)


def _zeroed(rank: int, world: int, stage: int) -> None:
    buffer = numbered_buffer(stage, torch.bfloat16, torch.bfloat16)
    for index in (0, 1):
        buffer.gradients.accumulate(index, torch.ones(SHAPES[index]))
    reduce_fully(buffer)
    buffer.window.enter(0)
    buffer.window.show(0)  # from here on the gradients of the buffer are written in fp32
    buffer.gradients.zero([1])
    buffer.leave_window(0)
    buffer.close_window()
    assert found_gradient(buffer, 0) == expected_gradient(buffer, 0, 1.0)
    assert found_gradient(buffer, 1) == expected_gradient(buffer, 1, 0.0)


@stages
def test_gradients_that_are_zeroed_while_the_window_of_others_is_open_stay_zero(stage: int) -> None:
    worlds.run(_zeroed, 2, stage)


def _used_whole(rank: int, world: int, stage: int) -> list[str]:
    engine = ZeroEngine(stage, units=["Block"])
    module = engine.shard(TinyGPT(depth=1))
    engine.attach(torch.optim.SGD(module.parameters(), lr=0.1))
    token_loss(module, rank, 0).backward()
    weight, bias = module.blocks[0].up.weight, module.blocks[0].up.bias
    assert weight.grad is not None
    found = []
    for use in (
        lambda: weight.norm(), lambda: (weight.sum() + 1), lambda: torch.linalg.vector_norm(weight), lambda: weight[0],
        lambda: F.linear(torch.ones(2, 6), weight, bias), lambda: torch.ones(2, 6) @ weight.t(),
        lambda: weight.view(-1),
    ):  # fmt: skip
        try:
            use()
        except ShardedGradientError as error:
            found.append(str(error))
    with torch.no_grad():
        weight.sub_(weight.grad * 0.1).mul_(0.5)
        torch._foreach_add_([weight, bias], [weight.grad, bias.grad])
        weight.data.add_(weight)
    assert isinstance(weight * weight.grad, ShardedGradient) == (stage > 0)
    module(tokens(rank, 0))
    engine.close()
    return found


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_what_needs_a_whole_parameter_in_the_step_window_is_refused_by_name(stage: int) -> None:
    for found in worlds.run(_used_whole, 2, stage):
        assert len(found) == (7 if stage else 0)
        assert all("whole parameter `blocks.0.up.weight`" in one and "full_param" in one for one in found)
