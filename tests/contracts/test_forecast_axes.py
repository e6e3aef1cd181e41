"""Forecasts with tensor and expert parallelism against fits on real ranks, in which every storage is counted."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy, estimate_memory
from lightning_zero.engine.access.statistics import EngineStats
from lightning_zero.forecast.live_bytes import LiveBytes
from lightning_zero.forecast.rehearsal import host_apart
from tests import worlds
from tests.contracts.test_forecast import PEAK, PERSISTENT, SCALARS, FromStep, most_awake, offload_to
from tests.contracts.test_simulated_axes import AXES_MODELS, Fitted
from tests.lightning_programs import trainer

KINDS = ("parameters", "gradients", "optimizer")
DEEPSPEED = {  # one copy of the model on two tensor ranks: two batches per step
    "train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "bf16": {"enabled": True},
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One setting of one model."""

    model: str
    stage: int
    world: int
    tensor: Any = None
    experts: int | None = None
    offload: str | None = None
    checkpointing: str | None = None
    is_imported: bool = False  # from a configuration of DeepSpeed

    def __str__(self) -> str:
        axes = (
            f"tensor{self.tensor}",
            f"experts{self.experts}",
            self.offload,
            self.checkpointing,
            self.is_imported and "deepspeed",
        )
        named = [str(one) for one in axes if one and not str(one).endswith("None")]
        return "-".join([self.model, f"stage{self.stage}", f"w{self.world}", *named])

    def make_strategy(self, path: Path) -> ZeroStrategy:
        if self.is_imported:
            config = {**DEEPSPEED, "zero_optimization": {"stage": self.stage}}
            return ZeroStrategy.from_deepspeed(config, tensor_parallel=self.tensor, expert_parallel=self.experts)
        return ZeroStrategy(
            stage=self.stage,  # type: ignore[arg-type]
            tensor_parallel=self.tensor,
            expert_parallel=self.experts,
            offload=offload_to(path, self.offload),
            activation_checkpointing=None if self.checkpointing is None else {"policy": self.checkpointing},
        )


class Kept(pl.Callback):
    """Keeps the bytes of the engine at the end of the last backward."""

    stats: EngineStats

    def on_after_backward(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.stats = trainer.strategy.engine.stats()  # type: ignore[attr-defined]


def _fit(rank: int, world: int, case: Case, path: Path) -> dict[str, int]:
    counter, kept = LiveBytes(), Kept()
    batch = AXES_MODELS[case.model][1]()
    callbacks = [FromStep(counter), kept]
    with most_awake() as awake, host_apart(counter) as activations, counter:
        fit = trainer(rank, world, case.make_strategy(path), max_steps=3, callbacks=callbacks)
        module = Fitted(case.model)
        fit.fit(module, DataLoader([batch] * (6 if case.is_imported else 3), batch_size=None))
        gc.enable()
        counter.parts = tuple
    buffers = sum(one.nbytes for one in module.buffers())
    persistent = sum(kept.stats.memory[kind] for kind in KINDS) + buffers
    host = sum(kept.stats.host.values()) + activations.most
    places = {"host": host, "disk": sum(kept.stats.disk.values()), "awake": awake[0]}
    return {"peak": counter.peak.nbytes, "persistent": persistent, **places}


def _compare(case: Case, path: Path) -> None:
    forecast = estimate_memory(
        lambda: Fitted(case.model),
        case.make_strategy(path / "forecast"),
        world_size=case.world,
        batch=AXES_MODELS[case.model][1](),
        accelerator="cpu",
        side_by_side=False,
    ).own
    host = dict(forecast.host)
    windows = host.pop("windows")
    assert not (path / "forecast").exists()
    for run in worlds.run(_fit, case.world, case, path):
        assert abs(forecast.peak_bytes - run["peak"]) <= PEAK * run["peak"], (forecast, run)
        places = {"persistent": forecast.device, "host": host, "disk": forecast.disk}
        for found, mine in ((name, sum(held.values())) for name, held in places.items()):
            assert abs(mine - run[found]) <= PERSISTENT * run[found] + SCALARS, (found, forecast, run)
        assert run["awake"] <= windows, (forecast, run)
        assert (run["awake"] > 0) == (run["disk"] > 0)


def _matrix() -> Iterator[Case]:
    for stage in (0, 1, 2, 3):
        for model in ("gpt", "llama"):
            yield Case(model, stage, 2, tensor=2)
        for model in ("moe", "mixtral"):
            yield Case(model, stage, 2)
            yield Case(model, stage, 2, experts=2)
    yield Case("gpt", 3, 4, tensor=2)
    yield Case("llama", 2, 2, tensor=2, offload="cpu", checkpointing="full")
    yield Case("llama", 3, 2, tensor={"size": 2, "sequence": True})
    yield Case("moe", 3, 4, experts=2, checkpointing="full")
    yield Case("mixtral", 2, 2, experts=2, offload="cpu")
    yield Case("gpt", 1, 2, tensor=2, checkpointing="offload")
    yield Case("llama", 2, 2, tensor=2, is_imported=True)
    yield Case("llama", 1, 2, tensor=2, checkpointing="partition")
    yield Case("mixtral", 2, 2, experts=2, checkpointing="offload")
    for stage in (1, 2, 3):
        yield Case("gpt", stage, 2, tensor=2, offload="disk")
        yield Case("moe", stage, 2, experts=2, offload="disk")
    yield Case("llama", 3, 4, tensor=2, offload="all-disk", checkpointing="full")
    yield Case("mixtral", 3, 4, experts=2, offload="half-disk")


QUICK = [Case("gpt", 3, 2, tensor=2), Case("mixtral", 2, 2, experts=2), Case("moe", 2, 2, experts=2, offload="disk")]


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_forecasts_of_groups_are_those_of_a_fit(case: Case, tmp_path: Path) -> None:
    _compare(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in _matrix() if case not in QUICK], ids=str)
def test_forecasts_of_groups_are_those_of_a_fit_in_every_setting(case: Case, tmp_path: Path) -> None:
    _compare(case, tmp_path)
