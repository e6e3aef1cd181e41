"""Values of a device on their way to disks, which nobody waits for: through locked host memory, in a disk's thread.

Note [Who waits]
    The device copies to host memory behind its compute. A thread of the disks waits for that copy and moves the
    values into the memory from which they are written. So the host goes on with the backward. How much is on its way at
    once is bounded by the room of the disks' visits.

Note [Memory on the way]
    Memory is kept for the next values, because locking takes time. The smallest that fits is taken. If none does, the
    largest that is free is exchanged for larger memory, so there are as many pieces as were on their way at once, and
    not one for each size.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Callable

import torch

from lightning_zero.storage.copies import Copies
from lightning_zero.storage.host import HostStore

__all__ = ["Downloads"]


class Downloads:
    """Lends host memory to values that leave a device.

    Args:
        host: Where the memory is from.
        copies: The streams of the device.
    """

    def __init__(self, host: HostStore, copies: Copies) -> None:
        self._host = host
        self._copies = copies
        self._free: list[torch.Tensor] = []  # (bytes,) uint8, the smallest first
        self._nbytes = 0  # of these and of memory that is lent
        self._lock = threading.Lock()

    def start(self, values: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
        """Start copying a 1-D tensor of the device; return the call that moves it into ``target``, in host memory."""
        memory = self._lend(values.nbytes)
        staging = memory[: values.nbytes].view(values.dtype)
        wait = self._copies.down(staging, values).finish

        def finish() -> None:
            wait()
            with torch.inference_mode(False), torch.no_grad():
                target.copy_(staging)
            self._take_back(memory)

        return finish

    def _lend(self, nbytes: int) -> torch.Tensor:
        with self._lock:
            index = next((index for index, one in enumerate(self._free) if one.nbytes >= nbytes), None)
            if index is not None:
                return self._free.pop(index)
            if self._free:
                self._account(-self._free.pop().nbytes)
            self._account(nbytes)
            return self._host.allocate(nbytes, torch.uint8)

    def _take_back(self, memory: torch.Tensor) -> None:
        with self._lock:
            insort(self._free, memory, key=lambda one: one.nbytes)

    def _account(self, nbytes: int) -> None:
        self._nbytes += nbytes
        self._host.adopt("gradients", nbytes)

    def close(self) -> None:
        """Give all memory back; nothing is on its way any more."""
        self._free.clear()
        self._account(-self._nbytes)
