"""Collectives on flat tensors, to the bit, and what they are reported to cost."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_zero.comm.communicator import Communicator, Pending, _divided_sum_in_rank_order
from lightning_zero.config import Communication
from lightning_zero.errors import CollectiveError
from tests import worlds
from tests.sampling import sample

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@contextmanager
def _communicator(**options: Any) -> Iterator[Communicator]:
    communicator = Communicator(Communication(**options), CPU)
    try:
        yield communicator
    finally:
        communicator.close()


def _chunk(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(numel, generator=generator) * 10 ** (rank % 3)).to(dtype)


def _expected(chunks: list[torch.Tensor]) -> torch.Tensor:
    """``((c0 + c1) + c2 …) / N``, 16-bit values in fp32."""
    wide = [chunk.float() if chunk.dtype.itemsize < 4 else chunk for chunk in chunks]
    total = wide[0]
    for chunk in wide[1:]:
        total = total + chunk
    return (total / len(chunks)).to(chunks[0].dtype)


# -- The average -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_average_is_taken_in_rank_order_wherever_it_is_written(world: int, dtype: torch.dtype) -> None:
    for aliased, order in itertools.product([None, *range(world)], [1, -1]):
        chunks = [_chunk(rank, 64, dtype) for rank in range(world)]
        expected = _expected(chunks)
        out = torch.full((64,), float("nan"), dtype=dtype) if aliased is None else chunks[aliased]
        _divided_sum_in_rank_order(out, dict(list(enumerate(chunks))[::order]), len(chunks))
        assert torch.equal(out, expected), (aliased, order)


def test_the_order_of_a_sum_of_three_shows() -> None:
    chunks = [torch.tensor([1e8]), torch.tensor([-1e8]), torch.tensor([1.0])]
    out = torch.empty(1)
    _divided_sum_in_rank_order(out, dict(enumerate(chunks)), len(chunks))
    assert out.item() == torch.tensor(1.0).div(3).item()


def test_sums_of_fp16_do_not_overflow() -> None:
    chunks = {rank: torch.full((8,), 60000.0, dtype=torch.float16) for rank in range(4)}
    out = torch.empty(8, dtype=torch.float16)
    _divided_sum_in_rank_order(out, chunks, len(chunks))
    assert torch.equal(out, torch.full((8,), 60000.0, dtype=torch.float16))


# -- Collectives -------------------------------------------------------------------------------------------------------


def _reduce_scatter(rank: int, world: int) -> None:
    with _communicator() as communicator:
        for dtype, into_own_place in itertools.product(DTYPES, [True, False]):
            fulls = [_chunk(10 + peer, 16 * world, dtype) for peer in range(world)]
            full = fulls[rank].clone()
            own = full.chunk(world)[rank]
            shard = own if into_own_place else torch.empty_like(own)
            communicator.reduce_scatter(shard, full, "unit `x`").wait()
            expected = _expected([other.chunk(world)[rank] for other in fulls])
            assert torch.equal(shard, expected), (dtype, into_own_place)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_reduce_scatter_gives_every_rank_the_average_of_its_part(world: int) -> None:
    worlds.run(_reduce_scatter, world)


def _all_gather(rank: int, world: int) -> None:
    with _communicator() as communicator:
        for dtype, in_place in itertools.product(DTYPES, [True, False]):
            shards = [_chunk(peer, 16, dtype) for peer in range(world)]
            full = torch.empty(16 * world, dtype=dtype)
            shard = full.chunk(world)[rank].copy_(shards[rank]) if in_place else shards[rank]
            communicator.all_gather(full, shard, "unit `x`").wait()
            assert torch.equal(full, torch.cat(shards)), (dtype, in_place)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_all_gather_gives_every_rank_all_parts(world: int) -> None:
    worlds.run(_all_gather, world)


def _interleaved(rank: int, world: int) -> None:
    """Start gathers and reductions in an order that differs between ranks, wait for them in another."""
    with _communicator() as communicator:
        shards = [torch.full((8,), float(10 * number + rank)) for number in range(3)]
        wholes = [torch.empty(8 * world) for _ in shards]
        sums = [torch.full((8 * world,), float(number + rank)) for number in range(3)]
        averages = [torch.empty(8) for _ in sums]
        gathers = [lambda n=n: communicator.all_gather(wholes[n], shards[n], f"gather {n}") for n in range(3)]
        reductions = [lambda n=n: communicator.reduce_scatter(averages[n], sums[n], f"sum {n}") for n in range(3)]
        starts = [*gathers, *reductions] if rank == 0 else [*reductions, *gathers]
        for pending in reversed([start() for start in starts]):
            pending.wait()
        for number in range(3):
            assert wholes[number].chunk(world)[1][0] == 10 * number + 1
            assert averages[number][0] == number + sum(range(world)) / world


def test_gathers_and_reductions_do_not_wait_for_each_other() -> None:
    worlds.run(_interleaved, 3)


def _others(rank: int, world: int) -> None:
    with _communicator() as communicator:
        value = torch.tensor([float(rank), 1.0])
        assert communicator.all_reduce(value, "x") is value
        assert value.tolist() == [sum(range(world)), world]
        assert communicator.all_reduce(torch.tensor(rank), "x", dist.ReduceOp.MIN).item() == 0
        assert communicator.agree_on([rank, 0, 2**32 - 1 - rank], "x") == [world - 1, 0, 2**32 - 1]
        assert [communicator.any_is(rank == one, "x") for one in (0, world - 1, world)] == [True, True, False]
        assert communicator.agree_on_flags(torch.tensor([rank, 0], dtype=torch.uint8), "x").tolist() == [world - 1, 0]
        value = torch.tensor([float(rank)])
        communicator.broadcast(value, "x", source=world - 1)
        assert value.item() == world - 1


@pytest.mark.parametrize("world", [2, 3])
def test_agreements_and_broadcasts_reach_every_rank(world: int) -> None:
    worlds.run(_others, world)


def _different_agreements(rank: int, world: int) -> str:
    with _communicator() as communicator:
        values, what = (([3, 1, 4], "comparison of lengths"), ([1, 5], "agreement on signals (here)"))[rank]
        with pytest.raises(CollectiveError) as raised:
            communicator.agree_on(values, what)
        return str(raised.value)


def test_agreements_on_different_things_that_meet_are_errors_with_both_names() -> None:
    first, second = worlds.run(_different_agreements, 2, timeout_s=20)
    assert "the comparison of lengths failed: rank 1 came for the agreement on signals" in first
    assert "rank 0 came for the comparison of lengths" in second


CALLS: dict[str, Callable[[Communicator], object]] = {
    "next collective": lambda one: one.agree_on([5], "agreement on the next collective (unit `0` is needed)"),
    "lengths": lambda one: one.agree_on([1, 2, 3, 4, 5], "comparison of lengths"),
    "overflow": lambda one: one.any_is(True, "agreement on overflow"),
    "used": lambda one: one.agree_on_flags(torch.ones(100, dtype=torch.uint8), "agreement on used parameters"),
    "objects": lambda one: one.gather_objects("a" * 1000, "exchange about a checkpoint"),
    "names": lambda one: one.gather_objects({"a": 1}, "names of values that are logged"),
    "reading": lambda one: one.meet(3, "reading of a parameter"),
    "promise": lambda one: one.agree_later(torch.ones(1, dtype=torch.uint8), "agreement on gradients").wait(),
}
AT_ONCE = [{"next collective", "lengths", "overflow"}, {"objects", "names"}]  # on one group: all see what others want


def _two_calls(rank: int, world: int, names: tuple[str, str]) -> tuple[str, float]:
    with _communicator(timeout_s=1.5) as communicator:
        assert communicator.promise_group is not None  # made at its first use, by all ranks
        started = time.monotonic()
        with pytest.raises(CollectiveError) as raised:
            CALLS[names[rank]](communicator)
        return str(raised.value), time.monotonic() - started


@pytest.mark.parametrize(
    "names",
    sample(
        itertools.combinations(CALLS, 2), ("next collective", "lengths"), ("overflow", "used"), ("objects", "names")
    ),
    ids="-".join,
)
def test_any_two_calls_on_host_values_that_meet_are_errors_and_no_crash(names: tuple[str, str]) -> None:
    (first, _), (second, _) = worlds.run(_two_calls, 2, names, timeout_s=20)
    assert "rank 0 of 2: the" in first
    assert "rank 1 of 2: the" in second
    if any(set(names) <= group for group in AT_ONCE):
        assert f"failed: rank 1 came for the {_topic_of(second)}" in first
        assert f"failed: rank 0 came for the {_topic_of(first)}" in second


def _topic_of(text: str) -> str:
    return text.partition("the ")[2].partition(" failed")[0].partition(" (")[0]


def _subgroup(rank: int, world: int) -> list[float]:
    """Work in pairs, the second pair twice, one after the other."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    found = []
    for _ in range(1 + rank % 2):
        communicator = Communicator(Communication(), CPU, pairs[rank % 2])
        assert (communicator.rank, communicator.world_size) == (rank // 2, 2)
        full, shard = torch.empty(2), torch.empty(1)
        communicator.all_gather(full, torch.tensor([float(rank)]), "x").wait()
        communicator.reduce_scatter(shard, torch.full((2,), float(rank)), "x").wait()
        communicator.close()
        found += [*full.tolist(), shard.item()]
    return found


def _of_several_backends(rank: int, world: int) -> list[float]:
    group = dist.new_group(list(range(world)), backend="cpu:gloo,cuda:gloo")
    communicator = Communicator(Communication(), torch.device("cpu"), group)
    full, shard = torch.arange(2.0 * world) * (rank + 1), torch.empty(2)
    communicator.reduce_scatter(shard, full, "test").wait()
    communicator.close()
    return shard.tolist()


def test_a_group_with_a_backend_per_device_has_that_of_the_device() -> None:
    """Averages were asked of gloo, which has none."""
    assert worlds.run(_of_several_backends, 2) == [[0.0, 1.5], [3.0, 4.5]]


def test_a_part_of_the_ranks_keeps_to_itself() -> None:
    even, odd = [0.0, 2.0, 1.0], [1.0, 3.0, 2.0]
    assert worlds.run(_subgroup, 4, timeout_s=20.0) == [even, odd * 2, even, odd * 2]


# -- Pending and errors ------------------------------------------------------------------------------------------------


class _Work:
    def __init__(self, error: Exception | None = None) -> None:
        self.waits = 0
        self._error = error

    def wait(self) -> None:
        self.waits += 1
        if self._error is not None:
            raise self._error


def test_waiting_again_does_nothing() -> None:
    work, finished = _Work(), []
    pending = Pending(
        Communicator(Communication(), CPU), "x", [work], keep=[torch.ones(1)], finish=lambda: finished.append(1)
    )
    assert finished == []
    pending.wait()
    pending.wait()
    assert (work.waits, finished) == (1, [1])


def test_a_failed_collective_names_rank_and_unit_and_is_not_finished() -> None:
    finished: list[int] = []
    pending = Pending(
        Communicator(Communication(), CPU),
        "all-gather of unit `blocks.3`",
        [_Work(RuntimeError("connection reset"))],
        finish=lambda: finished.append(1),
    )
    with pytest.raises(CollectiveError, match=r"rank 0 of 1: the all-gather of unit `blocks\.3` failed: connection"):
        pending.wait()
    assert not finished


def _abandoned(rank: int, world: int) -> str:
    """Return the error of the rank whose peer does not come."""
    communicator = Communicator(Communication(timeout_s=1.0), CPU)
    message = ""
    if rank == 0:
        with pytest.raises(CollectiveError) as caught:
            communicator.all_gather(torch.empty(2 * world), torch.ones(2), "unit `blocks.1`").wait()
        message = str(caught.value)
    dist.barrier()
    return message


def test_a_peer_that_does_not_come_is_an_error_after_the_timeout() -> None:
    message, _ = worlds.run(_abandoned, 2, timeout_s=20.0)
    assert "rank 0 of 2: the all-gather of unit `blocks.1` failed" in message
    assert "lightning_zero.gathered(module)" in message


# -- Accounts ----------------------------------------------------------------------------------------------------------


def _count(rank: int, world: int) -> tuple[dict[str, int], dict[str, int], bool]:
    with _communicator() as communicator, worlds.count_collectives() as ledger:
        full, shard = torch.zeros(16 * world), torch.zeros(16)
        communicator.all_gather(full, shard, "x").wait()
        communicator.all_gather(full.bfloat16(), shard.bfloat16(), "x").wait()
        communicator.reduce_scatter(shard, full, "x").wait()
        communicator.broadcast(torch.zeros(5), "x")
        communicator.agree_on_flags(torch.zeros(3, dtype=torch.uint8), "x")
        communicator.all_reduce(torch.zeros(2, dtype=torch.float64), "x", kind="reads")
        counts = dict(communicator.sent_bytes), dict(communicator.calls)
        sent = sum(communicator.sent_bytes[kind] for kind in ("all_gather", "reduce_scatter"))
        communicator.reset_stats()
        assert not communicator.sent_bytes
        assert communicator.wait_s == 0
        return *counts, sent == ledger.payload


@pytest.mark.parametrize("world", [2, 3])
def test_sent_bytes_and_calls_are_counted_as_they_are(world: int) -> None:
    for sent, calls, is_what_was_seen in worlds.run(_count, world):
        assert is_what_was_seen
        peers = world - 1
        assert sent == {
            "all_gather": (64 + 32) * peers, "reduce_scatter": 64 * peers, "broadcast": 20, "control": 3, "reads": 16,
        }  # fmt: skip
        assert calls == {"all_gather": 2, "reduce_scatter": 1, "broadcast": 1, "control": 1, "reads": 1}


def test_one_rank_needs_no_process_group_and_sends_nothing() -> None:
    communicator = Communicator(Communication(), CPU)
    full, shard = torch.arange(4.0), torch.empty(4)
    communicator.reduce_scatter(shard, full, "x").wait()
    assert torch.equal(shard, full)
    communicator.all_gather(full, shard + 1, "x").wait()
    assert torch.equal(full, shard + 1)
    communicator.broadcast(full, "x")
    assert communicator.agree_on([3], "x") == [3]
    assert (communicator.world_size, communicator.control_group, communicator.sent_bytes.total()) == (1, None, 0)
    communicator.close()
