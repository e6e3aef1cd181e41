"""Records on disks: what is read is what was written, or an error that says where and why."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_zero.storage import nvme
from lightning_zero.storage.nvme import ALIGNMENT, NvmeStore, StorageError

BLOCK = 2 * ALIGNMENT


def _store(*paths: Path, direct: bool = True, threads: int = 2) -> NvmeStore:
    return NvmeStore(paths, block_bytes=BLOCK, threads=threads, direct=direct)


def _random(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "cached"])
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 3 * BLOCK, 3 * BLOCK + 17])
def test_what_is_read_is_what_was_written(nbytes: int, aligned: bool, direct: bool, tmp_path: Path) -> None:
    store = _store(tmp_path / "a", tmp_path / "b", direct=direct)
    records = [store.reserve(f"record {number}", nbytes) for number in range(3)]
    sources = [_random(nbytes) for _ in records]
    for record, source in zip(records, sources, strict=True):
        buffer = store.empty(nbytes) if aligned else torch.empty(nbytes + 1, dtype=torch.uint8)[1:]
        buffer[:nbytes].copy_(source)
        store.write(record, buffer).wait()
    for record, source in zip(records, sources, strict=True):
        target = store.empty(nbytes) if aligned else torch.empty(nbytes + 1, dtype=torch.uint8)[1:]
        store.read(record, target).wait()
        assert torch.equal(target[:nbytes], source)
    assert (store.written_bytes, store.read_bytes) == (3 * nbytes, 3 * nbytes)
    store.close()


def test_other_dtypes_and_many_transfers_at_once(tmp_path: Path) -> None:
    store = _store(tmp_path, threads=4)
    tensors = [torch.randn(5000) for _ in range(8)]
    records = [store.reserve("record", tensor.nbytes) for tensor in tensors]
    for transfer in [store.write(record, tensor) for record, tensor in zip(records, tensors, strict=True)]:
        transfer.wait()
        transfer.wait()
    targets = [torch.empty(5000) for _ in tensors]
    for transfer in [store.read(record, target) for record, target in zip(records, targets, strict=True)]:
        transfer.wait()
    assert all(torch.equal(target, tensor) for target, tensor in zip(targets, tensors, strict=True))
    store.close()


def test_blocks_are_spread_evenly_over_the_directories(tmp_path: Path) -> None:
    store = _store(tmp_path / "a", tmp_path / "b", tmp_path / "c")
    record = store.reserve("record", 9 * BLOCK)
    assert [file for file, _, _, _ in record.blocks] == [0, 1, 2] * 3
    assert [os.fstat(file).st_size for file in store._files] == [3 * BLOCK] * 3
    store.close()


def test_room_that_is_given_back_is_used_again(tmp_path: Path) -> None:
    store = _store(tmp_path)
    first = store.reserve("first", 5000)
    store.give_back(first)
    assert store.nbytes == 0
    second = store.reserve("second", 4999)
    assert second.blocks == first.blocks
    assert store.nbytes == 2 * ALIGNMENT
    with pytest.raises(RuntimeError, match="`second` is read before it was written"):
        store.read(second, torch.empty(4999, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="`second` has 4999 bytes on the disk, not 7"):
        store.write(second, torch.empty(7, dtype=torch.uint8))
    store.close()


def test_files_have_no_names(tmp_path: Path) -> None:
    first, second = _store(tmp_path), _store(tmp_path)
    for store in (first, second):
        store.write(store.reserve("record", 100), _random(100)).wait()
    assert os.listdir(tmp_path) == []
    first.close()
    second.close()


DIES = """
import os, signal, sys, torch
from pathlib import Path
from lightning_zero.storage.nvme import NvmeStore
store = NvmeStore([Path(sys.argv[1])], block_bytes=4096, threads=1, direct=True)
store.write(store.reserve("record", 100), torch.ones(100, dtype=torch.uint8)).wait()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_leaves_nothing(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", DIES, str(tmp_path)], timeout=60).returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == []


# -- Trouble -----------------------------------------------------------------------------------------------------------


def test_room_is_free_after_close_where_a_forked_process_has_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pid, is_free in ((os.getpid(), True), (os.getpid() + 1, False)):
        store = _store(tmp_path)
        store.reserve("record", 3 * BLOCK)
        inherited = os.dup(store._files[0])
        with monkeypatch.context() as patch:
            patch.setattr(nvme.os, "getpid", lambda pid=pid: pid)  # the forked process itself gives nothing back
            store.close()
        assert os.fstat(inherited).st_size == (0 if is_free else 3 * BLOCK)
        os.close(inherited)


def test_a_changed_byte_is_an_error(tmp_path: Path) -> None:
    store = _store(tmp_path)
    record = store.reserve("states of unit `a`", 3 * BLOCK)
    source = _random(3 * BLOCK)
    store.write(record, source).wait()
    other = store.reserve("other", ALIGNMENT)
    block = store.empty(ALIGNMENT)
    block[:ALIGNMENT] = source[BLOCK : BLOCK + ALIGNMENT]
    block[7] += 1
    other.blocks = [(0, record.blocks[1][1], 0, ALIGNMENT)]
    store.write(other, block).wait()
    with pytest.raises(StorageError, match=f"`states of unit `a`` in `.*` is damaged: bytes {BLOCK} to {2 * BLOCK}"):
        store.read(record, torch.empty(3 * BLOCK, dtype=torch.uint8)).wait()
    store.close()


def test_a_file_that_was_cut_is_an_error(tmp_path: Path) -> None:
    store = _store(tmp_path)
    record = store.reserve("record", 3 * BLOCK)
    store.write(record, _random(3 * BLOCK)).wait()
    os.ftruncate(store._files[0], BLOCK)
    with pytest.raises(StorageError, match=f"`record` cannot be read from `.*`: the file ends at byte {BLOCK}"):
        store.read(record, torch.empty(3 * BLOCK, dtype=torch.uint8)).wait()
    store.close()


def test_a_full_disk_is_an_error_before_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = _store(tmp_path)
    with pytest.raises(StorageError, match="no room for `huge` in `.*`: 1152921504606846976 bytes are needed and"):
        store._allocate("huge", [(0, 0, 0, 2**60)])
    usage = nvme.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(nvme.shutil, "disk_usage", lambda path: usage._replace(free=10_000_000))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ALIGNMENT, before[1]))
    try:
        with pytest.raises(StorageError, match="no room for `record` in `.*` .*larger disk"):
            store.reserve("record", 3 * BLOCK)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    store.close()


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL, errno.EIO], ids=errno.errorcode.get)
def test_a_file_system_that_reserves_no_room_is_used(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(nvme.os, "posix_fallocate", refuse)
    store = _store(tmp_path)
    if number == errno.EIO:
        with pytest.raises(StorageError, match="bytes for `record` cannot be reserved in `.*`: Input/output error"):
            store.reserve("record", 2 * BLOCK)
    else:
        record, source = store.reserve("record", 2 * BLOCK), _random(2 * BLOCK)
        store.write(record, source).wait()
        target = torch.empty_like(source)
        store.read(record, target).wait()
        assert torch.equal(target, source)
    store.close()


def test_a_path_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="`Offload.path='.*file'.` cannot be used: .* local disk"):
        _store(tmp_path / "file")


def test_a_path_in_host_memory_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_text = Path.read_text
    folder = tmp_path / "in memory"
    escaped = str(folder).replace(" ", "\\040")
    lines = f"/dev/vda / ext4 rw 0 0\nnone {escaped} tmpfs rw 0 0\n/dev/vdb {escaped}/disk xfs rw 0 0\n"
    monkeypatch.setattr(
        Path, "read_text", lambda path, *args: lines if path == Path("/proc/self/mounts") else read_text(path, *args)
    )
    with pytest.warns(UserWarning, match="in memory/states'.` is in a file system of type tmpfs, .* 'cpu' in place"):
        _store(folder / "states").close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for path in (tmp_path, folder / "disk", tmp_path / "in memory 2"):
            _store(path).close()


@pytest.mark.parametrize(("where", "threads"), [("open", 1), ("transfer", 1), ("transfer", 4)])
def test_a_file_system_without_direct_access_is_said_once(
    where: str, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(threads)

    def refusing(call: Any, is_asked: Any) -> Any:
        def called(*args: Any) -> Any:
            if is_asked(*args):
                if where == "transfer":
                    together.wait(10.0)
                raise OSError(errno.EINVAL, "refused")
            return call(*args)

        return called

    if where == "open":
        monkeypatch.setattr(nvme.os, "open", refusing(os.open, lambda name, flags, mode: flags & os.O_DIRECT))
    else:
        import fcntl

        is_direct = lambda file, *_: fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT  # noqa: E731
        monkeypatch.setattr(nvme.os, "pwritev", refusing(os.pwritev, is_direct))
    source = _random(threads * BLOCK)
    target = torch.empty_like(source)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        store = _store(tmp_path, threads=threads)
        record = store.reserve("record", threads * BLOCK)
        store.write(record, source).wait()
        store.read(record, target).wait()
    assert ["has no direct access" in str(one.message) for one in warned] == [True]
    assert not store.is_direct
    assert torch.equal(target, source)
    store.close()


def test_a_tensor_that_was_read_into_can_give_its_memory_back(tmp_path: Path) -> None:
    store = _store(tmp_path)
    record = store.reserve("record", BLOCK)
    store.write(record, torch.ones(BLOCK, dtype=torch.uint8)).wait()
    whole = torch.empty(BLOCK + ALIGNMENT, dtype=torch.uint8)
    start = -whole.data_ptr() % ALIGNMENT  # no scratch memory between
    store.read(record, whole[start : start + BLOCK]).wait()
    whole.untyped_storage().resize_(0)
    store.close()
