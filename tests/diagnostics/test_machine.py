from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest
import torch

import lightning_zero
from lightning_zero.diagnostics import machine


def test_versions_are_those_of_the_packages() -> None:
    found = machine.versions()
    assert found["torch"] == importlib.metadata.version("torch")
    assert found["lightning-zero"] == lightning_zero.__version__


def test_a_package_that_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(machine.importlib.metadata, "version", missing)
    assert machine.versions()["triton"] == "not installed"


def test_settings_are_those_of_ranks_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    monkeypatch.setenv("API_TOKEN", "secret")
    found = machine.settings()
    assert found["NCCL_SOCKET_IFNAME"] == "eth0"
    assert "API_TOKEN" not in found


def test_a_machine_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = machine.features()
    assert found["stages 0 to 3 on CPUs"] == "works"
    assert found["stages 0 to 3 on GPUs"] == found["bf16 on GPUs"] == "no: no GPU is visible"
    assert found["Triton kernels"].startswith("no: no GPU is visible")
    assert machine.devices()["GPUs"] == "0"


def test_gpus_are_listed_with_their_links(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, total_memory, major, minor = "A GPU", 80 * machine.GIB, 9, 0

    pairs: list[tuple[int, int]] = []

    def reaches(one: int, other: int) -> bool:
        pairs.append((one, other))
        return one == 0

    fakes: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_properties": lambda index: Properties,
        "can_device_access_peer": reaches,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    found = machine.devices()
    assert found["GPU 1"] == "A GPU, 80.0 GiB, capability 9.0"
    assert found["direct links"] == "1 of 2 pairs of GPUs"
    assert pairs == [(0, 1), (1, 0)]


def test_without_triton_kernels_do_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(machine, "HAS_TRITON", False)
    assert machine.features()["Triton kernels"].startswith("no: `triton` is not installed")
    monkeypatch.setattr(machine, "HAS_TRITON", True)
    monkeypatch.setattr(machine, "kernels_agree", lambda device: True)
    assert machine.features()["Triton kernels"] == machine.features()["bf16 on GPUs"] == "works"
