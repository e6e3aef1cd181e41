from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_zero.comm.communicator import Communicator
from lightning_zero.config import Communication
from lightning_zero.engine.buffers.group import BufferGroup, NodeLevels
from lightning_zero.engine.units.grid_groups import GridGroups
from lightning_zero.grid import Grid, ParamAxes
from lightning_zero.layout import FlatLayout
from lightning_zero.sharding import ShardedOver
from tests import worlds


def _groups(rank: int, world: int) -> None:
    everyone = Communicator(Communication(), torch.device("cpu"))
    pairs = [dist.new_group([first, first + 1]) for first in (0, 2)]
    grid = Grid({"all": None, "pair": pairs[rank // 2]}, 2, {"weight": ParamAxes("pair")})
    groups = GridGroups(grid, everyone, lambda ranks: ShardedOver.from_stage(0))
    assert groups.name_of("weight") == "pair"
    assert groups.name_of("bias") is None
    pair, every = groups.group("pair"), groups.group(None)
    assert (pair.communicator.world_size, pair.communicator.rank, pair.divisor) == (2, rank % 2, 2)
    assert (every.communicator, every.divisor) == (everyone, 2)
    assert groups.axes(["bias"])["bias"].factor == 0.5
    assert groups.sharding("pair").optim  # one rank steps an element, at stage 0 too

    full = torch.full((16,), float(rank + 1))
    pair.communicator.reduce_scatter(full[:8], full, "test", divisor=4).wait()
    assert full[0].item() == (3.0 if rank < 2 else 7.0) / 4 or rank % 2  # the first rank of a pair wrote its part
    assert everyone.calls["reduce_scatter"] == 1  # counted as one of all ranks
    everyone.close()
    assert pair.communicator._groups is None


def test_groups_of_a_grid_end_and_count_with_the_engines_communicator() -> None:
    worlds.run(_groups, 4)


def _one(rank: int, world: int) -> None:
    everyone = Communicator(Communication(), torch.device("cpu"))
    alone = [dist.new_group([one]) for one in range(world)][rank]
    group = GridGroups(Grid({"alone": alone}, 4), everyone, ShardedOver.from_stage).group("alone")
    full = torch.full((8,), 6.0)
    group.communicator.reduce_scatter(full, full, "test", divisor=group.divisor).wait()
    assert full.tolist() == [1.5] * 8
    everyone.close()


def test_a_sum_over_one_rank_is_divided_by_the_data_ranks_too() -> None:
    worlds.run(_one, 2)


@pytest.mark.parametrize(("inner", "outer"), [(2, 2), (2, 3), (3, 2), (4, 2), (8, 16)])
def test_shards_of_nodes_tile_a_buffer_and_lie_in_the_ranges_of_their_nodes(inner: int, outer: int) -> None:
    everyone: Any = SimpleNamespace(world_size=inner * outer)
    layout = FlatLayout.build([("weight", (7, 5)), ("bias", (11,))], inner * outer)
    found = []
    for node, place in itertools.product(range(outer), range(inner)):
        levels: Any = NodeLevels(
            SimpleNamespace(rank=place, world_size=inner), SimpleNamespace(rank=node, world_size=outer)
        )
        group = BufferGroup(everyone, everyone, inner * outer, nodes=levels)
        start, stop = layout.shard_range(group.place)
        of_node = group.node_range(layout.padded_numel)
        # Piece `node` of range `place`: a gather over the nodes fills the range in their order.
        assert (start, stop) == (of_node.start + node * (stop - start), of_node.start + (node + 1) * (stop - start))
        found.append((start, stop))
    assert sorted(found) == [layout.shard_range(rank) for rank in range(inner * outer)]
