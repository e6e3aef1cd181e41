from __future__ import annotations

import itertools
from collections.abc import Sequence
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
from lightning_zero.sharding import NodeRanks, ShardedOver, Sharding, ShardingScope
from tests import worlds


def _groups(rank: int, world: int) -> None:
    everyone = Communicator(Communication(), torch.device("cpu"))
    pairs = [dist.new_group([first, first + 1]) for first in (0, 2)]
    grid = Grid({"all": None, "pair": pairs[rank // 2]}, 2, {"weight": ParamAxes("pair")})
    groups = GridGroups(grid, everyone, lambda *_: ShardedOver.from_stage(0))
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
    group = GridGroups(Grid({"alone": alone}, 4), everyone, lambda *_: ShardedOver.from_stage(1)).group("alone")
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


class _Ranks:
    """A communicator that only knows its ranks."""

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        self.ranks, self.world_size, self.rank = list(ranks), len(ranks), list(ranks).index(rank)

    def along(self, ranks: Sequence[int]) -> _Ranks:
        return _Ranks(ranks, self.ranks[self.rank])

    def among(self, ranks: Sequence[int], *, is_across: bool) -> _Ranks:
        return self.along(ranks)


def _layout(rank: int, scopes: Sharding, tensor: int, node: int, world: int = 8) -> GridGroups:
    """Return the groups of a rank on a grid whose tensor ranks are neighbours, on nodes of some ranks."""
    everyone: Any = _Ranks(range(world), rank)
    data: Any = range(rank % tensor, world, tensor)
    nodes = scopes.nodes(everyone.ranks, NodeRanks(node, rank % node), rank=rank, ranks_per_batch=tensor)
    return GridGroups(
        Grid({"all": None, "data": data}, world // tensor), everyone, lambda _, one: scopes.over(one), nodes
    )


def _levels_of(groups: GridGroups, name: str) -> tuple[list[int], list[int]]:
    nodes = groups.group(name).nodes
    assert nodes is not None
    return nodes.inner.ranks, nodes.outer.ranks


@pytest.mark.parametrize("scopes", [Sharding(params="node", grads="node"), Sharding(params=2, grads=2)])
def test_every_group_of_a_grid_has_nodes_of_its_own(scopes: Sharding) -> None:
    """Two nodes of four ranks, two of which are a tensor group: a mutant with neighbours as inner ranks is found."""
    for rank in range(8):
        groups = _layout(rank, scopes, tensor=2, node=4)
        first, tensor = rank // 4 * 4, rank % 2
        assert groups.node_size == 2
        assert _levels_of(groups, "data") == ([first + tensor, first + tensor + 2], [rank % 4, rank % 4 + 4])
        assert _levels_of(groups, "all") == (list(range(first, first + 4)), [rank % 4, rank % 4 + 4])
        assert groups.group(None).nodes is groups.group("all").nodes
        node, world = ShardingScope.NODE, ShardingScope.WORLD
        assert groups.sharding("data") == groups.sharding("all") == ShardedOver(node, node, world)


def test_shards_of_a_group_tile_its_buffers_whatever_its_nodes_are() -> None:
    for tensor, node in itertools.product((1, 2), (2, 4)):
        for name in ("all", "data"):
            places: dict[tuple[int, ...], list[int]] = {}
            for rank in range(8):
                group = _layout(rank, Sharding(params="node", grads="node"), tensor, node).group(name)
                places.setdefault(tuple(group.communicator.ranks), []).append(group.place)
            assert all(sorted(found) == list(range(len(ranks))) for ranks, found in places.items())


@pytest.mark.parametrize(
    ("scopes", "tensor", "node", "expected"),
    [
        (Sharding(params="node", grads="node"), 2, 2, ShardingScope.NONE),  # one data rank per node
        (Sharding(params="node", grads="node"), 4, 2, ShardingScope.NONE),  # a tensor group on two nodes
        (Sharding(params="node", grads="node"), 2, 8, ShardingScope.WORLD),
        (Sharding(params=4, grads=4), 2, 8, ShardingScope.WORLD),  # a number counts data ranks
        (Sharding(params="node", grads="node"), 1, 4, ShardingScope.NODE),
    ],
)
def test_a_node_of_one_data_rank_is_none_and_one_of_all_ranks_the_world(
    scopes: Sharding, tensor: int, node: int, expected: ShardingScope
) -> None:
    for rank in range(8):
        groups = _layout(rank, scopes, tensor, node)
        for name in ("all", "data"):
            assert groups.sharding(name) == ShardedOver(expected, expected, ShardingScope.WORLD)
            assert (groups.group(name).nodes is not None) == (expected is ShardingScope.NODE)


def test_a_group_with_one_rank_per_node_has_two_levels_beside_larger_ones() -> None:
    """Experts: its gradients cross nodes once a step as well."""
    scopes = Sharding(params="node", grads="node")
    for rank in range(4):
        everyone: Any = _Ranks(range(4), rank)
        experts: Any = range(rank % 2, 4, 2)
        nodes = scopes.nodes(everyone.ranks, NodeRanks(2, rank % 2), rank=rank)
        groups = GridGroups(Grid({"experts": experts}, 4), everyone, lambda _, one: scopes.over(one), nodes)
        assert _levels_of(groups, "experts") == ([rank], list(experts))
        assert groups.sharding("experts").grads is ShardingScope.NODE
