"""Hooks before and behind forwards: of units, and of other modules that are called on their own.

Note [Forwards of submodules]
    Every module with parameters below it may be called on its own at stage 3, wherever all ranks do so. Its forward
    opens a scope if none is open, as a unit's does. Inside a scope the hooks of modules that are no unit return at
    once, and compilers trace through them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_zero.engine.runtime.backward import Backward
from lightning_zero.engine.runtime.backward_hooks import BackwardHooks
from lightning_zero.engine.runtime.call_stack import (
    frame_of_forward,
    in_backward,
    in_compiled_code,
    in_function,
    is_raising,
)
from lightning_zero.engine.runtime.compute_dtypes import ComputeDtypes
from lightning_zero.engine.runtime.scopes import Scopes
from lightning_zero.engine.runtime.uses import Call, UnitUses
from lightning_zero.engine.units.submodules import Submodule, units_below
from lightning_zero.engine.units.unit import Unit

__all__ = ["ForwardHooks"]


class ForwardHooks:
    """Gathers units before their forwards; opens a scope for forwards outside of one.

    Args:
        units: All units; the first is the root's.
        scopes: Opens scopes.
        uses: Gathers units.
        backward: The one that is running.
        backward_hooks: Are put into the graph behind a forward.
        dtypes: In which parameters compute.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        scopes: Scopes,
        *,
        uses: UnitUses,
        backward: Backward,
        backward_hooks: BackwardHooks,
        dtypes: ComputeDtypes,
    ) -> None:
        self._root = units[0]
        self._below = units_below(units)
        self._scopes = scopes
        self._uses = uses
        self._backward = backward
        self._backward_hooks = backward_hooks
        self._dtypes = dtypes
        self._submodule: Submodule | None = None  # the one whose forward has opened the scope
        self.are_ignored = False  # forwards on fake tensors are ignored; set by the engine

    # -- Units -----------------------------------------------------------------------------------------------------

    def pre_forward(self, unit: Unit, args: Any, kwargs: Any) -> None:
        """Gather a unit, and open a scope if none is open. Collective: all ranks."""
        if self.are_ignored:
            return
        is_recomputed = in_backward()
        if not is_recomputed:
            self._scopes.recover()
        opens_scope = not self._scopes.is_open and not is_recomputed
        call = self._uses.begin_call(unit, opens_scope=opens_scope)
        if opens_scope:
            self._submodule = None
            self._scopes.open_for_forward(unit.name, self._below[unit.index], with_root=unit is self._root)
        elif not is_recomputed:
            self._backward.end_before_forward()
            self._scopes.close_windows()
        else:
            self._backward.begin_computing()
        self._uses.enter(unit)
        is_compiled = in_compiled_code()
        for buffer in unit.buffers:
            buffer.gradients.mark_plain(for_compiler=is_compiled)
        if unit.is_sharded_between_uses and torch.is_grad_enabled() and _has_frozen(unit):
            call.awaited = self._backward_hooks.watch_inputs(unit, (args, kwargs))
        if not is_recomputed:
            # Without gradients inside a function of the program: it is computed again with gradients.
            unit.note_forward(builds_graph=torch.is_grad_enabled() or in_function())

    def post_forward(self, unit: Unit, output: Any) -> None:
        """Give a unit back, and close the scope that its forward has opened. Collective: all ranks."""
        call = self._uses.end_call(unit) if not self.are_ignored else None
        if call is None:
            return
        has_failed = is_raising(call.handled)
        try:
            if has_failed and call.opens_scope:
                self._scopes.abandon()
                return
            for buffer in unit.buffers:
                buffer.gradients.mark_reduced()
            self._uses.leave(unit)
            if has_failed:
                return
            self._watch(call, output)
            if call.opens_scope:
                self._scopes.leave(with_root=unit is self._root)
        except BaseException:
            if call.opens_scope:
                self._scopes.abandon()
            raise

    def _watch(self, call: Call, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if call.unit.is_sharded_between_uses:
            self._backward_hooks.watch_outputs(call.unit, output, call.awaited)
        elif call.opens_scope or call.unit is self._root:
            self._backward_hooks.watch_beginning(output)

    # -- Modules that are no unit ----------------------------------------------------------------------------------

    def pre_submodule(self, submodule: Submodule) -> None:
        """Open a scope if none is open, and gather the units around the module. Collective: all ranks."""
        if (self._scopes.is_open and self._scopes.opened_by is None) or self.are_ignored or in_backward():
            return
        self._scopes.recover()
        if self._scopes.is_open:
            return
        self._submodule = submodule
        self._scopes.open_for_forward(submodule.name, submodule.units, with_root=False)
        for unit in submodule.around:
            self._uses.enter(unit)
            unit.note_forward(builds_graph=torch.is_grad_enabled())

    def post_submodule(self, submodule: Submodule) -> None:
        """Close the scope that the module's forward has opened. Collective: all ranks."""
        opened = self._scopes.opened_by
        if opened is None or self._submodule is not submodule:
            return
        if opened.frame is not frame_of_forward():  # it calls itself
            return
        if is_raising(opened.handled):
            self._scopes.abandon()
            return
        try:
            self._scopes.leave(with_root=False)
        except BaseException:
            self._scopes.abandon()
            raise


def _has_frozen(unit: Unit) -> bool:
    return any(not param.requires_grad for buffer in unit.buffers for param in buffer.params)
