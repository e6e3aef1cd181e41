"""The gradients of a flat buffer: sums, averages, what is given back."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from lightning_zero.engine.buffers.home import HostHome
from lightning_zero.storage.host import HostStore
from tests import worlds
from tests.engine.flat_buffers import (
    SHAPES,
    STAGES,
    expected_gradient,
    found_gradient,
    numbered_buffer,
    reduce_fully,
    stages,
)


def _retain(rank: int, world: int, stage: int) -> None:
    buffer = numbered_buffer(stage)
    mean = (world - 1) / 2
    for step in range(1, 4):
        buffer.gradients.accumulate(0, torch.full((11, 6), float(rank)))
        buffer.gradients.accumulate(0, torch.full((11, 6), 1.0))
        if rank == 0:
            buffer.gradients.accumulate(1, torch.full((6,), float(world)))
        reduce_fully(buffer)
        assert found_gradient(buffer, 0) == expected_gradient(buffer, 0, step * (mean + 1))
        assert found_gradient(buffer, 1) == expected_gradient(buffer, 1, step * 1.0)
        assert found_gradient(buffer, 4) == expected_gradient(buffer, 4, 0.0)
    buffer.gradients.forget([0])
    assert found_gradient(buffer, 0) == expected_gradient(buffer, 0, 0.0)
    assert found_gradient(buffer, 1) == expected_gradient(buffer, 1, 3.0)
    buffer.gradients.forget([1])
    assert buffer.gradients.reduced is None
    buffer.gradients.accumulate(0, torch.full((11, 6), 1.0))
    reduce_fully(buffer)
    assert found_gradient(buffer, 0) == expected_gradient(buffer, 0, 1.0)


@pytest.mark.parametrize("world", [1, 2, 3])
@stages
def test_gradients_are_kept_over_steps_until_they_are_forgotten(stage: int, world: int) -> None:
    worlds.run(_retain, world, stage if world > 1 else 0)


def _classes_read(rank: int, world: int) -> tuple[int, int]:
    buffer, read = numbered_buffer(3), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_zero.engine.buffers.gradients.user_class", lambda one: read.append(one) or type(one))
        for index in range(len(buffer.params)):
            buffer.bind_one(index)
            buffer.window.drop([index])
    return len(read), len(buffer.params)


def test_a_parameter_that_leaves_the_window_looks_at_no_other() -> None:
    """Nor one whose gradient is dropped: that took quadratic time in ``module.zero_grad()``."""
    for num_read, num_params in worlds.run(_classes_read, 2):
        assert num_read <= 2 * num_params


def _gradient_bytes(rank: int, world: int) -> list[list[float]]:
    """The bytes of gradients while they are summed, when they are reduced and when they are forgotten, in buffers."""
    found = []
    for stage in STAGES:
        buffer = numbered_buffer(stage)
        live = []
        buffer.gradients.accumulate(0, torch.ones(11, 6))
        live.append(buffer.store.live("gradients") / buffer.whole.flat.nbytes)
        reduce_fully(buffer)
        live.append(buffer.store.live("gradients") / buffer.whole.flat.nbytes)
        buffer.gradients.forget()
        live.append(buffer.store.live("gradients") / buffer.whole.flat.nbytes)
        found.append(live)
    return found


def test_whole_gradients_go_when_they_are_reduced_at_stages_2_and_3() -> None:
    for found in worlds.run(_gradient_bytes, 2):
        assert found == [[1, 1, 1], [1, 1, 1], [1, 0.5, 0], [1, 0.5, 0]]


def _padding(rank: int, world: int, stage: int) -> None:
    buffer = numbered_buffer(stage, reduce=torch.bfloat16)
    for index, shape in enumerate(SHAPES):
        buffer.gradients.accumulate(index, torch.full(shape, 3.0))
    reduce_fully(buffer)
    assert buffer.gradients.reduced is not None
    assert buffer.gradients.reduced.dtype == torch.bfloat16
    total = buffer.gradients.reduced.float().square().sum()
    if stage:
        buffer.communicator.all_reduce(total, "x")
    assert total.item() == 9 * buffer.layout.numel


@stages
def test_padding_of_gradients_is_zero(stage: int) -> None:
    worlds.run(_padding, 2, stage)


def _sparse(rank: int, world: int) -> None:
    buffer = numbered_buffer(1)
    indices = torch.tensor([[0, 0, 3]])
    buffer.gradients.accumulate(0, torch.sparse_coo_tensor(indices, torch.ones(3, 6), (11, 6)))
    assert buffer.gradients.sums.flat is not None
    assert buffer.gradients.sums.flat[: 11 * 6].view(11, 6).sum(1).tolist() == [12, 0, 0, 6, 0, 0, 0, 0, 0, 0, 0]


def test_sparse_gradients_become_dense() -> None:
    worlds.run(_sparse, 2)


def _zeroed(rank: int, world: int, stage: int) -> None:
    gradients = (buffer := numbered_buffer(stage)).gradients
    for index in (0, 1):
        gradients.accumulate(index, torch.ones(SHAPES[index]))
    reduce_fully(buffer)
    gradients.zero([0, 4])
    assert gradients.has_grad == {0, 1}
    assert found_gradient(buffer, 0) == expected_gradient(buffer, 0, 0.0)
    assert found_gradient(buffer, 1) == expected_gradient(buffer, 1, 1.0)


@stages
def test_gradients_that_are_set_to_zero_are_still_there(stage: int) -> None:
    worlds.run(_zeroed, 2, stage)


def _factor(rank: int, world: int, stage: int) -> None:
    gradients = (buffer := numbered_buffer(stage)).gradients
    for index in (0, 1):
        gradients.accumulate(index, torch.ones(SHAPES[index]))
    reduce_fully(buffer)
    assert not gradients.scale_later({0}, torch.tensor(0.5))  # there is another one
    assert gradients.scale_later({0, 1}, torch.tensor(0.5))
    assert not gradients.scale_later({0, 1}, torch.tensor(0.5))
    assert gradients.unscaled() is gradients.reduced
    assert found_gradient(buffer, 0) == expected_gradient(buffer, 0, 1.0)
    assert gradients.for_reading() is gradients.reduced
    assert found_gradient(buffer, 0) == expected_gradient(buffer, 0, 0.5)


@stages
def test_a_factor_waits_until_somebody_reads(stage: int) -> None:
    worlds.run(_factor, 2, stage)


def _stale_factor(rank: int, world: int, stage: int) -> None:
    gradients = (buffer := numbered_buffer(stage)).gradients
    assert gradients.scale_later({0, 1}, torch.tensor(0.5))  # nothing to multiply, so nothing is left to do
    assert gradients.factor is None
    for _ in range(2):
        gradients.accumulate(0, torch.ones(SHAPES[0]))
        reduce_fully(buffer)
        assert gradients.for_reading() is gradients.reduced
        assert found_gradient(buffer, 0) == expected_gradient(buffer, 0, 1.0)
        assert gradients.scale_later({0, 1}, torch.tensor(0.5))
        gradients.forget()
        assert gradients.factor is None


@stages
def test_a_factor_does_not_multiply_the_next_gradient(stage: int) -> None:
    worlds.run(_stale_factor, 2, stage)


def _dropped_while_summing(rank: int, world: int, stage: int, drop: str) -> None:
    gradients = (buffer := numbered_buffer(stage)).gradients
    for index in (0, 1):
        gradients.accumulate(index, torch.ones(SHAPES[index]))
    reduce_fully(buffer)
    for index in (0, 1):
        gradients.accumulate(index, torch.full(SHAPES[index], 2.0))  # the average of before waits for these
    getattr(gradients, drop)([0])
    gradients.accumulate(0, torch.full(SHAPES[0], 4.0))
    reduce_fully(buffer)
    assert found_gradient(buffer, 0) == expected_gradient(buffer, 0, 4.0)
    assert found_gradient(buffer, 1) == expected_gradient(buffer, 1, 3.0)


@stages
@pytest.mark.parametrize("drop", ["forget", "zero"])
def test_a_gradient_that_is_dropped_between_micro_batches_is_gone(stage: int, drop: str) -> None:
    worlds.run(_dropped_while_summing, 2, stage, drop)


def _forgotten_while_reduced(rank: int, world: int) -> None:
    gradients = (buffer := numbered_buffer(2, home=partial(HostHome, HostStore(pinned=False)))).gradients
    gradients.accumulate(0, torch.ones(SHAPES[0]))
    reduce_fully(buffer)
    gradients.accumulate(0, torch.full(SHAPES[0], 2.0))
    pending = gradients.reduce()
    gradients.forget()
    pending.wait()
    gradients.finish_reduce()
    gradients.has_grad |= {0}
    assert found_gradient(buffer, 0) == expected_gradient(buffer, 0, 2.0)
    assert buffer.store.live("gradients") == 0
    gradients.accumulate(0, torch.full(SHAPES[0], 4.0))
    reduce_fully(buffer)
    assert found_gradient(buffer, 0) == expected_gradient(buffer, 0, 6.0)


def test_an_average_that_is_forgotten_while_the_next_is_reduced_is_not_added() -> None:
    worlds.run(_forgotten_while_reduced, 2)
