from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.multiprocessing as mp

from lightning_zero import MachineRates
from lightning_zero.diagnostics import rates
from lightning_zero.storage import nvme
from lightning_zero.storage.nvme import StorageError


def _numbers(found: dict[str, str]) -> list[float]:
    return [float(match[0]) for value in found.values() if (match := re.match(r"[\d.]+", value))]


def test_steps_on_the_cpu_have_a_rate() -> None:
    found = rates.copies_and_steps()
    assert any(name.startswith("AdamW on the CPU") for name in found)
    assert all(number > 0 for number in _numbers(found))


def test_collectives_are_measured_between_processes() -> None:
    found = rates.collectives(2)
    assert [name.partition(",")[0] for name in found] == ["all-gather", "reduce-scatter"]
    assert len(_numbers(found)) == 2


def test_rates_of_a_step_are_those_that_a_simulation_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "_COPIED_NUMEL", 2**16)
    found = rates.step_rates(2)
    assert found.keys() == {"tflops", "tflops_fp32", "memory", "link", "host"}
    assert MachineRates(**found).launch_us == MachineRates().launch_us  # refuses rates that are no numbers above 0


class _Failed:
    processes: tuple[()] = ()

    def join(self, timeout: float) -> bool:
        raise mp.ProcessRaisedException("-- Process 1 terminated\nTraceback\nValueError: no route\n", 1, 7)


def test_the_error_of_a_rank_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mp, "spawn", lambda *args, **kwargs: _Failed())
    with pytest.raises(RuntimeError, match=r"^a process that measures gloo failed: ValueError: no route$"):
        rates.collectives(2)


@pytest.mark.slow
def test_a_rank_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    with pytest.raises(RuntimeError, match="no-such-interface"):
        rates.collectives(2)


def test_a_disk_is_written_and_read_and_left_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "_DISK_BYTES", 2**22)
    assert list(rates.disk(tmp_path)) == [f"write to {tmp_path}", f"read from {tmp_path}"]
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_error_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.raises(StorageError, match="no room"):
        rates.disk(tmp_path)


@pytest.mark.parametrize(
    ("ranks", "num_gpus", "expected"),
    [
        (None, 0, (2, "gloo")),
        (None, 1, (2, "gloo")),  # one rank sends nothing
        (None, 4, (4, "nccl")),
        (2, 4, (2, "nccl")),
        (4, 2, (4, "gloo")),
    ],
)
def test_collectives_have_at_least_two_ranks(ranks: int | None, num_gpus: int, expected: tuple[int, str]) -> None:
    assert rates._ranks_and_backend(ranks, num_gpus) == expected
