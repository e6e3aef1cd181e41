"""The passes of a scope: which one begins, and under which key its list of collectives is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from lightning_zero.engine.runtime.compute_dtypes import ComputeDtypes
from lightning_zero.engine.runtime.order import PassOrder
from lightning_zero.engine.units.unit import Unit, UnitState
from lightning_zero.storage.copies import WorkStream

__all__ = ["Direction", "Passes"]

Direction = Literal["forward", "backward", "backward of inputs", "backward without reductions"]


class Passes:
    """Begins the passes of the scope that is open, one after the other; behind it those of its backwards.

    Args:
        units: All units.
        order: Runs the collectives of a pass.
        dtypes: In which parameters are gathered.

    Attributes:
        part: Name of the part of the module that runs, if its parts run one after the other, with units of their own.
        stream: The one in which the scope was opened, or the last one.
    """

    def __init__(self, units: Sequence[Unit], order: PassOrder, dtypes: ComputeDtypes) -> None:
        self._units = units
        self._order = order
        self._dtypes = dtypes
        self.part = ""
        self.depth = 0  # of scopes, one in another
        self._scope = ""  # the outermost, or the last one
        self._ordinal = 0  # of the pass in its step
        self._direction: Direction = "forward"  # of the pass that runs, or has
        self._is_held = False  # the scope uses only units that `gathered` holds
        devices = [buffer.store.device for unit in units for buffer in unit.buffers]
        self.stream = WorkStream(devices[0] if devices else torch.device("cpu"))

    @property
    def in_scope(self) -> bool:
        """Whether a scope is open."""
        return self.depth > 0

    def enter_scope(self, name: str) -> None:
        """Open a scope, perhaps inside another."""
        self.depth += 1
        if self.depth == 1:
            self._scope = f"{name}:{'train' if torch.is_grad_enabled() else 'eval'}"
            self._ordinal = 0
            self.stream.move_here()

    def note_held(self, units: Sequence[Unit]) -> None:
        """Take note of the units that the next scope can use."""
        self._is_held = all(unit.holds for unit in units)

    def leave_scopes(self, *, to: int = 0) -> None:
        """Close scopes, but for the outer ones."""
        self.depth = to
        self._is_held = self._is_held and to > 0

    def begin(self, direction: Direction) -> None:
        """Begin a pass, if it may have collectives. Every rank begins the same. No collective."""
        self._direction = direction
        is_stale = any(unit.state is UnitState.STALE for unit in self._units)
        is_suspended = self._order.is_suspended or (direction == "forward" and self._is_held)
        if direction != "backward" and (is_suspended or not (self._order.gathers or self._order.meets or is_stale)):
            return
        in_original = self._dtypes.in_original if direction == "forward" else self._dtypes.graphs_in_original
        kind = (self._scope + self.part, self._ordinal, direction, is_stale, in_original)
        self._order.begin(
            kind,
            gathers=self._order.gathers or is_stale,
            in_original=in_original,
            may_reduce=direction in ("backward", "backward of inputs"),
        )
        self._ordinal += 1

    def begin_again(self) -> None:
        """Go on behind something that every rank has reached in the last pass. No collective."""
        self.begin(self._direction)

    def begin_reductions(self) -> None:
        """Begin the pass at the end of ``backward(inputs=...)`` below stage 3, which has reductions only."""
        self._order.begin((self._scope + self.part, self._ordinal, "backward of inputs"), gathers=False)
