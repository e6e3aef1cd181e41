"""Waits for calls of the transport: how long they take, and which call a process group has given up.

Note [A device waits by itself]
    Over gloo ``wait`` of a call blocks the host and raises when a peer has failed. Over NCCL it lets the current stream
    wait, and the host goes on: the host's clock sees nothing, and nobody raises. A call whose peer does not come stands
    in the stream until PyTorch's watchdog ends the process, about a minute after the timeout, and names no unit.

    So the wait of a stream lies between two events, which are read once the device has passed them: the host never
    waits for them. The watchdog sets an error state in the group before it ends the process. That state is read at
    every call, and by the thread of ``Peers`` while the host is in a call that does not return. The error names the
    call that was started first among those of the group whose wait the device has not passed: a call before the one
    that is stuck is named if its result has come and nobody has waited for it. No communicator is aborted here: work
    behind the call in its stream does not run. (``torchrun`` has PyTorch abort them before it ends the process.)
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import ErrorType

from lightning_zero.comm.peers import Peers

__all__ = ["Call", "Failure", "Waits", "lets_device_wait"]

_REASONS = {
    ErrorType.TIMEOUT: "it did not end within `timeout` on the device",
    ErrorType.COMM_ERROR: "the transport reports that the connection to a peer, or the device, has failed",
    ErrorType.REMOTE_ERROR: "another rank reports that it has failed there",
}


class Failure(NamedTuple):
    """A call that a process group has given up."""

    what: str
    reason: str

    def __str__(self) -> str:
        return f"the {self.what} failed: {self.reason}."


@dataclass(frozen=True, eq=False)
class Call:
    """A call that was started.

    Attributes:
        what: Name of the call, for errors.
        group: That was called.
        number: In the order in which calls were started.
    """

    what: str
    group: Any
    number: int


@dataclass(eq=False)
class _Wait:
    """A wait of a stream that the device has not passed, as far as was seen."""

    call: Call
    begin: Any
    end: Any
    is_counted: bool = True


class Waits:
    """Calls of some process groups that a rank waits for.

    Call protocol:

    1. ``start`` when a call is started.
    2. ``wait`` around the transport's wait for it.
    3. ``seconds`` and ``failure`` at any time; ``failure`` from any thread.

    Args:
        device: Of the tensors.
        groups: Those over which the device waits, see ``lets_device_wait``. For all others the host does.
    """

    def __init__(self, device: torch.device, groups: Sequence[Any] = ()) -> None:
        self._device = device
        self._backends = {group: _backend(group, device) for group in groups}
        self._num_started = 0
        self._seconds = 0.0
        # - Calls of ``groups``
        self._started: dict[Call, None] = {}  # nobody has waited for them
        self._waits: deque[_Wait] = deque()  # in the order in which they were asked for
        self._spare: list[tuple[Any, Any]] = []  # events
        if self._backends:
            Peers.of_world().watch(self)

    def start(self, what: str, group: Any) -> Call:
        """Take note of a call."""
        self._num_started += 1
        call = Call(what, group, self._num_started)
        if group in self._backends:
            self._started[call] = None
        return call

    @contextmanager
    def wait(self, call: Call) -> Iterator[None]:
        """Measure the wait inside the block: of the current stream, or of the host."""
        if call.group in self._backends:
            begin, end = self._events()
            stream = torch.cuda.current_stream(self._device)
            begin.record(stream)
            yield
            end.record(stream)
            self._waits.append(_Wait(call, begin, end))
            self._started.pop(call, None)  # until here: the host may be held up in the wait itself
        else:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began

    def _events(self) -> tuple[Any, Any]:
        self._take_passed()
        if self._spare:
            return self._spare.pop()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        return begin, end

    def _take_passed(self) -> None:
        """Count the waits that the device has passed."""
        while self._waits and self._waits[0].end.query():
            wait = self._waits.popleft()
            if wait.is_counted:
                self._seconds += wait.begin.elapsed_time(wait.end) / 1e3
            self._spare.append((wait.begin, wait.end))

    @property
    def seconds(self) -> float:
        """Of all waits since ``reset``; without those that the device has still to pass."""
        self._take_passed()
        return self._seconds

    def reset(self) -> None:
        """Start counting anew."""
        self._seconds = 0.0
        for wait in self._waits:
            wait.is_counted = False

    def failure(self) -> Failure | None:
        """Return the first call that failed, if a group has given one up. The host does not wait."""
        errors = {group: _error_of(backend) for group, backend in list(self._backends.items())}
        failed = {group: error for group, error in errors.items() if error != ErrorType.SUCCESS}
        if not failed:
            return None
        waits = [wait.call for wait in list(self._waits) if not _is_passed(wait)]
        calls = [call for call in [*waits, *list(self._started)] if call.group in failed]
        first = min(calls, key=lambda call: call.number, default=None)
        if first is None:
            return Failure("last collective", _REASONS[next(iter(failed.values()))])
        return Failure(first.what, _REASONS[failed[first.group]])

    def close(self) -> None:
        """Forget the groups: others use them from now on."""
        self._backends.clear()
        self._started.clear()
        self._waits.clear()


def lets_device_wait(device: torch.device, backend: str) -> bool:
    """Say whether ``wait`` of a call returns at once, and lets a stream of the device wait."""
    return device.type == "cuda" and backend not in ("gloo", "fake")


def _backend(group: Any, device: torch.device) -> Any:
    """Return the backend that knows a group's error state; None if none does."""
    try:
        backend = group._get_backend(torch.device(device.type))
    except RuntimeError:  # a transport that is not PyTorch's
        return None
    return getattr(backend, "wrapped_pg", backend)  # of TORCH_DISTRIBUTED_DEBUG=DETAIL


def _error_of(backend: Any) -> ErrorType:
    try:
        return backend.get_error()  # type: ignore[no-any-return]
    except (AttributeError, RuntimeError):  # only some backends have such a state
        return ErrorType.SUCCESS


def _is_passed(wait: _Wait) -> bool:
    try:
        return bool(wait.end.query())
    except RuntimeError:  # the device has failed
        return False
