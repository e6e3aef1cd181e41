"""Lightning programs run under the strategy as they run under ``strategy="ddp"``.

Each case is a function that runs on the ranks of a pool; ``ddp`` is the reference. Every rank has its own slice of the
data by an explicit sampler, because the injected one shuffles.
"""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
import textwrap
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch.loops.utilities as lightning_loops
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BasePredictionWriter,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    ThroughputMonitor,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader, grad_norm
from lightning.pytorch.utilities.model_summary import ModelSummary
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset
from torchmetrics import MeanMetric

import lightning_zero
from lightning_zero.precision import LossScale
from lightning_zero.strategy import ZeroStrategy
from tests.sampling import sample
from tests.worlds import run

STAGES = (0, 1, 2, 3)
WORLD = 2

warnings.filterwarnings("ignore")

# -- The program -------------------------------------------------------------------------------------------------------


class Ranks(LightningEnvironment):
    """The processes that the test already runs in."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self._rank, self._world = rank, world

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return self._world

    def global_rank(self) -> int:
        return self._rank

    def local_rank(self) -> int:
        return self._rank

    def teardown(self) -> None:
        pass


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(LightningModule):
    """A few blocks that fit random targets."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.last = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("val_loss", loss, sync_dist=True)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02, fused=True)


def data(size: int = 32) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(size, 4, generator=generator), torch.randn(size, 3, generator=generator))


def loader(
    rank: int, world: int, size: int = 32, batch: int = 4, dataset: Dataset[Any] | None = None
) -> DataLoader[Any]:
    dataset = dataset or data(size)
    sampler = DistributedSampler(dataset, world, rank, shuffle=False, drop_last=False)
    return DataLoader(dataset, batch_size=batch, sampler=sampler)


def trainer(rank: int, world: int, strategy: Any, **options: Any) -> Trainer:
    """A quiet Trainer on the ranks of the pool; ``strategy`` is a stage, a strategy or a name."""
    if isinstance(strategy, int):
        strategy = ZeroStrategy(stage=strategy)  # type: ignore[arg-type]
    plugins = [Ranks(rank, world), *options.pop("plugins", [])]
    defaults = {
        "accelerator": "cpu",
        "devices": world,
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
    }
    return Trainer(strategy=strategy, plugins=plugins, **{**defaults, **options})


def seeded(make: Callable[[], LightningModule]) -> LightningModule:
    torch.manual_seed(0)
    return make()


def weights(of: Trainer) -> dict[str, Tensor]:
    """The whole parameters and the buffers. Collective."""
    module, strategy = of.lightning_module, of.strategy
    if isinstance(strategy, ZeroStrategy):
        values = {name: strategy.full_param(p).clone() for name, p in module.named_parameters()}
    else:
        values = {name: p.detach().clone() for name, p in module.named_parameters()}
    return values | {name: buffer.clone() for name, buffer in module.named_buffers()}


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 0.0, what: Any = "") -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        difference = (got[name].double() - value.double()).abs().max().item() if value.numel() else 0.0
        assert difference <= atol, f"{what}: {name} differs by {difference}"


def assert_moved(values: dict[str, Tensor], make: Callable[[], LightningModule]) -> None:
    start = dict(seeded(make).named_parameters())
    assert any(not torch.equal(values[name].float(), start[name].detach().float()) for name in start)


def parity(
    rank: int,
    world: int,
    make: Callable[[], LightningModule] = Net,
    *,
    atol: float = 0.0,
    stages: tuple[int, ...] = STAGES,
    loaders: dict[str, Any] | None = None,
    reference: str = "ddp",
    ours: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Fit under DDP and at every stage; the weights must agree."""

    def fit(strategy: Any) -> dict[str, Tensor]:
        made = {name: value() if callable(value) else value for name, value in options.items()}
        fitted = trainer(rank, world, strategy, **made)
        fitted.fit(seeded(make), train_dataloaders=loader(rank, world, **(loaders or {})))
        return weights(fitted)

    expected = fit(reference)
    assert_moved(expected, make)
    for stage in stages:
        assert_equal(fit(ZeroStrategy(stage=stage, **(ours or {}))), expected, atol, f"stage {stage}")


# -- Weights as under DDP ----------------------------------------------------------------------------------------------


def test_fit_equals_ddp() -> None:
    run(parity, WORLD)


def fit_on_three(rank: int, world: int) -> None:
    parity(rank, world, atol=1e-6, stages=(1, 3), loaders={"size": 36})


def test_fit_on_three_ranks_equals_ddp() -> None:
    run(fit_on_three, 3)


class Sgd(Net):
    def configure_optimizers(self) -> Any:
        # PyTorch's fused SGD leaves 16-bit parameters on a CPU as they are.
        fused = next(self.parameters()).dtype == torch.float32
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9, fused=fused)


def fit_in(rank: int, world: int, precision: str, atol: float) -> None:
    make = Sgd if precision.startswith("16") else Net  # AdamW's epsilon is 0 in fp16: the reference divides by it
    ours = {"loss_scale": LossScale(init_scale=8.0)} if precision == "16-true" else {}  # so low that no step overflows
    parity(rank, world, make, atol=atol, ours=ours, precision=precision)


@pytest.mark.parametrize(
    ("precision", "atol"),
    [
        ("64-true", 0.0),
        ("bf16-mixed", 1e-6),
        ("bf16-true", 0.05),  # DDP steps bf16 weights, the engine fp32 masters
        ("16-true", 0.01),
    ],
)
def test_fit_in_other_precisions_equals_ddp(precision: str, atol: float) -> None:
    run(fit_in, WORLD, precision, atol)


def fit_fp16(rank: int, world: int) -> None:
    def plugins() -> list[Any]:
        return [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))]

    parity(rank, world, Sgd, atol=1e-3, plugins=plugins)


def test_fit_in_fp16_mixed_equals_ddp() -> None:
    run(fit_fp16, WORLD)


class OwnClipping(Sgd):
    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        if self.current_epoch == 1:
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


def clip(rank: int, world: int, case: str) -> None:
    if case == "overridden":
        parity(rank, world, OwnClipping, atol=1e-6)
    else:
        parity(rank, world, Sgd, atol=1e-6, gradient_clip_val=0.05, gradient_clip_algorithm=case)


@pytest.mark.parametrize("case", ["norm", "value", "overridden"])
def test_clipping_equals_ddp(case: str) -> None:
    run(clip, WORLD, case)


def accumulate(rank: int, world: int) -> None:
    parity(rank, world, atol=1e-6, accumulate_grad_batches=4, loaders={"size": 40, "batch": 2}, max_epochs=1)


def test_accumulation_equals_ddp_and_a_partial_last_window_steps() -> None:
    run(accumulate, WORLD)


def accumulate_by_schedule(rank: int, world: int) -> None:
    parity(rank, world, atol=1e-6, callbacks=lambda: GradientAccumulationScheduler({0: 1, 1: 3}))


def test_accumulation_scheduler_equals_ddp() -> None:
    run(accumulate_by_schedule, WORLD)


def own_weights(rank: int, world: int) -> None:
    for stage in STAGES:
        torch.manual_seed(100 + rank)
        module = Net()
        module.register_buffer("table", torch.full((3,), float(rank)))
        fitted = trainer(rank, world, stage, limit_train_batches=0)
        fitted.fit(module, loader(rank, world))
        torch.manual_seed(100)
        expected = dict(Net().named_parameters())
        got = weights(fitted)
        assert_equal({name: got[name] for name in expected}, expected, what=f"stage {stage}")
        assert torch.equal(module.table, torch.zeros(3))


def test_all_ranks_start_from_rank_zeros_weights_and_buffers() -> None:
    run(own_weights, WORLD)


# -- Data and logging --------------------------------------------------------------------------------------------------


class LogsData(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen = [*getattr(self, "seen", []), batch[0][:, 0].tolist()]
        self.log("first", batch[0].sum(), sync_dist=True)
        self.log("total", batch[0].sum(), sync_dist=True, reduce_fx="sum")
        return super().training_step(batch, batch_idx)


def sync_dist(rank: int, world: int) -> list[Any]:
    seen = []
    for stage in (1, 3):
        fitted = trainer(rank, world, stage, max_epochs=1, limit_train_batches=1, use_distributed_sampler=True)
        module = LogsData()
        fitted.fit(module, DataLoader(data(), batch_size=4))
        seen.append((module.seen[0], fitted.callback_metrics["first"].item(), fitted.callback_metrics["total"].item()))
    return seen


def test_ranks_see_their_own_slice_and_logged_values_are_reduced() -> None:
    first, second = run(sync_dist, WORLD)
    for (seen0, mean0, total0), (seen1, mean1, total1) in zip(first, second, strict=True):
        assert not set(seen0) & set(seen1)
        assert mean0 == mean1
        assert total0 == total1 == pytest.approx(2 * mean0)


class Plateau(Net):
    def on_validation_epoch_end(self) -> None:
        values = [5.0, 1.0, 2.0, 3.0, 4.0, 5.0]
        self.log("watched", values[self.current_epoch] + self.global_rank, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.4, fused=True)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "watched"}}


def stop_early(rank: int, world: int) -> list[Any]:
    out = []
    for strategy in ("ddp", 1, 3):
        stopping = EarlyStopping("watched", patience=2)
        fitted = trainer(rank, world, strategy, max_epochs=6, callbacks=stopping)
        fitted.fit(seeded(Plateau), loader(rank, world), loader(rank, world, size=8))
        out.append((fitted.current_epoch, fitted.global_step, fitted.optimizers[0].param_groups[0]["lr"]))
    return out


def test_early_stopping_and_plateau_act_on_the_same_step_on_all_ranks() -> None:
    first, second = run(stop_early, WORLD)
    assert first == second
    assert first[0] == first[1] == first[2]


class Weighted(MeanMetric):
    """A metric with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Linear(4, 4).requires_grad_(False)


class WithMetric(Net):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.weighted = Weighted()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.mean(batch[0].mean())
        self.log("mean", self.mean, on_epoch=True, on_step=False)
        assert self.mean.device == self.device
        return super().training_step(batch, batch_idx)


def metrics(rank: int, world: int) -> list[float]:
    out = []
    for strategy in ("ddp", 1, 3):
        fitted = trainer(rank, world, strategy, max_epochs=1)
        fitted.fit(WithMetric(), loader(rank, world))
        out.append(fitted.callback_metrics["mean"].item())
    return out


def test_torchmetrics_are_reduced_over_ranks() -> None:
    first, second = run(metrics, WORLD)
    assert first == second
    assert first[0] == first[1] == first[2] == pytest.approx(data().tensors[0].mean().item(), abs=1e-6)


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("epoch")
        self.indices: Any = None

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        self.indices = batch_indices


def loaders(rank: int, world: int) -> None:
    for stage in (1, 3):
        writer = Writer()
        fitted = trainer(rank, world, stage, max_epochs=1, callbacks=writer, use_distributed_sampler=True)

        class Two(Net):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return self.loss(batch["a"]) + self.loss(batch["b"])

        both = CombinedLoader({"a": DataLoader(data(), 4), "b": DataLoader(data(16), 4)}, "max_size_cycle")
        module = seeded(Two)
        fitted.fit(module, both)
        assert fitted.global_step == 4
        predictions = fitted.predict(module, DataLoader(data(16), 4))
        assert predictions is not None
        assert [tuple(prediction.shape) for prediction in predictions] == [(4, 3)] * 2
        assert writer.indices == [[[rank, rank + 2, rank + 4, rank + 6], [rank + 8, rank + 10, rank + 12, rank + 14]]]


def test_combined_loader_and_prediction_writer_work() -> None:
    run(loaders, WORLD)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from data(12)


def stream(rank: int, world: int) -> None:
    for stage in (2, 3):
        fitted = trainer(rank, world, stage, max_epochs=1)
        fitted.fit(Net(), DataLoader(Stream(), batch_size=4))
        assert fitted.global_step == 3


def test_iterable_dataset_works() -> None:
    run(stream, WORLD)


# -- Entry points ------------------------------------------------------------------------------------------------------


def alternate(rank: int, world: int, folder: str) -> None:
    for stage in STAGES:
        checkpoint = ModelCheckpoint(Path(folder) / str(stage), monitor="val_loss", mode="min", filename="best")
        fitted = trainer(rank, world, stage, callbacks=checkpoint, enable_checkpointing=True, max_epochs=2)
        module = seeded(Net)
        batches = loader(rank, world)
        before = fitted.validate(module, batches, verbose=False)
        fitted.fit(module, batches, batches)
        best = fitted.test(module, batches, ckpt_path="best", verbose=False)
        assert best[0]["test_loss"] == pytest.approx(float(checkpoint.best_model_score or 0.0), abs=1e-6)
        assert best[0]["test_loss"] < before[0]["val_loss"]
        predictions = fitted.predict(module, batches)
        assert predictions is not None
        assert len(predictions) == len(batches)
        after = fitted.validate(module, batches, verbose=False)
        assert after[0]["val_loss"] == best[0]["test_loss"]
        fitted.fit_loop.max_epochs = 4
        fitted.fit(module, batches, batches)
        assert fitted.current_epoch == 4
        assert fitted.callback_metrics["val_loss"] < after[0]["val_loss"]
        last = fitted.validate(module, batches, verbose=False)
        assert last[0]["val_loss"] == pytest.approx(fitted.callback_metrics["val_loss"].item(), abs=1e-6)


def test_entry_points_alternate_on_one_trainer(tmp_path: Path) -> None:
    run(alternate, WORLD, str(tmp_path))


def second_fit(rank: int, world: int) -> None:
    def fit_twice(strategy: Any) -> dict[str, Tensor]:
        fitted = trainer(rank, world, strategy, max_epochs=1)
        module = seeded(Net)
        fitted.fit(module, loader(rank, world))
        fitted.fit_loop.max_epochs = 2
        fitted.fit(module, loader(rank, world))
        return weights(fitted)

    expected = fit_twice("ddp")
    for stage in STAGES:
        assert_equal(fit_twice(stage), expected, what=f"stage {stage}")


def test_second_fit_on_the_same_trainer_equals_ddp() -> None:
    run(second_fit, WORLD)


def two_trainers(rank: int, world: int) -> None:
    def fit_both(strategies: tuple[Any, Any]) -> dict[str, Tensor]:
        module = seeded(Net)
        for strategy in strategies:
            fitted = trainer(rank, world, strategy, max_epochs=1)
            fitted.fit(module, loader(rank, world))
        return weights(fitted)

    expected = fit_both(("ddp", "ddp"))
    for strategies in [(0, 0), (2, 2), (3, 3), (1, 2), (3, 1), (2, 3)]:
        assert_equal(fit_both(strategies), expected, what=strategies)


def test_two_trainers_one_after_the_other_equal_ddp() -> None:
    run(two_trainers, WORLD)


def two_precisions(rank: int, world: int) -> None:
    for stage in (2, 3):
        module = seeded(Net)
        for precision, dtype in [("32-true", torch.float32), ("64-true", torch.float64), ("bf16-true", torch.bfloat16)]:
            fitted = trainer(rank, world, stage, max_epochs=1, precision=precision)
            fitted.fit(module, loader(rank, world))
            assert {param.dtype for param in module.parameters()} == {dtype}


def test_second_trainer_may_have_another_precision() -> None:
    run(two_precisions, WORLD)


def two_modules(rank: int, world: int) -> None:
    for stage in (1, 3):
        fitted = trainer(rank, world, stage, max_epochs=1)
        first, second = seeded(Net), seeded(Net)
        fitted.fit(first, loader(rank, world))
        after_first = weights(fitted)
        fitted.fit_loop.epoch_progress.reset()
        fitted.fit(second, loader(rank, world))
        assert_equal(weights(fitted), after_first, what=f"stage {stage}")


def test_one_trainer_fits_two_modules() -> None:
    run(two_modules, WORLD)


def other_strategy_afterwards(rank: int, world: int) -> None:
    def fit_plain(module: LightningModule, first: Any) -> dict[str, Tensor]:
        trainer(rank, world, first, max_epochs=1).fit(module, loader(rank, world))
        plain = Trainer(
            accelerator="cpu", devices=1, strategy="auto", max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        plain.fit(module, DataLoader(data(16), 4))
        return {name: p.detach().clone() for name, p in module.named_parameters()}

    expected = fit_plain(seeded(Net), "ddp")
    for stage in (0, 1, 2):
        assert_equal(fit_plain(seeded(Net), stage), expected, what=f"stage {stage}")


def test_other_strategy_may_train_the_module_afterwards_below_stage_3() -> None:
    run(other_strategy_afterwards, WORLD)


def flags(rank: int, world: int) -> None:
    for options in (
        {"fast_dev_run": 2},
        {"overfit_batches": 1},
        {"limit_train_batches": 1, "limit_val_batches": 0},
        {"barebones": True, "enable_checkpointing": None, "logger": None},
        {"detect_anomaly": True},
        {"deterministic": True},
        {"profiler": "simple"},
        {"num_sanity_val_steps": 2},
        {"inference_mode": False},
    ):
        for stage in (1, 3):
            module = seeded(Net)
            fitted = trainer(rank, world, stage, **{"max_epochs": 1, **options})
            fitted.fit(module, loader(rank, world), loader(rank, world))
            assert fitted.state.finished, options
            assert_moved(weights(fitted), Net)


def test_trainer_flags_work() -> None:
    run(flags, WORLD)


def validate_first(rank: int, world: int) -> None:
    """Lightning validates under inference mode where the backend is not gloo; let it not know."""
    seen = []

    class Validates(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(torch.is_inference_mode_enabled())
            return super().validation_step(batch, batch_idx)

    for stage in STAGES:
        module = seeded(Validates)
        fitted = trainer(rank, world, stage, max_epochs=1)
        with patch.object(lightning_loops, "_distributed_is_initialized", return_value=False):
            fitted.validate(module, loader(rank, world), verbose=False)
        assert all(seen)
        fitted.fit(module, loader(rank, world))
        start = dict(seeded(Net).named_parameters())
        for name, value in weights(fitted).items():
            assert not torch.equal(value, start[name].detach()), f"stage {stage}: {name} was not trained"
        assert not any(parameter.is_inference() for parameter in module.parameters())


def test_every_parameter_is_trained_after_a_validation_in_inference_mode() -> None:
    run(validate_first, WORLD)


# -- Model shapes ------------------------------------------------------------------------------------------------------


class Shapes(Net):
    """A bare parameter, a weight used in another module and functionally, a method other than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.blocks[0].linear.weight

    def extra(self, x: Tensor) -> Tensor:
        return self.blocks[1].linear(x) * self.scale

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        x = self.blocks[0](self.first(x))
        x = self.tied(x) + self.extra(x) + F.linear(x, self.blocks[1].linear.weight)
        return F.mse_loss(self.last(x), y)


class Unused(Net):
    """Other blocks are skipped in other steps and on other ranks; one parameter is frozen, one thawed late."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(3, 3)
        self.first.weight.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.first.weight.requires_grad_(True)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            if (index + self.global_rank + self._step) % 3:
                x = block(x)
        return F.mse_loss(self.last(x), y)

    _step = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._step = batch_idx


class Unfrozen(Net):
    """Frozen at first; DDP, which never reduces what was frozen when it wrapped, is no reference for it."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.first.requires_grad_(self.current_epoch > 0)


class DecayGroups(Net):
    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [p for p in self.parameters() if p.ndim >= 2], "weight_decay": 0.3},
            {"params": [p for p in self.parameters() if p.ndim < 2], "weight_decay": 0.0, "lr": 0.05},
        ]
        return torch.optim.AdamW(groups, lr=0.02, fused=True)


class BatchNormed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.blocks[0](self.first(x))))


class CompiledBlock(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].compile(backend="aot_eager")


PROGRAMS: dict[str, tuple[Callable[[], LightningModule], dict[str, Any]]] = {
    "shapes": (Shapes, {}),
    "decay-groups": (DecayGroups, {}),
    "batch-norm": (BatchNormed, {}),
    "compiled-block": (CompiledBlock, {}),
}


def program(rank: int, world: int, name: str) -> None:
    make, options = PROGRAMS[name]
    reference = "ddp_find_unused_parameters_true" if name in ("shapes", "batch-norm") else "ddp"
    parity(rank, world, make, reference=reference, **options)


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_equals_ddp(name: str) -> None:
    run(program, WORLD, name, timeout_s=90)


def unused(rank: int, world: int, thaw: bool) -> None:
    """The frozen part is thawed in a module of its own fit: every stage must agree with stage 0 to the bit."""
    make = Unfrozen if thaw else Unused

    def fit(strategy: Any) -> dict[str, Tensor]:
        fitted = trainer(rank, world, strategy, accumulate_grad_batches=1)
        fitted.fit(seeded(make), loader(rank, world))
        return weights(fitted)

    expected = fit(0)
    assert_moved(expected, make)
    for stage in (1, 2, 3):
        assert_equal(fit(stage), expected, what=f"stage {stage}")
    assert not torch.equal(expected["first.weight"], dict(seeded(make).named_parameters())["first.weight"].detach())


@pytest.mark.parametrize("thaw", [False, True], ids=["skipped-blocks", "thawed"])
def test_unused_and_frozen_parameters_do_not_hang_and_stages_agree(thaw: bool) -> None:
    run(unused, WORLD, thaw)


def sync_batch_norm(rank: int, world: int) -> None:
    for stage in (1, 3):
        fitted = trainer(rank, world, stage, sync_batchnorm=True)
        module = seeded(BatchNormed)
        fitted.validate(module, loader(rank, world), verbose=False)
        assert isinstance(module.norm, nn.SyncBatchNorm)
        assert torch.equal(weights(fitted)["norm.weight"], torch.ones(6))


def test_sync_batchnorm_is_applied_before_sharding() -> None:
    run(sync_batch_norm, WORLD)


def summary(rank: int, world: int) -> None:
    expected = ModelSummary(seeded(Net)).total_parameters
    for stage in STAGES:
        fitted = trainer(rank, world, stage, max_epochs=1, limit_train_batches=1)
        module = seeded(Net)
        fitted.fit(module, loader(rank, world))
        assert ModelSummary(module).total_parameters == expected
        assert ModelSummary(module).trainable_parameters == expected


def test_model_summary_shows_true_sizes() -> None:
    run(summary, WORLD)


def compiled(rank: int, world: int) -> None:
    plain = trainer(rank, world, "ddp", max_epochs=1)
    plain.fit(seeded(Net), loader(rank, world))
    expected = weights(plain)
    for stage in STAGES:
        torch._dynamo.reset()
        fitted = trainer(rank, world, stage, max_epochs=1)
        fitted.fit(torch.compile(seeded(Net), backend="aot_eager"), loader(rank, world))  # type: ignore[arg-type]
        assert_equal(weights(fitted), expected, atol=1e-6, what=f"stage {stage}")


def test_compiled_lightning_module_is_accepted() -> None:
    run(compiled, WORLD, timeout_s=90)


class Configured(LightningModule):
    """Builds its network in `configure_model`."""

    def __init__(self) -> None:
        super().__init__()
        self.net: Net | None = None

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(5)
            self.net = Net()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.net is not None
        return self.net.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert self.net is not None
        self.log("val_loss", self.net.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02, fused=True)


def configured(rank: int, world: int, folder: str) -> None:
    def fit(strategy: Any) -> dict[str, Tensor]:
        fitted = trainer(rank, world, strategy, max_epochs=1)
        module = Configured()
        fitted.fit(module, loader(rank, world))
        fitted.validate(module, loader(rank, world), verbose=False)
        return weights(fitted)

    expected = fit("ddp")
    for stage in STAGES:
        assert_equal(fit(stage), expected, what=f"stage {stage}")


def test_module_built_in_configure_model_equals_ddp(tmp_path: Path) -> None:
    run(configured, WORLD, str(tmp_path))


def meta(rank: int, world: int, folder: str) -> None:
    for stage in (1, 3):
        path = str(Path(folder) / f"{stage}.ckpt")
        first = trainer(rank, world, stage, max_epochs=1)
        first.fit(seeded(Net), loader(rank, world))
        first.save_checkpoint(path)
        second = trainer(rank, world, stage, max_epochs=1)
        with second.init_module(empty_init=True):
            module = Net()
        assert module.first.weight.is_meta
        second.test(module, loader(rank, world), ckpt_path=path, verbose=False)
        assert_equal(weights(second), weights(first), what=f"stage {stage}")


def test_module_on_the_meta_device_is_filled_from_a_checkpoint(tmp_path: Path) -> None:
    run(meta, WORLD, str(tmp_path))


def one_rank(rank: int, world: int) -> None:
    parity(rank, world, reference="auto", plugins=lambda: [])


def test_one_rank_equals_the_single_device_strategy() -> None:
    run(one_rank, 1)


def collected(rank: int, world: int) -> None:
    for stage in (1, 3):
        fitted = trainer(rank, world, stage, max_epochs=1)
        module = seeded(Net)
        fitted.fit(module, loader(rank, world))
        alive = weakref.ref(module)
        del fitted, module
        gc.collect()
        assert alive() is None, f"stage {stage}"


def test_module_is_collected_with_its_trainer() -> None:
    run(collected, WORLD)


# -- Optimization ------------------------------------------------------------------------------------------------------


class Gan(LightningModule):
    """Two optimizers under manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, noise = batch
        generator, critic = self.optimizers()  # type: ignore[misc]
        self.toggle_optimizer(generator)
        loss = -self.critic(self.generator(noise)).mean()
        generator.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(generator, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        generator.step()
        self.untoggle_optimizer(generator)
        self.toggle_optimizer(critic)
        loss = self.critic(self.generator(noise).detach()).mean() - self.critic(real).mean()
        critic.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(critic, gradient_clip_val=0.05, gradient_clip_algorithm="value")
        critic.step()
        self.untoggle_optimizer(critic)

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.Adam(self.generator.parameters(), lr=0.01, fused=True),
            torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.9, fused=True),
        )


def gan(rank: int, world: int) -> None:
    parity(rank, world, Gan, atol=1e-6, reference="ddp_find_unused_parameters_true")


def test_gan_with_manual_optimization_equals_ddp() -> None:
    run(gan, WORLD)


class SometimesNone(Net):
    ranks: tuple[int, ...] = (0, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1 and self.global_rank in self.ranks:
            return None
        return super().training_step(batch, batch_idx)


class NoneOnOne(SometimesNone):
    ranks = (1,)


class ZeroOnOne(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scale = 0.0 if batch_idx == 1 and self.global_rank == 1 else 1.0
        return scale * super().training_step(batch, batch_idx)


def none_everywhere(rank: int, world: int) -> None:
    keep = [0, 2, 3]
    short = TensorDataset(*(torch.cat([t[8 * k : 8 * k + 8] for k in keep]) for t in data().tensors))
    plain = trainer(rank, world, "ddp", max_epochs=1)
    plain.fit(seeded(Net), loader(rank, world, dataset=short))
    one_zero = trainer(rank, world, "ddp", max_epochs=1)
    one_zero.fit(seeded(ZeroOnOne), loader(rank, world))
    expected, expected_one = weights(plain), weights(one_zero)
    for stage in STAGES:
        fitted = trainer(rank, world, stage, max_epochs=1)
        fitted.fit(seeded(SometimesNone), loader(rank, world))
        assert_equal(weights(fitted), expected, what=f"stage {stage}")
        fitted = trainer(rank, world, stage, max_epochs=1)
        fitted.fit(seeded(NoneOnOne), loader(rank, world))
        assert_equal(weights(fitted), expected_one, what=f"stage {stage}, one rank")


def test_training_step_that_returns_none_skips_the_step() -> None:
    run(none_everywhere, WORLD)


class Overrides(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.calls.append("backward")
        (2 * loss).backward()

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.calls.append("optimizer_step")
        optimizer_closure()
        optimizer.step()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.calls.append("optimizer_zero_grad")
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.calls.append("lr_scheduler_step")
        scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, fused=True)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def overrides(rank: int, world: int) -> None:
    parity(rank, world, Overrides)
    fitted = trainer(rank, world, 3, max_epochs=1, limit_train_batches=1)
    module = Overrides()
    fitted.fit(module, loader(rank, world))
    assert module.calls == ["optimizer_step", "optimizer_zero_grad", "backward", "lr_scheduler_step"]


def test_overridden_hooks_are_called() -> None:
    run(overrides, WORLD)


class ReadsGradients(Net):
    """Reads gradients where Lightning says they may be read."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []
        self.wholes: list[Tensor] = []

    def on_after_backward(self) -> None:
        self.norms.append(float(self.first.weight.grad.norm()))  # type: ignore[union-attr]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(float(grad_norm(self, 2)["grad_2.0_norm_total"]))
        strategy = self.trainer.strategy
        if isinstance(strategy, ZeroStrategy):
            whole = strategy.full_grad(self.last.weight)
            assert whole is not None
            self.norms.append(float(strategy.grad_norm(optimizer)))
        else:
            whole = self.last.weight.grad
            assert whole is not None
            self.norms.append(math.sqrt(sum(float(p.grad.square().sum()) for p in self.parameters())))  # type: ignore[union-attr,misc]
        self.wholes.append(whole.clone())


def read_gradients(rank: int, world: int) -> None:
    def fit(strategy: Any) -> tuple[list[float], list[Tensor]]:
        fitted = trainer(rank, world, strategy, max_epochs=1)
        module = seeded(ReadsGradients)
        fitted.fit(module, loader(rank, world))
        assert isinstance(module, ReadsGradients)
        return module.norms, module.wholes

    norms, wholes = fit("ddp")
    for stage in STAGES:
        got_norms, got_wholes = fit(stage)
        assert got_norms == pytest.approx(norms, rel=1e-5), f"stage {stage}"
        assert all(torch.equal(a, b) for a, b in zip(got_wholes, wholes, strict=True)), f"stage {stage}"


def test_gradients_can_be_read_in_hooks() -> None:
    run(read_gradients, WORLD)


class Schedulers(Net):
    def configure_optimizers(self) -> Any:
        groups = [{"params": self.first.parameters(), "lr": 0.1, "name": "in"}, {"params": self.blocks.parameters()}]
        optimizer = torch.optim.SGD([*groups, {"params": self.last.parameters(), "momentum": 0.5}], lr=0.2, fused=True)
        by_step = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": by_step, "interval": "step", "frequency": 2}}


def schedulers(rank: int, world: int, folder: str) -> None:
    def options(name: str) -> dict[str, Any]:
        logger = CSVLogger(folder, name=name)
        return {"callbacks": LearningRateMonitor(), "logger": logger, "log_every_n_steps": 1}

    reference = trainer(rank, world, "ddp", **options("ddp"))
    reference.fit(seeded(Schedulers), loader(rank, world))
    for stage in STAGES:
        fitted = trainer(rank, world, stage, **options(str(stage)))
        fitted.fit(seeded(Schedulers), loader(rank, world))
        assert_equal(weights(fitted), weights(reference), what=f"stage {stage}")
        seen, expected = (t.callbacks[0].lrs for t in (fitted, reference))  # type: ignore[attr-defined]
        assert seen == expected


def test_schedulers_and_groups_equal_ddp(tmp_path: Path) -> None:
    run(schedulers, WORLD, str(tmp_path))


class Backboned(Net):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.blocks

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, fused=True)


def finetune(rank: int, world: int) -> None:
    def fit(strategy: Any) -> dict[str, Tensor]:
        callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda _: 1.5, verbose=False)
        fitted = trainer(rank, world, strategy, callbacks=callback, max_epochs=3)
        fitted.fit(seeded(Backboned), loader(rank, world))
        assert len(fitted.optimizers[0].param_groups) == 2
        return weights(fitted)

    expected = fit(0)
    start = dict(seeded(Backboned).named_parameters())
    assert not torch.equal(expected["blocks.0.linear.weight"], start["blocks.0.linear.weight"].detach())
    for stage in (1, 2, 3):
        assert_equal(fit(stage), expected, what=f"stage {stage}")


def test_backbone_finetuning_thaws_and_stages_agree() -> None:
    run(finetune, WORLD)


class Rated(Sgd):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, fused=True)


def find_lr(rank: int, world: int, folder: str) -> None:
    def fit(strategy: Any, how: str) -> tuple[float, dict[str, Tensor]]:
        os.chdir(folder)
        finder = LearningRateFinder(num_training_steps=12, min_lr=1e-3, max_lr=0.5)
        fitted = trainer(
            rank, world, strategy, max_epochs=1, callbacks=[finder] if how == "callback" else [],
            default_root_dir=folder,
        )  # fmt: skip
        module = seeded(Rated)
        batches = loader(rank, world, size=64)
        if how == "tuner":
            found = Tuner(fitted).lr_find(module, batches, num_training=12, min_lr=1e-3, max_lr=0.5)
            assert found is not None
        fitted.fit(module, batches)
        return float(module.lr), weights(fitted)  # type: ignore[arg-type]

    for how in ("tuner", "callback"):
        lr, expected = fit("ddp", how)
        for stage in (0, 2, 3):
            got_lr, got = fit(stage, how)
            assert got_lr == pytest.approx(lr, rel=1e-5)
            assert_equal(got, expected, atol=1e-6, what=f"{how}, stage {stage}")


def test_learning_rate_finder_leaves_the_fit_as_if_it_had_not_run(tmp_path: Path) -> None:
    run(find_lr, WORLD, str(tmp_path))


class NotElementwise(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def refuse_lbfgs(rank: int, world: int) -> None:
    for stage in (1, 2, 3):
        with pytest.raises(Exception, match="LBFGS"):
            trainer(rank, world, stage).fit(NotElementwise(), loader(rank, world))


def test_lbfgs_is_refused_by_name() -> None:
    run(refuse_lbfgs, WORLD)


def lbfgs_at_stage_0(rank: int, world: int) -> None:
    parity(rank, world, NotElementwise, atol=1e-6, stages=(0,), max_epochs=1, limit_train_batches=2)


def test_lbfgs_at_stage_0_equals_ddp() -> None:
    run(lbfgs_at_stage_0, WORLD)


def average(rank: int, world: int, name: str) -> None:
    def callback() -> Any:
        if name == "ema":
            return EMAWeightAveraging(decay=0.5)
        return StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=1)

    parity(rank, world, atol=1e-6, stages=(0, 1, 2), callbacks=callback, max_epochs=4)


@pytest.mark.parametrize("name", ["ema", "swa"])
def test_weight_averaging_below_stage_3_equals_ddp(name: str) -> None:
    run(average, WORLD, name)


class Overflows(Sgd):
    """The gradient of one rank is infinite in one step."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1 and self.global_rank == 1:
            loss = loss * float("inf")
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())  # type: ignore[union-attr]


class SkipsOne(Sgd):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


def overflow(rank: int, world: int, folder: str) -> list[Any]:
    def options(scale: float) -> dict[str, Any]:
        return {"max_epochs": 1, "plugins": [MixedPrecision("16-mixed", "cpu")]}

    def zero(stage: Any) -> ZeroStrategy:
        return ZeroStrategy(stage=stage, units=["Block"], loss_scale=LossScale(init_scale=64.0, hysteresis=1))

    scales = []
    for stage in STAGES:
        fitted = trainer(rank, world, zero(stage), **options(64.0))
        module = seeded(Overflows)
        fitted.fit(module, loader(rank, world))
        skipped = trainer(rank, world, zero(stage), **options(64.0))
        skipped.fit(seeded(SkipsOne), loader(rank, world))
        assert_equal(weights(fitted), weights(skipped), atol=1e-3, what=f"stage {stage}")
        assert all(value.isfinite().all() for value in weights(fitted).values())
        scales.append(module.scales)
        path = Path(folder) / f"scale{stage}.ckpt"
        fitted.save_checkpoint(path)
        resumed = trainer(rank, world, zero(stage), **options(64.0) | {"max_epochs": 2, "limit_train_batches": 1})
        module = seeded(Overflows)
        resumed.fit(module, loader(rank, world), ckpt_path=str(path))
        assert module.scales == [32.0]
    return scales


def test_overflow_on_one_rank_skips_the_step_on_all_and_the_scale_is_restored(tmp_path: Path) -> None:
    first, second = run(overflow, WORLD, str(tmp_path))
    assert first == second == [[64.0, 32.0, 32.0, 32.0]] * len(STAGES)


# -- Checkpoints as the Trainer handles them ---------------------------------------------------------------------------


def checkpoints(rank: int, world: int, folder: str, save_last: Any) -> None:
    for stage in (2, 3):
        path = Path(folder) / f"{stage}-{save_last}"
        callback = ModelCheckpoint(
            path, monitor="val_loss", save_top_k=2, save_last=save_last, filename="{epoch}", every_n_epochs=1
        )
        fitted = trainer(rank, world, stage, callbacks=callback, enable_checkpointing=True, max_epochs=4)
        fitted.fit(seeded(Net), loader(rank, world), loader(rank, world, size=8))
        fitted.strategy.barrier()
        names = sorted(entry.name for entry in path.iterdir())
        assert names == ["epoch=2.ckpt", "epoch=3.ckpt", "last.ckpt"], names
        assert (path / "last.ckpt").is_symlink() == (save_last == "link")
        expected = weights(fitted)
        resumed = trainer(rank, world, stage, max_epochs=4)
        resumed.fit(seeded(Net), loader(rank, world), ckpt_path=str(path / "last.ckpt"))
        assert_equal(weights(resumed), expected, what=f"stage {stage}")


@pytest.mark.parametrize("save_last", [True, "link"])
def test_model_checkpoint_keeps_and_removes_what_it_should(save_last: Any, tmp_path: Path) -> None:
    run(checkpoints, WORLD, str(tmp_path), save_last)


class Failing(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2 and self.current_epoch == 0 and self.trainer.ckpt_path is None:
            raise ValueError("on all ranks")
        return super().training_step(batch, batch_idx)


def save_on_exception(rank: int, world: int, folder: str) -> None:
    for stage in (1, 3):
        path = str(Path(folder) / str(stage))
        callback = OnExceptionCheckpoint(path, "crash")
        failing = trainer(rank, world, stage, callbacks=callback, enable_checkpointing=True)
        with pytest.raises(ValueError, match="on all ranks"):
            failing.fit(seeded(Failing), loader(rank, world))
        resumed = trainer(rank, world, stage, max_epochs=1)
        resumed.fit(seeded(Failing), loader(rank, world), ckpt_path=f"{path}/crash.ckpt")
        whole = trainer(rank, world, stage, max_epochs=1)
        whole.fit(seeded(Net), loader(rank, world))
        assert resumed.global_step == whole.global_step
        again = trainer(rank, world, stage, max_epochs=1)
        with pytest.raises(ValueError, match="on all ranks"):
            again.fit(failing.lightning_module, loader(rank, world))


def test_error_on_all_ranks_leaves_a_checkpoint_and_a_usable_module(tmp_path: Path) -> None:
    run(save_on_exception, WORLD, str(tmp_path))


def checkpoint_plugins(rank: int, world: int, folder: str) -> None:
    for stage in (1, 3):
        path = str(Path(folder) / f"{stage}.ckpt")
        strategy = ZeroStrategy(stage=stage, state_dict_type="full")  # type: ignore[arg-type]
        first = trainer(rank, world, strategy, max_epochs=1, plugins=[AsyncCheckpointIO()])
        first.fit(seeded(Net), loader(rank, world))
        first.save_checkpoint(path)
        first.strategy.checkpoint_io.teardown()
        first.strategy.barrier()
        assert Path(path).is_file()
        plain = trainer(rank, world, "ddp", max_epochs=1)
        plain.fit(seeded(Net), loader(rank, world), ckpt_path=path)
        assert_equal(weights(plain), weights(first), what=f"stage {stage}")
        fitted = trainer(rank, world, 3, max_epochs=1)
        fitted.fit(seeded(Net), loader(rank, world))
        with pytest.raises(ValueError, match="state_dict_type='full'"):
            fitted.save_checkpoint(path, storage_options={"a": 1})
        with pytest.raises(ValueError, match="`AsyncCheckpointIO` writes single files"):
            trainer(rank, world, 3, plugins=[AsyncCheckpointIO()]).fit(seeded(Net), loader(rank, world))


def test_checkpoint_plugins_write_single_files_and_are_refused_for_directories(tmp_path: Path) -> None:
    run(checkpoint_plugins, WORLD, str(tmp_path))


# -- Collectives -------------------------------------------------------------------------------------------------------


def collectives(rank: int, world: int) -> None:
    fitted = trainer(rank, world, 3, max_epochs=1, limit_train_batches=1)
    fitted.fit(Net(), loader(rank, world))
    strategy = fitted.strategy
    assert strategy.broadcast({"rank": rank}) == {"rank": 0}
    assert strategy.reduce(torch.tensor(float(rank)), reduce_op="sum") == 1.0
    assert strategy.reduce(torch.tensor(float(rank))) == 0.5
    assert strategy.reduce(torch.tensor(rank + 1), reduce_op="sum") == 3
    assert strategy.reduce_boolean_decision(rank == 0, all=True) is False
    assert strategy.reduce_boolean_decision(rank == 0, all=False) is True
    tensor = torch.ones(2, requires_grad=True)
    gathered = strategy.all_gather(tensor * (rank + 1), sync_grads=True)
    assert gathered.shape == (2, 2)
    gathered.sum().backward()
    assert torch.equal(tensor.grad, torch.full((2,), 2.0 * (rank + 1)))  # type: ignore[arg-type]
    strategy.barrier()


def test_collectives_of_the_strategy_work_after_fit() -> None:
    run(collectives, WORLD)


def whole_values(rank: int, world: int) -> None:
    for stage in STAGES:
        fitted = trainer(rank, world, stage, max_epochs=1)
        module = seeded(Net)
        fitted.fit(module, loader(rank, world))
        expected = weights(fitted)
        with lightning_zero.gathered(module):
            inside = {name: p.detach().clone() for name, p in module.named_parameters()}
        assert_equal(inside, expected)
        with fitted.strategy.gathered(module.last.weight, write="rank0"):  # type: ignore[attr-defined]
            if rank == 0:
                module.last.weight.data.fill_(3.0)
        assert torch.equal(fitted.strategy.full_param(module.last.weight), torch.full((3, 6), 3.0))  # type: ignore[attr-defined]


def test_gathered_and_full_param_show_and_write_whole_values_after_fit() -> None:
    run(whole_values, WORLD)


# -- Monitors of Lightning ---------------------------------------------------------------------------------------------


def throughput(rank: int, world: int, folder: str) -> list[str]:
    seen = []
    for precision in ("32-true", "bf16-mixed", "bf16-true", "64-true"):
        monitor = ThroughputMonitor(batch_size_fn=lambda batch: batch[0].shape[0], window_size=2)
        fitted = trainer(
            rank, world, 3, max_epochs=1, precision=precision, callbacks=monitor, logger=CSVLogger(folder),
            log_every_n_steps=2,
        )  # fmt: skip
        fitted.fit(Net(), loader(rank, world))
        from lightning.pytorch.callbacks.throughput_monitor import _plugin_to_compute_dtype

        seen.append(str(_plugin_to_compute_dtype(fitted.precision_plugin)))
    return seen


def test_throughput_monitor_knows_the_dtype(tmp_path: Path) -> None:
    assert run(throughput, WORLD, str(tmp_path))[0] == [
        "torch.float32",
        "torch.bfloat16",
        "torch.bfloat16",
        "torch.float64",
    ]


# -- Starting processes ------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
import torch
torch.set_num_threads(1)
from tests.contracts import test_lightning_programs as t
from lightning.pytorch import Trainer

def main(start_method, stage):
    strategy = t.ZeroStrategy(stage=stage, units=["Block"], start_method=start_method)
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=True,
    )
    module = t.seeded(t.Net)
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    trainer.fit(module, t.DataLoader(t.data(), 4))
    assert trainer.global_step == 4 or start_method != "popen", trainer.global_step
    if start_method == "popen":
        after = t.weights(trainer)
    else:
        after = dict(module.named_parameters())
    assert all(after[n].shape == before[n].shape for n in before)
    assert all(not torch.equal(after[n], before[n]) for n in before)
    print("FITTED", flush=True)

if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
"""


def start(folder: Path, launcher: list[str], *args: str, script: str = SCRIPT) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(textwrap.dedent(script))
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    for name in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR", "NODE_RANK"):
        environment.pop(name, None)
    command = [sys.executable, *launcher, str(folder / "program.py"), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=folder)


@pytest.mark.parametrize("stage", sample([2, 3], 3))
@pytest.mark.parametrize("start_method", sample(["popen", "spawn", "fork"], "popen"))
def test_start_methods(start_method: str, stage: int, tmp_path: Path) -> None:
    result = start(tmp_path, [], start_method, str(stage))
    assert result.returncode == 0, result.stderr[-3000:]
    assert "FITTED" in result.stdout


def test_torchrun(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = start(tmp_path, launcher, "popen", "3")
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("FITTED") == 2


CLI_SCRIPT = """
import sys
import torch
torch.set_num_threads(1)
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch import LightningDataModule
from tests.contracts import test_lightning_programs as t

class Data(LightningDataModule):
    def train_dataloader(self):
        return t.DataLoader(t.data(), 4)

if __name__ == "__main__":
    cli = LightningCLI(t.Net, Data, seed_everything_default=3)
    total = sum(float(v.double().sum()) for v in t.weights(cli.trainer).values())
    if cli.trainer.is_global_zero:
        print("WEIGHTS", total, flush=True)
"""

CLI_YAML = """
trainer:
  accelerator: cpu
  devices: 2
  max_epochs: 1
  logger:
    class_path: lightning.pytorch.loggers.CSVLogger
    init_args: {save_dir: logs, name: run, version: 0}
  enable_progress_bar: false
  strategy:
    class_path: lightning_zero.ZeroStrategy
    init_args: {stage: 2, units: [Block], communication: {prefetch: 0}}
"""


@pytest.mark.slow
def test_yaml_run_is_reproduced_by_the_config_it_logs(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(CLI_YAML)
    first = start(tmp_path, [], "fit", "--config=c.yaml", "--trainer.strategy.stage=3", script=CLI_SCRIPT)
    assert first.returncode == 0, first.stderr[-3000:]
    logged = tmp_path / "logs/run/version_0/config.yaml"
    again = tmp_path / "again.yaml"
    again.write_text(logged.read_text().replace("version: 0", "version: 1"))
    second = start(tmp_path, [], "fit", "--config=again.yaml", script=CLI_SCRIPT)
    assert second.returncode == 0, second.stderr[-3000:]
    values = [[line for line in r.stdout.splitlines() if line.startswith("WEIGHTS")] for r in (first, second)]
    assert values[0]
    assert values[0] == values[1]


# -- When something goes wrong -----------------------------------------------------------------------------------------

FAILING = """
import sys, time
from datetime import timedelta
import torch
torch.set_num_threads(1)
from tests.contracts import test_lightning_programs as t
from tests.sampling import sample
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint

class Failing(t.Net):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.global_rank == 1:
            raise ValueError("the first error")
        return super().training_step(batch, batch_idx)

if __name__ == "__main__":
    strategy = t.ZeroStrategy(stage=3, units=["Block"], timeout=timedelta(seconds=6))
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=OnExceptionCheckpoint("."),
    )
    trainer.fit(Failing(), t.DataLoader(t.data(), 4))
"""


def test_error_on_one_rank_ends_the_run_with_that_error(tmp_path: Path) -> None:
    result = start(tmp_path, [], script=FAILING)
    assert result.returncode != 0
    assert "the first error" in result.stderr
