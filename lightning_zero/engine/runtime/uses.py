"""Uses of units: forwards that are running, and code that uses a parameter elsewhere. A use makes a unit whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_zero.engine.runtime.backward import Backward
from lightning_zero.engine.runtime.call_stack import apart_from_program, handled_error, in_backward
from lightning_zero.engine.runtime.compute_dtypes import ComputeDtypes
from lightning_zero.engine.runtime.order import PassOrder
from lightning_zero.engine.runtime.passes import Passes
from lightning_zero.engine.units.unit import Unit

__all__ = ["Call", "UnitUses"]


@dataclass(slots=True)
class Call:
    """A forward of a unit that is running."""

    unit: Unit
    opens_scope: bool
    handled: BaseException | None  # the error that was being handled when it began
    awaited: object | None = None  # stands for it in ``Unit.await_inputs``


class UnitUses:
    """Gathers units when they are used, and gives them back when nobody uses them.

    Args:
        units: All units.
        order: Makes units whole in one order on all ranks.
        passes: Of the scope that is open.
        backward: The one that is running.
        dtypes: In which parameters compute.
        show_original: Shows a unit's parameters in their own dtype, below stage 3. Collective at stages 1 and 2.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        order: PassOrder,
        *,
        passes: Passes,
        backward: Backward,
        dtypes: ComputeDtypes,
        show_original: Callable[[Unit], None],
    ) -> None:
        self._units = units
        self._order = order
        self._passes = passes
        self._backward = backward
        self._dtypes = dtypes
        self._show_original = show_original
        self._calls: list[Call] = []  # the innermost last

    # -- One unit --------------------------------------------------------------------------------------------------

    def make_whole(self, unit: Unit) -> None:
        """Return with a unit whole. Collective, unless it is."""
        if unit.is_sharded_between_uses or not unit.is_whole:
            with apart_from_program():
                if in_backward():
                    self._backward.arm()
                self._order.request(unit)
        unit.join()
        if self._dtypes.in_original and unit.is_lowered and not in_backward():
            self._show_original(unit)

    def make_whole_in_backward(self, unit: Unit) -> None:
        """Return with a unit whole that a node of the graph needs; a backward that builds a graph keeps it."""
        self.make_whole(unit)
        self._backward.note_graph()

    def give_back(self, unit: Unit) -> None:
        """Reshard a unit that nobody uses. No collective."""
        if not self._backward.keeps_units:
            unit.give_back()

    def enter(self, unit: Unit) -> None:
        """Begin a use, which makes the unit whole. Collective, unless it is."""
        unit.enter()
        self.make_whole(unit)

    def leave(self, unit: Unit) -> None:
        """End a use. A forward that ends in a backward is a recomputation: its unit is needed right away."""
        unit.leave()
        if not in_backward():
            self.give_back(unit)

    def touch(self, unit: Unit) -> bool:
        """Gather a unit of which a released parameter is used, if a step is running; say whether it is whole.

        A whole parameter tells of no use: the host waits for a gather in another stream than the scope's, because code
        in a third one may use the parameter next. Behind a gather in the scope's own it does not, which would cost
        programs with one stream: there other streams have to wait for that one behind the use (docs/limits.md).
        """
        if not (self._passes.in_scope or in_backward()):
            return False
        unit.touch()
        self.make_whole(unit)
        if not self._passes.stream.is_current:
            unit.finish()
        return True

    def compute_in_backward(self, unit: Unit) -> bool:
        """Show a unit's parameters as they compute if a backward runs; say whether one does."""
        if not in_backward():
            return False
        unit.begin_computing()
        return True

    # -- Forwards that are running ---------------------------------------------------------------------------------

    def begin_call(self, unit: Unit, *, opens_scope: bool) -> Call:
        """Record a forward."""
        self._calls.append(Call(unit, opens_scope, handled_error()))
        return self._calls[-1]

    def end_call(self, unit: Unit) -> Call | None:
        """Return the last forward of a unit that is running; None if a hook before ours has failed."""
        if not any(call.unit is unit for call in self._calls):
            return None
        while (call := self._calls.pop()).unit is not unit:  # an error has ended it without notice
            self.leave(call.unit)
        return call

    def end_all(self) -> None:
        """End all uses with a scope: an error may have ended forwards without notice."""
        self._calls.clear()
        for unit in self._units:
            if unit.end_uses():
                self.give_back(unit)
        for unit in self._units:
            if unit.end_touch():
                self.give_back(unit)

    def abandon(self) -> None:
        """Abandon all uses after an error. No collective."""
        for unit in self._units:
            unit.abandon_uses()
            for buffer in unit.buffers:
                buffer.gradients.mark_reduced()
        self._calls.clear()
        for unit in self._units:
            unit.give_back_idle()
