"""Checkpoints that are written while training goes on.

Note [Waits of a caller]
    For the previous save, if it still runs, and for one copy of this rank's part of the state into host memory that is
    kept from save to save. Files, sums and agreements are the business of a thread.
    Removals are queued behind the save: an old checkpoint goes when the new one is whole, and stays if that failed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from lightning_zero.checkpoint import directory
from lightning_zero.checkpoint.ranks import Ranks
from lightning_zero.storage.copies import finish_stream, first_call_of_thread
from lightning_zero.storage.host import HostStore

if TYPE_CHECKING:
    from lightning_zero.engine.engine import ZeroEngine

__all__ = ["AsyncSaver", "StagingBuffer"]

_ALIGNMENT = 64  # bytes; a multiple of every dtype's size


class AsyncSaver:
    """Writes checkpoints of one engine in the background, one after the other.

    Every rank makes one, and calls ``save`` in the same order. Nothing is lost at the end of the interpreter: it waits
    for the thread.

    Args:
        engine: Whose state is saved.
    """

    def __init__(self, engine: ZeroEngine) -> None:
        self.engine = engine
        self._ranks = Ranks.in_background(engine)
        device = engine.internals.communicator.device
        self._staging = StagingBuffer(pinned=device.type == "cuda")
        # PyTorch's writer asks for the current stream, also where all tensors are in host memory.
        self._thread = ThreadPoolExecutor(1, "lightning_zero-save", first_call_of_thread(device))
        self._running: Future[None] | None = None  # the last save; its error is not raised yet
        self._removals: list[Future[None]] = []  # whose errors are not raised yet

    @property
    def is_running(self) -> bool:
        """Whether the last save is being written."""
        return self._running is not None and not self._running.done()

    def save(self, checkpoint: Mapping[str, Any], path: str | os.PathLike[str], full: bool) -> None:
        """Take the state as it is now, and return; see ``directory.save``. Collective: all ranks.

        Raises:
            CheckpointError, OSError: The previous save failed, or this one could not begin.
        """
        self.wait()
        prepared = directory.prepare(self.engine, checkpoint, path, full)
        with self._ranks.agree(f"Saving `{prepared.target}`"):
            prepared.detach(self._staging.copy)
        self._running = self._thread.submit(directory.write, prepared, self._ranks)

    def remove(self, path: str | os.PathLike[str], then: Callable[[], None]) -> None:
        """Remove a checkpoint, and call a function, when the running save has succeeded."""
        running = self._running

        def remove_now() -> None:
            directory.remove(path)
            then()

        def remove_after() -> None:
            if running is not None and running.exception() is None:
                remove_now()

        if running is None:
            remove_now()
        else:
            self._removals.append(self._thread.submit(remove_after))

    def wait(self) -> None:
        """Return when everything is on the disk.

        Raises:
            CheckpointError, OSError: The last save failed, or a removal did. It is raised once.
        """
        self._thread.submit(_nothing).result()
        removals, self._removals = self._removals, []
        running, self._running = self._running, None
        if running is not None:
            running.result()
        for removal in removals:
            removal.result()

    def close(self) -> None:
        """Wait, and give thread and memory back; see ``wait``."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._staging.close()


def _nothing() -> None:
    pass


class StagingBuffer:
    """Host memory that takes copies of tensors, as large as the largest set of them so far.

    Args:
        pinned: Lock its pages, so that copies from a CUDA device run at the speed of the bus. Needs such a device.
    """

    def __init__(self, pinned: bool) -> None:
        self._store = HostStore(pinned=pinned)
        self._memory = self._store.allocate(0, torch.uint8)

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of 1-D tensors, valid until the next call."""
        starts, nbytes = [], 0
        for tensor in tensors:
            starts.append(nbytes)
            nbytes += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if nbytes > self._memory.nbytes:
            self._memory = self._store.allocate(0, torch.uint8)  # two of them would not be bounded
            self._store.close()
            self._memory = self._store.allocate(nbytes, torch.uint8)
        copies = [
            self._memory[start : start + tensor.nbytes].view(tensor.dtype)
            for start, tensor in zip(starts, tensors, strict=True)
        ]
        for copied, tensor in zip(copies, tensors, strict=True):
            copied.copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensor in tensors}:
            finish_stream(device)
        return copies

    def close(self) -> None:
        """Give the memory back; copies of it are not valid any more."""
        self._memory = self._store.allocate(0, torch.uint8)
        self._store.close()
