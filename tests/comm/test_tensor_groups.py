from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_zero.comm.tensor_groups import TensorGroups
from lightning_zero.forecast.rehearsal import pretended_world
from tests.worlds import run


def _grid(rank: int, world: int, size: int) -> dict[str, Any]:
    groups = TensorGroups(size, 60.0)
    mesh = groups.device_mesh("cpu")
    return {
        "rank": groups.rank,
        "data rank": (groups.data_rank, groups.num_data_ranks),
        "tensor group": dist.get_process_group_ranks(groups.tensor_group),
        "data group": dist.get_process_group_ranks(groups.data_group),
        "axes": {name: mesh[name].mesh.tolist() for name in mesh.mesh_dim_names or ()},
        "numbers": groups.gather_numbers(rank, 2**40 + rank),
        "object": groups.broadcast_object({"from": rank}),
        "traffic": dict(groups.traffic.sent_bytes),
    }


@pytest.mark.parametrize("size", [1, 2, 4])
def test_neighbouring_ranks_are_a_tensor_group(size: int) -> None:
    for rank, found in enumerate(run(_grid, 4, size)):
        first = rank // size * size
        neighbours, others = list(range(first, first + size)), list(range(rank % size, 4, size))
        assert found == {
            "rank": rank % size,
            "data rank": (rank // size, 4 // size),
            "tensor group": neighbours,
            "data group": others,
            "axes": {"data_parallel": others, "tensor_parallel": neighbours},
            "numbers": [[one, 2**40 + one] for one in neighbours],
            "object": {"from": first},
            "traffic": {"control": 16 * (size - 1)},
        }


def test_pretended_ranks_have_the_same_numbers() -> None:
    with pretended_world(4, rank=3):
        groups = TensorGroups(2, 60.0)
        assert groups.gather_numbers(5, 2**40) == [[5, 2**40]] * 2
        assert dist.get_process_group_ranks(groups.tensor_group) == [2, 3]


def _wrong_size(rank: int, world: int) -> str:
    with pytest.raises(ValueError, match="divide") as caught:
        TensorGroups(3, 60.0)
    return str(caught.value)


def test_a_size_that_does_not_divide_the_ranks_is_refused() -> None:
    for text in run(_wrong_size, 2):
        assert "`tensor_parallel=3` does not divide the 2 ranks. Use a multiple of 3 devices" in text


def _two_in_turn(rank: int, world: int) -> tuple[bool, bool]:
    first = TensorGroups(2, 60.0)
    group = first.tensor_group
    del first
    second = TensorGroups(2, 60.0)
    is_lent_again = second.tensor_group is group
    second.distrust()
    del second
    third = TensorGroups(2, 60.0)
    total = torch.ones(1)
    dist.all_reduce(total, group=third.data_group)
    return is_lent_again, third.tensor_group is group or total.item() != world // 2


def test_groups_are_lent_again_but_after_an_error() -> None:
    assert run(_two_in_turn, 4) == [(True, False)] * 4


def _in_stages(rank: int, world: int) -> tuple[Any, ...]:
    groups = TensorGroups(2, 60.0, stages=2)
    ranks = [dist.get_process_group_ranks(group) for group in (groups.tensor_group, groups.data_group)]
    return groups.data_rank, groups.num_data_ranks, groups.device_mesh("cpu").mesh.tolist(), ranks


def test_every_pipeline_stage_has_a_grid_of_its_own() -> None:
    for rank, (data_rank, count, mesh, ranks) in enumerate(run(_in_stages, 4)):
        first = rank // 2 * 2
        assert (data_rank, count, mesh) == (0, 1, [[first, first + 1]])
        assert ranks == [[first, first + 1], [rank]]
