"""The worlds that the other tests stand on."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_zero import ZeroEngine
from tests import worlds

_ENGINES = []


def _sum(rank: int, world: int, scale: float) -> tuple[int, torch.Tensor, float]:
    value = torch.full((3,), scale * (rank + 1))
    dist.all_reduce(value)
    return os.getpid(), value, torch.rand(()).item()


def _fail_on_one(rank: int, world: int) -> None:
    if rank == 1:
        raise KeyError("on purpose")
    dist.barrier()


def _die(rank: int, world: int) -> None:
    if rank == 1:
        os._exit(7)
    dist.barrier()


def _hang(rank: int, world: int) -> None:
    if rank == 0:
        time.sleep(100)


def _nothing(rank: int, world: int) -> None:
    pass


def _send_late(rank: int, world: int) -> str:
    if rank == 0:
        return ""  # at once: the other one uses the connection later
    time.sleep(0.3)
    with pytest.raises(RuntimeError) as caught:
        dist.isend(torch.ones(5), dst=0).wait(timedelta(seconds=0.2))
    return str(caught.value)


def _leave_an_engine(rank: int, world: int) -> None:
    engine = ZeroEngine(stage=3)
    engine.shard(torch.nn.Linear(2, 2))
    _ENGINES.append(engine)  # as a cycle or a traceback would keep it


def _threads(rank: int, world: int) -> int:
    return len(os.listdir(f"/proc/{os.getpid()}/task"))


def _keep_threads(rank: int, world: int) -> int:
    for _ in range(worlds.KEPT_THREADS):
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    return os.getpid()


def _pid(rank: int, world: int) -> int:
    return os.getpid()


def _poison(rank: int, world: int) -> tuple[bool, bool]:
    fresh = torch.empty(100)
    storage = torch.ones(4)
    storage.untyped_storage().resize_(0)
    storage.untyped_storage().resize_(16)
    return bool(fresh.isnan().all()), bool(storage.isnan().all())


def _ledger(rank: int, world: int) -> dict[str, int]:
    with worlds.slow_collectives(0.001), worlds.count_collectives() as ledger:
        dist.all_gather_into_tensor(torch.empty(4 * world), torch.ones(4))
        dist.all_reduce(torch.ones(2))
        if rank == 0:
            dist.send(torch.ones(5), dst=1)
        elif rank == 1:
            dist.recv(torch.ones(5), src=0)
    dist.all_reduce(torch.ones(2))
    return dict(ledger.sent)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_share_a_group_and_seeds(world: int) -> None:
    first, second = worlds.run(_sum, world, 2.0), worlds.run(_sum, world, 2.0)
    assert [answer[0] for answer in first] == [answer[0] for answer in second]  # the processes are reused
    for _, value, random in first + second:
        assert torch.equal(value, torch.full((3,), world * (world + 1.0)))
        assert random == first[0][2]


@pytest.mark.slow
def test_a_rank_that_is_done_first_breaks_no_connection() -> None:
    for _ in range(300):  # some failed, in three of four runs
        worlds.run(_nothing, 4)


def test_a_rank_that_is_done_keeps_its_connections_for_the_others() -> None:
    _, error = worlds.run(_send_late, 2)
    assert "Timed out" in error  # not "Connection closed by peer"


def test_error_of_a_rank_is_raised_with_its_traceback() -> None:
    with pytest.raises(KeyError, match="on purpose") as caught:
        worlds.run(_fail_on_one, 2)
    assert "--- rank 1 ---" in caught.value.__notes__[0]
    assert "_fail_on_one" in caught.value.__notes__[0]
    assert len(worlds.run(_sum, 2, 1.0)) == 2


def test_dead_rank_is_reported() -> None:
    with pytest.raises(worlds.RankError, match="exit code 7"):
        worlds.run(_die, 2)
    assert len(worlds.run(_sum, 2, 1.0)) == 2


def test_hanging_rank_is_shown_where_it_is() -> None:
    with pytest.raises(worlds.RankError, match="_hang"):
        worlds.run(_hang, 2, timeout_s=4.0)
    assert len(worlds.run(_sum, 2, 1.0)) == 2


def test_uninitialised_memory_is_nan() -> None:
    assert worlds.run(_poison, 1) == [(True, True)]


def test_collectives_are_counted_in_bytes_sent() -> None:
    answers = worlds.run(_ledger, 2)
    assert answers == [{"all_gather": 16, "all_reduce": 8, "send": 20}, {"all_gather": 16, "all_reduce": 8}]


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads by /proc")
def test_threads_of_an_engine_that_a_call_leaves_open_end_with_the_call() -> None:
    worlds.run(_leave_an_engine, 2)
    before = worlds.run(_threads, 2)
    for _ in range(3):
        worlds.run(_leave_an_engine, 2)
    assert worlds.run(_threads, 2) == before


def test_processes_that_keep_many_threads_are_replaced() -> None:
    kept = worlds.run(_keep_threads, 2)
    fresh = worlds.run(_pid, 2)
    assert not set(kept) & set(fresh)
    assert worlds.run(_pid, 2) == fresh
