"""Ranks as a grid: pipeline stages times copies of the model.

Rank ``stage * copies + copy``: the ranks of one stage, which reduce gradients among them, are neighbours; the stages of
one copy, which send activations, are far apart.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

__all__ = ["Mesh"]


class Mesh:
    """The process groups of a grid. Collective: all ranks make the same one.

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
        self._timeout = timedelta(seconds=timeout_s)
        # - Groups
        self.copy_group = self._along(self._of_stage, stages)  # the ranks of this stage, one per copy
        self.stage_group = self._along(self._of_copy, self.copies)  # the ranks of this copy, one per stage
        self.message_group = self._along(self._of_copy, self.copies)  # the same, for activations and their gradients
        self.host_group = self._along(self._of_copy, self.copies, "gloo")  # the same, for objects

    def _of_stage(self, stage: int) -> list[int]:
        return [stage * self.copies + copy for copy in range(self.copies)]

    def _of_copy(self, copy: int) -> list[int]:
        return [stage * self.copies + copy for stage in range(self.stages)]

    def _along(self, ranks: Callable[[int], list[int]], number: int, backend: str | None = None) -> Any:
        """Make one group per line of the grid and return this rank's."""
        rank = dist.get_rank()
        mine = None
        for index in range(number):
            group = dist.new_group(ranks(index), self._timeout, backend)
            if rank in ranks(index):
                mine = group
        return mine
