"""Losses of a tensor group are compared without a wait for the step that the device computes."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_zero.lightning.group_losses import GroupLosses, StepDigest, as_float, as_number
from tests.simulated_device import SimulatedDevice


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -3e300, math.inf, -math.inf])
def test_numbers_have_the_bits_of_a_loss(value: float) -> None:
    number = as_number(value)
    assert int(torch.tensor(number)) == number
    assert as_float(number) == value
    assert math.isnan(as_float(as_number(math.nan)))


def test_losses_of_a_step_are_added_and_returned_in_order() -> None:
    losses = GroupLosses(torch.device("cpu"))
    losses.end_step()
    assert losses.next() == StepDigest()
    for value in (1.0, 2.0):
        losses.add(torch.tensor(value, requires_grad=True))
    losses.end_step()
    assert losses.next() == StepDigest(3.0, 3.0)
    losses.add(torch.tensor(4))  # has no backward
    losses.add(torch.tensor([5.0, 6.0]))
    assert list(losses.rest()) == [StepDigest(11.0, 11.0)]


def _checksum(*indices: torch.Tensor) -> int:
    losses = GroupLosses(torch.device("cpu"))
    for one in indices:
        losses.add_indices(one)
    (digest,) = losses.rest()
    return digest.indices


def test_indices_have_a_checksum_of_values_and_places() -> None:
    ids = torch.arange(24).view(2, 12)
    assert 0 < _checksum(ids) < 2**31
    assert _checksum(ids) == _checksum(ids.int())
    assert len({_checksum(one) for one in (ids, ids.flip(0), ids + 1, ids * 2**40)}) == 4
    assert _checksum(ids, ids.flip(0)) != _checksum(ids.flip(0), ids)
    assert int(as_float(as_number(float(_checksum(ids))))) == _checksum(ids)


@pytest.mark.parametrize(
    ("dtype", "ratio", "alike"),
    [(torch.float32, 1 + 1e-6, True), (torch.float32, 1.01, False), (torch.bfloat16, 1.01, True)],
)
def test_rounding_is_no_difference(dtype: torch.dtype, ratio: float, alike: bool) -> None:
    losses = GroupLosses(torch.device("cpu"))
    losses.add(torch.tensor(2.0, dtype=dtype))
    assert losses.are_alike([2.0, 2.0 * ratio], 2.0) == alike
    assert losses.are_alike([math.nan, math.nan], math.nan)
    assert not losses.are_alike([2.0, math.nan], 2.0)
    assert not losses.are_alike([0.0, 2.0], 0.0)


def test_rounding_of_losses_that_cancel_is_no_difference() -> None:
    losses = GroupLosses(torch.device("cpu"))
    for loss in (2.0, -2.0, 1e-6):
        losses.add(torch.tensor(loss))
    (digest,) = losses.rest()
    assert losses.are_alike([digest.loss, 0.0], digest.magnitude)
    assert not losses.are_alike([digest.loss, 1e-3], digest.magnitude)


def test_a_device_is_not_waited_for_in_the_step_that_it_computes() -> None:
    with SimulatedDevice() as device:
        losses = GroupLosses(torch.device("cuda", 0))
        values = []
        for step in range(4):
            losses.end_step()
            values.append(losses.next().loss)
            losses.add(torch.full((), float(step + 1), device="cuda"))
        assert values == [0.0, 0.0, 1.0, 2.0]
        assert [one.loss for one in losses.rest()] == [3.0, 4.0]
        assert device is not None


def _digest(*trees: object) -> StepDigest:
    losses = GroupLosses(torch.device("cpu"))
    for tree in trees:
        losses.add_batch(tree)
    (digest,) = [*losses.rest(), StepDigest()][:1]
    return digest


def test_batches_and_results_have_a_sample() -> None:
    values, ids = torch.arange(-500.0, 500.0), torch.arange(1000)
    assert _digest("text", None, torch.empty(0), torch.empty(3, device="meta")) == StepDigest()
    digest = _digest({"x": values}, [ids])
    assert digest == _digest(values, ids.clone())
    assert digest.magnitude > abs(digest.loss) > 0
    assert digest.loss != _digest(values + 1, ids).loss
    assert digest.indices != _digest(values, ids + 1).indices
    assert _digest(values.bfloat16().view(20, 50).t()[::3]).magnitude > 0


def test_results_have_a_sample_beside_that_of_the_batch_and_integers_of_results_none() -> None:
    losses = GroupLosses(torch.device("cpu"))
    for batch in ("dataloader_iter", torch.ones(2)):
        losses.add_batch(batch)
        losses.add_result({"scores": torch.full((3,), 7.0), "best": torch.arange(3)})
        losses.end_step()
    assert [(one.loss, one.indices) for one in losses.rest()] == [(21.0, 0), (23.0, 0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_of_results_in_16_bits_is_no_difference_and_that_of_batches_is(dtype: torch.dtype) -> None:
    losses = GroupLosses(torch.device("cpu"))
    losses.add_batch(torch.ones(2, dtype=torch.bfloat16))
    losses.add_result(torch.ones(2, dtype=dtype))
    assert losses.are_alike([4.0, 4.02], 4.0) == (dtype is torch.bfloat16)
