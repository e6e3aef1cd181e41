from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from lightning_zero.comm.traffic import CollectiveCall
from lightning_zero.parallel.tensor import collectives
from lightning_zero.parallel.tensor.collectives import ProcessGroupRanks
from lightning_zero.parallel.tensor.threads import ThreadRanks, run_threads
from tests.worlds import run

FUNCTIONS: dict[str, tuple[str, str]] = {  # forward and backward, as operations on the tensors of both ranks
    "copy_to_ranks": ("none", "sum"),
    "reduce_from_ranks": ("sum", "none"),
    "gather_from_ranks": ("gather", "shard"),
    "scatter_to_ranks": ("shard", "gather"),
    "gather_sequence": ("gather", "sum_shard"),
    "reduce_scatter_sequence": ("sum_shard", "gather"),
}
WITH_DIM = ("gather_from_ranks", "scatter_to_ranks", "gather_sequence", "reduce_scatter_sequence")


def _expected(operation: str, tensors: list[Tensor], rank: int, dim: int) -> Tensor:
    size = len(tensors)
    total = torch.stack(tensors).sum(0)
    if operation == "gather":
        return torch.cat(tensors, dim)
    if operation == "shard":
        return tensors[rank].chunk(size, dim)[rank]
    return {"none": tensors[rank], "sum": total, "sum_shard": total.chunk(size, dim)[rank]}[operation]


def _values(rank: int, shape: Any, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(10 * seed + rank), dtype=torch.float64)


def _call(ranks: Any, name: str, dim: int) -> tuple[Tensor, Tensor | None, Tensor]:
    x = _values(ranks.rank, (4, 4), 1).requires_grad_()
    function = getattr(collectives, name)
    y = function(x, ranks, dim) if name in WITH_DIM else function(x, ranks)
    y.backward(_values(ranks.rank, y.shape, 2))
    return y.detach(), x.grad, y


def _over_gloo(rank: int, world: int) -> list[tuple[Tensor, Tensor | None]]:
    ranks = ProcessGroupRanks()
    return [_call(ranks, name, dim)[:2] for name in FUNCTIONS for dim in (0, 1)]


def _counted(rank: int, world: int) -> dict[str, Any]:
    ranks = ProcessGroupRanks()
    written: list[CollectiveCall] = []
    ranks.traffic.ledger = Mock(add=written.append)
    ranks.all_reduce(torch.ones(4, 3))
    ranks.all_reduce(torch.ones(4), maximum=True)
    ranks.all_gather(torch.ones(2, 3))
    ranks.reduce_scatter(torch.ones(8, 3), 0)
    return {one.what: (one.sent_bytes, one.ranks) for one in written} | {"tensor": ranks.traffic.sent_bytes["tensor"]}


@pytest.mark.parametrize("world", [2, 4])
def test_calls_are_counted_with_their_bytes_and_ranks(world: int) -> None:
    everyone = tuple(range(world))
    share = world - 1
    expected = {
        "sum of activations of shape (4, 3)": (2 * 48 * share // world, everyone),
        "maximum of activations of shape (4,)": (2 * 16 * share // world, everyone),
        "gather of activations of shape (2, 3)": (24 * share, everyone),
        "reduce-scatter of activations of shape (8, 3)": (96 // world * share, everyone),
    }
    for found in run(_counted, world):
        assert found == {**expected, "tensor": sum(sent for sent, _ in expected.values())}


def test_every_collective_has_its_mirror_in_the_backward() -> None:
    results = run(_over_gloo, 2)
    number = 0
    for name, (forward, backward) in FUNCTIONS.items():
        for dim in (0, 1):
            inputs = [_values(rank, (4, 4), 1) for rank in range(2)]
            outputs = [_expected(forward, inputs, rank, dim) for rank in range(2)]
            grads = [_values(rank, outputs[rank].shape, 2) for rank in range(2)]
            for rank in range(2):
                found, grad = results[rank][number]
                assert torch.equal(found, outputs[rank]), name
                assert grad is not None
                assert torch.equal(grad, _expected(backward, grads, rank, dim)), name
            number += 1


@pytest.mark.parametrize("name", FUNCTIONS)
def test_threads_compute_as_processes_do(name: str) -> None:
    forward, backward = FUNCTIONS[name]
    for dim in (0, 1):
        found = run_threads(ThreadRanks.group(2), lambda one, dim=dim: _call(one, name, dim))
        outputs = [_expected(forward, [_values(rank, (4, 4), 1) for rank in range(2)], rank, dim) for rank in range(2)]
        grads = [_values(rank, outputs[rank].shape, 2) for rank in range(2)]
        for rank, (output, grad, _) in enumerate(found):
            assert torch.equal(output, outputs[rank])
            assert grad is not None
            assert torch.equal(grad, _expected(backward, grads, rank, dim))


def test_a_sequence_that_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Dimension 1 of a tensor of shape \(2, 3\) cannot be divided over 2 ranks"):
        collectives.scatter_to_ranks(torch.ones(2, 3), ThreadRanks.group(2)[0], 1)
