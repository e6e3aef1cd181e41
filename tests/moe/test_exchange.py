from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from lightning_zero.errors import CollectiveError
from lightning_zero.moe.exchange import ExpertRanks, compute_on_ranks
from tests.worlds import count_collectives, run

H = 3
# Rows by rank and expert, for each number of ranks.
COUNTS = {2: [[2, 0, 3, 1], [0, 0, 0, 2]], 4: [[1, 0, 2, 1], [0, 0, 0, 0], [0, 3, 0, 0], [1, 1, 1, 1]]}


def _rows(rank: int, world: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return rows sorted by expert, one more than is used on even ranks, and where those of each expert end."""
    counts = torch.tensor(COUNTS[world][rank])
    rows = torch.randn(int(counts.sum()) + (rank + 1) % 2, H, generator=torch.Generator().manual_seed(rank))
    return rows.to(dtype).requires_grad_(), counts.cumsum(0).int()


def _scale(rows: Tensor, offsets: Tensor, first: int) -> Tensor:
    """Multiply the rows of each expert by its number, beginning with ``first`` + 1."""
    counts = torch.diff(offsets, prepend=offsets.new_zeros(1))
    factors = (torch.arange(len(counts)) + first + 1).repeat_interleave(counts)
    return rows * factors.unsqueeze(1).to(rows.dtype)


def _exchanged(rank: int, world: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
    meetings = []
    ranks = ExpertRanks(meet=lambda: meetings.append(0))
    rows, offsets = _rows(rank, world, dtype)
    first = rank * 4 // world

    def compute(arrived: Tensor, ends: Tensor) -> Tensor:
        return _scale(arrived, ends, first)

    result = compute_on_ranks(rows, offsets, compute=compute, ranks=ranks, layer=0)
    (grad,) = torch.autograd.grad(result.square().sum(), rows)
    return result.detach(), grad, len(meetings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [2, 4])
def test_rows_are_computed_by_their_experts_and_come_back(world: int, dtype: torch.dtype) -> None:
    for rank, (result, grad, num_meetings) in enumerate(run(_exchanged, world, dtype)):
        rows, offsets = _rows(rank, world, dtype)
        used = int(offsets[-1])
        expected = _scale(rows[:used], offsets, 0)
        (slope,) = torch.autograd.grad(expected.square().sum(), rows)
        assert torch.equal(result[:used], expected)
        assert not result[used:].any()
        assert torch.equal(grad, slope)
        assert num_meetings == 5  # numbers, rows, results, and their gradients


def _second_derivative(rank: int, world: int) -> tuple[Tensor, Tensor]:
    rows, offsets = _rows(rank, world)
    ranks = ExpertRanks()

    def compute(arrived: Tensor, ends: Tensor) -> Tensor:
        return arrived.pow(3)

    result = compute_on_ranks(rows, offsets, compute=compute, ranks=ranks, layer=0)
    (first,) = torch.autograd.grad(result.sum(), rows, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), rows)
    return rows.detach()[: int(offsets[-1])], second[: int(offsets[-1])]


def test_gradients_of_gradients_are_exchanged_too() -> None:
    for rows, second in run(_second_derivative, 2):
        assert torch.allclose(second, 6 * rows)


def _bytes(rank: int, world: int) -> int:
    rows, offsets = _rows(rank, world)
    ranks = ExpertRanks()
    with count_collectives() as ledger:
        compute_on_ranks(rows, offsets, compute=lambda arrived, ends: arrived, ranks=ranks, layer=0)
    return ledger.sent["send"]


def test_only_rows_of_other_ranks_are_sent() -> None:
    numbers = (5 + 2) * 8  # facts and two experts, int64
    assert run(_bytes, 2) == [numbers + 4 * 4 * H] * 2  # four rows there, and their results back


def _differs(rank: int, world: int, kind: str) -> None:
    rows, offsets = _rows(rank, world)
    if kind == "dtype" and rank:
        rows = rows.bfloat16()
    if kind == "graph" and rank:
        rows = rows.detach()
    layer = rank if kind == "layer" else 0
    compute_on_ranks(rows, offsets, compute=lambda arrived, ends: arrived, ranks=ExpertRanks(), layer=layer)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("layer", "expert rank 1 is at layer 1 with rows of torch.float32, gradients on, rows with a graph"),
        ("dtype", "expert rank 1 is at layer 0 with rows of torch.bfloat16"),
        ("graph", "expert rank 1 is at layer 0 with rows of torch.float32, gradients on, rows without a graph"),
    ],
)
def test_ranks_at_different_calls_are_refused(kind: str, message: str) -> None:
    with pytest.raises(CollectiveError, match=f"run different calls of layers with experts: .*{message}"):
        run(_differs, 2, kind)


def _copied(rank: int, world: int) -> bool:
    ranks = ExpertRanks()
    return copy.deepcopy(ranks) is ranks


def test_copies_of_a_module_share_the_ranks() -> None:
    assert run(_copied, 2) == [True, True]
