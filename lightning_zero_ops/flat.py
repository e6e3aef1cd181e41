"""Gradients on flat tensors: accumulate with a cast, squared norm with a check for overflow, clip by value.

Formulas, over all elements i of flat tensors of one length:
    ``accumulate_``          total_i = beta * total_i + alpha * grad_i
    ``sq_norm_and_finite``   sum of grad_i ** 2 over the finite elements; whether all elements are finite
    ``sq_norm``              sum of grad_i ** 2
    ``clip_value_``          grad_i = min(max(grad_i, -limit), limit); NaN stays NaN

Arithmetic is fp32; sums are float64, over blocks on a GPU and over elements on a CPU. ``sq_norm`` is float64
everywhere: squares of fp32 numbers are exact in it, so how a vector is cut does not show when its norm is rounded to
fp32. The loss scale of mixed precision (arXiv:1710.03740) and clipping need both numbers of ``sq_norm_and_finite``; a
gradient is read once for them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_zero_ops.elementwise import launch
from lightning_zero_ops.registry import cdiv, check_flat, define, jit, on_device_of, tl

__all__ = ["accumulate_", "clip_value_", "sq_norm", "sq_norm_and_finite"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)

# -- Reference ---------------------------------------------------------------------------------------------------------


def _accumulate_reference(total: Tensor, grad: Tensor, alpha: float, beta: float) -> None:
    if alpha == 1.0 and beta in (0.0, 1.0):
        total.add_(grad) if beta else total.copy_(grad)
        return
    value = grad.float() * alpha
    total.copy_(value.add_(total, alpha=beta) if beta else value)


def _sq_norm_and_finite_reference(grad: Tensor) -> tuple[Tensor, Tensor]:
    norm = torch.linalg.vector_norm(grad, dtype=torch.float64)  # a float64 sum of fp32 squares cannot overflow
    finite = torch.isfinite(norm)
    if not finite:
        norm = torch.linalg.vector_norm(torch.where(torch.isfinite(grad), grad, 0.0), dtype=torch.float64)
    return norm.square().float(), finite


def _sq_norm_reference(grad: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(grad, dtype=torch.float64)
    return norm.square()


def _clip_value_reference(grad: Tensor, limit: float) -> None:
    grad.clamp_(-limit, limit)


# -- Tuning ------------------------------------------------------------------------------------------------------------

# Of the norm: a program's sum is written, so programs are few. With the check for overflow each reads several blocks
# ahead, and one program sums up: on an H200 that reads 0.89 of a copy's bytes per second, and with PyTorch's sums 0.72.
# How a vector is cut depends on its length alone, so GPUs with other numbers of processors have the same bits.
_NORM_BLOCK = 4096
_NUM_WARPS = 4
_NORM_PROGRAMS = 1056
_MAX_BLOCKS = 64  # of a program: it adds up so many fp32 numbers in a row
_STAGES = 3
_LAST_BLOCK = 1024

# -- Kernels -----------------------------------------------------------------------------------------------------------


@jit
def _accumulate_kernel(total, grad, numel, alpha, beta, READS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < numel
    value = tl.load(grad + offsets, mask=inside, other=0.0).to(tl.float32) * tl.cast(alpha, tl.float32)
    if READS:
        value += tl.load(total + offsets, mask=inside, other=0.0).to(tl.float32) * tl.cast(beta, tl.float32)
    tl.store(total + offsets, value.to(total.dtype.element_ty), mask=inside)


@jit
def _sq_norm_kernel(grad, partial_sums, numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0).to(tl.int64)
    offsets = program * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(grad + offsets, mask=offsets < numel, other=0.0).to(tl.float32).to(tl.float64)
    tl.store(partial_sums + program, tl.sum(value * value, 0))


@jit
def _sq_norm_and_finite_kernel(  # type: ignore[no-untyped-def]
    grad, partial_sums, partial_flags, numel, num_blocks, BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    program = tl.program_id(0)
    first = program.to(tl.int64) * num_blocks
    total = tl.zeros([BLOCK], tl.float32)
    is_finite = tl.full([BLOCK], 1, tl.int32)
    for block in tl.range(0, num_blocks, num_stages=STAGES):
        offsets = (first + block) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(grad + offsets, mask=offsets < numel, other=0.0).to(tl.float32)
        finite = tl.abs(value) < float("inf")  # false for NaN as well
        value = tl.where(finite, value, 0.0)
        total += value * value
        is_finite = tl.minimum(is_finite, finite.to(tl.int32))
    tl.store(partial_sums + program, tl.sum(total.to(tl.float64), 0))
    tl.store(partial_flags + program, tl.min(is_finite, 0))


@jit
def _sum_up_kernel(partial_sums, partial_flags, out, out_flag, programs, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.zeros([BLOCK], tl.float64)
    is_finite = tl.full([BLOCK], 1, tl.int32)
    for start in range(0, programs, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        total += tl.load(partial_sums + offsets, mask=offsets < programs, other=0.0)
        is_finite = tl.minimum(is_finite, tl.load(partial_flags + offsets, mask=offsets < programs, other=1))
    tl.store(out, tl.sum(total, 0).to(tl.float32))
    tl.store(out_flag, tl.min(is_finite, 0).to(tl.int8))


@jit
def _clip_value_kernel(grad, numel, limit, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < numel
    bound = tl.cast(limit, tl.float32)
    value = tl.load(grad + offsets, mask=inside, other=0.0).to(tl.float32)
    # Comparisons with NaN are false, so NaN passes both.
    value = tl.where(value > bound, bound, tl.where(value < -bound, -bound, value))
    tl.store(grad + offsets, value.to(grad.dtype.element_ty), mask=inside)


# -- Launchers ---------------------------------------------------------------------------------------------------------


def _launch_accumulate(total: Tensor, grad: Tensor, alpha: float, beta: float) -> None:
    launch(_accumulate_kernel, total, grad, total.numel(), alpha, beta, READS=beta != 0.0)


def _launch_sq_norm_and_finite(grad: Tensor) -> tuple[Tensor, Tensor]:
    numel = grad.numel()
    num_blocks = min(max(cdiv(numel, _NORM_PROGRAMS * _NORM_BLOCK), 1), _MAX_BLOCKS)
    programs = cdiv(numel, num_blocks * _NORM_BLOCK)
    sums = torch.empty(programs, dtype=torch.float64, device=grad.device)
    flags = torch.empty(programs, dtype=torch.int32, device=grad.device)
    total = torch.empty((), dtype=torch.float32, device=grad.device)
    is_finite = torch.empty((), dtype=torch.int8, device=grad.device)
    with on_device_of(grad):
        if programs:
            _sq_norm_and_finite_kernel[(programs,)](
                grad, sums, flags, numel, num_blocks, BLOCK=_NORM_BLOCK, STAGES=_STAGES, num_warps=2 * _NUM_WARPS
            )
        _sum_up_kernel[(1,)](sums, flags, total, is_finite, programs, BLOCK=_LAST_BLOCK, num_warps=2 * _NUM_WARPS)
    return total, is_finite.view(torch.bool)


def _launch_sq_norm(grad: Tensor) -> Tensor:
    sums = torch.empty(cdiv(grad.numel(), _NORM_BLOCK), dtype=torch.float64, device=grad.device)
    if sums.numel():
        with on_device_of(grad):
            _sq_norm_kernel[(sums.numel(),)](grad, sums, grad.numel(), BLOCK=_NORM_BLOCK, num_warps=_NUM_WARPS)
    return sums.sum()


def _launch_clip_value(grad: Tensor, limit: float) -> None:
    launch(_clip_value_kernel, grad, grad.numel(), limit)


# -- Registration ------------------------------------------------------------------------------------------------------

_accumulate = define(
    "accumulate_(Tensor(a!) total, Tensor grad, float alpha, float beta) -> ()",
    reference=_accumulate_reference,
    launcher=_launch_accumulate,
    fake=lambda total, grad, alpha, beta: None,
)
_sq_norm_and_finite = define(
    "sq_norm_and_finite(Tensor grad) -> (Tensor, Tensor)",
    reference=_sq_norm_and_finite_reference,
    launcher=_launch_sq_norm_and_finite,
    fake=lambda grad: (grad.new_empty((), dtype=torch.float32), grad.new_empty((), dtype=torch.bool)),
)
_sq_norm = define(
    "sq_norm(Tensor grad) -> Tensor",
    reference=_sq_norm_reference,
    launcher=_launch_sq_norm,
    fake=lambda grad: grad.new_empty((), dtype=torch.float64),
)
_clip_value = define(
    "clip_value_(Tensor(a!) grad, float limit) -> ()",
    reference=_clip_value_reference,
    launcher=_launch_clip_value,
    fake=lambda grad, limit: None,
)

# -- Public functions --------------------------------------------------------------------------------------------------


def accumulate_(total: Tensor, grad: Tensor, *, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    """Set ``total`` to ``beta * total + alpha * grad`` in one pass, with the cast; return it.

    Args:
        total: (n,) fp32, bf16 or fp16. Not read where ``beta`` is 0.
        grad: (n,) fp32, bf16 or fp16.
        alpha: Factor of the addend.
        beta: Factor of the present values: 1 adds, 0 overwrites.

    Raises:
        ValueError: A tensor is not flat and contiguous, or lengths or devices differ.
        TypeError: A dtype is none of the three.
    """
    check_flat("accumulate_", _FLOATS, total=total, grad=grad)
    _accumulate(total, grad, alpha, beta)
    return total


def sq_norm_and_finite(grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the squares of the finite elements, () fp32, and whether all are finite, () bool; one pass.

    Args:
        grad: (n,) fp32, bf16 or fp16.

    Raises:
        ValueError: ``grad`` is not flat and contiguous.
        TypeError: Its dtype is none of the three.
    """
    check_flat("sq_norm_and_finite", _FLOATS, grad=grad)
    total, finite = _sq_norm_and_finite(grad)
    return total, finite


def sq_norm(grad: Tensor) -> Tensor:
    """Return the sum of the squares of the elements, () float64, in one pass; one that is not finite shows.

    Args:
        grad: (n,) fp32, bf16 or fp16.

    Raises:
        ValueError: ``grad`` is not flat and contiguous.
        TypeError: Its dtype is none of the three.
    """
    check_flat("sq_norm", _FLOATS, grad=grad)
    total: Tensor = _sq_norm(grad)
    return total


def clip_value_(grad: Tensor, limit: float) -> Tensor:
    """Clamp every element to ``[-limit, limit]``, NaN stays; return ``grad``.

    Args:
        grad: (n,) fp32, bf16 or fp16.
        limit: Not negative.

    Raises:
        ValueError: ``grad`` is not flat and contiguous, or ``limit`` is negative.
        TypeError: The dtype is none of the three.
    """
    if not limit >= 0:
        raise ValueError(f"`limit={limit!r}` must be 0 or more.")
    check_flat("clip_value_", _FLOATS, grad=grad)
    _clip_value(grad, limit)
    return grad
