"""Ranks as a grid: pipeline stages times copies of the model.

Rank ``stage * copies + copy``: the ranks of one stage, which reduce gradients among them, are neighbours; the stages of
one copy, which send activations, are far apart.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lightning_zero.comm.groups import Lent, lend
from lightning_zero.comm.peers import told_error
from lightning_zero.comm.traffic import Traffic
from lightning_zero.errors import CollectiveError

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
        self.data_group = self.copy_group  # those with different data: with tensor parallelism one per tensor group
        self.stage_group = self._groups.stage  # the ranks of this copy, one per stage
        self.message_group = self._groups.message  # the same, for activations and their gradients
        self._host_group = self._groups.host  # the same, for objects
        # - Cost
        self.traffic = Traffic()  # of these calls, and of messages between stages

    # -- Messages between the stages of a copy -------------------------------------------------------------------------

    def gather(self, value: Any, what: str) -> list[Any]:
        """Return the objects of all stages. Collective: all ranks of a copy.

        Args:
            value: This stage's.
            what: Name of the message, for errors.

        Raises:
            CollectiveError: Another stage has failed or did not come in time.
        """
        everyone: list[Any] = [None] * self.stages
        with self._counted(what, partial(_nbytes_of, value)):
            dist.all_gather_object(everyone, value, group=self._host_group)
        return everyone

    def gather_numbers(self, numbers: torch.Tensor, what: str) -> list[torch.Tensor]:
        """Return the tensors of all stages, which lie in host memory and have one shape; otherwise as ``gather``."""
        everyone = [torch.empty_like(numbers) for _ in range(self.stages)]
        with self._counted(what, lambda: numbers.nbytes):
            dist.all_gather(everyone, numbers, group=self._host_group)
        return everyone

    def broadcast(self, value: Any, stage: int, what: str) -> Any:
        """Return the object of one stage; otherwise as ``gather``."""
        values = [value]
        with self._counted(what, partial(_nbytes_of, value if stage == self.stage else None)):
            dist.broadcast_object_list(values, group=self._host_group, group_src=stage)
        return values[0]

    @contextmanager
    def _counted(self, what: str, nbytes: Callable[[], int]) -> Iterator[None]:
        """Write a call down, and name it in errors; ``nbytes`` returns how many this stage sends."""
        if self.traffic.ledger is not None:
            self.traffic.add("control", what, nbytes(), ranks=self.ranks_of(), is_across=False)
        with self._naming(what):
            yield
        self.traffic.end(what)

    def ranks_of(self, *stages: int) -> list[int]:
        """Return the ranks of some stages of this copy, by default of all."""
        return [stage * self.copies + self.copy for stage in stages or range(self.stages)]

    @contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise self.failure(what, error) from None

    def failure(self, what: str, reason: Exception | str, peer: int | None = None) -> CollectiveError:
        """Return the error to raise where something did not come from another stage. No collective.

        Args:
            what: The message that did not come.
            reason: Why, or the transport's error.
            peer: The stage; None: any of them.
        """
        self.distrust()
        start = f"pipeline stage {self.stage} of {self.stages}: {what} failed"
        if told := told_error():
            return CollectiveError(f"{start}.{told}")
        if isinstance(reason, str):
            return CollectiveError(f"{start}: {reason}")
        others = [stage for stage in range(self.stages) if stage != self.stage] if peer is None else [peer]
        names = " or ".join(f"stage {stage} (rank {self.ranks_of(stage)[0]})" for stage in others)
        return CollectiveError(
            f"{start}: {names} has stopped, was ended from outside (killed, out of memory), or was slower than"
            f" `timeout`. The first error of the other ranks says more. The transport says: {reason}"
        )

    def distrust(self) -> None:
        """Do not lend the groups again: calls of an interrupted step may be in flight. No collective."""
        self._groups.destroy()


class _MeshGroups(Lent):
    """The groups of one mesh at a time. They stay until the program ends. Collective: all ranks make the same ones."""

    def __init__(self, stages: int, copies: int, timeout: timedelta) -> None:
        super().__init__()
        self._timeout = timeout
        of_stages = [[stage * copies + copy for copy in range(copies)] for stage in range(stages)]
        of_copies = [[stage * copies + copy for stage in range(stages)] for copy in range(copies)]
        self.copy = self._along(of_stages)
        self.stage = self._between(of_copies)
        self.message = self._between(of_copies)
        self.host = self._between(of_copies, "gloo")

    def _between(self, copies: list[list[int]], backend: str | None = None) -> Any:
        """Make one group per copy, of its stages, and return this rank's; simulations replace it."""
        return self._along(copies, backend)

    def _along(self, lines: list[list[int]], backend: str | None = None) -> Any:
        """Make one group per line of the grid and return this rank's."""
        rank = dist.get_rank()
        mine = None
        for ranks in lines:
            group = dist.new_group(ranks, self._timeout, backend)
            if rank in ranks:
                mine = group
        return mine


def _nbytes_of(value: Any) -> int:
    """Return the bytes of an object as it is sent."""
    return len(pickle.dumps(value))
