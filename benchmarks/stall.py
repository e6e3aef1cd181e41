"""How long Python in another thread stands still while AdamW steps on a CPU, and the cause of each stall.

A thread sleeps for 0.1 ms without the interpreter's lock, again and again, and notes how much later it goes on than it
wanted to. Of the time that it is late:

``gap``      all but what it waited for a core, on which the system ran others meanwhile (``schedstat``).
``lock``     the gap, less what the stepping thread waited for a core, perhaps with the lock in its hands.
``control``  the gap beside a thread that needs no lock: one long call of ``torch.add``. This much is the machine's.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.table import Row
from benchmarks.turns import percentiles

__all__ = ["BOUND_MS", "measure"]

BOUND_MS = 2.0
_SLEEP_S = 1e-4
_ADD_NUMEL = 16_000_000


@dataclass(frozen=True)
class _Lateness:
    """The longest of a run, in ms."""

    gap: float
    lock: float


def measure(step: Callable[[], object], shape: str, dtype: str, repeats: int) -> list[Row]:
    """Return the rows of a step that runs in a thread."""
    left, total = torch.ones(_ADD_NUMEL), torch.empty(_ADD_NUMEL)
    steps, controls = [], []
    for _ in range(repeats):
        steps.append(_beside(step))
        controls.append(_beside(lambda: torch.add(left, left, out=total)))
    return [
        _row("gap", shape, dtype, [one.gap for one in steps], BOUND_MS),
        _row("lock", shape, dtype, [one.lock for one in steps], BOUND_MS),
        _row("control", shape, dtype, [one.gap for one in controls], None),
    ]


def _row(name: str, shape: str, dtype: str, values: list[float], bound: float | None) -> Row:
    found = percentiles(values)
    return Row(
        what="stall", variant=name, shape=shape, dtype=dtype, world=1, metric="time", unit="ms", **found,
        bound="" if bound is None else f"{bound}",
        verdict="" if bound is None else "ok" if float(found["p50"]) <= bound else "MISSED",
    )  # fmt: skip


def _beside(function: Callable[[], object]) -> _Lateness:
    """Run a function in a thread, and sleep in this one until it is done."""
    has_begun, is_done, may_end = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        has_begun.set()
        function()
        is_done.set()
        may_end.wait()

    worker = threading.Thread(target=work)
    worker.start()
    has_begun.wait()
    gap = lock = 0.0
    with _displaced_s(threading.get_native_id()) as mine, _displaced_s(worker.native_id) as theirs:
        while not is_done.is_set():
            own, other, begin = mine(), theirs(), time.perf_counter()
            time.sleep(_SLEEP_S)
            late = time.perf_counter() - begin - _SLEEP_S - (mine() - own)
            gap, lock = max(gap, late), max(lock, late - (theirs() - other))
    may_end.set()
    worker.join()
    return _Lateness(gap * 1e3, lock * 1e3)


@contextmanager
def _displaced_s(thread: int | None) -> Iterator[Callable[[], float]]:
    """Yield a function that says how long a thread has waited for a core so far; 0 where the system does not say."""
    path = Path(f"/proc/self/task/{thread}/schedstat")
    if not path.exists():
        yield lambda: 0.0
        return
    file = os.open(path, os.O_RDONLY)
    try:
        yield lambda: int(os.pread(file, 64, 0).split()[1]) / 1e9
    finally:
        os.close(file)
