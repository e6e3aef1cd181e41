"""The order of collectives: recorded once, followed by every rank, prefetched.

Note [One order of collectives]
    Ranks may run different code (a branch that only some take), yet every gather and every reduction needs all of them.
    A *pass* is the collectives between two points that every rank reaches: a scope's begin and end, a backward's begin
    and end. For every kind of pass there is one recorded list of entries, *gather unit k* and *reduce unit k*, the same
    on all ranks, and every rank starts them in this order. A rank that needs a later entry first takes part in the
    skipped ones: it serves the gathers, and starts the reductions with its gradients, or zeros if it has none. At the
    end of the pass it does the same with the remaining entries. As everybody starts everything in one order, and waits
    for nothing that it has not started, no rank waits for ever.

    The first pass of a kind has no list. Before each entry the ranks agree on the next one: the smallest that somebody
    is ready for, reductions before gathers. The same agreement follows a list that is used up, so a rank whose need is
    not in the list is served when the others have come to the end of the pass. A list that was not enough is
    forgotten; a kind of pass whose list keeps failing goes on by agreement alone, which is slower and always right.

    A pass that an error has interrupted cannot be finished then, for nobody knows where the other ranks are. Each rank
    finishes it at its first call in a later pass: it takes part in the remaining entries, for ranks that came further
    before the same error, and waits for the started ones.

Note [Collectives of the model]
    Experts exchange tokens inside of the forward and of the backward. An expert without tokens brings no gradient, so
    one rank may wait in the engine for a reduction, and another one in the exchange behind it, for ever. So a module
    that communicates *meets* the other ranks first: the meeting is an entry of the list, before which a rank starts
    every reduction that stands before it, with zeros where it has nothing. Nothing is prefetched beyond a meeting. A
    rank that passes a meeting by would leave the others waiting: that is an error. Once the list is known, a meeting
    sends nothing.

Note [Prefetching]
    A list is recorded without prefetching, so each unit's reduction stands before the next unit's gather. To let
    gathers run while the unit before computes, every reduction is moved behind as many gathers as are prefetched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from lightning_zero.comm.communicator import Communicator
from lightning_zero.engine.runtime.rank_facts import NUM_BITS
from lightning_zero.engine.runtime.reduction import Reducer
from lightning_zero.engine.units.unit import Unit, UnitState

__all__ = ["PassOrder"]

_DONE = 2**31 - 1
_MESSAGE_BITS = 32  # of a number in an agreement
_MAX_FAILURES = 3


@dataclass
class _Pass:
    """A pass: the collectives between two points that every rank reaches."""

    kind: Hashable
    gathers: bool  # whether some unit may be gathered in it
    in_original: bool  # gathers are of parameters in their own dtype
    may_reduce: bool  # at its end the ranks may agree on used parameters
    entries: Sequence[int] | None  # the list; None while it is being learned
    position: int = 0  # first entry that was not started yet
    prefetched: deque[Unit] = field(default_factory=deque)  # gathers started, not needed yet
    record: list[int] = field(default_factory=list)  # entries started beyond the list
    is_abandoned: bool = False  # its reductions are for nothing


class PassOrder:
    """Starts gathers and reductions in the same order on every rank.

    An entry is the unit's index for its reduction, the index plus the number of units for its gather, and twice the
    number of units for a meeting.

    Args:
        units: All units, indexed by ``unit.index``.
        communicator: Over which ranks agree.
        reducer: Starts reductions.
        prefetch: How many gathers are prefetched.
        meets: Whether modules communicate in their forwards, so that a forward is a pass also without gathers.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        communicator: Communicator,
        reducer: Reducer,
        prefetch: int,
        *,
        meets: bool = False,
    ) -> None:
        self._units = list(units)
        self._communicator = communicator
        self._reducer = reducer
        self._prefetch = prefetch
        self.gathers = any(unit.is_sharded_between_uses for unit in self._units)  # for every use
        self.meets = meets
        self.is_suspended = 0  # > 0 while everything is held whole: forwards do not communicate
        # - Recorded lists
        self._lists: dict[Hashable, list[int]] = {}
        self._failures: dict[Hashable, int] = {}
        # - Passes
        self._running: _Pass | None = None
        self._abandoned: list[_Pass] = []
        self._is_settled = True  # nothing of an abandoned pass is left

    @property
    def in_pass(self) -> bool:
        """Whether a pass is running."""
        return self._running is not None

    @property
    def pass_gathers(self) -> bool:
        """Whether a pass is running in which units may be gathered; below stage 3 those that are stale."""
        return self._running is not None and self._running.gathers

    def begin(
        self, kind: Hashable, *, gathers: bool | None = None, in_original: bool = False, may_reduce: bool = True
    ) -> None:
        """Begin a pass. Every rank begins the same kind. No collective.

        Args:
            kind: The key of its list.
            gathers: Whether units may be gathered in it, the same on every rank; by default whether they are sharded
                between uses.
            in_original: Gather parameters in their own dtype, the same on every rank.
            may_reduce: It is a backward.
        """
        assert self._running is None
        if gathers is None:
            gathers = self.gathers
        self._running = _Pass(kind, gathers, in_original, may_reduce, self._lists.get(kind))

    def request(self, unit: Unit) -> None:
        """Return with ``unit`` whole. Collective, in the order of the note, unless it is whole already."""
        self._settle()
        current = self._running or _Pass(None, gathers=True, in_original=False, may_reduce=False, entries=())
        if unit in current.prefetched:
            while current.prefetched[0] is not unit:
                current.prefetched.popleft().give_back()
            current.prefetched.popleft()
        elif unit.needs_gather:
            entry = unit.index + len(self._units)
            if current.entries is not None and entry in current.entries[current.position :]:
                self._drop_ahead(current)
                while current.entries[current.position] != entry:
                    self._join(current.entries[current.position], current)
                    current.position += 1
                current.position += 1
            else:
                self._agree_until(entry, current)
            unit.unshard(in_original=current.in_original)
        elif unit.is_whole:
            return
        unit.wait()
        self._look_ahead(current)

    @property
    def _meeting(self) -> int:
        return 2 * len(self._units)

    def meet(self) -> None:
        """Start the collectives before one of the model's own. Collective: all ranks, with the same meetings.

        Call it before every collective that a module makes, in its forward and in its backward. Outside of passes, and
        where all units are held whole, nothing of the engine's can be in the way.
        """
        self._settle()
        current = self._running
        if current is None:
            return
        if current.entries is not None and self._meeting in current.entries[current.position :]:
            while current.entries[current.position] != self._meeting:
                self._join(current.entries[current.position], current)
                current.position += 1
            current.position += 1
            self._look_ahead(current)
        else:
            self._agree_until(self._meeting, current)

    def completed(self, unit: Unit) -> None:
        """Note that a unit's gradients have arrived; start the reductions whose turn it is. Collective, in order."""
        self._settle()
        assert self._running is not None
        if self._running.entries is None:
            if not unit.is_reduced:
                self._agree_until(unit.index, self._running)
                self._reducer.start(unit)
            return
        self._advance(self._running)

    def finish(self, *, reduces: bool = False, has_more_backwards: bool = False) -> None:
        """End the pass: join collectives that other ranks still need, reduce the units left. Collective: all ranks.

        Args:
            reduces: The pass is a backward, after which every unit that may have a gradient is reduced.
            has_more_backwards: Backwards of forwards that have run follow, and bring gradients again.
        """
        self._settle()
        current = self._running
        if current is None:
            return
        is_as_before = self._end(current, reduces)
        if reduces:
            for unit in self._units:
                if unit.reducing_buffers and not unit.is_reduced:
                    current.record.append(unit.index)
                    self._reducer.start(unit)
        self._learn(current)
        self._running = None
        if reduces:
            self._reducer.finish(current.kind, is_as_before=is_as_before, has_more_backwards=has_more_backwards)

    def _end(self, current: _Pass, reduces: bool = False) -> bool:
        """Join collectives that other ranks still need; say whether all ranks have used the parameters of before."""
        self._join_the_rest(current)
        if not (current.gathers or current.entries is None):
            return False
        # Units that are reduced behind the agreement may bring gradients that somebody has assigned.
        is_whole = reduces and all(unit.is_reduced for unit in self._units if unit.reducing_buffers)
        has_news = current.may_reduce and not (is_whole and self._reducer.is_as_before(current.kind))
        return not self._agree_until(_DONE, current, has_news=has_news)

    def abandon(self) -> None:
        """Leave the pass after an error; it is finished at the next call. No collective."""
        if self._running is not None or self._has_calls_in_flight:
            self._communicator.interrupt()
        self._is_settled = False
        if self._running is not None:
            self._running.is_abandoned = True
            self._abandoned.append(self._running)
            self._running = None

    @property
    def _has_calls_in_flight(self) -> bool:
        return bool(self._communicator.running) or any(unit.state is UnitState.UNSHARDING for unit in self._units)

    def _settle(self) -> None:
        """Finish passes that were abandoned. Collective: all ranks."""
        if self._is_settled:
            return
        while self._abandoned:
            self._end(self._abandoned[0])
            del self._abandoned[0]
        self._reducer.settle()
        prefetched = self._running.prefetched if self._running is not None else ()
        for unit in self._units:
            if unit.state is UnitState.UNSHARDING and unit not in prefetched:
                unit.reshard()
        self._communicator.settle()
        self._is_settled = True

    def _agree_until(self, wanted: int, current: _Pass, *, has_news: bool = False) -> bool:
        """Join the entries that other ranks are ready for, until it is this rank's turn; say if a rank has news."""
        self._join_the_rest(current)
        while True:
            agreed, any_news = self._agree(wanted, has_news, current)
            if agreed == wanted:
                break
            current.record.append(agreed)
            self._join(agreed, current)
        if wanted != _DONE:
            current.record.append(wanted)
        return any_news

    def _join_the_rest(self, current: _Pass) -> None:
        """Start the collectives that are left of the list."""
        self._drop_ahead(current)
        while current.entries is not None and current.position < len(current.entries):
            self._join(current.entries[current.position], current)
            current.position += 1

    def _join(self, entry: int, current: _Pass) -> None:
        """Start an entry that this rank does not need, or is not ready for."""
        if entry == self._meeting:
            if current.is_abandoned:
                return
            raise RuntimeError(
                "Other ranks are at a collective of the model (an exchange between experts), which this rank has passed"
                " by. Blocks that communicate must run on every rank, also without tokens."
            )
        if entry >= len(self._units):
            self._units[entry - len(self._units)].serve(in_original=current.in_original)
        elif current.is_abandoned:
            self._reducer.serve(self._units[entry])
        else:
            self._reducer.start(self._units[entry])

    def _advance(self, current: _Pass) -> None:
        """Start the reductions that are next in the list and ready."""
        assert current.entries is not None
        while current.position < len(current.entries) and current.entries[current.position] < len(self._units):
            unit = self._units[current.entries[current.position]]
            if unit.expected and not unit.is_complete and unit.ran_forward:
                return
            self._reducer.start(unit)
            current.position += 1

    def _look_ahead(self, current: _Pass) -> None:
        if current.entries is None:
            return
        self._advance(current)
        while len(current.prefetched) < self._prefetch and current.position < len(current.entries):
            entry = current.entries[current.position]
            if entry == self._meeting:
                return
            unit = self._units[entry % len(self._units)]
            if entry < len(self._units) or not unit.needs_gather:
                return  # a reduction that is not ready, or a unit whose present use must end first
            unit.unshard(in_original=current.in_original)
            current.prefetched.append(unit)
            current.position += 1
            self._advance(current)

    def _drop_ahead(self, current: _Pass) -> None:
        while current.prefetched:
            current.prefetched.popleft().give_back()

    def _agree(self, wanted: int, has_news: bool, current: _Pass) -> tuple[int, bool]:
        if wanted == _DONE:
            own = f"the pass {current.kind} has ended"
        elif wanted == self._meeting:
            own = "a collective of the model comes"
        else:
            verb = "reduced" if wanted < len(self._units) else "needed"
            own = f"unit `{self._units[wanted % len(self._units)].name}` is {verb}"
        what = f"agreement on the next collective ({own})"
        says_facts = wanted == _DONE and not current.is_abandoned
        facts = self._reducer.facts.digest(self.num_fact_bits) if says_facts else (0, 0)
        agreed, any_news, facts = self.unpack(self._communicator.agree_on(self.pack(wanted, has_news, facts), what))
        if agreed == _DONE and not any_news:  # else the message on used parameters has them
            self._reducer.facts.compare(facts, self.num_fact_bits)
        return agreed, any_news

    @property
    def num_fact_bits(self) -> int:
        """Bits that an agreement has room for beside an entry: of a digest, and of its complement."""
        return min(NUM_BITS - 1, _MESSAGE_BITS - (self._meeting + 1).bit_length())

    def pack(self, wanted: int, has_news: bool, facts: tuple[int, int]) -> list[int]:
        """Return an agreement's two numbers, of which the largest of all ranks decide; facts are for the end only."""
        left = 0 if wanted == _DONE else self._meeting + 1 - wanted
        return [left << self.num_fact_bits | facts[0], has_news << self.num_fact_bits | facts[1]]

    def unpack(self, numbers: Sequence[int]) -> tuple[int, bool, tuple[int, int]]:
        """Return the entry, whether a rank has news, and the facts of two numbers."""
        mask = (1 << self.num_fact_bits) - 1
        left, has_news = (number >> self.num_fact_bits for number in numbers)
        return self._meeting + 1 - left if left else _DONE, bool(has_news), (numbers[0] & mask, numbers[1] & mask)

    def _learn(self, current: _Pass) -> None:
        kind = current.kind
        if current.entries is None:
            if self._failures.get(kind, 0) < _MAX_FAILURES:
                self._lists[kind] = self._with_room_ahead(current.record)
        elif current.record:
            self._failures[kind] = self._failures.get(kind, 0) + 1
            del self._lists[kind]

    def _with_room_ahead(self, record: list[int]) -> list[int]:
        """Move every reduction behind the next gathers; see Note [Prefetching]."""
        entries: list[int] = []
        waiting: list[tuple[int, int]] = []  # (reduction, gathers that still come before it)
        for entry in record:
            if entry < len(self._units):
                waiting.append((entry, self._prefetch))
                continue
            if entry == self._meeting:
                entries += [*(reduction for reduction, _ in waiting), entry]
                waiting = []
                continue
            entries += [reduction for reduction, left in waiting if left == 0]
            waiting = [(reduction, left - 1) for reduction, left in waiting if left > 0]
            entries.append(entry)
        return entries + [reduction for reduction, _ in waiting]
