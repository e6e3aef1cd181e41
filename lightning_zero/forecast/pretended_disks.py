"""Disks of a forecast: records take room in the accounts alone, and nothing is written.

Note [Values]
    A record of one page keeps its values, because small tensors are computed in a forecast (``dry_run.py``). Larger
    ones are zeros when they are read, which is what their memory holds when it was given back.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_zero.storage.nvme import Record, Transfer
from lightning_zero.storage.pages import PAGE_BYTES

__all__ = ["PretendedDisks"]


class PretendedDisks:
    """In the place of an ``NvmeStore``, with its call protocol; transfers are done when they are asked for.

    Args:
        paths: Directories, which are neither made nor looked at.
        transfer: Takes the bytes of a read or write; returns a function that waits for it.
        options: Of an ``NvmeStore``; they change nothing here.
    """

    def __init__(self, paths: Sequence[Path], *, transfer: Callable[[int], Callable[[], None]], **options: Any) -> None:
        self.paths = list(paths)
        self._transfer = transfer
        self._values: dict[Record, bytes] = {}  # of small records

    def reserve(self, name: str, nbytes: int) -> Record:
        """Return a record, which takes no room."""
        return Record(name, nbytes, [])

    def give_back(self, record: Record) -> None:
        """Forget a record."""
        self._values.pop(record, None)

    def write(self, record: Record, source: torch.Tensor, behind: Transfer | None = None) -> Transfer:
        """Take note of a write, and keep small values."""
        if record.nbytes <= PAGE_BYTES:
            self._values[record] = ctypes.string_at(source.data_ptr(), record.nbytes)
        return _PretendedTransfer(self._transfer(record.nbytes), source)

    def read(self, record: Record, target: torch.Tensor) -> Transfer:
        """Take note of a read, and bring small values."""
        values = self._values.get(record)
        if values is not None:
            ctypes.memmove(target.data_ptr(), values, record.nbytes)
        return _PretendedTransfer(self._transfer(record.nbytes), target)

    def close(self) -> None:
        """Forget all records."""
        self._values.clear()


class _PretendedTransfer(Transfer):
    """A transfer that is done, for which a modelled clock may wait.

    Args:
        wait: Lets the clock wait.
        keep: As in ``Transfer``.
    """

    def __init__(self, wait: Callable[[], None], keep: torch.Tensor) -> None:
        super().__init__([], keep)
        self._wait_on_clock = wait

    def wait(self) -> None:
        """Let the clock wait."""
        super().wait()
        self._wait_on_clock()
