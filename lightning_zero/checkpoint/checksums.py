"""One sum per block of every file of a checkpoint, so that a read notices bytes that changed on the disk."""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["CHECKSUMS", "EARLIER", "BlockReader", "block_sums", "check_archive", "write_sums"]

CHECKSUMS = "checksums"
BLOCK_BYTES = 1 << 20
EARLIER = "Load an earlier checkpoint."


def block_sums(path: Path) -> list[int]:
    """Return the CRC-32 of every 1 MiB block of a file."""
    with path.open("rb", buffering=0) as file:
        return [zlib.crc32(block) for block in iter(lambda: file.read(BLOCK_BYTES), b"")]


def write_sums(directory: Path, sums: dict[str, list[int]]) -> None:
    """Write the ``checksums`` file.

    Args:
        directory: The checkpoint.
        sums: Results of ``block_sums``, by the file's name in the checkpoint.
    """
    files = {name: {"nbytes": (directory / name).stat().st_size, "crc32": sums[name]} for name in sorted(sums)}
    table = {"block_bytes": BLOCK_BYTES, "files": files}
    with (directory / CHECKSUMS).open("w") as file:
        json.dump({**table, "crc32": _sum_of_table(table)}, file)
        file.flush()
        os.fsync(file.fileno())


def _sum_of_table(table: dict[str, Any]) -> int:
    """Return the sum of the table itself, so that a changed name or key does not end the checking in silence."""
    return zlib.crc32(json.dumps(table).encode())


def _read_table(directory: Path) -> dict[str, Any] | None:
    path = directory / CHECKSUMS
    if not path.is_file():
        return None
    try:
        table: dict[str, Any] = json.loads(path.read_bytes())
        expected = table.pop("crc32")
        is_whole = _sum_of_table(table) == expected
    except (ValueError, KeyError, AttributeError, TypeError):
        is_whole = False
    if not is_whole:
        raise ValueError(f"`{path}` is damaged: its bytes are not those that were written. {EARLIER}")
    missing = sorted(set(table["files"]) - set(os.listdir(directory)))
    if missing:
        raise FileNotFoundError(f"`{directory / missing[0]}` is missing, so the checkpoint is not whole. {EARLIER}")
    return table


class BlockReader:
    """Reads byte ranges of a checkpoint's files and checks the blocks that it touches, each once.

    A checkpoint without ``checksums`` (one that another tool wrote) is read unchecked.

    Raises:
        ValueError: ``checksums`` is damaged.
        FileNotFoundError: A file is missing.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        table = _read_table(directory)
        self._block_bytes: int = BLOCK_BYTES if table is None else table["block_bytes"]
        # None: nothing is checked
        self._files: dict[str, dict[str, Any]] | None = None if table is None else table["files"]
        self._checked: set[tuple[str, int]] = set()

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytearray:
        """Return ``nbytes`` bytes of a file from ``offset``, or all that follow.

        Raises:
            ValueError: The bytes are not those that were written.
            FileNotFoundError: The file is missing.
        """
        path = self.directory / name
        if not path.is_file():
            raise FileNotFoundError(f"`{path}` is missing, so the checkpoint is not whole. {EARLIER}")
        expected = self._entry(name)
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            stop = size if nbytes is None else offset + nbytes
            if stop > size or (expected is not None and expected["nbytes"] != size):
                raise ValueError(f"`{path}` is damaged: it has {size} bytes, other than were written. {EARLIER}")
            if expected is None:
                file.seek(offset)
                return bytearray(file.read(stop - offset))
            return self._read_checked(file, name, sums=expected["crc32"], offset=offset, stop=stop)

    def _entry(self, name: str) -> dict[str, Any] | None:
        if self._files is None:
            return None
        if name not in self._files:
            raise ValueError(f"`{self.directory / name}` is of another checkpoint: it is not listed in `{CHECKSUMS}`.")
        return self._files[name]

    def _read_checked(self, file: BinaryIO, name: str, *, sums: Sequence[int], offset: int, stop: int) -> bytearray:
        out = bytearray(stop - offset)
        for index in range(offset // self._block_bytes, -(-stop // self._block_bytes)):
            base = index * self._block_bytes
            lo, hi = max(offset, base), min(stop, base + self._block_bytes)
            if (name, index) in self._checked:
                file.seek(lo)
                out[lo - offset : hi - offset] = file.read(hi - lo)
            else:
                file.seek(base)
                block = file.read(self._block_bytes)
                self._check(name, index, block, sums)
                out[lo - offset : hi - offset] = memoryview(block)[lo - base : hi - base]
        return out

    def _check(self, name: str, index: int, block: bytes, sums: Sequence[int]) -> None:
        if zlib.crc32(block) != sums[index]:
            raise ValueError(
                f"`{self.directory / name}` is damaged: the bytes from {index * self._block_bytes} on are not those"
                f" that were written. {EARLIER}"
            )
        self._checked.add((name, index))


def check_archive(path: Path, rank: int, world_size: int) -> None:
    """Check this rank's share of the sums in a file of ``torch.save``; ``torch.load`` does not look at them.

    Raises:
        ValueError: The bytes are not those that were written.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            records = sorted(archive.infolist(), key=lambda record: record.file_size)
            for record in records[rank::world_size]:
                with archive.open(record) as file:
                    while file.read(BLOCK_BYTES):
                        pass
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError, zlib.error) as error:
        raise ValueError(f"`{path}` is damaged: {error} {EARLIER}") from error
