"""What the ranks tell one another while they save or load."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from lightning_zero.engine.engine import ZeroEngine

__all__ = ["CheckpointError", "Ranks", "describe"]


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read on another rank."""


class Ranks:
    """What the ranks tell one another while they save or load; over gloo on the host.

    Every method is collective: all ranks, in one order on a group.

    Args:
        engine: Whose ranks; without one the world is one rank.
        group: A group of their own, for a thread; by default the engine's for the host.
    """

    def __init__(self, engine: ZeroEngine | None, group: Any = None) -> None:
        communicator = None if engine is None else engine.communicator
        self.rank = 0 if communicator is None else communicator.rank
        self.world_size = 1 if communicator is None else communicator.world_size
        self.group = group if group is not None or communicator is None else communicator.control_group

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def from_first(self, value: Any) -> Any:
        """Return the value of rank 0."""
        return self.gather(value if self.rank == 0 else None)[0]

    @contextlib.contextmanager
    def agree(self, what: str) -> Iterator[None]:
        """End on every rank with an error, if it does on some rank. No collective inside."""
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        failed = {rank: text for rank, text in enumerate(self.gather(error and describe(error))) if text is not None}
        if error is not None:
            raise error
        if failed:
            raise CheckpointError(f"{what} failed on " + "; ".join(f"rank {rank}: {failed[rank]}" for rank in failed))


def describe(error: BaseException) -> str:
    """Return an error as another rank shows it."""
    return f"{type(error).__name__}: {error}"
