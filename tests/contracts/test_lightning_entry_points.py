"""Trainers fit, validate, test and predict in any order and one after the other, as under ``strategy="ddp"``."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch.loops.utilities as lightning_loops
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero.lightning.strategy import ZeroStrategy
from tests.lightning_programs import (
    STAGES,
    WORLD,
    Grown,
    Net,
    assert_equal,
    assert_moved,
    data,
    loader,
    seeded,
    trainer,
    weights,
)
from tests.worlds import run


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


def rank_zero_loads(rank: int, world: int) -> None:
    def fit_again(strategy: Any, **options: Any) -> dict[str, Tensor]:
        fitted = trainer(rank, world, strategy, max_epochs=1, **options)
        module = seeded(Net)
        fitted.fit(module, loader(rank, world))
        start = {key: value.clone() for key, value in seeded(Net).state_dict().items()}
        if rank == 0:
            module.load_state_dict(start)
        else:
            module.first.weight.data = torch.zeros(6, 4)
        fitted.test(module, loader(rank, world), verbose=False)
        assert_equal(weights(fitted), start, what=strategy)
        torch.manual_seed(rank)
        module.last.reset_parameters()
        fitted.fit_loop.max_epochs = 2
        fitted.fit(module, loader(rank, world))
        return weights(fitted)

    expected = fit_again("ddp")
    for stage in (0, 1, 2):
        assert_equal(fit_again(stage), expected, what=f"stage {stage}")
        alone = fit_again(stage, precision="bf16-mixed")
        assert_equal(alone, expected, atol=0.02, what=f"stage {stage}, bf16-mixed")


def test_every_run_starts_from_the_parameters_of_rank_0_as_under_ddp() -> None:
    """A kept engine took each rank's own: a `load_state_dict` of rank 0 between two runs reached a part of them."""
    run(rank_zero_loads, WORLD)


def grown(rank: int, world: int) -> None:
    def fit_grown(strategy: Any) -> tuple[dict[str, Tensor], list[str]]:
        fitted = trainer(rank, world, strategy, max_epochs=1)
        module = seeded(Grown)
        fitted.fit(module, loader(rank, world))
        module.grow()
        fitted.fit_loop.max_epochs = 2
        fitted.fit(module, loader(rank, world))
        kept = fitted.strategy._engine if isinstance(fitted.strategy, ZeroStrategy) else None
        fitted.fit_loop.max_epochs = 3
        fitted.fit(module, loader(rank, world))
        assert kept is None or fitted.strategy._engine is kept  # nothing has changed
        saved = fitted.strategy.lightning_module_state_dict()
        return weights(fitted), [key for key in saved if rank == 0]

    expected, keys = fit_grown("ddp")
    for stage in STAGES:
        values, found = fit_grown(stage)
        assert_equal(values, expected, atol=1e-6, what=f"stage {stage}")
        assert found == keys


def test_modules_that_change_between_two_runs_are_sharded_anew() -> None:
    """The engine was kept, since its parameters were the same, and knew neither new names nor new buffers."""
    run(grown, WORLD)


class Weighted(Net):
    """Makes its loss, which has weights, in every `setup`; they differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def setup(self, stage: str) -> None:
        first = 1.0 + self.trainer.global_rank + len(self.seen)
        self.weighting = nn.Module()
        self.weighting.register_buffer("weight", torch.tensor([first, 1.0, 2.0]))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        self.seen.append(self.weighting.weight.clone())
        return ((self(x) - y).square() * self.weighting.weight).mean()


def weighted(rank: int, world: int) -> None:
    def fit_again(strategy: Any, **options: Any) -> tuple[dict[str, Tensor], Weighted, Trainer, Any]:
        fitted = trainer(rank, world, strategy, max_epochs=1, **options)
        module = seeded(Weighted)
        fitted.fit(module, loader(rank, world))
        kept, before = getattr(fitted.strategy, "_engine", None), weights(fitted)
        fitted.test(module, loader(rank, world), verbose=False)
        after = weights(fitted)
        assert all(torch.equal(before[name], after[name]) for name in before if "weighting" not in name)
        fitted.fit_loop.max_epochs = 2
        fitted.fit(module, loader(rank, world))
        return weights(fitted), module, fitted, kept

    expected, module, _, _ = fit_again("ddp")
    for stage in STAGES:
        values, found, fitted, kept = fit_again(stage)
        assert fitted.strategy._engine is kept
        assert_equal(values, expected, atol=1e-6, what=f"stage {stage}")
        assert all(torch.equal(one, other) for one, other in zip(found.seen, module.seen, strict=True))
    _, found, fitted, kept = fit_again(1, precision="bf16-true")
    assert fitted.strategy._engine is kept
    assert {one.dtype for one in found.seen} == {torch.bfloat16}


def test_a_loss_with_weights_that_every_setup_makes_anew_keeps_the_engine() -> None:
    """The next run sharded the module anew: masters of 16-bit parameters were rounded without a word."""
    run(weighted, WORLD)


def renamed(rank: int, world: int) -> list[str]:
    fitted = trainer(rank, world, 1, max_epochs=1, precision="bf16-true")
    module = seeded(Grown)
    fitted.fit(module, loader(rank, world))
    module.grow()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted.test(module, loader(rank, world), verbose=False)
    return [str(one.message) for one in caught]


def test_a_module_that_is_sharded_anew_in_16_bits_says_that_masters_are_rounded() -> None:
    said = run(renamed, WORLD)
    assert any("masters of the last run are rounded" in text for text in said[0])


def moved(rank: int, world: int) -> None:
    def fit_twice(stage: int, *, is_moved: bool) -> dict[str, Tensor]:
        fitted = trainer(rank, world, stage, max_epochs=1)
        module = seeded(Net)
        fitted.fit(module, loader(rank, world))
        for param in module.parameters() if is_moved else ():  # as `module.cpu()` does
            param.data = param.data.clone()
        fitted.fit_loop.max_epochs = 2
        fitted.fit(module, loader(rank, world))
        return weights(fitted)

    for stage in (0, 1, 2):
        assert_equal(fit_twice(stage, is_moved=True), fit_twice(stage, is_moved=False), what=f"stage {stage}")


def test_parameters_that_are_moved_between_two_runs_come_back() -> None:
    run(moved, WORLD)


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
