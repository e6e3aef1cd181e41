"""The step window of one optimizer (ADR 0011): which parameters show segments of masters and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from lightning_zero.engine.buffers.buffer import FlatBuffer
from lightning_zero.engine.optim.flat_step import BufferSlot

__all__ = ["StepWindow"]


class StepWindow:
    """Whether the window is open, and the parameters in it.

    Call protocol: 1. ``prepare``; 2. ``enter``, unless nobody looks into the window; 3. ``close``.

    Args:
        before_open: Called before the window opens: other windows of the same parameters must close.
        after_defer: Called with each buffer that is stale when the window has closed.
    """

    def __init__(self, before_open: Callable[[], None], after_defer: Callable[[FlatBuffer], None]) -> None:
        self.is_open = False
        self.places: list[BufferSlot] = []  # in the window
        self._before_open = before_open
        self._after_defer = after_defer

    def prepare(self, buffers: Callable[[], Iterable[FlatBuffer]]) -> None:
        """Bring masters up to date with the parameters before the step window opens."""
        self._before_open()
        for buffer in buffers():
            buffer.refresh_master()
            buffer.values.forget_rounding()

    def close_others(self) -> None:
        """Let the gradients be changed here, without a window if none is open: nobody sees them."""
        if not self.is_open:
            self._before_open()

    def enter(self, places: Iterable[BufferSlot]) -> None:
        """Let parameters show segments."""
        self.places = list(places)
        with torch.inference_mode(False):
            for buffer, index in self.places:
                buffer.window.enter(index)
        self.is_open = True

    def take_again(self, buffers: Iterable[FlatBuffer]) -> None:
        """Take values over that somebody has pointed ``data`` to while the window was open."""
        for buffer, index in self.places:
            buffer.window.take_values(index)
        for buffer in buffers:
            if len(buffer.entered) < len(buffer.params):
                buffer.refresh_master()  # parameters that it does not hold may have been written since

    def close(self, buffers: Callable[[], Iterable[FlatBuffer]]) -> None:
        """Close the window; does nothing while it is closed."""
        if not self.is_open:
            return
        for buffer, index in self.places:
            buffer.leave_window(index)
        self.is_open = False
        for buffer in buffers():
            if buffer.close_window():
                self._after_defer(buffer)
