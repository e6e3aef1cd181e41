"""Shards in host memory: page-locked where a CUDA device copies from it, of the size that is asked for.

Note [Who unlocks]
    Locked memory is its tensors' and no store's: a store keeps addresses, so that tensors in the memory can be counted.
    When the last one goes, the memory waits in a list, still locked, because a copy from it may be running, and
    unlocking is a call of CUDA, which must not come in the middle of something else: Python's collector runs in any
    thread, at any time. The list is that of all stores, because a store may be dropped without ``close``. Its memory is
    unlocked before other memory is locked, when a store is closed, and by ``unlock_freed``. A store to which memory is
    given back (of gradients, behind a step) unlocks its own alone: it does not wait for the device because of others.
"""

from __future__ import annotations

import warnings
from collections import deque
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch

from lightning_zero.storage.copies import Landing, finish_device, lock_pages, unlock_pages
from lightning_zero.storage.pages import Pages
from lightning_zero.storage.store import Accounts, Kind

__all__ = ["HostStore", "StagingSlot", "unlock_freed"]

_REASONS = {  # of the driver
    1: "the memory is of a kind that cannot be locked",
    2: "too little memory is left, or the limit of locked memory is too low: raise `ulimit -l`",
    712: "something else has locked a part of it: a checkpoint or data loader that registers memory itself",
    801: "the system does not support it",
}


class StagingSlot:
    """Memory that is filled by the host and copied to the device.

    Args:
        memory: (bytes,) uint8.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._owner: object = None
        self.landings: list[Landing] = []  # of the copies from it

    @property
    def nbytes(self) -> int:
        """Number of bytes that it holds."""
        return self._memory.nbytes

    def view(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return its first ``numel`` elements as ``dtype``; its length is a multiple of every itemsize."""
        return self._memory[: numel * dtype.itemsize].view(dtype)

    def take(self, owner: object) -> None:
        """Return when ``owner`` may fill it: it waits for copies of values of another one."""
        if self._owner is not owner:
            self.wait()
            self._owner = owner

    def wait(self) -> None:
        """Return when it may be filled again."""
        landings, self.landings = self.landings, []
        for landing in landings:
            landing.finish()


class HostStore(Accounts):
    """Tensors in host memory, with the bytes of each kind that are alive.

    PyTorch's own pinned allocator rounds sizes up to powers of two; here a tensor takes whole pages, which nothing else
    lies in. Where pages cannot be locked, memory is pageable, which is said once.

    Args:
        pinned: Lock the pages. Needs a CUDA device.
        copies_of: The device that copies from and to it; by default the current one.
    """

    def __init__(self, *, pinned: bool, copies_of: torch.device | None = None) -> None:
        super().__init__()
        self.device = torch.device("cpu")
        self.is_pinned = pinned
        self._copies_of = copies_of
        self._locked: set[int] = set()  # addresses that are registered with the driver
        self._pool: dict[int, list[torch.Tensor]] = {}  # tensors in locked memory that were given back, by bytes
        self._staging_bytes = 0
        self._slots: deque[StagingSlot] = deque()

    def create(self, kind: Kind, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a (numel,) tensor of any content, accounted under ``kind`` until it is given back."""
        tensor = self.allocate(numel, dtype)
        self.adopt(kind, tensor.nbytes)
        return tensor

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a (numel,) tensor of any content that is in no account; see Note [Who unlocks]."""
        with torch.inference_mode(False):
            return self._take(numel * dtype.itemsize).view(dtype)

    def keep(self, kind: Kind, values: torch.Tensor, name: str) -> torch.Tensor:
        """Return a copy of a 1-D tensor in host memory."""
        return self.create(kind, values.numel(), values.dtype).copy_(values)

    def give_back(self, kind: Kind, tensor: torch.Tensor) -> None:
        """Take back a tensor of ``create`` that nobody reads any more: locked memory is kept for the next one."""
        self.release(kind, tensor.nbytes)
        unlock_freed(self)
        if tensor.data_ptr() in self._locked:
            with torch.inference_mode(False):
                self._pool.setdefault(tensor.nbytes, []).append(tensor.detach().view(torch.uint8))

    def need_staging(self, nbytes: int) -> None:
        """Make staging slots of at least ``nbytes`` from now on."""
        self._staging_bytes = max(self._staging_bytes, nbytes)

    def staging_slot(self) -> StagingSlot:
        """Return memory for values on their way to the device: two in turn, one is filled while the other is copied."""
        if not self._slots or self._slots[0].nbytes < self._staging_bytes:
            numel = self._staging_bytes
            self._slots = deque(StagingSlot(self.create("parameters", numel, torch.uint8)) for _ in range(2))
        self._slots.rotate()
        return self._slots[0]

    def _take(self, nbytes: int) -> torch.Tensor:
        """Return (nbytes,) uint8, locked if memory is."""
        pool = self._pool.get(nbytes)
        if pool:
            return pool.pop()
        if not self.is_pinned or not nbytes:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        unlock_freed()
        try:
            pages = Pages(nbytes)  # nothing else lies in them: the driver locks pages
        except OSError:  # not on Linux: PyTorch locks powers of two
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")
        self._pin(pages)
        return pages.content[:nbytes]

    def _pin(self, pages: Pages) -> None:
        address, size = pages.content.data_ptr(), pages.content.nbytes
        code = lock_pages(address, size, self._copies_of)
        if code == 0:
            self._locked.add(address)
            pages.when_freed(partial(_keep_locked, _FREED, _Block(self._locked, address, self._copies_of)))
            return
        self.is_pinned = False
        warnings.warn(
            f"{size} bytes of host memory could not be locked (CUDA error {code}:"
            f" {_REASONS.get(code, 'see the list of CUDA errors')}); offloaded tensors are in pageable memory, which"
            " makes copies slower.",
            stacklevel=2,
        )

    def close(self) -> None:
        """Unlock all pages, also those of tensors that somebody keeps, and forget all accounts."""
        if self._locked:
            finish_device(self._copies_of)  # a copy may be running that nobody waits for
        for address in self._locked:
            unlock_pages(address, self._copies_of)
        self._locked.clear()
        unlock_freed()
        self._pool.clear()
        self._slots.clear()
        super().close()


class _Block(NamedTuple):
    """Memory of a store.

    Attributes:
        locked: The addresses that the store has locked.
        address: Of the memory.
        device: The one that has locked it.
    """

    locked: set[int]
    address: int
    device: torch.device | None


_FREED: list[tuple[_Block, object]] = []  # of all stores, with the memory, until it is unlocked


def _keep_locked(freed: list[tuple[_Block, object]], block: _Block, memory: object) -> None:
    if block.address in block.locked:
        freed.append((block, memory))


def unlock_freed(store: HostStore | None = None) -> None:
    """Unlock memory in which no tensor lies any more, behind the work of its device.

    Args:
        store: Only memory that it has locked; None: of all stores.
    """
    freed: list[tuple[_Block, object]] = []
    others: list[tuple[_Block, object]] = []
    with suppress(IndexError):  # threads may free some meanwhile, and unlock some
        while True:
            entry = _FREED.pop()
            is_meant = store is None or entry[0].locked is store._locked
            (freed if is_meant else others).append(entry)
    _FREED.extend(others)
    blocks = [block for block, _ in freed if block.address in block.locked]  # others are of stores that are closed
    for device in {block.device for block in blocks}:
        finish_device(device)  # a copy may be running that nobody waits for
    for block in blocks:
        block.locked.remove(block.address)
        unlock_pages(block.address, block.device)
