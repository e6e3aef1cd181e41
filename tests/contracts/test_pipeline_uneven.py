"""Batches that the number of micro-batches does not divide train in a pipeline as without one."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_zero.errors import CollectiveError, PipelineError
from lightning_zero.lightning.strategy import ZeroStrategy
from tests.contracts.test_pipeline_programs import Program, _pipeline
from tests.lightning_programs import seeded, trainer
from tests.references import VOCAB, TinyGPT
from tests.sampling import sample
from tests.worlds import run

TOLERANCE = 1e-6  # samples are added in another order


class Deep(Program):
    """Has a loss of PyTorch's, and a mean of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = TinyGPT(depth=8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.logits(batch[0])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten()) + 0.1 * logits.square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(batch[0]))
        return loss


class Ignoring(Deep):
    """Ignores what follows the first of some tokens: samples have very different lengths, and none is empty."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        labels = batch[1].masked_fill(
            (batch[1] > 7).cumsum(-1).roll(1, -1).index_fill(-1, torch.tensor(0), 0) > 0, -100
        )
        return super().training_step((batch[0], labels), batch_idx)


class InParts(Deep):
    def pipeline_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net.embedding(batch[0])

    def pipeline_loss(self, output: Tensor, batch: Any, batch_idx: int) -> Any:
        logits = self.net.head(self.net.norm(output))
        if not self.training:
            if self.trainer.predicting:
                return logits.argmax(-1)
            loss = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
            return self.log("val_loss", loss, sync_dist=True, batch_size=len(batch[0]))
        loss = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten()) + 0.1 * logits.square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(batch[0]))
        return loss


class PenalisesWeights(Deep):
    """Has a second loss over as many elements in every micro-batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + F.mse_loss(self.net.norm.weight, torch.zeros_like(self.net.norm.weight))


def _batches(copy: int, sizes: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3 + copy)
    tokens = [torch.randint(0, VOCAB, (size, 7), generator=generator) for size in sizes]
    return DataLoader([(one[:, :-1], one[:, 1:]) for one in tokens], batch_size=None)  # type: ignore[arg-type]


def _train(rank: int, world: int, make: Any, options: dict[str, Any], sizes: Any) -> Any:
    """Train, validate and predict with batches of sizes, for every copy."""
    strategy = ZeroStrategy(**options)
    copies = world // (strategy.pipeline.stages if strategy.pipeline else 1)
    program = {"max_epochs": 2, "use_distributed_sampler": False, "log_every_n_steps": 1}
    lightning = trainer(rank, world, strategy, **program)
    module = seeded(make)
    batches = _batches(rank % copies, sizes[rank % copies])
    lightning.fit(module, batches, batches)
    weights = {name: strategy.full_param(param) for name, param in module.named_parameters()}
    logged = {key: float(value) for key, value in lightning.callback_metrics.items()}
    return weights, logged, lightning.predict(module, batches)


def _check(make: Any, stages: int, zero: int, sizes: Any, **options: Any) -> None:
    copies = len(sizes)
    expected = run(_train, copies, Deep if make is InParts else make, {"stage": 0}, sizes, timeout_s=120.0)
    pipeline = {**_pipeline(stages, **options), "stage": zero}
    for rank, outcome in enumerate(run(_train, stages * copies, make, pipeline, sizes, timeout_s=240.0)):
        weights, logged, predicted = expected[rank % copies]
        for name, value in weights.items():
            torch.testing.assert_close(outcome[0][name], value, rtol=0, atol=TOLERANCE, msg=name)
        assert outcome[1] == pytest.approx(logged, rel=2e-6)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(outcome[2], predicted, strict=True))


SIZES = {2: (3, (7, 7, 2)), 4: (4, (7, 7, 3))}  # micro-batches and batches, by stages
INTERLEAVED = {2: (4, (7, 3, 1)), 4: (8, (11, 6, 2))}  # six samples are four micro-batches, a multiple of the stages

CASES = [
    (schedule, stages, zero, make)
    for schedule in ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1")
    for stages in (2, 4)
    for zero in (1, 3)
    for make in (Deep, Ignoring, InParts)
]


@pytest.mark.parametrize(
    "case",
    sample(CASES, ("1f1b", 2, 3, Deep)),
    ids=lambda case: f"{case[0]}-{case[1]}-zero{case[2]}-{case[3].__name__}",
)
def test_batches_that_micro_batches_do_not_divide_train_as_without_a_pipeline(case: Any) -> None:
    schedule, stages, zero, make = case
    number, sizes = (INTERLEAVED if schedule == "interleaved_1f1b" else SIZES)[stages]
    _check(make, stages, zero, [sizes], schedule=schedule, microbatches=number)


COPIES = [
    (schedule, zero, make)
    for schedule in ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1")
    for zero in (0, 1, 2, 3)
    for make in (Deep, Ignoring)
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", sample(COPIES, ("1f1b", 3, Deep)), ids=lambda case: f"{case[0]}-zero{case[1]}-{case[2].__name__}"
)
def test_copies_may_have_batches_of_different_sizes(case: Any) -> None:
    """Copies had different numbers of micro-batches, and gathered as often."""
    schedule, zero, make = case
    number, _ = (INTERLEAVED if schedule == "interleaved_1f1b" else SIZES)[2]
    _check(make, 2, zero, [(7, 6, 2, 8), (7, 5, 1, 1)], schedule=schedule, microbatches=number)


@pytest.mark.slow
def test_gradients_that_are_reduced_after_every_micro_batch_are_those_of_the_batch() -> None:
    _check(Ignoring, 2, 3, [(7, 6, 2, 8), (7, 5, 1, 1)], microbatches=3, reduce="microbatch")


def test_a_second_loss_that_is_not_over_the_samples_is_refused() -> None:
    with pytest.raises(PipelineError, match=re.escape("is not in proportion to the samples (3, 2, 2)")):
        run(_train, 2, PenalisesWeights, _pipeline(microbatches=3), [(7,)])


def _warnings(rank: int, world: int, sizes: Any = ((7, 2),)) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _train(rank, world, Deep, _pipeline(microbatches=3), sizes)
    return [str(one.message) for one in caught if "does not divide" in str(one.message)]


def test_batches_that_are_not_divided_are_warned_of_once() -> None:
    first, _ = run(_warnings, 2)
    assert len(first) == 1
    assert "micro-batches are 3, 2, 2" in first[0]


def test_the_first_rank_warns_of_batches_of_another_copy() -> None:
    """It saw its own batches alone."""
    first, *others = run(_warnings, 4, ((6, 6), (6, 7)), timeout_s=120.0)
    assert len(first) == 1
    assert "a batch of another copy of the model, whose micro-batches differ in size" in first[0]
    assert not any(others)


def test_a_batch_that_is_divided_is_not_warned_of() -> None:
    assert not any(run(_warnings, 2, ((6, 3),)))


class Streamed(IterableDataset[Any]):
    """Does not tell its length."""

    def __init__(self, batches: list[Any]) -> None:
        super().__init__()
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def _loaders(lengths: tuple[int, int], streamed: bool) -> list[Any]:
    loaders = [_batches(0, [4] * length) for length in lengths]
    return [DataLoader(Streamed(list(one)), batch_size=None) if streamed else one for one in loaders]


def _with_other_lengths(rank: int, world: int, how: str, lengths: Any) -> str:
    streamed = how.endswith("-streamed")
    own, same = _loaders(lengths, streamed)[rank], _batches(0, [4] * 2)
    lightning = trainer(rank, world, ZeroStrategy(**_pipeline(), timeout=timedelta(seconds=60)), max_epochs=1)
    module = seeded(Deep)
    start, loaders = lightning.fit, (own, same) if how.startswith("train") else (same, own)
    if how == "predict":
        start, loaders = lightning.predict, (own,)  # type: ignore[assignment]
    started = time.monotonic()
    with pytest.raises((PipelineError, CollectiveError)) as caught:
        start(module, *loaders)
    assert time.monotonic() - started < 40
    return str(caught.value)


TRAINING = "Ranks with different numbers of training batches meet like this"
EVALUATION = "`validation_step` have different numbers of batches: rank 0 has [{}], rank 1 has [{}]"


@pytest.mark.parametrize(
    ("how", "lengths", "message"),
    [
        ("train", (4, 2), TRAINING),
        ("train", (2, 4), TRAINING),
        ("validate", (4, 2), EVALUATION.format(4, 2)),
        ("validate-streamed", (4, 2), "the end of the batches of `validation_step`"),
        ("predict", (1, 2), "`predict_step` have different numbers of batches: rank 0 has [1], rank 1 has [2]"),
    ],
)
def test_loaders_of_other_lengths_on_the_stages_are_refused_at_once(how: str, lengths: Any, message: str) -> None:
    for found in run(_with_other_lengths, 2, how, lengths):
        assert message in found


def _evaluate_streamed(rank: int, world: int, options: dict[str, Any]) -> Any:
    lightning = trainer(rank, world, ZeroStrategy(**options))
    module = seeded(Deep)
    loader = _loaders((3, 3), True)[0]
    found = lightning.validate(module, loader, verbose=False), lightning.predict(module, loader)
    return found[0][0]["val_loss"], torch.cat(found[1])


class _FailsOnce(Deep):
    fails = True

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if self.fails:
            raise KeyError("in a validation")
        return super().validation_step(batch, batch_idx)


def _evaluate_again(rank: int, world: int) -> float:
    lightning = trainer(rank, world, ZeroStrategy(**_pipeline(), timeout=timedelta(seconds=30)))
    module = seeded(_FailsOnce)
    with pytest.raises((KeyError, RuntimeError)):
        lightning.validate(module, _loaders((3, 3), True)[0], verbose=False)
    module.fails = False
    found = lightning.validate(module, _loaders((3, 3), True)[0], verbose=False)
    return float(found[0]["val_loss"])


@pytest.mark.slow
def test_an_evaluation_that_an_error_has_ended_leaves_nothing_to_the_next() -> None:
    """The loop kept the end that waits for others, and the next evaluation called it twice: `KeyError`."""
    expected = run(_evaluate_streamed, 1, {"stage": 0})[0][0]
    assert run(_evaluate_again, 2) == pytest.approx([expected] * 2, rel=1e-6)


def test_loaders_without_a_length_are_evaluated_as_without_a_pipeline() -> None:
    expected = run(_evaluate_streamed, 1, {"stage": 0})[0]
    for loss, predicted in run(_evaluate_streamed, 2, _pipeline()):
        assert loss == pytest.approx(expected[0], rel=1e-6)
        assert torch.equal(predicted, expected[1])
