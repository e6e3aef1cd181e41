"""Disks while stepping: ``python -m benchmarks.storage PATH [--blocks 12] [--width 2048]``.

Four things take turns in one process: training steps with optimizer states, masters and gradients in records below
``PATH``, each finished before the next begins, and as they are by default, with the update beside the next forward; the
same steps with everything in memory; and plain reads and writes of as many bytes, of the same length, by as many
threads, in another file of the same directory. Verdicts: from ``optimizer.step()`` until everything is written, the
finished step takes at most 1 / 0.9 of the plain transfers of the same bytes; a default step, from the end of one
``optimizer.step()`` to the end of the next with the update of the first in between, takes at most 1.25 of the longer of
a step in memory and the plain transfers of all its bytes. Weights that differ are an error.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from benchmarks.step import percentiles_ms, ratio_interval
from benchmarks.table import Row, append, heading
from lightning_zero.config import Offload
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.storage.disk import DiskStore
from lightning_zero.storage.nvme import NvmeStore
from lightning_zero.storage.pages import Pages

__all__ = ["measure"]

PHASE_BOUND, STEP_BOUND = 1 / 0.9, 1.25
STEPS = 4


@dataclass
class _Side:
    """A model that is trained, with the seconds of a step, in runs of steps, and of the second phase of a run."""

    engine: ZeroEngine
    model: nn.Module
    optimizer: torch.optim.Optimizer
    seconds: list[float] = field(default_factory=list)
    phases: list[float] = field(default_factory=list)

    @classmethod
    def make(cls, blocks: int, width: int, offload: Offload | None, deferred: bool = False) -> _Side:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(blocks)])
        engine = ZeroEngine(2, units=["Linear"], offload=offload, step="deferred" if deferred else "now")
        model = engine.shard(model)
        return cls(engine, model, engine.attach(torch.optim.AdamW(model.parameters(), lr=1e-3)))

    def run(self, batches: list[torch.Tensor]) -> None:
        """Train, and wait until everything is written. The first step of several is not timed."""
        ends = [time.perf_counter()]
        for batch in batches:
            self.optimizer.zero_grad()
            self.model(batch).square().mean().backward()
            self.engine.clip_grad_norm(self.optimizer, 1.0)
            middle = time.perf_counter()
            self.optimizer.step()
            ends.append(time.perf_counter())
        self.engine.flush()
        if self.store is not None:
            self.store.drain()
        self.phases.append(time.perf_counter() - middle)
        self.seconds.append((ends[-1] - ends[1]) / max(len(batches) - 1, 1))

    @property
    def store(self) -> DiskStore | None:
        return self.engine._state.sharded.placement.disk


class _Raw:
    """Plain transfers in a file of their own."""

    def __init__(self, offload: Offload, nbytes: int) -> None:
        self._block = offload.buffer_bytes
        self._disks = NvmeStore(
            [Path(path) for path in offload.paths], block_bytes=self._block, threads=1, direct=offload.direct
        )
        self._record = self._disks.reserve("raw", nbytes)
        self._pool = ThreadPoolExecutor(offload.io_threads)
        self._local = threading.local()
        self._run(0, nbytes)

    def seconds(self, read_bytes: int, written_bytes: int) -> float:
        """Move so many bytes, reads and writes in turn, and return for how long."""
        start = time.perf_counter()
        self._run(read_bytes, written_bytes)
        return time.perf_counter() - start

    def _run(self, read_bytes: int, written_bytes: int) -> None:
        reads, writes = (max(nbytes // self._block, 1 if nbytes else 0) for nbytes in (read_bytes, written_bytes))
        blocks = [block for block in self._record.blocks if block[3] == self._block] or self._record.blocks
        jobs = [(os.preadv, number) for number in range(reads)] + [(os.pwritev, number) for number in range(writes)]
        jobs.sort(key=lambda job: job[1])
        futures = [self._pool.submit(self._move, call, blocks[number % len(blocks)]) for call, number in jobs]
        for future in futures:
            future.result()

    def _move(self, call: object, block: tuple[int, int, int, int]) -> None:
        if not hasattr(self._local, "content"):
            pages = Pages(self._block)
            pages.content.fill_(1)
            self._local.content = memoryview(pages.content.numpy())
        file, offset, _, length = block
        count = call(self._disks._files[file], [self._local.content[:length]], offset)  # type: ignore[operator]
        assert count == length

    def close(self) -> None:
        self._pool.shutdown()
        self._disks.close()


def measure(path: str, *, blocks: int, width: int, tokens: int, repeats: int, buffer_bytes: int) -> list[Row]:
    """Return the rows of the phase and of the step, after comparing weights."""
    offload = Offload(optimizer="nvme", path=path, buffer_bytes=buffer_bytes)
    finished, memory = _Side.make(blocks, width, offload), _Side.make(blocks, width, None)
    default = _Side.make(blocks, width, offload, deferred=True)
    raw = _Raw(offload, 4 * width * width * blocks)
    assert finished.store is not None
    disks = finished.store.disks
    of_phase: list[float] = []
    of_step: list[float] = []
    for number in range(repeats + 2):
        generator = torch.Generator().manual_seed(number)
        batches = [torch.randn(tokens, width, generator=generator) for _ in range(STEPS)]
        before = disks.read_bytes, disks.written_bytes
        finished.run(batches[:1])
        moved = disks.read_bytes - before[0], disks.written_bytes - before[1]
        default.run(batches)
        memory.run(batches)
        of_step.append(raw.seconds(*moved))
        of_phase.append(raw.seconds(moved[0], moved[0] * 3 // 4))  # gradients are written before, and read here
    raw.close()
    for mine, theirs in zip(default.model.parameters(), memory.model.parameters(), strict=True):
        if not torch.equal(default.engine.full_param(mine), memory.engine.full_param(theirs)):
            raise RuntimeError("The weights that were stepped on disks are others.")
    floor = max((memory.seconds[2:], of_step[2:]), key=statistics.median)
    shape = f"{blocks}x{width}x{width}-{tokens}tok"
    sides = [
        ("phase", finished.phases[2:], of_phase[2:], PHASE_BOUND),
        ("step", default.seconds[2:], floor, STEP_BOUND),
        ("step-in-memory", memory.seconds[2:], None, None),
        ("raw-of-phase", of_phase[2:], None, None),
        ("raw-of-step", of_step[2:], None, None),
    ]
    for side in (finished, default, memory):
        side.engine.close()
    return [_row(variant, shape, seconds, opponent, bound) for variant, seconds, opponent, bound in sides]


def _row(variant: str, shape: str, seconds: list[float], opponent: list[float] | None, bound: float | None) -> Row:
    judged: dict[str, str] = {}
    if opponent is not None and bound is not None:
        ratio, lo, hi = ratio_interval(seconds, opponent)
        verdict = "ok" if lo <= bound else "FAIL"
        judged = {"ratio": f"{ratio:.3f}", "lo": f"{lo:.3f}", "hi": f"{hi:.3f}", "bound": f"{bound:.2f}"}
        judged["verdict"] = verdict
    return Row(
        what="storage", variant=variant, shape=shape, dtype="fp32", world=1, metric="time", unit="ms",
        **percentiles_ms(seconds), **judged,
    )  # fmt: skip


def main() -> None:
    """Measure and print the rows, and keep them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="a directory on the disk")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--buffer-bytes", type=int, default=Offload().buffer_bytes)
    parser.add_argument("--no-csv", action="store_true", help="print only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(
        options.path,
        blocks=options.blocks,
        width=options.width,
        tokens=options.tokens,
        repeats=options.repeats,
        buffer_bytes=options.buffer_bytes,
    )
    print(heading(), *rows, sep="\n")
    if not options.no_csv:
        append(rows, "storage")
    raise SystemExit(any(row.verdict == "FAIL" for row in rows))


if __name__ == "__main__":
    main()
