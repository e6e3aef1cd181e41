"""The groups of tensor parallelism: neighbouring ranks compute every layer together, on the same batches.

Rank ``(stage * data ranks + data rank) * size + rank``: a tensor group exchanges activations in every layer, so its
ranks are the nearest ones.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_zero.comm.groups import Lent, lend
from lightning_zero.comm.peers import failure_named, is_pretended
from lightning_zero.comm.traffic import Traffic

__all__ = ["NeighbourGroups", "TensorGroups"]


class TensorGroups:
    """The process groups of a grid of data ranks times tensor ranks, lent as long as it lives.

    Collective: all ranks make the same one.

    Args:
        size: Ranks of a tensor group.
        timeout_s: Seconds after which a collective of these groups fails.
        stages: Pipeline stages, each of which has a grid of its own.

    Attributes:
        rank: This rank in its tensor group.
        data_rank: Its tensor group: ranks with the same number have the same batches.
        num_data_ranks: Number of tensor groups.
        tensor_group: The ranks with the same batches.
        data_group: The ranks with the same parts of parameters.
        traffic: Counts comparisons; that of the engine which shards the module.

    Raises:
        ValueError: The ranks cannot be divided by ``size``.
    """

    def __init__(self, size: int, timeout_s: float, stages: int = 1) -> None:
        world_size = dist.get_world_size()
        copies = world_size // stages
        if copies % size:
            of_stage = "" if stages == 1 else " of a pipeline stage"
            raise ValueError(
                f"`tensor_parallel={size}` does not divide the {copies} ranks{of_stage}. Use a multiple of"
                f" {stages * size} devices, or a size that divides them."
            )
        self.size = size
        self.num_data_ranks = copies // size
        self.data_rank, self.rank = divmod(dist.get_rank() % copies, size)
        self._first = dist.get_rank() // copies * copies  # rank of this stage
        make = partial(NeighbourGroups, size, copies, timedelta(seconds=timeout_s))
        self._groups = lend(self, f"neighbours/{stages}/{size}/{timeout_s}", range(world_size), make)
        self.tensor_group = self._groups.neighbours
        self.data_group = self._groups.across
        self.traffic = Traffic()

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """Return the ranks as a mesh with the axes ``data_parallel`` and ``tensor_parallel``. No collective."""
        ranks = self._first + torch.arange(self.num_data_ranks * self.size, device="cpu").view(
            self.num_data_ranks, self.size
        )
        return DeviceMesh.from_group(
            [self.data_group, self.tensor_group],
            device_type,
            mesh=ranks,
            mesh_dim_names=("data_parallel", "tensor_parallel"),
        )

    def gather_numbers(self, *numbers: int) -> list[list[int]]:
        """Return the numbers of all tensor ranks, each below 2**63 in size. Collective: the tensor group."""
        mine = torch.tensor(numbers, device="cpu")
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        what, ranks = "comparison of numbers in a tensor group", dist.get_process_group_ranks(self.tensor_group)
        counted = self.traffic.during("control", what, mine.nbytes * (self.size - 1), ranks=ranks)
        with failure_named(what), counted:
            dist.all_gather(everyone, mine, group=self._groups.host)
        return [list(numbers)] * self.size if is_pretended() else [one.tolist() for one in everyone]

    def broadcast_object(self, value: Any) -> Any:
        """Return the object of the first tensor rank. Collective: the tensor group."""
        values = [value]
        with failure_named("broadcast of an object in a tensor group"):
            dist.broadcast_object_list(values, group=self._groups.host, group_src=0)
        return values[0]

    def distrust(self) -> None:
        """Do not lend the groups again: calls of an interrupted step may be in flight. No collective."""
        self._groups.destroy()


class NeighbourGroups(Lent):
    """The groups of neighbouring ranks, and of the ranks with one place among them. They stay until the program ends.

    Collective: all ranks make the same ones.

    Args:
        size: Ranks of a group of neighbours.
        copies: Ranks of a pipeline stage.
        timeout: After which a collective fails.
        inside: Consecutive ranks that are one place: each of them has neighbours of its own.

    Attributes:
        neighbours: Of this rank.
        host: The same, for values in host memory.
        across: The ranks of its stage with this rank's place among their neighbours.
    """

    def __init__(self, size: int, copies: int, timeout: timedelta, inside: int = 1) -> None:
        super().__init__()
        ranks = range(dist.get_world_size())
        self._timeout = timeout
        span = size * inside
        of_neighbours = [
            list(ranks[start + first : start + span : inside]) for start in ranks[::span] for first in range(inside)
        ]
        across = [
            [rank for rank in ranks[stage : stage + copies] if rank // inside % size == place]
            for stage in ranks[::copies]
            for place in range(size)
        ]
        self.neighbours = self._along(of_neighbours)
        self.host = self._along(of_neighbours, None if is_pretended() else "gloo")
        self.across = self._along(across)

    def _along(self, lines: list[list[int]], backend: str | None = None) -> Any:
        """Make one group per line of the grid and return this rank's."""
        mine = None
        for line in lines:
            group = dist.new_group(line, self._timeout, backend)
            if dist.get_rank() in line:
                mine = group
        return mine
