"""One sum per block of every file of a checkpoint, so that a read notices bytes that changed on the disk."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["CHECKSUMS", "BlockReader", "block_sums", "write_sums"]

CHECKSUMS = "checksums"
BLOCK_BYTES = 1 << 20


def block_sums(path: Path) -> list[int]:
    """Return the CRC-32 of every 1 MiB block of a file."""
    with path.open("rb", buffering=0) as file:
        return [zlib.crc32(block) for block in iter(lambda: file.read(BLOCK_BYTES), b"")]


def write_sums(directory: Path, sums: dict[str, list[int]]) -> None:
    """Write the ``checksums`` file.

    Args:
        directory: The checkpoint.
        sums: What ``block_sums`` returned, by the file's name in the checkpoint.
    """
    files = {name: {"nbytes": (directory / name).stat().st_size, "crc32": sums[name]} for name in sorted(sums)}
    with (directory / CHECKSUMS).open("w") as file:
        json.dump({"block_bytes": BLOCK_BYTES, "files": files}, file)
        file.flush()
        os.fsync(file.fileno())


class BlockReader:
    """Reads byte ranges of a checkpoint's files and checks the blocks that it touches, each once.

    A checkpoint without ``checksums`` (one that another tool wrote) is read unchecked.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        path = directory / CHECKSUMS
        table: dict[str, Any] = (
            json.loads(path.read_text()) if path.is_file() else {"block_bytes": BLOCK_BYTES, "files": {}}
        )
        self._block_bytes: int = table["block_bytes"]
        self._files: dict[str, dict[str, Any]] = table["files"]
        self._checked: set[tuple[str, int]] = set()

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytearray:
        """Return ``nbytes`` bytes of a file from ``offset``, or all that follow.

        Raises:
            ValueError: The bytes are not those that were written.
        """
        path = self.directory / name
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            stop = size if nbytes is None else offset + nbytes
            expected = self._files.get(name)
            if stop > size or (expected is not None and expected["nbytes"] != size):
                raise ValueError(f"`{path}` is damaged: it has {size} bytes, which is not what was written.")
            if expected is None:
                file.seek(offset)
                return bytearray(file.read(stop - offset))
            return self._read_checked(file, name, offset, stop)

    def _read_checked(self, file: BinaryIO, name: str, offset: int, stop: int) -> bytearray:
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
                self._check(name, index, block)
                out[lo - offset : hi - offset] = memoryview(block)[lo - base : hi - base]
        return out

    def _check(self, name: str, index: int, block: bytes) -> None:
        if zlib.crc32(block) != self._files[name]["crc32"][index]:
            raise ValueError(
                f"`{self.directory / name}` is damaged: the bytes from {index * self._block_bytes} on are not those"
                " that were written. Load an earlier checkpoint."
            )
        self._checked.add((name, index))
