from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero_ops import cut_cross_entropy, linear_cross_entropy
from lightning_zero_ops.cut_cross_entropy import CutRows, Terms
from tests.worlds import count_collectives, run

TOKENS, HIDDEN, VOCABULARY = 30, 8, 24
OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 1e-2},
    "softcap": {"softcap": 5.0},
    "chunks": {"chunk_tokens": 7},
    "all": {"label_smoothing": 0.2, "z_loss": 1e-3, "softcap": 10.0, "reduction": "sum", "ignore_index": 3},
}


def _inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, weight, target (some of it ignored) and bias, of the whole vocabulary."""
    generator = torch.Generator().manual_seed(0)
    x, bias = (torch.randn(*shape, generator=generator) for shape in ((5, 6, HIDDEN), (VOCABULARY,)))
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    target = torch.randint(VOCABULARY, (5, 6), generator=generator)
    target[:, 1::5] = -100
    return x.to(dtype), weight.to(dtype), target, bias.to(dtype)


def _results(tensors: Sequence[Tensor], **options: Any) -> list[Tensor]:
    x, weight, target, bias = tensors
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
    loss = linear_cross_entropy(leaves[0], leaves[1], target, bias=leaves[2], **options)
    loss.backward(torch.tensor(3.0))
    return [loss.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def _own(tensor: Tensor) -> Tensor:
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def _cut_results(rank: int, world: int, dtype: torch.dtype, options: dict[str, Any]) -> list[Tensor]:
    x, weight, target, bias = _inputs(dtype)
    return _results((x, _own(weight), target, _own(bias)), group=dist.group.WORLD, **options)


def _joined(ranks: list[list[Tensor]]) -> list[Tensor]:
    """Return the loss, the gradient of x, and those of the whole weight and bias."""
    for loss, grad_x, _, _ in ranks[1:]:
        torch.testing.assert_close([loss, grad_x], ranks[0][:2], rtol=0.0, atol=0.0, equal_nan=True)
    return [*ranks[0][:2], *(torch.cat([results[index] for results in ranks]) for index in (2, 3))]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", OPTIONS)
def test_loss_and_gradients_are_those_of_the_whole_weight(name: str, size: int) -> None:
    options = OPTIONS[name]
    whole = _results(_without_other_labels(name), **options)
    found = _joined(run(_named, size, name))
    for one, other in zip(found, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)


def _without_other_labels(name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, weight, target, bias = _inputs()
    return x, weight, target.where(target >= 0, 3) if name == "all" else target, bias


def _named(rank: int, world: int, name: str) -> list[Tensor]:
    x, weight, target, bias = _without_other_labels(name)
    return _results((x, _own(weight), target, _own(bias)), group=dist.group.WORLD, **OPTIONS[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_as_close_as_those_of_one_rank(dtype: torch.dtype) -> None:
    exact = _results([tensor.float() if tensor.is_floating_point() else tensor for tensor in _inputs(dtype)])
    whole, found = _results(_inputs(dtype)), _joined(run(_cut_results, 2, dtype, {}))
    for one, other, best in zip(found, whole, exact, strict=True):
        error, allowed = (one.float() - best).abs().max(), (other.float() - best).abs().max()
        assert error <= 2 * allowed + torch.finfo(dtype).eps * best.abs().max()


def _calls(rank: int, world: int, chunk_tokens: int) -> dict[str, int]:
    x, weight, target, bias = _inputs()
    with count_collectives() as ledger:
        _results((x, _own(weight), target, _own(bias)), group=dist.group.WORLD, chunk_tokens=chunk_tokens)
    return dict(ledger.calls)


def test_logits_are_never_sent() -> None:
    """Per chunk of tokens the sizes, the maxima and one sum of three numbers, and the gradient of x once."""
    assert run(_calls, 2, 10) == [{"all_reduce": 3 * 3 + 1}] * 2


def _without_gradients(rank: int, world: int) -> int:
    x, weight, target, bias = _inputs()
    with count_collectives() as ledger, torch.no_grad():
        linear_cross_entropy(x, _own(weight), target, bias=_own(bias), group=dist.group.WORLD)
    return ledger.calls["all_reduce"]


def test_the_gradient_of_x_is_summed_only_where_it_is_needed() -> None:
    assert run(_without_gradients, 2) == [3, 3]


def _special(rank: int, world: int, name: str) -> list[Tensor]:
    x, weight, target, bias = _special_inputs(name)
    return _results((x, _own(weight), target, _own(bias)), group=dist.group.WORLD)


def _special_inputs(name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, weight, target, bias = _inputs()
    padded = VOCABULARY - 6 if name == "padded" else VOCABULARY // 2  # or all words of the second rank
    if name in ("padded", "a rank of -inf"):
        bias[padded:] = -torch.inf
        target = target.clamp(max=padded - 1)
    elif name == "all -inf":
        bias[:] = -torch.inf
    elif name == "inf":
        bias[VOCABULARY - 1] = torch.inf
    elif name == "nan":
        x[0, 0, 0] = torch.nan
    return x, weight, target, bias


@pytest.mark.parametrize("name", ["padded", "a rank of -inf", "all -inf", "inf", "nan"])
def test_values_that_are_not_finite_are_those_of_one_rank(name: str) -> None:
    whole, found = _results(_special_inputs(name)), _joined(run(_special, 2, name))
    for one, other in zip(found, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6, equal_nan=True)


def _refused(rank: int, world: int, name: str) -> None:
    x, weight, target, bias = _inputs()
    if name == "label":
        linear_cross_entropy(x, _own(weight), target + VOCABULARY, group=dist.group.WORLD)
    elif name == "rows":
        linear_cross_entropy(x, weight[: 10 + 2 * rank], target.clamp(0, 9), group=dist.group.WORLD)
    else:
        leaf = x.clone().requires_grad_()
        loss = linear_cross_entropy(leaf, _own(weight), target, group=dist.group.WORLD)
        torch.autograd.grad(loss, leaf, create_graph=True)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("label", r"Labels are 0 to 23, or `ignore_index=-100`"),
        ("rows", r"`weight` has 1. rows on rank . of `group`, and 10 to 12 on its ranks"),
        ("twice", r"`linear_cross_entropy\(group=...\)` has no second derivatives"),
    ],
)
def test_errors_name_the_cause(name: str, words: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=words):
        run(_refused, 2, name)


def _in_parts(rank: int, world: int) -> bool:
    generator = torch.Generator().manual_seed(3)
    logits, target = torch.randn(200, 12, generator=generator), torch.randint(24, (200,), generator=generator)
    terms, factor = Terms(-100, 0.1, 1e-3, 0.0), torch.tensor(0.5)
    rows = CutRows(dist.group.WORLD)  # type: ignore[arg-type]
    whole, losses = logits.clone(), torch.empty(200)
    rows(whole, target, losses, factor, terms)
    found, other = logits.clone(), torch.empty(200)
    with patch.object(cut_cross_entropy, "_PART_NUMEL", 1):
        rows(found, target, other, factor, terms)
    return torch.equal(found, whole) and torch.equal(losses, other)


def test_parts_of_a_chunk_have_the_bits_of_the_chunk() -> None:
    assert run(_in_parts, 2) == [True, True]
