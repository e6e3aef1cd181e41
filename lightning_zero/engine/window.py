"""The step window of one flat buffer: parameters show what is stepped, and their gradients (ADR 0011)."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from lightning_zero.comm.communicator import Communicator
from lightning_zero.config import Sharding
from lightning_zero.engine.gradients import BufferGradients
from lightning_zero.engine.own_range import OwnRange
from lightning_zero.engine.parameter import (
    ReducedParameter,
    SleepingParameter,
    raw_grad,
    restore_class,
    set_raw_grad,
    swap_class,
)
from lightning_zero.engine.sharded_gradient import ShardedGradient, sharded_gradient_class
from lightning_zero.engine.sleep import BufferSleep
from lightning_zero.storage.sleeping import ordinary

__all__ = ["BufferWindow", "Shown"]


class Shown(Protocol):
    """What must be known of a flat buffer; see ``lightning_zero/engine/buffer.py``."""

    params: list[nn.Parameter]
    sharding: Sharding
    communicator: Communicator
    own_range: OwnRange
    sleep: BufferSleep | None

    def segment(self, index: int) -> torch.Tensor:
        """Return a parameter's segment of what the optimizer steps."""
        ...

    def take_back(self) -> None:
        """Bring back what was put aside."""
        ...

    def bind_one(self, index: int) -> None:
        """Show a parameter as its module computes with it."""
        ...

    def forget_rounding(self) -> None:
        """Take note that stepped values may change."""
        ...


class BufferWindow:
    """The step window of one buffer; several optimizers may have parameters in it.

    Call protocol, parameter by parameter: ``enter``, ``show`` if its gradient is wanted, ``leave``; then
    ``close``.

    Args:
        buffer: The buffer.
        gradients: Its gradients.
    """

    def __init__(self, buffer: Shown, gradients: BufferGradients) -> None:
        self._buffer = buffer
        self._gradients = gradients
        self._gradient_class = sharded_gradient_class(buffer.communicator)
        self._entered: set[int] = set()  # slots whose parameter shows what is stepped
        self._shown: dict[int, torch.Tensor] = {}  # the gradients that parameters show

    def enter(self, index: int) -> None:
        """Show a parameter as the optimizer steps it: ``data`` is the master's segment; reading ``grad`` shows it."""
        buffer = self._buffer
        buffer.take_back()
        param = buffer.params[index]
        restore_class(param)
        segment = ordinary(buffer.segment(index))
        same = (segment.data_ptr(), segment.shape, segment.dtype) == (param.data_ptr(), param.shape, param.dtype)
        if not same:
            with torch._C.DisableTorchFunctionSubclass():
                param.data = segment
        set_raw_grad(param, None)
        self._entered.add(index)
        buffer.forget_rounding()
        if buffer.sleep is not None:
            swap_class(param, SleepingParameter)
        elif index in self._gradients.has_grad and self._gradients.reduced is not None:
            swap_class(param, ReducedParameter)

    def show(self, index: int) -> None:
        """Let an entered parameter's ``grad`` be its segment of the reduced gradient, if it has one."""
        if index not in self._gradients.has_grad or index not in self._entered or index in self._shown:
            return
        values = self._gradients.for_showing()
        if values is None:
            return
        buffer = self._buffer
        param = buffer.params[index]
        if buffer.sleep is None:
            restore_class(param)
        else:
            swap_class(param, SleepingParameter)
        grad = buffer.own_range.segment(index, values)
        if buffer.sharding.optim:
            grad.__class__ = self._gradient_class
        self._shown[index] = grad
        set_raw_grad(param, grad)

    def strip(self, index: int) -> None:
        """Make a parameter's gradient a plain tensor: optimizers have fast paths for exact classes only."""
        grad = raw_grad(self._buffer.params[index])
        if isinstance(grad, ShardedGradient):
            grad.__class__ = torch.Tensor  # type: ignore[assignment]

    def scale_later(self, indices: set[int], factor: torch.Tensor) -> bool:
        """Keep a factor of the reduced gradients for the step, if they are those of ``indices`` and nobody saw them.

        Returns:
            Whether nothing is left to do; if not, the caller multiplies.
        """
        return not self._shown and self._gradients.scale_later(indices, factor)

    def take_gradient(self, index: int) -> bool:
        """Take over what was done to an entered parameter's ``grad``; say whether it has a reduced gradient now."""
        shown = self._shown.get(index)
        if shown is None:
            return index in self._gradients.has_grad and self._gradients.reduced is not None
        grad = raw_grad(self._buffer.params[index])
        if grad is None:
            del self._shown[index]
            self._gradients.forget([index])
            return False
        if grad is not shown:
            self._replace_gradient(index, grad)
        return True

    def _replace_gradient(self, index: int, grad: torch.Tensor) -> None:
        """Take over a tensor that was assigned to a parameter's ``grad``: this rank's segment, or the whole."""
        values = self._gradients.for_writing()
        assert values is not None
        own = self._buffer.own_range
        with torch.no_grad():
            segment = own.segment(index, values)
            plain = grad.detach().as_subclass(torch.Tensor)
            start, stop = own.elements(index)
            segment.copy_(plain if plain.shape == segment.shape else plain.reshape(-1)[start:stop])

    def take_values(self, index: int) -> None:
        """Copy what an entered parameter's ``data`` was pointed to (``p.data = p.data - ...``) into its segment."""
        param, segment = self._buffer.params[index], ordinary(self._buffer.segment(index))
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            if index in self._entered and param.data_ptr() != segment.data_ptr():
                segment.copy_(param.detach().view(segment.shape))

    def leave(self, index: int) -> None:
        """Show a parameter as its module computes with it, and take over what was done to its ``grad``."""
        self.take_gradient(index)
        set_raw_grad(self._buffer.params[index], None)
        self._shown.pop(index, None)
        self._entered.discard(index)
        self._buffer.bind_one(index)

    def close(self) -> None:
        """Keep what was done to the gradients, in the dtype in which they are kept."""
        self._gradients.accept_writes()
        if not self._shown:  # another optimizer's window may be open
            self._gradients.end_writing()
