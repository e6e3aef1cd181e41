from __future__ import annotations

import copy
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.comm.traffic import CollectiveCall
from lightning_zero.errors import CollectiveError
from lightning_zero.forecast.rehearsal import pretended_world
from lightning_zero.moe.exchange import ExpertRanks, compute_on_ranks
from lightning_zero_ops import grouped_linear
from tests.simulated_device import SimulatedDevice
from tests.simulated_transport import BACKEND
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
    """Multiply the rows of each expert by its number, beginning with ``first`` + 1, and those of nobody by NaN."""
    counts = torch.diff(offsets, prepend=offsets.new_zeros(1))
    factors = (torch.arange(len(counts)) + first + 1.0).repeat_interleave(counts)
    factors = nn.functional.pad(factors, (0, len(rows) - len(factors)), value=float("nan"))
    return rows * factors.unsqueeze(1).to(rows.dtype)


def _exchanged(rank: int, world: int, dtype: torch.dtype, room: int | None) -> tuple[Tensor, Tensor, int]:
    meetings = []
    ranks = ExpertRanks(meet=lambda: meetings.append(0))
    rows, offsets = _rows(rank, world, dtype)
    first = rank * 4 // world

    def compute(arrived: Tensor, ends: Tensor) -> Tensor:
        return _scale(arrived, ends, first)

    result = compute_on_ranks(rows, offsets, compute=compute, ranks=ranks, layer=0, room=room)
    (grad,) = torch.autograd.grad(result.square().sum(), rows)
    return result.detach(), grad, len(meetings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("room", [None, 3, 5])
@pytest.mark.parametrize("world", [2, 4])
def test_rows_are_computed_by_their_experts_and_come_back(world: int, room: int | None, dtype: torch.dtype) -> None:
    for rank, (result, grad, num_meetings) in enumerate(run(_exchanged, world, dtype, room)):
        rows, offsets = _rows(rank, world, dtype)
        used = int(offsets[-1])
        expected = _scale(rows[:used], offsets, 0)
        (slope,) = torch.autograd.grad(expected.square().sum(), rows)
        assert torch.equal(result[:used], expected)
        assert not result[used:].any()
        assert torch.equal(grad, slope)
        assert num_meetings == 5  # numbers, rows, results, and their gradients


def _second_derivative(rank: int, world: int, room: int | None) -> tuple[Tensor, Tensor]:
    rows, offsets = _rows(rank, world)
    ranks = ExpertRanks()

    def compute(arrived: Tensor, ends: Tensor) -> Tensor:
        return arrived.pow(3)

    result = compute_on_ranks(rows, offsets, compute=compute, ranks=ranks, layer=0, room=room)
    twice = [torch.autograd.grad(result.sum(), rows, create_graph=True)[0] for _ in range(2)]
    (second,) = torch.autograd.grad((twice[0] + twice[1]).sum() / 2, rows)
    return rows.detach()[: int(offsets[-1])], second[: int(offsets[-1])]


@pytest.mark.parametrize("room", [None, 3])
def test_gradients_of_gradients_are_exchanged_too(room: int | None) -> None:
    for rows, second in run(_second_derivative, 2, room):
        assert torch.allclose(second, 6 * rows)


def _bytes(rank: int, world: int, room: int | None) -> int:
    rows, offsets = _rows(rank, world)
    ranks = ExpertRanks()
    with count_collectives() as ledger:
        compute_on_ranks(rows, offsets, compute=lambda arrived, ends: arrived, ranks=ranks, layer=0, room=room)
    return ledger.sent["send"]


def test_only_rows_of_other_ranks_are_sent() -> None:
    numbers = (2 + 2) * 8  # facts and two experts, int64
    assert run(_bytes, 2, None) == [numbers + 4 * 4 * H] * 2  # four rows there, and their results back
    assert run(_bytes, 2, 3) == [numbers + 2 * 2 * 3 * 4 * H] * 2  # of two experts, there and back


def _differs(rank: int, world: int, kind: str) -> None:
    rows, offsets = _rows(rank, world)
    if kind == "dtype" and rank:
        rows = rows.bfloat16()
    if kind == "graph" and rank:
        rows = rows.detach()
    layer = rank if kind == "layer" else 0
    room = 3 + rank if kind == "room" else None
    compute_on_ranks(rows, offsets, compute=lambda arrived, ends: arrived, ranks=ExpertRanks(), layer=layer, room=room)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("layer", "expert rank 1 is at layer 1 with rows of torch.float32, gradients on, rows with a graph"),
        ("dtype", "expert rank 1 is at layer 0 with rows of torch.bfloat16"),
        ("graph", "expert rank 1 is at layer 0 with rows of torch.float32, gradients on, rows without a graph"),
        ("room", "expert rank 1 is at layer 0 with .*, room for 4 rows of an expert"),
    ],
)
def test_ranks_at_different_calls_are_refused(kind: str, message: str) -> None:
    with pytest.raises(CollectiveError, match=f"run different calls of layers with experts: .*{message}"):
        run(_differs, 2, kind)


def _with_nan(rank: int, world: int) -> tuple[Tensor, Tensor, bool]:
    """Return results and gradients of experts that divide by a row, and whether one has computed rows of zeros."""
    rows, offsets = _rows(rank, world)
    weight = torch.ones(2, H, H, requires_grad=True)
    saw_zeros = False

    def compute(arrived: Tensor, ends: Tensor) -> Tensor:
        nonlocal saw_zeros
        saw_zeros = not arrived.any(1).all()
        y = grouped_linear(arrived / arrived.norm(dim=1, keepdim=True), weight, None, ends)
        return grouped_linear(y / y.norm(dim=1, keepdim=True), weight, None, ends)

    result = compute_on_ranks(rows, offsets, compute=compute, ranks=ExpertRanks(), layer=0, room=3)
    result.square().sum().backward()
    assert rows.grad is not None
    assert weight.grad is not None
    return torch.cat([result.detach(), rows.grad]), weight.grad, saw_zeros


def test_rows_of_nobody_count_in_nothing() -> None:
    """Also where their results are not a number."""
    for values, grad, saw_zeros in run(_with_nan, 2):
        assert saw_zeros
        assert values.isfinite().all()
        assert grad.isfinite().all()
        assert grad.any()


def _waits(rank: int, world: int, room: int | None, deaf_to: str | None = None) -> tuple[dict[str, int], list[Tensor]]:
    """Return the waits of the host for a simulated device in a forward and a backward, and values."""
    group = dist.new_group(backend=BACKEND)
    with SimulatedDevice(deaf_to=deaf_to) as device:
        given, ends = _rows(rank, world)
        rows, offsets = given.detach().to("cuda").requires_grad_(), ends.to("cuda")
        device.waits.clear()
        ranks = ExpertRanks(group)
        result = compute_on_ranks(
            rows, offsets, compute=lambda arrived, ends: arrived.pow(3), ranks=ranks, layer=0, room=room
        )
        (grad,) = torch.autograd.grad(result.square().sum(), rows)
        waits = dict(device.waits)
        used = int(ends[-1])
        return waits, [given[:used].detach(), result.detach().cpu()[:used], grad.cpu()[:used]]


@pytest.mark.parametrize(("room", "number"), [(None, 1), (3, 0)])
def test_the_host_waits_for_numbers_of_rows_unless_rows_are_padded(room: int | None, number: int) -> None:
    for waits, (rows, result, grad) in run(_waits, 2, room):
        assert sum(waits.values()) == number, waits
        assert torch.allclose(result, rows.pow(3))
        assert torch.allclose(grad, 6 * rows.pow(5))


def test_a_device_that_does_not_wait_for_rows_is_found() -> None:
    """The mutant: the simulated device computes before numbers and rows have arrived."""
    try:
        found = run(_waits, 2, 3, "wait of a collective: moe/exchange.py _await")
    except RuntimeError:  # what has not arrived is no index
        return
    assert not any(torch.allclose(result, rows.pow(3)) for _, (rows, result, _) in found)


def _copied(rank: int, world: int) -> bool:
    ranks = ExpertRanks()
    return copy.deepcopy(ranks) is ranks


def test_copies_of_a_module_share_the_ranks() -> None:
    assert run(_copied, 2) == [True, True]


def _moved(rank: int, world: int) -> Tensor:
    """Leave a transfer on rank 0, as an interrupted run does; return rows over the groups of the next run."""
    ranks = ExpertRanks(dist.new_group())
    if rank == 0:
        ranks.start(torch.ones(1, H), [0, 1], [0, 1])
    ranks.move(dist.new_group())
    return ranks.exchange(torch.full((2, H), float(rank)), [1, 1], [1, 1])


def test_what_an_interrupted_run_has_left_is_not_waited_for_over_other_groups() -> None:
    for rows in run(_moved, 2):
        assert rows[:, 0].tolist() == [0.0, 1.0]


def _counted(rank: int, world: int) -> list[CollectiveCall]:
    ranks = ExpertRanks()
    written: list[CollectiveCall] = []
    ranks.traffic.ledger = Mock(add=written.append)
    rows, offsets = _rows(rank, world)
    compute_on_ranks(rows, offsets, compute=lambda arrived, ends: arrived, ranks=ranks, layer=0).sum().backward()
    return written


def test_exchanges_are_counted_with_the_bytes_to_other_ranks() -> None:
    counts = torch.tensor(COUNTS[2]).view(2, 2, 2).sum(2)  # rows by rank and receiver
    for rank, calls in enumerate(run(_counted, 2)):
        there, back = int(counts[rank].sum()), int(counts[:, rank].sum())
        sent, returned = int(counts[rank, 1 - rank]), int(counts[1 - rank, rank])
        assert [(one.what, one.sent_bytes) for one in calls] == [
            ("exchange of numbers of rows between experts", 8 * 4),  # two facts and two experts
            *[
                (f"exchange of {number} rows between experts", nbytes * H * 4)
                for number, nbytes in ((there, sent), (back, returned), (there, sent), (back, returned))
            ],
        ]
        assert {(one.kind, one.ranks) for one in calls} == {("experts", (0, 1))}


@pytest.mark.parametrize("room", [None, 4])
def test_rows_of_pretended_ranks_are_even(room: int | None) -> None:
    seen: list[tuple[int, list[int]]] = []

    def compute(arrived: Tensor, ends: Tensor) -> Tensor:
        seen.append((len(arrived), ends.tolist()))
        return arrived * 2

    with pretended_world(2, rank=1):
        rows = torch.ones(11, H, requires_grad=True)
        offsets = torch.tensor([11, 11, 11, 11], dtype=torch.int32)
        result = compute_on_ranks(rows, offsets, compute=compute, ranks=ExpertRanks(), layer=0, room=room)
        result.sum().backward()
        assert result.shape == rows.shape
    assert seen == [(12 if room is None else 16, [6, 12])]  # 5 or 6 rows of this rank, and as many of the other
