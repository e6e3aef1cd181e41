"""Records on local disks: direct reads and writes by a few threads, checked, in files that no crash leaves behind.

Call protocol of ``NvmeStore`` (each rank has its own; no collectives):

1. ``reserve`` takes room on the disks for a record of a fixed size; a full disk is an error here, not later, unless the
   file system cannot reserve room.
2. ``empty`` makes a buffer for a record, aligned as direct access needs it.
3. ``write`` and ``read`` return a ``Transfer`` at once; the tensor belongs to it until ``wait`` has returned.
4. ``close`` waits and gives the room back. So does the end of the process, however it comes: the files have no names.

Note [Direct access]
    With ``O_DIRECT`` every address, offset and length is a multiple of 4096 bytes. Records are padded to it in the
    files. A tensor whose memory is not aligned goes through an aligned buffer, block by block. A file system that
    refuses (tmpfs on old kernels, some network ones) gets ordinary reads and writes, which is said once.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import re
import secrets
import shutil
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

__all__ = ["NvmeStore", "Record", "StorageError", "Transfer"]

ALIGNMENT = 4096
_MEMORY_SYSTEMS = ("tmpfs", "ramfs")
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_RESERVES_NONE = (errno.EOPNOTSUPP, errno.EINVAL)  # glibc writes single bytes instead, which O_DIRECT refuses


class StorageError(OSError):
    """An offloaded tensor could not be written, or differs from the one that was written."""


@dataclass(eq=False)
class Record:
    """Room for one tensor on the disks.

    Attributes:
        name: Named in errors.
        nbytes: Of the tensor.
        blocks: File index, offset in the file, start in the record and length of every block, in order.
        sums: Sums of the blocks as 64-bit integers; None before the first write.
    """

    name: str
    nbytes: int
    blocks: list[tuple[int, int, int, int]]
    sums: list[int] | None = field(default=None)


class Transfer:
    """A read or write that may still be running; ``wait`` is the only way to finish it."""

    def __init__(self, futures: Sequence[Future[None]], keep: torch.Tensor) -> None:
        self._futures = list(futures)
        self._keep: torch.Tensor | None = keep

    def wait(self) -> None:
        """Return when it is done; calling it again says the same again. Any thread may.

        Raises:
            StorageError: The disk failed, or the bytes are not those that were written.
        """
        errors = [error for future in self._futures if (error := future.exception()) is not None]
        self._keep = None
        if errors:
            raise errors[0]

    @property
    def has_succeeded(self) -> bool:
        """Whether it is done, without an error."""
        return all(future.done() and future.exception() is None for future in self._futures)

    @property
    def has_failed(self) -> bool:
        """Whether it is done, with an error."""
        return all(future.done() for future in self._futures) and not self.has_succeeded

    def settle(self) -> None:
        """Return when it is done, whether or not it failed."""
        for future in self._futures:
            future.exception()

    def then(self, call: Callable[[], None]) -> None:
        """Call ``call`` once when it is done, whether or not it failed; in this thread, or in one of the disk's."""
        countdown = itertools.count(1)
        lasts = len(self._futures)

        def done(_: Any = None) -> None:
            if next(countdown) == lasts:  # atomic
                call()

        for future in self._futures:
            future.add_done_callback(done)
        if not self._futures:
            call()


class NvmeStore:
    """Records in one unnamed file per directory, striped over the directories block by block.

    Args:
        paths: Directories on local disks; made if they are missing.
        block_bytes: Bytes per read or write; a multiple of 4096.
        threads: How many run at once.
        direct: Go past the page cache, whose memory offloading is to save.
        pinned: Whether buffers are page-locked, for copies to a CUDA device.
        first_call: Of every thread.

    Raises:
        StorageError: A directory cannot be written.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        block_bytes: int,
        threads: int,
        direct: bool,
        pinned: bool = False,
        first_call: Callable[[], None] = lambda: None,
    ) -> None:
        self.paths = [Path(path) for path in paths]
        self.is_direct = direct
        self._pinned = pinned
        self._block_bytes = block_bytes
        self._files = [self._open(path) for path in self.paths]
        self._ends = [0] * len(self._files)  # of the room that is taken in each file
        self._next = 0  # the file of the next block
        self._free: dict[int, list[Record]] = {}  # by padded size, given back
        self._pool = ThreadPoolExecutor(threads, "lightning_zero-disk", initializer=first_call)
        self._scratch = threading.local()
        self._direct_lock = threading.Lock()  # of the files' flags
        self._refused: Path | None = None  # took the flag and refused a transfer, which is not said yet
        # An engine that is dropped closes nothing; transfers in flight hold the store.
        self._drop = weakref.finalize(self, _drop, self._pool, list(self._files), os.getpid())
        self._drop.atexit = False
        self.read_bytes = 0
        self.written_bytes = 0

    def _open(self, path: Path) -> int:
        try:
            path.mkdir(parents=True, exist_ok=True)
            name = path / f"lightning_zero-{os.getpid()}-{secrets.token_hex(4)}"
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
            try:
                file = os.open(name, flags | (_O_DIRECT if self.is_direct else 0), 0o600)
            except OSError as error:
                if error.errno != errno.EINVAL or not self.is_direct:
                    raise
                self._go_through_cache(path)
                name.unlink(missing_ok=True)
                file = os.open(name, flags, 0o600)
            name.unlink()
        except OSError as error:
            raise StorageError(
                f"`Offload(path={str(path)!r})` cannot be used: {error.strerror or error}. It must be a directory on"
                " a local disk that can be written."
            ) from error
        kind = _file_system(path)
        if kind in _MEMORY_SYSTEMS:
            warnings.warn(
                f"`Offload(path={str(path)!r})` is in a file system of type {kind}, whose files are in host memory:"
                " offloading there frees none of it. Use a directory on a disk, or 'cpu' in place of 'nvme'.",
                stacklevel=2,
            )
        return file

    def _go_through_cache(self, path: Path) -> None:
        self.is_direct = False
        warnings.warn(
            f"The file system of `{path}` has no direct access (O_DIRECT); offloading goes through the page cache,"
            " which costs memory. `Offload(direct=False)` says so and silences this.",
            stacklevel=2,
        )

    # -- Room ------------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes that are taken on the disks."""
        return sum(self._ends) - sum(
            sum(length for _, _, _, length in record.blocks) for records in self._free.values() for record in records
        )

    def reserve(self, name: str, nbytes: int) -> Record:
        """Take room for a tensor of ``nbytes``; on a file system that reserves none it is taken by the first write.

        Raises:
            StorageError: There is not enough on a disk.
        """
        padded = _padded(nbytes)
        if self._free.get(padded):
            old = self._free[padded].pop()
            return Record(name, nbytes, old.blocks)
        blocks = []
        for start in range(0, padded, self._block_bytes):
            length = min(self._block_bytes, padded - start)
            file = self._next
            self._next = (self._next + 1) % len(self._files)
            blocks.append((file, self._ends[file], start, length))
            self._ends[file] += length
        self._allocate(name, blocks)
        return Record(name, nbytes, blocks)

    def _allocate(self, name: str, blocks: Sequence[tuple[int, int, int, int]]) -> None:
        for file in {file for file, _, _, _ in blocks}:
            mine = [(offset, length) for other, offset, _, length in blocks if other == file]
            first, total = mine[0][0], sum(length for _, length in mine)
            free = shutil.disk_usage(self.paths[file]).free
            try:
                if total > free:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.posix_fallocate(self._files[file], first, total)
            except OSError as error:
                if error.errno in _RESERVES_NONE:
                    continue
                if error.errno not in _NO_ROOM:
                    raise StorageError(
                        f"{total} bytes for `{name}` cannot be reserved in `{self.paths[file]}`: {error.strerror}."
                    ) from error
                raise StorageError(
                    f"There is no room for `{name}` in `{self.paths[file]}`: {total} bytes are needed and {free} are"
                    f" free ({error.strerror}). Give `Offload(path=...)` a larger disk or several, or offload less"
                    " (`fraction`)."
                ) from error

    def give_back(self, record: Record) -> None:
        """Let other records of the size have the room."""
        self._free.setdefault(_padded(record.nbytes), []).append(record)

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return an aligned (padded nbytes,) uint8 tensor of any content in host memory."""
        padded = _padded(nbytes)
        with torch.inference_mode(False):
            memory = torch.empty(padded + ALIGNMENT, dtype=torch.uint8, pin_memory=self._pinned, device="cpu")
        start = -memory.data_ptr() % ALIGNMENT
        return memory[start : start + padded]

    # -- Transfers -------------------------------------------------------------------------------------------------

    def run(self, call: Callable[[], None], keep: torch.Tensor) -> Transfer:
        """Start calling something in a thread of the disks; it must not wait for another of them."""
        return Transfer([self._pool.submit(call)], keep)

    def write(self, record: Record, source: torch.Tensor, behind: Transfer | None = None) -> Transfer:
        """Start writing a contiguous host tensor of the record's bytes; it must not change before ``wait``.

        Args:
            record: Where it goes.
            source: The tensor.
            behind: The copy that brings the values; calls begin in their order, so it runs or is done by then.
        """
        self._say_refused()
        data = self._bytes_of(record, source)
        sums = [0] * len(record.blocks)
        record.sums = sums
        futures = [
            self._pool.submit(self._write_block, record, number, data=data, sums=sums, behind=behind)
            for number in range(len(record.blocks))
        ]
        self.written_bytes += record.nbytes
        return Transfer(futures, source)

    def read(self, record: Record, target: torch.Tensor) -> Transfer:
        """Start filling a contiguous host tensor of the record's bytes."""
        if record.sums is None:
            raise RuntimeError(f"`{record.name}` is read before it was written.")
        self._say_refused()
        data = self._bytes_of(record, target)
        futures = [self._pool.submit(self._read_block, record, number, data) for number in range(len(record.blocks))]
        self.read_bytes += record.nbytes
        return Transfer(futures, target)

    def _bytes_of(self, record: Record, tensor: torch.Tensor) -> torch.Tensor:
        data = tensor.detach().view(torch.uint8) if tensor.dtype != torch.uint8 else tensor
        if data.numel() not in (record.nbytes, _padded(record.nbytes)):
            raise RuntimeError(f"`{record.name}` has {record.nbytes} bytes on the disk, not {data.numel()}.")
        return data

    def _write_block(
        self, record: Record, number: int, *, data: torch.Tensor, sums: list[int], behind: Transfer | None
    ) -> None:
        if behind is not None:
            behind.wait()
        file, offset, start, length = record.blocks[number]
        block = data[start : start + length]
        if block.numel() < length or not _is_aligned(block):
            scratch = self._aligned_block()[:length]
            scratch[: block.numel()].copy_(block)
            scratch[block.numel() :].zero_()
            block = scratch
        sums[number] = _sum(block)
        self._transfer(record, file, offset, block, writes=True)

    def _read_block(self, record: Record, number: int, data: torch.Tensor) -> None:
        file, offset, start, length = record.blocks[number]
        target = data[start : start + length]
        is_direct = target.numel() == length and _is_aligned(target)
        block = target if is_direct else self._aligned_block()[:length]
        self._transfer(record, file, offset, block, writes=False)
        assert record.sums is not None
        if _sum(block) != record.sums[number]:
            raise StorageError(
                f"`{record.name}` in `{self.paths[file]}` is damaged: bytes {start} to {start + length} are not those"
                " that were written. The disk or its memory is faulty; go on from the last checkpoint."
            )
        if not is_direct:
            target.copy_(block[: target.numel()])

    def _transfer(self, record: Record, file: int, offset: int, block: torch.Tensor, *, writes: bool) -> None:
        # `block.numpy()` would keep the storage of a gathered unit from being given back, for ever.
        buffer = memoryview((ctypes.c_char * block.numel()).from_address(block.data_ptr())).cast("B")
        done = 0
        call = os.pwritev if writes else os.preadv
        while done < len(buffer):
            began_direct = _is_direct(self._files[file])
            try:
                count = call(self._files[file], [buffer[done:]], offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL and began_direct:
                    self._leave_direct(file)
                    continue
                raise self._failure(record, file, writes, error.strerror or str(error)) from error
            if count == 0:
                raise self._failure(record, file, writes, f"the file ends at byte {offset + done}")
            done += count

    def _leave_direct(self, file: int) -> None:
        """Go on with ordinary reads and writes: the file system took the flag and refuses the transfers."""
        import fcntl

        with self._direct_lock:
            if not _is_direct(self._files[file]):
                return  # another thread was first
            for other in self._files:
                fcntl.fcntl(other, fcntl.F_SETFL, fcntl.fcntl(other, fcntl.F_GETFL) & ~_O_DIRECT)
            self.is_direct, self._refused = False, self.paths[file]

    def _say_refused(self) -> None:
        """Warn of a file system that has refused direct transfers; in the main thread, whose filters are the user's."""
        if self._refused is not None and threading.current_thread() is threading.main_thread():
            path, self._refused = self._refused, None
            self._go_through_cache(path)

    def _failure(self, record: Record, file: int, writes: bool, reason: str) -> StorageError:
        verb = "written to" if writes else "read from"
        return StorageError(f"`{record.name}` cannot be {verb} `{self.paths[file]}`: {reason}.")

    def _aligned_block(self) -> torch.Tensor:
        block: torch.Tensor | None = getattr(self._scratch, "block", None)
        if block is None:
            block = self._scratch.block = self.empty(self._block_bytes)
        return block

    def close(self) -> None:
        """Wait for everything, and give the room back."""
        self._pool.shutdown()
        self._drop()
        self._files, self._ends, self._free = [], [], {}
        self._say_refused()


def _drop(pool: ThreadPoolExecutor, files: Sequence[int], pid: int) -> None:
    """Give threads and unnamed files back, with their room, also where a forked process has the files open."""
    pool.shutdown(wait=False)
    for file in files:
        if os.getpid() == pid:  # in a forked process the files are the parent's
            os.ftruncate(file, 0)
        os.close(file)


def _is_direct(file: int) -> bool:
    import fcntl

    return bool(fcntl.fcntl(file, fcntl.F_GETFL) & _O_DIRECT)


def _file_system(path: Path) -> str | None:
    """Return the type of the file system of a path; None if the system does not say."""
    try:
        mounts = [line.split(" ") for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return None
    place, found, longest = path.resolve(), None, -1
    for _, mount, kind, *_ in mounts:
        point = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), mount))
        if len(point.parts) >= longest and place.is_relative_to(point):  # a later mount hides an earlier one
            found, longest = kind, len(point.parts)
    return found


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _is_aligned(block: torch.Tensor) -> bool:
    return block.data_ptr() % ALIGNMENT == 0 and block.numel() % ALIGNMENT == 0


def _sum(block: torch.Tensor) -> int:
    return int(block.view(torch.int64).sum())
