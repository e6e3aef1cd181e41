from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lightning_zero.parallel.tensor.collectives import ProcessGroupRanks, Ranks
from lightning_zero.parallel.tensor.loss import cut_cross_entropy
from lightning_zero.parallel.tensor.threads import ThreadRanks, run_threads
from tests.worlds import run

VOCAB = 24


def _inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    logits = 5 * torch.randn(2, 7, VOCAB, generator=generator, dtype=torch.float64) + 3
    labels = torch.randint(0, VOCAB, (2, 7), generator=generator)
    labels[0, :3] = -100
    return logits.to(dtype), labels


def _cut(ranks: Ranks, dtype: torch.dtype, **options: Any) -> tuple[Tensor, Tensor]:
    logits, labels = _inputs(dtype)
    local = logits.chunk(ranks.size, -1)[ranks.rank].clone().requires_grad_()
    loss = cut_cross_entropy(local, labels, ranks, **options)
    loss.backward(torch.linspace(0.5, 1.5, loss.numel(), dtype=loss.dtype).view(loss.shape))
    assert local.grad is not None
    return loss.detach(), local.grad


def _whole(dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Tensor, Tensor]:
    logits, labels = _inputs(dtype)
    logits.requires_grad_()
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)
    loss = loss.view(labels.shape) if options.get("reduction") == "none" else loss
    loss.backward(torch.linspace(0.5, 1.5, loss.numel(), dtype=loss.dtype).view(loss.shape))
    assert logits.grad is not None
    return loss.detach(), logits.grad


OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothed": {"label_smoothing": 0.1},
    "other-index": {"ignore_index": 3},
}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", OPTIONS)
def test_loss_and_gradients_are_those_of_the_whole_logits(name: str, size: int) -> None:
    options = OPTIONS[name]
    if name == "other-index":  # without the labels of -100
        options = {**options, "reduction": "sum"}
    loss, grad = _whole(**options) if name != "other-index" else _other_index(options)
    found = run_threads(ThreadRanks.group(size), lambda one: _cut_with(one, name, options))
    for one, _ in found:
        torch.testing.assert_close(one, loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([one for _, one in found], -1), grad, rtol=1e-12, atol=1e-12)


def _other_index(options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    logits, labels = _inputs()
    logits.requires_grad_()
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.clamp(0).flatten(), **options)
    loss.backward()
    assert logits.grad is not None
    return loss.detach(), logits.grad


def _cut_with(ranks: Ranks, name: str, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    if name != "other-index":
        return _cut(ranks, torch.float64, **options)
    logits, labels = _inputs()
    local = logits.chunk(ranks.size, -1)[ranks.rank].clone().requires_grad_()
    loss = cut_cross_entropy(local, labels.clamp(0), ranks, **options)
    loss.backward()
    assert local.grad is not None
    return loss.detach(), local.grad


def test_sums_are_in_fp32_for_logits_of_16_bits() -> None:
    loss, _ = _whole(torch.float32)
    for found, grad in run_threads(ThreadRanks.group(2), lambda one: _cut(one, torch.bfloat16)):
        assert found.dtype == torch.float32
        assert grad.dtype == torch.bfloat16
        torch.testing.assert_close(found, loss, rtol=1e-2, atol=1e-2)  # the rounding of the logits


def _over_gloo(rank: int, world: int) -> tuple[Tensor, Tensor]:
    return _cut(ProcessGroupRanks(), torch.float32)


def test_two_processes_have_the_loss_of_one() -> None:
    loss, grad = _whole(torch.float32)
    found = run(_over_gloo, 2)
    for one, _ in found:
        torch.testing.assert_close(one, loss, rtol=0, atol=1e-6)
    torch.testing.assert_close(torch.cat([one for _, one in found], -1), grad, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": torch.zeros(3, dtype=torch.long)}, r"got logits of shape \(2, 7, 24\) and labels of shape \(3,\)"),
        ({"reduction": "max"}, "`reduction='max'` is not known"),
        ({"label_smoothing": 2.0}, "`label_smoothing=2.0` must be a number from 0 to 1"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    logits, labels = _inputs()
    with pytest.raises(ValueError, match=message):
        cut_cross_entropy(logits, options.pop("labels", labels), ThreadRanks.group(1)[0], **options)


def test_second_derivatives_are_refused() -> None:
    """They were those of a loss whose probabilities are constants."""
    logits, labels = _inputs()
    loss = cut_cross_entropy(logits.requires_grad_(), labels, ThreadRanks.group(1)[0])
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        torch.autograd.grad(loss, logits, create_graph=True)


@pytest.mark.parametrize("label", [-1, VOCAB, VOCAB + 3])
def test_labels_outside_of_the_vocabulary_are_refused(label: int) -> None:
    logits, labels = _inputs()
    labels[1, 2] = label
    with pytest.raises(IndexError, match="out of bounds"):
        functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def work(ranks: Ranks) -> str:
        with pytest.raises(RuntimeError, match="out of bounds"):
            cut_cross_entropy(logits.chunk(2, -1)[ranks.rank], labels, ranks)
        return "refused"

    assert run_threads(ThreadRanks.group(2), work) == ["refused"] * 2
