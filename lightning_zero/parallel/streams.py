"""Random numbers of a step that several ranks run in parts.

Every stage runs the user's step from its start, so that what it draws there (masks, noise) is the same on all of them.
From the first module of the pipeline on each chunk goes on with a stream of its own: the dropout of two stages must not
be the same, and how much the others draw is not known. The next micro-batch goes on where the common part of the one
before has ended. So draws before the model are those of a run without a pipeline.
"""

from __future__ import annotations

import copy
import random
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

__all__ = ["RandomState", "RandomStreams"]


class RandomState:
    """The state of the generators that a step draws from: PyTorch's on host and device, Python's, NumPy's if in use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._python = random.getstate()
        self._host = torch.get_rng_state()
        self._on_device = torch.get_device_module(device).get_rng_state(device) if device.type != "cpu" else None
        self._numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None

    def restore(self) -> None:
        """Go on from here."""
        random.setstate(self._python)
        torch.set_rng_state(self._host)
        if self._on_device is not None:
            torch.get_device_module(self._device).set_rng_state(self._on_device, self._device)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)

    def plain(self) -> dict[str, Any]:
        """Return the state as tensors and plain values, for a checkpoint."""
        version, words, gauss = self._python
        numpy = None
        if isinstance(self._numpy, tuple):  # not so with a bit generator that the user has set
            kind, key, *rest = self._numpy
            numpy = (kind, torch.tensor(key.tolist()), *rest)
        of_device = {} if self._on_device is None else {self._device.type: self._on_device}
        return {"python": (version, torch.tensor(words), gauss), "numpy": numpy, "torch": self._host,
                "device": of_device}  # fmt: skip

    @classmethod
    def of(cls, plain: Mapping[str, Any], device: torch.device) -> RandomState:
        """Return the state that ``plain`` has described; what it does not know is as it is now."""
        state = cls(device)
        version, words, gauss = plain["python"]
        state._python = (version, tuple(words.tolist()), gauss)
        state._host = plain["torch"]
        state._on_device = plain["device"].get(device.type, state._on_device)
        state._numpy = plain["numpy"] and _numpy_state(plain["numpy"])
        return state

    def moved_to(self, device: torch.device) -> RandomState:
        """Return the same state for another device of the same kind."""
        moved = copy.copy(self)
        moved._device = device
        return moved

    def digest(self) -> int:
        """Return a number that differs where the states of the host do; the same in every process."""
        return zlib.crc32(self._host.numpy().tobytes(), zlib.crc32(repr(self._python).encode()))


def _numpy_state(plain: Sequence[Any]) -> tuple[Any, ...]:
    kind, key, *rest = plain
    return (kind, key.numpy().astype("uint32"), *rest)


class RandomStreams:
    """The common stream and one per chunk.

    Call protocol:
        1. ``begin`` at the start of a step.
        2. ``enter`` at the start of every micro-batch of every chunk, micro-batches in order; ``leave_common`` where
           the chunks part; ``leave`` at the end.
        3. ``end``: the common stream goes on behind the last micro-batch.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own: dict[int, RandomState] = {}  # of every chunk
        self._common: list[RandomState] = []  # before every micro-batch of the step
        self._entered: tuple[int, int] | None = None  # (chunk, micro-batch) that is in the common part

    def plain(self) -> dict[int, dict[str, Any]]:
        """Return the state of every chunk's stream as tensors and plain values, for a checkpoint."""
        return {chunk: state.plain() for chunk, state in self._own.items()}

    def take(self, plain: Mapping[int, Mapping[str, Any]]) -> None:
        """Go on from what ``plain`` has returned."""
        self._own = {chunk: RandomState.of(state, self._device) for chunk, state in plain.items()}

    def begin(self) -> None:
        """Begin a step."""
        self._common = [RandomState(self._device)]

    def enter(self, chunk: int, microbatch: int) -> None:
        """Begin a micro-batch."""
        self._common[microbatch].restore()
        self._entered = (chunk, microbatch)

    def leave_common(self) -> None:
        """Part from the other chunks; only the first call in a micro-batch counts."""
        if self._entered is None:
            return
        chunk, microbatch = self._entered
        self._entered = None
        if len(self._common) == microbatch + 1:
            self._common.append(RandomState(self._device))
        own = self._own.get(chunk)
        if own is not None:
            own.restore()
        else:
            self._seed(chunk)

    def leave(self, chunk: int) -> None:
        """End a micro-batch."""
        self.leave_common()
        self._own[chunk] = RandomState(self._device)

    def end(self) -> None:
        """End a step."""
        self._common[-1].restore()

    def apart(self, run: Callable[[], Any]) -> Any:
        """Run something that leaves no trace in the generators."""
        before = RandomState(self._device)
        try:
            return run()
        finally:
            self._entered = None
            before.restore()

    def _seed(self, chunk: int) -> None:
        """Start a chunk's stream from a draw of the common one."""
        drawn = int(torch.randint(2**62, ()).item())
        torch.manual_seed(drawn + chunk)
        random.seed(drawn + chunk)
