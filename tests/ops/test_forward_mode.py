"""Ops refuse tensors that have a tangent, which PyTorch would drop without a word, and transforms it cannot make."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from lightning_zero_ops import (
    apply_rotary,
    geglu,
    grouped_linear,
    layer_norm,
    linear_cross_entropy,
    permute_tokens,
    quantize_blockwise,
    rms_norm,
    round_stochastic,
    swiglu,
    unpermute_tokens,
)

X, W = torch.randn(4, 8), torch.ones(8)
OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "rms_norm": lambda x: rms_norm(x, W),
    "layer_norm": lambda x: layer_norm(x, W, W),
    "swiglu": lambda x: swiglu(X, x),
    "geglu": lambda x: geglu(x, X),
    "apply_rotary": lambda x: apply_rotary(x.view(1, 1, 4, 8), X[None], X[None]),
    "linear_cross_entropy": lambda x: linear_cross_entropy(X, x, torch.zeros(4, dtype=torch.int64)),
    "quantize_blockwise": lambda x: quantize_blockwise(x.view(-1))[1],
    "round_stochastic": lambda x: round_stochastic(x.view(-1), 0),
    "grouped_linear": lambda x: grouped_linear(X, x.view(1, 4, 8), None, torch.tensor([4], dtype=torch.int32)),
    "permute_tokens": lambda x: permute_tokens(x, torch.arange(4), torch.arange(4).view(4, 1)),
    "unpermute_tokens": lambda x: unpermute_tokens(x, None, torch.arange(4), torch.arange(4).view(4, 1)),
}


@pytest.mark.parametrize("op", OPS)
def test_tangents_are_refused(op: str) -> None:
    """Their derivatives were zero."""
    with forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match=f"`{op}` has no forward-mode derivative"):
            OPS[op](forward_ad.make_dual(X, torch.ones_like(X)))
        assert OPS[op](X).numel()
    with pytest.raises(NotImplementedError, match=f"`{op}` has no forward-mode derivative"):
        torch.func.jvp(OPS[op], (X,), (torch.ones_like(X),))


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], object]]] = {
    "grad": torch.func.grad,
    "jacrev": torch.func.jacrev,
    "hessian": lambda function: torch.func.jacrev(torch.func.jacrev(function)),
    "vmap of grad": lambda function: lambda x: torch.vmap(torch.func.grad(function))(x[None]),
    "grad of vmap": lambda function: torch.func.grad(lambda x: torch.vmap(function)(x[None]).sum()),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("op", list(OPS)[:6])
def test_functional_gradients_are_refused(op: str, transform: str) -> None:
    """PyTorch's error spoke of `setup_context`."""
    with pytest.raises(NotImplementedError, match=f"`{op}` does not run under `torch.func.grad`"):
        TRANSFORMS[transform](lambda x: OPS[op](x).sum())(X)
    assert OPS[op](X).numel()
    assert torch.func.grad(lambda x: (x * OPS[op](X).sum()).sum())(X).shape == X.shape


@pytest.mark.parametrize("op", list(OPS)[:6])
def test_batches_have_the_gradients_of_their_parts(op: str) -> None:
    parts = torch.stack([X, 2 * X]).requires_grad_()
    batch, single = torch.vmap(OPS[op])(parts), torch.stack([OPS[op](x) for x in parts])
    torch.testing.assert_close(batch, single)
    found, expected = (torch.autograd.grad(one.square().sum(), parts)[0] for one in (batch, single))
    torch.testing.assert_close(found, expected)
