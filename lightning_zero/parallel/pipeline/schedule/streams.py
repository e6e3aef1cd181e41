"""Random numbers of a step that several ranks run in parts.

Note [Three streams]
    Every stage runs the user's step from its start. Up to the first module of the pipeline all chunks draw from the
    *common* stream, and the next micro-batch goes on where it has ended, so these draws are those of a run without a
    pipeline. Inside the modules of the pipeline each chunk has a stream of its *own*: the dropout of two stages must
    not be the same, and how much the others draw is not known. The code between these modules runs on every stage
    again, so it draws from the *repeated* stream, which starts from a new seed in every micro-batch, the same for all
    chunks: a mask that is drawn behind the embedding is the same in front of the loss.
"""

from __future__ import annotations

import copy
import random
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

__all__ = ["RandomState", "RandomStreams", "seed_generators", "torch_states"]


def torch_states(device: torch.device) -> list[torch.Tensor]:
    """Return the states of PyTorch's generators of the host and of a device."""
    of_device = [torch.get_device_module(device).get_rng_state(device)] if device.type != "cpu" else []
    return [torch.get_rng_state(), *of_device]


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
        """Return the state that ``plain`` describes; generators it does not describe are as they are now."""
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
        """Return a number that differs where the states do; the same in every process with the same device type."""
        digest = zlib.crc32(self._host.numpy().tobytes(), zlib.crc32(repr(self._python).encode()))
        if self._on_device is not None:
            digest = zlib.crc32(self._on_device.numpy().tobytes(), digest)
        if isinstance(self._numpy, tuple):
            kind, key, *rest = self._numpy
            digest = zlib.crc32(key.tobytes(), zlib.crc32(repr((kind, rest)).encode(), digest))
        return digest


def _numpy_state(plain: Sequence[Any]) -> tuple[Any, ...]:
    kind, key, *rest = plain
    return (kind, key.numpy().astype("uint32"), *rest)


_REPEATED = -1  # key of the repeated stream's seeds among those of the chunks, in a checkpoint


class RandomStreams:
    """The common stream, the repeated one, and one per chunk; see the note.

    Call protocol:
        1. ``begin`` at the start of a step.
        2. ``enter`` at the start of every micro-batch of every chunk, micro-batches in order; ``leave_common`` where
           the chunks part; from there on ``inside`` around every module that the chunk computes; ``leave`` at the end.
           A chunk whose code no other chunk repeats calls ``leave_common`` and ``enter_own``.
        3. ``end``: the common stream goes on behind the last micro-batch.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # - From step to step
        self._own: dict[int, RandomState] = {}  # of every chunk
        self._seeds: torch.Tensor | None = None  # state of the generator that draws seeds of the repeated stream
        # - The step that is running
        self._common: list[RandomState] = []  # before every micro-batch
        self._repeated: list[int] = []  # seed of every micro-batch
        # - The micro-batch that is running
        self._entered: tuple[int, int] | None = None  # (chunk, micro-batch) that is in the common part
        self._chunk: int | None = None  # that has left it
        self._is_inside = False  # it draws from its own stream

    def plain(self) -> dict[int, dict[str, Any]]:
        """Return the state of every chunk's stream as tensors and plain values, for a checkpoint."""
        states = {chunk: state.plain() for chunk, state in self._own.items()}
        return states if self._seeds is None else {**states, _REPEATED: {"torch": self._seeds}}

    def take(self, plain: Mapping[int, Mapping[str, Any]]) -> None:
        """Restore the states that ``plain`` has returned."""
        self._own = {chunk: RandomState.of(state, self._device) for chunk, state in plain.items() if chunk >= 0}
        self._seeds = plain[_REPEATED]["torch"] if _REPEATED in plain else None

    def begin(self) -> None:
        """Begin a step."""
        self._common = [RandomState(self._device)]
        self._repeated = []

    def enter(self, chunk: int, microbatch: int) -> None:
        """Begin a micro-batch."""
        self._common[microbatch].restore()
        self._entered, self._chunk, self._is_inside = (chunk, microbatch), None, False

    def leave_common(self) -> None:
        """Part from the common stream, for the repeated one; only the first call in a micro-batch counts."""
        if self._entered is None:
            return
        (self._chunk, microbatch), self._entered = self._entered, None
        if len(self._common) == microbatch + 1:
            self._common.append(RandomState(self._device))
        drawn = int(torch.randint(2**62, (), device="cpu").item())
        if self._chunk not in self._own:
            seed_generators(drawn + self._chunk, self._device)
            self._own[self._chunk] = RandomState(self._device)
        seed_generators(self._seed_of(microbatch, drawn), self._device)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Draw from the stream of the chunk for a while, after ``leave_common``."""
        assert self._chunk is not None
        repeated, chunk = RandomState(self._device), self._chunk
        self._own[chunk].restore()
        try:
            yield
        finally:
            self._own[chunk] = RandomState(self._device)
            repeated.restore()

    def enter_own(self) -> None:
        """Draw from the stream of the chunk up to ``leave``, after ``leave_common``."""
        assert self._chunk is not None
        self._own[self._chunk].restore()
        self._is_inside = True

    def _leave_own(self) -> None:
        if self._is_inside and self._chunk is not None:
            self._own[self._chunk] = RandomState(self._device)
        self._is_inside = False

    def leave(self) -> None:
        """End a micro-batch."""
        self.leave_common()
        self._leave_own()
        self._chunk = None

    def end(self) -> None:
        """End a step."""
        self._common[-1].restore()

    def apart(self, run: Callable[[], Any]) -> Any:
        """Run something that leaves no trace in the generators."""
        before = RandomState(self._device)
        streams = dict(self._own), self._seeds
        try:
            return run()
        finally:
            self._entered, self._chunk, self._is_inside = None, None, False
            self._own, self._seeds = streams
            before.restore()

    def _seed_of(self, microbatch: int, first: int) -> int:
        """Return the seed of the repeated stream; seeds are drawn one after the other, the same on all ranks."""
        generator = torch.Generator()
        if self._seeds is None:
            generator.manual_seed(first)
        else:
            generator.set_state(self._seeds)
        while len(self._repeated) <= microbatch:
            self._repeated.append(int(torch.randint(2**62, (), generator=generator, device="cpu").item()))
        self._seeds = generator.get_state()
        return self._repeated[microbatch]


def seed_generators(seed: int, device: torch.device) -> None:
    """Start the generators of ``RandomState`` anew."""
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        with torch.get_device_module(device).device(device):
            torch.get_device_module(device).manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        with suppress(TypeError):  # a bit generator that the user has set
            sys.modules["numpy"].random.seed(seed % 2**32)
