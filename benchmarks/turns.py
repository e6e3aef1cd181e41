"""Functions that take turns, so that a change of the machine's mood meets all of them, and rows of their bandwidths."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import quantiles

import torch

from benchmarks.step import ratio_interval
from benchmarks.table import Row

__all__ = ["Timing", "device", "named_device", "percentiles", "row", "time_in_turns"]

_CALLS = 10  # per measurement on a GPU
_HEAD_START = 20_000_000  # cycles for which a GPU waits while the calls are queued, so that only the GPU is timed


def device() -> str:
    """Return where ops are measured."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Timing:
    """The seconds of a function, turn by turn.

    Args:
        nbytes: Bytes it must read or write once.
        seconds: One per turn.
    """

    nbytes: int
    seconds: list[float]

    @property
    def bandwidths(self) -> list[float]:
        """In GB/s."""
        return [self.nbytes / duration / 1e9 for duration in self.seconds]


def time_in_turns(cases: Mapping[str, tuple[Callable[[], object], int]], repeats: int) -> dict[str, Timing]:
    """Return the timings of functions that take turns, given the bytes that each moves."""
    found = {name: Timing(nbytes, []) for name, (_, nbytes) in cases.items()}
    for turn in range(repeats + 1):
        for name, (function, _) in cases.items():
            duration = _duration_s(function)
            if turn:  # the first is a warm-up
                found[name].seconds.append(duration)
    return found


def _duration_s(function: Callable[[], object]) -> float:
    if device() == "cpu":
        start = time.perf_counter()
        function()
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(_HEAD_START)
    begin.record()
    for _ in range(_CALLS):
        function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / _CALLS


def percentiles(values: list[float]) -> dict[str, str]:
    """Return the percentiles of a row."""
    p20, p50, p80 = (quantiles(values, n=10, method="inclusive")[place] for place in (1, 4, 7))
    return {"p20": f"{p20:.2f}", "p50": f"{p50:.2f}", "p80": f"{p80:.2f}"}


def row(what: str, variant: str, shape: str, dtype: str, mine: Timing, peer: Timing, bound: float | None = None) -> Row:
    """Return the row of bandwidths beside those of a peer; the ratio is that of the 20th percentiles of times."""
    scale = mine.nbytes / peer.nbytes
    ratio, lo, hi = (scale * value for value in ratio_interval(peer.seconds, mine.seconds))
    return Row(
        what=what, variant=variant, shape=shape, dtype=dtype, world=1, metric="bandwidth", unit="GB/s",
        **percentiles(mine.bandwidths), ratio=f"{ratio:.3f}", lo=f"{lo:.3f}", hi=f"{hi:.3f}",
        bound="" if bound is None else f"{bound}",
        verdict="" if bound is None else "ok" if ratio >= bound else "MISSED",
        **named_device(),
    )  # fmt: skip


def named_device() -> dict[str, str]:
    """Return the GPU's name for a row; on a CPU the row finds it."""
    return {"device": torch.cuda.get_device_name()} if device() == "cuda" else {}
