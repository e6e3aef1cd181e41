"""The step of one buffer, made where it is finished or in a thread beside the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from lightning_zero.engine.buffers.labels import label
from lightning_zero.storage.copies import first_call_of_thread

__all__ = ["StepThread", "Update"]


class Update:
    """The step of one buffer.

    Args:
        name: Of the unit, for errors.
        calls: The calls that make the step.
        thread: Makes it as soon as it can; without one it is made when it is finished.
        during: Makes the context in which the calls have their tensors in memory.
        announcing: Makes the context around a wait for the thread.
    """

    def __init__(
        self,
        name: str,
        calls: Sequence[Callable[[], None]],
        *,
        thread: Executor | None,
        during: Callable[[], AbstractContextManager[None]] = nullcontext,
        announcing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._name = name
        self._calls = list(calls)
        self._during = during
        self._announcing = announcing
        self._future: Future[None] | None = None if thread is None else thread.submit(self._run)
        self.has_failed = False  # as ``finish`` has said

    def finish(self) -> None:
        """Return when the step is made; after an interrupted wait call it again.

        Raises:
            RuntimeError: It failed. Every further call says so again.
        """
        if self._future is None:
            self._future = Future()
            self._run_here(self._future)
        try:
            with self._announcing():
                self._future.result()
        except BaseException as error:
            if not self._future.done() or self._future.exception() is not error:
                raise  # the wait was interrupted
            self.has_failed = True
            raise RuntimeError(
                f"The deferred step of unit `{self._name}` failed: {str(error) or type(error).__name__}. Some values"
                " are those from before the step, others those from after it: go on from the last checkpoint."
            ) from error

    def _run_here(self, future: Future[None]) -> None:
        try:
            self._run()
        except BaseException as error:
            future.set_exception(error)
            if not isinstance(error, Exception):
                self.has_failed = True
                raise
        else:
            future.set_result(None)

    def _run(self) -> None:
        with torch.inference_mode(False), torch.no_grad(), self._during(), label("step", self._name):
            for call in self._calls:
                call()
        self._calls.clear()  # they hold gradients


class StepThread:
    """The thread that steps offloaded buffers, in the order of their updates.

    Args:
        device: Returns that of this rank; the thread uses no other.
    """

    def __init__(self, device: Callable[[], torch.device]) -> None:
        self._device = device
        self._executor: Executor | None = None

    def stay_here(self, during: Callable[[], AbstractContextManager[None]]) -> None:
        """Make steps at once, in the thread that asks for them.

        Args:
            during: Makes the context around each.
        """
        self.close()
        self._executor = _Here(during)

    def executor(self) -> Executor:
        """Return the thread, started if it is not yet."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "lightning_zero-step", first_call_of_thread(self._device()))
        return self._executor

    def close(self) -> None:
        """End the thread, after the steps that were asked for."""
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None


class _Here(Executor):
    """Runs functions before ``submit`` returns."""

    def __init__(self, during: Callable[[], AbstractContextManager[None]]) -> None:
        self._during = during

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            with self._during():
                future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future
