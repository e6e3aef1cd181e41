"""Show everything that only a GPU can show, in at most 25 minutes: ``make gpu``, or ``python -m benchmarks.gpu``.

Each row is a command: a file of tests marked ``gpu``, a group of kernels beside peers, or the steps of a placement with
their host waits, times and bytes. Its verdict goes to ``benchmarks/results/gpu.csv`` when it ends, so a run that
was interrupted goes on where it stopped: a row that is there for this commit, GPU and torch is not run again.
``--again`` runs it anyway, and so does a checkout with changes that are not committed. A row that fails does not keep
the others from running; the exit status is then 1. Rows that 25 minutes have no room for run at the next start. Without
a GPU nothing runs: the rows and their estimates are printed, and the exit status is 0.
"""

from __future__ import annotations

import argparse
import csv
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import torch

from benchmarks import table
from benchmarks.device_step import PLACEMENTS
from benchmarks.table import Row

__all__ = ["BUDGET_S", "Task", "main", "run", "tasks"]

BUDGET_S = 25 * 60
ROOT = Path(__file__).resolve().parents[1]
_RESULTS = "gpu"
_WHAT = "gpu"  # of a row that is a command's verdict
_LIMIT = 2  # times the estimate, after which a command is ended
_MARK = "pytest.mark.gpu"
_ESTIMATES_S = {  # of files that are not short, on an H200
    "tests/gpu/test_gpu_ops.py": 150,
    "tests/gpu/test_gpu_promises.py": 110,
    "tests/gpu/test_gpu_axes.py": 160,
    "tests/gpu/test_gpu_pipelines.py": 40,
    "tests/gpu/test_gpu_forecast.py": 35,
    "tests/engine/optim/test_step_device.py": 110,
}
_SHORT_S = 30
_STEP_S = 35
_OK = "ok"
_FAILED = "FAIL"
_SKIPPED = "skipped"
_NO_TIME = f"{_SKIPPED}: no time left"


@dataclass(frozen=True, kw_only=True)
class Task:
    """A row: a command of this interpreter.

    Attributes:
        name: In the results.
        arguments: Of the interpreter.
        estimate_s: How long it takes on one current GPU.
        num_gpus: How many it needs.
    """

    name: str
    arguments: tuple[str, ...]
    estimate_s: int
    num_gpus: int = 1

    def __str__(self) -> str:
        return f"{self.name:<40} {self.estimate_s:>5} s  python {' '.join(self.arguments)}"


def tasks() -> list[Task]:
    """Return all rows: quick ones that are likely to fail come first."""
    steps = [
        Task(name=f"step/{name}", arguments=("-m", "benchmarks.device_step", name), estimate_s=_STEP_S)
        for name in PLACEMENTS
    ]
    kernels = {"flat": 40, "contests": 180}
    ops = [
        Task(name=f"ops/{group}", arguments=("-m", "benchmarks.ops", "--only", group), estimate_s=estimate_s)
        for group, estimate_s in kernels.items()
    ]
    files = sorted(_files_of_tests(), key=lambda file: _ESTIMATES_S.get(file, _SHORT_S))
    return [*map(_of_tests, files), *steps, *ops]


def _of_tests(file: str) -> Task:
    num_gpus = 2 if "nccl" in file else 1
    arguments = ("-m", "pytest", "-q", "-m", "gpu", file)
    return Task(name=file, arguments=arguments, estimate_s=_ESTIMATES_S.get(file, _SHORT_S), num_gpus=num_gpus)


def _files_of_tests() -> Iterator[str]:
    for path in (ROOT / "tests").rglob("test_*.py"):
        if _MARK in path.read_text():
            yield str(path.relative_to(ROOT))


def run(chosen: Sequence[Task], *, num_gpus: int, again: bool, budget_s: float = BUDGET_S) -> bool:
    """Run rows that are not there yet, and say whether none has failed, among those that are there too."""
    commit, deadline = table.commit(), time.monotonic() + budget_s
    there = {} if again else _verdicts(commit)
    for task in chosen:
        verdict = there.get(task.name)
        if verdict is not None:
            print(f"{task.name}: {verdict}, as it was", flush=True)
            continue
        started = time.monotonic()
        verdict = there[task.name] = _verdict(task, num_gpus, deadline - started)
        row = _row(task, commit, time.monotonic() - started, verdict)
        print(row, flush=True)
        table.append([row], _RESULTS)
    failed = [task.name for task in chosen if there[task.name].startswith(_FAILED)]
    late = [task.name for task in chosen if there[task.name] == _NO_TIME]
    for names, what in ((failed, "failed"), (late, "had no time left and run at the next start")):
        if names:
            print(f"{len(names)} of {len(chosen)} rows {what}: {', '.join(names)}", flush=True)
    return not (failed or late)


def _verdict(task: Task, num_gpus: int, left_s: float) -> str:
    """Run a row, if it can be run, and return its verdict."""
    if task.num_gpus > num_gpus:
        return f"{_SKIPPED}: needs {task.num_gpus} GPUs, has {num_gpus}"
    if left_s < task.estimate_s:
        return _NO_TIME
    limit_s = min(_LIMIT * task.estimate_s, left_s)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        arguments = [*task.arguments, f"--junitxml={report}"] if "pytest" in task.arguments else task.arguments
        verdict = _verdict_of(arguments, limit_s)
        return _skips(report) if verdict == _OK and report.exists() else verdict


def _skips(report: Path) -> str:
    """Return the verdict of tests of which none has failed: skipping all of them shows nothing."""
    tests = list(ElementTree.parse(report).iter("testcase"))
    reasons = [skip.get("message", "") for test in tests for skip in test.iter("skipped")]
    if not reasons:
        return _OK
    if len(reasons) == len(tests):
        return f"{_SKIPPED}: {reasons[0]}"
    return f"{_OK}, {len(reasons)} of {len(tests)} skipped: {reasons[0]}"


def _verdict_of(arguments: Sequence[str], limit_s: float) -> str:
    process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, start_new_session=True)
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"{_FAILED}: longer than {limit_s:.0f} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # with the ranks that it has started
            process.wait()
    return _OK if status == 0 else f"{_FAILED}: exit status {status}"


def _row(task: Task, commit: str, seconds: float, verdict: str) -> Row:
    return Row(
        what=_WHAT, variant=task.name, shape="", dtype="", world=task.num_gpus, metric="time", unit="s",
        p50=f"{seconds:.1f}", verdict=verdict, device=_device(), commit=commit,
    )  # fmt: skip


def _verdicts(commit: str) -> dict[str, str]:
    """Return the last verdicts of rows that were run at this commit, on this GPU, with this torch."""
    path = table.RESULTS / f"{_RESULTS}.csv"
    if not path.exists() or commit.endswith("+"):
        return {}
    same = {"what": _WHAT, "commit": commit, "device": _device(), "torch": torch.__version__}
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if all(row[key] == value for key, value in same.items())]
    return {row["variant"]: row["verdict"] for row in rows if not row["verdict"].startswith(_SKIPPED)}


def _device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else table.device_name()


def main() -> None:
    """Run the chosen rows, or list them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="text that a row's name contains, as in step/ or test_gpu_ops")
    parser.add_argument("--again", action="store_true", help="run rows that are there as well")
    parser.add_argument("--list", action="store_true", help="print the rows and their estimates, and run nothing")
    options = parser.parse_args()
    chosen = [task for task in tasks() if options.only in task.name]
    if not chosen:
        names = ", ".join(task.name for task in tasks())
        parser.error(f"`--only {options.only}` is in the name of no row. The rows are: {names}.")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if options.list or not num_gpus:
        print(*chosen, sep="\n")
        print(f"{len(chosen)} rows, about {sum(task.estimate_s for task in chosen) / 60:.0f} minutes on one GPU.")
        if not num_gpus:
            print(f"Skipped, all of them: they need a GPU, and torch {torch.__version__} finds none here.")
        return
    raise SystemExit(not run(chosen, num_gpus=num_gpus, again=options.again))


if __name__ == "__main__":
    main()
