"""Losses whose denominators depend on the batch are those of the batch, not of its micro-batches."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_zero.errors import PipelineError
from lightning_zero.lightning.strategy import ZeroStrategy
from tests.contracts.test_pipeline_programs import Program, _fit, _loader, _pipeline
from tests.lightning_programs import seeded, trainer
from tests.sampling import sample
from tests.worlds import run


class Padded(Program):
    """Ignores a token and all that follow it: samples have very different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.mean = MeanMetric()

    def labels(self, batch: Any) -> Tensor:
        return batch[1].masked_fill((batch[1] > 7).cumsum(-1) > 0, -100)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.mean(1.0)
        self.log("mean", self.mean)
        self.log("before", 2.0)
        logits = self.logits(batch[0])
        loss = F.cross_entropy(logits.flatten(0, 1), self.labels(batch).flatten())
        self.calls += 1
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss + 0.1 * logits.square().mean()


class PaddedInParts(Padded):
    def pipeline_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net.embedding(batch[0])

    def pipeline_loss(self, output: Tensor, batch: Any, batch_idx: int) -> Tensor:
        self.logits = lambda ids: self.net.head(self.net.norm(output))  # type: ignore[method-assign]
        loss = self.training_step(batch, batch_idx)
        del self.logits
        return loss


class TellsTheLoss(PaddedInParts):
    """Changes in the one part what the other part reads."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def pipeline_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.factor = 0.5
        return super().pipeline_step(batch, batch_idx)

    def pipeline_loss(self, output: Tensor, batch: Any, batch_idx: int) -> Tensor:
        return super().pipeline_loss(output, batch, batch_idx) * self.factor


class CountsInBoth(PaddedInParts):
    def pipeline_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        return super().pipeline_step(batch, batch_idx)


class DoublesWhatTheLossLeft(PaddedInParts):
    """Changes in both parts what only the first one reads."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def pipeline_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.factor = self.factor * 2
        return super().pipeline_step(batch, batch_idx)

    def pipeline_loss(self, output: Tensor, batch: Any, batch_idx: int) -> Tensor:
        self.factor = 0.25
        return super().pipeline_loss(output, batch, batch_idx)


class KeepsNotes(PaddedInParts):
    """Assigns in both parts what no part reads."""

    def pipeline_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.note = 1.0
        return super().pipeline_step(batch, batch_idx)

    def pipeline_loss(self, output: Tensor, batch: Any, batch_idx: int) -> Tensor:
        self.note = 2.0
        return super().pipeline_loss(output, batch, batch_idx)


class AfterTheModel(Padded):
    """Draws what counts behind the model, where a pipeline draws other numbers than a run without one."""

    def labels(self, batch: Any) -> Tensor:
        return batch[1].masked_fill(torch.rand(batch[1].shape) < 0.5, -100)


class Drawn(Padded):
    """Draws what counts behind the model from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def labels(self, batch: Any) -> Tensor:
        return batch[1].masked_fill(torch.rand(batch[1].shape, generator=self.generator) < 0.5, -100)


class DrawnFromGlobal(Padded):
    """Draws what counts from a generator outside of the module."""

    def labels(self, batch: Any) -> Tensor:
        return batch[1].masked_fill(torch.rand(batch[1].shape, generator=GENERATOR) < 0.5, -100)


GENERATOR = torch.Generator().manual_seed(3)


class DrawnElsewhere(Padded):
    """Draws what counts from a generator that nobody can find and put back."""

    def labels(self, batch: Any) -> Tensor:
        return batch[1].masked_fill(DRAW(batch[1].shape) < 0.5, -100)


DRAW = partial(torch.rand, generator=torch.Generator().manual_seed(3))


class Logged(Padded):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.logits(batch[0]).flatten(0, 1), self.labels(batch).flatten())
        self.log("perplexity", loss.exp())
        return loss


class Flooded(Padded):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (super().training_step(batch, batch_idx) - 2.5).abs() + 2.5


class Uncertain(Padded):
    """Weighs its losses by parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.tensor([0.3, -0.2]))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        losses = torch.stack([loss, loss.new_ones(())])
        return (losses * torch.exp(-self.scales) + self.scales).sum() + loss / 3


class Counts(Padded):
    """A loss of chosen tokens, with a denominator that is no number of labels."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        labels = self.labels(batch)
        logits = self.logits(batch[0])
        self.calls += 1
        return F.poisson_nll_loss(logits[..., 0][labels >= 0], labels[labels >= 0].float())


def _train(rank: int, world: int, make: Any, options: dict[str, Any]) -> Any:
    strategy = ZeroStrategy(**options)
    copies = world // (strategy.pipeline.stages if strategy.pipeline else 1)
    lightning = trainer(rank, world, strategy, max_epochs=2, accumulate_grad_batches=2)
    module = seeded(make)
    lightning.fit(module, _loader(copies, rank % copies))
    logged = {key: float(value) for key, value in lightning.callback_metrics.items()}
    return {name: strategy.full_param(param) for name, param in module.named_parameters()}, logged, module.calls


@pytest.mark.parametrize(
    "make", sample((TellsTheLoss, CountsInBoth, DoublesWhatTheLossLeft), TellsTheLoss), ids=lambda make: make.__name__
)
def test_what_one_part_of_a_step_changes_and_the_other_reads_is_refused(make: Any) -> None:
    with pytest.raises(
        PipelineError, match=r"`(factor|calls)` of `\w+` is changed by `pipeline_step`, which the first"
    ):
        run(_train, 2, make, _pipeline(2))


@pytest.mark.slow
def test_what_both_parts_of_a_step_assign_and_none_reads_trains() -> None:
    expected = run(_train, 2, PaddedInParts, _pipeline(2))[0]
    found = run(_train, 2, KeepsNotes, _pipeline(2))[0]
    assert all(torch.equal(found[0][name], value) for name, value in expected[0].items())


@pytest.mark.parametrize("make", sample((Padded, PaddedInParts), Padded), ids=lambda make: make.__name__)
@pytest.mark.parametrize("ranks", sample(((1, 1), (2, 2), (3, 2)), (1, 1)), ids="zero{0[0]}-dp{0[1]}".format)
@pytest.mark.parametrize("schedule", sample(("gpipe", "1f1b", "interleaved_1f1b", "zb_h1"), "1f1b"))
def test_labels_that_are_ignored_train_as_without_a_pipeline(make: Any, schedule: str, ranks: Any) -> None:
    zero, copies = ranks
    expected, logged, calls = run(_train, copies, Padded, {"stage": 0})[0]
    options = {**_pipeline(schedule=schedule, microbatches=4), "stage": zero}
    outcomes = run(_train, 2 * copies, make, options)
    for weights, numbers, _ in outcomes:
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6, msg=name)
        assert numbers == outcomes[0][1] or copies > 1
    assert outcomes[0][1] == pytest.approx(logged, rel=2e-6)
    assert outcomes[-1][2] == 4 * calls  # the survey ends at the loss


@pytest.mark.parametrize(
    "make", sample((AfterTheModel, Drawn, DrawnFromGlobal), Drawn, DrawnFromGlobal), ids=lambda make: make.__name__
)
def test_labels_that_are_drawn_behind_the_model_are_those_that_were_counted(make: Any) -> None:
    first, second = run(_fit, 2, make, _pipeline(), {}, True)
    assert all(torch.equal(value, second[name]) for name, value in first.items())


class DrawnInFront(Program):
    """Draws a mask from a generator of its own, for what goes into the blocks and for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.net.embedding(batch[0])
        mask = torch.rand(hidden.shape[:2], generator=self.generator) < 0.5
        logits = self.net.head(self.net.norm(self.net.body(hidden * mask[..., None])))
        losses = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="none")
        return (losses * ~mask.flatten()).sum() / 10.0


def _fit_in_pieces(rank: int, world: int, options: dict[str, Any], batch: int) -> Any:
    strategy = ZeroStrategy(**options)
    lightning = trainer(rank, world, strategy, max_epochs=2, accumulate_grad_batches=8 // batch)
    module = seeded(DrawnInFront)
    lightning.fit(module, _loader(1, 0, batch))
    return {name: strategy.full_param(param) for name, param in module.named_parameters()}


@pytest.mark.parametrize("schedule", sample(("gpipe", "1f1b", "interleaved_1f1b"), "interleaved_1f1b"))
def test_generators_of_a_module_draw_what_they_draw_without_a_pipeline(schedule: str) -> None:
    expected = run(_fit_in_pieces, 1, {"stage": 0}, 2)[0]
    for weights in run(_fit_in_pieces, 2, _pipeline(schedule=schedule, microbatches=4), 8):
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("make", sample((Uncertain, Counts), Uncertain), ids=lambda make: make.__name__)
def test_sums_of_such_losses_and_their_products_train_as_without_a_pipeline(make: Any) -> None:
    expected, _, _ = run(_train, 1, make, {"stage": 0})[0]
    for weights, _, _ in run(_train, 2, make, _pipeline(2, microbatches=4)):
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6, msg=name)


REFUSED: list[tuple[Any, str]] = [
    (DrawnElsewhere, "`cross_entropy` is a mean over a number of elements that differs"),
    (Flooded, "`abs` of a loss that is a mean over a number of elements"),
    (Logged, "`exp` of a loss that is a mean over a number of elements"),
]


@pytest.mark.parametrize("case", sample(REFUSED, REFUSED[0]), ids=lambda case: case[0].__name__)
def test_denominators_that_cannot_be_told_are_refused(case: Any) -> None:
    make, message = case
    with pytest.raises(PipelineError, match=re.escape(message)):
        run(_fit, 2, make, _pipeline(), {}, True)
