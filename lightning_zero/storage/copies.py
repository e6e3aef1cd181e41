"""Copies between device and host memory that run beside the device's work, and the package's other calls of CUDA.

Outside of this file and of ``comm/waits.py`` the package does not name ``torch.cuda``.

Call protocol of ``Copies``:

1. ``mark`` takes note of the device's work so far.
2. ``down`` and ``up`` start a copy, each in a stream of its own: behind a mark, or behind all work so far. The
   memory of both tensors stays theirs until it is done; that of the device is free then, whoever keeps the landing.
3. ``bring`` is ``up`` into new memory, which nothing that the device computes now has to leave first.
4. ``lane`` starts something else in the stream of ``up``.
5. Each returns a ``Landing``. ``wait`` lets the device wait for it, where it is needed there; ``finish`` lets the host
   wait, where it is needed here.

On a CPU there are no streams: everything is done when the call returns, and nothing is left to wait for. Page-locked
host memory makes copies asynchronous; others are right, and slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

import torch

__all__ = [
    "Copies",
    "DeviceMemory",
    "Landing",
    "Stamp",
    "WorkStream",
    "finish_device",
    "finish_stream",
    "first_call_of_thread",
    "is_capturing",
    "keep_for_stream",
    "lock_pages",
    "memory_of",
    "most_allocated",
    "replays_graph",
    "reset_most_allocated",
    "unlock_pages",
    "with_index",
]

_Result = TypeVar("_Result")


class Landing:
    """Something in a stream that others can wait for.

    Args:
        event: Recorded behind it; None: it is done.
        device: Whose current stream waits.
        keep: Tensors in host memory that must stay alive until then.
    """

    def __init__(
        self, event: Any = None, device: torch.device | None = None, keep: Sequence[torch.Tensor] = ()
    ) -> None:
        self._event = event
        self._device = device
        self._keep = list(keep)

    def wait(self) -> None:
        """Let later work of the device's current stream wait for it. The host goes on."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)

    @property
    def is_done(self) -> bool:
        """Whether there is nothing left to wait for."""
        return self._event is None or bool(self._event.query())

    def finish(self) -> None:
        """Return when it is done."""
        if self._event is not None:
            self._event.synchronize()
        self._keep.clear()

    def hold_back(self, stream: Any) -> None:
        """Let a stream wait for it."""
        if self._event is not None:
            stream.wait_event(self._event)


class Copies:
    """The streams of one device.

    Args:
        device: A CUDA device, or the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._down: Any = None
        self._up: Any = None
        self._step: Any = None
        if device.type == "cuda":
            self._down, self._up, self._step = (_new_stream(device) for _ in range(3))

    def mark(self) -> Landing:
        """Return a landing that waits for all earlier work of the current stream."""
        if self._up is None:
            return Landing()
        return Landing(torch.cuda.current_stream(self._device).record_event(), self._device)

    def down(self, host: torch.Tensor, tensor: torch.Tensor) -> Landing:
        """Start copying ``tensor`` from the device to ``host``, of the same dtype."""
        return self._copy(self._down, host, tensor, self.mark())

    def up(self, tensor: torch.Tensor, host: torch.Tensor, *behind: Landing) -> Landing:
        """Start copying ``host`` into ``tensor`` on the device, of the same dtype."""
        return self._copy(self._up, tensor, host, *(behind or (self.mark(),)))

    def bring(self, host: torch.Tensor, *behind: Landing) -> tuple[torch.Tensor, Landing]:
        """Start copying ``host`` to new memory of the device, behind landings; it is used in the current stream."""
        if self._up is None:
            return host.clone(), Landing()
        for landing in behind:
            landing.hold_back(self._up)
        with torch.cuda.stream(self._up):
            tensor = torch.empty_like(host, device=self._device)
            tensor.copy_(host, non_blocking=True)
        tensor.record_stream(torch.cuda.current_stream(self._device))
        return tensor, Landing(self._up.record_event(), self._device, [host])

    def _copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor, *behind: Landing) -> Landing:
        with torch.inference_mode(False), torch.no_grad():
            if stream is None:
                target.copy_(source)
                return Landing()
            for landing in behind:
                landing.hold_back(stream)
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
            on_device = [tensor for tensor in (target, source) if tensor.is_cuda]
            for tensor in on_device:  # the allocator waits with its memory; it need not be kept for that
                tensor.record_stream(stream)
            on_host = [tensor for tensor in (target, source) if not tensor.is_cuda]
            return Landing(stream.record_event(), self._device, on_host)

    @contextmanager
    def lane(self) -> Iterator[list[Landing]]:
        """Run something in the stream of ``up``, behind earlier work; yield a list that gets its landing."""
        landings: list[Landing] = []
        if self._up is None:
            yield landings
            return
        self.mark().hold_back(self._up)
        with torch.cuda.stream(self._up):
            yield landings
        landings.append(Landing(self._up.record_event(), self._device))

    @contextmanager
    def stepping(self, behind: Landing) -> Iterator[None]:
        """Run a step on the device, in a stream of its own, from any thread; return when it is done."""
        if self._step is None:
            yield
            return
        behind.hold_back(self._step)
        with torch.cuda.stream(self._step):
            yield
        self._step.synchronize()


class WorkStream:
    """Keeps work in order that a program asks for in several streams: it is all done in one of them.

    Streams are compared by number, so that a program with one stream pays for the comparison only. While a stream is
    captured in a CUDA graph nothing waits, because a capture begins when the device has done everything.

    Args:
        device: A CUDA device; the CPU has no streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._index = -1 if device.type != "cuda" else with_index(device).index
        self._stream: Any = None
        self._raw = 0
        self._entered: set[int] = set()  # streams that have waited for it since it was moved
        self.move_here()

    @property
    def is_current(self) -> bool:
        """Whether it is the current stream."""
        return self._index < 0 or torch._C._cuda_getCurrentRawStream(self._index) == self._raw

    def move_here(self) -> None:
        """Be the current stream from now on, which waits for the work so far."""
        if self._index < 0 or (self.is_current and self._stream is not None):
            self._entered.clear()
            return
        self.wait()
        self._stream = torch.cuda.current_stream(self._index)
        self._raw = torch._C._cuda_getCurrentRawStream(self._index)
        self._entered.clear()

    def wait(self) -> None:
        """Let the current stream wait for its work so far."""
        if self._stream is not None and not (self.is_current or is_capturing()):
            torch.cuda.current_stream(self._index).wait_stream(self._stream)

    def enter(self) -> bool:
        """Let the current stream wait for it, once; say whether it did."""
        if self.is_current or (raw := torch._C._cuda_getCurrentRawStream(self._index)) in self._entered:
            return False
        self.wait()
        self._entered.add(raw)
        return True

    def run(self, call: Callable[..., _Result], *args: Any) -> _Result:
        """Call a function in it: behind the work of the current stream, which waits for it."""
        if self.is_current:
            return call(*args)
        current = torch.cuda.current_stream(self._index)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                return call(*args)
        finally:
            current.wait_stream(self._stream)


class DeviceMemory(NamedTuple):
    """The memory of a CUDA device, in bytes.

    Attributes:
        total: Of the device.
        free: Of all processes.
        reserved: By this process's allocator.
        allocated: In tensors.
    """

    total: int
    free: int
    reserved: int
    allocated: int


def memory_of(device: torch.device) -> DeviceMemory:
    """Return the memory of a CUDA device as it is now."""
    free, total = torch.cuda.mem_get_info(device)
    reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    return DeviceMemory(total, free, reserved, allocated)


def most_allocated(device: torch.device) -> int:
    """Return the most bytes in tensors of a CUDA device so far, or since ``reset_most_allocated``."""
    return torch.cuda.max_memory_allocated(device)


def reset_most_allocated(device: torch.device) -> None:
    """Measure ``most_allocated`` of a CUDA device anew, from the present allocation."""
    torch.cuda.reset_peak_memory_stats(device)


class Stamp:
    """A moment: on a CPU that of the call, on a CUDA device that at which it has done its current stream's work so far.

    Args:
        device: Whose moment it is.
    """

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))
        self._seconds = time.perf_counter()

    @property
    def is_past(self) -> bool:
        """Whether the device has come to it. The host does not wait."""
        return self._event is None or bool(self._event.query())

    def seconds_since(self, earlier: Stamp) -> float:
        """Return the seconds between two moments of a device that are past."""
        if self._event is None:
            return self._seconds - earlier._seconds
        return float(earlier._event.elapsed_time(self._event)) / 1e3


def finish_stream(device: torch.device) -> None:
    """Wait until a device has done all work of its current stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def finish_device(device: torch.device | None) -> None:
    """Wait until a device, by default the current one, has done all work of all streams, if CUDA is in use."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device if device is not None and device.type == "cuda" else None)


def is_capturing() -> bool:
    """Say whether a CUDA graph is being captured: operations are recorded, and run when the graph is replayed."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def replays_graph(forward: object) -> bool:
    """Say whether a function is one that ``torch.cuda.make_graphed_callables`` gives to a module."""
    return getattr(forward, "__module__", None) == "torch.cuda.graphs"


def keep_for_stream(tensor: torch.Tensor) -> None:
    """Let nobody have the memory of a tensor that is freed next before the current stream is done with it.

    It may be another stream than the one that the memory was taken for: a program can compute on its own.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def lock_pages(address: int, nbytes: int, device: torch.device | None) -> int:
    """Lock host memory for copies from and to CUDA devices; return the error code of the runtime, 0 for none.

    Args:
        address: Where the memory begins.
        nbytes: Its size.
        device: The one that is asked, by default the current one. A device that was not used so far gets a context.
    """
    with torch.cuda.device(-1 if device is None else device):
        code = int(_runtime().cudaHostRegister(address, nbytes, 0))
        if code:
            _clear_error()
    return code


def unlock_pages(address: int, device: torch.device | None) -> None:
    """Unlock memory that ``lock_pages`` has locked, with the same device."""
    with torch.cuda.device(-1 if device is None else device):
        if int(_runtime().cudaHostUnregister(address)):
            _clear_error()


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _clear_error() -> None:
    """Take the error of a failed call out of the runtime: the next kernel that is launched would report it."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")


def first_call_of_thread(device: torch.device) -> Callable[[], None]:
    """Return a first call for a new thread, which makes this device the thread's default for CUDA.

    A new thread is on the first device of the node, and would make a context there for every rank. A device without an
    index (``"cuda"``) is the current one of the thread that asks here.
    """
    if device.type != "cuda":
        return lambda: None
    index = with_index(device).index
    return lambda: torch.cuda.set_device(index)


def with_index(device: torch.device) -> torch.device:
    """Return a device by the name that its tensors have: ``"cuda"`` is the current device of this thread."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def _new_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
