"""Messages among the ranks while they save or load: paths and errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lightning_zero.errors import CollectiveError

if TYPE_CHECKING:
    from lightning_zero.engine.engine import ZeroEngine

__all__ = ["COPIES", "CheckpointError", "Ranks", "describe", "describe_layouts"]

COPIES = "copies"  # key of a checkpoint: copies of the model, on each of which one part of the data is trained


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read on another rank."""


class Ranks:
    """Messages among the ranks while they save or load; over gloo on the host.

    Every method is collective: all ranks, in one order. One thread at a time.

    Args:
        engine: Whose ranks; without one the world is one rank.
    """

    def __init__(self, engine: ZeroEngine | None) -> None:
        communicator = None if engine is None else engine.internals.world_communicator
        self.rank = 0 if communicator is None else communicator.rank
        self.world_size = 1 if communicator is None else communicator.world_size
        self.group = None if communicator is None else communicator.object_group
        self._timeout_s = 0.0 if communicator is None else communicator.timeout_s
        self._communicator = communicator
        self._engine = engine
        self._per_batch = 1 if engine is None else engine.internals.fits.ranks_per_batch

    @property
    def data_rank(self) -> int:
        """Number of this rank's tensor group, whose ranks have the same batches; without them the rank's own."""
        return self.rank // self._per_batch

    @property
    def num_data_ranks(self) -> int:
        """Number of tensor groups, in all pipeline stages; without them the number of ranks."""
        return self.world_size // self._per_batch

    @classmethod
    def in_background(cls, engine: ZeroEngine) -> Ranks:
        """Make one for another thread, whose messages never meet those of the main thread. Collective."""
        ranks = cls(engine)
        ranks.group = engine.internals.world_communicator.background_group
        return ranks

    @property
    def num_copies(self) -> int:
        """Number of copies of the model that are trained on different data."""
        return 1 if self._engine is None else self._engine.world_size // self._per_batch

    def meet(self, what: str, timeout_s: float | None = None) -> None:
        """Wait until all ranks are here.

        Args:
            what: Name of the operation, for the error.
            timeout_s: Seconds to wait; by default ``communication.timeout_s``.

        Raises:
            CheckpointError: Not all ranks came in time, or the process group is gone.
        """
        if self.world_size == 1:
            return
        self.check_group()
        wait = self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s)
        try:
            dist.monitored_barrier(self.group, timedelta(seconds=wait), wait_all_ranks=True)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise CheckpointError(
                f"{what} needs all ranks, and not all came to rank {self.rank} within {wait:g} s: {reason} Call"
                " `trainer.save_checkpoint` and the like on every rank, not under `if trainer.is_global_zero`."
            ) from error

    def check_group(self) -> None:
        """Refuse to go on without the process group. A destroyed group may still send, and torch ignores it.

        Raises:
            CheckpointError: The group was destroyed.
        """
        if self.world_size == 1:
            return
        try:
            dist.get_rank(self.group)
        except ValueError as error:
            raise CheckpointError(
                f"Saving and loading on {self.world_size} ranks needs their process group, which was destroyed. Call"
                " `torch.distributed.destroy_process_group()` after the last save and load."
            ) from error

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks.

        Raises:
            CheckpointError: The process group is gone.
            CollectiveError: A rank has stopped, or did not come in time.
        """
        if self._communicator is None or self.world_size == 1:
            return [value]
        self.check_group()
        return self._communicator.gather_objects(value, "exchange about a checkpoint", self.group)

    def gather_data(self, value: Any) -> list[Any]:
        """Return the value of the first rank of every tensor group; otherwise as ``gather``."""
        return self.gather(value)[:: self._per_batch]

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
        try:
            texts = self.gather(error and describe(error))
        except (CheckpointError, CollectiveError):
            if error is None:
                raise
            texts = []  # another rank has an error too, and is gone
        failed = {rank: text for rank, text in enumerate(texts) if text is not None}
        if error is not None:
            error.add_note(f"{what} failed on rank {self.rank}.")
            raise error
        if failed:
            raise CheckpointError(f"{what} failed on " + "; ".join(f"rank {rank}: {failed[rank]}" for rank in failed))


def describe(error: BaseException) -> str:
    """Return an error as another rank shows it."""
    return f"{type(error).__name__}: {error}"


def describe_layouts(saved: tuple[int, int], here: tuple[int, int]) -> str:
    """Say where a checkpoint was saved and is resumed, each as the number of ranks and that of the model's copies."""
    return (
        f"The checkpoint was saved on {saved[0]} ranks{_in_stages(*saved)} and is resumed on"
        f" {here[0]}{_in_stages(*here)}"
    )


def _in_stages(world_size: int, copies: int) -> str:
    return f" ({world_size // copies} pipeline stages)" if world_size != copies else ""
