"""Masters, optimizer states and gradients in host memory for a while: the device is free for something else.

Note [Read there, stepped here]
    The offloaded states may be read and saved where they are: buffers and optimizers refer to the tensors in host
    memory. Whoever steps, adds to gradients or shows them calls ``reload`` first, so that every number is computed
    on the processor that computes it always.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_zero.engine.buffers.buffer import FlatBuffer
from lightning_zero.engine.optim.optimizer import ShardedOptimizer
from lightning_zero.storage.store import ShardStore

__all__ = ["OffloadedStates"]


class OffloadedStates:
    """Parameter shards, masters, gradients and optimizer states that are offloaded to host memory for a while.

    Args:
        store: Memory of the device.
        host: Host memory.
    """

    def __init__(self, store: ShardStore, host: ShardStore) -> None:
        self._store = store
        self._host = host
        self._buffers: list[FlatBuffer] = []
        self._optimizers: list[ShardedOptimizer] = []

    @property
    def is_empty(self) -> bool:
        """Whether everything is where it is stepped."""
        return not self._buffers

    def offload(self, buffers: Sequence[FlatBuffer], optimizers: Sequence[ShardedOptimizer]) -> None:
        """Move shards, masters and optimizer states from the device to host memory. No step is due, no window open."""
        self._buffers = [buffer for buffer in buffers if buffer.values.is_on_device]
        self._optimizers = list(optimizers)
        self._move(self._host)
        for buffer in self._buffers:
            buffer.values.wake = self.reload

    def reload(self) -> None:
        """Move the states back to the device; does nothing if none were moved."""
        if self.is_empty:
            return
        for buffer in self._buffers:
            buffer.values.wake = None
        self._move(self._store)
        self._buffers, self._optimizers = [], []

    def _move(self, store: ShardStore) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for optimizer in self._optimizers:  # one by one: for a moment a storage is in both places
                optimizer.states.move(self._buffers, _Move(store.device))
            for buffer in self._buffers:
                buffer.move(store)


class _Move:
    """Copies tensors to a device; views of one storage stay views of one storage."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}  # old ones live on: ids are theirs

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8, device=self._device)
            copy.untyped_storage().copy_(storage)
            self._storages[storage._cdata] = storage, copy
        _, copy = self._storages[storage._cdata]
        moved = torch.empty(0, dtype=tensor.dtype, device=self._device)
        return moved.set_(copy.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
