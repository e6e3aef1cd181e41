"""The groups of expert parallelism: neighbouring ranks have different experts of every layer, and different batches.

Rank ``((stage * shards + shard) * size + rank) * tensor + tensor rank``: an expert group exchanges tokens in every
layer, so its ranks are the nearest ones with different batches. The ranks of a tensor group have the same experts.
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
        stages: Pipeline stages, each of which has experts of its own.
        tensor: Ranks of a tensor group.

    Attributes:
        rank: This rank in its expert group.
        num_groups: Number of expert groups of a stage, each of which has all experts of its layers.
        expert_group: The neighbours that have all experts together.
        shard_group: The ranks with the same experts.
        tensor: Ranks of a tensor group.

    Raises:
        ValueError: The ranks with different batches cannot be divided by ``size``.
    """

    def __init__(self, size: int, timeout_s: float, stages: int = 1, tensor: int = 1) -> None:
        world_size = dist.get_world_size()
        copies = world_size // stages
        if copies // tensor % size:
            of_stage = "" if stages == 1 else " of a pipeline stage"
            ranks = "ranks" if tensor == 1 else "data ranks"
            raise ValueError(
                f"`expert_parallel={size}` does not divide the {copies // tensor} {ranks}{of_stage}. Use a multiple of"
                f" {stages * size * tensor} devices, or a number that divides them."
            )
        self.size = size
        self.tensor = tensor
        self.rank = dist.get_rank() // tensor % size
        self.num_groups = copies // tensor // size
        make = partial(NeighbourGroups, size, copies, timedelta(seconds=timeout_s), tensor)
        inside = "" if tensor == 1 else f"x{tensor}"  # alone they are the groups that tensor ranks would have
        use = f"neighbours/{stages}/{size}{inside}/{timeout_s}"
        self._groups = lend(self, use, range(world_size), make)
        self.expert_group = self._groups.neighbours
        self.shard_group = self._groups.across

    @property
    def are_distrusted(self) -> bool:
        """Whether the groups are not lent again."""
        return self._groups.is_broken

    def distrust(self) -> None:
        """Do not lend the groups again: calls of an interrupted step may be in flight. No collective."""
        self._groups.destroy()
