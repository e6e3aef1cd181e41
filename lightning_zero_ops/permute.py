"""Rows of tokens in the order of their experts, and back as a weighted sum, each with its backward.

Note [Slots]
    A router gives each of ``T`` tokens ``k`` *slots*, one per expert that it chose; the slot ``j`` of token ``t`` has
    the number ``t k + j``. Sorted by expert the slots are the ``M`` *permuted rows*. ``slots[i]`` is the slot of the
    permuted row ``i``, ``rows[t, j]`` the permuted row of a slot; -1 stands for a row without a slot, whose values are
    zeros, and for a slot without a row, whose token was dropped.

Note [Formulas]
    With ``x`` the tokens, ``y`` the permuted rows, ``w`` the weights of slots::

        permute     y[i] = x[slots[i] // k]
        unpermute   x[t] = sum over j of w[t, j] y[rows[t, j]]

    The backward of either map without weights is the other one. With weights, and ``d`` the gradient of ``x``::

        dy[i] = w[slots[i]] d[slots[i] // k]      dw[slots[i]] = <d[slots[i] // k], y[i]>

    Every result is written by one program in a fixed order, so nothing is atomic and bits do not change from run to
    run. Arithmetic is fp32 (fp64 for fp64 tensors, in plain PyTorch), results are rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

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

__all__ = ["permute_tokens", "unpermute_tokens"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# -- Reference ---------------------------------------------------------------------------------------------------------


def _permute_reference(x: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
    _check(x, slots, rows)
    if not len(x):
        return x.new_zeros(len(slots), x.shape[1])
    y = x.index_select(0, _tokens(slots, rows))
    return y.masked_fill_((slots < 0).unsqueeze(1), 0.0) if _has_gaps(slots) else y


def _unpermute_reference(y: Tensor, weights: Tensor | None, slots: Tensor, rows: Tensor) -> Tensor:
    _check(y, slots, rows, weights, is_permuted=True)
    if not len(y) or not len(rows):
        return y.new_zeros(len(rows), y.shape[1])
    if y.is_cpu and y.dtype in (torch.float32, torch.float64):
        return _bags(y, weights, rows)
    x = y.new_empty(len(rows), y.shape[1])
    for piece in _pieces(x):
        x[piece] = _plain(y, None if weights is None else weights[piece], rows[piece])
    return x


def _bags(y: Tensor, weights: Tensor | None, rows: Tensor) -> Tensor:
    """Add rows with PyTorch's kernel for bags of embeddings, which copies none."""
    factors = None if weights is None else weights.to(y.dtype)
    if not _has_gaps(rows):
        return F.embedding_bag(rows, y, per_sample_weights=factors, mode="sum")
    found = rows >= 0
    starts = found.sum(1).cumsum(0).roll(1)
    starts[0] = 0
    factors = None if factors is None else factors[found]
    return F.embedding_bag(rows[found], y, starts, per_sample_weights=factors, mode="sum")


def _plain(y: Tensor, weights: Tensor | None, rows: Tensor) -> Tensor:
    """Return the sums of rows; every operation has derivatives of its own."""
    picked = y.index_select(0, rows.clamp(min=0).view(-1)).view(*rows.shape, -1).to(_arithmetic(y))
    picked = torch.where((rows < 0).unsqueeze(-1), picked.new_zeros(()), picked)
    if weights is not None:
        picked = picked * weights.to(picked.dtype).unsqueeze(-1)
    return picked.sum(1).to(y.dtype)


def _unpermute_backward_reference(
    grad: Tensor, y: Tensor, weights: Tensor, slots: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    if not len(grad) or not len(y):
        return torch.zeros_like(y), torch.zeros_like(weights)
    grad_y = torch.empty_like(y)
    along = weights.new_empty(len(y), dtype=_arithmetic(y))
    has_gaps, tokens = _has_gaps(slots), _tokens(slots, rows)
    factors = weights.view(-1)[slots.clamp(min=0)].to(along.dtype).unsqueeze(1)
    for piece in _pieces(y):
        slope, value = grad.index_select(0, tokens[piece]).to(along.dtype), y[piece].to(along.dtype)
        torch.sum(slope * value, 1, out=along[piece])
        slope *= factors[piece]
        grad_y[piece] = slope.masked_fill_((slots[piece] < 0).unsqueeze(1), 0.0) if has_gaps else slope
    picked = along[rows.clamp(min=0).view(-1)].view(rows.shape)
    return grad_y, picked.masked_fill_(rows < 0, 0.0).to(weights.dtype)


def _arithmetic(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _tokens(slots: Tensor, rows: Tensor) -> Tensor:
    """Return the token of every permuted row: 0 for one without a slot."""
    return torch.div(slots.clamp(min=0), rows.shape[1], rounding_mode="floor")


def _has_gaps(index: Tensor) -> bool:
    """Whether there may be -1 in an index: on a CPU the answer is exact, elsewhere nobody waits for it."""
    return not index.is_cpu or bool((index < 0).any())


# So that values between input and result stay in a cache of 1 MB.
_CPU_CHUNK = 65536


def _pieces(rows: Tensor) -> Iterator[slice]:
    """Yield ranges of rows: short ones on a CPU, elsewhere all at once."""
    step = max(_CPU_CHUNK // max(rows.shape[1], 1), 1) if rows.is_cpu else max(len(rows), 1)
    for start in range(0, len(rows), step):
        yield slice(start, min(start + step, len(rows)))


# -- Tuning space ------------------------------------------------------------------------------------------------------

# A tile has 1024 elements: of one row, or of several narrow ones, so that loads of as many are in flight. 8 elements
# per thread are one 128-bit load of a 16-bit tensor. Not measured on a GPU.
_TILE = 1024
_NUM_WARPS = 4


def _block(hidden: int) -> int:
    return min(next_power_of_2(hidden), _TILE)


# -- Kernels -----------------------------------------------------------------------------------------------------------


@jit
def _permute_kernel(x, slots, y, num_rows, hidden, k, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < num_rows)[:, None] & (column < hidden)
    slot = tl.load(slots + row, mask=row < num_rows, other=-1)
    token = (tl.maximum(slot, 0) // k)[:, None]
    value = tl.load(x + token * hidden + column, mask=inside & (slot >= 0)[:, None], other=0.0)
    tl.store(y + row[:, None] * hidden + column, value, mask=inside)


@jit
def _unpermute_kernel(  # type: ignore[no-untyped-def]
    y, weights, rows, x, num_tokens, hidden, k, WEIGHTED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_token = token < num_tokens
    inside = is_token[:, None] & (column < hidden)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for choice in range(0, k):
        row = tl.load(rows + token * k + choice, mask=is_token, other=-1)
        at = tl.maximum(row, 0)[:, None] * hidden + column
        value = tl.load(y + at, mask=inside & (row >= 0)[:, None], other=0.0).to(tl.float32)
        if WEIGHTED:
            weight = tl.load(weights + token * k + choice, mask=is_token & (row >= 0), other=0.0).to(tl.float32)
            value = value * weight[:, None]
        total += value
    tl.store(x + token[:, None] * hidden + column, total.to(x.dtype.element_ty), mask=inside)


@jit
def _unpermute_backward_kernel(  # type: ignore[no-untyped-def]
    grad, y, weights, slots, grad_y, grad_weights, num_rows, hidden, k, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + row, mask=row < num_rows, other=-1)
    is_slot = slot >= 0
    slot = tl.maximum(slot, 0)
    token = (slot // k)[:, None]
    weight = tl.load(weights + slot, mask=is_slot, other=0.0).to(tl.float32)[:, None]
    along = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, hidden, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        inside = (row < num_rows)[:, None] & (column < hidden)
        found = inside & is_slot[:, None]
        at = row[:, None] * hidden + column
        slope = tl.load(grad + token * hidden + column, mask=found, other=0.0).to(tl.float32)
        along += slope * tl.load(y + at, mask=found, other=0.0).to(tl.float32)
        value = tl.where(found, slope * weight, 0.0)
        tl.store(grad_y + at, value.to(grad_y.dtype.element_ty), mask=inside)
    tl.store(grad_weights + slot, tl.sum(along, 1).to(grad_weights.dtype.element_ty), mask=is_slot)


# -- Launchers ---------------------------------------------------------------------------------------------------------


def _check(
    tensor: Tensor, slots: Tensor, rows: Tensor, weights: Tensor | None = None, *, is_permuted: bool = False
) -> None:
    name = "y" if is_permuted else "x"
    if tensor.dtype not in _DTYPES:
        raise TypeError(f"`{name}` has dtype {tensor.dtype}; rows are float32, bfloat16, float16 or float64.")
    for index, dim in (("slots", slots.dim() == 1), ("rows", rows.dim() == 2)):
        if not dim or {"slots": slots, "rows": rows}[index].dtype != torch.int64:
            raise ValueError(
                f"`slots` must be int64 of shape (M,) and `rows` int64 of shape (T, k), got {slots.dtype} of"
                f" {tuple(slots.shape)} and {rows.dtype} of {tuple(rows.shape)}."
            )
    expected = len(slots) if is_permuted else len(rows)
    if tensor.dim() != 2 or len(tensor) != expected:
        raise ValueError(f"`{name}` must have shape ({expected}, H) like its index, got {tuple(tensor.shape)}.")
    if weights is not None and (weights.shape != rows.shape or weights.dtype not in _DTYPES):
        raise ValueError(
            f"`weights` must be floating-point and have the shape of `rows`, {tuple(rows.shape)}, got {weights.dtype}"
            f" of {tuple(weights.shape)}."
        )
    for label, one in {name: tensor, "slots": slots, "rows": rows, "weights": weights}.items():
        if one is not None and not one.is_contiguous():
            raise ValueError(f"`{label}` must be contiguous, but has strides {one.stride()}.")


def _launch_permute(x: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
    if x.dtype == torch.float64 or not len(x):
        return _permute_reference(x, slots, rows)
    _check(x, slots, rows)
    y = x.new_empty(len(slots), x.shape[1])
    _run(_permute_kernel, len(y), x.shape[1], x, slots, y, len(y), x.shape[1], rows.shape[1])
    return y


def _launch_unpermute(y: Tensor, weights: Tensor | None, slots: Tensor, rows: Tensor) -> Tensor:
    if y.dtype == torch.float64 or not len(y):
        return _unpermute_reference(y, weights, slots, rows)
    _check(y, slots, rows, weights, is_permuted=True)
    x = y.new_empty(len(rows), y.shape[1])
    given = y if weights is None else weights
    place = (len(x), y.shape[1], rows.shape[1])
    _run(_unpermute_kernel, len(x), y.shape[1], y, given, rows, x, *place, WEIGHTED=weights is not None)
    return x


def _launch_unpermute_backward(
    grad: Tensor, y: Tensor, weights: Tensor, slots: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    if y.dtype == torch.float64 or not y.numel():
        return _unpermute_backward_reference(grad, y, weights, slots, rows)
    grad_y, grad_weights = torch.empty_like(y), torch.zeros_like(weights)
    tensors = (grad, y, weights, slots, grad_y, grad_weights)
    hidden = y.shape[1]
    _run(_unpermute_backward_kernel, len(y), _block(hidden), *tensors, len(y), hidden, rows.shape[1])
    return grad_y, grad_weights


def _run(kernel: Any, num_rows: int, columns: int, first: Tensor, *rest: Any, **constants: Any) -> None:
    """Run a kernel on the tiles of ``num_rows`` rows; the widest tile has all ``columns``, or as many as fit."""
    if not num_rows or not columns:
        return
    block = _block(columns)
    rows = max(_TILE // block, 1)
    with on_device_of(first):
        kernel[(cdiv(num_rows, rows), cdiv(columns, block))](
            first, *rest, **constants, ROWS=rows, BLOCK=block, num_warps=_NUM_WARPS
        )


# -- Registration ------------------------------------------------------------------------------------------------------

_unpermute_backward_op = define(
    "unpermute_tokens_backward(Tensor grad, Tensor y, Tensor weights, Tensor slots, Tensor rows) -> (Tensor, Tensor)",
    reference=_unpermute_backward_reference,
    launcher=_launch_unpermute_backward,
    fake=lambda grad, y, weights, slots, rows: (torch.empty_like(y), torch.empty_like(weights)),
)


def _setup_permute(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _permute_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    slots, rows = ctx.saved_tensors
    return _unpermute_op(grad.contiguous(), None, slots, rows), None, None


def _setup_unpermute(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, weights, slots, rows = inputs
    ctx.save_for_backward(y if weights is not None else None, weights, slots, rows)


def _unpermute_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    y, weights, slots, rows = ctx.saved_tensors
    if weights is None:
        return _permute_op(grad.contiguous(), slots, rows), None, None, None
    if torch.is_grad_enabled():

        def again(y: Tensor, weights: Tensor) -> Tensor:
            return _plain(y, weights, rows)

        return *differentiable_gradients(again, (y, weights), grad), None, None
    return *_unpermute_backward_op(grad.contiguous(), y, weights, slots, rows), None, None


_permute_op = define(
    "permute_tokens(Tensor x, Tensor slots, Tensor rows) -> Tensor",
    reference=_permute_reference,
    launcher=_launch_permute,
    fake=lambda x, slots, rows: x.new_empty(len(slots), x.shape[1]),
    backward=_permute_backward,
    setup_context=_setup_permute,
)

_unpermute_op = define(
    "unpermute_tokens(Tensor y, Tensor? weights, Tensor slots, Tensor rows) -> Tensor",
    reference=_unpermute_reference,
    launcher=_launch_unpermute,
    fake=lambda y, weights, slots, rows: y.new_empty(len(rows), y.shape[1]),
    backward=_unpermute_backward,
    setup_context=_setup_unpermute,
)

# -- Public functions --------------------------------------------------------------------------------------------------


def permute_tokens(x: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
    """Copy tokens into the order of their experts.

    Args:
        x: ``(T, H)``, fp32, bf16, fp16 or fp64.
        slots: ``(M,)`` int64: the slot ``t * k + j`` of every permuted row, or -1 for a row of zeros.
        rows: ``(T, k)`` int64: the permuted row of every slot, or -1 for a slot that has none; the inverse of
            ``slots``, which the backward reads.

    Returns:
        ``(M, H)`` in the dtype of ``x``. All derivatives by ``x``; the same bits in every run.

    Raises:
        TypeError: Another dtype.
        ValueError: Shapes that do not fit, tensors on several devices.
    """
    check_devices("permute_tokens", x=x, slots=slots, rows=rows)
    refuse_transforms("permute_tokens", x)
    y: Tensor = _permute_op(x.contiguous(), slots.contiguous(), rows.contiguous())
    return y


def unpermute_tokens(y: Tensor, weights: Tensor | None, slots: Tensor, rows: Tensor) -> Tensor:
    """Return for every token the weighted sum of its permuted rows.

    Args:
        y: ``(M, H)``, fp32, bf16, fp16 or fp64.
        weights: ``(T, k)``, fp32 or 16 bits; None: all are 1.
        slots: As in ``permute_tokens``.
        rows: As in ``permute_tokens``.

    Returns:
        ``(T, H)`` in the dtype of ``y``, added in fp32. All derivatives by ``y`` and ``weights``; the same bits in
        every run.

    Raises:
        TypeError: Another dtype.
        ValueError: Shapes that do not fit, tensors on several devices.
    """
    check_devices("unpermute_tokens", y=y, weights=weights, slots=slots, rows=rows)
    refuse_transforms("unpermute_tokens", y, weights)
    weights = None if weights is None else weights.contiguous()
    x: Tensor = _unpermute_op(y.contiguous(), weights, slots.contiguous(), rows.contiguous())
    return x
