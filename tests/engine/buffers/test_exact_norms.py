"""Norms of fp64 gradients are the rounded exact ones, however the gradients are cut."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from lightning_zero.comm.communicator import Communicator
from lightning_zero.config import Communication
from lightning_zero.engine.buffers.exact_norms import norm_over_ranks_exactly
from tests import worlds

CPU = torch.device("cpu")


def _values() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(997, dtype=torch.float64) * 10.0 ** torch.randint(-8, 8, (997,)).double()


def _exact(values: torch.Tensor) -> float:
    total = sum((Fraction(one) ** 2 for one in values.tolist()), Fraction(0))
    return math.sqrt(float(total))


@pytest.mark.parametrize("sizes", [[997], [1, 996], [500, 497], [7] * 142 + [3]], ids=len)
def test_cuts_do_not_show(sizes: list[int]) -> None:
    values = _values()
    assert norm_over_ranks_exactly(values.split(sizes), None, CPU).item() == _exact(values)


def test_numbers_that_are_not_finite_are_seen() -> None:
    inf, nan = torch.tensor([1.0, math.inf]).double(), torch.tensor([1.0, math.nan]).double()
    assert norm_over_ranks_exactly([inf], None, CPU).item() == math.inf
    assert math.isnan(norm_over_ranks_exactly([inf, nan], None, CPU).item())
    assert norm_over_ranks_exactly([torch.full((3,), 1e200, dtype=torch.float64)], None, CPU).item() == math.inf
    assert norm_over_ranks_exactly([], None, CPU).item() == 0.0


def _over_ranks(rank: int, world: int, sizes: list[int]) -> float:
    piece = _values().split(sizes)[rank]
    return norm_over_ranks_exactly([piece], Communicator(Communication(), CPU), CPU).item()


@pytest.mark.parametrize("sizes", [[997, 0], [333, 664]], ids=str)
def test_ranks_do_not_show(sizes: list[int]) -> None:
    assert worlds.run(_over_ranks, 2, sizes) == [_exact(_values())] * 2
