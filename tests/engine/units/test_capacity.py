"""Filling: the device first, then host memory, then disks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.config import Offload
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.units import capacity as filling
from lightning_zero.engine.units.capacity import Memory, fill, free_bytes, free_host_bytes
from lightning_zero.sharding import NodeRanks
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
    device, host = free_bytes(torch.device("cpu"), 1)
    assert device > 2**20
    assert host == 0
    assert free_bytes(torch.device("cpu"), 4)[0] < device / 2


_GIB = 2**30


def _machine(root: Path, files: dict[str, Any]) -> Path:
    for name, content in {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {64 * 2**20} kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(str(content))
    return root


def _v2(folder: str, limit: Any, used: int) -> dict[str, Any]:
    names = {"max": limit, "current": used, "stat": f"anon 1\ninactive_file {_GIB}\n"}
    return {f"sys/fs/cgroup/{folder}memory.{name}": value for name, value in names.items()}


_V1 = "sys/fs/cgroup/memory/job/memory."


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 64),
        ({"proc/self/cgroup": "0::/\n", **_v2("", "max", 0)}, 64),
        ({"proc/self/cgroup": "0::/\n", **_v2("", 20 * _GIB, 9 * _GIB)}, 12),
        ({"proc/self/cgroup": "0::/job/step\n", **_v2("job/step/", "max", 0), **_v2("job/", 8 * _GIB, 4 * _GIB)}, 5),
        ({"proc/self/cgroup": "0::/of/the/host\n", **_v2("", 16 * _GIB, 10 * _GIB)}, 7),
        ({"proc/self/cgroup": "0::/\n", **_v2("", 2 * _GIB, 4 * _GIB)}, 0),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/\n4:memory:/job\n0::/\n",
                f"{_V1}limit_in_bytes": 8 * _GIB,
                f"{_V1}usage_in_bytes": 3 * _GIB,
                f"{_V1}stat": f"total_inactive_file {_GIB}",
            },
            6,
        ),
    ],
    ids=["none", "unlimited", "container", "slurm", "path-of-the-host", "full", "v1"],
)
def test_limits_of_cgroups_count(files: dict[str, Any], free: int, tmp_path: Path) -> None:
    assert free_host_bytes(_machine(tmp_path, files)) == free * _GIB


def test_a_system_that_does_not_say_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^`Offload\(fraction='auto'\)` needs .* Use a number from 0 to 1"):
        free_host_bytes(tmp_path)


def _shares(rank: int, world: int, node: NodeRanks | None) -> list[int]:
    shares: list[int] = []
    offload = Offload(optimizer="cpu", fraction="auto")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LOCAL_WORLD_SIZE", raising=False)
        patch.setattr(filling, "free_bytes", lambda device, ranks: shares.append(ranks) or (10**9, 10**9))
        ZeroEngine(2, offload=offload).shard(nn.Linear(4, 4), node=node)
    return shares


@pytest.mark.parametrize(("node", "expected"), [(None, 2), (NodeRanks(8, 0), 8)], ids=["host-names", "given"])
def test_the_ranks_of_a_node_share_its_memory_under_every_launcher(node: NodeRanks | None, expected: int) -> None:
    assert worlds.run(_shares, 2, node) == [[expected]] * 2


def _filled(rank: int, world: int, path: str) -> tuple[list[str], list[str], bool]:
    offload = Offload(optimizer="nvme", path=path, fraction="auto", buffer_bytes=4096)
    with pytest.MonkeyPatch.context() as patch:
        # The rank with less decides: room for the root, a block on each, and the rest on disks.
        patch.setattr(filling, "free_bytes", lambda device, ranks: ((12000, 16000)[rank], (10**9, 3500)[rank]))
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
