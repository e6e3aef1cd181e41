"""The engine as a step sees it: scopes, micro-batches, the step window. For the strategy and for pipelines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.comm.communicator import Communicator
from lightning_zero.engine.engine_state import EngineState
from lightning_zero.engine.optim.whole_gradients import Unscaled
from lightning_zero.engine.runtime.accumulation_hooks import has_hooks_of_program
from lightning_zero.engine.runtime.rank_facts import RankFacts
from lightning_zero.microbatch import Microbatch
from lightning_zero.storage.store import Accounts

__all__ = ["StepControl"]


class StepControl:
    """Forwards, backwards and step windows of one engine."""

    def __init__(self, state: EngineState) -> None:
        self._state = state

    @property
    def communicator(self) -> Communicator:
        """The communicator over the ranks that share the parameters."""
        return self._state.communicator

    @property
    def rank_facts(self) -> RankFacts:
        """The options of optimizers and the frozen parameters, which all ranks compare."""
        return self._state.sharded.rank_facts

    # -- Forwards --------------------------------------------------------------------------------------------------

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Run code that may use any parameter of the module. Collective: all ranks."""
        with self._state.sharded.hooks.scopes.scope(name):
            yield

    @contextmanager
    def ignore_forwards(self) -> Iterator[None]:
        """Ignore forwards of units: they run on fake tensors. No collective."""
        self._state.sharded.hooks.forwards.are_ignored = True
        try:
            yield
        finally:
            self._state.sharded.hooks.forwards.are_ignored = False

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Run scopes and backwards of a part of the module: each part has an order of collectives. No collective.

        Args:
            name: The same on all ranks.
        """
        passes = self._state.sharded.hooks.passes
        before, passes.part = passes.part, f" of {name}"
        try:
            yield
        finally:
            passes.part = before

    def around_collective(self) -> AbstractContextManager[None]:
        """Return a context in which every rank makes a collective of its own, also inside a scope at stage 3.

        Collective: all ranks. Does nothing in a backward.
        """
        is_closed = self._state.module is None
        return nullcontext() if is_closed else self._state.sharded.hooks.scopes.around_collective()

    def broadcast_module_buffers(self, when: Literal["scopes", "never"]) -> None:
        """Give all ranks rank 0's module buffers now, and say when to do so again. Collective: all ranks.

        Without this call scopes do, and forwards of the module outside of them.

        Args:
            when: ``"scopes"``: only scopes do; forwards in hooks leave module buffers alone. ``"never"``: every rank
                keeps its own from now on.
        """
        self._state.sharded.hooks.scopes.forwards_are_steps = False
        self._state.sharded.module_buffers.make_equal()
        self._state.sharded.module_buffers.is_on = when == "scopes"

    def num_writes(self) -> dict[str, int]:
        """Return how often the program has written each parameter, by name, as far as writes show. No collective."""
        self._state.require_module()
        return {name: number for buffer in self._state.buffers for name, number in buffer.num_writes().items()}

    # -- Backwards -------------------------------------------------------------------------------------------------

    @contextmanager
    def backward_scope(self, loss: Tensor | None = None, *, shows_gradients: bool = True) -> Iterator[None]:
        """Run a backward in which every rank reduces, also one whose loss uses no parameter. Collective: all ranks.

        Args:
            loss: Every rank runs a backward of it; without it a rank learns from its gradients that one runs.
            shows_gradients: Code of the program runs in it, which may use gradients.
        """
        hooks = self._state.sharded.hooks
        with hooks.scopes.backward(shows_gradients=shows_gradients):
            if loss is not None:
                hooks.backward.watch_loss(loss)
            yield

    @contextmanager
    def scaled(self, scale: float) -> Iterator[None]:
        """Run backwards of losses that are multiplied by a scale; ``unscale`` divides by it. No collective."""
        backward = self._state.sharded.hooks.backward
        before, backward.loss_scale = backward.loss_scale, scale
        try:
            yield
        finally:
            backward.loss_scale = before

    @contextmanager
    def microbatch(self, microbatch: Microbatch) -> Iterator[None]:
        """Run a micro-batch at its position among those of one step.

        Raises:
            ValueError: It is not the last, and the option ``step`` keeps no gradients.
        """
        if microbatch is not Microbatch.LAST:
            self._state.timing.refuse("Accumulating gradients over micro-batches")
        backward = self._state.sharded.hooks.backward
        before, backward.microbatch = backward.microbatch, microbatch
        try:
            yield
        finally:
            backward.microbatch = before

    @property
    def is_last_microbatch(self) -> bool:
        """Whether the next backward is the last before the optimizer's step."""
        return self._state.sharded.hooks.backward.microbatch is Microbatch.LAST

    def has_hooks_of_program(self, param: nn.Parameter) -> bool:
        """Say whether the program has hooks on a parameter's gradient."""
        return has_hooks_of_program(param)

    def begin_gradients(self) -> None:
        """Drop all gradients now, and let ``zero_grad`` leave those that follow alone, until ``end_gradients``.

        For steps whose backward comes before ``zero_grad`` is called.
        """
        self._state.require_module()
        for sharded in self._state.attached:
            sharded.begin_gradients()
        self._state.drop_gradients()
        self._state.attached.begin_gradients()

    def end_gradients(self) -> None:
        """Let ``zero_grad`` drop gradients again.

        Raises:
            PipelineError: ``zero_grad`` was not called since ``begin_gradients``.
        """
        self._state.require_module()
        self._state.attached.end_gradients()

    def sum_shared_gradients(self) -> list[str]:
        """Sum the gradients of parameters that several parts of the model hold; once, after the last micro-batch.

        Collective: all ranks.

        Returns:
            The names of those of which several parts had a gradient.
        """
        self._state.require_module()
        return [] if self._state.parts is None else self._state.parts.sum_gradients(self._state.buffers)

    # -- Forecasts -------------------------------------------------------------------------------------------------

    def make_in_this_thread(self, during: Callable[[], AbstractContextManager[None]]) -> None:
        """Make the steps of offloaded units at once, in the thread that asks for them, each in a context."""
        self._state.stay_in_thread(during)

    def accounts(self) -> tuple[Accounts, Accounts]:
        """Return the accounts of the device and of host memory."""
        return self._state.sharded.store, self._state.sharded.placement.host

    def window_bytes(self) -> int:
        """Return the most bytes of host memory through which tensors on disks are read and written."""
        disk = self._state.sharded.placement.disk
        return 0 if disk is None else disk.most_awake_bytes

    # -- The step window -------------------------------------------------------------------------------------------

    def open_window(self, optimizer: Optimizer) -> None:
        """Open the step window: each parameter shows its master's segment and the reduced gradient's."""
        self._state.require_module()
        self._state.attached.of(optimizer).open()

    def unscale(self, optimizer: Optimizer, scale: float) -> Unscaled:
        """Divide an optimizer's gradients by the scales of their losses, once.

        Collective: all ranks, who get the same answer, also those of other pipeline stages. Gradients that were divided
        before stay as they are.

        Args:
            optimizer: The optimizer.
            scale: Of gradients that the program has assigned.

        Raises:
            RuntimeError: A gradient is of a backward outside of ``scaled``.
        """
        self._state.require_module()
        self._state.timing.refuse("Scaling of the loss")
        return self._state.attached.of(optimizer).unscale_loss(scale)

    def drop_gradients(self, optimizer: Optimizer) -> None:
        """Drop an optimizer's gradients, as ``zero_grad`` does."""
        self._state.require_module()
        self._state.attached.of(optimizer).forget_gradients()

    def close_window(self, optimizer: Optimizer) -> None:
        """Close the step window without a step; gradients stay until ``zero_grad``."""
        self._state.require_module()
        self._state.attached.of(optimizer).close()
