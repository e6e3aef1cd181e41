"""Process groups are lent: one user after the other, and none behind an error."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist

from lightning_zero.comm.groups import Lent, borrow, lend
from lightning_zero.forecast.rehearsal import pretended_world
from tests.worlds import run


class _User:
    """Somebody who borrows."""


def _made(rank: int, world: int) -> list[Lent]:
    """Return the sets that were made for several users in turn."""
    made: list[Lent] = []

    def make() -> Lent:
        made.append(Lent())
        return made[-1]

    def borrow() -> tuple[_User, Lent]:
        user = _User()
        return user, lend(user, "test", range(world), make)

    first, one = borrow()
    one.leave(first)
    second, again = borrow()
    assert again is one  # given back: lent again
    assert again.loan == 2
    third, other = borrow()
    assert other is not one  # in use
    del second
    gc.collect()
    assert borrow()[1] is one  # its user was collected
    return made


def test_a_set_that_was_given_back_or_whose_user_is_gone_is_lent_again() -> None:
    assert [len(made) for made in run(_counted, 2)] == [2, 2]


def _counted(rank: int, world: int) -> range:
    return range(len(_made(rank, world)))


def _broken_on_one_rank(rank: int, world: int) -> list[int]:
    numbers: list[int] = []

    def make() -> Lent:
        numbers.append(len(numbers))
        return Lent()

    user = _User()
    one = lend(user, "test", range(world), make)
    one.leave(user)
    if rank == 1:
        one.is_broken = True
    lend(_User(), "test", range(world), make)
    assert one.is_broken  # on all ranks
    return numbers


def test_a_set_that_is_broken_on_one_rank_is_lent_on_none() -> None:
    assert run(_broken_on_one_rank, 3) == [[0, 1]] * 3


def _interrupted(rank: int, world: int) -> tuple[bool, bool]:
    user = _User()
    one = lend(user, "test", range(world), Lent)
    one.num_interrupted += rank == 0
    one.leave(user)
    other = lend(_User(), "test", range(world), Lent)
    return other is one, one.is_broken


def test_a_set_with_calls_in_flight_is_not_lent() -> None:
    assert run(_interrupted, 2) == [(False, True)] * 2


def _many(rank: int, world: int) -> list[int]:
    users = [_User() for _ in range(7)]
    sets = [lend(user, "test", range(world), Lent) for user in users]
    return [sets.index(one) for one in sets]


def test_more_users_than_four_share_the_set_that_was_lent_longest_ago() -> None:
    assert run(_many, 2) == [[0, 1, 2, 3, 0, 1, 2]] * 2


def _failing_peer(rank: int, world: int) -> Any:
    """The sets of a part of the ranks do not wait for the others."""
    if rank == 2:
        return None
    user = _User()
    lend(user, "pair", [0, 1], Lent).leave(user)
    again = lend(_User(), "pair", [0, 1], Lent)
    assert dist.get_world_size() == 3
    return again.loan


def test_sets_of_some_ranks_need_these_alone() -> None:
    assert run(_failing_peer, 3) == [2, 2, None]


def _broken_parts(rank: int, world: int) -> list[int]:
    pair = [rank // 2 * 2, rank // 2 * 2 + 1]
    counts = []
    for number in range(4):
        user = _User()
        one = borrow(user, pair, "gloo", 30.0)
        for group in (one.gather, one.control, one.background):
            values = torch.tensor([rank])
            dist.all_reduce(values, group=group)
            assert values.item() == (1 if rank < 2 else 5)
        assert dist.get_process_group_ranks(one.gather) == pair
        counts.append(len(dist.distributed_c10d._world.pg_map))
        if rank == number % 2:  # a rank that raises gives them back before its peer
            one.destroy()
        one.is_broken |= rank < 2
        one.leave(user)
    return counts


def test_broken_groups_of_a_part_of_the_ranks_are_destroyed() -> None:
    """They stayed until the process ended, because PyTorch would have given a later group their names."""
    for counts in run(_broken_parts, 4):
        assert set(counts) == {counts[0]}


def _bound(rank: int, world: int) -> Any:
    default: Any = dist.group.WORLD
    default.bound_device_id = torch.device("cuda", rank)
    seen, make = [], dist.new_group

    def noted(*args: Any, **kwargs: Any) -> Any:
        seen.append(default.bound_device_id)
        return make([rank], backend="gloo", use_local_synchronization=True)

    dist.new_group = noted
    try:
        if rank < 2:
            borrow(_User(), [0, 1], "nccl", 60.0)
    finally:
        dist.new_group = make
    bound, default.bound_device_id = default.bound_device_id, None
    return seen[:2], bound


def test_groups_of_some_ranks_are_no_splits_of_all_which_wait_for_the_others() -> None:
    *of_some, other = run(_bound, 3)
    assert of_some == [([None, None], torch.device("cuda", rank)) for rank in range(2)]
    assert other == ([], torch.device("cuda", 2))


def test_a_pretended_rank_asks_no_other() -> None:
    with pretended_world(4):
        first, second = _User(), _User()
        sets = [lend(user, "test", range(4), Lent) for user in (first, second)]
        assert sets[0] is not sets[1]
