"""The backward that is running: when it begins and ends, whether it reduces.

Note [Backward that builds a graph]
    With ``create_graph`` the new graph needs the parameters again, so units stay whole and nothing is reduced; the next
    backward without it cleans up.

Note [Backwards that reduce]
    ``loss.backward()`` ends the pass before it, and its own pass may reduce from its beginning: a rank that comes to a
    reduction of the list without a gradient takes part with zeros. So nothing of the kind may stand in the list of
    ``torch.autograd.grad`` (a penalty, a slope of an input). It belongs to the pass in which it is called, which
    gathers only; ranks may differ in whether they call it. PyTorch tells the two apart, because reentrant
    checkpointing needs a backward that runs the whole graph. ``backward(inputs=...)`` does not run it and may bring
    gradients nevertheless; they are reduced at its end.

    A pipeline at stage 3 may sum the gradients of its micro-batches, and reduce them in the last backward. The others
    gather all the same, so each is a pass without reductions.

    At the beginning it cannot be known whether ``backward(create_graph=True)`` builds a graph, or whether the loss of a
    rank without parameters belongs to such a backward. If so, reductions that were started because the list says so
    were of zeros on all ranks, for a rank that takes a gradient knows better. They are finished and dropped.

Note [Backwards inside a backward]
    Reentrant checkpointing, and functions of users that do the same, run a backward in the backward, whose end is not
    the end of ours. A nested one is told by the call of a Python function's backward in the stack; the nodes behind
    that function run in the backward around it, where they ask again. All ranks make the same calls.

Note [Gradients used inside explicit]
    A program whose code runs in ``explicit``, such as ``LightningModule.backward``, may call ``loss.backward()`` any
    number of times, and their gradients are reduced together at the end. If it uses a gradient in between (reads,
    assigns or drops it, clips, steps), the backward ends there: it gets the average, and what follows is as in a plain
    loop, where each ``loss.backward()`` ends itself. A rank that reads nothing ends at the end of ``explicit``, or at
    the next ``backward()`` of the loss, where every rank ends the one before: it cannot know whether others have used
    gradients. ``watch_loss`` tells that such a backward begins, also to a rank whose loss has no parameters.

Note [Gradients on several streams]
    PyTorch puts a gradient down in the stream of the parameter's first use in the forward. A program may compute parts
    of a unit in streams of its own; their gradients are summed and reduced in one, that of the program around the
    backward, which waits for theirs (``Reducer.stream``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_zero.engine.buffers.parameter import raw_grad, set_raw_grad
from lightning_zero.engine.runtime.accumulation_hooks import ShownSums
from lightning_zero.engine.runtime.call_stack import enclosing_function, in_backward, runs_whole_graph
from lightning_zero.engine.runtime.compute_dtypes import ComputeDtypes
from lightning_zero.engine.runtime.order import PassOrder
from lightning_zero.engine.runtime.passes import Passes
from lightning_zero.engine.runtime.reduction import Reducer
from lightning_zero.engine.units.unit import Unit
from lightning_zero.microbatch import Microbatch
from lightning_zero.sharding import ShardingScope

__all__ = ["Backward"]


@dataclass
class _Running:
    """One backward."""

    is_explicit: bool  # `Backward.explicit` ends it, not autograd
    runs_whole_graph: bool  # else it is for some tensors only, as `autograd.grad` is
    has_own_pass: bool
    is_end_known: bool = False  # PyTorch calls us at the end
    has_nested_end: bool = False  # one inside it has ended without an error
    shows_gradients: bool = False  # code of the program is around it
    is_ending: bool = False
    task: int = -1  # the last backward of PyTorch's that builds a graph or does not
    ran_in: int = -1  # the last backward of PyTorch's that has brought gradients, here or on other ranks
    reduces: bool = False  # unless it brings nothing
    keeps_units: bool = False  # it builds a graph

    @property
    def has_run(self) -> bool:
        """Whether there are gradients to reduce, here or on other ranks."""
        return self.ran_in != -1


class Backward:
    """Begins and ends backwards, takes their gradients.

    Args:
        units: All units.
        passes: Of the scope that is open, or was.
        order: Starts reductions in one order on all ranks.
        reducer: Finishes the reductions.
        dtypes: In which parameters compute.
        close_windows: Called when a backward begins.
        reduces_each: Whether gradients are reduced in every backward (stages 2 and 3).
    """

    def __init__(
        self,
        units: Sequence[Unit],
        passes: Passes,
        *,
        order: PassOrder,
        reducer: Reducer,
        dtypes: ComputeDtypes,
        close_windows: Callable[[], None],
        reduces_each: bool,
    ) -> None:
        self._units = units
        self._order = order
        self._reducer = reducer
        self._passes = passes
        self._dtypes = dtypes
        self._close_windows = close_windows
        self._reduces_each = reduces_each
        self._shown = ShownSums()
        self._running: _Running | None = None  # the one that is running
        self.microbatch = Microbatch.LAST  # set by the engine
        self.loss_scale: float | None = None  # of the loss; None: the program has not told

    # -- Begin -----------------------------------------------------------------------------------------------------

    @property
    def keeps_units(self) -> bool:
        """Whether the backward that is running builds a graph, which needs units again."""
        return self._running is not None and self._running.keeps_units

    @contextmanager
    def explicit(self, *, shows_gradients: bool) -> Iterator[None]:
        """Run a backward whose reductions every rank makes, also one that has nothing to reduce.

        Args:
            shows_gradients: Code of the program runs in it, which may use gradients.
        """
        try:
            self._reducer.stream.move_here()
            running = self.arm(is_explicit=True)
            running.is_explicit, running.shows_gradients = True, shows_gradients
            yield
            self.end()
        except BaseException:
            self.abandon()
            raise

    def arm(self, *, is_explicit: bool = False) -> _Running:
        """Begin a backward, once."""
        if self._running is None:
            is_whole = is_explicit or runs_whole_graph()
            self._running = _Running(is_explicit, is_whole, has_own_pass=is_whole or not self._order.in_pass)
            self._begin(self._running)
        return self._running

    def _begin(self, running: _Running) -> None:
        self._close_windows()
        self.begin_computing()
        for buffer in [buffer for unit in self._units for buffer in unit.buffers]:
            buffer.gradients.scales.begin(self.loss_scale)
            buffer.gradients.note_assigned()
        if running.has_own_pass:
            self._order.finish()
        if self._is_reducing:
            running.reduces = True
            is_last = self.microbatch is Microbatch.LAST
            self._reducer.begin(ShardingScope.WORLD if is_last else ShardingScope.NODE)
            if running.has_own_pass:
                self._passes.begin("backward" if running.runs_whole_graph else "backward of inputs")
        elif running.is_explicit and self._order.gathers:
            self._passes.begin("backward without reductions")
        if not running.is_explicit:
            self._await_end(running)

    def meet(self) -> None:
        """Start the collectives before one of the model's own; see the note in ``order``. Collective: all ranks.

        In a backward this may be the first call of a rank, where no gradient has come yet.
        """
        if in_backward():
            self.arm()
        self._order.meet()

    def begin_computing(self) -> None:
        """Show parameters as in the forwards whose graphs run; the end of the backward ends it."""
        if not self._passes.in_scope:
            self._dtypes.begin_backward()

    def watch_loss(self, loss: torch.Tensor) -> None:
        """Begin each backward of a loss before its first node runs, on every rank alike; see the last note."""
        if loss.requires_grad:
            loss.register_hook(_weakly(self._begin_of_loss))  # type: ignore[no-untyped-call]

    def _begin_of_loss(self, _: Any) -> None:
        running, task = self._running, torch._C._current_graph_task_id()
        if not runs_whole_graph():
            self.begin_watched(None)
            return
        if running is not None and running.is_explicit and running.has_run and running.ran_in != task:
            self.end()
        self._close_windows()
        running = self.arm()
        self._note_task(running)
        if not running.keeps_units:
            self._note_run(running)

    def watch_node(self, node: Any) -> None:
        """Call ``begin_watched`` before a node of a graph runs."""
        node.register_prehook(_weakly(self.begin_watched))

    def begin_watched(self, _: Any) -> None:
        """Show parameters as they compute in a backward that may take no gradient, as ``autograd.grad`` does.

        Its nodes read parameters that are no segments: the step window of an earlier backward ends.
        """
        self._close_windows()
        self.begin_computing()
        torch.autograd.Variable._execution_engine.queue_callback(self._end_watched)

    def _end_watched(self) -> None:
        if not self._passes.in_scope and self._running is None:
            self._dtypes.end_computing()

    def _await_end(self, running: _Running) -> None:
        """End this backward when PyTorch's ends; see Note [Backwards inside a backward]."""
        function = enclosing_function()
        if function is None:
            running.is_end_known = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end)
            return
        backward = weakref.ref(self)

        def behind(_: Any) -> None:
            alive = backward()
            current = alive and alive._running
            if alive and current and not (current.is_explicit or current.is_end_known):
                alive._await_end(current)

        for node, _ in function.next_functions:
            if node is not None:
                node.register_prehook(behind)
        torch.autograd.Variable._execution_engine.queue_callback(self._note_nested_end)

    def _note_nested_end(self) -> None:
        if self._running is not None:
            self._running.has_nested_end = True

    @property
    def _is_reducing(self) -> bool:
        if self.microbatch is Microbatch.IN_FLIGHT_SUMMED:
            return False
        if self.microbatch is Microbatch.IN_FLIGHT:
            return self._reduces_each and self._order.gathers
        return self._reduces_each or self.microbatch is Microbatch.LAST

    # -- Gradients -------------------------------------------------------------------------------------------------

    def note_graph(self) -> None:
        """Keep units whole if the backward that is running builds a graph."""
        if self._running is not None and torch.is_grad_enabled() and in_backward():
            self._note_task(self._running)

    def _note_task(self, running: _Running) -> None:
        """Note whether PyTorch's backward builds a graph; in ``explicit`` the next one may not."""
        task = torch._C._current_graph_task_id()
        if running.is_explicit and running.task != task and enclosing_function() is None:
            running.task, running.keeps_units = task, False
        running.keeps_units |= torch.is_grad_enabled()

    def takers(self, unit: Unit, place: int, index: int) -> tuple[Callable[[nn.Parameter], None], ...]:
        """Return the hooks of a parameter on accumulated gradients: before those of the program, and behind them."""
        backward, number = weakref.ref(self), unit.index  # the hooks live in C++, where cycles are not collected

        def show(param: nn.Parameter) -> None:
            alive = backward()
            if alive is not None:
                alive._reducer.stream.wait()
                alive._shown.show(alive._units[number].buffers[place], index, param)

        def take(param: nn.Parameter) -> None:
            alive = backward()
            if alive is not None:
                alive._reducer.stream.run(alive._take_gradient, alive._units[number], place, index, param)

        return show, take

    def _take_gradient(self, unit: Unit, place: int, index: int, param: nn.Parameter) -> torch.Tensor | None:
        """Take a gradient; return it, because its own stream may have its memory only behind this."""
        if self._running is None:
            self.arm()
            unit.buffers[place].gradients.note_arrived(index)
        running = self.arm()
        self._note_task(running)
        left = unit.buffers[place].gradients.left
        if running.keeps_units:
            left.add(index)
            self._shown.leave(param)
            return None
        grad = raw_grad(param)
        if self._shown:
            grad = self._shown.taken(unit.buffers[place], index, param, grad)
        if grad is None:
            return None
        left.discard(index)
        self._note_run(running)
        self._reducer.before_gradient(unit)
        unit.accumulate(place, index, grad)
        set_raw_grad(param, None)
        self._shown.pop(param, None)
        if self._is_reducing:
            self.give_back_if_passed(unit)
            if unit.is_complete and running.runs_whole_graph:
                self._order.completed(unit)
        return grad

    def _note_run(self, running: _Running) -> None:
        """Let uses of gradients behind PyTorch's backward find them; see Note [Gradients used inside explicit]."""
        task = torch._C._current_graph_task_id()
        is_new, running.ran_in = running.ran_in != task, task
        if running.shows_gradients and is_new:
            torch.autograd.Variable._execution_engine.queue_callback(self._mark_expected)

    def _mark_expected(self) -> None:
        for unit in self._units:
            for buffer in unit.buffers:
                buffer.gradients.mark_expected()

    def give_back_if_passed(self, unit: Unit) -> None:
        """Give a unit back whose gradients, and those of its inputs that it is needed for, have arrived."""
        if self._running is not None and unit.is_passed and not self._running.keeps_units:
            unit.give_back()

    # -- End -------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """End the backward: reduce the units that are left. Collective: all ranks."""
        running = self._running
        if running is None:
            return
        running.is_ending = True
        self._reducer.stream.move_here()
        if not running.keeps_units:
            self._give_units_back()
        reduces = self._is_reducing and (running.has_run or running.is_explicit) and not running.keeps_units
        ends_pass = reduces or running.has_own_pass
        if reduces and not self._order.in_pass:  # `backward(inputs=...)` below stage 3
            self._passes.begin_reductions()
        if ends_pass:
            self._order.finish(reduces=reduces, has_more_backwards=self.microbatch.has_more_backwards)
        if not reduces:
            self._reducer.cancel()
            for buffer in [buffer for unit in self._units for buffer in unit.buffers]:
                buffer.gradients.mark_reduced()
        self._forget()
        if self._passes.in_scope and ends_pass:
            self._passes.begin("forward")

    def _give_units_back(self) -> None:
        for unit in self._units:
            unit.forget_inputs()
            if not unit.uses:
                if not self._passes.in_scope:
                    unit.end_touch()
                unit.give_back()

    def end_before_use(self) -> None:
        """End an explicit backward whose gradients the program is about to use, inside of it.

        Collective: all ranks, some of them at the end of ``explicit``.
        """
        running = self._running
        if running is not None and running.shows_gradients and running.has_run and not running.is_ending:
            self.end()

    def end_before_forward(self) -> None:
        """End an explicit backward behind which the program runs a forward, inside of it. Collective likewise.

        Raises:
            RuntimeError: The forward opens a scope, and comes before the backward.
        """
        self.end_before_use()
        running = self._running
        if running is not None and running.shows_gradients and not (running.is_ending or self._passes.in_scope):
            raise RuntimeError(
                "A forward of the model runs inside of `LightningModule.backward` or `backward_scope`, before the first"
                " backward there: the gathers of both cannot be told apart. Run it in `training_step`, and give its"
                " result to `backward` with the loss."
            )

    def recover(self) -> None:
        """End a backward of which only nested ones have run, abandon one that an error has ended. Outside of it."""
        running = self._running
        if running is None:
            return
        if running.has_nested_end and not running.is_end_known:
            self.end()  # nothing behind the nested backward was run
        elif not running.is_explicit:
            self.abandon()

    def abandon(self) -> None:
        """Abandon an interrupted backward. No collective."""
        running = self._running
        if running is None:
            return
        if running.has_own_pass:
            self._order.abandon()
        self._shown.abandon()
        if running.reduces:
            self._reducer.abandon()
        self._forget()
        for unit in self._units:
            unit.give_back_idle()
        if self._passes.in_scope and not self._order.in_pass:
            self._passes.begin("forward")

    def _forget(self) -> None:
        self._shown.clear()
        self._running = None
        if not self._passes.in_scope:
            self._dtypes.end_backward()


def _weakly(method: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a hook that does not keep its object: hooks live in C++, where cycles are not collected."""
    alive = weakref.WeakMethod(method)

    def call(value: Any) -> None:
        found = alive()
        if found is not None:
            found(value)

    return call
