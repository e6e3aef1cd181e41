"""Filling: the device first, then host memory, then disks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_zero.config import Offload
from lightning_zero.engine.units import capacity as filling
from lightning_zero.engine.units.capacity import Memory, fill, free_bytes
from tests import worlds
from tests.contracts import test_offload


@pytest.mark.parametrize(
    ("device", "host", "last", "expected"),
    [
        (100, 0, "nvme", "ddddd"),
        (25, 100, "nvme", "ddccc"),
        (25, 15, "nvme", "ddcnn"),
        (-5, 0, "nvme", "nnnnn"),
        (-5, 1000, "nvme", "ccccc"),
        (25, 15, "cpu", "ddccc"),
    ],
)
def test_the_fastest_memory_is_filled_first(device: int, host: int, last: Memory, expected: str) -> None:
    assert "".join(home[0] for home in fill([10] * 5, device, host, last)) == expected


def test_once_a_unit_has_left_the_device_those_behind_it_follow() -> None:
    assert fill([10, 50, 1, 1], 20, 51, "nvme") == ["device", "cpu", "cpu", "nvme"]


def test_free_memory_of_a_cpu_counts_once() -> None:
    device, host = free_bytes(torch.device("cpu"))
    assert device > 2**20
    assert host == 0


def _filled(rank: int, world: int, path: str) -> tuple[list[str], list[str], bool]:
    offload = Offload(optimizer="nvme", path=path, fraction="auto", buffer_bytes=4096)
    with pytest.MonkeyPatch.context() as patch:
        # The rank with less decides: room for the root, a block on each, and the rest on disks.
        patch.setattr(filling, "free_bytes", lambda device: ((12000, 16000)[rank], (10**9, 3500)[rank]))
        engine, module, optimizer = test_offload._started(2, offload=offload)
    homes = [buffer.home.where for buffer in engine._state.buffers]
    plain, same, other = test_offload._started(2)
    for number in range(2):
        test_offload._step(engine, module, optimizer, number)
        test_offload._step(plain, same, other, number)
    equal = test_offload._same(test_offload._values(engine, module), test_offload._values(plain, same))
    plan = engine.plan()
    engine.close()
    plain.close()
    return homes, plan, equal


def test_units_are_spread_alike_on_all_ranks_and_train_alike(tmp_path: Path) -> None:
    (homes, plan, equal), (others, _, _) = worlds.run(_filled, 2, str(tmp_path))
    assert homes == others
    assert {"host", "disk"} <= set(homes), homes
    assert equal
    assert any("units on the device" in line for line in plan)


def test_auto_is_the_only_word() -> None:
    with pytest.raises(ValueError, match="fraction='some'.` is not known. Use a number from 0 to 1, or 'auto'"):
        Offload(fraction="some")  # type: ignore[arg-type]
