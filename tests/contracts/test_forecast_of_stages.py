"""Forecasts of memory for pipelines against fits on real ranks, in which every storage is counted."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_zero import Pipeline, ZeroStrategy, estimate_memory
from lightning_zero.forecast.live_bytes import LiveBytes
from lightning_zero.forecast.rehearsal import host_apart
from lightning_zero.forecast.report import table
from tests import worlds
from tests.contracts.test_forecast import PEAK, PERSISTENT, SCALARS, FromStep
from tests.contracts.test_simulated_axes import SEQUENCE, Fitted
from tests.lightning.test_estimate import WIDTH, Program
from tests.lightning_programs import trainer

STAGES = 2
OFFLOADED = {"policy": "offload"}


@dataclass(frozen=True)
class Case:
    """A fit in two stages."""

    model: str
    stage: int
    copies: int = 1
    checkpointing: Any = False
    schedule: str = "1f1b"
    offload: str | None = None
    precision: str = "32-true"
    clips: bool = False
    accumulates: int = 1
    is_imported: bool = False  # the last four from a configuration of DeepSpeed
    tensor: Any = None
    experts: int | None = None

    def __str__(self) -> str:
        return "-".join(str(one) for one in vars(self).values() if one not in (None, False))

    @property
    def num_steps(self) -> int:
        """Steps until all are alike: "auto" chooses after two."""
        return 2 if self.checkpointing in (False, True, OFFLOADED) else 3

    def make_strategy(self) -> ZeroStrategy:
        if self.is_imported:
            config = {
                "zero_optimization": {"stage": self.stage},
                "bf16": {"enabled": self.precision == "bf16-mixed"},
                "gradient_clipping": float(self.clips),
                "train_micro_batch_size_per_gpu": 8,
                "train_batch_size": 8 * self.copies * self.accumulates,
            }
            return ZeroStrategy.from_deepspeed(config, pipeline=self.pipeline)
        return ZeroStrategy(
            stage=self.stage,
            offload=self.offload,
            activation_checkpointing=self.checkpointing or None,
            pipeline=self.pipeline,
            tensor_parallel=self.tensor,
            expert_parallel=self.experts,
        )

    @property
    def pipeline(self) -> Pipeline:
        return Pipeline(stages=STAGES, microbatches=4, schedule=self.schedule)  # type: ignore[arg-type]

    @property
    def trained(self) -> dict[str, Any]:
        """Arguments of the Trainer."""
        if self.is_imported:
            return {}
        return {
            "precision": self.precision,
            "gradient_clip_val": 1.0 if self.clips else None,
            "accumulate_grad_batches": self.accumulates,
        }


def _batch() -> torch.Tensor:
    return torch.zeros(8, 48, dtype=torch.long)


class Kept(pl.Callback):
    """Notes the bytes of the engine at the end of the last backward."""

    nbytes = 0
    host = 0

    def on_after_backward(self, trainer: pl.Trainer, module: Any) -> None:
        stats = trainer.strategy.engine.stats()  # type: ignore[attr-defined]
        self.nbytes = sum(stats.memory[kind] for kind in ("parameters", "gradients", "optimizer"))
        self.host = sum(stats.host.values())


def _fit(rank: int, world: int, case: Case) -> tuple[int, int, int, int]:
    """Return the highest bytes of the last step, those that stay on the device and the host, and host activations."""
    counter, kept = LiveBytes(), Kept()
    with host_apart(counter) as activations, counter:
        fit = trainer(
            rank,
            world,
            case.make_strategy(),
            max_steps=case.num_steps,
            callbacks=[FromStep(counter, case.num_steps - 1), kept],
            **case.trained,
        )
        fit.fit(Fitted(case.model), DataLoader([_batch()] * case.num_steps * case.accumulates, batch_size=None))
        gc.enable()
        counter.parts = tuple
    return counter.peak.nbytes, kept.nbytes, kept.host, activations.most


def _compare(case: Case) -> None:
    world = STAGES * case.copies
    forecast = estimate_memory(
        lambda: Fitted(case.model),
        case.make_strategy(),
        world_size=world,
        batch=_batch(),
        precision=None if case.is_imported else case.precision,
        accelerator="cpu",
        accumulate_grad_batches=1 if case.is_imported else case.accumulates,
        clips=case.clips and not case.is_imported,
        side_by_side=False,
    ).own
    ran = worlds.run(_fit, world, case, timeout_s=250)
    for rank, (peak, kept, host, activations) in enumerate(ran):
        stage = rank // case.copies
        assert abs(forecast.peak_by_stage[stage] - peak) <= PEAK * peak, (rank, forecast, ran)
        of_stage = forecast.persistent_by_stage[stage]
        away = sum(nbytes for kind, nbytes in of_stage.items() if kind.startswith("host_"))
        assert abs(sum(of_stage.values()) - away - kept) <= PERSISTENT * kept + SCALARS, (rank, forecast, ran)
        assert abs(away - host) <= PERSISTENT * host + SCALARS, (rank, forecast, ran)
        if stage == forecast.pipeline_stage:
            assert abs(forecast.persistent_bytes - kept) <= PERSISTENT * kept + SCALARS, (rank, forecast, ran)
            host += activations
            assert abs(sum(forecast.host.values()) - host) <= PERSISTENT * host + SCALARS, (rank, forecast, ran)
    peaks = [peak for peak, *_ in ran]
    assert forecast.peak_bytes == max(forecast.peak_by_stage)
    assert abs(forecast.peak_bytes - max(peaks)) <= PEAK * max(peaks)


QUICK = [Case("gpt", 1), Case("moe", 2, 2, experts=2)]
CASES = [
    *[
        Case(model, stage, 1, policy)
        for model in ("gpt", "llama")
        for stage in (0, 1, 2, 3)
        for policy in (False, True)
    ],
    *[Case("gpt", stage, 2) for stage in (0, 1, 2, 3)],
    *[Case("gpt", 1, 1, False, schedule) for schedule in ("gpipe", "interleaved_1f1b", "zb_h1")],
    Case("llama", 3, 2, True, "1f1b", None, "bf16-mixed", True),
    Case("gpt", 2, 2, False, "gpipe", "cpu", clips=True),
    Case("gpt", 1, 1, accumulates=2),
    Case("gpt", 1, precision="bf16-mixed", clips=True, accumulates=2, is_imported=True),
    Case("gpt", 1, 1, OFFLOADED),
    Case("llama", 3, 2, OFFLOADED),
    Case("gpt", 2, 1, {"policy": "auto", "budget_bytes": 2**20}),
    Case("llama", 1, 1, {"policy": "auto", "budget_bytes": 2**30}),
    *[
        Case(model, stage, 2, policy, tensor=2)
        for model, policy in (("gpt", False), ("llama", True))
        for stage in (0, 1, 2, 3)
    ],
    *[Case("llama", stage, 2, tensor=SEQUENCE) for stage in (1, 3)],
    Case("gpt", 3, 4, tensor=2),
    Case("llama", 3, 2, True, "zb_h1", None, "bf16-mixed", True, tensor=2),
    Case("gpt", 2, 2, False, "gpipe", "cpu", clips=True, tensor=2),
    Case("gpt", 1, 2, accumulates=2, tensor=2),
    Case("mixtral", 1),
    *[Case(model, stage, 2, experts=2) for model in ("moe", "mixtral") for stage in (0, 1, 2, 3)],
    Case("mixtral", 2, 2, True, experts=2),
    Case("mixtral", 3, 4, tensor=2, experts=2),
]


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_forecasts_of_stages_are_those_of_a_fit(case: Case) -> None:
    _compare(case)


def test_the_memory_of_a_gpu_decides_how_often_gradients_are_reduced() -> None:
    strategy = ZeroStrategy(stage=3, pipeline=Pipeline(stages=STAGES, microbatches=4))
    options: dict[str, Any] = {"world_size": 4, "batch": torch.ones(8, WIDTH), "side_by_side": False}
    assumed, large, small = (estimate_memory(Program(), strategy, memory=memory, **options)
                             for memory in (None, 80 * 2**30, 2**10))  # fmt: skip
    assert assumed.settings == large.settings
    assert small.own.sent_bytes > large.own.sent_bytes
    assert [len(one.notes) for one in (assumed, large, small)] == [1, 0, 0]
    assert "taken as 80 GiB. Name it with `memory`." in table(assumed)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in QUICK], ids=str)
def test_forecasts_of_stages_are_those_of_a_fit_in_every_setting(case: Case) -> None:
    _compare(case)


@pytest.mark.slow
def test_settings_side_by_side_keep_the_pipeline() -> None:
    forecast = estimate_memory(
        lambda: Fitted("gpt"),
        ZeroStrategy(stage=3, pipeline=Pipeline(stages=STAGES, microbatches=2, reduce="microbatch")),
        world_size=4,
        batch=_batch(),
        accelerator="cpu",
    )
    assert {one.setting.sharding.stage for one in forecast.settings} == {3}  # `reduce` needs it
    assert len(forecast.settings) == 4
    assert all(len(one.peak_by_stage) == STAGES for one in forecast.settings)
    assert "pipeline:\n        stages: 2\n" in forecast.yaml(forecast.own)
    assert f"(pipeline stage {forecast.own.pipeline_stage})" in table(forecast)
