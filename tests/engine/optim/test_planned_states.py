"""The states of the start-up plan are those that a step makes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.config import Moments, Offload
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.optim.planned_states import PlannedStates
from tests import worlds

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "amsgrad": lambda params: torch.optim.AdamW(params, lr=1e-3, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-3),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
}


def _model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    model[2].bias.requires_grad_(False)
    return model


def _planned_and_made(
    rank: int, world: int, optimizer: str, stage: int, moments: Moments, offload: Offload | None
) -> tuple[float, int, str]:
    engine = ZeroEngine(stage, units=["Linear"], moments=moments, offload=offload)  # type: ignore[arg-type]
    model = engine.shard(_model())
    attached = engine.attach(OPTIMIZERS[optimizer](model.parameters()))
    line = next(line for line in engine.plan() if line.startswith("memory per rank"))
    planned = PlannedStates.of([attached], engine._state.param_index.by_id, engine._state.sharded.statistics._moments)

    def held() -> int:
        stats = engine.stats()
        return sum(place.get("optimizer", 0) for place in (stats.memory, stats.host, stats.disk))

    before = held()
    model(torch.ones(2, 64)).square().mean().backward()
    attached.step()
    engine.flush()
    made = held() - before
    again = PlannedStates.of([attached], engine._state.param_index.by_id, engine._state.sharded.statistics._moments)
    if offload is None or offload.path is None:
        assert again.nbytes == planned.nbytes
    engine.close()
    return sum(planned.nbytes.values()), made, line


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("optimizer", "moments"),
    [
        ("adamw", "fp32"),
        ("adamw", "bf16"),
        ("adamw", "int8"),
        ("amsgrad", "fp32"),
        ("sgd", "fp32"),
        ("momentum", "fp32"),
    ],
)
def test_states_are_those_of_a_step(optimizer: str, moments: Moments, world: int) -> None:
    for planned, made, line in worlds.run(_planned_and_made, world, optimizer, 2, moments, None):
        assert made == pytest.approx(planned, rel=0.01, abs=256)
        number, unit = re.search(r"optimizer states ([\d.]+) (\w+)", line).groups()  # type: ignore[union-attr]
        assert float(number) * UNITS[unit] == pytest.approx(planned, rel=0.06)


def test_offloaded_states_are_in_the_line_of_their_place(tmp_path: Path) -> None:
    for place, offload in (("in host memory", Offload()), ("on disks", Offload(optimizer="nvme", path=str(tmp_path)))):
        planned, made, line = worlds.run(_planned_and_made, 1, "adamw", 2, "fp32", offload)[0]
        assert made == pytest.approx(planned, rel=0.01, abs=2**13)  # records of disks are whole blocks
        device, _, away = line.partition(f"; {place}: ")
        assert "optimizer states 0 B" in device
        assert "optimizer states 0 B" not in away


def test_the_sum_is_that_of_the_parts_and_other_optimizers_are_named() -> None:
    engine = ZeroEngine(3)
    model: Any = engine.shard(_model())
    assert "in all" not in "".join(engine.plan())  # no optimizer yet
    engine.attach(torch.optim.RMSprop(model.parameters()))
    (line,) = [line for line in engine.plan() if line.startswith("memory per rank")]
    assert line.endswith("; states of `RMSprop` are not counted")
    parts = re.findall(r"(?:parameters|masters|states|gradients|about) ([\d.]+) (B|KiB|MiB|GiB)", line)
    (whole,) = re.findall(r"in all ([\d.]+) (B|KiB|MiB|GiB)", line)
    assert sum(float(number) * UNITS[unit] for number, unit in parts) == pytest.approx(
        float(whole[0]) * UNITS[whole[1]], rel=0.02
    )
    engine.close()
