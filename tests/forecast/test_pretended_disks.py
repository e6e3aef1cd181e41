from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from lightning_zero.forecast.pretended_disks import PretendedDisks
from lightning_zero.storage.disk import DiskStore, Visit


class Transfers:
    """Counts the bytes that were asked for, and those that were waited for."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.awaited: list[int] = []

    def __call__(self, nbytes: int) -> Callable[[], None]:
        self.asked.append(nbytes)
        return lambda: self.awaited.append(nbytes)


def _store(path: Path, transfers: Transfers) -> DiskStore:
    disks = PretendedDisks([path / "none"], transfer=transfers, block_bytes=4096, threads=1, direct=True)
    return DiskStore(disks)  # type: ignore[arg-type]


def test_small_values_come_back_and_large_ones_are_zeros(tmp_path: Path) -> None:
    transfers = Transfers()
    store = _store(tmp_path, transfers)
    small, large = store.keep("optimizer", torch.ones(8)), store.keep("optimizer", torch.ones(2**14))
    assert torch.equal(small.clone(), torch.ones(8))
    assert torch.equal(large.clone(), torch.zeros(2**14))
    assert store.live("optimizer") == 4 * (8 + 2**14)
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_reads_are_waited_for_and_writes_are_not(tmp_path: Path) -> None:
    transfers = Transfers()
    store = _store(tmp_path, transfers)
    values = store.keep("optimizer", torch.ones(2**14))
    assert (transfers.asked, transfers.awaited) == ([2**16], [])
    visit = Visit(store, changed=[values])
    visit.begin()
    assert transfers.asked == [2**16] * 2
    visit.ready()
    assert transfers.awaited == [2**16]
    visit.end()
    assert transfers.asked == [2**16] * 3
    assert store.awake_bytes == 0
    store.give_back("optimizer", values)
    store.close()
