"""Time the engine's collectives beside the transport's own: ``python -m benchmarks.collectives --mib 0.25 2 20``.

A size is that of the whole flat tensor. ``ratio`` is to the transport's call of the same name.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.step import percentiles_ms, ratio_interval
from benchmarks.table import Row, append, heading
from lightning_zero.comm.communicator import Communicator
from lightning_zero.config import Communication

__all__ = ["measure"]

_all_gather: Callable[..., None] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., None] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def measure(mib: float, *, repeats: int, world_size: int = 2) -> list[Row]:
    """Start the processes and time both collectives on a flat fp32 tensor of ``mib`` MiB."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_worker, args=(mib, repeats, folder, world_size), nprocs=world_size)
        seconds: dict[str, list[float]] = torch.load(Path(folder) / "seconds.pt")
    measured: list[Row] = []
    for name in ("all_gather", "reduce_scatter"):
        ratio, lo, hi = ratio_interval(seconds[f"{name}/engine"], seconds[f"{name}/transport"])
        for variant in ("engine", "transport"):
            interval = {"ratio": f"{ratio:.3f}", "lo": f"{lo:.3f}", "hi": f"{hi:.3f}"} if variant == "engine" else {}
            measured.append(
                Row(
                    what=name,
                    variant=variant,
                    shape=f"{mib:g}MiB",
                    dtype="fp32",
                    world=world_size,
                    metric="time",
                    unit="ms",
                    **percentiles_ms(seconds[f"{name}/{variant}"]),
                    **interval,
                )
            )
    return measured


def _worker(rank: int, mib: float, repeats: int, folder: str, world_size: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    communicator = Communicator(Communication(), torch.device("cpu"))
    shard = torch.randn(int(mib * 2**18) // world_size)
    full = torch.randn(shard.numel() * world_size)
    calls: dict[str, Callable[[], None]] = {
        "all_gather/engine": lambda: communicator.all_gather(full, shard, "flat").wait(),
        "all_gather/transport": lambda: _all_gather(full, shard),
        "reduce_scatter/engine": lambda: communicator.reduce_scatter(shard, full, "flat").wait(),
        "reduce_scatter/transport": lambda: _reduce_scatter(shard, full, op=dist.ReduceOp.AVG),
    }
    laps: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(-3, repeats):
        for name, call in calls.items():
            dist.barrier()
            start = time.perf_counter()
            call()
            if repeat >= 0:
                laps[name].append(time.perf_counter() - start)
    slowest = torch.tensor(list(laps.values()), dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if rank == 0:
        torch.save(dict(zip(laps, slowest.tolist(), strict=True)), f"{folder}/seconds.pt")
    communicator.close()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Measure the chosen sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, nargs="+", default=[0.25, 3.0, 20.0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--no-csv", action="store_true", help="print only")
    options = parser.parse_args()
    print(heading())
    for mib in options.mib:
        measured = measure(mib, repeats=options.repeats)
        print(*measured, sep="\n", flush=True)
        if not options.no_csv:
            append(measured, "collectives")


if __name__ == "__main__":
    main()
