from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_zero.parallel.tensor.threads import RanksDisagree, ThreadRanks, run_threads


def test_ranks_exchange_tensors_in_rank_order() -> None:
    found = run_threads(
        ThreadRanks.group(3), lambda one: [t.item() for t in one.all_gather(torch.tensor(float(one.rank)))]
    )
    assert found == [[0.0, 1.0, 2.0]] * 3


def test_the_maximum_is_that_of_all_ranks() -> None:
    found = run_threads(ThreadRanks.group(3), lambda one: one.all_reduce(torch.tensor(float(one.rank)), maximum=True))
    assert [one.item() for one in found] == [2.0] * 3


def test_a_rank_that_calls_no_collective_is_found() -> None:
    def work(one: ThreadRanks) -> Tensor:
        return one.all_reduce(torch.ones(2)) if one.rank == 0 else torch.ones(2)

    with pytest.raises(RanksDisagree, match="a rank waits in `all_reduce` for a rank that does not call it"):
        run_threads(ThreadRanks.group(2), work)


def test_different_collectives_are_found() -> None:
    def work(one: ThreadRanks) -> object:
        return one.all_reduce(torch.ones(2)) if one.rank == 0 else one.all_gather(torch.ones(2))

    with pytest.raises(RanksDisagree, match="ranks disagree on a collective: `all_gather` of shape"):
        run_threads(ThreadRanks.group(2), work)


def test_the_error_of_a_rank_is_raised_and_not_that_of_those_who_wait() -> None:
    def work(one: ThreadRanks) -> Tensor:
        if one.rank == 1:
            raise KeyError("mine")
        return one.all_reduce(torch.ones(2))

    with pytest.raises(KeyError, match="mine"):
        run_threads(ThreadRanks.group(2), work)


def test_threads_inherit_whether_gradients_are_computed() -> None:
    with torch.no_grad():
        assert run_threads(ThreadRanks.group(2), lambda one: torch.is_grad_enabled()) == [False, False]
