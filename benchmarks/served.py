"""One rank of ``benchmarks.before``: makes a step for each number that it reads; the package is its checkout's."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.models import GPT, random_batch
from benchmarks.opponents import Clock
from benchmarks.zero import ZeroSide


def main() -> None:
    """Write the seconds and the loss of each step to the standard output."""
    rank, folder, model, tokens, stage, world_size = sys.argv[1:]
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), int(world_size))
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(world_size))
    side = ZeroSide(GPT.seeded(model), stage=int(stage))
    for line in sys.stdin:
        batch = random_batch(model, int(tokens), step=int(line), rank=int(rank))
        dist.barrier()
        started = time.perf_counter()
        loss = side.step(batch, Clock())
        print(time.perf_counter() - started, loss.item(), flush=True)
    side.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
