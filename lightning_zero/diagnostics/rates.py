"""Rates of a machine, measured in seconds: copies, steps on the CPU, disks, collectives."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lightning_zero.comm.communicator import Communicator
from lightning_zero.config import Communication
from lightning_zero.engine.optim.step_device import fastest_s, measure_rates
from lightning_zero.storage.nvme import NvmeStore

__all__ = ["collectives", "copies_and_steps", "disk", "step_rates"]

_GB = 1e9
_DISK_BYTES = 2**28
_SHARD_NUMEL = 2**20
_COPIED_NUMEL = 2**25  # 128 MiB: more than the caches hold
_TIMEOUT_S = 60.0


def copies_and_steps() -> dict[str, str]:
    """Return the rates of AdamW on the CPU, and of copies between page-locked host memory and the first GPU."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    rates = measure_rates(device)
    found = {
        f"AdamW on the CPU, {torch.get_num_threads()} thread(s)": f"{rates.host_step / 1e6:.0f} million elements per s"
    }
    if device.type == "cuda":
        found["host to GPU 0, page-locked"] = f"{rates.up / _GB:.1f} GB/s"
        found["GPU 0 to host, page-locked"] = f"{rates.down / _GB:.1f} GB/s"
    return found


def step_rates(ranks: int | None = None) -> dict[str, float]:
    """Return rates of this machine as ``MachineRates`` has them: matrix products, copies, collectives of one node.

    Args:
        ranks: See ``collectives``.

    Raises:
        RuntimeError: See ``collectives``.
    """
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    values, copy = (torch.ones(_COPIED_NUMEL, device=device) for _ in range(2))

    def move() -> None:
        copy.copy_(values)
        _finish(device)

    moved = 2 * values.nbytes / fastest_s(move, _alone) / _GB
    measured = measure_rates(device)
    count, backend = _count_and_backend(ranks)
    seconds = max(_seconds_of_collectives(count, backend).values())
    in_fp32 = _tflops(device, torch.float32)
    return {
        "tflops": _tflops(device, torch.bfloat16) if device.type == "cuda" else in_fp32,
        "tflops_fp32": in_fp32,
        "memory": moved,
        "link": (count - 1) * _SHARD_NUMEL * 4 / seconds / _GB,
        "host": min(measured.up, measured.down) / _GB if device.type == "cuda" else moved,
    }


def _tflops(device: torch.device, dtype: torch.dtype) -> float:
    """Return 10**12 operations per second of a matrix product."""
    width = 8192 if device.type == "cuda" else 1024
    left, right = (torch.ones(width, width, dtype=dtype, device=device) for _ in range(2))
    product = torch.empty_like(left)

    def multiply() -> None:
        torch.mm(left, right, out=product)
        _finish(device)

    return 2 * width**3 / fastest_s(multiply, _alone) / 1e12


def disk(path: Path) -> dict[str, str]:
    """Return the rates at which ``Offload(path=...)`` would write and read a directory; 256 MiB are written there.

    Raises:
        StorageError: The directory cannot be written, or is full.
    """
    store = NvmeStore([path], block_bytes=2**22, threads=16, direct=True)
    try:
        record = store.reserve("report", _DISK_BYTES)
        memory = store.empty(_DISK_BYTES)
        memory.fill_(1)
        writing = fastest_s(lambda: store.write(record, memory).wait(), _alone)
        reading = fastest_s(lambda: store.read(record, memory).wait(), _alone)
        through = "" if store.is_direct else ", through the page cache"
    finally:
        store.close()
    return {
        f"write to {path}": f"{_DISK_BYTES / writing / _GB:.2f} GB/s{through}",
        f"read from {path}": f"{_DISK_BYTES / reading / _GB:.2f} GB/s{through}",
    }


def collectives(ranks: int | None = None) -> dict[str, str]:
    """Return the rates of an all-gather and a reduce-scatter of 4 MiB per rank, between processes of this machine.

    Args:
        ranks: Number of processes; by default one per GPU, or two on the CPU where there are fewer than two GPUs.

    Raises:
        RuntimeError: A process failed, or the collectives did not end within a minute.
    """
    count, backend = _count_and_backend(ranks)
    sent = (count - 1) * _SHARD_NUMEL * 4
    return {
        f"{name}, {backend}, {count} ranks": f"{sent / second / _GB:.2f} GB/s sent per rank"
        for name, second in _seconds_of_collectives(count, backend).items()
    }


def _seconds_of_collectives(count: int, backend: str) -> dict[str, float]:
    """Return how long rank 0 of ``count`` processes takes for each collective."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    context = mp.get_context("spawn")
    results: Any = context.SimpleQueue()
    world = _World(count, backend, store.port)
    processes: Any = mp.spawn(_worker, (world, results), nprocs=count, join=False)  # type: ignore[attr-defined,no-untyped-call]
    ends = time.monotonic() + _TIMEOUT_S
    try:
        while not processes.join(timeout=1.0):
            if time.monotonic() > ends:
                raise RuntimeError(f"collectives of {backend} did not end within {_TIMEOUT_S:.0f} s")
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:  # type: ignore[attr-defined]
        raise RuntimeError(f"a process that measures {backend} failed: {str(error).splitlines()[-1]}") from error
    finally:
        for process in processes.processes:
            process.kill()
    seconds: dict[str, float] = results.get()
    return seconds


def _count_and_backend(ranks: int | None) -> tuple[int, str]:
    on_gpus = torch.cuda.is_available() and dist.is_nccl_available()
    return _ranks_and_backend(ranks, torch.cuda.device_count() if on_gpus else 0)


def _ranks_and_backend(ranks: int | None, num_gpus: int) -> tuple[int, str]:
    """Return how many processes there are, and how they communicate; one alone sends nothing."""
    count = ranks or max(num_gpus, 2)
    return count, "nccl" if count <= num_gpus else "gloo"


class _World(NamedTuple):
    """The processes: how many, how they communicate, where they meet."""

    size: int
    backend: str
    port: int


def _worker(rank: int, world: _World, results: Any) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if world.backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=_TIMEOUT_S)
    store = dist.TCPStore("127.0.0.1", world.port, timeout=timeout)  # type: ignore[attr-defined]
    dist.init_process_group(world.backend, store=store, rank=rank, world_size=world.size, timeout=timeout)
    communicator = Communicator(Communication(), device)
    shard = torch.ones(_SHARD_NUMEL, device=device)
    whole = torch.ones(_SHARD_NUMEL * world.size, device=device)

    def all_gather() -> None:
        communicator.all_gather(whole, shard, "flat").wait()
        _finish(device)

    def reduce_scatter() -> None:
        communicator.reduce_scatter(shard, whole, "flat").wait()
        _finish(device)

    found = {
        "all-gather": fastest_s(all_gather, dist.barrier),
        "reduce-scatter": fastest_s(reduce_scatter, dist.barrier),
    }
    if rank == 0:
        results.put(found)
    communicator.close()
    dist.barrier()
    dist.destroy_process_group()


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _alone() -> None:
    """Wait for no other process."""
