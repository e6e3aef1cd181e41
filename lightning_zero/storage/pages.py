"""Host memory at a fixed address whose pages are given back while its content is elsewhere.

Note [Pages]
    A tensor over such memory, and every view of it, stays valid while there is nothing behind it: the address space is
    kept, the pages are not. So direct reads and writes go straight to and from the tensor, without a copy, and nobody
    has to be told a new address. Large memory asks for huge pages: with pages of 4 KiB a disk read would spend most
    of its time on them. After the pages were given back reads return zeros;
    ``lightning_zero/storage/disk_tensor.py`` decides who may read.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable

import torch

__all__ = ["PAGE_BYTES", "Pages"]

PAGE_BYTES = 4096
_HUGE_BYTES = 2**21
_NORESERVE = 0x4000  # of Linux: the address space alone takes nothing


class Pages:
    """Zeros until they are written, and again after ``drop``.

    Attributes:
        content: (padded nbytes,) uint8, whole pages.

    Args:
        nbytes: Rounded up to whole pages, at least one.

    Raises:
        OSError: The system has no pages that can be given back, or refuses the address space.
    """

    def __init__(self, nbytes: int) -> None:
        if not hasattr(mmap, "MADV_DONTNEED"):
            raise OSError("host memory in pages of its own needs Linux")
        size = max(-(-nbytes // PAGE_BYTES) * PAGE_BYTES, PAGE_BYTES)
        is_huge = size >= _HUGE_BYTES
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        self._memory = mmap.mmap(-1, size + (_HUGE_BYTES if is_huge else 0), flags=flags)
        # A child process that is forked must not share pages that a disk or a device transfers to and from.
        self._memory.madvise(mmap.MADV_DONTFORK)
        self._view = memoryview(self._memory)  # lives as long as a tensor does in it; see `when_freed`
        with torch.inference_mode(False):
            whole = torch.frombuffer(self._view, dtype=torch.uint8)
        self._start = -whole.data_ptr() % _HUGE_BYTES if is_huge else 0
        self._size = size
        self.content = whole[self._start : self._start + size]
        if is_huge:
            self._ask_for_huge_pages()

    def _ask_for_huge_pages(self) -> None:
        try:
            self._memory.madvise(mmap.MADV_HUGEPAGE, self._start, self._size // _HUGE_BYTES * _HUGE_BYTES)
        except OSError:  # a kernel without them: slower
            return

    def when_freed(self, call: Callable[[object], None]) -> None:
        """Call ``call(memory)`` when nobody has this object or a tensor in it any more, in any thread.

        The system has the address space back when nobody has ``memory`` either. At exit nothing is called.
        """
        weakref.finalize(self._view, call, self._memory).atexit = False

    def drop(self) -> None:
        """Give the pages back."""
        self._memory.madvise(mmap.MADV_DONTNEED, self._start, self._size)
