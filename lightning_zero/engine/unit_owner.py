"""Answers for the parameters of a unit: reads and writes of ``data`` and ``grad`` that need the engine."""

from __future__ import annotations

import inspect

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zero.engine.buffers.buffer import FlatBuffer
from lightning_zero.engine.buffers.parameter import (
    LoweredParameter,
    PendingParameter,
    ReleasedParameter,
    has_class,
    is_called_by,
    owner_of,
    raw_grad,
    running_call_of,
)
from lightning_zero.engine.buffers.sharded_gradient import ShardedGradient, mark_of_stage
from lightning_zero.engine.engine_state import EngineState
from lightning_zero.engine.units.unit import Unit
from lightning_zero.errors import PipelineError

__all__ = ["UnitOwner", "refuse_held"]

_ZERO_GRADS = (nn.Module.zero_grad, inspect.unwrap(Optimizer.zero_grad))


class UnitOwner:
    """The ``Owner`` of each parameter of one unit."""

    def __init__(self, state: EngineState, unit: Unit) -> None:
        self._state = state
        self._unit = unit

    @property
    def is_elsewhere(self) -> bool:
        """Whether another pipeline stage holds the values: never."""
        return False

    def param_name(self, param: nn.Parameter) -> str:
        """Return the fully qualified name."""
        return self._state.param_index.name(param)

    def own_dtype(self, param: nn.Parameter) -> torch.dtype:
        """Return the dtype that the parameter has for its user."""
        return self._state.param_index.of(param)[0].kind.original

    def is_of(self, state: EngineState) -> bool:
        """Say whether the parameter is one of the engine with this state."""
        return self._state is state

    def hides(self, param: nn.Parameter) -> bool:
        """Say whether the parameter shows other values than its engine steps: rounded ones, older ones or none."""
        if any(has_class(param, cls) for cls in (ReleasedParameter, PendingParameter, LoweredParameter)):
            return True
        if self._state.module is None:
            return False  # `close` leaves what it shows
        buffer = self._state.param_index.of(param)[0]
        return buffer.original is not None and buffer.original.flat is None

    # -- Values ----------------------------------------------------------------------------------------------------

    def touch(self, param: nn.Parameter) -> bool:
        """Make the values of a released parameter present if that is allowed now; say whether they are."""
        if self._state.sharded.hooks.uses.touch(self._unit):
            return True
        if self._unit.is_sharded_between_uses:
            return False
        buffers = (buffer for unit in self._state.units for buffer in unit.buffers)
        if any(buffer.is_stale and buffer.own_range.is_shard for buffer in buffers):
            what = f"reading of parameter `{self.param_name(param)}`, whose step is due or not gathered yet,"
            self._state.communicator.meet(0, what)
        self._state.flush()
        return True

    def show_original(self, param: nn.Parameter) -> None:
        """Bind a parameter that computes in 16 bits to the master's values. Collective at stages 1 and 2: all ranks."""
        if self._state.sharded.hooks.uses.compute_in_backward(self._unit):
            return
        if any(sharded.is_running for sharded in self._state.attached):
            raise RuntimeError(
                f"`{self.param_name(param)}` computes in 16 bits and is used by the step of an optimizer that does not"
                " hold it. Read it before the step, with `full_param`."
            )
        self._state.attached.close()
        self._state.sharded.whole.show_original(self._unit)

    # -- Gradients -------------------------------------------------------------------------------------------------

    def show_gradient(self, param: nn.Parameter) -> torch.Tensor | None:
        """Bring a gradient into ``grad``, or return this rank's local sum that waits for the last micro-batch."""
        buffer, index = self._state.param_index.of(param)
        attached, gradients = self._state.attached, buffer.gradients
        self._state.recover()
        has_any = index in gradients.waiting or index in gradients.has_grad
        if has_any and attached.is_in_step and is_called_by(nn.Module.zero_grad):
            raise PipelineError(
                f"`zero_grad()` of a module in a pipelined step would drop the gradient of `{self.param_name(param)}`"
                " that earlier micro-batches of the same batch have: their backwards run before the step of later ones."
                " Leave the call out: gradients are dropped before every batch."
            )
        zero_grad = running_call_of(*_ZERO_GRADS) if has_any and not gradients.is_spent else None
        if zero_grad is not None:
            change = buffer.window.drop if zero_grad.f_locals["set_to_none"] else buffer.window.zero
            change([index])
            attached.close_idle(param)
            return None
        if gradients.is_summing and index in gradients.waiting:
            return gradients.show_sum(index)
        if index not in gradients.has_grad:
            return None
        gradients.refuse_in_node(index)
        _refuse_in_backward(buffer, index)
        if gradients.is_spent:
            if gradients.is_ahead or not is_called_by(nn.Module.zero_grad):
                self._state.timing.refuse(f"Reading the gradient of `{self.param_name(param)}`")
            buffer.window.drop([index])
            return None
        attached.show_gradient(param, (buffer, index))
        if self._state.parts is not None:
            mark_of_stage(raw_grad(param))
        return None

    def write_gradient(self, param: nn.Parameter, grad: torch.Tensor | None) -> None:
        """Let ``grad`` take the place of the gradient of ``param``; None drops it."""
        buffer, index = self._state.param_index.of(param)
        self._state.recover()
        _refuse_in_backward(buffer, index)
        if buffer.gradients.is_ahead:
            action = "Dropping" if grad is None else "Assigning"
            self._state.timing.refuse(
                f"{action} the gradient of `{self.param_name(param)}` between backward and `optimizer.step()`"
            )
        if isinstance(grad, ShardedGradient):  # a segment: it is written in the step window
            self.show_gradient(param)
            if index not in buffer.window.entered:
                self._state.attached.show_gradient(param, (buffer, index))
        buffer.window.write(index, grad)
        if grad is None and not buffer.gradients.has_grad:
            self._state.attached.close_idle(param)

    def refuse_step(self, param: nn.Parameter, optimizer: Optimizer) -> None:
        """Refuse that an unattached optimizer steps the gradient of ``param``."""
        if self._state.module is not None:  # else the engine is closed
            self._state.recover()
            self._state.attached.refuse_step(param, self._state.param_index.of(param), optimizer)


def refuse_held(module: nn.Module, state: EngineState) -> None:
    """Refuse a module with parameters whose values another engine holds and does not show. No collective.

    Args:
        module: The module.
        state: Of the engine that wants its values.

    Raises:
        RuntimeError: The other engine shows them rounded, older or not at all.
    """
    for name, param in module.named_parameters():
        owner = owner_of(param)
        if isinstance(owner, UnitOwner) and not owner.is_of(state) and owner.hides(param):
            raise RuntimeError(
                f"Parameter `{name}` of `{type(module).__name__}` has values that the engine of another run holds: one"
                " of a module around this one, or of a part of it, at stage 3, or in mixed precision without an end"
                " at which it shows its masters (an error, no step, no room on the GPU). Call `unshard()` of that"
                " engine (`trainer.strategy.engine`) before, on every rank; if it is closed, load a checkpoint into a"
                " new module."
            )


def _refuse_in_backward(buffer: FlatBuffer, index: int) -> None:
    if index in buffer.gradients.has_grad and torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            f"`grad` of `{buffer.layout.slots[index].name}` is used in a backward (by a hook of"
            " `register_post_accumulate_grad_hook`?) that adds to the average of an earlier one. The sum is not"
            " there before the backward ends. Use it after the backward, or call `zero_grad` before."
        )
