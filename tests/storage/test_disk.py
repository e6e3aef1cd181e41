"""Shards on disks: in memory while somebody uses them, and never more of them than there is room."""

from __future__ import annotations

import copy
import io
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_zero.storage.disk import DiskStore, Visit
from lightning_zero.storage.disk_tensor import DiskTensor
from lightning_zero.storage.nvme import NvmeStore, Record, StorageError
from lightning_zero.storage.residence import is_in_memory, ordinary

NUMEL = 3 << 20  # three of them are more than what may stay awake


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    store = DiskStore(NvmeStore([tmp_path], block_bytes=1 << 20, threads=2, direct=True))
    yield store
    store.close()


def test_kept_values_are_read_when_they_are_used(store: DiskStore) -> None:
    values = torch.randn(NUMEL)
    face = store.keep("optimizer", values, "states")
    store.drain()
    assert store.awake_bytes == 0
    assert not ordinary(face).any()
    assert (face.shape, face.dtype, face.numel(), face.is_contiguous()) == (values.shape, torch.float32, NUMEL, True)
    view = face[5:10]
    assert store.awake_bytes == 0
    assert torch.equal(view, values[5:10])
    assert store.awake_bytes == NUMEL * 4
    assert store.live("optimizer") == NUMEL * 4


def test_changes_outlive_sleep(store: DiskStore) -> None:
    faces = [store.create("optimizer", NUMEL, torch.float32, f"state {number}") for number in range(3)]
    expected = [torch.full((NUMEL,), float(number)) for number in range(3)]
    for face, values in zip(faces, expected, strict=True):
        face += 1.0
        face.view(2, -1)[1].mul_(values[0] + 1)
        torch._foreach_add_([face], 2.0)
        face[3] = 9.0
        torch.add(face, values, out=face)
        values.copy_(face)
    assert store.awake_bytes < 3 * NUMEL * 4  # the oldest went to sleep
    for face, values, number in zip(faces, expected, range(3), strict=True):
        assert torch.equal(face, values)
        assert values[3] == 9.0 + number


def test_reading_writes_nothing(store: DiskStore) -> None:
    faces = [store.keep("optimizer", torch.randn(NUMEL), "state") for _ in range(3)]
    store.drain()
    written = store.disks.written_bytes
    for face in faces * 2:
        face.sum()
        torch.zeros(NUMEL).copy_(face)
        face.cpu()
        face.numpy()
    assert store.disks.written_bytes == written
    assert store.disks.read_bytes >= 3 * NUMEL * 4


def test_copies_are_ordinary(store: DiskStore) -> None:
    values = torch.randn(100)
    face = store.keep("optimizer", values, "states")
    file = io.BytesIO()
    torch.save({"state": face}, file)
    file.seek(0)
    copies = [face.clone(), face.cpu(), face.float(), face.to(torch.float32), copy.deepcopy(face), face * 1.0,
              torch.from_numpy(face.numpy()), torch.tensor(face.tolist()), torch.load(file)["state"]]  # fmt: skip
    face.zero_()
    for one in copies:
        assert type(one) is torch.Tensor
        assert torch.equal(one, values)
    assert all(type(one) is DiskTensor for one in (face.detach(), face[1:], face.view(10, 10), face.reshape(-1)))
    assert type(torch.zeros_like(face)) is torch.Tensor
    assert "0." in repr(face)


@pytest.mark.parametrize("name", ["data_ptr", "untyped_storage", "share_memory_"])
def test_nobody_gets_at_the_memory_itself(name: str, store: DiskStore) -> None:
    face = store.create("optimizer", 4, torch.float32)
    with pytest.raises(RuntimeError, match=rf"`{name}` reaches for the memory of a tensor of shape \(4,\).*clone"):
        getattr(face, name)()


def test_visits_wait_for_room_and_write_what_they_change(store: DiskStore) -> None:
    faces = [store.keep("optimizer", torch.full((NUMEL,), float(number)), "state") for number in range(5)]
    store.drain()
    visits = [Visit(store, changed=[face]) for face in faces]
    for visit in visits:
        visit.announce()
    assert [visit.has_begun for visit in visits] == [True, True, True, False, False]
    for visit, face in zip(visits, faces, strict=True):
        visit.begin()
        visit.ready()
        ordinary(face).add_(1.0)
        visit.end()
    store.drain()
    assert store.awake_bytes == 0
    for number, face in enumerate(faces):
        assert bool((face == number + 1.0).all())


def test_a_visit_begins_by_itself_when_there_is_room(store: DiskStore) -> None:
    faces = [store.keep("optimizer", torch.zeros(NUMEL), "state") for _ in range(5)]
    store.drain()
    visits = [Visit(store, changed=[face]) for face in faces]
    for visit in visits:
        visit.announce()
    visits[1].ready()
    visits[1].end()
    store.await_room(visits[3])  # nobody else asks for it
    assert [visit.has_begun for visit in visits] == [True, True, True, True, False]


@pytest.fixture
def held(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Hold the bytes of every write back until it is set; they are summed before."""
    transfer, may_write = store.disks._transfer, threading.Event()

    def late(record: Record, file: int, offset: int, block: torch.Tensor, *, writes: bool) -> None:
        assert not writes or may_write.wait(20.0)
        transfer(record, file, offset, block, writes=writes)

    monkeypatch.setattr(store.disks, "_transfer", late)
    return may_write


def test_a_write_that_has_ended_gives_no_memory_back_which_the_next_one_reads(
    store: DiskStore, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    held.set()
    face, ended = store.create("optimizer", NUMEL, torch.float32, "state"), []
    with monkeypatch.context() as patch:
        patch.setattr(store, "_written", lambda *args: ended.append(args))
        store.put(face, torch.ones(NUMEL))
        store.drain()
    held.clear()
    store.put(face, torch.full((NUMEL,), 2.0))
    store._written(*ended[0])  # its thread comes late
    held.set()
    store.drain()
    assert bool((face == 2.0).all())


def test_a_visit_that_ends_before_it_was_ready_gives_no_memory_back_which_a_write_reads(
    store: DiskStore, held: threading.Event
) -> None:
    face = store.keep("optimizer", torch.ones(NUMEL), "state")
    visit = Visit(store, changed=[face])
    visit.begin()
    visit.end(changes=False)
    held.set()
    store.drain()
    assert bool((face == 1.0).all())
    assert store.awake_bytes == NUMEL * 4


def test_a_visit_that_only_reads_writes_nothing_and_one_that_overwrites_reads_nothing(store: DiskStore) -> None:
    read, written = (store.keep("optimizer", torch.ones(NUMEL), "state") for _ in range(2))
    store.drain()
    before = store.disks.read_bytes, store.disks.written_bytes
    visit = Visit(store, read=[read], overwritten=[written])
    visit.begin()
    visit.ready()
    ordinary(written).copy_(ordinary(read) * 2)
    visit.end()
    store.drain()
    assert (store.disks.read_bytes - before[0], store.disks.written_bytes - before[1]) == (NUMEL * 4, NUMEL * 4)
    assert bool((written == 2).all())


def test_fetch_copies_without_waking(store: DiskStore) -> None:
    values = torch.randn(NUMEL)
    face = store.keep("parameters", values, "shard")
    for _ in range(2):  # the first one meets the write
        out = torch.empty(NUMEL)
        store.fetch(face, out)()
        assert torch.equal(out, values)
        store.drain()
    assert store.awake_bytes == 0


def test_fetches_wait_for_no_room(store: DiskStore) -> None:
    faces = [store.keep("parameters", torch.full((1000,), float(number)), "shard") for number in range(8)]
    for face in faces:
        face.sum()  # stays in memory, from which it is copied
    outs = [torch.empty(1000) for _ in faces]

    def fetch() -> None:
        for finish in [store.fetch(face, out) for face, out in zip(faces, outs, strict=True)]:
            finish()

    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    thread.join(10.0)
    assert not thread.is_alive()
    assert all(bool((out == number).all()) for number, out in enumerate(outs))


def test_a_use_is_announced_before_and_after_the_read(store: DiskStore) -> None:
    face = store.keep("optimizer", torch.ones(8), "state")
    calls: list[str] = []

    def after() -> bool:
        calls.append("after")
        ordinary(face)[0] = 5.0
        return True

    store.watch(face, lambda: calls.append("before"), after)
    assert face.shape == (8,)
    assert calls == []
    assert face[0].item() == 5.0
    assert calls[:2] == ["before", "after"]


def test_a_use_inside_of_another_one_leaves_its_values_in_memory(store: DiskStore) -> None:
    outer, inner = (store.keep("optimizer", torch.ones(NUMEL), "state") for _ in range(2))
    store.watch(outer, lambda: None, lambda: bool(inner.sum() == 0.0))
    assert outer.sum().item() == NUMEL
    assert store.awake_bytes == NUMEL * 4  # the other one went to sleep behind it


def test_a_damaged_record_is_an_error_each_time(store: DiskStore) -> None:
    face = store.keep("optimizer", torch.ones(NUMEL), "masters of unit `a`")
    store.drain()
    os.ftruncate(store.disks._files[0], 4096)
    for _ in range(2):
        with pytest.raises(StorageError, match="`masters of unit `a`` cannot be read .* the file ends"):
            face.sum()


def test_a_write_that_failed_is_an_error_at_the_next_use(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    face = store.create("optimizer", NUMEL, torch.float32, "state")

    def fail(*args: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("lightning_zero.storage.nvme.os.pwritev", fail)
        store.put(face, torch.ones(NUMEL))
        for entry in store._entries:
            assert entry.writing is not None
            entry.writing.settle()
    with pytest.raises(StorageError, match="`state` cannot be written to .* No space left"):
        face.sum()


@pytest.mark.parametrize("use", ["put", "in-place"])
@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_values_that_could_not_be_written_or_read_can_be_used_again(
    call: str, use: str, store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> int:
        raise OSError(28, "No space left on device")

    face = store.keep("optimizer", torch.ones(NUMEL), "state")
    store.drain()
    with monkeypatch.context() as patch:
        patch.setattr(f"lightning_zero.storage.nvme.os.{call}", fail)
        if call == "pwritev":
            store.put(face, torch.full((NUMEL,), 1.0))
        with pytest.raises(StorageError, match="No space left"):
            face.sum()
    if use == "put":
        store.put(face, torch.full((NUMEL,), 2.0))
    else:
        face[1:].fill_(2.0)
        face[0] += 1.0
    store.drain()
    others = [store.keep("optimizer", torch.ones(NUMEL)) for _ in range(2)]
    assert sum(float(other.sum()) for other in others) == 2 * NUMEL
    assert store.awake_bytes < 3 * NUMEL * 4  # it went to sleep
    assert float(face.sum()) == 2.0 * NUMEL


def test_an_error_while_values_are_put_gives_their_room_back(store: DiskStore) -> None:
    face = store.create("optimizer", NUMEL, torch.float32, "state")
    with pytest.raises(RuntimeError, match="size of tensor"):
        store.put(face, torch.ones(3))
    assert store._used_bytes == store.awake_bytes == 0


def test_an_error_while_values_are_put_keeps_those_that_could_not_be_written(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> int:
        raise OSError(28, "No space left on device")

    face = store.keep("optimizer", torch.ones(NUMEL), "state")
    store.drain()
    with monkeypatch.context() as patch:
        patch.setattr("lightning_zero.storage.nvme.os.pwritev", fail)
        store.put(face, torch.full((NUMEL,), 2.0))
        store._entries[0].writing.settle()  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="size of tensor"):
        store.put(face, torch.ones(3))
    store.drain()
    assert float(face.sum()) == 2.0 * NUMEL
    assert store._used_bytes == 0


def _send_to_sleep(store: DiskStore) -> None:
    others = [store.keep("optimizer", torch.ones(NUMEL)) for _ in range(2)]
    assert all(float(other.sum()) == NUMEL for other in others)
    store.drain()


@pytest.mark.parametrize("function", [F.relu, F.elu, F.hardtanh, F.silu, F.leaky_relu, nn.ReLU6(inplace=True)])
def test_functions_in_place_are_written(function: Callable[..., torch.Tensor], store: DiskStore) -> None:
    values = torch.linspace(-9.0, 9.0, NUMEL)
    face = store.keep("optimizer", values, "state")
    options = {} if isinstance(function, nn.Module) else {"inplace": True}
    assert function(face[:], **options).shape == face.shape
    _send_to_sleep(store)
    assert torch.equal(face.clone(), function(values.clone()))


def test_an_embedding_that_limits_norms_is_written(store: DiskStore) -> None:
    face = store.keep("optimizer", torch.full((NUMEL,), 3.0), "state")
    F.embedding(torch.tensor([0, 1]), face.view(-1, 4), max_norm=1.0)
    _send_to_sleep(store)
    assert face.view(-1, 4)[:3].norm(dim=1).tolist() == pytest.approx([1.0, 1.0, 6.0], abs=1e-4)


def test_after_close_the_values_are_gone_with_an_error(tmp_path: Path) -> None:
    store = DiskStore(NvmeStore([tmp_path], block_bytes=4096, threads=1, direct=True))
    face = store.keep("optimizer", torch.ones(10), "state")
    store.close()
    del store
    assert face.shape == (10,)
    assert not is_in_memory(face)
    with pytest.raises(RuntimeError, match="were on a disk and are gone"):
        face.sum()


def test_no_more_than_some_visits_and_idle_tensors_are_awake(store: DiskStore) -> None:
    numel = 2**20  # of 4 MiB
    faces = [store.keep("optimizer", torch.ones(numel), "state") for _ in range(6)]
    store.drain()
    visits = [Visit(store, changed=[face]) for face in faces[:3]]
    for face in faces[3:]:
        face.sum()
    for visit in visits:
        visit.begin()
    assert store.awake_bytes == store.most_awake_bytes == 4 * 4 * numel
    for visit in visits:
        visit.ready()
        visit.end(changes=False)
    store.drain()
    assert DiskStore(store.disks).most_awake_bytes == 0
