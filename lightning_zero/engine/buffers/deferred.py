"""Steps that ``optimizer.step()`` requests and that are made before anybody reads a changed value (ADR 0012).

Note [The exact deferred step]
    ``optimizer.step()`` finishes norms and clip factors, takes note of the options as they are, and returns. Where a
    buffer is offloaded a thread steps the buffers in the order of the units, beside the next forward; elsewhere each
    is stepped when its unit is needed. Tensors of a buffer on disks are read while the one before is stepped.
    Before a unit's next gather, and before anybody reads or writes its parameters, masters or states, its step is
    finished. The arithmetic is the same, so the bits are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from lightning_zero.config import StepTime
from lightning_zero.engine.buffers.labels import label
from lightning_zero.storage.copies import first_call_of_thread
from lightning_zero.storage.disk import Visit

__all__ = ["Deferral", "Update"]


class Update:
    """The step of one buffer.

    Args:
        name: Of the unit, for errors.
        calls: The calls that make the step.
        thread: Makes it as soon as it can; without one it is made when it is finished.
        upcoming: Visits to disks of the step and of those behind it in the thread, in order.
        announcing: Around an error of the disks.
    """

    def __init__(
        self,
        name: str,
        calls: Sequence[Callable[[], None]],
        *,
        thread: ThreadPoolExecutor | None,
        upcoming: deque[Visit] | None = None,
        announcing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._name = name
        self._calls = list(calls)
        self._upcoming = upcoming
        self._announcing = announcing
        self._future: Future[None] | None = None if thread is None else thread.submit(self._run)

    def finish(self) -> None:
        """Return when the step is made. Called once.

        Raises:
            RuntimeError: It failed.
        """
        try:
            if self._future is None:
                self._run()
            else:
                with self._announcing():
                    self._future.result()
        except Exception as error:
            raise RuntimeError(f"The deferred step of unit `{self._name}` failed: {error}") from error

    def _run(self) -> None:
        awake = nullcontext() if self._upcoming is None else _first_awake(self._upcoming)
        with torch.inference_mode(False), torch.no_grad(), awake, label("step", self._name):
            for call in self._calls:
                call()
        self._calls.clear()  # they hold gradients


@contextmanager
def _first_awake(upcoming: deque[Visit]) -> Iterator[None]:
    """Make the first visit, and let the one behind it begin as soon as there is room."""
    visit = upcoming.popleft()
    visit.begin()
    if upcoming:
        upcoming[0].announce()
    try:
        visit.ready()
        yield
    except BaseException:
        visit.end(changes=False)
        raise
    visit.end()


class Deferral:
    """The deferred steps, and the thread that makes those of offloaded buffers.

    Args:
        step: The option of the engine. ``"deferred"`` defers the steps of all buffers, ``"now"`` those of none, the
            others those of offloaded buffers.
        device: Returns that of this rank; the thread uses no other.
    """

    def __init__(self, step: StepTime, device: Callable[[], torch.device]) -> None:
        self._step = step
        self._device = device
        self._thread: ThreadPoolExecutor | None = None
        self._upcoming: deque[Visit] = deque()  # of the thread

    def wants(self, is_apart: bool) -> bool:
        """Say whether the step of a buffer is deferred, whose home is apart from the device or not."""
        return self._step == "deferred" or (is_apart and self._step != "now")

    def update(self, name: str, calls: Sequence[Callable[[], None]], in_thread: bool) -> Update:
        """Return the update that makes ``calls``."""
        return Update(name, calls, thread=self._thread_of_offloaded() if in_thread else None)

    def update_on_disk(self, name: str, calls: Sequence[Callable[[], None]], visit: Visit) -> Update:
        """Return the update that makes ``calls`` during ``visit``."""
        self._upcoming.append(visit)
        thread = self._thread_of_offloaded()
        return Update(name, calls, thread=thread, upcoming=self._upcoming, announcing=visit.announcing)

    def _thread_of_offloaded(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "lightning_zero-step", first_call_of_thread(self._device()))
        return self._thread

    def close(self) -> None:
        """End the thread, after the steps that were asked for."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
