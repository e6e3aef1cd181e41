"""Time the engine of this checkout beside that of an earlier commit: ``python -m benchmarks.before REF``.

Each of the two has processes of its own, which import the package from their own checkout; one of them steps while the
other waits at a pipe, in turns, so that a change of the machine's mood meets both. Before anything is timed the losses
of the first steps have to agree. The exit status is 1 when a row is slower than its bound.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.step import GATE_STEPS, GATE_TOLERANCE, WARMUP_PAIRS, Timings, percentiles_ms, ratio_interval
from benchmarks.table import Row, append, heading

__all__ = ["BOUND", "measure"]

BOUND = 1.02
_HERE = Path(__file__).resolve().parents[1]


class _World:
    """The processes of one checkout. ``step`` makes one step on all of them."""

    def __init__(self, checkout: Path, folder: Path, model: str, tokens: int, stage: int, world_size: int) -> None:
        environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        arguments = [str(folder), model, str(tokens), str(stage), str(world_size)]
        served = str(_HERE / "benchmarks" / "served.py")
        self._processes = [
            subprocess.Popen(
                [sys.executable, served, str(rank), *arguments],
                cwd=checkout,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(world_size)
        ]

    def step(self, number: int) -> tuple[float, list[float]]:
        """Return the seconds of the slowest rank and the loss of every rank."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{number}\n")
            process.stdin.flush()
        answers = [self._answer(process) for process in self._processes]
        return max(seconds for seconds, _ in answers), [loss for _, loss in answers]

    @staticmethod
    def _answer(process: subprocess.Popen[str]) -> tuple[float, float]:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("A process of the benchmark ended; its error is above.")
        seconds, loss = line.split()
        return float(seconds), float(loss)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            process.wait()


def measure(before: Path, *, model: str, tokens: int, stage: int, pairs: int, world_size: int = 2) -> Timings:
    """Return the seconds of steps of this checkout and of the checkout ``before``.

    Raises:
        RuntimeError: Their losses differ.
    """
    with ExitStack() as stack:
        worlds = []
        for checkout in (_HERE, before):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            worlds.append(_World(checkout, folder, model, tokens, stage, world_size))
            stack.callback(worlds[-1].close)
        disagreement = _disagreement(worlds)
        if not disagreement <= GATE_TOLERANCE:
            raise RuntimeError(
                f"The losses of the two commits differ by {disagreement:.1e} after {GATE_STEPS} steps (allowed:"
                f" {GATE_TOLERANCE:.0e}), so their times are not compared."
            )
        seconds: tuple[list[float], list[float]] = ([], [])
        for pair in range(-WARMUP_PAIRS, pairs):
            for index in (0, 1) if pair % 2 == 0 else (1, 0):
                duration, _ = worlds[index].step(100 + pair)
                if pair >= 0:
                    seconds[index].append(duration)
        return Timings(ours=seconds[0], theirs=seconds[1], disagreement=disagreement)


def _disagreement(worlds: list[_World]) -> float:
    worst = 0.0
    for number in range(GATE_STEPS):
        (_, ours), (_, theirs) = (world.step(number) for world in worlds)
        worst = max(worst, *(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)))
    return worst


@contextmanager
def _checkout(ref: str) -> Iterator[Path]:
    """Check out a commit in a folder of its own for a while."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "before"
        git = ["git", "-C", str(_HERE), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(path), ref], check=True)
        try:
            yield path
        finally:
            subprocess.run([*git, "remove", "--force", str(path)], check=True)


def _row(ref: str, timings: Timings, *, model: str, tokens: int, stage: int) -> Row:
    ratio, lo, hi = ratio_interval(timings.ours, timings.theirs)
    return Row(
        what="step",
        variant=f"engine{stage}/{ref}",
        shape=f"{model}-{tokens}tok",
        dtype="fp32",
        world=2,
        metric="time",
        unit="ms",
        ratio=f"{ratio:.3f}",
        lo=f"{lo:.3f}",
        hi=f"{hi:.3f}",
        bound=f"{BOUND:g}",
        verdict="FAIL" if lo > BOUND else "ok",
        **percentiles_ms(timings.ours),
    )


def main() -> None:
    """Measure the rows of an earlier commit from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ref", help="the earlier commit")
    parser.add_argument("--model", nargs="+", default=["10m", "57m"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 512], help="per rank and step")
    parser.add_argument("--stage", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--no-csv", action="store_true", help="print only")
    options = parser.parse_args()
    print(heading(), flush=True)
    verdicts = []
    with _checkout(options.ref) as before:
        for model in options.model:
            for tokens in options.tokens:
                for stage in options.stage:
                    shape = {"model": model, "tokens": tokens, "stage": stage}
                    row = _row(options.ref, measure(before, pairs=options.pairs, **shape), **shape)
                    print(row, flush=True)
                    verdicts.append(row.verdict)
                    if not options.no_csv:
                        append([row], "step")
    raise SystemExit("FAIL" in verdicts)


if __name__ == "__main__":
    main()
