"""Host memory: exact sizes, accounts, and what happens where pages cannot be locked."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_zero.storage import copies, host
from lightning_zero.storage.host import HostStore, unlock_freed
from lightning_zero.storage.references import num_tensors_in
from lightning_zero.storage.store import ShardStore
from tests.simulated_device import SimulatedDevice


def test_the_host_store_is_a_store_with_accounts() -> None:
    store: ShardStore = HostStore(pinned=False)
    tensor = store.create("optimizer", 1001, torch.float32)
    assert (tensor.device.type, tensor.untyped_storage().nbytes()) == ("cpu", 4004)
    store.adopt("optimizer", 96)
    store.release("optimizer", 4004)
    assert (store.live("optimizer"), store.peak("optimizer")) == (96, 4100)
    store.reset_peak()
    assert store.peak("optimizer") == 96
    store.close()
    assert store.live("optimizer") == 0


def test_memory_is_locked_at_its_size_and_unlocked_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: dict[int, int] = {}
    driver = SimpleNamespace(
        cudaHostRegister=lambda address, nbytes, flags: locked.__setitem__(address, nbytes) or 0,
        cudaHostUnregister=lambda address: 0 * locked.pop(address),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    store = HostStore(pinned=True)
    kept = [store.create("optimizer", numel, torch.float32) for numel in (3, 5000, 0)]
    assert [one.numel() for one in kept] == [3, 5000, 0]
    assert sorted(locked.values()) == [4096, 20_480]
    assert all(address % 4096 == 0 for address in locked)
    del kept
    store.close()
    assert locked == {}


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a driver of one test has locked is not unlocked by that of the next."""
    monkeypatch.setattr(host, "_FREED", [])


def _fail_to_lock(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: code))
    monkeypatch.setattr(copies, "_clear_error", lambda: None)


def test_pages_that_cannot_be_locked_are_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _fail_to_lock(monkeypatch, 2)
    store = HostStore(pinned=True)
    with pytest.warns(UserWarning, match="4096 bytes of host memory could not be locked .CUDA error 2: .*ulimit"):
        store.create("optimizer", 10, torch.float32)
    store.create("optimizer", 10, torch.float32)  # a second warning would be an error here
    assert not store.is_pinned


def test_locked_memory_that_is_given_back_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    driver = SimpleNamespace(
        cudaHostRegister=lambda address, nbytes, flags: calls.append(nbytes) or 0, cudaHostUnregister=lambda address: 0
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    store = HostStore(pinned=True)
    for dtype in (torch.float32, torch.int32):  # every step, whatever the dtype
        gradient = store.create("gradients", 100, dtype)
        assert (gradient.dtype, store.live("gradients")) == (dtype, 400)
        store.give_back("gradients", gradient)
    store.create("gradients", 50, torch.float32)
    assert (calls, store.live("gradients"), store.peak("gradients")) == ([4096, 4096], 200, 400)


def test_memory_is_locked_and_unlocked_on_the_device_of_its_copies() -> None:
    """In a thread on another device they were made on that one, which got a context for it."""
    device, asked = torch.device("cuda", 3), []
    with SimulatedDevice() as simulation, pytest.MonkeyPatch.context() as patch:
        current: list[object] = []

        @contextmanager
        def on(device: object) -> Iterator[None]:
            current.append(device)
            yield
            current.pop()

        simulation.patch("device", on)
        driver = simulation.driver
        for name in ("cudaHostRegister", "cudaHostUnregister"):
            call = getattr(driver, name)
            patch.setattr(driver, name, lambda *args, call=call: asked.append(current[-1:]) or call(*args))
        store = HostStore(pinned=True, copies_of=device)
        kept = store.allocate(1000, torch.float32)
        del kept
        store.allocate(5000, torch.float32)  # the first is unlocked before
        store.close()
        HostStore(pinned=True, copies_of=device).allocate(10, torch.float32)
        gc.collect()
        unlock_freed()
    assert asked == [[device]] * 6


def test_memory_whose_last_tensor_has_gone_is_unlocked_before_more_is_locked() -> None:
    with SimulatedDevice() as device:
        store = HostStore(pinned=True)
        kept = store.create("optimizer", 1000, torch.float32)
        assert num_tensors_in(kept) == 1  # programs' tensors in it are counted
        views = [store.allocate(1000, torch.float32)[10:] for _ in range(3)]
        assert sorted(device.driver.locked.values()) == [4096] * 4
        address = views[1].data_ptr() - 40
        del views[1]
        assert device.driver.holds(address)  # a copy of it may be running
        store.allocate(5000, torch.float32)
        assert not device.driver.holds(address)
        assert sorted(device.driver.locked.values()) == [4096] * 3 + [20_480]
        store.close()
        assert not device.driver.locked


def test_memory_that_outlives_its_store_is_not_unlocked_twice() -> None:
    with SimulatedDevice() as device:
        store = HostStore(pinned=True)
        kept = store.allocate(1000, torch.float32).fill_(3.0)
        store.close()
        again = store.allocate(1000, torch.float32)
        assert device.driver.holds(again.data_ptr())
        assert not device.driver.holds(kept.data_ptr())
        assert bool((kept == 3.0).all())
        del kept
        store.allocate(2000, torch.float32)
        assert len(device.driver.locked) == 2
        assert device.driver.last_error == 0
        store.close()


def test_memory_that_something_else_has_locked_is_told_from_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    _fail_to_lock(monkeypatch, 712)
    with pytest.warns(UserWarning, match="CUDA error 712: something else has locked a part of it"):
        HostStore(pinned=True).create("optimizer", 10, torch.float32)


def test_the_next_kernel_does_not_report_that_pages_could_not_be_locked() -> None:
    with SimulatedDevice() as device:
        device.driver.most_bytes = 4096
        store = HostStore(pinned=True)
        kept = store.create("optimizer", 10, torch.float32)
        with pytest.warns(UserWarning, match="CUDA error 2"):
            store.create("optimizer", kept.numel(), torch.float32)
        assert torch.ones(3, device="cuda").sum().item() == 3
        device.driver.locked.clear()  # somebody else has unlocked it
        store.close()
        assert torch.ones(3, device="cuda").sum().item() == 3


def test_forked_processes_do_not_share_locked_pages() -> None:
    with SimulatedDevice():
        tensor = HostStore(pinned=True).create("optimizer", 10, torch.float32)
        assert "dc" in _flags_of_mapping(tensor.data_ptr())  # do not copy


def _flags_of_mapping(address: int) -> list[str]:
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            start, stop = (int(bound, 16) for bound in first.split("-"))
            is_inside = start <= address < stop
        elif is_inside and first == "VmFlags:":
            return rest.split()
    raise AssertionError("the address is in no mapping")


def test_memory_of_a_store_that_is_dropped_is_unlocked_by_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's collector waited for the whole device, in any thread: in a pipeline or a capture of a graph."""
    calls: list[str] = []
    with SimulatedDevice() as device:
        unlock = device.driver.cudaHostUnregister
        monkeypatch.setattr(device.driver, "cudaHostUnregister", lambda at: calls.append("unlock") or unlock(at))
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        device.patch("synchronize", lambda _=None: calls.append("wait"))
        store = HostStore(pinned=True, copies_of=torch.device("cuda", 0))
        kept = store.create("optimizer", 8, torch.float32)
        store.give_back("optimizer", kept)
        del store
        gc.collect()
        del kept
        assert calls == []
        HostStore(pinned=True, copies_of=torch.device("cuda", 0)).create("optimizer", 8, torch.float32)
    assert calls == ["wait", "unlock"]


def test_memory_of_another_store_is_not_waited_for_when_some_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step waited for the whole device because of memory of another engine."""
    waits: list[object] = []
    with SimulatedDevice() as device:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        device.patch("synchronize", waits.append)
        one, other = (HostStore(pinned=True, copies_of=torch.device("cuda", 0)) for _ in range(2))
        gradient, state = one.create("gradients", 8, torch.float32), other.create("optimizer", 8, torch.float32)
        address = state.data_ptr()
        del state
        gc.collect()
        one.give_back("gradients", gradient)
        assert waits == []
        assert device.driver.holds(address)
        unlock_freed()
        assert len(waits) == 1
        assert not device.driver.holds(address)
        one.close()
        other.close()
