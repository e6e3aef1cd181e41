from __future__ import annotations

from pathlib import Path

import pytest

from lightning_zero.checkpoint import checksums
from lightning_zero.checkpoint.checksums import BlockReader, block_sums, write_sums


@pytest.fixture
def content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 10)
    content = bytes(range(95))
    (tmp_path / "data").write_bytes(content)
    (tmp_path / "empty").write_bytes(b"")
    write_sums(tmp_path, {name: block_sums(tmp_path / name) for name in ("data", "empty")})
    return content


def _flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_every_range_is_read(content: bytes, tmp_path: Path) -> None:
    for start in range(0, 96, 7):
        for stop in range(start, 96, 3):
            assert BlockReader(tmp_path).read("data", start, stop - start) == content[start:stop]
    assert BlockReader(tmp_path).read("data") == content
    assert BlockReader(tmp_path).read("empty") == b""


def test_a_flipped_byte_is_noticed_in_the_blocks_that_are_read(content: bytes, tmp_path: Path) -> None:
    _flip(tmp_path / "data", 42)
    assert BlockReader(tmp_path).read("data", 0, 40) == content[:40]
    assert BlockReader(tmp_path).read("data", 50) == content[50:]
    with pytest.raises(ValueError, match="is damaged: the bytes from 40 on"):
        BlockReader(tmp_path).read("data", 49, 5)


def test_a_truncated_file_is_noticed(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(content[:80])
    with pytest.raises(ValueError, match="it has 80 bytes, other than were written"):
        BlockReader(tmp_path).read("data", 0, 10)


def test_a_checkpoint_without_sums_is_read(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "checksums").unlink()
    assert BlockReader(tmp_path).read("data", 30, 20) == content[30:50]
