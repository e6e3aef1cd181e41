"""The cost of a run as named numbers: memory by class, bytes sent, time waited, throughput.

Knows the engine's statistics and nothing of who draws them.
"""

from __future__ import annotations

import resource
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_zero.engine.access.statistics import away_bytes
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.storage.copies import Stamp, memory_of

__all__ = ["Meter", "Phases", "memory_in_use", "samples_in", "tokens_in"]

_GIB, _MIB = 2.0**30, 2.0**20
_STATM = Path("/proc/self/statm")  # second field: resident pages


class Meter:
    """Turns the engine's growing counters into numbers per step.

    Call protocol:
        1. ``start``.
        2. ``count`` once per micro-batch; ``pause`` and ``resume`` around work that is not training.
        3. ``row`` after any number of steps: numbers per step since the last ``row``.

    Args:
        engine: Whose memory and traffic is reported; without one only the throughput is.
        copies: Copies of the model that train on as many tokens as this one.
    """

    def __init__(self, engine: ZeroEngine | None, copies: int = 1) -> None:
        self.engine = engine
        self.copies = copies
        # - Since the last row
        self._tokens = 0
        self._samples = 0
        self._seconds = 0.0  # of intervals that have ended
        self._resumed: float | None = None  # start of the running interval; None while paused
        # - Counters of the engine at the last row
        self._traffic: dict[str, int] = {}
        self._wait_s = 0.0

    def start(self) -> None:
        """Count from here."""
        self._tokens, self._samples, self._seconds = 0, 0, 0.0
        self._resumed = time.perf_counter()
        if self.engine is not None:
            stats = self.engine.stats()
            self._traffic, self._wait_s = dict(stats.traffic), stats.wait_s

    def count(self, *, tokens: int | None, samples: int | None) -> None:
        """Add the tokens and samples of one micro-batch of this rank."""
        self._tokens += tokens or 0
        self._samples += samples or 0

    def pause(self) -> None:
        """Stop the clock."""
        if self._resumed is not None:
            self._seconds += time.perf_counter() - self._resumed
            self._resumed = None

    def resume(self) -> None:
        """Let the clock go on."""
        if self._resumed is None:
            self._resumed = time.perf_counter()

    def row(self, steps: int) -> dict[str, float]:
        """Return the numbers of the ``steps`` optimizer steps since the last row, and start the next one."""
        row = {**self._throughput(), **self._memory(), **self._sent(max(steps, 1))}
        row["time/step_s"] = self._seconds / max(steps, 1)
        self.start()
        return row

    def _throughput(self) -> dict[str, float]:
        self.pause()
        counts = {"tokens": self._tokens, "samples": self._samples}
        return {
            f"throughput/{name}_per_s": self.copies * number / self._seconds
            for name, number in counts.items()
            if number and self._seconds > 0
        }

    def _memory(self) -> dict[str, float]:
        if self.engine is None:
            return {}
        stats = self.engine.stats()
        memory = {name: float(nbytes) for name, nbytes in stats.memory.items()}
        device = self.engine.internals.communicator.device
        other = (
            memory_in_use(device)
            - sum(memory.values())
            - (float(sum(stats.host.values())) if device.type == "cpu" else 0.0)
        )
        memory |= {**away_bytes(stats), "other": max(other, 0.0), "gathered_peak": float(stats.peak_gathered)}
        if device.type == "cuda":
            memory["peak"] = float(memory_of(device).most_allocated)
        return {f"memory/{name}_GiB": nbytes / _GIB for name, nbytes in memory.items()}

    def _sent(self, steps: int) -> dict[str, float]:
        if self.engine is None:
            return {}
        stats = self.engine.stats()
        row = {
            f"traffic/{kind}_MiB": (sent - self._traffic.get(kind, 0)) / steps / _MIB
            for kind, sent in stats.traffic.items()
        }
        return {**row, "time/wait_s": (stats.wait_s - self._wait_s) / steps}


class Phases:
    """The seconds that steps spend in each of their phases: on a CPU those of the host, on a GPU those of its stream.

    Args:
        device: Where the model computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stamps: deque[tuple[str | None, Stamp]] = deque()  # beginnings that the device has not passed, in order
        self._seconds: dict[str, float] = {}  # of phases that it has ended, since the last call of `take`

    def begin(self, phase: str | None) -> None:
        """End the phase that runs, and begin another; None: one that does not count."""
        self._stamps.append((phase, Stamp(self._device)))
        self._settle()

    def take(self) -> dict[str, float]:
        """Return the seconds by phase since the last call, of those that the device has ended, without waiting."""
        self._settle()
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _settle(self) -> None:
        while len(self._stamps) > 1 and self._stamps[1][1].is_past:
            (phase, start), end = self._stamps.popleft(), self._stamps[0][1]
            if phase is not None:
                self._seconds[phase] = self._seconds.get(phase, 0.0) + end.seconds_since(start)


def memory_in_use(device: torch.device) -> int:
    """Return the bytes of tensors on a GPU, or of this process (its peak, where the system tells no more)."""
    if device.type == "cuda":
        return memory_of(device).allocated
    if _STATM.exists():
        return int(_STATM.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def tokens_in(batch: Any) -> int | None:
    """Return the number of elements of the first integer tensor with two or more dimensions, if there is one."""
    for tensor in _tensors(batch):
        if tensor.ndim >= 2 and not tensor.is_floating_point() and not tensor.is_complex():
            return tensor.numel()
    return None


def samples_in(batch: Any) -> int | None:
    """Return the first dimension of the first tensor that has one."""
    return next((tensor.shape[0] for tensor in _tensors(batch) if tensor.ndim > 0), None)


def elements_in(batch: Any) -> int:
    """Return the number of elements of all tensors."""
    return sum(tensor.numel() for tensor in _tensors(batch))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
