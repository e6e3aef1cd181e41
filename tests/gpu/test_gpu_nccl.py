"""What two GPUs show of NCCL: the host never waits for a collective, and the seconds are those of the GPU."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from lightning_zero.comm.communicator import Communicator
from lightning_zero.config import Communication
from tests import worlds

LATE_S = 0.4

pytestmark = pytest.mark.gpu


def _wait_for_rank_1(rank: int, world: int) -> tuple[float, float]:
    """Return the seconds of waits before the GPU has passed one, and behind it."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    communicator = Communicator(Communication(backend="nccl"), device)
    full, shard = torch.empty(8, device=device), torch.ones(4, device=device)
    for _ in range(3):
        communicator.all_gather(full, shard, "unit `blocks.0`").wait()
    torch.cuda.synchronize(device)
    dist.barrier()
    communicator.reset_stats()
    if rank == 1:
        time.sleep(LATE_S)
    torch.cuda.set_sync_debug_mode("error")
    communicator.all_gather(full, shard, "unit `blocks.1`").wait()
    before = communicator.wait_s
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize(device)
    seconds = communicator.wait_s
    communicator.close()
    return before, seconds


def test_a_wait_over_nccl_is_measured_without_one_of_the_host() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    (before, waited), (_, came) = worlds.run(_wait_for_rank_1, 2, timeout_s=120.0)
    assert before == 0.0
    assert waited > LATE_S / 2
    assert came < LATE_S / 2
