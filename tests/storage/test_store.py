"""The store's accounts."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest
import torch

from lightning_zero.storage.store import DeviceStore, ShardStore


def _store() -> DeviceStore:
    return DeviceStore(torch.device("cpu"))


def test_a_new_shard_is_accounted() -> None:
    store = _store()
    shard = store.create("optimizer", 5, torch.float32)
    assert (shard.shape, shard.dtype) == ((5,), torch.float32)
    assert store.live("optimizer") == 20
    assert store.live("parameters") == 0


def test_a_shard_made_under_inference_mode_can_be_trained() -> None:
    with torch.inference_mode():
        shard = _store().create("parameters", 5, torch.float32)
    assert not shard.is_inference()


def test_the_peak_stays_when_bytes_go() -> None:
    store = _store()
    store.adopt("gathered", 100)
    store.adopt("gathered", 50)
    store.release("gathered", 150)
    store.adopt("gathered", 30)
    assert (store.live("gathered"), store.peak("gathered")) == (30, 150)


def test_a_new_peak_starts_from_what_is_alive() -> None:
    store = _store()
    store.adopt("gradients", 100)
    store.release("gradients", 60)
    store.reset_peak()
    assert store.peak("gradients") == 40
    store.adopt("gradients", 5)
    assert store.peak("gradients") == 45


def test_a_closed_store_has_forgotten_everything() -> None:
    store = _store()
    store.create("parameters", 5, torch.bfloat16)
    store.close()
    assert (store.live("parameters"), store.peak("parameters")) == (0, 0)


def test_the_device_store_is_a_store() -> None:
    store: ShardStore = _store()
    assert store.device == torch.device("cpu")


_COUNT_FAULTS = """
import resource, torch
from lightning_zero.storage.store import DeviceStore
DeviceStore(torch.device("cpu"))
torch.set_num_threads(1)
torch.ones(5_000_000)
before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
for _ in range(10):
    torch.ones(5_000_000)
print(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc"
)
def test_memory_that_was_freed_is_not_fetched_again_page_by_page() -> None:
    # In a process of its own: here other tests' threads fault too, and their small blocks lie in what was freed.
    done = subprocess.run([sys.executable, "-c", _COUNT_FAULTS], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 5_000  # 48,828 pages are written
