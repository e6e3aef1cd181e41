"""The ops that are timed beside their peers, their tensors, and the bytes that each must move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.turns import device
from lightning_zero_ops import (
    apply_rotary,
    dequantize_blockwise,
    geglu,
    layer_norm,
    quantize_blockwise,
    rms_norm,
    swiglu,
)

__all__ = ["Contest", "contests"]

_BLOCK = 256  # of quantization
_HIDDEN = 4096
_HEADS, _HEAD = 32, 128
_EPS = 1e-6

_Function = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Contest:
    """An op and its peers, as functions of the same inputs.

    Args:
        op: Name.
        inputs: Those that require gradients get some where the op has a backward.
        ours: The op.
        plain: The same in plain PyTorch, to be compiled.
        liger: Name of the function in ``liger_kernel.transformers.functional``, and how it is called; None: there is
            none.
        nbytes: Bytes that must be read or written once; of forward, and of forward and backward, 0 without backward.
    """

    op: str
    inputs: tuple[Tensor, ...]
    ours: _Function
    plain: _Function
    liger: tuple[str, Callable[[_Function], _Function]] | None
    nbytes: tuple[int, int]

    def in_fp32(self) -> Contest:
        """Return the contest with inputs in 16 bits widened."""
        widened = (
            one.detach().float().requires_grad_(one.requires_grad)
            if one.dtype in (torch.bfloat16, torch.float16)
            else one
            for one in self.inputs
        )
        return replace(self, inputs=tuple(widened))

    @property
    def shape(self) -> str:
        """The first input's."""
        return "x".join(str(size) for size in self.inputs[0].shape)

    @property
    def dtype(self) -> str:
        """The first input's."""
        return str(self.inputs[0].dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")


def contests(numel: int, dtype: torch.dtype = torch.bfloat16) -> Iterator[Contest]:
    """Yield the contests over about ``numel`` elements."""
    generator = torch.Generator(device()).manual_seed(0)
    random = partial(torch.randn, generator=generator, device=device(), dtype=dtype)
    yield from _quantizations(random(max(numel // _BLOCK, 1) * _BLOCK))
    tokens = max(numel // _HIDDEN, 1)
    yield from _norms(*(random(size).requires_grad_() for size in ((tokens, _HIDDEN), (_HIDDEN,), (_HIDDEN,))))
    yield from _gated(*(random((tokens, _HIDDEN)).requires_grad_() for _ in range(2)))
    angles = torch.rand((1, tokens, _HEAD // 2), generator=generator, device=device()).mul(6.0).repeat(1, 1, 2)
    query, key = (random((1, tokens, heads, _HEAD)).requires_grad_() for heads in (_HEADS, _HEADS // 4))
    yield _rotary(query, key, angles.cos().to(dtype), angles.sin().to(dtype))


def _quantizations(x: Tensor) -> Iterator[Contest]:
    def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
        blocks = x.float().view(-1, _BLOCK)
        scales = (blocks.abs().amax(1) / 127.0).clamp(min=2.0**-126)
        return (blocks / scales.unsqueeze(1)).round().to(torch.int8).view(-1), scales

    def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
        return (codes.view(-1, _BLOCK).float() * scales.unsqueeze(1)).view(-1).to(x.dtype)

    codes, scales = quantize(x)
    nbytes = (x.nbytes + codes.nbytes + scales.nbytes, 0)
    yield Contest(op="quantize", inputs=(x,), ours=quantize_blockwise, plain=quantize, liger=None, nbytes=nbytes)
    ours = partial(dequantize_blockwise, numel=x.numel(), dtype=x.dtype)
    yield Contest(op="dequantize", inputs=(codes, scales), ours=ours, plain=dequantize, liger=None, nbytes=nbytes)


def _norms(x: Tensor, weight: Tensor, bias: Tensor) -> Iterator[Contest]:
    hidden = weight.shape
    yield Contest(
        op="rms_norm",
        inputs=(x, weight),
        ours=partial(rms_norm, eps=_EPS),
        plain=lambda x, weight: F.rms_norm(x, hidden, weight, _EPS),
        liger=("liger_rms_norm", lambda norm: partial(norm, eps=_EPS, in_place=False)),
        nbytes=(2 * x.nbytes, 5 * x.nbytes),
    )
    yield Contest(
        op="layer_norm",
        inputs=(x, weight, bias),
        ours=partial(layer_norm, eps=_EPS),
        plain=lambda x, weight, bias: F.layer_norm(x, hidden, weight, bias, _EPS),
        liger=("liger_layer_norm", lambda norm: partial(norm, eps=_EPS)),
        nbytes=(2 * x.nbytes, 5 * x.nbytes),
    )


def _gated(gate: Tensor, up: Tensor) -> Iterator[Contest]:
    plain = {"swiglu": F.silu, "geglu": partial(F.gelu, approximate="tanh")}
    for op, ours in {"swiglu": swiglu, "geglu": geglu}.items():
        yield Contest(
            op=op,
            inputs=(gate, up),
            ours=ours,
            plain=partial(_gate, plain[op]),
            liger=(f"liger_{op}", lambda gated: gated),
            nbytes=(3 * gate.nbytes, 8 * gate.nbytes),
        )


def _gate(activation: _Function, gate: Tensor, up: Tensor) -> Tensor:
    return activation(gate) * up


def _rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Contest:
    """Queries and keys are (B, S, heads, D), as a projection leaves them."""

    def ours(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return apply_rotary(query.transpose(1, 2), cos, sin), apply_rotary(key.transpose(1, 2), cos, sin)

    def plain(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        return tuple(_turned(x.transpose(1, 2), cos.unsqueeze(1), sin.unsqueeze(1)) for x in (query, key))

    def transposed(rope: _Function) -> _Function:
        return lambda query, key, cos, sin: rope(query.transpose(1, 2), key.transpose(1, 2), cos, sin)

    once = 2 * (query.nbytes + key.nbytes) + 2 * (cos.nbytes + sin.nbytes)
    return Contest(
        op="rotary",
        inputs=(query, key, cos, sin),
        ours=ours,
        plain=plain,
        liger=("liger_rope", transposed),
        nbytes=(once, 2 * once),
    )


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _widened(tensor: Tensor) -> Tensor:
    is_narrow = tensor.dtype in (torch.bfloat16, torch.float16)
    return tensor.detach().float().requires_grad_(tensor.requires_grad) if is_narrow else tensor
