"""Steps of one optimizer that ``step`` requests and that are made before anybody reads a changed value (ADR 0012).

Note [The exact deferred step]
    ``optimizer.step()`` finishes norms and clip factors, takes note of the options as they are, and returns. Where a
    buffer is offloaded a thread steps the buffers in the order of the units, beside the next forward; elsewhere each
    is stepped when its unit is needed. Tensors that are not kept in memory are read while the buffer before is stepped.
    Before a unit's next gather, and before anybody reads or writes its parameters, masters or states, its step is
    finished. The arithmetic is the same, so the bits are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from lightning_zero.engine.buffers.buffer import FlatBuffer
from lightning_zero.engine.buffers.update import StepThread, Update
from lightning_zero.engine.optim.flat_step import FlatStep
from lightning_zero.storage.copies import is_capturing

__all__ = ["DeferredSteps"]


class DeferredSteps:
    """The deferred steps of one optimizer.

    Args:
        flat_step: Has the calls of the steps; None for an optimizer that PyTorch steps.
        thread: Makes those of offloaded buffers.
        defers: Says whether the step of a buffer is deferred, whose home is apart from the device or not.
        after_defer: Called with each buffer whose step is.
    """

    def __init__(
        self,
        flat_step: FlatStep | None,
        *,
        thread: StepThread,
        defers: Callable[[bool], bool],
        after_defer: Callable[[FlatBuffer], None],
    ) -> None:
        self._flat_step = flat_step
        self._thread = thread
        self._defers = defers
        self.after_defer = after_defer
        self.buffers: list[FlatBuffer] = []  # in the last step
        self.begun: dict[int, Update] = {}  # of the next one, by buffer: they may be running

    def wants(self, buffer: FlatBuffer) -> bool:
        """Say whether the step of a buffer is deferred: not while a CUDA graph is captured, which has to contain it."""
        return self._defers(buffer.home.is_apart) and not is_capturing()

    def update(self, buffer: FlatBuffer, *, gradient: torch.Tensor | None, rounds: bool) -> Update:
        """Return the step of a buffer from the calls that were planned for it."""
        assert self._flat_step is not None
        calls = self._flat_step.take_calls(buffer)
        states = partial(self._flat_step.flat_states, buffer)
        return buffer.values.plan(self._thread, calls, states=states, gradient=gradient, rounds=rounds)

    def begin(self, buffers: Iterable[FlatBuffer], *, rounds: Callable[[], bool], at_once: bool) -> None:
        """Hand over the steps that are made later, in the order of the units.

        Args:
            buffers: Of the optimizer.
            rounds: Says whether nobody but the engine is called between a step and its publication.
            at_once: The program may change the inputs of the steps, so they are made now.
        """
        self.buffers.clear()
        if self._flat_step is None:
            return
        for buffer in buffers:
            update = self.begun.pop(id(buffer), None)
            if self._flat_step.has_calls(buffer):
                update = self.update(buffer, gradient=buffer.gradients.reduced, rounds=rounds())
            if update is not None:
                buffer.defer(update)
                self.buffers.append(buffer)
                self.after_defer(buffer)
        if at_once or any(buffer.window.is_kept for buffer in self.buffers):
            self.finish()

    def finish(self) -> None:
        """Make the steps that are due: somebody looks at the states. No collective."""
        while self.buffers:
            self.buffers[0].values.flush()
            del self.buffers[0]
