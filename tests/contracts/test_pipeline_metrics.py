"""Metrics of torchmetrics and numbers that are logged are those of a run without a pipeline, on every stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanSquaredError, MetricCollection, MetricTracker, PearsonCorrCoef
from torchmetrics.aggregation import MeanMetric, RunningMean, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision, MulticlassRecall
from torchmetrics.wrappers import (
    BootStrapper,
    ClasswiseWrapper,
    LambdaInputTransformer,
    MinMaxMetric,
    MultioutputWrapper,
    MultitaskWrapper,
    Running,
)

from lightning_zero.errors import PipelineError
from lightning_zero.lightning.strategy import ZeroStrategy
from tests.contracts.test_pipeline_programs import Program, _loader, _pipeline
from tests.lightning_programs import seeded, trainer
from tests.references import VOCAB
from tests.sampling import sample
from tests.worlds import run


class Accuracies(Program):
    """Updates a metric in every step and computes it at the end of every epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = self.made()
        self.found: list[float] = []

    def made(self) -> Any:
        return ClasswiseWrapper(MulticlassAccuracy(VOCAB, average=None))

    def updated(self, logits: Tensor, labels: Tensor) -> None:
        self.metric.update(logits, labels)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits, labels = self.logits(batch[0]).flatten(0, 1), batch[1].flatten()
        self.updated(logits, labels)
        return F.cross_entropy(logits, labels)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.updated(self.logits(batch[0]).flatten(0, 1).detach(), batch[1].flatten())

    def on_train_epoch_start(self) -> None:
        self.metric.reset()

    on_validation_epoch_start = on_train_epoch_start

    def on_train_epoch_end(self) -> None:
        self.found += _numbers(self.metric.compute())

    on_validation_epoch_end = on_train_epoch_end


class MinMax(Accuracies):
    def made(self) -> Any:
        return MinMaxMetric(MulticlassAccuracy(VOCAB))


class Window(Accuracies):
    def made(self) -> Any:
        return RunningMean(3)

    def updated(self, logits: Tensor, labels: Tensor) -> None:
        self.metric(F.cross_entropy(logits.detach(), labels))


class RunningAccuracy(Accuracies):
    def made(self) -> Any:
        return Running(MulticlassAccuracy(VOCAB), 3)


class Outputs(Accuracies):
    def made(self) -> Any:
        return MultioutputWrapper(MeanSquaredError(), 2)

    def updated(self, logits: Tensor, labels: Tensor) -> None:
        self.metric.update(logits[:, :2], logits[:, 2:4])


class Tasks(Accuracies):
    def made(self) -> Any:
        return MultitaskWrapper({"x": MeanSquaredError(), "y": MulticlassAccuracy(VOCAB)})

    def updated(self, logits: Tensor, labels: Tensor) -> None:
        x, y = logits[:, 0].contiguous(), logits[:, 1].contiguous()
        self.metric.update({"x": x, "y": logits}, {"x": y, "y": labels})


class Transformed(Accuracies):
    def made(self) -> Any:
        return LambdaInputTransformer(MulticlassAccuracy(VOCAB), transform_pred=torch.neg)


class Tracked(Accuracies):
    def made(self) -> Any:
        return MetricTracker(
            MetricCollection({"1": MulticlassAccuracy(VOCAB), "2": MulticlassAccuracy(VOCAB, top_k=2)})
        )

    def on_train_epoch_start(self) -> None:
        self.metric.increment()

    on_validation_epoch_start = on_train_epoch_start

    def on_train_epoch_end(self) -> None:
        self.found += _numbers(self.metric.compute_all())

    on_validation_epoch_end = on_train_epoch_end


class Collected(Accuracies):
    """Three metrics share states, and a fourth one does not."""

    def made(self) -> Any:
        kinds = (MulticlassAccuracy, MulticlassPrecision, MulticlassRecall)
        made = {kind.__name__: kind(VOCAB) for kind in kinds}
        return MetricCollection({**made, "second": MulticlassAccuracy(VOCAB, top_k=2)})


class Composed(Accuracies):
    def made(self) -> Any:
        return MulticlassAccuracy(VOCAB) + MulticlassAccuracy(VOCAB, top_k=2)


class Bootstrapped(Accuracies):
    def made(self) -> Any:
        return BootStrapper(MeanSquaredError(), num_bootstraps=3)

    def updated(self, logits: Tensor, labels: Tensor) -> None:
        self.metric.update(logits[:, 0].contiguous(), logits[:, 1].contiguous())


def _numbers(value: Any) -> list[float]:
    if isinstance(value, Mapping):
        return [number for item in value.values() for number in _numbers(item)]
    return torch.as_tensor(value, dtype=torch.float64).flatten().tolist()


def _measure(rank: int, world: int, make: Any, options: dict[str, Any], batch: int, size: int) -> list[float]:
    strategy = ZeroStrategy(**options)
    copies = world // (strategy.pipeline.stages if strategy.pipeline else 1)
    lightning = trainer(rank, world, strategy, max_epochs=2, accumulate_grad_batches=size // batch)
    module = seeded(make)
    lightning.fit(module, _loader(copies, rank % copies, batch), _loader(copies, rank % copies, 8))
    return module.found


WRAPPED = (Accuracies, MinMax, Window, RunningAccuracy, Outputs, Tasks, Transformed, Tracked, Collected, Composed)


@pytest.mark.parametrize("copies", sample((1, 2), 1))
@pytest.mark.parametrize("make", sample(WRAPPED, Accuracies, Window, Collected), ids=lambda make: make.__name__)
def test_wrapped_metrics_are_those_without_a_pipeline(make: Callable[[], Any], copies: int) -> None:
    expected = run(_measure, copies, make, {"stage": 0}, 4, 8)[0]
    for found in run(_measure, 2 * copies, make, _pipeline(2, microbatches=2), 8, 8):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-7)


@pytest.mark.slow
def test_bootstrapped_metrics_are_the_same_on_all_stages() -> None:
    first, second = run(_measure, 2, Bootstrapped, _pipeline(2, microbatches=2), 8, 8)
    assert first == second
    assert min(first) > 0


class Forwarded(MinMax):
    def updated(self, logits: Tensor, labels: Tensor) -> None:
        self.metric(logits, labels)


class Increments(Tracked):
    def updated(self, logits: Tensor, labels: Tensor) -> None:
        self.metric.increment()
        self.metric.update(logits, labels)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "message"),
    [(Forwarded, r"`metric\(...\)` of a `MinMaxMetric` resets"), (Increments, "came into the module during a step")],
    ids=["forward", "increment"],
)
def test_what_a_step_does_to_a_wrapper_that_no_stage_can_be_told_is_refused(make: Any, message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        run(_measure, 2, make, _pipeline(2, microbatches=2), 8, 8)


class Reduces(Program):
    """Logs values with every reduction of Lightning."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        for name in ("mean", "sum", "max", "min"):
            self.log(name, loss, on_step=False, on_epoch=True, reduce_fx=name)
        self.log("function", loss, on_step=False, on_epoch=True, reduce_fx=torch.sum)
        return loss


class ReadsMetrics(Program):
    """Reads metrics in a step, and resumes one."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.error, self.correlation = SumMetric(), MeanSquaredError(), PearsonCorrCoef()
        self.seen.persistent(True)

    def on_fit_start(self) -> None:
        self.seen.load_state_dict({"sum_value": torch.tensor(5.0)})  # as a checkpoint does

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits, labels = self.logits(batch[0]).flatten(0, 1), batch[1].flatten()
        self.seen.update(float(len(batch[0])))
        self.log("seen", self.seen.compute(), reduce_fx="max", on_step=False, on_epoch=True)
        self.error.update(logits[:, 0].detach(), logits[:, 1].detach())
        self.log("error", self.error.compute(), on_step=False, on_epoch=True)
        self.log("updates", float(self.error.update_count), reduce_fx="max", on_step=False, on_epoch=True)
        self.log("total", self.error.total.float(), reduce_fx="max", on_step=False, on_epoch=True)
        if self.global_step == 1:
            self.error.reset()
        return F.cross_entropy(logits, labels)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.logits(batch[0]).flatten(0, 1)
        self.correlation(logits[:, 0], logits[:, 1])
        self.log("correlation", self.correlation)


def _running(rank: int, world: int, options: dict[str, Any], batch: int) -> dict[str, float]:
    lightning = trainer(rank, world, ZeroStrategy(**options), max_epochs=1, accumulate_grad_batches=8 // batch)
    module = seeded(ReadsMetrics)
    lightning.fit(module, _loader(1, 0, batch), _loader(1, 0, 8))
    logged = {key: float(value) for key, value in lightning.callback_metrics.items() if key != "loss"}
    return {**logged, "at the end": float(module.seen.compute()), "of all": float(module.error.compute())}


@pytest.mark.parametrize("microbatches", [1, 2])
def test_metrics_that_a_step_reads_are_those_without_a_pipeline(microbatches: int) -> None:
    expected = run(_running, 1, {"stage": 0}, 8 // microbatches)[0]
    schedule = "gpipe" if microbatches == 1 else "1f1b"
    for found in run(_running, 2, _pipeline(2, microbatches=microbatches, schedule=schedule), 8):
        assert found == pytest.approx(expected, rel=1e-5)


def _log(rank: int, world: int, options: dict[str, Any], batch: int) -> dict[str, float]:
    lightning = trainer(rank, world, ZeroStrategy(**options), max_epochs=1, accumulate_grad_batches=8 // batch)
    lightning.fit(seeded(Reduces), _loader(1, 0, batch))
    return {key: float(value) for key, value in lightning.callback_metrics.items() if key != "loss"}


def test_logged_values_are_reduced_over_micro_batches_as_over_steps() -> None:
    expected = run(_log, 1, {"stage": 0}, 4)[0]
    for found in run(_log, 2, _pipeline(2, microbatches=2), 8):
        assert found == pytest.approx(expected, rel=1e-5)


def _split(rank: int, world: int) -> None:
    lightning = trainer(rank, world, ZeroStrategy(**_pipeline(2, microbatches=2)), max_epochs=1)
    samples: Any = [(torch.arange(6), torch.arange(6)) for _ in range(8)]
    lightning.fit(seeded(Program), DataLoader(samples, batch_size=4, collate_fn=_in_lists))


def _in_lists(samples: list[tuple[Tensor, Tensor]]) -> list[list[Tensor]]:
    return [list(column) for column in zip(*samples, strict=True)]


def test_batches_that_are_lists_of_samples_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`batch\[0\]` is a list of 4 tensors whose first dimension is 6"):
        run(_split, 2)


class Load(nn.Module):
    """A block that measures its output.

    Args:
        block: The block.
        how: Updates a metric of its own, or keeps the value in an attribute.
    """

    def __init__(self, block: nn.Module, how: str) -> None:
        super().__init__()
        self.block = block
        self.load: Any = MeanMetric() if how == "metric" else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        if self.load is None or isinstance(self.load, Tensor):
            self.load = x.detach().abs().mean()
        else:
            self.load.update(x.detach().abs().mean())
        return x


class Loads(Program):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.net.blocks = nn.ModuleList(Load(block, how) for block in self.net.blocks)
        self.load = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        for block in self.net.blocks:
            if isinstance(block.load, Tensor):
                self.load.update(block.load)
        self.log("load", self.load, on_step=False, on_epoch=True)
        return loss


def _loads(rank: int, world: int, how: str, options: dict[str, Any]) -> float:
    lightning = trainer(rank, world, ZeroStrategy(**options), max_epochs=1)
    lightning.fit(seeded(partial(Loads, how)), _loader(1, 0))
    return lightning.callback_metrics["load"].item()


def test_a_metric_inside_of_a_block_is_refused_with_a_remedy_that_works() -> None:
    with pytest.raises(PipelineError, match=r"`net.blocks.0.load` is a `MeanMetric` of torchmetrics inside of a block"):
        run(_loads, 2, "metric", _pipeline())
    expected = run(_loads, 1, "attribute", {"stage": 0})[0]
    assert run(_loads, 2, "attribute", _pipeline()) == pytest.approx([expected] * 2, rel=1e-5)


class Measured(Accuracies):
    """Updates a metric in front of the blocks with a value of the first stage."""

    def made(self) -> Any:
        return MeanMetric()

    def logits(self, ids: Tensor) -> Tensor:
        hidden = self.net.embedding(ids)
        self.metric.update(hidden.detach().square().mean())
        return self.net.head(self.net.norm(self.net.body(hidden)))

    def updated(self, logits: Tensor, labels: Tensor) -> None:
        pass


def _measured(rank: int, world: int, options: dict[str, Any]) -> list[float]:
    lightning = trainer(rank, world, ZeroStrategy(**options), max_epochs=1)
    module = seeded(Measured)
    lightning.fit(module, _loader(1, 0), _loader(1, 0))
    return module.found


def test_a_metric_of_a_value_of_an_earlier_stage_is_that_without_a_pipeline() -> None:
    expected = run(_measured, 1, {"stage": 0})[0]
    assert len(expected) == 2
    for found in run(_measured, 2, _pipeline()):
        assert found == pytest.approx(expected, rel=1e-5)
