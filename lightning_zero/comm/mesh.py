"""Ranks as a grid: pipeline stages times copies of the model.

Rank ``stage * copies + copy``: the ranks of one stage, which reduce gradients among them, are neighbours; the stages of
one copy, which send activations, are far apart.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from lightning_zero.comm.groups import Lent, lend

__all__ = ["Mesh"]


class Mesh:
    """The process groups of a grid, lent as long as it lives. Collective: all ranks make the same one.

    Args:
        stages: Pipeline stages.
        timeout_s: Seconds after which a message that does not come fails.

    Raises:
        ValueError: The ranks cannot be divided by ``stages``.
    """

    def __init__(self, stages: int, timeout_s: float) -> None:
        world_size, rank = dist.get_world_size(), dist.get_rank()
        if world_size % stages:
            raise ValueError(
                f"`pipeline={stages}` does not divide the {world_size} ranks. Use a multiple of {stages} devices, or a"
                " number of stages that divides them."
            )
        # - Where this rank is
        self.stages = stages
        self.copies = world_size // stages
        self.stage, self.copy = divmod(rank, self.copies)
        # - Groups
        make = partial(_MeshGroups, stages, self.copies, timedelta(seconds=timeout_s))
        self._groups = lend(self, f"mesh/{stages}/{timeout_s}", range(world_size), make)
        self.loan = self._groups.loan  # tells this mesh's messages from those of an earlier one
        self.copy_group = self._groups.copy  # the ranks of this stage, one per copy
        self.stage_group = self._groups.stage  # the ranks of this copy, one per stage
        self.message_group = self._groups.message  # the same, for activations and their gradients
        self.host_group = self._groups.host  # the same, for objects

    def distrust(self) -> None:
        """Let nobody use the groups after this mesh: calls of an interrupted step may be in flight. No collective."""
        self._groups.destroy()


class _MeshGroups(Lent):
    """The groups of one mesh at a time. They stay until the program ends. Collective: all ranks make the same ones."""

    def __init__(self, stages: int, copies: int, timeout: timedelta) -> None:
        super().__init__()
        self._timeout = timeout
        of_stages = [[stage * copies + copy for copy in range(copies)] for stage in range(stages)]
        of_copies = [[stage * copies + copy for stage in range(stages)] for copy in range(copies)]
        self.copy = self._along(of_stages)
        self.stage = self._along(of_copies)
        self.message = self._along(of_copies)
        self.host = self._along(of_copies, "gloo")

    def _along(self, lines: list[list[int]], backend: str | None = None) -> Any:
        """Make one group per line of the grid and return this rank's."""
        rank = dist.get_rank()
        mine = None
        for ranks in lines:
            group = dist.new_group(ranks, self._timeout, backend)
            if rank in ranks:
                mine = group
        return mine
