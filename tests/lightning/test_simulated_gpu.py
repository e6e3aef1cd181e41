"""Options that decide by the memory of a GPU, in forecasts and simulations."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_zero import ActivationCheckpointing, MachineRates, Offload, ZeroStrategy, estimate_memory, simulate_step
from lightning_zero.forecast.report import table
from lightning_zero.forecast.settings import MemoryForecast
from lightning_zero.forecast.simulation import simulation_text

WIDTH, DEPTH, BATCH = 64, 6, torch.ones(512, 64)
AUTO = ActivationCheckpointing(policy="auto")


def _block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.Tanh())


class Program(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[_block() for _ in range(DEPTH)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def _forecast(policy: Any, **options: Any) -> MemoryForecast:
    strategy = ZeroStrategy(stage=2, activation_checkpointing=policy)
    return estimate_memory(Program(), strategy, world_size=2, batch=BATCH, side_by_side=False, **options)


def test_the_policy_is_chosen_by_the_memory_of_a_gpu() -> None:
    activations = DEPTH * BATCH.nbytes  # of an input per block
    plain, offloaded = _forecast(None).own, _forecast(ActivationCheckpointing(policy="offload")).own
    room = offloaded.peak_bytes + activations  # of which nine tenths are used
    assumed, large, small = (_forecast(AUTO, memory=memory) for memory in (None, 80 * 2**30, offloaded.peak_bytes))
    recomputed = _forecast(AUTO, memory=int(room * 1.1))
    assert large.own.peak_bytes == assumed.own.peak_bytes == plain.peak_bytes
    assert small.own.peak_bytes == offloaded.peak_bytes
    full = _forecast(ActivationCheckpointing()).own.peak_bytes
    assert offloaded.peak_bytes < recomputed.own.peak_bytes == full < plain.peak_bytes
    assert [len(one.notes) for one in (assumed, large, small)] == [1, 0, 0]
    assert '`ActivationCheckpointing(policy="auto")` decides by the memory of a GPU, taken as 80 GiB' in table(assumed)


def test_the_memory_of_a_gpu_is_filled_before_units_are_offloaded() -> None:
    strategy = ZeroStrategy(stage=2, offload=Offload(fraction="auto"))
    options: dict[str, Any] = {"world_size": 4, "batch": BATCH, "side_by_side": False}
    assumed, half, none = (
        estimate_memory(Program(), strategy, memory=memory, **options) for memory in (None, 1_230_000, 2**10)
    )
    assert sum(assumed.own.host.values()) == 0
    assert 0 < half.own.host["optimizer"] < none.own.host["optimizer"]
    assert none.own.device["optimizer"] == 0 < half.own.device["optimizer"] < assumed.own.device["optimizer"]
    assert [len(one.notes) for one in (assumed, half)] == [1, 0]
    assert sum(simulate_step(Program(), strategy, world_size=4, batch=BATCH).host.values()) == 0


def test_a_simulation_chooses_as_a_forecast() -> None:
    simulation = simulate_step(
        Program(), ZeroStrategy(stage=2, activation_checkpointing=AUTO), world_size=2, batch=BATCH
    )
    assert simulation.peak_bytes == pytest.approx(_forecast(None).own.peak_bytes, rel=0.05)
    assert simulation.host["activations"] == DEPTH * BATCH.nbytes  # of the second step


def test_a_simulation_says_which_memory_decides_and_takes_another() -> None:
    strategy = ZeroStrategy(stage=2, activation_checkpointing=AUTO)
    assumed, small = (
        simulate_step(Program(), strategy, world_size=2, batch=BATCH, device_memory=memory) for memory in (None, 2**10)
    )
    sentence = '`ActivationCheckpointing(policy="auto")` decides by the memory of a GPU, taken as 80 GiB. Name it with'
    assert list(assumed.notes) == [f"{sentence} `device_memory`."]
    assert sentence in simulation_text(assumed)
    assert list(small.notes) == []
    assert small.peak_bytes < assumed.peak_bytes


def test_offloaded_activations_take_the_time_of_their_copies() -> None:
    rates = MachineRates(host=1e-3)
    seconds = [
        simulate_step(
            Program(), ZeroStrategy(activation_checkpointing={"policy": policy}), world_size=2, batch=BATCH, rates=rates
        ).seconds
        for policy in ("full", "offload")
    ]
    assert seconds[1] - seconds[0] > 2 * DEPTH * BATCH.nbytes / 1e6  # there and back


def test_a_cpu_has_no_memory_to_choose_by() -> None:
    for run in (estimate_memory, simulate_step):
        with pytest.raises(
            ValueError, match="`policy='auto'` of `activation_checkpointing` needs `budget_bytes` on `c"
        ):
            run(
                Program(),
                ZeroStrategy(activation_checkpointing=AUTO),
                world_size=1,
                batch=BATCH,
                accelerator="cpu",
            )
    given = ActivationCheckpointing(policy="auto", budget_bytes=2**30)
    assert _forecast(given, accelerator="cpu").own.peak_bytes == _forecast(None, accelerator="cpu").own.peak_bytes
