"""Scopes: steps of the program, or forwards outside of one, in which parameters may be used; recovery after an error.

Note [After an error]
    The passes that an error leaves are abandoned without a collective, since the other ranks may be elsewhere: whole
    units that nobody holds are given back, sums of an interrupted backward are dropped, and the pass is abandoned (see
    the order's note). Where the error leaves a ``with`` block, a hook that PyTorch always calls, or both, this happens
    at once. PyTorch tells nobody that a backward has failed, or that a ``KeyboardInterrupt`` has ended a forward: then
    it happens at the next forward, backward or step (``recover``). An error that does not leave the scope leaves the
    pass alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from lightning_zero.engine.runtime.backward import Backward
from lightning_zero.engine.runtime.call_stack import ModuleCall, in_backward
from lightning_zero.engine.runtime.compute_dtypes import ComputeDtypes
from lightning_zero.engine.runtime.order import PassOrder
from lightning_zero.engine.runtime.passes import Passes
from lightning_zero.engine.runtime.saved_tensors import SavedTensors
from lightning_zero.engine.runtime.transforms import explain_transform
from lightning_zero.engine.runtime.uses import UnitUses
from lightning_zero.engine.units.unit import Unit
from lightning_zero.microbatch import Microbatch

__all__ = ["Scopes"]


class Scopes:
    """Opens and closes scopes, and abandons those that an error has ended.

    Args:
        units: All units; the first is the root's.
        passes: Of the scope that is open.
        order: Makes units whole in one order on all ranks.
        backward: The one that is running.
        uses: Of units.
        saved: Hooks for the tensors that autograd saves in a scope.
        dtypes: In which parameters compute.
        close_windows: Called when a scope begins.
        broadcast_buffers: Called when a step begins (`scope`, or a forward of the root), with whether the next one
            needs it too. Collective.
        check_module: Called when a scope begins that is in no other.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        passes: Passes,
        *,
        order: PassOrder,
        backward: Backward,
        uses: UnitUses,
        saved: SavedTensors,
        dtypes: ComputeDtypes,
        close_windows: Callable[[], None],
        broadcast_buffers: Callable[[bool], None],
        check_module: Callable[[], None],
    ) -> None:
        self._root = units[0]
        self._order = order
        self._passes = passes
        self._backward = backward
        self._uses = uses
        self._saved = saved
        self._dtypes = dtypes
        self.close_windows = close_windows
        self._broadcast_buffers = broadcast_buffers
        self._check_module = check_module
        self.forwards_are_steps = True  # those of the root outside of `scope` broadcast module buffers, too
        self.opened_by: ModuleCall | None = None  # the forward that has opened the scope; None: `scope` has

    @property
    def is_open(self) -> bool:
        """Whether a scope is open."""
        return self._passes.in_scope

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Run a step of the program: the root unit is whole, and the step is one pass per direction."""
        self.recover()
        depth, uses = self._passes.depth, self._root.uses
        try:
            self._enter(name, with_root=True)
            yield
            self.leave(with_root=True)
        except BaseException as error:
            self._passes.leave_scopes(to=depth)
            self._root.end_uses(above=uses)
            if depth == 0:
                self.abandon()
            explain_transform(error)
            self._dtypes.explain(error)
            raise

    def open_for_forward(self, name: str, units: Sequence[Unit], *, with_root: bool) -> None:
        """Open a scope for a forward outside of one; ``leave`` closes it. Collective.

        Args:
            name: Of the module.
            units: Those that hold a parameter below it.
            with_root: The module is the root.
        """
        self.opened_by = ModuleCall.of_now()
        self._passes.note_held(units)
        self._enter(name, with_root=with_root, in_original=self._dtypes.is_exact)

    def _enter(self, name: str, *, with_root: bool, in_original: bool = False) -> None:
        if not in_backward():
            self._backward.end_before_forward()
        self.close_windows()
        if not self.is_open:
            self._check_module()
            self._dtypes.choose(in_original=in_original)
        self._passes.enter_scope(name)
        if self._passes.depth == 1:
            if with_root and not self._order.is_suspended and (self.opened_by is None or self.forwards_are_steps):
                self._broadcast_buffers(torch.is_grad_enabled() and self._backward.microbatch is Microbatch.LAST)
            self._passes.begin("forward")
            if (self._order.gathers or in_original) and torch.is_grad_enabled():
                self._saved.begin()
        if with_root:
            self._uses.enter(self._root)
            # The root's parameters are used by code, not by a forward of the root: their gradients may come last.
            self._root.note_forward(builds_graph=torch.is_grad_enabled())

    def leave(self, *, with_root: bool) -> None:
        """Close a scope. Collective."""
        self.recover()
        if with_root:
            self._uses.leave(self._root)
        if self._passes.depth > 1:
            self._passes.leave_scopes(to=self._passes.depth - 1)
            return
        self._uses.end_all()
        self._order.finish()
        self._saved.end()
        self._close()
        self._dtypes.end_computing()

    def _close(self) -> None:
        self._passes.leave_scopes()
        self.opened_by = None

    @contextmanager
    def backward(self, *, shows_gradients: bool) -> Iterator[None]:
        """Run a backward whose reductions every rank makes, also one that has nothing to reduce.

        Args:
            shows_gradients: Code of the program runs in it, which may use gradients.
        """
        self.recover()
        try:
            with self._backward.explicit(shows_gradients=shows_gradients):
                yield
        except BaseException as error:
            self._dtypes.explain(error)
            raise

    # -- Between two passes ----------------------------------------------------------------------------------------

    @contextmanager
    def boundary(self) -> Iterator[None]:
        """Run something that every rank reaches, between two passes. Collective inside a scope."""
        self.recover()
        self.end_backward()
        was_in_pass = self._order.in_pass
        self._order.finish()
        try:
            yield
        finally:
            if was_in_pass:
                self._passes.begin_again()

    def around_collective(self) -> AbstractContextManager[None]:
        """Return a context for a collective of the program's, which every rank reaches. Collective inside a scope.

        Without it ranks that have used other units would wait in different collectives.
        """
        self.end_backward()
        if not self._order.pass_gathers or self._order.is_suspended or in_backward():
            return nullcontext()
        return self.boundary()

    def begin_step(self) -> None:
        """Begin a step of an optimizer: no prefetched unit may outlive it. Collective inside a scope."""
        self.recover()
        if self._order.pass_gathers and self.is_open and not self._order.is_suspended:
            with self.boundary():
                pass

    def end_step(self, units: Sequence[Unit]) -> None:
        """Let no whole unit show the values of before a step. Collective for those in use: all ranks."""
        for unit in units:
            if unit.is_sharded_between_uses and not unit.needs_gather:
                unit.reshard()
                if unit.is_busy:
                    self._order.request(unit)

    # -- After an error --------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Abandon a backward or a scope that an error has ended without notice. No collective."""
        if in_backward():
            return
        self._backward.recover()
        if self.opened_by is not None and not self.opened_by.is_running:
            self.abandon()

    def end_backward(self) -> None:
        """End a backward whose gradients are about to be used. Collective: all ranks, some of them at its end."""
        if not in_backward():
            self._backward.end_before_use()

    def abandon(self) -> None:
        """Abandon an interrupted step. No collective."""
        self._saved.end()
        self._close()
        self._backward.abandon()
        self._order.abandon()
        self._uses.abandon()
        self._dtypes.end_computing()
