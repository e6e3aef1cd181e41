"""Ranks as a grid of stages and copies, and objects between the stages of a copy."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_zero.comm.mesh import Mesh
from lightning_zero.errors import CollectiveError
from tests.worlds import run


def _grid(rank: int, world: int, stages: int) -> tuple[int, int, list[int], list[int]]:
    mesh = Mesh(stages, 30.0)
    groups = (mesh.copy_group, mesh.stage_group)
    return (mesh.stage, mesh.copy, *(dist.get_process_group_ranks(group) for group in groups))


def test_ranks_of_a_stage_are_neighbours() -> None:
    assert run(_grid, 4, 2) == [
        (0, 0, [0, 1], [0, 2]),
        (0, 1, [0, 1], [1, 3]),
        (1, 0, [2, 3], [0, 2]),
        (1, 1, [2, 3], [1, 3]),
    ]


def _indivisible(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="`pipeline=2` does not divide the 3 ranks"):
        Mesh(2, 30.0)


def test_stages_that_do_not_divide_the_ranks_are_refused() -> None:
    run(_indivisible, 3)


def _exchanged(rank: int, world: int) -> tuple[object, ...]:
    mesh = Mesh(2, 30.0)
    numbers = mesh.gather_numbers(torch.tensor([rank, 10 * rank]), "numbers")
    return (
        mesh.gather({"rank": rank}, "ranks"),
        [one.tolist() for one in numbers],
        mesh.broadcast(f"of {rank}", 1, "a word"),
    )


def test_stages_exchange_with_those_of_their_own_copy() -> None:
    even = ([{"rank": 0}, {"rank": 2}], [[0, 0], [2, 20]], "of 2")
    odd = ([{"rank": 1}, {"rank": 3}], [[1, 10], [3, 30]], "of 3")
    assert run(_exchanged, 4) == [even, odd, even, odd]


def _missing(rank: int, world: int) -> str:
    mesh = Mesh(2, 1.0)
    if rank == 1:
        return ""
    with pytest.raises(CollectiveError) as raised:
        mesh.gather(None, "the exchange of names")
    return str(raised.value)


def test_a_stage_that_does_not_come_is_named_with_its_rank() -> None:
    text = run(_missing, 2)[0]
    assert text.startswith("pipeline stage 0 of 2: the exchange of names failed: stage 1 (rank 1) has stopped")


def _again(rank: int, world: int) -> tuple[int, int, bool]:
    first = Mesh(2, 30.0)
    loan, group = first.loan, first.message_group
    del first
    second = Mesh(2, 30.0)
    return loan, second.loan, second.message_group is group


def test_the_groups_of_a_mesh_that_is_gone_are_used_again() -> None:
    assert run(_again, 2) == [(1, 2, True)] * 2
