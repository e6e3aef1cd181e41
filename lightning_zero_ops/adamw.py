"""AdamW and Adam over flat tensors in one pass: unscale, clip, decay, step and the rounded parameters.

Formula, for every element, with t = ``step`` counted from 1 (AdamW, arXiv:1711.05101; Adam, arXiv:1412.6980):
    g = factor * grad + l2 * p
    p = p - lr * weight_decay * p
    m = m + (1 - beta1) * (g - m)
    v = beta2 * v + (1 - beta2) * g * g
    p = p - lr / (1 - beta1 ** t) * m / (sqrt(v) / sqrt(1 - beta2 ** t) + eps)
    out = p, rounded

``weight_decay`` is AdamW's, ``l2`` is Adam's ``weight_decay``; one of them is 0. Bytes per element with fp32 moments:
24 of p, m and v, and those of the gradient and of ``out`` (2 each in 16 bits).

Note [Arithmetic of the kernel]
    Every operation of the formula is rounded once, to fp32: no product is contracted with a sum, and divisions and
    roots are those of IEEE 754. So the bits depend neither on how a tensor is cut or aligned nor on the GPU. Numbers
    that come from options alone (``lr * weight_decay``, ``1 - beta1``, ``lr / (1 - beta1 ** t)``) are computed in
    float64 and rounded once. PyTorch's fused kernel for CUDA rounds other numbers: its compiler contracts products and
    sums, and it multiplies by options in float64. The two differ by a few units in the last place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_zero_ops.adamw_int8 import adamw_int8_step_
from lightning_zero_ops.chunks import step_in_chunks
from lightning_zero_ops.elementwise import launch
from lightning_zero_ops.registry import check_factor, check_flat, define, jit, tl

__all__ = ["adamw_step_", "kernel_step_", "pytorch_step_"]

_FP32 = (torch.float32,)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_MOMENTS = (torch.float32, torch.bfloat16, torch.int8)

# -- Reference: PyTorch's fused kernel in chunks -----------------------------------------------------------------------


def pytorch_step_(
    param: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, out: Tensor | None, grad: Tensor, factor: Tensor | None,
    step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, l2: float,
    tails: Sequence[int],
) -> None:  # fmt: skip
    """Step as ``adamw_step_`` does, with PyTorch's kernels on every device."""
    fused, decay = (torch._fused_adam_, l2) if l2 else (torch._fused_adamw_, weight_decay)
    steps = torch.full((), float(step), dtype=torch.float32, device=param.device)

    def kernel(grads: list[Tensor], states: list[list[Tensor]]) -> None:
        params, exp_avgs, exp_avg_sqs = states
        fused(
            params, grads, exp_avgs, exp_avg_sqs, [], [steps] * len(params), lr=lr, beta1=beta1, beta2=beta2,
            weight_decay=decay, eps=eps, amsgrad=False, maximize=False,
        )  # fmt: skip

    step_in_chunks(kernel, grad, (param, exp_avg, exp_avg_sq), out=out, factor=factor, tails=tails)


# -- Kernel ------------------------------------------------------------------------------------------------------------


@jit
def _adamw_kernel(  # type: ignore[no-untyped-def]
    param, exp_avg, exp_avg_sq, out, grad, factor, numel, rest1, beta2, rest2, eps, decay, l2, step_size, root_bias2,
    BLOCK: tl.constexpr,
):  # fmt: skip
    # 1 - beta2 in fp32 would be wrong by 5e-5, so differences and products of options come from the host.
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < numel
    g = tl.load(grad + offsets, mask=inside, other=0.0).to(tl.float32)
    p = tl.load(param + offsets, mask=inside, other=0.0)
    m = tl.load(exp_avg + offsets, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(exp_avg_sq + offsets, mask=inside, other=0.0).to(tl.float32)
    if factor is not None:
        g *= tl.load(factor)
    # Neither 0 times infinity nor infinity less infinity: both would be NaN.
    g += tl.where(l2 == 0.0, 0.0, tl.cast(l2, tl.float32) * p)
    p -= tl.where(tl.abs(p) < float("inf"), tl.cast(decay, tl.float32) * p, 0.0)
    m += tl.cast(rest1, tl.float32) * (g - m)
    v = tl.cast(beta2, tl.float32) * v + tl.cast(rest2, tl.float32) * g * g
    denominator = tl.div_rn(tl.sqrt_rn(v), tl.cast(root_bias2, tl.float32)) + tl.cast(eps, tl.float32)
    p -= tl.cast(step_size, tl.float32) * tl.div_rn(m, denominator)
    tl.store(param + offsets, p, mask=inside)
    tl.store(exp_avg + offsets, m.to(exp_avg.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq + offsets, v.to(exp_avg_sq.dtype.element_ty), mask=inside)
    if out is not None:
        tl.store(out + offsets, p.to(out.dtype.element_ty), mask=inside)


# -- Launcher ----------------------------------------------------------------------------------------------------------


def _launch(
    param: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, out: Tensor | None, grad: Tensor, factor: Tensor | None,
    step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, l2: float,
    tails: Sequence[int],
) -> None:  # fmt: skip
    launch(
        _adamw_kernel, param, exp_avg, exp_avg_sq, out, grad, factor, param.numel(), 1.0 - beta1, beta2, 1.0 - beta2,
        eps, lr * weight_decay, l2, lr / (1.0 - beta1**step), math.sqrt(1.0 - beta2**step), enable_fp_fusion=False,
    )  # fmt: skip


# -- Registration ------------------------------------------------------------------------------------------------------

kernel_step_ = define(
    "adamw_step_(Tensor(a!) param, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!)? out, Tensor grad,"
    " Tensor? factor, int step, float lr, float beta1, float beta2, float eps, float weight_decay, float l2,"
    " int[] tails) -> ()",
    reference=pytorch_step_,
    launcher=_launch,
    fake=lambda *_: None,
)

# -- Public function ---------------------------------------------------------------------------------------------------


def adamw_step_(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    l2: float = 0.0,
    factor: Tensor | None = None,
    out: Tensor | None = None,
    tails: Sequence[int] = (),
    exp_avg_scales: Tensor | None = None,
    exp_avg_sq_scales: Tensor | None = None,
) -> None:
    """Step ``param`` in place by AdamW, or by Adam, in one pass over memory.

    Arithmetic is fp32. On a CPU the bits are those of PyTorch's fused step and do not depend on how a tensor is cut.

    Args:
        param: (n,) fp32, the master.
        exp_avg: (n,) fp32, bf16 or int8, first moment, written. Int8: zeros before the first step, or the
            result of ``encode_exp_avg`` of ``lightning_zero_ops/adamw_int8.py``.
        exp_avg_sq: (n,) second moment in the same dtype, written. In bf16 it stops moving where a step changes it by
            less than 0.2 %, which with ``betas[1]`` of 0.999 is often. In int8 it does not: see Note [Rounded by
            chance] there.
        grad: (n,) fp32, bf16 or fp16; not written.
        step: Number of this step, from 1.
        lr: Learning rate.
        betas: Decay of the moments.
        eps: Added to the root of the second moment.
        weight_decay: Decay of the parameters (AdamW).
        l2: Added to the gradient, times the parameters (Adam).
        factor: () fp32 on the same device; the gradient is multiplied by it (unscaling, clipping).
        out: (n,) fp32, bf16 or fp16; takes the rounded parameters.
        tails: Start and stop, one after the other, of the elements that PyTorch's CPU kernel would not compute in
            whole vectors if it stepped each parameter by itself; no effect on other devices. See Note [Whose bits] of
            ``lightning_zero_ops/chunks.py``.
        exp_avg_scales: (ceil(n / 256),) fp32, written; with int8 moments only.
        exp_avg_sq_scales: As ``exp_avg_scales``, of the second moment.

    Raises:
        ValueError: A tensor is not flat and contiguous, lengths or devices differ, ``step`` is not positive, both
            ``weight_decay`` and ``l2`` are given, or scales and int8 moments do not come together.
        TypeError: A dtype is not among those above, or the moments have different ones.
    """
    check_flat("adamw_step_", _FP32, param=param)
    check_flat("adamw_step_", (*_FLOATS,), param=param, grad=grad, out=out)
    check_flat("adamw_step_", _MOMENTS, param=param, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    check_factor("adamw_step_", factor, param)
    if step < 1:
        raise ValueError(f"`step={step!r}` must be 1 at the first step.")
    if weight_decay and l2:
        raise ValueError(f"`weight_decay={weight_decay!r}` (AdamW) and `l2={l2!r}` (Adam) exclude each other. Use one.")
    if exp_avg.dtype != exp_avg_sq.dtype:
        raise TypeError(f"`exp_avg` is {exp_avg.dtype} and `exp_avg_sq` {exp_avg_sq.dtype}. Use one dtype for both.")
    numbers = (step, lr, betas[0], betas[1], eps, weight_decay, l2)
    if exp_avg.dtype == torch.int8:
        adamw_int8_step_(
            param, exp_avg, exp_avg_scales, exp_avg_sq, exp_avg_sq_scales, out, grad, factor, *numbers
        )  # fmt: skip
        return
    if exp_avg_scales is not None or exp_avg_sq_scales is not None:
        raise ValueError(f"Scales are for int8 moments, but `exp_avg` is {exp_avg.dtype}. Leave them out.")
    kernel_step_(param, exp_avg, exp_avg_sq, out, grad, factor, *numbers, tails)
