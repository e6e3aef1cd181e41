"""Means over micro-batches that are those of the batch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import MeanMetric

import lightning_zero_ops as ops
from lightning_zero.errors import PipelineError
from lightning_zero.parallel.pipeline.schedule.microbatches import weighted_mean
from lightning_zero.parallel.pipeline.tracing.loss_normalization import Denominators, count_elements

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
    denominators = Denominators(counts, [4, 4])
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
    "gaussian_nll": chosen(lambda x, y: F.gaussian_nll_loss(x, y, x.square() + 0.5)),
    "poisson_nll": chosen(F.poisson_nll_loss),
    "soft_margin": chosen(lambda x, y: F.soft_margin_loss(x, y.round() * 2 - 1)),
    "hinge_embedding": chosen(lambda x, y: F.hinge_embedding_loss(x, y.round() * 2 - 1)),
    "multilabel_margin": lambda x, y: F.multilabel_margin_loss(x[y >= 0], y[y >= 0, None].expand(-1, 5) - 1),
    "multilabel_soft_margin": chosen(lambda x, y: F.multilabel_soft_margin_loss(x, y.round())),
    "multi_margin": lambda x, y: F.multi_margin_loss(x[y >= 0], y[y >= 0], weight=torch.arange(1.0, 6.0)),
    "cosine_embedding": chosen(lambda x, y: F.cosine_embedding_loss(x, y + x.flip(-1), y[:, 0].round() * 2 - 1)),
    "margin_ranking": chosen(lambda x, y: F.margin_ranking_loss(x, y, y.round() * 2 - 1, margin=0.5)),
    "triplet_margin": chosen(lambda x, y: F.triplet_margin_loss(x, y, x.flip(-1))),
    "batchmean": chosen(lambda x, y: F.kl_div(x.log_softmax(-1), y, reduction="batchmean")),
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
    denominators = Denominators(counts, [4, 4])
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


def _in_three(loss: Callable[[Tensor, Tensor], Tensor], counts: Any) -> tuple[Denominators, Tensor]:
    """Return what was seen of micro-batches of 4, 3 and 1 samples, and the mean over their samples."""
    logits, labels = made()
    sizes = [4, 3, 1]
    denominators = Denominators(counts, sizes)
    losses = []
    for index, piece in enumerate(zip(logits.split(sizes), labels.split(sizes), strict=True)):
        with denominators.microbatch(index):
            losses.append(loss(*piece))
    return denominators, weighted_mean(losses, sizes)


def test_micro_batches_of_other_sizes_have_the_mean_of_the_batch() -> None:
    logits, labels = made()
    denominators, mean = _in_three(F.cross_entropy, [2.0, 2.0, 1.0])
    denominators.check()
    assert torch.allclose(mean, F.cross_entropy(logits, labels))
    denominators, mean = _in_three(lambda logits, _: F.mse_loss(logits, logits.sin()).sqrt(), [20.0, 15.0, 5.0])
    denominators.check()  # nothing is changed where every sample has as many elements, so more than sums are right
    both, mean = _in_three(lambda x, _: F.mse_loss(x, x.sin()) + F.l1_loss(x, x.cos()), [20.0, 15.0, 5.0])
    both.check()
    assert torch.allclose(mean, F.mse_loss(logits, logits.sin()) + F.l1_loss(logits, logits.cos()))


def test_numbers_that_are_not_in_proportion_to_the_samples_are_refused() -> None:
    weight = torch.ones(5)
    denominators, _ = _in_three(lambda x, _: F.mse_loss(x, x.sin()) + F.mse_loss(weight, 2 * weight), None)
    with pytest.raises(PipelineError, match=re.escape("(5, 5, 5) that is not in proportion to the samples (4, 3, 1)")):
        denominators.check()


def test_a_second_loss_with_numbers_of_its_own_is_refused() -> None:
    def two(logits: Tensor, labels: Tensor) -> None:
        F.cross_entropy(logits, labels)
        F.mse_loss(logits[labels >= 0], logits[labels >= 0])

    with pytest.raises(PipelineError, match="`mse_loss` is a mean"):
        _unsurveyed(two, [2.0, 3.0]).check()


S = torch.tensor(0.3, requires_grad=True)  # a parameter
WEIGHTS = torch.tensor([0.3, 0.7])


def _filled(loss: Tensor) -> Tensor:
    losses = torch.zeros(2)
    losses[0] = loss
    losses[1] = 2.0
    return losses.mean()


NOT_LINEAR: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "exp": ("exp", lambda loss: loss.detach().exp()),
    "square": ("square", torch.square),
    "flooded": ("abs", lambda loss: (loss - 2.5).abs() + 2.5),
    "product": ("mul", lambda loss: loss * loss),
    "relative": ("(true)?div", lambda loss: loss / loss.detach()),
    "inverse": ("rtruediv|mul|reciprocal|rdiv", lambda loss: 1.0 / loss),
    "stacked": ("logsumexp", lambda loss: torch.stack([loss, 2 * loss]).logsumexp(0)),
    "by_itself": ("mul", lambda loss: (torch.stack([loss, 2 * loss]) * torch.stack([loss, loss]).detach()).sum()),
    "largest": ("gt", lambda loss: loss if bool(loss > 2.0) else 2 * loss),
    "filled": ("square", lambda loss: _filled(loss).square()),
    "again": ("mse_loss", lambda loss: F.mse_loss(loss, torch.zeros(()))),
    "keyword": ("max", lambda loss: torch.max(input=loss, other=torch.ones(()))),
}
LINEAR: dict[str, Callable[[Tensor], Tensor]] = {
    "weighted": lambda loss: 0.5 * loss + 2.0 * (loss - 1.0) - loss / 4,
    "accumulated": lambda loss: loss / 3,
    "uncertain": lambda loss: loss * torch.exp(-S) + S,
    "divided": lambda loss: loss / S.exp().square() + S.log(),
    "stacked": lambda loss: (torch.stack([loss, 2 * loss]) * WEIGHTS).sum() + torch.stack([loss, loss]) @ WEIGHTS,
    "cast": lambda loss: torch.cat([loss.double().reshape(1), loss.double().view(1)]).mean().float(),
    "guarded": lambda loss: torch.where(torch.isnan(loss), torch.zeros_like(loss), loss),
    "in_place": lambda loss: torch.zeros(()).add_(loss).mul_(3.0),
    "summed": lambda loss: sum([loss, loss.clone()]),  # type: ignore[return-value]
    "filled": _filled,
}


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_what_is_not_linear_in_such_a_loss_is_refused(name: str) -> None:
    function, change = NOT_LINEAR[name]
    with pytest.raises(PipelineError, match=f"`({function})` of a loss that is a mean over a number of elements"):
        _unsurveyed(lambda logits, labels: change(F.cross_entropy(logits, labels)), [2.0, 3.0])
    _unsurveyed(lambda logits, labels: change(F.cross_entropy(logits, labels, reduction="sum")), None)


@pytest.mark.parametrize("name", LINEAR)
def test_what_is_linear_in_such_a_loss_is_that_of_the_batch(name: str) -> None:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return LINEAR[name](F.cross_entropy(logits, labels))

    (logits, labels), (again, _) = made(), made()
    whole, parts = loss(logits, labels), in_two(loss, again, labels)
    whole.backward()
    parts.backward()
    torch.testing.assert_close(parts, whole, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(again.grad, logits.grad, rtol=1e-5, atol=1e-7)


def test_numbers_and_metrics_of_such_a_loss_are_let_through() -> None:
    mean = MeanMetric()

    def watched(logits: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(logits, labels)
        mean.update(loss.detach())
        assert loss.ndim == 0
        assert loss.item() > 0
        assert torch.isfinite(loss)
        assert f"{loss:.3f}"
        return loss

    in_two(watched, *made())
    assert torch.allclose(mean.compute(), F.cross_entropy(*made()))
