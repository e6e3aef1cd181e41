"""The optimizers of an engine: which windows are open, and whether gradients were dropped."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_zero.engine.buffers.buffer import FlatBuffer
from lightning_zero.engine.buffers.parameter import owner_of
from lightning_zero.engine.optim.flat_step import BufferSlot
from lightning_zero.engine.optim.optimizer import ShardedOptimizer, is_attached
from lightning_zero.errors import PipelineError

__all__ = ["Attached"]


class Attached:
    """The attached optimizers, and parameters of none of them whose gradient somebody reads."""

    def __init__(self, mark_stale: Callable[[FlatBuffer], None] = lambda buffer: None) -> None:
        self._mark_stale = mark_stale
        self._optimizers: list[ShardedOptimizer] = []
        self._former: list[ShardedOptimizer] = []  # let go of, with states outside memory, until others are attached
        self._loose: list[BufferSlot] = []  # parameters of no optimizer whose gradient is shown
        self._forwards: RemovableHandle | None = None  # of the hook that closes windows, while one may be open
        _watch_steps()
        self._is_zeroed: bool | None = None  # `zero_grad` was called since `begin_gradients`; None: it drops gradients

    def __iter__(self) -> Iterator[ShardedOptimizer]:
        return iter(self._optimizers)

    def add(self, sharded: ShardedOptimizer) -> None:
        """Take an optimizer in."""
        self._optimizers.append(sharded)

    def detach(self) -> None:
        """Let go of all optimizers."""
        for sharded in self._optimizers:
            sharded.detach()
        self._former += [sharded for sharded in self._optimizers if sharded.states.is_outside_memory]
        self._optimizers = []

    def replace_former(self) -> None:
        """Leave the states of those that were let go of to those that were attached since."""
        for former in self._former:
            same = [sharded.states for sharded in self._optimizers if sharded.optimizer is former.optimizer]
            former.states.leave_to(next(iter(same), None))
        self._former.clear()

    def of(self, optimizer: Optimizer) -> ShardedOptimizer:
        """Return the sharded optimizer that steps a torch optimizer, which may be wrapped.

        Raises:
            RuntimeError: It is not attached.
        """
        raw = getattr(optimizer, "_optimizer", optimizer)
        for sharded in self._optimizers:
            if sharded.optimizer is raw:
                return sharded
        raise RuntimeError(
            f"`{type(raw).__name__}` is not attached to the engine. Call `engine.attach(optimizer)` first."
        )

    def refuse_step(self, param: nn.Parameter, place: BufferSlot, optimizer: Optimizer) -> None:
        """Refuse that an unattached optimizer steps a gradient of the engine: its values would not be published.

        Raises:
            RuntimeError: The parameter has or gets a gradient, and no attached optimizer calls the step.
        """
        buffer, index = place
        in_backward = torch._C._current_graph_task_id() != -1  # in a hook on accumulated gradients
        if not in_backward and index not in buffer.gradients.has_grad and index not in buffer.gradients.waiting:
            return
        if any(sharded.is_running and sharded.holds(param) for sharded in self._optimizers):
            return  # it is wrapped
        attached = ", ".join(f"`{type(sharded.optimizer).__name__}`" for sharded in self._optimizers)
        raise RuntimeError(
            f"A `{type(optimizer).__name__}` steps `{buffer.layout.slots[index].name}`, but is not attached to the"
            f" engine (attached: {attached or 'none'}): each rank would step its own part and keep it for itself. Call"
            " `engine.attach(optimizer)` before the first backward; pass all optimizers in one call, because a second"
            " `attach` replaces the optimizers of the first."
        )

    # -- Windows ---------------------------------------------------------------------------------------------------

    def show_gradient(self, param: nn.Parameter, place: BufferSlot) -> None:
        """Let a parameter with a reduced gradient show it: the window of its optimizer opens."""
        buffer, index = place
        for sharded in sorted(self._optimizers, key=lambda sharded: not sharded.is_open):
            if sharded.holds(param):
                sharded.open()
                buffer.window.give_out(index)
                return
        self._watch_forwards()
        if index not in buffer.entered:
            buffer.refresh_master()
            buffer.window.enter(index)
            self._loose.append(place)
        buffer.window.give_out(index)

    def close_others(self, opening: ShardedOptimizer) -> None:
        """Close the windows that show a parameter of an optimizer whose window opens."""
        self._watch_forwards()
        self._close_loose()
        for sharded in self._optimizers:
            if sharded is not opening and sharded.is_open and sharded.shares_with(opening):
                sharded.close()

    def close_idle(self, param: nn.Parameter) -> None:
        """Close the window that shows a parameter if no gradient is left in it: ``module.zero_grad()`` opens it."""
        for sharded in self._optimizers:
            is_shown = sharded.is_open and not sharded.is_running and sharded.holds(param)
            if is_shown and not any(buffer.gradients.has_grad for buffer in sharded.buffers):
                sharded.close()

    def close(self) -> None:
        """Close all windows."""
        if self._forwards is not None:
            self._forwards.remove()
            self._forwards = None
        for sharded in self._optimizers:
            sharded.close()
        self._close_loose()

    def _watch_forwards(self) -> None:
        if self._forwards is None:
            self._forwards = _before_next_forward(self)

    def _close_loose(self) -> None:
        for buffer, index in self._loose:
            buffer.leave_window(index)
            if buffer.close_window():
                self._mark_stale(buffer)
        self._loose.clear()

    # -- Dropping gradients ----------------------------------------------------------------------------------------

    def begin_gradients(self) -> None:
        """Let ``zero_grad`` leave gradients alone until ``end_gradients``: they were dropped before."""
        self._is_zeroed = False

    @property
    def is_in_step(self) -> bool:
        """Whether the step runs whose gradients ``zero_grad`` has to leave alone."""
        return self._is_zeroed is not None

    def keeps_gradients(self) -> bool:
        """Take note of a ``zero_grad``; say whether its work is done."""
        if self._is_zeroed is None:
            return False
        self._is_zeroed = True
        return True

    def end_gradients(self) -> None:
        """Let ``zero_grad`` drop gradients again.

        Raises:
            PipelineError: It was not called since ``begin_gradients``.
        """
        is_zeroed, self._is_zeroed = self._is_zeroed, None
        if is_zeroed is False:
            raise PipelineError(
                "The gradients of earlier steps are not dropped by `optimizer.zero_grad()` (`optimizer_zero_grad` or"
                " `zero_grad` is overridden?). A pipeline always starts a step without gradients."
            )


def _before_next_forward(attached: Attached) -> RemovableHandle:
    """Close windows before the forward of any module that has parameters of an engine; return the hook's handle.

    Units close them too, but a module that is no unit has no hooks at stages 1 and 2, and idle ones in a scope.
    """
    alive = weakref.ref(attached)

    def close(module: nn.Module, args: Any) -> None:
        opened = alive()
        if opened is None:
            handle.remove()
            return
        is_in_backward = torch._C._current_graph_task_id() != -1
        if not is_in_backward and any(owner_of(param) is not None for param in module.parameters()):
            opened.close()

    handle = register_module_forward_pre_hook(close)
    return handle


@cache
def _watch_steps() -> None:
    """Look at every step of an optimizer in this process, from now on."""
    register_optimizer_step_pre_hook(_refuse_unattached)


def _refuse_unattached(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if is_attached(optimizer):
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            owner = owner_of(param)
            if owner is not None:
                owner.refuse_step(param, optimizer)
