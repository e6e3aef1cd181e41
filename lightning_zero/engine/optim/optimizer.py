"""Torch optimizers on segments: the step window, when steps are made, norms, clipping.

The user's optimizer keeps the module's own parameters in its groups. In the *step window* (ADR 0011) each of them shows
this rank's segment of the master as ``data`` and of the reduced gradient as ``grad``; outside of it, whole or released
values and no gradient. The window opens at the first of: end of the automatic closure, clipping, a read of ``p.grad``
after a backward, ``step``; it closes after ``step`` and at the next forward or backward.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lightning_zero.comm.communicator import Communicator
from lightning_zero.config import Moments
from lightning_zero.engine.buffers.buffer import FlatBuffer
from lightning_zero.engine.buffers.deferred import Deferral, Update
from lightning_zero.engine.buffers.labels import label
from lightning_zero.engine.buffers.parameter import owner_of
from lightning_zero.engine.buffers.sharded_gradient import ShardedGradient, norm_of_norms, norms_of
from lightning_zero.engine.buffers.window import compare_assigned
from lightning_zero.engine.optim.elementwise import ElementwiseTrial, Stepped
from lightning_zero.engine.optim.flat_step import BufferSlot, FlatStep
from lightning_zero.engine.optim.methods import MethodCalls, RunningStep, methods_on_segments
from lightning_zero.engine.optim.moments import widened
from lightning_zero.engine.optim.steps_made_early import StepsMadeEarly
from lightning_zero.engine.units.pipeline_peers import PipelinePeers
from lightning_zero.storage.disk_tensor import is_on_disk
from lightning_zero_ops.selfcheck import kernels_agree

__all__ = ["ShardedOptimizer", "gradient_norm", "is_attached"]

_PYTORCH_STATES = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum"})  # of fused kernels


class ShardedOptimizer:
    """Steps one torch optimizer on this rank's segments.

    Args:
        optimizer: The user's object; its class becomes a subclass that also drops gradients in ``zero_grad``.
        places: Where every parameter of the module lies, by ``id``.
        communicator: For norms.
        before_open: Called before the window opens (other windows of the same parameters must close).
        parts: The other parts of the model, if there are any.
        keeps_gradients: Says whether ``zero_grad`` must leave the gradients alone.
        deferral: Which steps are made later.
        after_defer: Called with each buffer whose step is.
        moments: How the moments of AdamW and Adam are kept.
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
        deferral: Deferral | None = None,
        after_defer: Callable[[FlatBuffer], None] = lambda buffer: None,
        moments: Moments = "fp32",
        before_step: Callable[[], None] = lambda: None,
        after_step: Callable[[Sequence[FlatBuffer]], None] = lambda buffers: None,
    ) -> None:
        self.optimizer = optimizer
        self.is_open = False
        self._places = places
        self._communicator = communicator
        self._before_open = before_open
        self._parts = parts
        self._keeps_gradients = keeps_gradients
        self._original_class = type(optimizer)
        self._deferral = deferral
        self._after_defer = after_defer
        self._begin_step = before_step
        self._end_step = after_step
        self._deferred: list[FlatBuffer] = []  # in the last step
        self._ahead = StepsMadeEarly()
        self._steps_early = False
        self._in_window: list[BufferSlot] = []
        self._by_torch: dict[int, FlatBuffer] = {}  # buffers of which PyTorch steps a part in this step
        self._attached: dict[int, BufferSlot] = {}
        self._moments = moments
        self._flat_step: FlatStep | None = None
        if FlatStep.suits(optimizer):
            self._flat_step = FlatStep(optimizer, self._attached, moments, has_kernels=self._agree_on_kernels())
        self._running_step = RunningStep()
        self.num_steps = 0  # that have ended
        self.are_states_seen = False  # by the program, which may keep some
        self._are_states_kept = False
        self._is_halfway = False  # values may have changed in a step that has not ended, or was interrupted
        self._calls = MethodCalls(self, self._running_step)
        _make_hookable(optimizer)
        is_sharded = any(buffer.own_range.is_shard for buffer, _ in places.values())
        self._trial = ElementwiseTrial(optimizer, self._stepped) if is_sharded else None
        self._refuse_unless_elementwise()
        for group in optimizer.param_groups:
            self._attach_params(group["params"])
            self._refuse_idle_steps(group)
            self._refuse_what_pytorch_steps(group)
        optimizer.__class__ = _subclass(self)
        self._hooks = [
            self._original_class.register_step_pre_hook(optimizer, self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        if moments != "fp32":
            self._hooks.append(optimizer.register_state_dict_post_hook(self._widen))

    def _agree_on_kernels(self) -> bool:
        """Say whether Triton's kernels can be relied on by all ranks. Collective on CUDA devices: all ranks.

        At stage 0, and for parameters that several parts hold, each rank steps its own copy: they must not differ.
        """
        device = self._communicator.device
        if device.type != "cuda":
            return False
        has_none = self._communicator.any_is(not kernels_agree(device), "agreement on kernels")
        return not (has_none if self._parts is None else self._parts.any_is(has_none))

    def come_last(self) -> None:
        """Prepare the step behind the program's hooks: they see gradients as before the step."""
        hooks, mine = self.optimizer._optimizer_step_pre_hooks, self._hooks[0].id
        hooks[mine] = hooks.pop(mine)

    def detach(self) -> None:
        """Give the optimizer back as it was; its state stays, on disks in the dtype that it has there."""
        self.close()
        self._ahead.finish()
        self.finish_deferred()
        for hook in self._hooks:
            hook.remove()
        self.optimizer.__class__ = self._original_class
        if self._moments != "fp32":
            for param, state in self.optimizer.state.items():
                if not any(is_on_disk(value) for value in state.values()):
                    self.optimizer.state[param] = self._widened(param, state)

    @property
    def is_on_disks(self) -> bool:
        """Whether it has states on disks."""
        return self._flat_step is not None and self._flat_step.is_on_disks

    def leave_states(self, successor: ShardedOptimizer | None) -> None:
        """Leave states on disks to the sharded optimizer that follows; free their room if there is none."""
        assert self._flat_step is not None
        if successor is None or successor._flat_step is None:
            self._flat_step.give_back()
        else:
            successor._flat_step.take_over(self._flat_step)

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
        return self._is_halfway or not self._ahead.is_empty

    def shares_with(self, other: ShardedOptimizer) -> bool:
        """Say whether another optimizer has one of its parameters."""
        return not self._attached.keys().isdisjoint(other._attached)

    def _attach_params(self, params: Iterable[nn.Parameter]) -> None:
        known: set[int] = set()
        for param in params:
            place = self._places.get(id(param))
            if place is None:
                raise ValueError(
                    f"`{self._original_class.__name__}` has a parameter of shape {tuple(param.shape)} that is not in"
                    " the sharded module. Make the optimizer from the module's parameters after `engine.shard(module)`"
                    " (in Lightning: in `configure_optimizers`, from `self.parameters()`)."
                )
            if id(param) in known:
                raise ValueError(
                    f"`{self._original_class.__name__}` has `{place[0].layout.slots[place[1]].name}` twice in a group,"
                    " so each step would step it twice. Give it each parameter once."
                )
            known.add(id(param))
            self._attached[id(param)] = place
            place[0].values.make_master()
            self._cut_state(param, place)

    def _refuse_params_past_add(self) -> None:
        params = {id(param): param for group in self.optimizer.param_groups for param in group["params"]}
        if params.keys() <= self._attached.keys():
            return
        param = next(param for key, param in params.items() if key not in self._attached)
        owner = owner_of(param)
        name = "a tensor that is not in the sharded module" if owner is None else f"`{owner.param_name(param)}`"
        raise RuntimeError(
            f"`param_groups` of `{self._original_class.__name__}` got {name} of shape {tuple(param.shape)} behind the"
            " engine's back, so its gradient was left out of norms and clipping, and it would not be trained. Use"
            " `optimizer.add_param_group({'params': [...]})`, before the backward, of the optimizer that is attached."
        )

    def _refuse_idle_steps(self, group: dict[str, Any]) -> None:
        if not (issubclass(self._original_class, torch.optim.SGD) and group.get("fused")):
            return
        for param in group["params"]:
            stepped = self._attached[id(param)][0].values.stepped
            if stepped.is_cpu and stepped.itemsize < 4:
                raise ValueError(
                    f"`fused=True`: PyTorch's fused `{self._original_class.__name__}` does not step {stepped.dtype}"
                    " values on a CPU. Use `fused=False`, or fp32 masters (`masters=True`)."
                )

    def _refuse_what_pytorch_steps(self, group: dict[str, Any]) -> None:
        if self._flat_step is not None:
            self._flat_step.refuse_moments(group)
            self._flat_step.refuse_unless_flat(group)
        elif homes := [home for param in group["params"] if (home := self._attached[id(param)][0].home).flat_for]:
            raise ValueError(
                f"`{self._original_class.__name__}` cannot be stepped where {homes[0].flat_for} has its states:"
                " it is for `torch.optim.AdamW`, `Adam` and `SGD` themselves. Use one of them, or"
                " `Offload(optimizer='cpu')`."
            )
        elif self._moments != "fp32":
            raise ValueError(
                f"`moments={self._moments!r}` is for `torch.optim.AdamW` and `Adam` themselves, got"
                f" `{self._original_class.__name__}`. Use one of them, or `moments='fp32'`."
            )

    def _widen(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Let ``state_dict`` have the moments that PyTorch's own step would have."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for key, state in state_dict["state"].items():
            param = params[key] if isinstance(key, int) else key
            state_dict["state"][key] = self._widened(param, state)

    def _widened(self, param: torch.Tensor, state: dict[str, Any]) -> dict[str, Any]:
        buffer, _ = self._attached[id(param)]
        buffer.values.flush()
        return widened(state, self._moments, buffer.values.stepped.dtype)

    def _cut_state(self, param: nn.Parameter, place: BufferSlot) -> None:
        """Cut state that the optimizer made in its constructor to this rank's segment."""
        buffer, index = place
        start, stop = buffer.own_range.elements(index)
        whole = torch.Size(buffer.layout.slots[index].shape)
        state = self.optimizer.state.get(param, {})
        for key, value in state.items():
            if isinstance(value, ShardedGradient):  # a segment: it was made of the step window's segments
                state[key] = value.as_subclass(torch.Tensor)
            elif torch.is_tensor(value) and key != "step" and value.shape == whole and buffer.own_range.is_shard:
                state[key] = value.reshape(-1)[start:stop].to(buffer.values.stepped.dtype).clone()

    def _fit_states(self, places: Iterable[BufferSlot]) -> None:
        """Cut whole states that were assigned by hand; PyTorch's kernels do not look how long a state is.

        Raises:
            RuntimeError: One that PyTorch takes has the shape neither of the parameter nor of its segment.
        """
        for buffer, index in places:
            param, shape = buffer.params[index], buffer.values.segment(index).shape
            state = self.optimizer.state.get(param)
            if not state or not buffer.own_range.is_shard:
                continue
            if any(isinstance(one, ShardedGradient) for one in state.values()):
                self._cut_state(param, (buffer, index))
            odd = [key for key, one in state.items() if torch.is_tensor(one) and one.dim() and one.shape != shape]
            if not odd:
                continue
            self._cut_state(param, (buffer, index))
            for key in odd:
                if key in _PYTORCH_STATES and state[key].shape != shape:
                    raise RuntimeError(
                        f"State `{key}` of `{buffer.layout.slots[index].name}` in `{self._original_class.__name__}` has"
                        f" shape {tuple(state[key].shape)}, but {tuple(shape)} is this rank's segment and"
                        f" {tuple(buffer.layout.slots[index].shape)} the parameter. Assign a tensor of one of these."
                    )

    def _refuse_unless_elementwise(self) -> None:
        """Try an optimizer of an unknown class, if its groups are of new kinds. Collective then: all ranks."""
        if self._trial is None or not self._trial.is_due:
            return
        obstacle = self._trial.find_obstacle()
        is_refused = self._communicator.any_is(obstacle is not None, "agreement on the optimizer")
        if self._parts is not None:
            is_refused = self._parts.any_is(is_refused)
        if is_refused:
            reason = "is refused by another rank" if obstacle is None else obstacle.reason
            raise ValueError(
                f"`{self._original_class.__name__}` {reason}. Use stage 0, or an element-wise optimizer such as AdamW,"
                " SGD, Adagrad, RMSprop or Lion."
            ) from (obstacle.error if obstacle is not None else None)

    def _stepped(self, param: torch.Tensor) -> Stepped:
        place = self._places.get(id(param))
        if place is None:
            return Stepped(tuple(param.shape), param.dtype, param.device)
        buffer, index = place
        device = buffer.home.device if buffer.home.is_apart else buffer.whole.flat.device
        return Stepped(buffer.layout.slots[index].shape, buffer.kind.shown, device)

    # -- The step window -------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open the step window; does nothing while it is open."""
        if not self.is_open:
            self._prepare()
            self._enter()

    def _prepare(self) -> None:
        """Bring masters up to date with the parameters before the step window opens."""
        self._before_open(self)
        for buffer in self.buffers:
            if not buffer.gradients.is_ahead:
                buffer.refresh_master()
                buffer.values.forget_rounding()
            else:
                buffer.window.take_gradients()  # refuses assigned gradients

    def _enter(self) -> None:
        self._in_window = [(buffer, index) for buffer, index in self.places if not buffer.gradients.is_ahead]
        with torch.inference_mode(False):
            for buffer, index in self._in_window:
                buffer.window.enter(index)
        self.is_open = True

    def close(self) -> None:
        """Close the step window; does nothing while it is closed."""
        if not self.is_open:
            return
        for buffer, index in self._in_window:
            buffer.leave_window(index)
        self.is_open = False
        for buffer in self.buffers:
            if buffer.close_window():
                self._after_defer(buffer)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if self._running_step:  # `super().step()`
            return args, kwargs
        self._refuse_unless_elementwise()
        self._refuse_params_past_add()
        self._refuse_in_backward()
        self._begin_step()
        self._refuse_local_gradients()
        self._look_for_kept_states()
        if self.is_open:  # somebody may have pointed `data` elsewhere
            for buffer, index in self._in_window:
                buffer.window.take_values(index)
            for buffer in self.buffers:
                if len(buffer.entered) < len(buffer.params) and not buffer.gradients.is_ahead:
                    buffer.refresh_master()  # parameters that it does not hold may have been written since
        self._begin_window()
        self._running_step.begin()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._is_halfway = True
            return args, kwargs
        if self._steps_early:
            raise ValueError("`step(closure)` may call backward several times, which `step='backward'` excludes.")

        def evaluate() -> Any:
            self._take_values()
            self._publish()
            self.close()
            self._end_step(self.buffers)
            with torch.enable_grad():
                loss = closure()
            self._begin_step()
            self._begin_window()
            self._is_halfway = True
            return loss

        if len(args) > 1:
            return (args[0], evaluate, *args[2:]), kwargs
        return args, {**kwargs, "closure": evaluate}

    def _begin_window(self) -> None:
        """Take over the gradients and open the window, unless nobody but the engine is there to look into it."""
        if not self.is_open:
            self._prepare()
            if not self._is_alone():
                self._enter()
        self._show_gradients()

    def _look_for_kept_states(self) -> None:
        """Find out whether the program keeps states of those that it has seen."""
        flat = self._flat_step
        self._are_states_kept = self.are_states_seen and flat is not None and flat.are_held(self.buffers)
        self.are_states_seen = self._are_states_kept

    def _is_alone(self) -> bool:
        """Say whether the engine steps all that has a gradient, and nobody else is called in the step."""
        hooks = [*self.optimizer._optimizer_step_pre_hooks.values(), *_global_optimizer_pre_hooks.values()]
        return (
            self._flat_step is not None
            and all(getattr(hook, "__module__", "").startswith("lightning_zero.engine.") for hook in hooks)
            and self._is_last()
            and all(self._flat_step.steps_all(group) for group in self.optimizer.param_groups)
        )

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._running_step.is_outermost:
            return
        self._running_step.end()
        self._take_values()
        for buffer, index in self.places:
            if index in buffer.gradients.has_grad:
                buffer.mark_stepped(index)
        self._publish()
        self.close()
        self._defer()
        self._end_step(self.buffers)
        self.num_steps += 1
        self._is_halfway = False

    def accept_values(self) -> None:
        """Make the segments in the window the parameters' values. Collective at stages 1 and 2: all ranks."""
        self._take_values()
        for buffer, index in self.places:
            buffer.mark_stepped(index)
        self._publish()

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
                " gradients are those of this rank alone. Step behind the backward, or use `step='backward'`, which"
                " steps each unit when its gradients are averaged."
            )

    def _refuse_local_gradients(self) -> None:
        """Refuse a step while micro-batches wait for the last one: it would be another one on every rank."""
        for buffer, index in self.places:
            if buffer.gradients.is_summing and index in buffer.gradients.waiting:
                raise RuntimeError(
                    f"`optimizer.step()` was called behind `microbatch(last=False)`: the gradient of"
                    f" `{buffer.layout.slots[index].name}` waits on every rank for the last micro-batch, and is not"
                    " averaged. Run the last backward before a step inside `microbatch(last=True)`, or outside."
                )

    def _show_gradients(self) -> None:
        """Give PyTorch's step its gradients; a step by runs takes them from the buffers."""
        for buffer, index in self.places:
            buffer.window.take_gradient(index)
        compare_assigned((buffer.window for buffer in self.buffers), self._communicator)
        if self._flat_step is None:
            self._fit_states(self.places)
            self._strip(self.places)

    def _strip(self, places: Iterable[BufferSlot]) -> None:
        for buffer, index in places:
            buffer.window.show(index)
            buffer.window.strip(index)

    def step_runs(self, group: dict[str, Any]) -> dict[str, Any]:
        """Step a group's flat ranges; return a group of the parameters that PyTorch has to step."""
        assert self._flat_step is not None
        self._ahead.refuse_moved_options(self.optimizer.param_groups)
        params = [param for param in group["params"] if not self._attached[id(param)][0].gradients.is_spent]
        left = self._flat_step.step({**group, "params": params}, rounds=self._is_last())
        mixed = {id(self._attached[id(param)][0]): self._attached[id(param)][0] for param in left}
        self._by_torch.update(mixed)
        for buffer in self.buffers:
            is_due_now = id(buffer) in self._by_torch or not self._is_deferred(buffer)
            if is_due_now and buffer.home.flat_for is None:
                with label("step", buffer.name):
                    for call in self._flat_step.take_calls(buffer):
                        call()
        if group is self.optimizer.param_groups[-1]:
            self._step_asleep()
        if not self.is_open:
            return {**group, "params": []}  # nothing is left that has a gradient
        self._fit_states(self._attached[id(param)] for param in left)
        self._strip(self._attached[id(param)] for param in left)
        return {**group, "params": left}

    def _step_asleep(self) -> None:
        """Make the steps of buffers on disks that are not deferred: once each, for all groups."""
        assert self._flat_step is not None
        due = [buffer for buffer in self.buffers if self._flat_step.has_calls(buffer) and not self._is_deferred(buffer)]
        for update in [self._update(buffer) for buffer in due]:
            update.finish()

    def _update(self, buffer: FlatBuffer) -> Update:
        assert self._flat_step is not None
        assert self._deferral is not None
        calls = self._flat_step.take_calls(buffer)
        states = partial(self._flat_step.flat_states, buffer)
        return buffer.values.plan(
            self._deferral, calls, states=states, gradient=buffer.gradients.reduced, rounds=self._is_last()
        )

    def _is_deferred(self, buffer: FlatBuffer) -> bool:
        return self._deferral is not None and self._deferral.wants(buffer.home.is_apart)

    def _defer(self) -> None:
        """Hand over the steps that are made later, in the order of the units."""
        self._by_torch.clear()
        self._deferred.clear()
        updates = self._ahead.take()
        if self._flat_step is None or self._deferral is None:
            return
        for buffer in self.buffers:
            update = self._update(buffer) if self._flat_step.has_calls(buffer) else updates.get(id(buffer))
            if update is not None:
                buffer.defer(update)
                self._deferred.append(buffer)
                self._after_defer(buffer)
        if self._are_states_kept or any(buffer.window.is_kept for buffer in self._deferred):
            self.finish_deferred()  # the program may change the inputs of the steps

    # -- Steps in the backward -------------------------------------------------------------------------------------

    def allow_early_steps(self) -> None:
        """Let buffers be stepped in the backward (ADR 0027).

        Raises:
            ValueError: The engine does not step all groups itself.
        """
        self.require_runs("step='backward'")
        self._steps_early = True

    def require_runs(self, option: str) -> None:
        """Refuse an optimizer of which PyTorch would have to step a group.

        Raises:
            ValueError: It is one; names ``option``.
        """
        flat = self._flat_step
        if flat is None or not all(flat.can_step(group) for group in self.optimizer.param_groups):
            raise ValueError(
                f"`{option}` is for `torch.optim.AdamW`, `Adam` and `SGD` that step fp32 values, with numbers as"
                f" options and without `foreach`, `fused=False` and the like; got `{self._original_class.__name__}`."
                " Use one of them, or leave the option out."
            )

    def holds_all_of(self, buffer: FlatBuffer) -> bool:
        """Say whether the optimizer steps every trained parameter of a buffer."""
        return all(id(param) in self._attached for param in buffer.params if param.requires_grad)

    def step_early(self, buffer: FlatBuffer) -> None:
        """Step a buffer whose gradients are complete, in the backward; ``step`` shows the result later."""
        assert self._flat_step is not None
        self._ahead.begin(self.optimizer.param_groups)
        with torch.inference_mode(False), torch.no_grad():
            buffer.gradients.has_grad.update(index for index, param in enumerate(buffer.params) if param.requires_grad)
            buffer.forget_original()
            buffer.refresh_master()
            self._flat_step.step_early(self.optimizer.param_groups, buffer)
            calls = self._flat_step.take_calls(buffer)
            buffer.spend_gradients()
        self._ahead.add(buffer, None)
        if self._deferral is not None and self._is_deferred(buffer) and buffer.home.is_apart:
            states = partial(self._flat_step.flat_states, buffer)
            update = buffer.values.plan(self._deferral, calls, states=states, gradient=None, rounds=False)
            self._ahead.add(buffer, update)
        else:
            Update(buffer.name, calls, None).finish()
            buffer.home.give_back_lent()

    # -- States --------------------------------------------------------------------------------------------------------

    def finish_deferred(self) -> None:
        """Make the steps that are due: somebody looks at the states. No collective."""
        while self._deferred:
            self._deferred.pop(0).values.flush()

    def state_place(self, param: torch.Tensor, key: str) -> torch.Tensor | None:
        """Return where a state of a parameter is to be, 1-D, if that is on disks."""
        attached = self._attached.get(id(param))  # none of a parameter that lies on another pipeline stage
        if attached is None or self._flat_step is None:
            return None
        place = self._flat_step.state_place(*attached, key)
        return None if place is None else place.reshape(-1)

    def move_states(self, buffers: Sequence[FlatBuffer], move: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace the optimizer states of some buffers' own ranges by ``move(state)``."""
        chosen = {id(buffer) for buffer in buffers}
        for param, state in vars(self.optimizer)["state"].items():
            place = self._attached.get(id(param))
            if place is None or id(place[0]) not in chosen:
                continue
            for key, value in state.items():
                if torch.is_tensor(value) and value.dim():  # numbers stay where they are
                    state[key] = move(value)
        if self._flat_step is not None:
            self._flat_step.move_states(chosen, move)

    # -- Publishing, dropping gradients --------------------------------------------------------------------------------

    def _is_last(self) -> bool:
        """Say whether nobody but the engine is called between a step and its publication."""
        hooks = [*self.optimizer._optimizer_step_post_hooks, *_global_optimizer_post_hooks]
        return len(hooks) == 1

    def _publish(self) -> None:
        stepped = [
            buffer
            for buffer in self.buffers
            if (buffer.gradients.has_grad or any(param.requires_grad for param in buffer.params))
            and not (self._flat_step is not None and self._flat_step.has_calls(buffer))
            and not self._ahead.is_running(buffer)
        ]
        for pending in [buffer.publish() for buffer in stepped]:
            if pending is not None:
                pending.wait()
        for buffer in self.buffers:
            if buffer.gradients.has_grad or any(param.requires_grad for param in buffer.params):
                buffer.window.published()  # or by the step that is due

    def forget_gradients(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or set them to zero."""
        if not self._ahead.is_empty:
            raise RuntimeError(
                "`zero_grad` was called between backward and `optimizer.step()`, but `step='backward'` has made"
                " steps with these gradients. Call `step` first, or use `step='auto'`."
            )
        self.close()
        if self._keeps_gradients():
            return
        if not set_to_none and self._steps_early:
            raise ValueError(
                "`zero_grad(set_to_none=False)` keeps gradients of zero, with which a unit without a gradient would be"
                " stepped; `step='backward'` has none to keep. Use `zero_grad()`, or `step='auto'`."
            )
        for buffer, indices in _by_buffer(self.places):
            if set_to_none or buffer.gradients.is_spent:
                buffer.window.drop(indices)
            else:
                buffer.window.zero(indices)

    # -- Gradients as a whole --------------------------------------------------------------------------------------

    def grad_norm(self, order: float = 2.0) -> torch.Tensor:
        """Return the norm of all gradients: () fp32. Collective: all ranks."""
        return gradient_norm(self.places, order, self._communicator, self._parts)

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients so that their norm is at most ``max_norm``; return the norm before. Collective."""
        self.open()
        norm = self.grad_norm()
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        self._scale(factor)
        return norm

    def _scale(self, factor: torch.Tensor) -> None:
        """Multiply the gradients: in the step where that is one pass over them less, else at once."""
        factors: dict[torch.device, torch.Tensor] = {}  # the host waits once for those that it multiplies with
        for buffer, indices in _by_buffer(self.places):
            home = buffer.home.device
            if home not in factors:
                factors[home] = factor.to(home)
            buffer.window.show_again()
            buffer.gradients.assigned.change(indices, lambda source: source.mul_(factor.to(source)))
            if self._flat_step is None or not buffer.window.scale_later(indices, factors[home]):
                for grad in _pieces(buffer, indices, buffer.gradients.for_writing()):
                    grad.mul_(factors[home].to(grad))
                buffer.gradients.clear_padding()

    def clip_grad_value(self, clip_value: float) -> None:
        """Clamp every gradient element to ``[-clip_value, clip_value]``."""
        self.open()
        self._change_gradients(lambda grad: grad.clamp_(-clip_value, clip_value))

    def unscale(self, factor: float) -> bool:
        """Multiply the gradients; say whether one was not finite on some rank. Collective: all ranks."""
        self.open()
        finite: dict[torch.device, torch.Tensor] = {}

        def multiply(grad: torch.Tensor) -> None:
            is_finite = torch.isfinite(grad).all()
            finite[grad.device] = is_finite & finite.get(grad.device, is_finite)
            grad.mul_(factor)

        self._change_gradients(multiply)
        is_finite = all(bool(one) for one in finite.values())  # one wait of the host
        overflows = self._communicator.any_is(not is_finite, "agreement on overflow")
        return overflows if self._parts is None else self._parts.any_is(overflows)

    def _change_gradients(self, change: Callable[[torch.Tensor], Any]) -> None:
        """Do something to each gradient of this rank."""
        _take_gradients(self.places, self._communicator)
        for buffer, indices in _by_buffer(self.places):
            buffer.window.show_again()
            buffer.gradients.assigned.change(indices, change)
            for grad in _pieces(buffer, indices, buffer.gradients.for_writing()):
                change(grad)


def gradient_norm(
    places: Iterable[BufferSlot], order: float, communicator: Communicator, parts: PipelinePeers | None = None
) -> torch.Tensor:
    """Return the norm of the reduced gradients at ``places``, of all parts: () fp32. Collective: all ranks."""
    places = list(places)
    _take_gradients(places, communicator)
    is_sharded = any(buffer.own_range.is_shard for buffer, _ in places)
    if parts is not None:
        places = [(buffer, index) for buffer, index in places if parts.is_counted_here(buffer.params[index])]
    norms = [norm for buffer, indices in _by_buffer(places) for norm in _norms(buffer, indices, order)]
    norm = norm_of_norms(norms, order, communicator if is_sharded else None)
    return (norm if parts is None else parts.combine_norms(norm.to(communicator.device), order)).float()


def _take_gradients(places: Iterable[BufferSlot], communicator: Communicator) -> None:
    """Take over changes to gradients. Collective: all ranks that have assigned some by hand."""
    by_buffer = _by_buffer(places)
    for buffer, indices in by_buffer:
        if buffer.gradients.is_summing and indices & buffer.gradients.waiting:
            raise RuntimeError(
                f"The gradients of unit `{buffer.name}` are used as a whole (their norm, clipping, unscaling), and wait"
                " on every rank for the last micro-batch. Use them behind `microbatch(last=True)`, in a LightningModule"
                " in `on_before_optimizer_step`."
            )
    buffers = [buffer for buffer, _ in by_buffer]
    for buffer in buffers:
        buffer.window.take_gradients()
    compare_assigned((buffer.window for buffer in buffers), communicator)


def _norms(buffer: FlatBuffer, indices: set[int], order: float) -> list[torch.Tensor]:
    known = buffer.gradients.known_norm(order) if buffer.gradients.has_grad <= indices else None
    return [known] if known is not None else norms_of(_pieces(buffer, indices, buffer.gradients.for_reading()), order)


def _by_buffer(places: Iterable[BufferSlot]) -> list[tuple[FlatBuffer, set[int]]]:
    wanted: dict[int, tuple[FlatBuffer, set[int]]] = {}
    for buffer, index in places:
        wanted.setdefault(id(buffer), (buffer, set()))[1].add(index)
    return list(wanted.values())


def _pieces(buffer: FlatBuffer, indices: set[int], values: torch.Tensor | None) -> list[torch.Tensor]:
    """Return the gradients of some slots as few tensors as possible: the whole buffer where all of them are meant."""
    if values is None or not buffer.gradients.has_grad:
        return []
    if buffer.gradients.has_grad <= indices:
        return [values]
    return [buffer.own_range.segment(index, values) for index in sorted(buffer.gradients.has_grad & indices)]


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

    def add_param_group(self: Optimizer, param_group: dict[str, Any]) -> None:
        sharded.close()
        base.add_param_group(self, param_group)
        try:
            sharded._refuse_unless_elementwise()
        except ValueError:
            self.param_groups.pop()
            raise
        sharded._attach_params(self.param_groups[-1]["params"])
        sharded._refuse_idle_steps(self.param_groups[-1])
        sharded._refuse_what_pytorch_steps(self.param_groups[-1])

    def register_step_pre_hook(self: Optimizer, hook: Any) -> Any:
        handle = base.register_step_pre_hook(self, hook)
        sharded.come_last()
        return handle

    def _init_group(self: Optimizer, group: dict[str, Any], *lists: Any) -> Any:
        return base._init_group(self, sharded.step_runs(group), *lists)  # type: ignore[attr-defined]

    def state(self: Optimizer) -> Any:
        sharded.finish_deferred()
        reader = sys._getframe(1).f_globals.get("__name__", "")
        if not sharded.is_running and not reader.startswith("lightning_zero."):
            sharded.are_states_seen = True
        return vars(self)["state"]

    methods: dict[str, Any] = {
        "zero_grad": zero_grad,
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
        methods["state"] = property(state, lambda self, value: vars(self).update(state=value))
    return type(base.__name__, (base,), methods)
