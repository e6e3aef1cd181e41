"""All ranks agree on nodes, or all refuse them with one error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from lightning_zero.engine.units.nodes import data_ranks_of_node, find_nodes, launched_node
from lightning_zero.grid import Grid
from lightning_zero.sharding import NodeRanks, Nodes, Sharding

HYBRID = Sharding(params="node", grads="node")


class _Everyone:
    """A communicator on which the other ranks say something."""

    def __init__(self, ranks: range, *told: tuple[str, Mapping[str, int]]) -> None:
        self.ranks, self.world_size, self.told = list(ranks), len(ranks), list(told)

    def gather_objects(self, value: Any, what: str) -> list[Any]:
        return [value, *self.told]


def _find(everyone: _Everyone, node: int, parts: _Everyone | None = None, **groups: range) -> Nodes | None:
    grid: Any = Grid(groups, len(everyone.ranks)) if groups else None  # type: ignore[arg-type]
    with mock.patch.object(dist, "get_process_group_ranks", list):
        return find_nodes(HYBRID, NodeRanks(node), everyone, grid=grid, parts=parts)  # type: ignore[arg-type]


def test_stages_need_no_nodes() -> None:
    assert find_nodes(Sharding.of(3), None, _Everyone(range(4))) is None  # type: ignore[arg-type]


def test_nodes_are_those_of_the_launcher() -> None:
    nodes = _find(_Everyone(range(4, 8)), 2)
    assert nodes is not None
    assert nodes.divide(range(4, 8)) == [[4, 5], [6, 7]]
    with mock.patch.dict("os.environ", {"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "3"}):
        assert launched_node() == NodeRanks(4, 3)
    with mock.patch.dict("os.environ", clear=True):
        assert launched_node() is None


def test_a_group_that_nodes_divide_unevenly_is_refused() -> None:
    with pytest.raises(ValueError, match=r"different numbers of the 3 ranks of `grid.groups\['g'\]`: {0: 2, 1: 1}"):
        _find(_Everyone(range(6)), 3, g=range(0, 6, 2))


def test_an_error_of_another_rank_is_raised_on_all() -> None:
    with pytest.raises(ValueError, match="the ranks of a node must be neighbours"):
        _find(_Everyone(range(4), ("the ranks of a node must be neighbours", {})), 2)


def test_groups_that_lie_otherwise_on_other_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="here a node has these numbers of the ranks of each group"):
        _find(_Everyone(range(4), ("", {"": 2, " of `grid.groups['g']`": 1})), 2, g=range(2))


def test_pipeline_stages_that_lie_otherwise_are_refused() -> None:
    """Stages of two ranks on nodes of three: one lies on a node, and another one on two."""
    others: Any = [("", {"": 1})]
    with pytest.raises(ValueError, match="Use nodes that divide every group, and every pipeline stage"):
        _find(_Everyone(range(2)), 3, parts=_Everyone(range(3), others))


@pytest.mark.parametrize(
    ("groups", "data_ranks", "node", "expected"),
    [([], 8, 4, 4), ([range(0, 8, 2)], 4, 4, 2), ([range(0, 8, 2)], 4, 2, 1), ([range(4)], 4, 4, 4)],
)
def test_data_ranks_of_a_node(groups: list[range], data_ranks: int, node: int, expected: int) -> None:
    nodes = HYBRID.nodes(range(8), NodeRanks(node))
    assert nodes is not None
    assert data_ranks_of_node(nodes, range(8), groups, data_ranks) == expected
