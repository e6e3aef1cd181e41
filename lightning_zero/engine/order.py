"""The order of collectives: recorded once, followed by every rank, read ahead.

Note [One order of collectives]
    Ranks may run different code (a branch that only some take), yet every gather and every reduction needs all of them.
    A *pass* is what lies between two points that every rank reaches: a scope's begin and end, a backward's begin and
    end. For every kind of pass there is one recorded list of entries, *gather unit k* and *reduce unit k*, the same on
    all ranks, and every rank starts them in this order. A rank that needs a later entry first takes part in what it
    skips: it serves the gathers, and starts the reductions with what it has, zeros where it has nothing. At the end of
    the pass it does the same with what is left. As everybody starts everything in one order, and waits for nothing
    that it has not started, no rank waits for ever.

    The first pass of a kind has no list. Before each entry the ranks agree on the next one: the smallest that somebody
    is ready for, reductions before gathers. The same agreement follows a list that is used up, so a rank whose need is
    not in the list is served when the others have come to the end of the pass. A list that was not enough is
    forgotten; a kind of pass whose list keeps failing goes on by agreement alone, which is slower and always right.

Note [Reading ahead]
    A list is recorded without reading ahead, so each unit's reduction stands before the next unit's gather. To let
    gathers run while the unit before computes, every reduction is moved behind as many gathers as are read ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence

import torch
import torch.distributed as dist

from lightning_zero.comm.communicator import Communicator
from lightning_zero.engine.reduction import Reducer
from lightning_zero.engine.unit import Unit, UnitState

__all__ = ["PassOrder"]

_DONE = 2**31 - 1
_MAX_FAILURES = 3


class PassOrder:
    """Starts gathers and reductions in the same order on every rank.

    An entry is the unit's index for its reduction, and the index plus the number of units for its gather.

    Args:
        units: All units, indexed by ``unit.index``.
        communicator: Over which ranks agree.
        reducer: Starts reductions.
        prefetch: How many gathers are read ahead.
    """

    def __init__(self, units: Sequence[Unit], communicator: Communicator, reducer: Reducer, prefetch: int) -> None:
        self._units = list(units)
        self._communicator = communicator
        self._reducer = reducer
        self._prefetch = prefetch
        self._gathers = False  # whether some unit may be gathered in this pass
        # - What was learned
        self._lists: dict[Hashable, list[int]] = {}
        self._failures: dict[Hashable, int] = {}
        # - The pass that is running
        self._kind: Hashable | None = None
        self._list: list[int] | None = None  # None while it is being learned
        self._position = 0  # first entry that was not started yet
        self._ahead: deque[Unit] = deque()  # gathers started, not needed yet
        self._record: list[int] = []  # entries started beyond the list
        self.is_suspended = 0  # > 0 while everything is held whole: forwards do not communicate

    @property
    def in_pass(self) -> bool:
        """Whether a pass is running."""
        return self._kind is not None

    def begin(self, kind: Hashable, *, gathers: bool | None = None) -> None:
        """Begin a pass. Every rank begins the same kind.

        Args:
            kind: What its list is remembered by.
            gathers: Whether units may be gathered in it, the same on every rank; by default whether they are sharded
                between uses.
        """
        assert self._kind is None
        self._gathers = any(unit.is_sharded_between_uses for unit in self._units) if gathers is None else gathers
        self._kind = kind
        self._list = self._lists.get(kind)
        self._position = 0
        self._record = []

    def request(self, unit: Unit) -> None:
        """Return with ``unit`` whole. Collective, in the order of the note, unless it is whole already."""
        if unit in self._ahead:
            while self._ahead[0] is not unit:
                self._drop(self._ahead.popleft())
            self._ahead.popleft()
        elif unit.state is UnitState.SHARDED:
            entry = unit.index + len(self._units)
            if self._list is not None and entry in self._list[self._position :]:
                self._drop_ahead()
                while self._list[self._position] != entry:
                    self._join(self._list[self._position])
                    self._position += 1
                self._position += 1
            else:
                self._agree_until(entry)
            unit.unshard()
        else:
            return
        unit.wait()
        self._look_ahead()

    def completed(self, unit: Unit) -> None:
        """Take note that a unit's gradients have arrived; start what may be started. Collective, in order."""
        if self._list is None:
            if not unit.is_reduced:
                self._agree_until(unit.index)
                self._reducer.start(unit)
            return
        self._advance()

    def finish(self, *, reduces: bool = False) -> None:
        """End the pass: take part in what other ranks still need, reduce what is left. Collective: all ranks.

        Args:
            reduces: The pass is a backward, after which every unit that may have a gradient is reduced.
        """
        if self._kind is None:
            return
        self._join_the_rest()
        if self._gathers or self._list is None:
            self._agree_until(_DONE)
        if reduces:
            for unit in self._units:
                if unit.expected and not unit.is_reduced:
                    self._record.append(unit.index)
                    self._reducer.start(unit)
        self._learn()
        self._kind = None

    def abandon(self) -> None:
        """Forget the pass after an error. No collective."""
        self._ahead.clear()
        self._kind = None

    def _agree_until(self, wanted: int) -> None:
        """Join the entries that other ranks are ready for, until it is this rank's turn."""
        self._join_the_rest()
        while (agreed := self._agree(wanted)) != wanted:
            self._record.append(agreed)
            self._join(agreed)
        if wanted != _DONE:
            self._record.append(wanted)

    def _join_the_rest(self) -> None:
        """Start what is left of the list."""
        self._drop_ahead()
        rest = [] if self._list is None else self._list[self._position :]
        self._position += len(rest)
        for entry in rest:
            self._join(entry)

    def _join(self, entry: int) -> None:
        """Start an entry that this rank does not need, or is not ready for."""
        if entry < len(self._units):
            self._reducer.start(self._units[entry])
        else:
            self._units[entry - len(self._units)].serve()

    def _advance(self) -> None:
        """Start the reductions that are next in the list and ready."""
        assert self._list is not None
        while self._position < len(self._list) and self._list[self._position] < len(self._units):
            unit = self._units[self._list[self._position]]
            if unit.expected and not unit.is_complete and unit.ran_forward:
                return
            self._reducer.start(unit)
            self._position += 1

    def _look_ahead(self) -> None:
        if self._list is None:
            return
        self._advance()
        while len(self._ahead) < self._prefetch and self._position < len(self._list):
            entry = self._list[self._position]
            unit = self._units[entry % len(self._units)]
            if entry < len(self._units) or unit.state is not UnitState.SHARDED:
                return  # a reduction that is not ready, or a unit whose present use must end first
            unit.unshard()
            self._ahead.append(unit)
            self._position += 1
            self._advance()

    def _drop_ahead(self) -> None:
        while self._ahead:
            self._drop(self._ahead.popleft())

    def _drop(self, unit: Unit) -> None:
        if not unit.is_busy:
            unit.reshard()

    def _agree(self, wanted: int) -> int:
        value = torch.tensor([wanted], dtype=torch.int64)
        what = "agreement on the next collective"
        if wanted == _DONE:
            what += f" (this rank is at the end of the pass {self._kind})"
        else:
            verb = "reduces" if wanted < len(self._units) else "needs"
            what += f" (this rank {verb} unit `{self._units[wanted % len(self._units)].name}`)"
        return int(self._communicator.agree(value, what, dist.ReduceOp.MIN))

    def _learn(self) -> None:
        kind = self._kind
        assert kind is not None
        if self._list is None:
            if self._failures.get(kind, 0) < _MAX_FAILURES:
                self._lists[kind] = self._with_room_ahead(self._record)
        elif self._record:
            self._failures[kind] = self._failures.get(kind, 0) + 1
            del self._lists[kind]

    def _with_room_ahead(self, record: list[int]) -> list[int]:
        """Move every reduction behind the next gathers; see the note on reading ahead."""
        entries: list[int] = []
        waiting: list[tuple[int, int]] = []  # (reduction, gathers that still come before it)
        for entry in record:
            if entry < len(self._units):
                waiting.append((entry, self._prefetch))
                continue
            entries += [reduction for reduction, left in waiting if left == 0]
            waiting = [(reduction, left - 1) for reduction, left in waiting if left > 0]
            entries.append(entry)
        return entries + [reduction for reduction, _ in waiting]
