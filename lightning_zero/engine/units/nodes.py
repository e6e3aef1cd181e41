"""The nodes on which an engine's ranks lie: all ranks agree on them before a group of ranks is made."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import torch.distributed as dist

from lightning_zero.comm.communicator import Communicator
from lightning_zero.grid import Grid
from lightning_zero.sharding import NodeRanks, Nodes, Sharding

__all__ = ["data_ranks_of_node", "find_nodes", "launched_node"]


def launched_node() -> NodeRanks | None:
    """Return the ranks of this node as the launcher of processes says; None if it does not."""
    number, place = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("LOCAL_RANK")
    return None if number is None else NodeRanks(int(number), None if place is None else int(place))


def find_nodes(
    scopes: Sharding,
    launched: NodeRanks | None,
    communicator: Communicator,
    *,
    grid: Grid | None = None,
    parts: Communicator | None = None,
) -> Nodes | None:
    """Return the nodes of an engine's ranks; None if no scope needs them. Collective: all ranks, also of other parts.

    Args:
        scopes: The option ``stage``.
        launched: The ranks of this node; None: those that the environment says.
        communicator: Of the engine's ranks.
        grid: The ranks as a grid.
        parts: Of one rank of every part of a model that is cut.

    Raises:
        ValueError: The ranks, those of a group, or those of another part cannot be divided into equal nodes. The same
            on all ranks.
    """
    if not scopes.has_nodes:
        return None
    nodes, numbers, error = None, {}, ""
    ranks_per_batch = 1 if grid is None else communicator.world_size // grid.data_ranks
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    try:
        launched = launched or launched_node()
        nodes = scopes.nodes(communicator.ranks, launched, rank=rank, ranks_per_batch=ranks_per_batch)
        numbers = _numbers(nodes, communicator.ranks, grid)
    except ValueError as found:
        error = str(found)
    told = communicator.gather_objects((error, numbers), "comparison of nodes")
    if parts is not None:
        told = [one for of_part in parts.gather_objects(told, "comparison of nodes") for one in of_part]
    errors = [text for text, _ in told if text]
    if errors:
        raise ValueError(error or errors[0])
    differing = [one for _, one in told if one != numbers]
    if differing:
        raise ValueError(
            f"`{scopes}`: here a node has these numbers of the ranks of each group: {numbers}, and on other ranks"
            f" {differing[0]}. Use nodes that divide every group, and every pipeline stage, in the same way."
        )
    return nodes


def _numbers(nodes: Nodes | None, everyone: Sequence[int], grid: Grid | None) -> dict[str, int]:
    """Return how many ranks of each group lie on a node."""
    assert nodes is not None
    groups = {} if grid is None else {name: group for name, group in grid.groups.items() if group is not None}
    ranks = {f" of `grid.groups['{name}']`": dist.get_process_group_ranks(one) for name, one in groups.items()}
    return {name: len(nodes.divide(one, name)[0]) for name, one in {"": everyone, **ranks}.items()}


def data_ranks_of_node(nodes: Nodes, everyone: Sequence[int], groups: Iterable[Sequence[int]], data_ranks: int) -> int:
    """Return how many data ranks a node has, 1 at least; where a group has more ranks on a node, their number.

    Args:
        nodes: The nodes on which the ranks lie.
        everyone: All ranks of the engine.
        groups: The ranks of the groups that this one is in.
        data_ranks: Number of ranks with different data.
    """
    here = len(nodes.divide(everyone)[0]) * data_ranks // len(everyone)
    parts = [len(nodes.divide(ranks)[0]) for ranks in groups if len(ranks) < len(everyone)]
    return max(here, *parts, 1)
