"""Reductions of a backward: when they start, what comes late, who had a gradient."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.engine.runtime.reduction import Reducer
from lightning_zero.engine.units.unit import Unit
from tests import worlds
from tests.engine.units.test_unit import make_unit

SIZE = 40  # every rank has a part of it


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(SIZE))
        self.b = nn.Parameter(torch.zeros(SIZE))


def _world(stage: int, in_flight: int = 1, count: int = 2) -> tuple[Reducer, list[Unit]]:
    units = [make_unit(_Model(), stage) for _ in range(count)]
    for index, unit in enumerate(units):
        unit.index = index
    return Reducer(units, units[0].buffers[0].communicator, in_flight), units


def _gradient(unit: Unit, index: int) -> set[float] | None:
    """Return the values in this rank's part of a reduced gradient."""
    buffer = unit.buffers[0]
    if index not in buffer.gradients.has_grad:
        return None
    assert buffer.gradients.reduced is not None
    return set(buffer.own_range.segment(index, buffer.gradients.reduced).tolist())


def _add(reducer: Reducer, unit: Unit, index: int, value: float) -> None:
    reducer.before_gradient(unit)
    unit.accumulate(0, index, torch.full((SIZE,), value))


def _late(rank: int, world: int, stage: int) -> None:
    """Rank 1 gets another gradient after its unit's reduction has started."""
    reducer, (first, second) = _world(stage)
    for step in range(1, 3):
        reducer.begin()
        _add(reducer, second, 0, 2.0)
        reducer.start(second)
        _add(reducer, first, 0, 4.0)
        if rank == 1:
            _add(reducer, second, 0, 6.0)
            _add(reducer, second, 1, 8.0)
        reducer.start(first)
        reducer.finish()
        assert (_gradient(second, 0), _gradient(second, 1)) in (
            ({2.0 * step + 3.0 * step}, {4.0 * step}),
            ({5.0 * step}, set()),
            (set(), {4.0 * step}),
        )
        assert _gradient(first, 0) in ({4.0 * step}, set())
        assert _gradient(first, 1) is None
        assert not first.is_reduced


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_late_gradient_is_reduced_once_more_on_every_rank(stage: int) -> None:
    worlds.run(_late, 2, stage)


def _used(rank: int, world: int) -> list[Any]:
    reducer, (first, second) = _world(2)
    reducer.begin()
    if rank == 0:
        _add(reducer, first, 0, 2.0)
    if rank == 1:
        _add(reducer, first, 1, 3.0)
    reducer.start(second)
    reducer.start(first)
    reducer.finish()
    used, unused = first.buffers[0].gradients, second.buffers[0].gradients
    return [used.has_grad, unused.has_grad, unused.reduced]


def test_what_some_rank_used_counts_as_zero_elsewhere_and_what_nobody_used_has_no_gradient() -> None:
    assert worlds.run(_used, 3) == [[{0, 1}, set(), None]] * 3


def _remembered(rank: int, world: int) -> list[Any]:
    """Use the same parameters twice, others on rank 1, and the same again behind an error; return what was known."""
    reducer, (first, second) = _world(2)
    found: list[Any] = []
    for index in (0, 0, rank, 0):
        if len(found) == 3:
            reducer.abandon()
        reducer.begin()
        _add(reducer, first, index, 2.0)
        reducer.start(first)
        is_as_before = reducer.is_as_before("backward")
        first.buffers[0].communicator.reset_stats()
        reducer.finish("backward", is_as_before=False)
        found.append((is_as_before, first.buffers[0].gradients.has_grad.copy()))
        first.buffers[0].gradients.forget()
    reducer.begin()
    _add(reducer, first, 0, 2.0)
    reducer.start(first)
    first.buffers[0].communicator.reset_stats()
    reducer.finish("backward", is_as_before=reducer.is_as_before("backward"))
    return [*found, (first.buffers[0].communicator.calls["control"], first.buffers[0].gradients.has_grad)]


def test_a_rank_knows_whether_it_uses_the_parameters_of_before() -> None:
    same = [(False, {0}), (True, {0})]
    assert worlds.run(_remembered, 2) == [[*same, (rank == 0, {0, 1}), (False, {0}), (0, {0})] for rank in range(2)]


def _calls(rank: int, world: int, in_flight: int) -> list[int]:
    """Return how many reductions were under way after each start."""
    reducer, units = _world(2, in_flight, count=4)
    reducer.begin()
    found = []
    for unit in units:
        _add(reducer, unit, 0, 1.0)
        reducer.start(unit)
        reducer.start(unit)  # nothing new
        found.append(len(reducer._in_flight))
    reducer.finish()
    assert units[0].buffers[0].communicator.calls["reduce_scatter"] == 1
    return found


@pytest.mark.parametrize(("in_flight", "expected"), [(0, [0, 0, 0, 0]), (1, [1, 1, 1, 1]), (2, [1, 2, 2, 2])])
def test_a_unit_is_reduced_once_and_no_more_than_allowed_at_a_time(in_flight: int, expected: list[int]) -> None:
    assert worlds.run(_calls, 2, in_flight) == [expected] * 2


def _abandoned(rank: int, world: int) -> set[float] | None:
    reducer, (first, second) = _world(2)
    reducer.begin()
    _add(reducer, second, 0, 1.0)
    reducer.start(second)
    reducer.abandon()
    return _gradient(second, 0)


def test_an_abandoned_backward_leaves_no_gradient() -> None:
    assert worlds.run(_abandoned, 2) == [None, None]


def _settled_at(rank: int, world: int, stage: int) -> float:
    """Rank 1 comes late to the reduction; return when it came, and when rank 0 had settled."""
    reducer, (first, _) = _world(stage)
    reducer.begin()
    _add(reducer, first, 0, 2.0)
    if rank == 1:
        time.sleep(0.3)
    came_at = time.monotonic()  # one clock for all processes
    reducer.start(first)
    reducer.abandon()
    reducer.settle()
    first.buffers[0].communicator.settle()
    return came_at if rank == 1 else time.monotonic()


@pytest.mark.parametrize("stage", [1, 2])
def test_reductions_of_an_abandoned_backward_are_over_when_they_are_settled(stage: int) -> None:
    settled_at, came_at = worlds.run(_settled_at, 2, stage)
    assert settled_at >= came_at
