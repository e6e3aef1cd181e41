"""Copies of modules share locks and the like, and refuse iterators by name."""

from __future__ import annotations

import threading
from collections import UserDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.parallel.module_copies import copied, copied_to_cpu
from tests.simulated_device import SimulatedDevice


class Model(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2))
        self.numbers = [1, 2]
        vars(self.inner).update(attributes)


def test_a_copy_on_the_cpu_has_the_tensors_of_all_attributes_there() -> None:
    """``configure_model`` runs on the device: plans for tensor ranks failed with ``self.pos = torch.arange(9)``."""
    with SimulatedDevice() as device:
        table = torch.arange(3).to("cuda")
        model = Model(table=table, deep={"some": [SimpleNamespace(table=table, rate=0.1)]}).to("cuda")
        model._device = model.inner.place = torch.device("cuda", 0)  # as LightningModules say where they are
        model.register_buffer("mean", torch.ones(2).to("cuda"))
        weight = nn.Parameter(torch.zeros(2, 2))
        other = copied_to_cpu(model, {id(model.inner[0].weight): weight})
        device.synchronize()
        found = [*other.parameters(), *other.buffers(), other.inner.table]
        assert {one.device.type for one in found} == {"cpu"}
        assert {other._device, other.inner.place} == {torch.device("cpu")}
        assert other.inner[0].weight is weight
        assert other.inner.deep["some"][0].table is other.inner.table
        assert other.inner.table.tolist() == [0, 1, 2]
        assert isinstance(other.inner[0].bias, nn.Parameter)
        assert {one.device.type for one in [*model.parameters(), model.inner.table]} == {"cuda"}


class _Config(UserDict[str, Any]):
    """Computes its values, of which one is missing."""

    def items(self) -> Any:
        raise KeyError("missing")


class _Ring:
    def __init__(self) -> None:
        self._buffers = [1, 2]


def test_objects_that_look_like_modules_and_values_that_are_computed_are_copied_to_the_cpu() -> None:
    model = Model(config=_Config(rate=0.1), ring=_Ring())
    other = copied_to_cpu(model)
    assert other.inner.config["rate"] == 0.1
    assert other.inner.ring._buffers == [1, 2]


def test_locks_are_shared_and_all_else_is_copied() -> None:
    lock = threading.Lock()
    model = Model(lock=lock, deep={"some": [SimpleNamespace(lock=lock, rates=[0.1])]})
    weight = nn.Parameter(torch.zeros(2, 2))
    other = copied(model, {id(model.inner[0].weight): weight})
    again = copied(other)
    for one in (other, again):
        assert one.inner.lock is lock
        (found,) = one.inner.deep["some"]
        assert found.lock is lock
        assert found.rates is not model.inner.deep["some"][0].rates
        assert one.numbers is not model.numbers
        assert one.inner[0].bias is not model.inner[0].bias
    assert other.inner[0].weight is weight


def test_a_file_that_is_written_is_shared(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w") as file:
        assert copied(Model(log=file)).inner.log is file


def test_iterators_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("lines")
    with open(tmp_path / "log") as file:
        for value in (file, (number for number in range(3)), iter(torch.utils.data.DataLoader([1, 2]))):
            with pytest.raises(ValueError, match=r"`self\.inner\.kept\['a'\]` is a .*Make it in `on_fit_start`"):
                copied(Model(kept={"a": value}))
