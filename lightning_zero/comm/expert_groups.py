"""The groups of expert parallelism: neighbouring ranks have different experts of every layer, and different batches.

Rank ``shard * size + rank``: an expert group exchanges tokens in every layer, so its ranks are the nearest ones.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial

import torch.distributed as dist

from lightning_zero.comm.groups import lend
from lightning_zero.comm.tensor_groups import NeighbourGroups

__all__ = ["ExpertGroups"]


class ExpertGroups:
    """The process groups of ranks that divide the experts of each layer, lent as long as it lives.

    Collective: all ranks make the same one.

    Args:
        size: Ranks over which the experts of a layer are divided.
        timeout_s: Seconds after which a collective of these groups fails.

    Attributes:
        rank: This rank in its expert group.
        num_groups: Number of expert groups, each of which has all experts.
        expert_group: The neighbours that have all experts together.
        shard_group: The ranks with the same experts.

    Raises:
        ValueError: The ranks cannot be divided by ``size``.
    """

    def __init__(self, size: int, timeout_s: float) -> None:
        world_size = dist.get_world_size()
        if world_size % size:
            raise ValueError(
                f"`expert_parallel={size}` does not divide the {world_size} ranks. Use a multiple of {size} devices, or"
                " a number that divides them."
            )
        self.size = size
        self.rank = dist.get_rank() % size
        self.num_groups = world_size // size
        make = partial(NeighbourGroups, size, world_size, timedelta(seconds=timeout_s))
        self._groups = lend(self, f"neighbours/1/{size}/{timeout_s}", range(world_size), make)
        self.expert_group = self._groups.neighbours
        self.shard_group = self._groups.across

    def distrust(self) -> None:
        """Do not lend the groups again: calls of an interrupted step may be in flight. No collective."""
        self._groups.destroy()
