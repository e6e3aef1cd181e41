"""Forecasts with tensor and expert parallelism against fits on real ranks, in which every storage is counted."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy, estimate_memory
from lightning_zero.engine.access.statistics import EngineStats
from lightning_zero.forecast.live_bytes import LiveBytes
from lightning_zero.forecast.rehearsal import host_apart
from tests import worlds
from tests.contracts.test_forecast import PEAK, PERSISTENT, SCALARS, FromStep
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

    @property
    def strategy(self) -> ZeroStrategy:
        if self.is_imported:
            config = {**DEEPSPEED, "zero_optimization": {"stage": self.stage}}
            return ZeroStrategy.from_deepspeed(config, tensor_parallel=self.tensor, expert_parallel=self.experts)
        return ZeroStrategy(
            stage=self.stage,  # type: ignore[arg-type]
            tensor_parallel=self.tensor,
            expert_parallel=self.experts,
            offload=self.offload,
            activation_checkpointing=None if self.checkpointing is None else {"policy": self.checkpointing},
        )


class Kept(pl.Callback):
    """Keeps the bytes of the engine at the end of the last backward."""

    stats: EngineStats

    def on_after_backward(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.stats = trainer.strategy.engine.stats()  # type: ignore[attr-defined]


def _fit(rank: int, world: int, case: Case) -> dict[str, int]:
    counter, kept = LiveBytes(), Kept()
    batch = AXES_MODELS[case.model][1]()
    callbacks = [FromStep(counter), kept]
    with host_apart(counter) as activations, counter:
        fit = trainer(rank, world, case.strategy, max_steps=3, callbacks=callbacks)
        module = Fitted(case.model)
        fit.fit(module, DataLoader([batch] * (6 if case.is_imported else 3), batch_size=None))
        gc.enable()
        counter.parts = tuple
    buffers = sum(one.nbytes for one in module.buffers())
    persistent = sum(kept.stats.memory[kind] for kind in KINDS) + buffers
    return {
        "peak": counter.peak.nbytes,
        "persistent": persistent,
        "host": sum(kept.stats.host.values()) + activations.most,
    }


def _compare(case: Case) -> None:
    forecast = estimate_memory(
        lambda: Fitted(case.model),
        case.strategy,
        world_size=case.world,
        batch=AXES_MODELS[case.model][1](),
        accelerator="cpu",
        side_by_side=False,
    ).own
    for run in worlds.run(_fit, case.world, case):
        assert abs(forecast.peak_bytes - run["peak"]) <= PEAK * run["peak"], (forecast, run)
        for mine, found in ((forecast.persistent_bytes, "persistent"), (sum(forecast.host.values()), "host")):
            assert abs(mine - run[found]) <= PERSISTENT * run[found] + SCALARS, (found, forecast, run)


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


QUICK = [Case("gpt", 3, 2, tensor=2), Case("mixtral", 2, 2, experts=2)]


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_forecasts_of_groups_are_those_of_a_fit(case: Case) -> None:
    _compare(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in _matrix() if case not in QUICK], ids=str)
def test_forecasts_of_groups_are_those_of_a_fit_in_every_setting(case: Case) -> None:
    _compare(case)
