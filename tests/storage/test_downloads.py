"""Values of a device go to disks while the host goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_zero.storage.copies import Copies
from lightning_zero.storage.disk import DiskStore
from lightning_zero.storage.downloads import Downloads
from lightning_zero.storage.host import HostStore
from lightning_zero.storage.nvme import NvmeStore
from tests.simulated_device import SimulatedDevice

NUMEL = 5000  # five blocks
CUDA = torch.device("cuda", 0)


class Disks:
    """A store with one thread, and the host memory that it borrows."""

    def __init__(self, folder: Path) -> None:
        self.host = HostStore(pinned=True)
        self.copies = Copies(CUDA)
        disks = NvmeStore([folder], block_bytes=4096, threads=1, direct=False)
        self.store = DiskStore(disks, Downloads(self.host, self.copies))
        self.faces = [self.store.create("gradients", NUMEL, torch.float32) for _ in range(8)]

    def close(self) -> None:
        self.store.close()
        self.host.close()


def test_values_arrive_behind_what_computes_them_and_nobody_waits(tmp_path: Path) -> None:
    with SimulatedDevice() as device:
        disks = Disks(tmp_path)
        for number, face in enumerate(disks.faces[:3]):  # as much as may be on its way
            values = torch.ones(NUMEL, device="cuda")
            values.mul_(number)
            disks.store.put(face, values)
            del values  # its memory is given away behind the copy
        assert not device.waits
        for number, face in enumerate(disks.faces[:3]):
            assert torch.equal(face + 0.0, torch.full((NUMEL,), float(number)))
        disks.close()


def test_a_value_that_is_on_its_way_can_be_used_and_overwritten(tmp_path: Path) -> None:
    with SimulatedDevice():
        disks = Disks(tmp_path)
        face = disks.faces[0]
        for number in range(4):
            disks.store.put(face, torch.full((NUMEL,), float(number), device="cuda"))
            if number % 2:
                assert float((face + 0.0).sum()) == NUMEL * number
        disks.store.drain()
        assert float((face + 0.0).sum()) == NUMEL * 3
        disks.close()


def test_host_memory_is_lent_to_what_is_on_its_way_alone(tmp_path: Path) -> None:
    with SimulatedDevice():
        disks = Disks(tmp_path)
        for _ in range(3):
            for face in disks.faces:
                disks.store.put(face, torch.ones(NUMEL, device="cuda"))
        assert disks.host.peak("gradients") <= 5 * NUMEL * 4  # three visits, and two that arrive meanwhile
        disks.close()
        assert disks.host.live("gradients") == 0


def test_memory_on_the_way_is_not_one_piece_for_each_size(tmp_path: Path) -> None:
    numels = [1024 * (1 + number) for number in range(12)]
    with SimulatedDevice() as device:
        disks = Disks(tmp_path)
        for numel in [*numels, *reversed(numels)]:
            face = disks.store.create("optimizer", numel, torch.float32)
            disks.store.put(face, torch.full((numel,), float(numel), device="cuda"))
            disks.store.drain()
            assert float((face + 0.0).sum()) == numel**2
        assert disks.host.live("gradients") == 4 * numels[-1]  # one at a time was on its way
        assert sum(device.driver.locked.values()) <= 4 * (numels[-1] + numels[-2])
        disks.close()
        assert disks.host.live("gradients") == 0
        assert not device.driver.locked


def test_a_copy_that_fails_is_the_error_of_who_uses_the_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SimulatedDevice():
        disks = Disks(tmp_path)

        def fail() -> None:
            raise RuntimeError("the device is lost")

        monkeypatch.setattr("lightning_zero.storage.copies.Landing.finish", lambda landing: fail())
        disks.store.put(disks.faces[0], torch.ones(NUMEL, device="cuda"))
        with pytest.raises(RuntimeError, match="the device is lost"):
            disks.store.drain()
        with pytest.raises(RuntimeError, match="the device is lost"):
            disks.faces[0] + 0.0
        disks.close()
