"""The cost of a run as named numbers: memory by class, bytes sent, time waited, throughput.

Knows the engine's statistics and nothing of who draws them.
"""

from __future__ import annotations

import resource
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_zero.engine.access.statistics import away_bytes
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.storage.copies import Stamp, memory_of, most_allocated, reset_most_allocated

__all__ = ["Meter", "Phases", "memory_in_use", "samples_in", "tokens_in"]

_GIB, _MIB = 2.0**30, 2.0**20
_STATM = Path("/proc/self/statm")  # second field: resident pages


class Meter:
    """Turns the engine's growing counters into numbers per step.

    Call protocol:
        1. ``start``.
        2. ``note_peak`` before each micro-batch, and ``count`` after it; ``pause`` and ``resume`` around work that is
           not training.
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
        self._counted: dict[str, float] = {}  # by the engine, in intervals that have ended
        self._counts_then: dict[str, float] = {}  # by the engine when the running interval began
        self._most_allocated = 0  # of a GPU's memory, in all intervals that have ended

    def start(self) -> None:
        """Count from here."""
        self._tokens, self._samples, self._seconds = 0, 0, 0.0
        self._counted.clear()
        self._resumed = None
        self.resume()

    def count(self, *, tokens: int | None, samples: int | None) -> None:
        """Add the tokens and samples of one micro-batch of this rank."""
        self._tokens += tokens or 0
        self._samples += samples or 0

    def note_peak(self) -> None:
        """Take note of the peak so far, before a choice of checkpointing measures it anew."""
        if (device := self._gpu) is not None and self._resumed is not None:
            self._most_allocated = max(self._most_allocated, most_allocated(device))

    def pause(self) -> None:
        """Stop the clock, and counting the bytes and waits of the engine."""
        if self._resumed is not None:
            self.note_peak()
            self._seconds += time.perf_counter() - self._resumed
            self._resumed = None
            for name, count in self._counts().items():
                since = count - self._counts_then.get(name, 0)
                self._counted[name] = self._counted.get(name, 0) + since

    def resume(self) -> None:
        """Let the clock go on."""
        if self._resumed is None:
            if (device := self._gpu) is not None:
                reset_most_allocated(device)
            self._counts_then = self._counts()
            self._resumed = time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run work that is not training."""
        is_running = self._resumed is not None
        self.pause()
        try:
            yield
        finally:
            if is_running:
                self.resume()

    @property
    def _gpu(self) -> torch.device | None:
        device = None if self.engine is None else self.engine.internals.communicator.device
        return device if device is not None and device.type == "cuda" else None

    def _counts(self) -> dict[str, float]:
        """Return how much the engine has sent and waited so far, by the names of the scalars."""
        if self.engine is None:
            return {}
        stats = self.engine.stats()
        sent = {f"traffic/{kind}_MiB": nbytes / _MIB for kind, nbytes in stats.traffic.items()}
        return {**sent, "time/wait_s": stats.wait_s}

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
        if self._gpu is not None:
            memory["peak"] = float(self._most_allocated)
        return {f"memory/{name}_GiB": nbytes / _GIB for name, nbytes in memory.items()}

    def _sent(self, steps: int) -> dict[str, float]:
        return {name: count / steps for name, count in self._counted.items()}


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

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run work that is in no phase."""
        phase = self._stamps[-1][0] if self._stamps else None
        self.begin(None)
        try:
            yield
        finally:
            self.begin(phase)

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
