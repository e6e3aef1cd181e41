"""Root mean square norm and layer norm over the last dimension, each with its backward.

Note [Formulas]
    Over a row ``x`` of ``H`` elements, with the gain ``g = weight + offset``::

        rms_norm    m = 0          r = (mean(x^2) + eps)^-1/2          y = (x - m) r g
        layer_norm  m = mean(x)    r = (mean((x - m)^2) + eps)^-1/2    y = (x - m) r g + bias

    With ``h = (x - m) r`` and ``d`` the gradient of ``y``::

        dx = r (d g - h mean(d g h) - mean(d g))      the last term for layer_norm only
        dweight = sum over rows of d h                dbias = sum over rows of d

    One op covers both. Arithmetic is fp32; ``y`` is rounded once, to the promoted dtype of ``x`` and ``weight``.
    RMSNorm: arXiv:1910.07467; LayerNorm: arXiv:1607.06450. ``offset=1`` is Gemma's gain.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_zero_ops.registry import (
    cdiv,
    check_devices,
    define,
    differentiable_gradients,
    jit,
    next_power_of_2,
    on_device_of,
    refuse_transforms,
    tl,
)

__all__ = ["layer_norm", "rms_norm"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# -- Reference ---------------------------------------------------------------------------------------------------------


def _reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float, is_centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    _check(x, weight, bias)
    value = x.float()
    mean = _row_mean(value) if is_centred else value.new_empty(0)
    centred = value - mean.unsqueeze(-1) if is_centred else value
    rstd = torch.rsqrt(centred.square().mean(-1, dtype=torch.float64) + eps).float()
    y = centred * rstd.unsqueeze(-1) * (weight.float() + offset)
    if bias is not None:
        y = y + bias.float()
    return y.to(torch.promote_types(x.dtype, weight.dtype)), mean, rstd


def _row_mean(value: Tensor) -> Tensor:
    """Return the mean of rows, rounded once: its error is common to a row, and not evened out over it."""
    return value.mean(-1, dtype=torch.float64).float()


def _backward_reference(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, offset: float, is_centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    hidden = x.shape[-1]
    grad_y = grad.float()
    centred = x.float() - mean.unsqueeze(-1) if is_centred else x.float()
    normed = centred * rstd.unsqueeze(-1)
    scaled = grad_y * (weight.float() + offset)
    grad_x = scaled - normed * _row_mean(scaled * normed).unsqueeze(-1)
    if is_centred:
        grad_x = grad_x - _row_mean(scaled).unsqueeze(-1)
    grad_weight = (grad_y * normed).reshape(-1, hidden).sum(0)
    grad_bias = grad_y.reshape(-1, hidden).sum(0) if is_centred else grad_y.new_empty(0)
    return (grad_x * rstd.unsqueeze(-1)).to(x.dtype), grad_weight, grad_bias


# -- Tuning space ------------------------------------------------------------------------------------------------------

# A row is one tile, so that it is read once. Not measured on a GPU; chosen from the ahead-of-time reports: at most 16
# elements of every operand in a thread, which spills at no size up to the limit (but for up to 24 bytes of two
# backwards on capability 120 and of one on 100). Of narrow rows, such as those of norms of queries and keys, a tile has
# several, so that loads of as many are in flight. Wider rows than the limit are read in pieces, two or three times.
_MAX_HIDDEN = 8192
_WIDE_BLOCK = 4096
_TILE = 1024
_PROGRAMS_PER_PROCESSOR = 2


def _num_rows(block: int) -> int:
    """Return how many rows of this length a tile has."""
    return max(_TILE // block, 1)


def _num_warps(block: int) -> int:
    return max(_num_rows(block) * block // 512, 1)


# -- Kernels -----------------------------------------------------------------------------------------------------------

# As in `adamw.py`, every operation rounds once: a row of equal values has the mean that they are, to the bit, and what
# cancels in plain PyTorch cancels here.


@jit
def _mean(total, number):  # type: ignore[no-untyped-def]
    return tl.div_rn(total, tl.cast(number, tl.float32))


@jit
def _inverse_root(value):  # type: ignore[no-untyped-def]
    return tl.div_rn(tl.full(value.shape, 1.0, tl.float32), tl.sqrt_rn(value))


@jit
def _norm_kernel(  # type: ignore[no-untyped-def]
    x, weight, bias, y, mean, rstd, num_rows, hidden, eps, offset, CENTRED: tl.constexpr, BIASED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    is_row, is_column = row < num_rows, column < hidden
    inside = is_row[:, None] & is_column
    at = row[:, None] * hidden + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        centre = _mean(tl.sum(value, 1), hidden)
        value = tl.where(inside, value - centre[:, None], 0.0)
        tl.store(mean + row, centre, mask=is_row)
    scale = _inverse_root(_mean(tl.sum(value * value, 1), hidden) + tl.cast(eps, tl.float32))
    tl.store(rstd + row, scale, mask=is_row)
    gain = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32) + tl.cast(offset, tl.float32)
    result = value * scale[:, None] * gain
    if BIASED:
        result += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)
    tl.store(y + at, result.to(y.dtype.element_ty), mask=inside)


@jit
def _norm_backward_kernel(  # type: ignore[no-untyped-def]
    grad, x, weight, mean, rstd, grad_x, partial_weight, partial_bias, num_rows, hidden, offset, rows_per_program,
    CENTRED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    is_column = column < hidden
    gain = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32) + tl.cast(offset, tl.float32)
    sum_weight = tl.zeros([ROWS, BLOCK], tl.float32)
    sum_bias = tl.zeros([ROWS, BLOCK], tl.float32)
    first = program * rows_per_program
    last = tl.minimum(first + rows_per_program, num_rows)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        is_row = row < last
        inside = is_row[:, None] & is_column
        at = row[:, None] * hidden + column
        slope = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        normed = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(rstd + row, mask=is_row, other=0.0)[:, None]
        if CENTRED:
            normed = tl.where(inside, normed - tl.load(mean + row, mask=is_row, other=0.0)[:, None], 0.0)
            sum_bias += slope
        normed *= scale
        sum_weight += slope * normed
        scaled = slope * gain
        result = scaled - normed * _mean(tl.sum(scaled * normed, 1), hidden)[:, None]
        if CENTRED:
            result -= _mean(tl.sum(scaled, 1), hidden)[:, None]
        tl.store(grad_x + at, (result * scale).to(grad_x.dtype.element_ty), mask=inside)
    at = program * hidden + tl.arange(0, BLOCK)
    is_column = tl.arange(0, BLOCK) < hidden
    tl.store(partial_weight + at, tl.sum(sum_weight, 0), mask=is_column)
    if CENTRED:
        tl.store(partial_bias + at, tl.sum(sum_bias, 0), mask=is_column)


@jit
def _wide_norm_kernel(  # type: ignore[no-untyped-def]
    x, weight, bias, y, mean, rstd, num_rows, hidden, eps, offset, CENTRED: tl.constexpr, BIASED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x += row * hidden
    y += row * hidden
    centre = tl.full([], 0.0, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    if CENTRED:
        for start in range(0, hidden, BLOCK):
            column = start + tl.arange(0, BLOCK)
            total += tl.load(x + column, mask=column < hidden, other=0.0).to(tl.float32)
        centre = _mean(tl.sum(total, 0), hidden)
        tl.store(mean + row, centre)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, hidden, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x + column, mask=column < hidden, other=0.0).to(tl.float32) - centre
        squares += tl.where(column < hidden, value * value, 0.0)
    scale = _inverse_root(_mean(tl.sum(squares, 0), hidden) + tl.cast(eps, tl.float32))
    tl.store(rstd + row, scale)
    for start in range(0, hidden, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < hidden
        gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + tl.cast(offset, tl.float32)
        result = (tl.load(x + column, mask=inside, other=0.0).to(tl.float32) - centre) * scale * gain
        if BIASED:
            result += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + column, result.to(y.dtype.element_ty), mask=inside)


@jit
def _wide_norm_backward_kernel(  # type: ignore[no-untyped-def]
    grad, x, weight, mean, rstd, grad_x, partial_weight, partial_bias, num_rows, hidden, offset, rows_per_program,
    CENTRED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    partial_weight += program * hidden
    partial_bias += program * hidden
    first = program * rows_per_program
    for row in range(first, tl.minimum(first + rows_per_program, num_rows)):
        scale = tl.load(rstd + row)
        centre = tl.full([], 0.0, tl.float32)
        if CENTRED:
            centre = tl.load(mean + row)
        along = tl.zeros([BLOCK], tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, hidden, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < hidden
            at = row * hidden + column
            gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + tl.cast(offset, tl.float32)
            scaled = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * gain
            normed = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - centre) * scale
            along += tl.where(inside, scaled * normed, 0.0)
            total += tl.where(inside, scaled, 0.0)
        mean_along = _mean(tl.sum(along, 0), hidden)
        mean_total = _mean(tl.sum(total, 0), hidden)
        for start in range(0, hidden, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < hidden
            at = row * hidden + column
            gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + tl.cast(offset, tl.float32)
            slope = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
            normed = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - centre) * scale
            result = slope * gain - normed * mean_along
            if CENTRED:
                result -= mean_total
                bias_so_far = tl.load(partial_bias + column, mask=inside, other=0.0)
                tl.store(partial_bias + column, bias_so_far + slope, mask=inside)
            tl.store(grad_x + at, (result * scale).to(grad_x.dtype.element_ty), mask=inside)
            so_far = tl.load(partial_weight + column, mask=inside, other=0.0)
            tl.store(partial_weight + column, so_far + slope * normed, mask=inside)


# -- Launchers ---------------------------------------------------------------------------------------------------------


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    shape = x.shape[-1:]
    for name, tensor in {"x": x, "weight": weight, "bias": bias}.items():
        if tensor is None:
            continue
        if tensor.dtype not in _DTYPES:
            raise TypeError(f"`{name}` of a norm has dtype {tensor.dtype}; it takes float32, bfloat16 and float16.")
        if not tensor.is_contiguous():
            raise ValueError(f"`{name}` of a norm must be contiguous, but has strides {tensor.stride()}.")
        if name != "x" and tensor.shape != shape:
            raise ValueError(
                f"`{name}` of a norm must have shape {tuple(shape)} like a row of `x`, got {tuple(tensor.shape)}."
            )


def _kernel_and_block(hidden: int, tiled: Any, wide: Any) -> tuple[Any, int]:
    """Return the kernel for rows of this length, and how many elements of a row it holds at a time."""
    return (tiled, next_power_of_2(hidden)) if hidden <= _MAX_HIDDEN else (wide, _WIDE_BLOCK)


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float, is_centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    _check(x, weight, bias)
    y, mean, rstd = _fake(x, weight, bias, eps, offset, is_centred)
    if x.numel() == 0:
        return y, mean.zero_(), rstd.zero_()
    kernel, block = _kernel_and_block(x.shape[-1], _norm_kernel, _wide_norm_kernel)
    with on_device_of(x):
        kernel[(cdiv(rstd.numel(), _num_rows(block)),)](
            x, weight, weight if bias is None else bias, y, mean, rstd, rstd.numel(), x.shape[-1], eps, offset,
            CENTRED=is_centred, BIASED=bias is not None, ROWS=_num_rows(block), BLOCK=block,
            num_warps=_num_warps(block), enable_fp_fusion=False,
        )  # fmt: skip
    return y, mean, rstd


def _launch_backward(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, offset: float, is_centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    hidden, num_rows = x.shape[-1], rstd.numel()
    grad_x, grad_weight, grad_bias = _fake_backward(grad, x, weight, mean, rstd, offset, is_centred)
    if x.numel() == 0:
        return grad_x, grad_weight.zero_(), grad_bias.zero_()
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2
    kernel, block = _kernel_and_block(hidden, _norm_backward_kernel, _wide_norm_backward_kernel)
    num_tiles = cdiv(num_rows, _num_rows(block))
    rows_per_program = cdiv(num_tiles, processors * _PROGRAMS_PER_PROCESSOR) * _num_rows(block)
    num_programs = cdiv(num_rows, rows_per_program)
    partial_weight = grad_weight.new_empty(num_programs, hidden)
    partial_bias = grad_weight.new_empty(num_programs, hidden if is_centred else 0)
    if hidden > _MAX_HIDDEN:  # that kernel adds to them
        partial_weight.zero_()
        partial_bias.zero_()
    with on_device_of(x):
        kernel[(num_programs,)](
            grad, x, weight, mean, rstd, grad_x, partial_weight, partial_bias, num_rows, hidden, offset,
            rows_per_program, CENTRED=is_centred, ROWS=_num_rows(block), BLOCK=block, num_warps=_num_warps(block),
            enable_fp_fusion=False,
        )  # fmt: skip
    return grad_x, partial_weight.sum(0), partial_bias.sum(0)


# -- Registration ------------------------------------------------------------------------------------------------------


def _fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float, is_centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
    mean = torch.empty_like(rstd) if is_centred else rstd.new_empty(0)
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype)), mean, rstd


def _fake_backward(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, offset: float, is_centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    grad_weight = weight.new_empty(weight.shape, dtype=torch.float32)
    return torch.empty_like(x), grad_weight, grad_weight.new_empty(weight.shape if is_centred else 0)


_backward_op = define(
    "norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor mean, Tensor rstd, float offset, bool is_centred)"
    " -> (Tensor, Tensor, Tensor)",
    reference=_backward_reference,
    launcher=_launch_backward,
    fake=_fake_backward,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, bias, ctx.eps, ctx.offset, ctx.is_centred = inputs
    _, mean, rstd = output
    ctx.save_for_backward(x, weight, bias, mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, bias, mean, rstd = ctx.saved_tensors
    if grad is None:
        return (None,) * 6
    if torch.is_grad_enabled():

        def again(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return _reference(x, weight, bias, ctx.eps, ctx.offset, ctx.is_centred)[0]

        return *differentiable_gradients(again, (x, weight, bias), grad), None, None, None
    grad_x, grad_weight, grad_bias = _backward_op(grad.contiguous(), x, weight, mean, rstd, ctx.offset, ctx.is_centred)
    return grad_x, grad_weight.to(weight.dtype), None if bias is None else grad_bias.to(bias.dtype), None, None, None


_op = define(
    "norm(Tensor x, Tensor weight, Tensor? bias, float eps, float offset, bool is_centred) -> (Tensor, Tensor, Tensor)",
    reference=_reference,
    launcher=_launch,
    fake=_fake,
    backward=_backward,
    setup_context=_setup_context,
)

# -- Public functions --------------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, *, eps: float = 1e-6, offset: float = 0.0) -> Tensor:
    """Divide rows by their root mean square and multiply them by ``weight + offset``.

    Args:
        x: ``(..., H)``, fp32, bf16 or fp16.
        weight: ``(H,)``, fp32, bf16 or fp16.
        eps: Added to the mean square.
        offset: Added to the weight; 1 for Gemma.

    Returns:
        ``(..., H)`` in the promoted dtype of ``x`` and ``weight``. Second derivatives are those of plain PyTorch.

    Raises:
        TypeError: Another dtype.
        ValueError: Shapes that do not fit, tensors on several devices.
    """
    check_devices("rms_norm", x=x, weight=weight)
    refuse_transforms("rms_norm", x, weight)
    y: Tensor = _op(x.contiguous(), weight.contiguous(), None, eps, offset, False)[0]
    return y


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    """Take rows to mean 0 and variance 1, multiply them by ``weight`` and add ``bias``.

    Args:
        x: ``(..., H)``, fp32, bf16 or fp16.
        weight: ``(H,)``, fp32, bf16 or fp16.
        bias: As ``weight``, or None.
        eps: Added to the variance.

    Returns:
        ``(..., H)`` in the promoted dtype of ``x`` and ``weight``. Second derivatives are those of plain PyTorch.

    Raises:
        TypeError: Another dtype.
        ValueError: Shapes that do not fit, tensors on several devices.
    """
    check_devices("layer_norm", x=x, weight=weight, bias=bias)
    refuse_transforms("layer_norm", x, weight, bias)
    y: Tensor = _op(x.contiguous(), weight.contiguous(), None if bias is None else bias.contiguous(), eps, 0.0, True)[0]
    return y
