from __future__ import annotations

import pytest
import torch.distributed as dist

from lightning_zero.comm.expert_groups import ExpertGroups
from tests.worlds import run


def _grid(rank: int, world: int, size: int) -> tuple[int, int, list[int], list[int]]:
    groups = ExpertGroups(size, 60.0)
    ranks = [dist.get_process_group_ranks(group) for group in (groups.expert_group, groups.shard_group)]
    return groups.rank, groups.num_groups, *ranks


@pytest.mark.parametrize("size", [2, 4])
def test_neighbouring_ranks_are_an_expert_group(size: int) -> None:
    for rank, found in enumerate(run(_grid, 4, size)):
        first = rank // size * size
        assert found == (rank % size, 4 // size, list(range(first, first + size)), list(range(rank % size, 4, size)))


def _staged(rank: int, world: int) -> tuple[int, int, list[int], list[int]]:
    groups = ExpertGroups(2, 60.0, 2)
    ranks = [dist.get_process_group_ranks(group) for group in (groups.expert_group, groups.shard_group)]
    return groups.rank, groups.num_groups, *ranks


def test_every_pipeline_stage_has_groups_of_its_own() -> None:
    assert run(_staged, 4) == [
        (0, 1, [0, 1], [0]),
        (1, 1, [0, 1], [1]),
        (0, 1, [2, 3], [2]),
        (1, 1, [2, 3], [3]),
    ]


def _beside_tensor_ranks(rank: int, world: int, stages: int) -> tuple[int, int, list[int], list[int]]:
    groups = ExpertGroups(2, 60.0, stages, 2)
    ranks = [dist.get_process_group_ranks(group) for group in (groups.expert_group, groups.shard_group)]
    return groups.rank, groups.num_groups, *ranks


def test_ranks_of_a_tensor_group_have_the_same_experts() -> None:
    assert run(_beside_tensor_ranks, 4, 1) == [
        (0, 1, [0, 2], [0, 1]),
        (0, 1, [1, 3], [0, 1]),
        (1, 1, [0, 2], [2, 3]),
        (1, 1, [1, 3], [2, 3]),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
def test_groups_beside_tensor_ranks_are_those_of_a_stage(stages: int) -> None:
    copies = 8 // stages
    for rank, found in enumerate(run(_beside_tensor_ranks, 8, stages)):
        first, place = rank // 4 * 4, rank // 2 % 2
        of_stage = range(rank // copies * copies, rank // copies * copies + copies)
        same = [one for one in of_stage if one // 2 % 2 == place]
        assert found == (place, copies // 4, [first + rank % 2, first + rank % 2 + 2], same)


def _wrong_size(rank: int, world: int) -> str:
    with pytest.raises(ValueError, match="divide") as caught:
        ExpertGroups(3, 60.0)
    return str(caught.value)


def test_a_size_that_does_not_divide_the_ranks_is_refused() -> None:
    for text in run(_wrong_size, 4):
        assert text.startswith("`expert_parallel=3` does not divide the 4 ranks. Use a multiple of 3 devices")


def _in_turn(rank: int, world: int) -> bool:
    first = ExpertGroups(2, 60.0)
    group = first.expert_group
    first.distrust()
    del first
    return ExpertGroups(2, 60.0).expert_group is group


def test_groups_of_an_interrupted_step_are_not_lent_again() -> None:
    assert run(_in_turn, 4) == [False] * 4
