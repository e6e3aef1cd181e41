"""Rotary position embedding of queries and keys; its backward is the op itself.

Note [Formula]
    With the halves of a head ``x = (x1, x2)``, ``cos = (c1, c2)`` and ``sin = (s1, s2)``, after RoFormer
    (arXiv:2104.09864) in the layout of Hugging Face's models::

        y1 = x1 c1 - x2 s1        y2 = x2 c2 + x1 s2

    The gradient is the same map with ``(-s2, -s1)`` for ``sin``, so every derivative is one pass of one kernel.
    Arithmetic is fp32, the result is rounded once.

Note [Strides]
    Heads come out of a projection as ``(B, S, heads, D)`` and are used as ``(B, heads, S, D)``, a transposed view. The
    kernel takes any strides whose last is 1, and the result has those of the input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_zero_ops.registry import check_devices, define, jit, next_power_of_2, on_device_of, refuse_transforms, tl

__all__ = ["apply_rotary"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# -- Reference ---------------------------------------------------------------------------------------------------------


def _reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    _check(x, cos, sin)
    first, second = x.float().chunk(2, -1)
    cos_first, cos_second = cos.float().unsqueeze(1).chunk(2, -1)
    sin_first, sin_second = sin.float().unsqueeze(1).chunk(2, -1)
    y = torch.empty_like(x)
    y_first, y_second = y.chunk(2, -1)
    y_first.copy_(first * cos_first - second * sin_first)
    y_second.copy_(second * cos_second + first * sin_second)
    return y


# -- Tuning space ------------------------------------------------------------------------------------------------------

# A program turns up to 32 heads of one token, so that cos and sin are read once for them. Not measured on a GPU.
_MAX_HEADS = 32
_NUM_WARPS = 4

# -- Kernel ------------------------------------------------------------------------------------------------------------


@jit
def _rotary_kernel(  # type: ignore[no-untyped-def]
    x,
    cos,
    sin,
    y,
    num_heads,
    num_tokens,
    half,
    x_batch,
    x_head,
    x_token,
    y_batch,
    y_head,
    y_token,
    cos_batch,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    batch = (tl.program_id(0) // num_tokens).to(tl.int64)
    token = (tl.program_id(0) % num_tokens).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None].to(tl.int64)
    element = tl.arange(0, HALF)[None, :]
    inside = (head < num_heads) & (element < half)
    at = batch * cos_batch + token * (2 * half) + element
    cos_first = tl.load(cos + at, mask=element < half, other=0.0).to(tl.float32)
    cos_second = tl.load(cos + at + half, mask=element < half, other=0.0).to(tl.float32)
    sin_first = tl.load(sin + at, mask=element < half, other=0.0).to(tl.float32)
    sin_second = tl.load(sin + at + half, mask=element < half, other=0.0).to(tl.float32)
    at_x = x + batch * x_batch + head * x_head + token * x_token + element
    first = tl.load(at_x, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at_x + half, mask=inside, other=0.0).to(tl.float32)
    at_y = y + batch * y_batch + head * y_head + token * y_token + element
    tl.store(at_y, (first * cos_first - second * sin_first).to(y.dtype.element_ty), mask=inside)
    tl.store(at_y + half, (second * cos_second + first * sin_second).to(y.dtype.element_ty), mask=inside)


# -- Launcher ----------------------------------------------------------------------------------------------------------


def _check(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    if x.dim() != 4 or x.shape[-1] % 2:
        raise ValueError(f"`x` must have shape (B, heads, S, D) with an even D, got {tuple(x.shape)}.")
    shapes = [(batch, x.shape[2], x.shape[3]) for batch in (x.shape[0], 1)]
    for name, tensor in {"x": x, "cos": cos, "sin": sin}.items():
        if tensor.dtype not in _DTYPES:
            raise TypeError(f"`{name}` has dtype {tensor.dtype}; rotary takes float32, bfloat16 and float16.")
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(
                f"The last dimension of `{name}` must be contiguous, but its strides are {tensor.stride()}."
            )
        if name != "x" and tuple(tensor.shape) not in shapes:
            raise ValueError(
                f"`{name}` must have shape {shapes[0]} or {shapes[1]} to turn all of `x`, got {tuple(tensor.shape)}."
                " Turn a part of the head by passing that part."
            )
        if name != "x" and not tensor.is_contiguous():
            raise ValueError(f"`{name}` must be contiguous, but has strides {tensor.stride()}.")
    if cos.shape != sin.shape:
        raise ValueError(f"`cos` and `sin` must have one shape, got {tuple(cos.shape)} and {tuple(sin.shape)}.")


def _launch(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    _check(x, cos, sin)
    y = torch.empty_like(x)
    if y.numel() == 0:
        return y
    batch, num_heads, num_tokens, size = x.shape
    heads = min(next_power_of_2(num_heads), _MAX_HEADS)
    with on_device_of(x):
        _rotary_kernel[(batch * num_tokens, -(-num_heads // heads))](
            x,
            cos,
            sin,
            y,
            num_heads,
            num_tokens,
            size // 2,
            *x.stride()[:3],
            *y.stride()[:3],
            cos.stride(0) if cos.shape[0] > 1 else 0,
            HEADS=heads,
            HALF=next_power_of_2(size // 2),
            num_warps=_NUM_WARPS,
        )
    return y


# -- Registration ------------------------------------------------------------------------------------------------------


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    _, cos, sin = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    cos, sin = ctx.saved_tensors
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    return _op(grad, cos, -sin.unflatten(-1, (2, -1)).flip(-2).flatten(-2)), None, None


_op = define(
    "rotary(Tensor x, Tensor cos, Tensor sin) -> Tensor",
    reference=_reference,
    launcher=_launch,
    fake=lambda x, cos, sin: torch.empty_like(x),
    backward=_backward,
    setup_context=_setup_context,
)

# -- Public function ---------------------------------------------------------------------------------------------------


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn queries or keys by their positions.

    Args:
        x: ``(B, heads, S, D)``, fp32, bf16 or fp16; strides as they come, with the last dimension contiguous.
        cos: ``(B, S, D)`` or ``(1, S, D)``; both halves of the last dimension count, as in Hugging Face's models.
        sin: As ``cos``.

    Returns:
        Shape, dtype and strides of ``x``. All derivatives by ``x``; none by ``cos`` and ``sin``.

    Raises:
        TypeError: Another dtype.
        ValueError: Shapes or strides that do not fit; ``cos`` or ``sin`` that require gradients.
    """
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise ValueError("`cos` and `sin` have no gradients here, but require them. Make them under `torch.no_grad()`.")
    check_devices("apply_rotary", x=x, cos=cos, sin=sin)
    refuse_transforms("apply_rotary", x, cos, sin)
    y: Tensor = _op(x, cos.contiguous(), sin.contiguous())
    return y
