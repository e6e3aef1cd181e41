"""Module and autograd hooks that turn PyTorch's events into unit verbs.

Note [Gathering again in backward]
    Two mechanisms together. A hook on the gradients of a unit's outputs gathers the unit before its backward starts.
    And while a scope runs, tensors that autograd saves and that lie in a unit's buffer are kept with it, and
    it is gathered when backward unpacks them: so a loss that leaves by a side attribute, a parameter used outside its
    module and a unit that was given back early are all right. Inside activation checkpointing the checkpoint's own
    hooks are on top; it recomputes the forward, which gathers.

Note [Giving back in backward]
    A unit is given back when all its gradients have arrived. A frozen parameter brings no gradient, so a unit with one
    also waits for the gradients of its inputs. The remaining units go at the end of backward. A forward that ends while
    a backward runs is a recomputation: its unit is needed right away, and is not given back.

Note [Backward that builds a graph]
    With ``create_graph`` the new graph needs the parameters again, so units stay whole and nothing is reduced; the next
    backward without it cleans up. Outside of a scope no hooks for saved tensors are on when such a backward begins.
    ``_unpack`` puts them on for the node that asked for a weight: whatever the node saves of it is gathered again, too.

Note [Backwards that reduce]
    ``loss.backward()`` ends the pass before it, and its own pass may reduce from its beginning: a rank that comes to a
    reduction of the list without a gradient takes part with zeros. So nothing of the kind may stand in the list of
    ``torch.autograd.grad`` (a penalty, a slope of an input). It belongs to the pass in which it is called, which
    gathers only; ranks may differ in whether they call it. PyTorch tells the two apart by what allows reentrant
    checkpointing: a backward that runs the whole graph. ``backward(inputs=...)`` does not and may bring gradients
    nevertheless; they are reduced at its end.

    What cannot be known at the beginning is whether ``backward(create_graph=True)`` builds a graph, or a rank's loss
    without parameters goes with one that does. If so, reductions that were started because the list says so were of
    zeros on all ranks, for a rank that takes a gradient knows better. They are finished and dropped.

Note [Backwards inside a backward]
    Reentrant checkpointing, and functions of users that do the same, run a backward in the backward, whose end is not
    the end of ours. A nested one is told by the call of a Python function's backward in the stack; the nodes behind
    that function run in the backward around it, where they ask again. All ranks make the same calls.

Note [After an error]
    The passes that an error leaves are abandoned without a collective, since the other ranks may be elsewhere: whole
    units that nobody holds are given back, sums of an interrupted backward are dropped, and the pass is abandoned (see
    the order's note). Where the error leaves a ``with`` block, a hook that PyTorch always calls, or both, this happens
    at once. PyTorch tells nobody that a backward has failed, or that a ``KeyboardInterrupt`` has ended a forward: then
    it happens at the next forward, backward or step (``recover``). An error that does not leave the scope leaves the
    pass alone.

Note [Forwards of submodules]
    Every module with parameters below it may be called on its own at stage 3, wherever all ranks do so. Its forward
    opens a scope if none is open, as a unit's does. Inside a scope the hooks of modules that are no unit return at
    once, and compilers trace through them.

Note [Two dtypes of a parameter]
    A parameter that computes in 16 bits does so for the time of a step, of a forward under autocast, and of the
    backward behind it. A forward without autocast outside a step, such as one in a Trainer's hook, uses the master's
    values in their own dtype, as all other code does (ADR 0041). All ranks begin a scope alike, so whoever takes part
    in a gather knows its dtype. A graph in the own dtype keeps the weights that it needs, and its backward may run
    whatever parameters show then. One under autocast does so at stage 3 only: elsewhere autograd keeps the parameter
    itself, so parameters compute again when a backward begins.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import CodeType, FrameType
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor, peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks

from lightning_zero.engine.buffers.buffer import FlatBuffer
from lightning_zero.engine.buffers.parameter import raw_grad, set_raw_grad
from lightning_zero.engine.runtime.accumulation_hooks import on_accumulated
from lightning_zero.engine.runtime.order import PassOrder
from lightning_zero.engine.runtime.reduction import Reducer
from lightning_zero.engine.runtime.transforms import explain_transform
from lightning_zero.engine.units.lowering import embed_in_fp32
from lightning_zero.engine.units.submodules import Submodule, submodules_of, units_below
from lightning_zero.engine.units.unit import Unit, UnitState

__all__ = ["Hooks", "is_hooked"]

_NOTHING: AbstractContextManager[Any] = nullcontext()
_FORWARD_CODES = (torch.autograd.Function.apply.__func__.__code__,)  # type: ignore[attr-defined]
_BACKWARD_CODES = tuple(  # newer versions of PyTorch have the second
    getattr(BackwardCFunction, name).__code__ for name in ("apply", "apply_boxed") if hasattr(BackwardCFunction, name)
)


class _ModuleHook:
    """A hook that a copy of the module does not take along."""

    def __init__(self, call: Callable[..., Any] | None) -> None:
        self._call = call

    @property
    def is_live(self) -> bool:
        """Whether an engine is called; a copy's is not."""
        return self._call is not None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._call is None:
            return None
        with _outside_of_transforms():
            return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> _ModuleHook:
        return _ModuleHook(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _ModuleHook, (None,)


class _SubmoduleHook(_ModuleHook):
    """One that compilers trace, as nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or self._call is None:
            return None
        with _outside_of_transforms():
            return self._call(*args)


def is_hooked(module: nn.Module) -> bool:
    """Say whether an engine drives a module or a part of it."""
    return any(
        isinstance(hook, _ModuleHook) and hook.is_live
        for child in module.modules()
        for hook in child._forward_pre_hooks.values()
    )


class _Kept(NamedTuple):
    """A tensor that autograd saved, without its graph, which would hold itself through it; and its version then."""

    tensor: torch.Tensor
    version: int


class _KeptWeight:
    """One that lies in the buffer of a unit, whose storage may be given back under it."""

    __slots__ = ("_held", "buffer", "tensor", "unit", "version")

    def __init__(self, tensor: torch.Tensor, version: int, unit: Unit, buffer: FlatBuffer) -> None:
        self.tensor = tensor
        self.version = version
        self.unit = unit
        self.buffer = buffer
        self._held = buffer.handles
        self._held.append(None)

    def __del__(self) -> None:
        self._held.pop()


class _Outer(NamedTuple):
    """A tensor that hooks around the scope packed."""

    packed: Any
    unpack: Callable[[Any], torch.Tensor]


class _Opener(NamedTuple):
    """The call of a module that has opened the scope."""

    frame: FrameType
    thread: int
    submodule: Submodule | None  # the module, if it is no unit
    handled: BaseException | None  # the error that was being handled when it began


class _Call(NamedTuple):
    """A forward that is running."""

    unit: Unit
    opens_scope: bool
    handled: BaseException | None  # the error that was being handled when it began
    awaited: object | None = None  # stands for it in ``Unit.await_inputs``


class _BeforeUsers(NamedTuple):
    """A parameter's version and gradient before hooks of the program had the gradient."""

    version: int
    grad: torch.Tensor | None  # the gradient, if the sum is shown in its place
    shown: torch.Tensor | None
    shown_version: int


class Hooks:
    """Drives the units of one module.

    Args:
        module: The root.
        units: All units; the first is the root's.
        order: Makes units whole, and starts their reductions, in one order on all ranks.
        reducer: Finishes the reductions.
        close_windows: Called when a forward or backward begins.
        broadcast_buffers: Called when a step begins (`scope`, or a forward of the root), with whether the next one
            needs it too. Collective.
        check_module: Called when a scope begins that is in no other.
        show_original: Shows a unit's parameters in their own dtype, below stage 3. Collective at stages 1 and 2.
        reduces_each_backward: Whether gradients are reduced in every backward (stages 2 and 3).
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        order: PassOrder,
        reducer: Reducer,
        *,
        close_windows: Callable[[], None],
        broadcast_buffers: Callable[[bool], None],
        check_module: Callable[[], None],
        show_original: Callable[[Unit], None],
        reduces_each_backward: bool,
    ) -> None:
        self._units = list(units)
        self._root = units[0]
        self._order = order
        self._reducer = reducer
        self._close_windows = close_windows
        self._broadcast_buffers = broadcast_buffers
        self._check_module = check_module
        self._show_original = show_original
        self._reduces_each_backward = reduces_each_backward
        self._shards = any(unit.is_sharded_between_uses for unit in units)
        self._by_storage = {
            buffer.full.untyped_storage()._cdata: (unit, buffer)
            for unit in units
            if unit.is_sharded_between_uses
            for buffer in unit.buffers
        }
        for buffer in [buffer for _, buffer in self._by_storage.values()]:
            buffer.moved = functools.partial(_rename, self._by_storage)
        # - Two dtypes
        lowered = [unit for unit in units if unit.computes_lower]
        self._has_lowered = bool(lowered)
        self._lowered = [unit for unit in lowered if not unit.is_sharded_between_uses]
        self._device_type = units[0].buffers[0].full.device.type if units[0].buffers else "cpu"
        self._in_original = False  # forwards of the scope use parameters in their own dtype
        self._graphs_in_original = False  # those of the last scope with gradients, for the next backward
        self._has_lowered_graphs = False  # since the last backward there was a scope with gradients under autocast
        # - Scopes and passes
        self._depth = 0
        self._scope = ""
        self._ordinal = 0  # of the pass in its step
        self._opened_by: _Opener | None = None  # None: `scope` has
        self._holds_all_below = False  # the scope uses only units that `gathered` holds
        self._below = units_below(units)
        self._net: AbstractContextManager[Any] | None = None
        self._outer_hooks: Any = None  # the saved-tensor hooks around the scope, e.g. of a checkpoint
        # - The backward that is running
        self._armed = False
        self._is_end_known = False  # PyTorch calls us at the end
        self._has_nested_end = False  # one inside it has ended without an error
        self._reduces = False  # unless it brings nothing
        self._runs_whole_graph = False  # else it is for some tensors only, as `autograd.grad` is
        self._has_own_pass = False
        self._explicit = False  # `backward_scope` ends it, not autograd
        self._took_gradient = False
        self._keeps_units = False
        self._before_users: dict[nn.Parameter, _BeforeUsers] = {}  # whose hooks run
        # - Set by the engine
        self.is_last_microbatch = True
        self.has_more_backwards = False  # of forwards that have run: a pipeline runs several ahead
        self.keeps_gradients = False  # at stage 3 too, until the last of them
        self.is_asleep = False  # forwards compute nothing
        self.forwards_are_steps = True  # those of the root outside of `scope` broadcast module buffers, too
        self._open_calls: list[_Call] = []
        self._handles: list[Any] = []
        self.install(module)

    # -- Installation ----------------------------------------------------------------------------------------------

    def install(self, module: nn.Module) -> None:
        """Put the hooks in, unless they are."""
        self._handles = self._handles or self._hooks_of(module)

    def _hooks_of(self, module: nn.Module) -> list[Any]:
        handles: list[Any] = []

        def hook(target: nn.Module, unit: Unit) -> None:
            before = _ModuleHook(lambda _, args, kwargs, unit=unit: self._before_forward(unit, args, kwargs))
            after = _ModuleHook(lambda _, args, kwargs, output, unit=unit: self._after_forward(unit, output))
            handles.append(target.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            handles.append(target.register_forward_hook(after, with_kwargs=True, always_call=True))

        hook(module, self._root)
        for unit in self._units[1:]:
            hook(unit.module, unit)
        for target, submodule in submodules_of(module, self._units) if self._shards else []:
            enter = _SubmoduleHook(lambda _, args, at=submodule: self._before_submodule(at))
            leave = _SubmoduleHook(lambda _, args, output, at=submodule: self._after_submodule(at))
            handles.append(target.register_forward_pre_hook(enter, prepend=True))
            handles.append(target.register_forward_hook(leave, always_call=True))
        for unit in self._units if self._shards else []:
            watch = _ModuleHook(lambda _, args, output, unit=unit: self._watch_outputs(unit, output))
            handles += [watched.register_forward_hook(watch) for watched in unit.watched]
        for unit in self._units:
            for place, buffer in enumerate(unit.buffers):
                if not _may_have_gradients(buffer.kind.compute):
                    continue
                for index, param in enumerate(buffer.params):
                    handles.append(on_accumulated(param, *self._takers(unit, place, index)))
        for child in module.modules():
            if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and self._computes_lower(child.weight):
                handles.append(child.register_forward_hook(_ModuleHook(embed_in_fp32), with_kwargs=True))
        return handles

    def _computes_lower(self, param: torch.Tensor) -> bool:
        return any(
            param is candidate and buffer.kind.compute != buffer.kind.original
            for unit in self._units
            for buffer in unit.buffers
            for candidate in buffer.params
        )

    def _takers(self, unit: Unit, place: int, index: int) -> tuple[Callable[[nn.Parameter], None], ...]:
        hooks, number = weakref.ref(self), unit.index  # the hooks live in C++, where cycles are not collected

        def show(param: nn.Parameter) -> None:
            alive = hooks()
            if alive is not None:
                alive._before_users[param] = alive._show_gradient(alive._units[number], place, index, param)

        def take(param: nn.Parameter) -> None:
            alive = hooks()
            if alive is not None:
                alive._take_gradient(alive._units[number], place, index, param)

        return show, take

    def remove(self) -> None:
        """Take all hooks out."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # -- Scopes ----------------------------------------------------------------------------------------------------

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Run a step of the program: the root unit is whole, and the step is one pass per direction."""
        self.recover()
        depth, uses = self._depth, self._root.uses
        try:
            self._enter_scope(name, with_root=True)
            yield
            self._leave_scope(with_root=True)
        except BaseException as error:
            self._depth = depth
            self._root.end_uses(above=uses)
            if depth == 0:
                self._abandon()
            explain_transform(error)
            self._explain_dtypes(error)
            raise

    @contextmanager
    def boundary(self) -> Iterator[None]:
        """Run something that every rank reaches, between two passes. Collective inside a scope."""
        self.recover()
        was_in_pass = self._order.in_pass
        self._order.finish()
        try:
            yield
        finally:
            if was_in_pass:
                self._begin_pass("forward")

    def around_collective(self) -> AbstractContextManager[None]:
        """Return a context for a collective of the program's, which every rank reaches. Collective inside a scope.

        Without it ranks that have used other units would wait in different collectives.
        """
        if not (self._shards and self._order.in_pass) or self._order.is_suspended or _in_backward():
            return nullcontext()
        return self.boundary()

    def begin_step(self) -> None:
        """Begin a step of an optimizer: nothing that is gathered ahead may outlive it. Collective inside a scope."""
        self.recover()
        if self._shards and self._depth > 0 and not self._order.is_suspended:
            with self.boundary():
                pass

    def end_step(self, units: Sequence[Unit]) -> None:
        """Let no whole unit show the values of before a step. Collective for those in use: all ranks."""
        for unit in units:
            if unit.is_sharded_between_uses and not unit.needs_gather:
                unit.reshard()
                if unit.is_busy:
                    self._order.request(unit)

    @property
    def in_scope(self) -> bool:
        """Whether parameters may be gathered on demand."""
        return self._depth > 0 or _in_backward()

    def _enter_scope(self, name: str, *, with_root: bool, in_original: bool = False) -> None:
        self._close_windows()
        if self._depth == 0:
            self._check_module()
            self._choose_dtype(in_original)
        self._depth += 1
        if self._depth == 1:
            self._scope = f"{name}:{'train' if torch.is_grad_enabled() else 'eval'}"
            self._ordinal = 0
            if with_root and not self._order.is_suspended and (self._opened_by is None or self.forwards_are_steps):
                self._broadcast_buffers(torch.is_grad_enabled() and self.is_last_microbatch)
            self._begin_pass("forward")
            if (self._shards or in_original) and torch.is_grad_enabled() and _may_keep_handles():
                self._look_for_outer_hooks()
                self._net = saved_tensors_hooks(self._pack, self._unpack)
                self._net.__enter__()
        if with_root:
            self._use(self._root)
            # The root's parameters are used by code, not by a forward of the root: their gradients may come last.
            self._root.note_forward(builds_graph=torch.is_grad_enabled())

    def _leave_scope(self, *, with_root: bool) -> None:
        self.recover()
        if with_root:
            self._unuse(self._root)
        if self._depth > 1:
            self._depth -= 1
            return
        self._end_calls()
        for unit in self._units:
            if unit.end_touch():
                self._give_back(unit)
        self._order.finish()
        self._cast_net_off()
        self._depth = 0
        self._opened_by = None
        self._holds_all_below = False
        self._end_computing()

    def _end_calls(self) -> None:
        """End the record of running forwards: an error may have ended some without notice."""
        self._open_calls.clear()
        for unit in self._units:
            if unit.end_uses():
                self._give_back(unit)

    # -- After an error --------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Abandon a backward or a scope that an error has ended without notice. No collective."""
        if _in_backward():
            return
        if self._has_nested_end and not self._is_end_known:
            self._end_backward()  # nothing behind the nested backward was run
        elif self._armed and not self._explicit:
            self._abandon_backward()
        if self._opened_by is not None and not _is_running(self._opened_by):
            self._abandon()

    def _abandon(self) -> None:
        """Abandon an interrupted step. No collective."""
        self._cast_net_off()
        self._depth = 0
        self._opened_by = None
        self._holds_all_below = False
        self._abandon_backward()
        self._order.abandon()
        for unit in self._units:
            unit.abandon_uses()
            for buffer in unit.buffers:
                buffer.gradients.mark_reduced()
        self._open_calls.clear()
        self._give_back_idle()
        self._end_computing()

    def _abandon_backward(self) -> None:
        """Abandon an interrupted backward. No collective."""
        if not self._armed:
            return
        if self._has_own_pass:
            self._order.abandon()
        for param in self._before_users:  # a hook of the program has failed, and nobody took the gradient
            set_raw_grad(param, None)
        if self._reduces:
            self._reducer.abandon()
        self._forget_backward()
        self._give_back_idle()
        if self._depth > 0 and not self._order.in_pass:
            self._begin_pass("forward")

    def _give_back_idle(self) -> None:
        for unit in self._units:
            if unit.is_whole:
                self._give_back(unit)

    def _cast_net_off(self) -> None:
        if self._net is not None:
            self._net.__exit__(None, None, None)
            self._net = None

    def _begin_pass(self, direction: Literal["forward", "backward", "backward of inputs"]) -> None:
        is_stale = any(unit.state is UnitState.STALE for unit in self._units)
        is_suspended = self._order.is_suspended or (direction == "forward" and self._holds_all_below)
        if direction != "backward" and (is_suspended or not (self._shards or is_stale)):
            return
        in_original = self._in_original if direction == "forward" else self._graphs_in_original
        kind = (self._scope, self._ordinal, direction, is_stale, in_original)
        self._order.begin(kind, gathers=self._shards or is_stale, in_original=in_original)
        self._ordinal += 1

    # -- Two dtypes ------------------------------------------------------------------------------------------------

    @property
    def _is_exact(self) -> bool:
        """Whether a forward outside a step uses parameters in their own dtype."""
        return self._has_lowered and not torch.is_autocast_enabled(self._device_type)

    def _choose_dtype(self, in_original: bool) -> None:
        """Let parameters compute in 16 bits, or in their own dtype; see Note [Two dtypes of a parameter]."""
        self._in_original = in_original
        if torch.is_grad_enabled():
            self._has_lowered_graphs |= not in_original
            self._graphs_in_original = not self._has_lowered_graphs
        if in_original:
            self._end_computing()
        else:
            self._begin_computing()

    def _begin_computing(self) -> None:
        for unit in self._lowered:
            unit.begin_computing()

    def _end_computing(self) -> None:
        for unit in self._lowered:
            unit.end_computing()

    def _begin_computing_in_backward(self) -> None:
        """Show parameters as in the forwards whose graphs run; ``_forget_backward`` ends it."""
        if self._depth == 0 and not self._graphs_in_original:
            self._begin_computing()

    def _watch_graph(self, output: Any) -> None:
        """Have parameters as they compute when the backward of a forward begins, in a plain loop below stage 3."""
        for node in {tensor.grad_fn for tensor in _tensors(output)}:
            if node is not None:
                node.register_prehook(self._begin_watched_backward)

    def _begin_watched_backward(self, _: Any) -> None:
        self._begin_computing_in_backward()
        torch.autograd.Variable._execution_engine.queue_callback(self._end_watched_backward)

    def _end_watched_backward(self) -> None:
        """End one that has taken no gradient, as ``autograd.grad`` does."""
        if self._depth == 0 and not self._armed:
            self._end_computing()

    def _explain_dtypes(self, error: BaseException) -> None:
        """Raise an error with the remedy if a layer computes in 16 bits and its input does not.

        Raises:
            RuntimeError: That may be so.
        """
        if self._has_lowered and isinstance(error, RuntimeError) and _is_of_dtypes(str(error)):
            raise RuntimeError(
                f"{error}. In a step, and in the backward of a forward under autocast, the weights of linear layers,"
                " convolutions and attention are in 16 bits. Where autocast is off there (`torch.autocast(...,"
                " enabled=False)`), cast the input to `layer.weight.dtype`, or give the layer a class of its own with"
                " its own `forward`, whose weights stay in fp32."
            ) from error

    def compute_in_backward(self, unit: Unit) -> bool:
        """Show a unit's parameters as they compute if a backward runs; say whether one does."""
        if not _in_backward():
            return False
        unit.begin_computing()
        return True

    # -- Forward ---------------------------------------------------------------------------------------------------

    def _before_forward(self, unit: Unit, args: Any, kwargs: Any) -> None:
        if self.is_asleep:
            return
        in_backward = _in_backward()
        if not in_backward:
            self.recover()
        opens_scope = self._depth == 0 and not in_backward
        self._open_calls.append(_Call(unit, opens_scope, sys.exc_info()[1]))
        if opens_scope:
            self._opened_by = _opener()
            self._holds_all_below = self._are_held(self._below[unit.index])
            self._enter_scope(unit.name, with_root=unit is self._root, in_original=self._is_exact)
        elif not in_backward:
            self._close_windows()
        else:
            self._begin_computing_in_backward()
        self._use(unit)
        for buffer in unit.buffers:
            buffer.gradients.mark_plain()
        if self._shards and torch.is_grad_enabled() and _has_frozen(unit):
            awaited = self._watch_inputs(unit, (args, kwargs))
            self._open_calls[-1] = self._open_calls[-1]._replace(awaited=awaited)
        if in_backward:
            return
        # Inside a function of the program without gradients: it is computed again with gradients.
        unit.note_forward(builds_graph=torch.is_grad_enabled() or _calling(_FORWARD_CODES) is not None)

    def _after_forward(self, unit: Unit, output: Any) -> None:
        call = self._take_call(unit) if not self.is_asleep else None
        if call is None:
            return
        error = sys.exc_info()[1]
        is_raising = error is not None and error is not call.handled
        try:
            if is_raising and call.opens_scope:
                self._abandon()
                return
            for buffer in unit.buffers:
                buffer.gradients.mark_reduced()
            self._unuse(unit)
            if is_raising:
                return
            if self._shards and torch.is_grad_enabled():
                self._watch_outputs(unit, output, call.awaited)
            elif self._lowered and torch.is_grad_enabled() and (call.opens_scope or unit is self._root):
                self._watch_graph(output)
            if call.opens_scope:
                self._leave_scope(with_root=unit is self._root)
        except BaseException:
            if call.opens_scope:
                self._abandon()
            raise

    def _take_call(self, unit: Unit) -> _Call | None:
        """Return the last call of a unit that is running; None if a hook before ours has failed."""
        if not any(call.unit is unit for call in self._open_calls):
            return None
        while (call := self._open_calls.pop()).unit is not unit:  # an error has ended it without notice
            self._unuse(call.unit)
        return call

    def _use(self, unit: Unit) -> None:
        unit.enter()
        self._make_whole(unit)

    def _unuse(self, unit: Unit) -> None:
        unit.leave()
        if not _in_backward():
            self._give_back(unit)

    def _give_back(self, unit: Unit) -> None:
        if not unit.is_busy and not self._keeps_units:
            unit.reshard()

    def _make_whole(self, unit: Unit) -> None:
        if unit.is_sharded_between_uses or not unit.is_whole:
            with _outside_of_transforms():
                if _in_backward():
                    self.arm()
                self._order.request(unit)
        if self._in_original and unit.is_lowered and not _in_backward():
            self._show_original(unit)

    def touch(self, unit: Unit) -> bool:
        """Gather a unit of which a released parameter is used, if a step is running; say whether it is whole."""
        if not self.in_scope:
            return False
        unit.touch()
        self._make_whole(unit)
        return True

    @contextmanager
    def keeping_graphs(self) -> Iterator[None]:
        """Let graphs keep the values that parameters show now: their ``data`` is going to be another."""
        if not (torch.is_grad_enabled() and _may_keep_handles()):
            yield
            return
        if self._depth == 0:
            self._look_for_outer_hooks()
        with saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _look_for_outer_hooks(self) -> None:
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if outer is None or outer[0] != self._pack:
            self._outer_hooks = outer

    # -- Forwards of modules that are no unit ----------------------------------------------------------------------

    def _before_submodule(self, submodule: Submodule) -> None:
        if (self._depth and self._opened_by is None) or self.is_asleep or _in_backward():
            return
        self.recover()
        if self._depth:
            return
        self._opened_by = _opener(submodule)
        self._holds_all_below = self._are_held(submodule.units)
        self._enter_scope(submodule.name, with_root=False, in_original=self._is_exact)
        for unit in submodule.around:
            self._use(unit)
            unit.note_forward(builds_graph=torch.is_grad_enabled())

    def _after_submodule(self, submodule: Submodule) -> None:
        opened = self._opened_by
        if opened is None or opened.submodule is not submodule:
            return
        if opened.frame is not _frame_of_forward():  # it calls itself
            return
        error = sys.exc_info()[1]
        if error is not None and error is not opened.handled:
            self._abandon()
            return
        try:
            self._leave_scope(with_root=False)
        except BaseException:
            self._abandon()
            raise

    @staticmethod
    def _are_held(units: Sequence[Unit]) -> bool:
        return all(unit.holds for unit in units)

    # -- Saved tensors ---------------------------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> Any:
        has_storage = tensor.layout is torch.strided and not is_functorch_wrapped_tensor(tensor)
        place = self._by_storage.get(tensor.untyped_storage()._cdata) if has_storage else None
        if place is not None:
            return _KeptWeight(tensor.detach(), tensor._version, *place)
        if self._outer_hooks is not None:
            pack, unpack = self._outer_hooks
            return _Outer(pack(tensor), unpack)
        return _Kept(tensor.detach(), tensor._version)

    def _unpack(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, _Outer):
            return saved.unpack(saved.packed)
        kept: _Kept | _KeptWeight = saved
        tensor = kept.tensor
        if isinstance(kept, _KeptWeight):
            if not (kept.unit.holds and kept.unit.is_whole):
                self._note_graph()
                self._make_whole(kept.unit)
            kept.buffer.fill_computed()
        if torch.is_grad_enabled():
            self._keep_next_graph()
        if tensor._version != kept.version:  # autograd leaves the check to the hook that packs
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation:"
                f" [{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version"
                f" {kept.version} instead. Change a copy of it, or write to it before anything uses it; step an"
                " optimizer behind the backward of every loss that its parameters are in. With"
                " `Trainer(detect_anomaly=True)` the error shows the operation that needed it."
            )
        return tensor

    def _keep_next_graph(self) -> None:
        """Let the graph that a backward outside of a scope builds keep handles; autograd ends it with the node."""
        if self._depth or not _in_backward():
            return
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
            self._outer_hooks = None
            torch._C._autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)

    # -- Backward --------------------------------------------------------------------------------------------------

    def _watch_outputs(self, unit: Unit, output: Any, awaited: object | None = None) -> None:
        if not (unit.is_sharded_between_uses and _may_keep_handles()):
            return

        def begins(_: Any) -> None:
            self._note_graph()
            if awaited is not None:
                unit.await_inputs(awaited)
            self._make_whole(unit)

        for node in {tensor.grad_fn for tensor in _tensors(output)}:
            if node is not None:
                node.register_prehook(begins)

    def _watch_inputs(self, unit: Unit, inputs: Any) -> object:
        """Keep a unit in backwards that come to its outputs, until its inputs have their gradients, or to the end.

        Returns:
            The object that stands for the call in ``Unit.await_inputs``.
        """
        awaited, is_counted = object(), not _in_backward()
        # A leaf is an input of a reentrant recomputation. `autograd.grad` by a leaf that has such a hook would fail.
        tensors = [one for one in _tensors(inputs) if one.grad_fn is not None or (one.requires_grad and not is_counted)]
        if is_counted:
            unit.expect_inputs()

        def passed(_: Any) -> None:
            unit.pass_inputs(awaited, was_expected=is_counted)
            self._give_back_if_done(unit)

        if tensors:
            register_multi_grad_hook(tensors, passed, mode="all")
        return awaited

    @contextmanager
    def backward_scope(self) -> Iterator[None]:
        """Run a backward whose reductions every rank makes, also one that has nothing to reduce."""
        self.recover()
        self._explicit = True
        try:
            self.arm()
            yield
            self._end_backward()
        except BaseException as error:
            self._armed = True  # also where it could not begin
            self._abandon_backward()
            self._explain_dtypes(error)
            raise

    def arm(self) -> None:
        """Begin a backward, once."""
        if self._armed:
            return
        self._armed = True
        self._is_end_known = self._has_nested_end = False
        self._reduces = False
        self._runs_whole_graph = self._explicit or _runs_whole_graph()
        self._has_own_pass = self._runs_whole_graph or not self._order.in_pass
        self._close_windows()
        self._begin_computing_in_backward()
        if self._has_own_pass:
            self._order.finish()
        if self._is_reducing:
            self._reduces = True
            self._reducer.begin()
            if self._has_own_pass:
                self._begin_pass("backward" if self._runs_whole_graph else "backward of inputs")
        if not self._explicit:
            self._await_end()

    def _await_end(self) -> None:
        """End this backward when PyTorch's ends; see Note [Backwards inside a backward]."""
        function = _enclosing_function()
        if function is None:
            self._is_end_known = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            return
        hooks = weakref.ref(self)

        def behind(_: Any) -> None:
            alive = hooks()
            if alive is not None and alive._armed and not (alive._explicit or alive._is_end_known):
                alive._await_end()

        for node, _ in function.next_functions:
            if node is not None:
                node.register_prehook(behind)
        torch.autograd.Variable._execution_engine.queue_callback(self._note_nested_end)

    def _note_nested_end(self) -> None:
        self._has_nested_end = self._armed

    @property
    def _is_reducing(self) -> bool:
        if self.has_more_backwards and (self.keeps_gradients or not self._shards):
            return False
        return self._reduces_each_backward or self.is_last_microbatch

    def _note_graph(self) -> None:
        if torch.is_grad_enabled():  # inside a backward: it builds a graph
            self._keeps_units = True

    def _take_gradient(self, unit: Unit, place: int, index: int, param: nn.Parameter) -> None:
        self._note_graph()
        self.arm()
        left = unit.buffers[place].gradients.left
        if self._keeps_units:
            left.add(index)
            self._before_users.pop(param, None)
            return
        grad = raw_grad(param)
        if self._before_users:
            grad = self._behind_users(unit.buffers[place], index, param, grad)
        if grad is None:
            return
        left.discard(index)
        self._took_gradient = True
        self._reducer.before_gradient(unit)
        unit.accumulate(place, index, grad)
        set_raw_grad(param, None)
        self._before_users.pop(param, None)
        if self._is_reducing:
            self._give_back_if_done(unit)
            if unit.is_complete and self._runs_whole_graph:
                self._order.completed(unit)

    def _show_gradient(self, unit: Unit, place: int, index: int, param: nn.Parameter) -> _BeforeUsers:
        """Show hooks of the program the sum over micro-batches; see Note [Hooks of the program]."""
        grad = raw_grad(param)
        total = None
        if grad is not None and not torch.is_grad_enabled():
            total = unit.buffers[place].gradients.with_sum(index, grad)
        if total is None:
            return _BeforeUsers(param._version, None, None, 0)
        set_raw_grad(param, total)
        return _BeforeUsers(param._version, grad, total, total._version)

    def _behind_users(
        self, buffer: FlatBuffer, index: int, param: nn.Parameter, grad: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Return the gradient to add to the local sum, after hooks of the program may have changed it.

        Raises:
            RuntimeError: One of them wrote the parameter, as an optimizer in the backward does.
        """
        before = self._before_users.get(param)
        if before is None:
            return grad
        if param._version != before.version:
            set_raw_grad(param, None)
            raise RuntimeError(
                f"A hook of `register_post_accumulate_grad_hook` has written `{buffer.layout.slots[index].name}` in the"
                " backward (an optimizer in the backward?), where its gradient is that of this rank alone. Step behind"
                " the backward, or use `step='backward'`, which steps each unit when its gradients are averaged."
            )
        if before.shown is None:
            return grad
        if grad is before.shown and grad._version == before.shown_version:
            return before.grad
        buffer.gradients.drop_sum(index)
        return grad

    def _give_back_if_done(self, unit: Unit) -> None:
        if self._armed and unit.is_passed:
            self._give_back(unit)

    def _end_backward(self) -> None:
        if not self._armed:
            return
        if not self._keeps_units:
            for unit in self._units:
                unit.forget_inputs()
                if not unit.uses:
                    if self._depth == 0:
                        unit.end_touch()
                    self._give_back(unit)
        reduces = self._is_reducing and (self._took_gradient or self._explicit) and not self._keeps_units
        ends_pass = reduces or self._has_own_pass
        if reduces and not self._order.in_pass:  # `backward(inputs=...)` below stage 3
            self._order.begin((self._scope, self._ordinal, "backward of inputs"), gathers=False)
        if ends_pass:
            self._order.finish(reduces=reduces, has_more_backwards=self.has_more_backwards)
        if not reduces:
            self._reducer.cancel()
            for buffer in [buffer for unit in self._units for buffer in unit.buffers]:
                buffer.gradients.mark_reduced()
        self._forget_backward()
        if self._depth > 0 and ends_pass:
            self._begin_pass("forward")

    def _forget_backward(self) -> None:
        self._before_users.clear()
        self._armed = self._explicit = self._took_gradient = self._keeps_units = False
        self._is_end_known = self._has_nested_end = False
        if self._depth == 0:
            self._has_lowered_graphs = False
            self._end_computing()


def _rename(places: dict[int, Any], old: int, new: int) -> None:
    places[new] = places.pop(old)


def _may_have_gradients(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _may_keep_handles() -> bool:
    """Say whether saved tensors may have hooks; a graph without them keeps the memory of the weights in it."""
    return torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is None


def _outside_of_transforms() -> AbstractContextManager[Any]:
    """Keep the engine's own operations out of a transform of ``torch.func`` that is running."""
    return _NOTHING if peek_interpreter_stack() is None else temporarily_clear_interpreter_stack()


def _is_of_dtypes(message: str) -> bool:
    """Say whether PyTorch has refused operands of two dtypes."""
    return "same dtype" in message or ("weight type" in message and "should be the same" in message)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _frame_of_forward() -> FrameType | None:
    """Return the call of a module that has called a hook."""
    return _calling((nn.Module._call_impl.__code__,))


def _opener(submodule: Submodule | None = None) -> _Opener | None:
    frame = _frame_of_forward()
    return None if frame is None else _Opener(frame, threading.get_ident(), submodule, sys.exc_info()[1])


def _is_running(call: _Opener) -> bool:
    """Say whether a call is still going on; of other threads it is not known."""
    caller: FrameType | None = sys._getframe(1)
    while caller is not None and caller is not call.frame:
        caller = caller.f_back
    return caller is not None or call.thread != threading.get_ident()


def _runs_whole_graph() -> bool:
    """Say whether the backward that is running is one of all tensors, not of some."""
    return bool(torch.autograd._is_checkpoint_valid())  # type: ignore[no-untyped-call]


def _enclosing_function() -> Any:
    """Return the node of the innermost Python function whose backward has begun the one that is running, if any."""
    frame = _calling(_BACKWARD_CODES)
    return None if frame is None else frame.f_locals["self"]


def _calling(codes: Collection[CodeType]) -> FrameType | None:
    """Return the innermost call that is running of some functions, given by their code."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame


def _has_frozen(unit: Unit) -> bool:
    return any(not param.requires_grad for buffer in unit.buffers for param in buffer.params)


def _tensors(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield the tensors in anything a forward may take or return."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth > 6 or value is None or isinstance(value, (int, float, str, bool, nn.Module)):
        return
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item, depth + 1)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from _tensors(item, depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclasses.fields(value):
            yield from _tensors(getattr(value, item.name, None), depth + 1)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        for item in list(vars(value).values()):
            yield from _tensors(item, depth + 1)
