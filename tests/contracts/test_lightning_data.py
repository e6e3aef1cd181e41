"""Ranks read, log, count and predict under the strategy as under ``strategy="ddp"``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter, EarlyStopping, ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler
from torchmetrics import MeanMetric

from lightning_zero.errors import CollectiveError
from lightning_zero.lightning.strategy import ZeroStrategy
from tests.lightning_programs import WORLD, Net, data, loader, seeded, trainer
from tests.sampling import sample
from tests.worlds import run

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


class Uneven(IterableDataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        yield from data(self.size)


class MeasuresTwice(Net):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("val", self.loss(batch), sync_dist=True, add_dataloader_idx=True)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("test", self.loss(batch), sync_dist=True)


def uneven(rank: int, world: int) -> None:
    """Rank 0 has fewer batches in one loader, rank 1 in another, and none at all to predict."""

    def loaders() -> list[DataLoader[Any]]:
        return [DataLoader(Uneven(size), batch_size=4) for size in ((4, 24)[rank], (16, 8)[rank])]

    def run(strategy: Any) -> list[Any]:
        fitted = trainer(rank, world, strategy, max_epochs=2, num_sanity_val_steps=3)
        fitted.fit(seeded(MeasuresTwice), loader(rank, world), loaders())
        seen = [{key: float(value) for key, value in fitted.callback_metrics.items()}]
        seen.append(fitted.validate(fitted.lightning_module, loaders(), verbose=False))
        seen.append(fitted.test(fitted.lightning_module, loader(rank, world, size=(8, 24)[rank]), verbose=False))
        made = fitted.predict(fitted.lightning_module, DataLoader(Uneven((12, 0)[rank]), batch_size=4))
        return [*seen, [batch.tolist() for batch in made]]

    expected = run("ddp")
    for stage in (1, 3):
        assert run(stage) == expected, stage


def test_ranks_with_different_numbers_of_batches_evaluate_as_under_ddp() -> None:
    run(uneven, WORLD)


class Buckets(Sampler[list[int]]):
    """Batches whose number is estimated."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([2 * place, 2 * place + 1] for place in range(self.number))

    def __len__(self) -> int:
        return 4


def _estimated(rank: int, world: int) -> None:
    def run(strategy: Any) -> list[Any]:
        fitted = trainer(rank, world, strategy, max_epochs=1)
        batches = DataLoader(data(), batch_sampler=Buckets((2, 4)[rank]))
        fitted.fit(seeded(MeasuresTwice), loader(rank, world), batches)
        logged = float(fitted.callback_metrics["val"])
        return [logged, [batch.tolist() for batch in fitted.predict(fitted.lightning_module, batches)]]

    expected = run("ddp")
    assert len(expected[1]) == (2, 4)[rank]
    for stage in (1, 3):
        assert run(stage) == expected, stage


def test_loaders_whose_length_is_an_estimate_evaluate_as_under_ddp() -> None:
    """Lengths that were alike counted as the numbers of batches, and the rank with more waited for the other."""
    run(_estimated, WORLD, timeout_s=30)


class Counts(Net):
    """Counts its batches; logs them if it is told to."""

    def __init__(self, logs: bool = False) -> None:
        super().__init__()
        self.logs = logs
        self.seen = 0

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.seen += 1
        loss = self.loss(batch)
        if self.logs:
            self.log("val", loss, sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.seen += 1
        return super().predict_step(batch, batch_idx)


def _with_empty_loaders(rank: int, world: int, sizes: tuple[tuple[int, ...], ...]) -> None:
    def run(strategy: Any) -> list[Any]:
        fitted, module = trainer(rank, world, strategy, max_epochs=1), seeded(Counts)
        loaders = [DataLoader(Uneven(size), batch_size=1) for size in sizes[rank]]
        fitted.fit(module, loader(rank, world, size=16), loaders)
        made = fitted.predict(module, loaders)
        return [module.seen, [len(of_loader) for of_loader in made]]

    expected = run("ddp")
    assert expected == [2 * sum(sizes[rank]), list(sizes[rank])]
    for stage in (1, 3):
        assert run(stage) == expected, stage


@pytest.mark.parametrize("sizes", [((2, 2, 2), (2, 0, 2)), ((0, 3), (3, 0)), ((2, 0, 0), (2, 0, 2))], ids=str)
def test_a_loader_that_is_empty_on_one_rank_only_does_not_hang(sizes: tuple[tuple[int, ...], ...]) -> None:
    run(_with_empty_loaders, WORLD, sizes)


class MayBeEmpty(Counts):
    """Has loaders of a known length, which may be 0."""

    def __init__(self) -> None:
        super().__init__()
        self.allow_zero_length_dataloader_with_multiple_devices = True

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    predict_step = test_step


def _without_batches(rank: int, world: int, sizes: tuple[int, int]) -> None:
    batches = DataLoader(data(sizes[rank]), batch_size=2)

    def run(strategy: Any) -> list[int]:
        seen = []
        for name in ("fit", "validate", "test", "predict"):
            module = seeded(MayBeEmpty)
            fitted = trainer(rank, world, strategy, num_sanity_val_steps=1)
            loaders = (loader(rank, world), batches) if name == "fit" else (batches,)
            getattr(fitted, name)(module, *loaders)
            seen.append(module.seen)
        return seen

    expected = run("ddp")
    number = sizes[rank] // 2
    assert expected == [2 * number + min(number, 1), number, number, number]
    for stage in (1, 3):
        assert run(stage) == expected, stage


@pytest.mark.parametrize("sizes", [(0, 6), (0, 0)], ids=str)
def test_a_rank_whose_loaders_of_known_length_are_all_empty_evaluates_as_under_ddp(sizes: tuple[int, int]) -> None:
    run(_without_batches, WORLD, sizes)


def _log_of_empty_loader(rank: int, world: int) -> None:
    loaders = [DataLoader(Uneven(size), batch_size=1) for size in ((2, 1), (2, 0))[rank]]
    with pytest.raises(ValueError, match=r"`val` cannot be reduced.*ranks \[1\] have no batch of loader 1"):
        trainer(rank, world, 3).validate(Counts(logs=True), loaders, verbose=False)


def test_values_of_a_loader_that_is_empty_on_one_rank_are_not_reduced_with_others() -> None:
    run(_log_of_empty_loader, WORLD)


class Fetches(Net):
    """Takes batches by itself, in steps of two."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def validation_step(self, dataloader_iter: Any) -> Any:
        for _ in range(2):
            batch, _, index = next(dataloader_iter)
            self.loss(batch)
            self.seen.append(index)


def _fetched_by_the_step(rank: int, world: int) -> None:
    def run(strategy: Any) -> list[int]:
        module = seeded(Fetches)
        loaders = [DataLoader(Uneven(size), batch_size=1) for size in ((3, 2), (4, 4))[rank]]
        trainer(rank, world, strategy, max_epochs=2).fit(module, loader(rank, world, size=16), loaders)
        return module.seen

    expected = run("ddp")
    assert len(expected) == 2 * (5, 8)[rank]
    for stage in (1, 3):
        assert run(stage) == expected, stage


def test_steps_that_fetch_different_numbers_of_batches_evaluate_as_under_ddp() -> None:
    run(_fetched_by_the_step, WORLD)


def _uneven_training(rank: int, world: int) -> str:
    fitted = trainer(rank, world, 2, max_epochs=1)
    with pytest.raises(CollectiveError) as raised:
        fitted.fit(Net(), DataLoader(Uneven((3, 5)[rank]), batch_size=1), loader(rank, world, size=8))
    return str(raised.value)


def test_ranks_with_different_numbers_of_training_batches_say_so() -> None:
    for text in run(_uneven_training, WORLD, timeout_s=20):
        assert "Ranks with different numbers of training batches meet like this" in text


def _uneven_accumulation(rank: int, world: int, stage: int, is_sized: bool) -> str:
    strategy = ZeroStrategy(stage=stage, timeout=15)
    fitted = trainer(rank, world, strategy, max_epochs=1, accumulate_grad_batches=2)
    number = (3, 5)[rank]
    batches = loader(0, 1, size=4 * number) if is_sized else DataLoader(Uneven(number), batch_size=1)
    started = time.monotonic()
    with pytest.raises(CollectiveError) as raised:
        fitted.fit(Net(), batches)
    assert time.monotonic() - started < 12, str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("is_sized", [False, True], ids=["iterable", "sized"])
@pytest.mark.parametrize("stage", sample([0, 1, 2, 3], 2))
def test_accumulating_ranks_with_different_numbers_of_training_batches_say_so_at_once(
    stage: int, is_sized: bool
) -> None:
    first, second = run(_uneven_accumulation, WORLD, stage, is_sized, timeout_s=40)
    assert "rank 1 came for the agreement on signals" in first
    assert "rank 0 came for the agreement on a step of fewer micro-batches (batch 3 is the last)" in second
    assert "Ranks with different numbers of training batches meet like this" in second


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
