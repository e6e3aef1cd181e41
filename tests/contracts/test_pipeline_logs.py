"""Logged values, code for rank 0, and what steps change in their Trainer, as without a pipeline."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.utils import ModelOutput

from lightning_zero.config import Pipeline
from lightning_zero.errors import PipelineError
from lightning_zero.lightning.pipeline_logging import _as_tensors
from lightning_zero.lightning.strategy import ZeroStrategy
from tests.lightning_programs import Block, Net, data, seeded, trainer
from tests.sampling import sample
from tests.simulated_device import SimulatedDevice
from tests.worlds import run

BATCH, PIECES = 8, 4


class Program(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(6) for _ in range(4)])
        self.outputs: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Weighted(Program):
    """Logs values of other numbers of tokens, of some micro-batches, and several ones under a name."""

    def __init__(self) -> None:
        super().__init__()
        self.bound = partial(self.log, on_step=False, on_epoch=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        front: dict[str, Any] = {"on_step": False, "on_epoch": True}
        tokens = int((x[:, 0] > 0).sum()) + 1
        self.log("front", x[:, 1].mean(), batch_size=tokens, **front)
        loss = self.loss(batch)
        self.log("tokens", x[:, 1].mean(), batch_size=tokens, **front)
        if x[0, 2] > -0.5:
            self.log("some", x[:, 2].mean(), **front)
        for j in range(3 if x[1, 0] > 0 else 1):
            self.log("repeated", x[:, j].mean(), **front)
            self.log("summed", 1.0, reduce_fx="sum", **front)
            self.log("last", float(j), on_step=True, on_epoch=False)
        self.bound("bound", loss)
        super().log("inherited", loss, **front)
        self.log_dict({"a": loss, "b": 2 * loss}, **front)
        return loss


def _fit(rank: int, world: int, make: Any, options: dict[str, Any], more: dict[str, Any]) -> Any:
    strategy = ZeroStrategy(stage=1, **options)
    size = BATCH if options else BATCH // more.get("pieces", PIECES)
    accumulate = 1 if options else more.get("pieces", PIECES)
    loggers = [Writes()] if more.get("logs") else False
    epochs = more.get("epochs", 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lightning = trainer(
            rank, world, strategy, max_epochs=epochs, accumulate_grad_batches=accumulate, logger=loggers
        )
        module = seeded(make)
        lightning.fit(module, DataLoader(data(24), size), DataLoader(data(16), BATCH))
    logged = {name: value.item() for name, value in lightning.callback_metrics.items()}
    weights = {name: strategy.full_param(param) for name, param in module.named_parameters()}
    own = loggers[0].remembered if loggers else None
    messages = [str(one.message) for one in caught]
    return weights, logged, own, module.outputs, lightning.global_step, messages


def _alike(make: Any, pipeline: Pipeline, **more: Any) -> tuple[Any, Any]:
    """Return what the reference and the pipeline's ranks have found besides equal weights and logged values."""
    more["pieces"] = pipeline.num_microbatches
    expected = run(_fit, 1, make, {}, more)[0]
    found = run(_fit, pipeline.stages, make, {"pipeline": pipeline}, more)
    for weights, logged, *_ in found:
        assert logged == pytest.approx(expected[1], rel=1e-5, abs=1e-6)
        for key, value in expected[0].items():
            torch.testing.assert_close(weights[key], value, rtol=0, atol=1e-5, msg=key)
    return expected, found


def _pipeline(schedule: Any = "1f1b", pieces: int = PIECES) -> Pipeline:
    return Pipeline(stages=2, microbatches=pieces, partition="uniform", schedule=schedule)


@pytest.mark.parametrize("schedule", sample(("1f1b", "interleaved_1f1b"), "1f1b", "interleaved_1f1b"))
def test_logged_values_count_as_their_calls_say(schedule: str) -> None:
    _alike(Weighted, _pipeline(schedule))


class Remembers(Logger):
    """Keeps what it is given on rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.remembered: list[Any] = []

    @property
    def name(self) -> str:
        return "remembers"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "own" in metrics:
            self.remembered.append((float(metrics["own"]), step))


class ForRankZero(Program):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.logger.log_metrics({"own": 1.0}, step=self.global_step)
        loss = self.loss(batch)
        self.logger.log_metrics({"own": loss}, step=self.global_step)
        self.print("the loss is", loss)
        return loss

    def print(self, *args: Any, **kwargs: Any) -> None:
        self.outputs.append(" ".join(map(str, args)))


@pytest.mark.parametrize("schedule", sample(("1f1b", "interleaved_1f1b"), "1f1b", "interleaved_1f1b"))
def test_what_a_step_gives_a_logger_and_prints_comes_to_rank_zero(schedule: str) -> None:
    expected, found = _alike(partial(ForRankZero), _pipeline(schedule), logs=True)
    assert len(found[0][2]) == len(expected[2]) == 2 * 3 * PIECES
    assert [one for one, _ in found[0][2]] == pytest.approx([one for one, _ in expected[2]], rel=1e-5)
    assert [step for _, step in found[0][2]] == [step for _, step in expected[2]]
    assert len(found[0][3]) == 3 * PIECES
    assert found[0][3][0].startswith("the loss is tensor(")


class AsksForRank(Program):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.is_global_zero:  # rank 0 comes here
            pass
        loss = self.loss(batch)
        if self.global_rank == 0:
            self.outputs.append(1)
        if self.local_rank == 0:
            self.outputs.append(1)
        if self.logger is not None:
            self.logger.experiment.add_image("image", 1)
            self.logger.note(loss)
        return loss


class Writes(Remembers):
    @property
    def experiment(self) -> Any:
        from lightning.fabric.loggers.logger import rank_zero_experiment

        return rank_zero_experiment(lambda logger: _Experiment())(self)

    def note(self, loss: Any) -> None:
        """Do what a method of a hand-written logger does."""


class _Experiment:
    def add_image(self, *args: Any) -> None:
        pass


def test_code_for_rank_zero_that_is_not_reached_is_warned_of() -> None:
    _, found = _alike(AsksForRank, _pipeline(), logs=True)
    (message,) = {one for one in found[0][-1] if "which is not rank 0" in one}
    assert "`global_rank` (test_pipeline_logs.py:" in message
    assert "`local_rank` (test_pipeline_logs.py:" in message
    assert "`logger.note` (test_pipeline_logs.py:" in message
    assert "`logger.experiment.add_image` (test_pipeline_logs.py:" in message
    assert "is_global_zero" not in message
    assert not [one for one in found[1][-1] if "which is not rank 0" in one]


class CountsOnRankZero(Program):
    """Changes attributes on rank 0 alone in front of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.is_global_zero:
            self.outputs.append(batch_idx)
            self.count += 1
        return self.loss(batch)

    def on_train_epoch_end(self) -> None:
        self.log("count", float(self.count), rank_zero_only=True)


def test_rank_zero_keeps_what_it_alone_changes_in_front_of_the_blocks() -> None:
    pipeline = _pipeline("gpipe", 1)
    expected = run(_fit, 1, CountsOnRankZero, {}, {"pieces": 1})[0]
    first, last = run(_fit, 2, CountsOnRankZero, {"pipeline": pipeline}, {"pieces": 1})
    assert (first[3], first[1]) == (expected[3], pytest.approx(expected[1], rel=1e-5))
    assert last[3] == []


class ReadsRankZeros(CountsOnRankZero):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("count", float(self.count))
        return loss


def test_what_rank_zero_alone_has_counted_is_not_read_on_the_last_stage() -> None:
    with pytest.raises(PipelineError, match=r"`count` of `ReadsRankZeros` is changed .* by code for rank 0"):
        run(_fit, 2, ReadsRankZeros, {"pipeline": _pipeline("gpipe", 1)}, {"pieces": 1})


class ReadsLogged(Program):
    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weight = 1.0
        if self.place == "front":
            weight += float(self.trainer.callback_metrics.get("own", 0.0))
        loss = self.loss(batch) * weight
        self.log("own", loss.detach())
        if self.place == "behind":
            loss = loss * self.trainer.callback_metrics["own"]
        return loss


@pytest.mark.parametrize("place", ["front", "behind"])
def test_a_logged_value_that_the_step_reads_again_is_refused(place: str) -> None:
    with pytest.raises(PipelineError, match="A step reads 'own' of the Trainer's logged values"):
        run(_fit, 2, partial(ReadsLogged, place), {"pipeline": _pipeline(pieces=2)}, {"pieces": 2})


def test_a_logged_value_of_the_batch_before_is_read_in_front_of_the_blocks() -> None:
    _alike(partial(ReadsLogged, "front"), _pipeline("gpipe", 1))


class SetsRate(Program):
    """Sets options of its optimizer in front of the blocks and behind them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        group = self.optimizers().param_groups[0]
        group["weight_decay"] += 0.01
        loss = self.loss(batch)
        group["lr"] = 0.1 / (1 + loss.item())
        group["momentum"] *= 0.9
        return loss


@pytest.mark.parametrize("schedule", sample(("1f1b", "interleaved_1f1b"), "1f1b", "interleaved_1f1b"))
def test_options_of_an_optimizer_that_a_step_sets_are_those_without_a_pipeline(schedule: str) -> None:
    _alike(SetsRate, _pipeline(schedule))


class Stops(Program):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if batch_idx == 1:
            self.trainer.should_stop = True
        return loss


def test_a_step_can_stop_the_trainer() -> None:
    expected, found = _alike(Stops, _pipeline(pieces=1, schedule="gpipe"), epochs=4)
    assert [one[4] for one in found] == [expected[4]] * 2


class Returns(Program):
    """Returns a dictionary, whose entries a hook uses."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        prediction = self(batch[0])
        loss = F.mse_loss(prediction, batch[1])
        return {"loss": loss, "half": loss.detach() / 2, "number": 0.5, "prediction": prediction.detach(),
                "indices": list(range(len(prediction))), "count": len(prediction)}  # fmt: skip

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append(outputs)
        self.log("half", outputs["half"], on_step=False, on_epoch=True, batch_size=1)


@pytest.mark.parametrize("pieces", [1, PIECES])
def test_hooks_are_given_the_entries_of_a_steps_output(pieces: int) -> None:
    expected, found = _alike(Returns, _pipeline("gpipe", pieces), epochs=1)
    for one in found:
        outputs = one[3]
        assert outputs[0].keys() == expected[3][0].keys() - ({"count"} if pieces > 1 else set())
        for number, output in enumerate(outputs):
            theirs = expected[3][pieces * number : pieces * (number + 1)]
            torch.testing.assert_close(output["prediction"], torch.cat([one["prediction"] for one in theirs]))
            assert len(output["indices"]) == BATCH
            assert output["number"] == 0.5
            assert output["loss"] == pytest.approx(2 * output["half"])
    warned = [one for one in found[0][-1] if "`training_step` returns entries beside the loss" in one]
    assert [("'count', because" in one) for one in warned] == ([True] if pieces > 1 else [])


class InParts(Program):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.pipeline_loss(self.mid(self.pipeline_step(batch, batch_idx)), batch, batch_idx)

    def mid(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def pipeline_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.training:
            self.log("front", batch[0].mean(), on_step=False, on_epoch=True)
            self.logger.log_metrics({"own": batch[0].mean()}, step=0)
        x = batch[0] = batch[0] * 2
        return self.first(x)

    def pipeline_loss(self, output: Tensor, batch: Any, batch_idx: int) -> Any:
        batch[1] = batch[1] / 2
        loss = F.mse_loss(self.last(output), batch[1])
        if not self.training:
            return self.log("val", loss)
        self.logger.log_metrics({"own": loss}, step=1)
        self.log("behind", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)


def test_both_parts_of_a_step_in_parts_log_and_may_change_the_batch() -> None:
    expected, found = _alike(InParts, _pipeline(), logs=True)
    assert [sorted(one for one, step in each[2] if step == 0) for each in (found[0], expected)] == [
        pytest.approx(sorted(one for one, step in expected[2] if step == 0), rel=1e-5)
    ] * 2
    assert [one for one, step in found[0][2] if step == 1] == pytest.approx(
        [one for one, step in expected[2] if step == 1], rel=1e-5
    )


@dataclass
class Output(ModelOutput):
    logits: Any = None
    hidden: Any = None


@dataclass
class Plain:
    logits: Any


class Predicts(Program):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        return Output(logits=logits, hidden=(logits,)), Plain(logits), [logits], {"n": 1}


def _predict(rank: int, world: int, options: dict[str, Any]) -> Any:
    lightning = trainer(rank, world, ZeroStrategy(stage=1, **options))
    (found,) = lightning.predict(seeded(Predicts), DataLoader(data(8), BATCH))
    return found


def test_predictions_keep_their_classes() -> None:
    expected = run(_predict, 1, {})[0]
    for output, plain, items, more in run(_predict, 2, {"pipeline": _pipeline()}):
        assert (type(output), type(plain), more) == (Output, Plain, {"n": 1})
        for one in (output.logits, output["logits"], output.hidden[0], plain.logits, items[0]):
            torch.testing.assert_close(one, expected[0].logits)


def test_numbers_of_some_micro_batches_are_averaged_on_the_device_of_the_others() -> None:
    with SimulatedDevice():
        values = _as_tensors([0.0, torch.ones((), device="cuda"), 2, torch.tensor(3.0)])
        assert {one.device.type for one in values} == {"cuda"}
        assert [float(one) for one in values] == [0.0, 1.0, 2.0, 3.0]
    assert {one.device.type for one in _as_tensors([1.0, 2])} == {"cpu"}
