"""Steps ahead by themselves: what is kept of them until ``step`` is called."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_zero.engine.buffers.update import Update
from lightning_zero.engine.optim.steps_made_early import StepsMadeEarly
from tests.engine.flat_buffers import SHAPES, numbered_buffer, reduce_fully


def _groups(**options: Any) -> list[dict[str, Any]]:
    return [{"params": [], "lr": 0.1, **options}]


def test_options_are_those_of_the_first_step_until_step_is_called() -> None:
    ahead, buffer = StepsMadeEarly(), numbered_buffer(0)
    ahead.refuse_moved_options(_groups(lr=0.5))  # nothing is ahead
    ahead.begin(_groups())
    ahead.add(buffer, None)
    ahead.begin(_groups(lr=0.2))
    ahead.refuse_moved_options(_groups())
    with pytest.raises(RuntimeError, match=r"`lr` was changed from 0.1 to 0.2 between backward and `optimizer.step"):
        ahead.refuse_moved_options(_groups(lr=0.2))
    assert ahead.take() == {}
    ahead.refuse_moved_options(_groups(lr=0.2))


def test_a_step_that_may_be_running_is_handed_on_or_finished() -> None:
    made: list[str] = []
    ahead, buffer = StepsMadeEarly(), numbered_buffer(0)
    for index, shape in enumerate(SHAPES):
        buffer.gradients.accumulate(index, torch.ones(shape))
    reduce_fully(buffer)
    buffer.gradients.spend()
    ahead.begin(_groups())
    ahead.add(buffer, None)
    assert not ahead.is_running(buffer)
    ahead.add(buffer, update := Update("x", [lambda: made.append("x")], thread=None))
    assert ahead.is_running(buffer)
    assert buffer.gradients.is_ahead
    assert ahead.take() == {id(buffer): update}
    assert ahead.is_empty
    assert (buffer.gradients.is_spent, buffer.gradients.is_ahead) == (True, False)
    ahead.add(buffer, update)
    ahead.finish()
    assert made == ["x"]
    assert ahead.is_empty
