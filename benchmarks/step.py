"""Time whole training steps of two trainers side by side: ``python -m benchmarks.step --opponent fsdp2 --tokens 64``.

Both live in the same processes and take turns, so that a change of the machine's mood meets both. Before anything is
timed they have to agree on losses and weights; if they do not, no ratio is printed.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import quantiles
from typing import Literal, get_args

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from benchmarks.models import GPT, SHAPES, random_batch
from benchmarks.opponents import Clock, Side
from benchmarks.opponents.ddp import DDPSide
from benchmarks.opponents.floor import FloorSide
from benchmarks.opponents.fsdp2 import FSDP2Side
from benchmarks.opponents.plain import PlainSide
from benchmarks.table import Row, append, heading
from benchmarks.zero import ZeroSide

__all__ = ["Comparison", "Timings", "Trainer", "measure", "percentiles_ms", "ratio_interval", "rows"]

Trainer = Literal["engine", "fsdp2", "ddp", "floor", "plain"]

GATE_STEPS = 3
GATE_TOLERANCE = 1e-5
WARMUP_PAIRS = 2
NUM_RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One trainer, usually the engine at one stage, against another.

    Attributes:
        model: A name of ``benchmarks.models.SHAPES``.
        tokens: Tokens per rank and step.
        bound: The ratio of the times that must not be exceeded; None measures without a verdict.
    """

    model: str
    tokens: int
    stage: int
    opponent: Trainer
    subject: Trainer = "engine"
    pairs: int = 20
    bound: float | None = None

    @property
    def world_size(self) -> int:
        """Number of processes: the plain loop has no peers."""
        return 1 if self.opponent == "plain" else 2

    @property
    def name(self) -> str:
        """The variant and shape that are compared, as in ``engine3/fsdp2 10m-64tok``."""
        return f"{self._variant} {self._shape}"

    def row(self, **measured: str) -> Row:
        """Return a row of the table with the measured numbers."""
        return Row(
            what="step",
            variant=self._variant,
            shape=self._shape,
            dtype="fp32",
            world=self.world_size,
            metric="time",
            unit="ms",
            bound="" if self.bound is None else f"{self.bound:g}",
            **measured,
        )

    @property
    def _variant(self) -> str:
        return f"{self.subject}{self.stage}/{self.opponent}"

    @property
    def _shape(self) -> str:
        return f"{self.model}-{self.tokens}tok"


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Seconds of every timed step, slowest rank, in the order in which they were taken.

    Attributes:
        ours: (pairs,) seconds of the subject.
        theirs: (pairs,) seconds of the opponent.
        disagreement: The largest relative difference that the check before saw.
    """

    ours: list[float]
    theirs: list[float]
    disagreement: float


def measure(comparison: Comparison) -> Timings:
    """Start the processes, check, time and return.

    Raises:
        RuntimeError: The sides do not compute the same.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_worker, args=(comparison, folder), nprocs=comparison.world_size)
        timings = Timings(**json.loads((Path(folder) / "timings.json").read_text()))
    if not timings.disagreement <= GATE_TOLERANCE:
        raise RuntimeError(
            f"{comparison.subject} at stage {comparison.stage} and {comparison.opponent} differ by"
            f" {timings.disagreement:.1e} after {GATE_STEPS} steps (allowed: {GATE_TOLERANCE:.0e}),"
            " so their times are not compared."
        )
    return timings


def rows(comparison: Comparison, timings: Timings) -> list[Row]:
    """Return the table's rows: the subject with ratio and verdict, and the opponent below it."""
    ratio, lo, hi = ratio_interval(timings.ours, timings.theirs)
    verdict = "" if comparison.bound is None else "FAIL" if lo > comparison.bound else "ok"
    ours = comparison.row(
        ratio=f"{ratio:.3f}",
        lo=f"{lo:.3f}",
        hi=f"{hi:.3f}",
        verdict=verdict,
        **percentiles_ms(timings.ours),
    )
    opponent = replace(comparison, subject=comparison.opponent, bound=None)
    return [ours, opponent.row(**percentiles_ms(timings.theirs))]


def ratio_interval(ours: list[float], theirs: list[float], seed: int = 0) -> tuple[float, float, float]:
    """Return the ratio of the 20th percentiles and its 95 % interval, from resampling the pairs with replacement."""
    generator = random.Random(seed)
    pairs = list(zip(ours, theirs, strict=True))
    resampled = sorted(
        _percentile([pair[0] for pair in chosen]) / _percentile([pair[1] for pair in chosen])
        for chosen in (generator.choices(pairs, k=len(pairs)) for _ in range(NUM_RESAMPLES))
    )
    tail = round(0.025 * NUM_RESAMPLES)
    return _percentile(ours) / _percentile(theirs), resampled[tail], resampled[-tail - 1]


def _percentile(values: list[float], percent: int = 20) -> float:
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def percentiles_ms(seconds: list[float]) -> dict[str, str]:
    """Return the percentiles that a row holds, as text."""
    return {f"p{percent}": f"{1e3 * _percentile(seconds, percent):.2f}" for percent in (20, 50, 80)}


def _worker(rank: int, comparison: Comparison, folder: str) -> None:
    torch.set_num_threads(1)
    if comparison.world_size > 1:
        store = dist.FileStore(f"{folder}/store", comparison.world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=comparison.world_size)
    sides = (_side(comparison.subject, comparison), _side(comparison.opponent, comparison))
    disagreement = _disagreement(sides, comparison, rank)
    pairs = comparison.pairs if disagreement <= GATE_TOLERANCE else 0
    clocks: tuple[list[Clock], list[Clock]] = ([], [])
    for pair in range(-WARMUP_PAIRS, pairs):
        batch = random_batch(comparison.model, comparison.tokens, step=100 + pair, rank=rank)
        for index in (0, 1) if pair % 2 == 0 else (1, 0):
            clock = Clock()
            sides[index].step(batch, clock)
            if pair >= 0:
                clocks[index].append(clock)
    ours, theirs = (_slowest_rank(side) for side in clocks)
    for side in sides:
        side.close()
    if rank == 0:
        timings = Timings(ours=ours, theirs=theirs, disagreement=disagreement)
        (Path(folder) / "timings.json").write_text(json.dumps(asdict(timings)))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _side(trainer: Trainer, comparison: Comparison) -> Side:
    model = GPT.seeded(comparison.model)
    match trainer:
        case "engine":
            return ZeroSide(model, stage=comparison.stage)
        case "fsdp2":
            return FSDP2Side(model)
        case "ddp":
            return DDPSide(model)
        case "floor":
            return FloorSide(model, stage=comparison.stage)
        case "plain":
            return PlainSide(model)


def _disagreement(sides: tuple[Side, Side], comparison: Comparison, rank: int) -> float:
    """Train both sides; return their largest relative difference in a loss or a parameter, over all ranks."""
    worst = torch.zeros(1)
    for step in range(GATE_STEPS):
        batch = random_batch(comparison.model, comparison.tokens, step=step, rank=rank)
        ours, theirs = (side.step(batch, Clock()) for side in sides)
        worst = torch.maximum(worst, _relative(ours, theirs))
    expected = sides[1].weights()
    for name, weight in sides[0].weights().items():
        worst = torch.maximum(worst, _relative(weight, expected[name]))
    worst = worst.nan_to_num(nan=float("inf"))
    if dist.is_initialized():
        dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


def _relative(value: Tensor, expected: Tensor) -> Tensor:
    return ((value - expected).norm() / expected.norm()).reshape(1)


def _slowest_rank(clocks: list[Clock]) -> list[float]:
    """Return the seconds of every step: each phase as slow as its slowest rank. Collective: all ranks."""
    seconds = torch.tensor([list(clock.seconds.values()) for clock in clocks], dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return [sum(step) for step in seconds.tolist()]


def main() -> None:
    """Measure one comparison from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="10m")
    parser.add_argument("--tokens", type=int, default=512, help="per rank and step")
    parser.add_argument("--stage", type=int, default=3, choices=range(4))
    parser.add_argument("--opponent", choices=get_args(Trainer), default="fsdp2")
    parser.add_argument("--subject", choices=get_args(Trainer), default="engine")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--bound", type=float, help="ratio that must not be exceeded")
    parser.add_argument("--no-csv", action="store_true", help="print only")
    options = vars(parser.parse_args())
    keep = not options.pop("no_csv")
    comparison = Comparison(**options)
    measured = rows(comparison, measure(comparison))
    print(heading(), *measured, sep="\n")
    if keep:
        append(measured, "step")


if __name__ == "__main__":
    main()
