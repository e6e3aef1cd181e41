from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from lightning_zero_ops import causal_attention
from tests.ops.accuracy import assert_close, fresh

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Queries, keys, heads, groups.
SHAPES = {"square": (7, 7, 4, 4), "grouped": (7, 7, 4, 2), "one-query": (1, 9, 4, 2), "behind-a-cache": (3, 9, 4, 1)}


def _inputs(shape: tuple[int, int, int, int], dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
    queries, keys, heads, groups = shape
    sizes = [(2, heads, queries, 8), (2, groups, keys, 8), (2, groups, keys, 8)]
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def _plain(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None) -> Tensor:
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    allowed = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
    return scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ value


def _torchs(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Call torch with everything spelled out: heads repeated, a mask tensor."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask)


def _with_gradients(function: Any, inputs: list[Tensor], **options: Any) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    y = function(*leaves, **options)
    weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)
    return [y.detach(), *torch.autograd.grad(y, leaves, weights)]


def _joined(results: Iterable[list[Tensor]]) -> list[Tensor]:
    return [torch.cat(parts) for parts in zip(*results, strict=True)]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_and_its_gradients_are_as_exact_as_pytorch(dtype: str, shape: Any) -> None:
    generator = fresh()
    draws = [_inputs(shape, DTYPES[dtype], generator) for _ in range(20)]
    exact = _joined(_with_gradients(_plain, [tensor.double() for tensor in draw]) for draw in draws)
    plain = _joined(_with_gradients(_torchs, draw) for draw in draws)
    found = _joined(_with_gradients(causal_attention, draw) for draw in draws)
    for ours, plain_one, exact_one in zip(found, plain, exact, strict=True):
        assert_close(ours, exact_one, plain_one, is_reduction=True)


def test_scale_is_honoured() -> None:
    inputs = _inputs(SHAPES["grouped"], torch.float32, torch.Generator().manual_seed(0))
    torch.testing.assert_close(causal_attention(*inputs, scale=0.7), _plain(*inputs, scale=0.7))


def test_dropout_drops() -> None:
    inputs = _inputs(SHAPES["square"], torch.float32, torch.Generator().manual_seed(0))
    assert not torch.equal(causal_attention(*inputs, dropout_p=0.5), causal_attention(*inputs))


def test_strides_do_not_matter() -> None:
    inputs = _inputs(SHAPES["square"], torch.float32, torch.Generator().manual_seed(0))
    strided = [tensor.mT.contiguous().mT for tensor in inputs]
    torch.testing.assert_close(causal_attention(*strided), causal_attention(*inputs))


@pytest.mark.parametrize("shape", [SHAPES["square"], SHAPES["grouped"], SHAPES["one-query"]], ids=str)
def test_torch_takes_a_kernel_that_holds_no_scores(shape: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asks torch which kernel it takes for the arguments that it gets."""
    import lightning_zero_ops.attention as attention

    taken = []

    def ask(query: Tensor, key: Tensor, value: Tensor, mask: Any, dropout_p: float, **options: Any) -> Tensor:
        taken.append(torch._fused_sdp_choice(query, key, value, mask, dropout_p, **options))
        return query

    monkeypatch.setattr(attention, "scaled_dot_product_attention", ask)
    causal_attention(*_inputs(shape, torch.float32, torch.Generator().manual_seed(0)))
    assert [SDPBackend(choice) for choice in taken] == [SDPBackend.FLASH_ATTENTION]


Q, K = torch.ones(2, 4, 7, 8), torch.ones(2, 2, 7, 8)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((Q[0], K, K), r"must have shape \(B, heads, S, D\)"),
        ((Q, K, K[:, :1]), "do not fit each other"),
        ((Q, K[..., :4], K[..., :4]), "do not fit each other"),
        ((Q[:, :3], K, K), r"The heads of `key` \(2\) must divide those of `query` \(3\)"),
        ((Q, K[:, :, :5], K[:, :, :5]), "`query` has 7 positions and `key` only 5"),
    ],
)
def test_wrong_shapes_are_refused(inputs: tuple[Tensor, Tensor, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        causal_attention(*inputs)


def test_attention_compiles_into_one_graph() -> None:
    for shape in (SHAPES["grouped"], SHAPES["one-query"]):
        inputs = _inputs(shape, torch.float32, torch.Generator().manual_seed(0))
        step = torch.compile(causal_attention, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(step(*inputs), causal_attention(*inputs))
