"""Time for which a save holds training up: ``python -m benchmarks.saving [--model 57m] [--stage 3]``.

Three things take turns in two processes: one copy of a rank's part of the state into warm host memory, a save with
``async_save``, and a save that waits. Each time is that of the slowest rank. The verdict is that of the asynchronous
save: at most 1.3 of the copy plus 50 ms. First both kinds of checkpoint are read back and compared.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.models import GPT, SHAPES, random_batch
from benchmarks.opponents import Clock
from benchmarks.step import percentiles_ms, ratio_interval
from benchmarks.table import Row, append, heading
from benchmarks.zero import ZeroSide
from lightning_zero.checkpoint import directory, state
from lightning_zero.checkpoint.asynchronous import AsyncSaver, StagingBuffer
from lightning_zero.checkpoint.planner import Segment

__all__ = ["measure"]

COPIES, EXTRA_MS = 1.3, 50.0
WORLD_SIZE = 2


def measure(model: str, *, stage: int, repeats: int) -> list[Row]:
    """Start the processes, and return a row for the copy and for each kind of save."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_worker, args=(model, stage, repeats, folder), nprocs=WORLD_SIZE)
        seconds: dict[str, list[float]] = torch.load(Path(folder) / "seconds.pt")
    copy_ms = 1000 * statistics.median(seconds["copy"])
    bound = (COPIES * copy_ms + EXTRA_MS) / copy_ms
    measured = []
    for variant in ("async", "waiting", "copy"):
        ratio, lo, hi = ratio_interval(seconds[variant], seconds["copy"])
        judged = {"bound": f"{bound:.2f}", "verdict": "ok" if lo <= bound else "FAIL"} if variant == "async" else {}
        measured.append(
            Row(
                what="save",
                variant=variant,
                shape=f"{model}-stage{stage}",
                dtype="fp32",
                world=WORLD_SIZE,
                metric="time",
                unit="ms",
                **percentiles_ms(seconds[variant]),
                **({} if variant == "copy" else {"ratio": f"{ratio:.3f}", "lo": f"{lo:.3f}", "hi": f"{hi:.3f}"}),
                **judged,
            )
        )
    return measured


def _worker(rank: int, name: str, stage: int, repeats: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD_SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    side = ZeroSide(GPT.seeded(name), stage=stage)
    batch = random_batch(name, SHAPES[name].context // 8, step=0, rank=rank)
    clock = Clock()
    side.step(batch, clock)
    saver, staging = AsyncSaver(side.engine), StagingBuffer(pinned=False)

    def snapshot() -> dict[str, Any]:
        return {
            "state_dict": state.model_state(side.engine, side.model),
            "optimizer_states": [state.optimizer_state(side.engine, side.optimizer)],
        }

    def segments() -> list[torch.Tensor]:
        taken = snapshot()
        slots = [slot for one in taken["optimizer_states"][0]["state"].values() for slot in one.values()]
        values = {id(v): v for v in [*taken["state_dict"].values(), *slots] if isinstance(v, Segment)}
        return [value.to_save().local for value in values.values()]

    _check(side, saver, snapshot, folder)
    parts = segments()
    runs: dict[str, Callable[[], None]] = {
        "copy": lambda: _ignore(staging.copy(parts)),
        "async": lambda: saver.save(snapshot(), f"{folder}/async", full=False),
        "waiting": lambda: directory.save(side.engine, snapshot(), f"{folder}/waiting", full=False),
    }
    seconds: dict[str, list[float]] = {key: [] for key in runs}
    for number in range(repeats + 1):  # the first makes the buffers warm
        for key, run in runs.items():
            saver.wait()
            side.step(batch, clock)
            dist.barrier()
            start = time.perf_counter()
            run()
            taken = torch.tensor(time.perf_counter() - start)
            saver.wait()
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            if number:
                seconds[key].append(taken.item())
    saver.close()
    if rank == 0:
        torch.save(seconds, Path(folder) / "seconds.pt")
    dist.barrier()
    dist.destroy_process_group()


def _check(side: ZeroSide, saver: AsyncSaver, snapshot: Callable[[], dict[str, Any]], folder: str) -> None:
    directory.save(side.engine, snapshot(), f"{folder}/waiting", full=False)
    saver.save(snapshot(), f"{folder}/async", full=False)
    saver.wait()
    one, other = (directory.load(side.engine, f"{folder}/{kind}")["state_dict"] for kind in ("waiting", "async"))
    if not all(torch.equal(one[key] + 0, other[key] + 0) for key in one):
        raise RuntimeError("The checkpoint that was written in the background is another one.")


def _ignore(value: object) -> None:
    del value


def main() -> None:
    """Measure and print the rows, and keep them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="57m")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--no-csv", action="store_true", help="print only")
    options = parser.parse_args()
    rows = measure(options.model, stage=options.stage, repeats=options.repeats)
    print(heading(), *rows, sep="\n")
    if not options.no_csv:
        append(rows, "saving")
    raise SystemExit(any(row.verdict == "FAIL" for row in rows))


if __name__ == "__main__":
    main()
