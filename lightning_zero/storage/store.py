"""Storage for shards between uses, with accounts of the bytes of each kind that are alive.

Call protocol of a ``ShardStore`` (every call on the rank that owns the shard; no collectives):

1. ``create`` makes a shard and accounts it under its kind; ``give_back`` ends that.
2. ``keep`` makes one and gives it values.
3. ``adopt`` and ``release`` account storages that the engine allocates itself (gathered parameters, full gradients).
4. ``live`` and ``peak`` answer how many bytes are, or were at most, alive.
5. ``close`` forgets everything.

``DeviceStore`` keeps shards in the memory of the device, where they may be used directly.
"""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from typing import Literal, Protocol

import torch

from lightning_zero.storage.copies import Copies

__all__ = ["Accounts", "DeviceStore", "Kind", "ShardStore"]

Kind = Literal["parameters", "gradients", "optimizer", "gathered"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_KEPT_BYTES = 2**30
_RETURNED_BYTES = 2**20


class ShardStore(Protocol):
    """Storage for shards, as the engine uses it; see the module's call protocol."""

    device: torch.device

    def create(self, kind: Kind, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a (numel,) tensor of any content, accounted under ``kind``."""
        ...

    def keep(self, kind: Kind, values: torch.Tensor, name: str) -> torch.Tensor:
        """Return a tensor with the values of a 1-D tensor, accounted under ``kind``; errors call it ``name``."""
        ...

    def adopt(self, kind: Kind, nbytes: int) -> None:
        """Account bytes that were allocated elsewhere."""
        ...

    def release(self, kind: Kind, nbytes: int) -> None:
        """Account that bytes are no longer alive."""
        ...

    def give_back(self, kind: Kind, tensor: torch.Tensor) -> None:
        """Take back a whole tensor that ``create`` has made and nobody reads any more."""
        ...

    def live(self, kind: Kind) -> int:
        """Return the bytes that are alive."""
        ...

    def peak(self, kind: Kind) -> int:
        """Return the most bytes that were alive at once."""
        ...

    def reset_peak(self) -> None:
        """Start measuring peaks anew."""
        ...

    def close(self) -> None:
        """Forget everything."""
        ...


class Accounts:
    """The bytes of each kind that are alive, and the most that were."""

    def __init__(self) -> None:
        self._live: Counter[Kind] = Counter()
        self._peak: Counter[Kind] = Counter()

    def adopt(self, kind: Kind, nbytes: int) -> None:
        """Account ``nbytes`` that were allocated elsewhere."""
        self._live[kind] += nbytes
        self._peak[kind] = max(self._peak[kind], self._live[kind])

    def release(self, kind: Kind, nbytes: int) -> None:
        """Account that ``nbytes`` are no longer alive."""
        self._live[kind] -= nbytes

    def live(self, kind: Kind) -> int:
        """Bytes of ``kind`` that are alive."""
        return self._live[kind]

    def peak(self, kind: Kind) -> int:
        """Most bytes of ``kind`` that were alive at once since ``reset_peak``."""
        return self._peak[kind]

    def reset_peak(self) -> None:
        """Start measuring peaks anew."""
        self._peak = Counter(self._live)

    def close(self) -> None:
        """Forget all accounts."""
        self._live.clear()
        self._peak.clear()


class DeviceStore(Accounts):
    """Shards in device memory, and the streams in which they are copied to and from host memory.

    Args:
        device: Where tensors are made.
        keeps_freed: On a CPU, keep freed memory for the next unit; else the system has it back at once.
    """

    def __init__(self, device: torch.device, *, keeps_freed: bool = True) -> None:
        if device.type == "cpu":
            _keep_freed_memory(_KEPT_BYTES if keeps_freed else _RETURNED_BYTES)
        super().__init__()
        self.device = device
        self.copies = Copies(device)

    def create(self, kind: Kind, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a (numel,) tensor of any content, accounted under ``kind`` until it is given back."""
        with torch.inference_mode(False):
            tensor = torch.empty(numel, dtype=dtype, device=self.device)
        self.adopt(kind, tensor.nbytes)
        return tensor

    def keep(self, kind: Kind, values: torch.Tensor, name: str) -> torch.Tensor:
        """Return a copy of a 1-D tensor in device memory."""
        return self.create(kind, values.numel(), values.dtype).copy_(values)

    def give_back(self, kind: Kind, tensor: torch.Tensor) -> None:
        """Account that a tensor is no longer alive; its memory goes with it."""
        self.release(kind, tensor.nbytes)


def _keep_freed_memory(nbytes: int) -> None:
    """Let the C library keep up to ``nbytes``, 1 GiB, of freed memory for the next allocation (ADR 0017).

    Units are gathered into memory that was given back a moment ago. By default glibc returns large blocks to the
    system, which hands them out again page by page, zero-filled. Without glibc this does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, nbytes)
        mallopt(_M_MMAP_THRESHOLD, nbytes)
