"""Torch optimizers on segments: steps in the step window and deferred ones.

The user's optimizer keeps the module's own parameters in its groups. In the *step window* (ADR 0011) each of them shows
this rank's segment of the master as ``data`` and of the reduced gradient as ``grad``; outside of it, whole or released
values and no gradient. The window opens at the first of: end of the automatic closure, a read of ``p.grad`` after a
backward, ``step``, and clipping by value, or by norm where the engine does not step the class; it closes after ``step``
and at the next forward or backward.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils.hooks import RemovableHandle

from lightning_zero.comm.communicator import Communicator
from lightning_zero.config import STEP_USE
from lightning_zero.engine.buffers.buffer import FlatBuffer
from lightning_zero.engine.buffers.labels import label
from lightning_zero.engine.buffers.parameter import call_program
from lightning_zero.engine.buffers.update import StepThread, Update
from lightning_zero.engine.optim.deferred_steps import DeferredSteps
from lightning_zero.engine.optim.flat_step import BufferSlot, FlatStep
from lightning_zero.engine.optim.methods import (
    MethodCalls,
    RunningStep,
    are_engines,
    defines_zero_grad,
    has_pre_hooks,
    keeps_states_plain,
    methods_on_segments,
)
from lightning_zero.engine.optim.moments import MomentFormat
from lightning_zero.engine.optim.optimizer_checks import OptimizerChecks
from lightning_zero.engine.optim.segment_states import SegmentStates
from lightning_zero.engine.optim.step_window import StepWindow
from lightning_zero.engine.optim.whole_gradients import Unscaled, WholeGradients, by_buffer
from lightning_zero.engine.units.pipeline_peers import PipelinePeers
from lightning_zero.errors import PipelineError
from lightning_zero_ops.selfcheck import kernels_agree

__all__ = ["ShardedOptimizer", "is_attached"]

_PLAIN_READERS = ("lightning_zero.", "torch.", "lightning.")  # modules that know of segments, or use states as they are


class ShardedOptimizer:
    """Steps one torch optimizer on this rank's segments.

    Args:
        optimizer: The user's object; its class becomes a subclass that also drops gradients in ``zero_grad``.
        places: Where every parameter of the module lies, by ``id``.
        communicator: For norms.
        before_open: Called before the window opens (other windows of the same parameters must close).
        parts: The other parts of the model, if there are any.
        keeps_gradients: Says whether ``zero_grad`` must leave the gradients alone.
        thread: Makes the steps of offloaded buffers.
        defers: Says whether the step of a buffer is deferred, whose home is apart from the device or not.
        after_defer: Called with each buffer whose step is.
        moments: The format of the moments of AdamW and Adam.
        before_step: Called before values change.
        after_step: Called when the window is closed behind a change of values.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        places: dict[int, BufferSlot],
        *,
        communicator: Communicator,
        before_open: Callable[[ShardedOptimizer], None],
        parts: PipelinePeers | None = None,
        keeps_gradients: Callable[[], bool] = lambda: False,
        thread: StepThread,
        defers: Callable[[bool], bool],
        after_defer: Callable[[FlatBuffer], None] = lambda buffer: None,
        moments: MomentFormat,
        before_step: Callable[[], None] = lambda: None,
        after_step: Callable[[Sequence[FlatBuffer]], None] = lambda buffers: None,
    ) -> None:
        self.optimizer = optimizer
        self._original_class = type(optimizer)
        self._keeps_gradients = keeps_gradients
        self._begin_step = before_step
        self._end_step = after_step
        # - The step that runs, or was last
        self.num_steps = 0  # that have ended
        self._is_halfway = False  # values may have changed in a step that has not ended, or was interrupted
        self._running_step = RunningStep()
        self._is_unevaluated = False  # it has a closure, which may bring the last micro-batch, and has not called it
        self._by_torch: dict[int, FlatBuffer] = {}  # buffers of which PyTorch steps a part in this step
        # - Its parts
        self._attached: dict[int, BufferSlot] = {}
        self._buffers: dict[int, FlatBuffer] = {}  # of these
        self._gradients = WholeGradients(communicator, parts)
        self._flat_step: FlatStep | None = None
        if FlatStep.suits(optimizer):
            self._flat_step = FlatStep(optimizer, self._attached, moments, has_kernels=self._agree_on_kernels())
        self._deferred = DeferredSteps(self._flat_step, thread=thread, defers=defers, after_defer=after_defer)
        self._window = StepWindow(lambda: before_open(self), after_defer)
        self.states = SegmentStates(optimizer, self._attached, flat_step=self._flat_step, moments=moments)
        self._calls = MethodCalls(self, self._running_step)
        _make_hookable(optimizer)
        self.checks = OptimizerChecks(
            optimizer,
            places,
            attached=self._attached,
            flat_step=self._flat_step,
            gradients=self._gradients,
            moments=moments,
        )
        self.checks.refuse_unless_elementwise()
        for group in optimizer.param_groups:
            self._attach_params(group["params"])
            self.checks.refuse_group(group)
        optimizer.__class__ = _subclass(self)
        self._hooks = [
            self._original_class.register_step_pre_hook(optimizer, self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_step_post_hook(self._begin_hooks),
            optimizer.register_state_dict_post_hook(self.states.tag),
            optimizer.register_load_state_dict_pre_hook(self.states.refuse_others),
            optimizer.register_load_state_dict_post_hook(self.states.restore_dtypes),
        ]
        self._put_first(self._hooks[2])
        if not moments.is_pytorchs:
            self._hooks.append(optimizer.register_state_dict_post_hook(self.states.widen))

    def _agree_on_kernels(self) -> bool:
        """Say whether Triton's kernels can be relied on by all ranks. Collective on CUDA devices: all ranks.

        At stage 0, and for parameters that several parts hold, each rank steps its own copy: they must not differ.
        """
        device = self._gradients.communicator.device
        if device.type != "cuda":
            return False
        return not self._gradients.any_is(not kernels_agree(device), "agreement on kernels")

    def come_last(self) -> None:
        """Prepare the step behind the program's hooks: they see gradients as before the step."""
        hooks, mine = self.optimizer._optimizer_step_pre_hooks, self._hooks[0].id
        hooks[mine] = hooks.pop(mine)

    def _put_first(self, hook: RemovableHandle) -> None:
        """Let a hook behind the step be called before all others."""
        hooks: Any = self.optimizer._optimizer_step_post_hooks  # an OrderedDict
        hooks.move_to_end(hook.id, last=False)

    def detach(self) -> None:
        """Give the optimizer back as it was; its state stays, outside memory in the dtype that it has there."""
        self.close()
        self.finish_deferred()
        self.states.hide()
        for hook in self._hooks:
            hook.remove()
        self.optimizer.__class__ = self._original_class
        self.states.widen_all()

    # -- Parameters ------------------------------------------------------------------------------------------------

    @property
    def places(self) -> Iterable[BufferSlot]:
        """Buffer and slot of each parameter, without those that the program has removed from ``param_groups``."""
        if not self._lacks_some:
            return self._attached.values()
        left = {id(param) for group in self.optimizer.param_groups for param in group["params"]}
        return [place for key, place in self._attached.items() if key in left]

    @property
    def _lacks_some(self) -> bool:
        return sum(len(group["params"]) for group in self.optimizer.param_groups) < len(self._attached)

    @property
    def params(self) -> Iterable[nn.Parameter]:
        """The optimizer's parameters."""
        return [buffer.params[index] for buffer, index in self.places]

    @property
    def buffers(self) -> list[FlatBuffer]:
        """The buffers with a parameter of this optimizer."""
        if not self._lacks_some:
            return list(self._buffers.values())
        return list({id(buffer): buffer for buffer, _ in self.places}.values())

    def holds(self, param: nn.Parameter) -> bool:
        """Say whether the optimizer has a parameter."""
        place = self._attached.get(id(param))
        return place is not None and (not self._lacks_some or place in self.places)

    @property
    def is_running(self) -> bool:
        """Whether code runs inside the optimizer's step, or inside another method of it."""
        return bool(self._running_step) or self._calls.are_running

    @property
    def is_halfway(self) -> bool:
        """Whether some values are those before a step and others those behind it, also after an error in a step."""
        return self._is_halfway or any(buffer.values.has_failed for buffer in self.buffers)

    def shares_with(self, other: ShardedOptimizer) -> bool:
        """Say whether another optimizer has one of its parameters."""
        return not self._attached.keys().isdisjoint(other._attached)

    def _attach_params(self, params: Iterable[nn.Parameter]) -> None:
        known: set[int] = set()
        for param in params:
            place = self.checks.place_of(param, known)
            known.add(id(param))
            self._attached[id(param)] = place
            self._buffers[id(place[0])] = place[0]
            place[0].values.make_master()
            self.states.cut(param, place)

    # -- The step window -------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether the step window is open."""
        return self._window.is_open

    def open(self) -> None:
        """Open the step window; does nothing while it is open."""
        if not self.is_open:
            self._prepare_window()
            self._window.enter(self._places_to_show())

    def close(self) -> None:
        """Close the step window; does nothing while it is closed."""
        self._window.close(lambda: self.buffers)

    def _prepare_window(self) -> None:
        self._window.prepare(self._buffers_to_show)
        for buffer in self.buffers[:1]:  # all have the same recorder, those that are stepped already too
            if buffer.on_rounded_write is not None:
                buffer.on_rounded_write.send(buffer.store.copies)

    def _buffers_to_show(self) -> list[FlatBuffer]:
        """Return the buffers whose parameters the step window shows."""
        return self.buffers

    def _places_to_show(self) -> Iterable[BufferSlot]:
        """Return the parameters that the step window shows."""
        return self.places

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if self._running_step:  # `super().step()`
            return args, kwargs
        self.checks.begin_step()
        self.checks.refuse_params_past_add()
        self._refuse_in_backward()
        self._begin_step()
        place = next((place for place, one in enumerate(args) if place and callable(one)), None)
        closure = kwargs.get("closure") if place is None else args[place]
        if closure is None:
            self._refuse_unfinished_gradients()
        self.states.hide()
        self.states.look_for_kept(lambda: self.buffers)
        if self.is_open:  # somebody may have pointed `data` elsewhere
            self._window.take_again(self._buffers_to_show())
        self._begin_window()
        self._running_step.begin()
        if closure is None:
            self._is_halfway = True
            return args, kwargs
        self._check_closure()
        self._is_unevaluated = True

        def evaluate() -> Any:
            self._take_values()
            if any(buffer.window.is_written for buffer in self.buffers):
                self._publish()
            self.close()
            self._end_step(self.buffers)
            self.checks.end_step()  # the closure is the program's
            with torch.enable_grad(), self._running_step.suspended():
                loss = call_program(closure)
            self.checks.begin_step()
            self._begin_step()
            self._refuse_unfinished_gradients()
            self.states.hide()
            self._begin_window()
            self._is_halfway, self._is_unevaluated = True, False
            return loss

        if place is not None:
            return (*args[:place], evaluate, *args[place + 1 :]), kwargs
        return args, {**kwargs, "closure": evaluate}

    def _check_closure(self) -> None:
        """Refuse a step with a closure where that cannot be."""

    def _begin_window(self) -> None:
        """Take over the gradients and open the window, unless nobody but the engine is there to look into it."""
        if self._flat_step is not None:
            self._flat_step.forget_calls()
        was_open = self.is_open
        if not was_open:
            self._prepare_window()
        for buffer, index in self.places:
            buffer.window.take_gradient(index)
        if not was_open and not self._is_alone():
            self._window.enter(self._places_to_show())
        self._show_gradients()

    def _is_alone(self) -> bool:
        """Say whether the engine steps all that has a gradient, and nobody else is called in the step."""
        return (
            self._flat_step is not None
            and not has_pre_hooks(self.optimizer)
            and self._is_last()
            and all(self._flat_step.steps_all(self._left_to_step(group)) for group in self.optimizer.param_groups)
        )

    def _begin_hooks(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Show the program's hooks, up to ``_after_step``, segments that say so, as between steps."""
        if self._is_last():
            return
        self._running_step.is_in_hooks = True
        for buffer, index in self._window.places if self.is_open else ():
            buffer.window.mark_again(index)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._running_step.is_outermost:  # behind `super().step()`
            if self._running_step.is_in_hooks:
                self._running_step.is_in_hooks = False
                self.states.hide()
                self._strip(self._window.places)
            return
        self._running_step.end()
        self.checks.end_step()
        if self._is_unevaluated:
            self._is_unevaluated = False
            self._refuse_unfinished_gradients()
        self._take_values()
        for buffer, index in self.places:
            if index in buffer.gradients.has_grad:
                buffer.mark_stepped(index)
        self._publish()
        if not self.is_open:  # gradients may have been clipped without it
            for buffer in self.buffers:
                buffer.window.end_writing()
        self.close()
        self._defer()
        self._end_step(self.buffers)
        self.num_steps += 1
        self._is_halfway = False
        self.states.show_again()

    def accept_values(self) -> None:
        """Make the segments in the window the parameters' values. Collective at stages 1 and 2: all ranks."""
        self._take_values()
        for buffer, index in self.places:
            buffer.mark_stepped(index)
        self._publish()

    def end_methods(self) -> None:
        """Make states plain tensors again behind a method."""
        self.states.end_methods()

    def _take_values(self) -> None:
        if self._flat_step is None:
            for buffer, index in self.places:
                buffer.window.take_values(index)

    @staticmethod
    def _refuse_in_backward() -> None:
        """Refuse a step while a backward is running: it would be another one on every rank."""
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "`optimizer.step()` was called in a backward (a hook of `register_post_accumulate_grad_hook`?), where"
                f" gradients are those of this rank alone. {STEP_USE}"
            )

    def _refuse_unfinished_gradients(self) -> None:
        self._refuse_local_gradients()
        self.checks.refuse_sparse_gradients(self.places)
        self.checks.refuse_scaled_gradients(self.places)

    def _refuse_local_gradients(self) -> None:
        """Refuse a step while micro-batches wait for the last one: it would be another one on every rank."""
        for buffer, index in self.places:
            if buffer.gradients.is_waiting and index in buffer.gradients.waiting:
                is_frozen = not any(param.requires_grad for param in buffer.params)
                is_average = index in buffer.gradients.has_grad and index not in buffer.gradients.sums.slots
                raise RuntimeError(
                    f"`optimizer.step()` was called while the gradient of `{buffer.layout.slots[index].name}` waits on"
                    " every rank for the last micro-batch, and is not averaged. "
                    + (
                        f"All parameters of `{buffer.name}` were frozen (`requires_grad_(False)`) before it: freeze"
                        " them behind a step."
                        if is_frozen
                        else f"It waits with those of other parameters of unit `{buffer.name}`, whose micro-batches"
                        " came behind its own last one. Call this step before the first of them, or use stage 2 or 3."
                        if is_average
                        else "Run the last backward before a step inside `microbatch(last=True)`, or outside."
                    )
                )

    def _show_gradients(self) -> None:
        """Give PyTorch's step its gradients; a step by runs takes them from the buffers."""
        self._gradients.compare(self.buffers)
        if self._flat_step is None:
            self.states.fit(self.places)
            self._strip(self.places)

    def _strip(self, places: Iterable[BufferSlot]) -> None:
        for buffer, index in places:
            buffer.window.show(index)
            buffer.window.strip(index)

    def _left_to_step(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return a group of the parameters that are not stepped yet."""
        return group

    def step_runs(self, group: dict[str, Any]) -> dict[str, Any]:
        """Step a group's flat ranges; return a group of the parameters that PyTorch has to step."""
        assert self._flat_step is not None
        is_alone = not self.is_open
        left = self._flat_step.step(self._left_to_step(group), rounds=self._is_last(), all_fit=is_alone)
        mixed = {id(self._attached[id(param)][0]): self._attached[id(param)][0] for param in left}
        self._by_torch.update(mixed)
        for buffer in self.buffers:
            is_due_now = id(buffer) in self._by_torch or not self._is_deferred(buffer)
            if is_due_now and buffer.home.flat_for is None and self._flat_step.has_calls(buffer):
                with label("step", buffer.name):
                    for call in self._flat_step.take_calls(buffer):
                        call()
                buffer.home.give_back_lent()
        if group is self.optimizer.param_groups[-1]:
            self._finish_flat_steps()
        if not self.is_open:
            return {**group, "params": []}  # nothing is left that has a gradient
        self.states.fit(self._attached[id(param)] for param in left)
        self._strip(self._attached[id(param)] for param in left)
        return {**group, "params": left}

    def _finish_flat_steps(self) -> None:
        """Make the steps of buffers with flat states that are not deferred: once each, for all groups."""
        assert self._flat_step is not None
        due = [buffer for buffer in self.buffers if self._flat_step.has_calls(buffer) and not self._is_deferred(buffer)]
        for update in [self._update(buffer) for buffer in due]:
            update.finish()

    def _is_deferred(self, buffer: FlatBuffer) -> bool:
        """Say whether the step of a buffer is deferred: not if hooks of the program behind it see its values."""
        return self._deferred.wants(buffer) and self._is_last()

    def _update(self, buffer: FlatBuffer) -> Update:
        return self._deferred.update(buffer, gradient=buffer.gradients.reduced, rounds=self._is_last())

    def _defer(self) -> None:
        """Hand over the steps that are made later, in the order of the units."""
        self._by_torch.clear()
        self._deferred.begin(self.buffers, rounds=self._is_last, at_once=self.states.are_kept)

    def finish_deferred(self) -> None:
        """Make the steps that are due: somebody looks at the states. No collective."""
        self._deferred.finish()

    def note_reader(self, frame: FrameType) -> None:
        """Take note of code that reads the states between steps: the program sees segments that say so."""
        reader = frame.f_globals.get("__name__", "")
        if not reader.startswith("lightning_zero."):
            self.states.are_seen = True
        if reader.startswith(_PLAIN_READERS) or keeps_states_plain(frame, self.optimizer):
            self.states.hide()
        elif self._calls.are_running:
            self.states.show_to_methods()
        else:
            self.states.show()

    # -- Publishing, dropping gradients --------------------------------------------------------------------------------

    def _is_last(self) -> bool:
        """Say whether nobody but the engine is called between a step and its publication."""
        return are_engines(self.optimizer._optimizer_step_post_hooks, _global_optimizer_post_hooks)

    def _is_due_later(self, buffer: FlatBuffer) -> bool:
        """Say whether the step of a buffer, not this call, publishes its values."""
        return self._flat_step is not None and self._flat_step.has_calls(buffer)

    def _publish(self) -> None:
        stepped = [
            buffer
            for buffer in self.buffers
            if (buffer.gradients.has_grad or any(param.requires_grad for param in buffer.params))
            and not self._is_due_later(buffer)
        ]
        for pending in [buffer.publish() for buffer in stepped]:
            if pending is not None:
                pending.wait()
        for buffer in self.buffers:
            if buffer.gradients.has_grad or any(param.requires_grad for param in buffer.params):
                buffer.window.published()  # or by the step that is due

    def forget_gradients(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or set them to zero."""
        self.close()
        if self._keeps_gradients():
            return
        for buffer, indices in by_buffer(self.places):
            if set_to_none:
                buffer.window.drop(indices)
            else:
                buffer.window.zero(indices)

    def call_zero_grad(self, zero_grad: Callable[[], None]) -> None:
        """Call the ``zero_grad`` of a user's class, which reads and drops gradients of parameters as it likes."""
        if not self._keeps_gradients():
            zero_grad()

    def begin_gradients(self) -> None:
        """Call the optimizer's own ``zero_grad``, if it has one, in front of a pipelined step.

        Raises:
            PipelineError: It leaves gradients.
        """
        if not defines_zero_grad(self._original_class):
            return
        self.optimizer.zero_grad()
        left = [buffer.layout.slots[index].name for buffer, index in self.places if index in buffer.gradients.has_grad]
        if left:
            raise PipelineError(
                f"`{self._original_class.__name__}.zero_grad()` leaves the gradient of `{left[0]}`, and a pipeline"
                " always starts a step without gradients. Let it set them to None, accumulate with"
                " `Trainer(accumulate_grad_batches=...)`, or train without `pipeline`."
            )

    # -- Gradients as a whole --------------------------------------------------------------------------------------

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients so that their norm is at most ``max_norm``; return the norm before. Collective."""
        if self._flat_step is None:
            self.open()
        else:  # nobody looks at the gradients between their norm and their factor
            self._window.close_others()
        norm = self._gradients.norm(self.places)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        self._gradients.scale(self.places, factor, in_step=self._flat_step is not None)
        return norm

    def clip_grad_value(self, clip_value: float) -> None:
        """Clamp every gradient element to ``[-clip_value, clip_value]``."""
        self.open()
        self._gradients.change(self.places, lambda grad: grad.clamp_(-clip_value, clip_value))

    def unscale(self, factor: float) -> bool:
        """Multiply the gradients; say whether one was not finite on some rank. Collective: all ranks."""
        self.open()
        return self._gradients.multiply(self.places, factor)

    def unscale_loss(self, scale: float) -> Unscaled:
        """Divide the gradients by their loss scales, once. Collective: all ranks, who get the same answer.

        Args:
            scale: Of gradients that the program has assigned.
        """
        self.open()
        return self._gradients.unscale(self.places, scale)


def is_attached(optimizer: Optimizer) -> bool:
    """Say whether an engine steps an optimizer."""
    return "steps_segments" in vars(type(optimizer))


def _has_hooks(step: Any) -> bool:
    return bool(getattr(step, "hooked", False))


def _make_hookable(optimizer: Optimizer) -> None:
    """Add hook dictionaries to an optimizer whose constructor has not called that of ``Optimizer``.

    Raises:
        ValueError: A learning rate scheduler calls its step, which has no hooks.
    """
    for moment in ("step_pre", "step_post", "state_dict_pre", "state_dict_post", "load_state_dict_pre"):
        vars(optimizer).setdefault(f"_optimizer_{moment}_hooks", OrderedDict())
    vars(optimizer).setdefault("_optimizer_load_state_dict_post_hooks", OrderedDict())
    if "step" in vars(optimizer) and not _has_hooks(optimizer.step):
        raise ValueError(
            f"`{type(optimizer).__name__}` does not call `super().__init__()`, so the step that the learning rate"
            " scheduler calls has no hooks. Call it in the constructor."
        )


def _subclass(sharded: ShardedOptimizer) -> type[Optimizer]:
    """Return a subclass of the optimizer's class, under the same name, that knows of the engine's gradients."""
    base = type(sharded.optimizer)

    def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        sharded.forget_gradients(set_to_none)

    def own_zero_grad(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        sharded.call_zero_grad(lambda: base.zero_grad(self, *args, **kwargs))

    def add_param_group(self: Optimizer, param_group: dict[str, Any]) -> None:
        sharded.close()
        base.add_param_group(self, param_group)
        try:
            sharded.checks.refuse_unless_elementwise()
        except ValueError:
            self.param_groups.pop()
            raise
        sharded._attach_params(self.param_groups[-1]["params"])
        sharded.checks.refuse_group(self.param_groups[-1])
        sharded._calls.begin_again()

    def register_step_pre_hook(self: Optimizer, hook: Any) -> Any:
        handle = base.register_step_pre_hook(self, hook)
        sharded.come_last()
        return handle

    def _init_group(self: Optimizer, group: dict[str, Any], *lists: Any) -> Any:
        return base._init_group(self, sharded.step_runs(group), *lists)  # type: ignore[attr-defined]

    def state(self: Optimizer) -> Any:
        sharded.finish_deferred()
        if sharded._running_step.is_in_hooks or not sharded._running_step:
            sharded.note_reader(sys._getframe(1))
        return vars(self if "state" in vars(self) else sharded.optimizer)["state"]  # else in a `LightningOptimizer`

    methods: dict[str, Any] = {
        "zero_grad": own_zero_grad if defines_zero_grad(base) else zero_grad,
        "add_param_group": add_param_group,
        "register_step_pre_hook": register_step_pre_hook,
        "__module__": base.__module__,
        "steps_segments": True,
        **methods_on_segments(base, sharded._calls),
    }
    if not _has_hooks(base.step):
        methods["step"] = Optimizer.profile_hook_step(base.step)
    if sharded._flat_step is not None:
        methods["_init_group"] = _init_group
    if "state" in vars(sharded.optimizer) and not hasattr(base, "state"):  # not that of another one, inside
        methods["state"] = property(state, lambda self, value: vars(self).update(state=value))
    return type(base.__name__, (base,), methods)
