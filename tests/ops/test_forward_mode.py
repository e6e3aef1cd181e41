"""Ops without a forward-mode derivative refuse tensors that have a tangent: PyTorch would drop it without a word."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from lightning_zero_ops import (
    apply_rotary,
    geglu,
    layer_norm,
    linear_cross_entropy,
    quantize_blockwise,
    rms_norm,
    round_stochastic,
    swiglu,
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
