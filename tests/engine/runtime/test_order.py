"""The order of collectives, with units that only write down what is asked of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch

from lightning_zero.comm.communicator import Communicator
from lightning_zero.config import Communication
from lightning_zero.engine.runtime.order import _DONE, PassOrder
from lightning_zero.engine.runtime.rank_facts import RankFacts
from lightning_zero.engine.units.unit import UnitState


class _Unit:
    """Writes into a log what it is told to do."""

    def __init__(self, index: int, log: list[str]) -> None:
        self.name = f"unit{index}"
        self.index = index
        self.is_sharded_between_uses = True
        self.state = UnitState.SHARDED
        self.is_busy = False
        self.expected = {(0, 0)}
        self.is_complete = False
        self.ran_forward = True
        self.is_reduced = False
        self._log = log

    @property
    def needs_gather(self) -> bool:
        return self.state is UnitState.SHARDED

    @property
    def is_whole(self) -> bool:
        return self.state is UnitState.UNSHARDED

    def give_back(self) -> None:
        if not self.is_busy:
            self.reshard()

    def unshard(self, *, in_original: bool = False) -> None:
        assert self.state is UnitState.SHARDED
        self._log.append(f"gather {self.index}")
        self.state = UnitState.UNSHARDING

    def wait(self) -> None:
        if self.state is UnitState.UNSHARDING:
            self.state = UnitState.UNSHARDED

    @property
    def reducing_buffers(self) -> list[int]:
        return sorted({place for place, _ in self.expected})

    def reshard(self) -> None:
        if self.state is not UnitState.SHARDED:
            self._log.append(f"release {self.index}")
        self.state = UnitState.SHARDED

    def serve(self, *, in_original: bool = False) -> None:
        self._log.append(f"serve {self.index}")


class _Reducer:
    def __init__(self, log: list[str]) -> None:
        self._log = log
        self.has_same_use = False  # on this rank
        self.ends: list[bool] = []  # of backwards; whether all ranks have the same use
        self.facts = RankFacts([], Communicator(Communication(), torch.device("cpu")))

    def is_as_before(self, kind: Any) -> bool:
        return self.has_same_use

    def finish(self, kind: Any, *, is_as_before: bool, has_more_backwards: bool) -> None:
        self.ends.append(is_as_before)

    def start(self, unit: _Unit) -> None:
        if not unit.is_reduced:
            unit.is_reduced = True
            self._log.append(f"reduce {unit.index}")

    def serve(self, unit: _Unit) -> None:
        self._log.append(f"nothing {unit.index}")

    def settle(self) -> None:
        self._log.append("settle")


class _Ranks:
    """Answers agreements: the other ranks want what is in ``others``, one after the other, and then are done."""

    def __init__(self) -> None:
        self.order: PassOrder | None = None
        self.others: deque[int] = deque()
        self.have_news = False
        self.agreements: list[int] = []
        self.running: dict[Any, None] = {}

    def interrupt(self) -> None:
        """Nothing is lent here."""

    def settle(self) -> None:
        """Nothing is lent here."""

    def agree_on(self, numbers: Sequence[int], what: str) -> list[int]:
        assert self.order is not None
        mine, has_news, facts = self.order.unpack(numbers)
        theirs = self.others[0] if self.others else _DONE
        agreed = min(mine, theirs)
        self.agreements.append(agreed)
        if self.others and theirs == agreed:
            self.others.popleft()
        return self.order.pack(agreed, bool(self.have_news or has_news), facts)


class _World:
    """A rank with ``count`` units."""

    def __init__(self, count: int = 4, prefetch: int = 0) -> None:
        self.log: list[str] = []
        self.units = [_Unit(index, self.log) for index in range(count)]
        self.ranks = _Ranks()
        self.reducer = _Reducer(self.log)
        self.order = PassOrder(self.units, self.ranks, self.reducer, prefetch)  # type: ignore[arg-type]
        self.ranks.order = self.order

    def use(self, *indices: int) -> None:
        for index in indices:
            self.order.request(self.units[index])  # type: ignore[arg-type]
            assert self.units[index].state is UnitState.UNSHARDED
            self.units[index].reshard()

    def run(self, indices: Iterable[int], others: Sequence[int] = (), kind: str = "forward") -> list[str]:
        """Use units in one pass and return what was done for it, releases left out."""
        self.log.clear()
        self.ranks.agreements.clear()
        self.ranks.others.extend(others)
        self.order.begin(kind)
        self.use(*indices)
        self.order.finish()
        assert not self.order.in_pass
        return [entry for entry in self.log if not entry.startswith("release")]


def gathers(*indices: int, units: int = 4) -> list[int]:
    return [units + index for index in indices]


# -- Forwards ----------------------------------------------------------------------------------------------------------


def test_the_first_pass_agrees_on_every_entry_and_on_the_end() -> None:
    world = _World()
    assert world.run([0, 2, 1]) == ["gather 0", "gather 2", "gather 1"]
    assert world.ranks.agreements == [*gathers(0, 2, 1), _DONE]


def test_a_recorded_pass_agrees_on_the_end_only() -> None:
    world = _World()
    first = world.run([0, 1, 1, 3])
    assert world.run([0, 1, 1, 3]) == first
    assert world.ranks.agreements == [_DONE]


def test_each_kind_of_pass_has_a_list_of_its_own() -> None:
    world = _World()
    world.run([0, 1], kind="train")
    world.run([1, 0], kind="eval")
    for kind, indices in (("train", [0, 1]), ("eval", [1, 0])):
        world.run(indices, kind=kind)
        assert world.ranks.agreements == [_DONE]


def test_units_that_are_skipped_are_served_in_the_order_of_the_list() -> None:
    world = _World()
    world.run([0, 1, 2, 3])
    assert world.run([0, 3]) == ["gather 0", "serve 1", "serve 2", "gather 3"]
    assert world.ranks.agreements == [_DONE]


def test_what_is_left_of_the_list_is_served_at_the_end() -> None:
    world = _World()
    world.run([0, 1, 2])
    assert world.run([0]) == ["gather 0", "serve 1", "serve 2"]
    assert world.run([]) == ["serve 0", "serve 1", "serve 2"]


def test_an_entry_of_another_rank_is_served_while_the_list_is_learned() -> None:
    world = _World()
    assert world.run([0, 3], others=gathers(1, 2)) == ["gather 0", "serve 1", "serve 2", "gather 3"]
    assert world.run([0, 3]) == ["gather 0", "serve 1", "serve 2", "gather 3"]


def test_entries_of_another_rank_at_the_end_are_served() -> None:
    world = _World()
    assert world.run([0], others=[*gathers(0), *gathers(2)]) == ["gather 0", "serve 2"]


def test_a_unit_beyond_the_list_is_gathered_by_agreement_and_the_list_is_forgotten() -> None:
    world = _World()
    world.run([0, 1])
    assert world.run([0, 3]) == ["gather 0", "serve 1", "gather 3"]
    assert world.ranks.agreements == [*gathers(3), _DONE]
    assert world.run([0, 3]) == ["gather 0", "gather 3"]
    assert world.ranks.agreements == [*gathers(0, 3), _DONE]
    world.run([0, 3])
    assert world.ranks.agreements == [_DONE]


def test_another_order_than_the_list_is_right_too() -> None:
    world = _World()
    world.run([0, 1])
    assert world.run([1, 0]) == ["serve 0", "gather 1", "gather 0"]


def test_a_kind_of_pass_whose_list_keeps_failing_goes_on_by_agreement() -> None:
    world = _World()
    for _ in range(5):
        world.run([0, 1])
        world.run([2, 3])
    for _ in range(2):
        assert world.run([0, 1]) == ["gather 0", "gather 1"]
        assert world.ranks.agreements == [*gathers(0, 1), _DONE]


def test_a_unit_that_is_whole_already_costs_nothing() -> None:
    world = _World()
    world.order.begin("forward")
    world.order.request(world.units[0])  # type: ignore[arg-type]
    world.order.request(world.units[0])  # type: ignore[arg-type]
    assert world.log == ["gather 0"]
    assert world.ranks.agreements == gathers(0)


def test_an_abandoned_pass_is_finished_by_the_next_call_and_not_learned() -> None:
    world = _World()
    world.order.begin("forward")
    world.use(0, 1)
    world.order.abandon()
    assert not world.order.in_pass
    assert world.ranks.agreements == gathers(0, 1)
    assert world.run([2], others=gathers(3)) == ["serve 3", "settle", "gather 2"]
    assert world.ranks.agreements == [*gathers(3), _DONE, *gathers(2), _DONE]
    assert world.run([2]) == ["gather 2"]
    assert world.ranks.agreements == [_DONE]


def test_a_rank_takes_part_in_what_is_left_of_an_abandoned_pass() -> None:
    world = _World(prefetch=1)
    world.run([0, 1, 2])
    world.log.clear()
    world.order.begin("forward")
    world.use(0)
    world.order.abandon()
    world.order.abandon()
    assert world.log == ["gather 0", "gather 1", "release 0"]
    world.order.finish()
    assert world.log[3:] == ["release 1", "serve 2", "settle"]
    assert all(unit.state is UnitState.SHARDED for unit in world.units)


def test_reductions_of_an_abandoned_pass_are_for_nothing() -> None:
    world = _World(count=2)
    _backward(world, [1, 0])
    world.log.clear()
    for unit in world.units:
        unit.is_complete = unit.is_reduced = False
    world.order.begin("backward")
    world.use(1)
    world.order.abandon()
    world.order.begin("backward")
    world.order.finish(reduces=True)
    assert world.log[2:5] == ["nothing 1", "serve 0", "nothing 0"]


def test_finishing_without_a_pass_does_nothing() -> None:
    world = _World()
    world.order.finish()
    assert not world.ranks.agreements


# -- Prefetching -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 1, 2, 9])
def test_as_many_units_as_asked_for_are_gathered_ahead(prefetch: int) -> None:
    world = _World(count=6, prefetch=prefetch)
    world.run(range(6))
    world.log.clear()
    world.order.begin("forward")
    world.use(0)
    assert world.log == [f"gather {index}" for index in range(min(prefetch + 1, 6))] + ["release 0"]
    world.use(1, 2, 3, 4, 5)
    world.order.finish()
    assert [entry for entry in world.log if entry.startswith("gather")] == [f"gather {index}" for index in range(6)]


def test_a_unit_that_was_gathered_ahead_and_skipped_is_given_back() -> None:
    world = _World(prefetch=2)
    world.run([0, 1, 2, 3])
    world.log.clear()
    world.order.begin("forward")
    world.use(0)
    world.use(2)
    assert world.log == ["gather 0", "gather 1", "gather 2", "release 0", "release 1", "gather 3", "release 2"]
    world.order.finish()
    assert world.units[3].state is UnitState.SHARDED


def test_a_unit_that_somebody_else_needs_is_not_given_back() -> None:
    world = _World(prefetch=1)
    world.run([0, 1])
    world.order.begin("forward")
    world.use(0)
    world.units[1].is_busy = True
    world.order.finish()
    assert world.units[1].state is not UnitState.SHARDED


def test_nothing_is_read_ahead_beyond_a_unit_whose_use_must_end_first() -> None:
    world = _World(prefetch=3)
    world.run([0, 1, 0, 2])
    world.log.clear()
    world.order.begin("forward")
    world.order.request(world.units[0])  # type: ignore[arg-type]
    assert world.log == ["gather 0", "gather 1"]


# -- Backwards ---------------------------------------------------------------------------------------------------------


def _backward(world: _World, indices: Iterable[int], arrive: Iterable[int] | None = None) -> list[str]:
    """Use units, the last first, each followed by its gradients; return what was done."""
    world.log.clear()
    world.ranks.agreements.clear()
    for unit in world.units:
        unit.is_complete = unit.is_reduced = False
    world.order.begin("backward")
    indices = list(indices)
    for index in indices:
        world.use(index)
        if arrive is None or index in arrive:
            world.units[index].is_complete = True
            world.order.completed(world.units[index])  # type: ignore[arg-type]
    world.order.finish(reduces=True)
    return [entry for entry in world.log if not entry.startswith("release")]


def test_reductions_stand_where_their_gradients_were_complete() -> None:
    world = _World(count=3)
    expected = ["gather 2", "reduce 2", "gather 1", "reduce 1", "gather 0", "reduce 0"]
    assert _backward(world, [2, 1, 0]) == expected
    assert _backward(world, [2, 1, 0]) == expected
    assert world.ranks.agreements == [_DONE]


def test_a_reduction_stands_behind_the_gathers_that_are_read_ahead() -> None:
    world = _World(count=3, prefetch=1)
    _backward(world, [2, 1, 0])
    assert _backward(world, [2, 1, 0]) == ["gather 2", "gather 1", "reduce 2", "gather 0", "reduce 1", "reduce 0"]


@pytest.mark.parametrize(
    ("prefetch", "expected"),
    [
        (0, ["g2", "r2", "g1", "r1", "g0", "r0"]),
        (1, ["g2", "g1", "r2", "g0", "r1", "r0"]),
        (2, ["g2", "g1", "g0", "r2", "r1", "r0"]),
    ],
)
def test_a_list_has_room_ahead_of_its_reductions(prefetch: int, expected: list[str]) -> None:
    world = _World(count=3, prefetch=prefetch)
    names = {index: f"r{index}" for index in range(3)} | {index + 3: f"g{index}" for index in range(3)}
    entries = world.order._with_room_ahead([5, 2, 4, 1, 3, 0])
    assert [names[entry] for entry in entries] == expected


@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
def test_room_ahead_neither_adds_nor_loses_an_entry(prefetch: int) -> None:
    record = [7, 7, 3, 0, 5, 2, 2, 6, 1, 4]
    assert sorted(_World(prefetch=prefetch).order._with_room_ahead(record)) == sorted(record)


def test_a_rank_without_a_gradient_reduces_in_its_place() -> None:
    world = _World(count=3)
    _backward(world, [2, 1, 0])
    assert _backward(world, [2, 0]) == ["gather 2", "reduce 2", "serve 1", "reduce 1", "gather 0", "reduce 0"]


def test_a_reduction_waits_for_its_gradients_but_not_beyond_the_end() -> None:
    world = _World(count=3)
    _backward(world, [2, 1, 0])
    assert _backward(world, [2, 1, 0], arrive=[1, 0])[-1] == "reduce 0"
    assert {"reduce 2", "reduce 1"} <= set(world.log)


def test_every_unit_that_may_have_a_gradient_is_reduced_once_at_the_end() -> None:
    world = _World(count=3)
    world.units[1].expected = set()
    assert _backward(world, []) == ["reduce 0", "reduce 2"]


@pytest.mark.parametrize(
    ("here", "elsewhere", "expected"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_the_end_of_a_backward_says_whether_all_ranks_use_the_parameters_of_before(
    here: bool, elsewhere: bool, expected: bool
) -> None:
    world = _World()
    world.reducer.has_same_use, world.ranks.have_news = here, not elsewhere
    for _ in range(2):  # in the first one, the units are reduced behind the agreement
        for unit in world.units:
            unit.is_reduced = False
        world.order.begin("backward")
        world.order.finish(reduces=True)
    assert world.reducer.ends == [False, expected]


def test_an_abandoned_backward_does_not_say_that_it_uses_the_parameters_of_before() -> None:
    world = _World()
    world.reducer.has_same_use = True
    world.order.begin("backward")
    world.order.abandon()
    news = []

    def agree_on(numbers: Sequence[int], what: str) -> list[int]:
        news.append(world.order.unpack(numbers)[1])
        return list(numbers)

    world.ranks.agree_on = agree_on  # type: ignore[method-assign]
    world.order.begin("forward")
    world.order.finish()
    assert news == [True, True]  # of the abandoned pass, and of the next


def test_a_rank_whose_backward_has_nothing_reduces_all_the_same() -> None:
    world = _World(count=2)
    _backward(world, [1, 0])
    assert _backward(world, []) == ["serve 1", "reduce 1", "serve 0", "reduce 0"]


def test_a_forward_has_no_news_and_compares_facts() -> None:
    world = _World()
    news: list[bool] = []

    def agree_on(numbers: Sequence[int], what: str) -> list[int]:
        news.append(world.order.unpack(numbers)[1])
        return list(numbers)

    world.ranks.agree_on = agree_on  # type: ignore[method-assign]
    world.order.begin("forward", may_reduce=False)
    world.order.finish()
    assert news == [False]


@pytest.mark.parametrize("count", [1, 4, 1000])
def test_an_agreement_has_room_for_facts(count: int) -> None:
    order = _World(count).order
    most = (1 << order.num_fact_bits) - 1
    assert order.num_fact_bits >= 20
    for wanted in (0, count, 2 * count, _DONE):
        for has_news in (False, True):
            numbers = order.pack(wanted, has_news, (most, 0))
            assert max(numbers) < 2**32
            assert order.unpack(numbers) == (wanted, has_news, (most, 0))


def test_the_earliest_entry_wins_whatever_the_facts_are() -> None:
    order = _World().order
    most = (1 << order.num_fact_bits) - 1
    first, last = order.pack(3, False, (0, 0)), order.pack(_DONE, False, (most, most))
    assert order.unpack([max(pair) for pair in zip(first, last, strict=True)])[0] == 3
