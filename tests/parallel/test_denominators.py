"""Means over micro-batches that are those of the batch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lightning_zero_ops as ops
from lightning_zero.errors import PipelineError
from lightning_zero.parallel.denominators import Denominators, count_elements
from tests.sampling import sample

IGNORED = torch.tensor([1, 2, 4])  # two labels of the first half count, and three of the second one


def made() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 5, generator=generator)
    labels = torch.randint(0, 5, (8,), generator=generator).index_fill_(0, IGNORED, -100)
    return logits.requires_grad_(), labels


def in_two(loss: Callable[[Tensor, Tensor], Tensor], logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over two micro-batches."""
    pieces = list(zip(logits.chunk(2), labels.chunk(2), strict=True))
    counts = [float(count_elements(lambda piece=piece: loss(*piece))) for piece in pieces]  # type: ignore[arg-type,misc]
    denominators = Denominators(counts)
    losses = []
    for index, piece in enumerate(pieces):
        with denominators.microbatch(index):
            losses.append(loss(*piece))
    denominators.check()
    return torch.stack(losses).mean()


def chosen(loss: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a loss on the elements that count, whose targets are numbers."""
    return lambda logits, labels: loss(logits[labels >= 0], labels[labels >= 0, None].float().expand(-1, 5) / 5)


LOSSES: dict[str, Any] = {
    "cross_entropy": F.cross_entropy,
    "module": torch.nn.CrossEntropyLoss(label_smoothing=0.1),
    "weighted": lambda logits, labels: F.cross_entropy(logits, labels, torch.arange(1.0, 6.0)),
    "nll": lambda logits, labels: F.nll_loss(logits.log_softmax(-1), labels),
    "chosen": lambda logits, labels: F.cross_entropy(logits[labels >= 0], labels[labels >= 0]),
    "probabilities": chosen(F.cross_entropy),
    "linear": lambda logits, labels: ops.linear_cross_entropy(logits, torch.eye(5), labels),
    **{loss.__name__: chosen(loss) for loss in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)},
    "binary": chosen(F.binary_cross_entropy_with_logits),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_mean_over_what_counts_is_that_of_the_batch(name: str) -> None:
    (logits, labels), (again, _) = made(), made()
    whole, parts = LOSSES[name](logits, labels), in_two(LOSSES[name], again, labels)
    whole.backward()
    parts.backward()
    torch.testing.assert_close(parts, whole, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(again.grad, logits.grad, rtol=1e-5, atol=1e-7)


def test_nothing_changes_where_all_have_as_many() -> None:
    logits, _ = made()
    labels = torch.arange(8) % 5
    halves = [F.cross_entropy(*piece) for piece in zip(logits.chunk(2), labels.chunk(2), strict=True)]
    assert torch.equal(in_two(F.cross_entropy, logits, labels), torch.stack(halves).mean())


def test_a_microbatch_in_which_nothing_counts_adds_nothing() -> None:
    logits, labels = made()
    labels[:4] = -100
    assert torch.allclose(in_two(F.cross_entropy, logits, labels), F.cross_entropy(logits, labels))


def test_sums_and_steps_without_a_mean_are_left_alone() -> None:
    logits, labels = made()
    assert count_elements(lambda: F.cross_entropy(logits, labels, reduction="sum")) is None
    assert count_elements(lambda: logits.square().mean()) is None
    assert count_elements(lambda: F.cross_entropy(logits[:0].view(3, 7), labels)) is None  # an error


def _unsurveyed(loss: Any, counts: Any) -> Denominators:
    logits, labels = made()
    denominators = Denominators(counts)
    for index, piece in enumerate(zip(logits.chunk(2), labels.chunk(2), strict=True)):
        with denominators.microbatch(index):
            loss(*piece)
    return denominators


def test_numbers_that_differ_and_were_not_known_are_refused() -> None:
    with pytest.raises(
        PipelineError, match=re.escape("`cross_entropy` is a mean over a number of elements that differs")
    ):
        _unsurveyed(F.cross_entropy, None).check()
    with pytest.raises(PipelineError, match=re.escape("`Pipeline(microbatches=1)`")):
        _unsurveyed(F.cross_entropy, [4.0, 4.0]).check()
    _unsurveyed(lambda logits, labels: F.mse_loss(logits, logits), None).check()


def test_a_second_loss_with_numbers_of_its_own_is_refused() -> None:
    def two(logits: Tensor, labels: Tensor) -> None:
        F.cross_entropy(logits, labels)
        F.mse_loss(logits[labels >= 0], logits[labels >= 0])

    with pytest.raises(PipelineError, match="`mse_loss` is a mean"):
        _unsurveyed(two, [2.0, 3.0]).check()


@pytest.mark.parametrize("name", sample(("exp", "square"), "exp"))
def test_what_is_not_linear_in_such_a_loss_is_refused(name: str) -> None:
    with pytest.raises(PipelineError, match=f"`{name}` of a loss that is a mean over a number of elements"):
        _unsurveyed(lambda logits, labels: getattr(F.cross_entropy(logits, labels).detach(), name)(), [2.0, 3.0])
    _unsurveyed(lambda logits, labels: F.cross_entropy(logits, labels) * 2.0 + 1.0, [2.0, 3.0])
