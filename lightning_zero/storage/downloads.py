"""Values of a device on their way to disks, which nobody waits for: through locked host memory, in a disk's thread.

Note [Who waits]
    The device copies to host memory behind its compute. A thread of the disks waits for that copy and moves the
    values into the memory from which they are written. So the host goes on with the backward. How much is on its way at
    once is bounded by the room of the disks' visits.
"""

from __future__ import annotations

import threading
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
        self._lent: list[_Download] = []
        self._lock = threading.Lock()

    def start(self, values: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
        """Start copying a 1-D tensor of the device; return the call that moves it into ``target``, in host memory."""
        with self._lock:
            self._take_back()
            staging = self._host.create("gradients", values.numel(), values.dtype)
            download = _Download(staging, target, self._copies.down(staging, values).finish)
            self._lent.append(download)
        return download.finish

    def _take_back(self) -> None:
        """Take memory back whose values have arrived."""
        for download in [one for one in self._lent if one.has_arrived]:
            self._lent.remove(download)
            self._host.give_back("gradients", download.staging)

    def close(self) -> None:
        """Take all memory back; nothing is on its way any more."""
        for download in self._lent:
            self._host.give_back("gradients", download.staging)
        self._lent.clear()


class _Download:
    """A copy to host memory, and where it goes from there."""

    def __init__(self, staging: torch.Tensor, target: torch.Tensor, wait: Callable[[], None]) -> None:
        self.staging = staging
        self.has_arrived = False
        self._target = target
        self._wait = wait

    def finish(self) -> None:
        self._wait()
        with torch.inference_mode(False), torch.no_grad():
            self._target.copy_(self.staging)
        self.has_arrived = True
