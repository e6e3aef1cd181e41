"""The cost of ``ZeroMonitor``: ``python -m benchmarks.monitor``.

A Trainer fits a GPT at stage 2. Steps with the monitor, each of which writes a row, and steps without it take turns in
one fit, and the kind that begins changes with every pair: a change of the machine's speed affects both. The time of a
step is that from the begin of its batch to the begin of the next one, on the slowest rank. By default a row is written
every 50 steps, so this is more than a run pays.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.models import GPT, SHAPES, UNITS, random_batch
from benchmarks.step import percentiles_ms, ratio_interval
from benchmarks.table import Row, append, heading
from lightning_zero.lightning.callbacks import ZeroMonitor
from lightning_zero.lightning.strategy import ZeroStrategy

__all__ = ["BOUND", "Fit", "fit", "main", "row_of"]

BOUND = 1.01
WARMUP_PAIRS = 2


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A fit with and without the monitor.

    Attributes:
        model: Name of the GPT.
        tokens: Per rank and step.
        world_size: Number of ranks.
        pairs: Pairs of steps that are timed.
    """

    model: str = "40m"
    tokens: int = 128
    world_size: int = 1
    pairs: int = 60

    @property
    def num_steps(self) -> int:
        """Steps, with one more behind the last pair."""
        return 2 * (WARMUP_PAIRS + self.pairs) + 1


class _Program(pl.LightningModule):
    def __init__(self, model: str) -> None:
        super().__init__()
        self.net = GPT.seeded(model)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


class _InTurns(ZeroMonitor):
    """A monitor that is there in every second step."""

    def __init__(self) -> None:
        super().__init__()
        self.began: list[float] = []  # when each batch began

    @property
    def is_there(self) -> bool:
        """Whether the current step has a monitor."""
        return _has_monitor(len(self.began) - 1)

    def on_train_batch_start(self, *args: Any) -> None:  # type: ignore[override]
        """Take the time."""
        self.began.append(time.perf_counter())
        if self.is_there:
            super().on_train_batch_start(*args)

    def on_before_backward(self, *args: Any) -> None:  # type: ignore[override]
        """Let the monitor do its work, if it is there."""
        if self.is_there:
            super().on_before_backward(*args)

    def on_after_backward(self, *args: Any) -> None:  # type: ignore[override]
        """Let the monitor do its work, if it is there."""
        if self.is_there:
            super().on_after_backward(*args)

    def on_before_optimizer_step(self, *args: Any) -> None:  # type: ignore[override]
        """Let the monitor do its work, if it is there."""
        if self.is_there:
            super().on_before_optimizer_step(*args)

    def on_train_batch_end(self, *args: Any) -> None:  # type: ignore[override]
        """Let the monitor do its work, if it is there."""
        if self.is_there:
            super().on_train_batch_end(*args)


def _has_monitor(step: int) -> bool:
    pair, place = divmod(step, 2)
    return (pair + place) % 2 == 0


class _Ranks(LightningEnvironment):
    """The processes of this benchmark."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self._rank = rank
        self._world_size = world_size

    @property
    def creates_processes_externally(self) -> bool:
        """They are there already."""
        return True

    def world_size(self) -> int:
        """Return their number."""
        return self._world_size

    def global_rank(self) -> int:
        """Return this one's."""
        return self._rank

    def local_rank(self) -> int:
        """Return this one's."""
        return self._rank

    def teardown(self) -> None:
        """Leave the environment as it is."""


def fit(rank: int, options: Fit, folder: str) -> list[float]:
    """Train in turns; return the seconds of every step, those of the warm-up first. Collective: all ranks."""
    monitor = _InTurns()
    batches = [random_batch(options.model, options.tokens, step=step, rank=rank) for step in range(options.num_steps)]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=options.world_size,
        strategy=ZeroStrategy(stage=2, units=list(UNITS)),
        plugins=[_Ranks(rank, options.world_size)],
        callbacks=[monitor],
        logger=CSVLogger(folder),
        log_every_n_steps=1,
        max_epochs=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(_Program(options.model), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return [end - begin for begin, end in zip(monitor.began, monitor.began[1:], strict=False)]


def row_of(options: Fit, seconds: list[float]) -> Row:
    """Return the row of the steps of the slowest ranks, those of the warm-up first."""
    timed = list(enumerate(seconds))[2 * WARMUP_PAIRS :]
    on, off = ([one for step, one in timed if _has_monitor(step) == is_there] for is_there in (True, False))
    ratio, lo, hi = ratio_interval(on, off)
    return Row(
        what="monitor", variant="stage2/without", shape=f"{options.model}-{options.tokens}tok", dtype="fp32",
        world=options.world_size, metric="step", unit="ms", **percentiles_ms(on), ratio=f"{ratio:.3f}", lo=f"{lo:.3f}",
        hi=f"{hi:.3f}", bound=f"{BOUND}", verdict="ok" if lo <= BOUND else "MISSED",
    )  # fmt: skip


def _worker(rank: int, options: Fit, folder: str) -> None:
    torch.set_num_threads(1)
    if options.world_size > 1:
        store = dist.FileStore(f"{folder}/store", options.world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=options.world_size)
    seconds = fit(rank, options, folder)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(seconds))


def _measure(options: Fit) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_worker, args=(options, folder), nprocs=options.world_size)  # type: ignore[attr-defined]
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(options.world_size)]
    return row_of(options, [max(step) for step in zip(*found, strict=True)])


def main() -> None:
    """Measure from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default=Fit.model)
    parser.add_argument("--tokens", type=int, default=Fit.tokens)
    parser.add_argument("--ranks", type=int, default=Fit.world_size)
    parser.add_argument("--pairs", type=int, default=Fit.pairs)
    parser.add_argument("--no-csv", action="store_true", help="print only")
    given = parser.parse_args()
    print(heading(), flush=True)
    row = _measure(Fit(model=given.model, tokens=given.tokens, world_size=given.ranks, pairs=given.pairs))
    print(row, flush=True)
    if not given.no_csv:
        append([row], "monitor")
    raise SystemExit(row.verdict == "MISSED")


if __name__ == "__main__":
    main()
