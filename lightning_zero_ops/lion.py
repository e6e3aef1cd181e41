"""Lion over flat tensors in one pass.

Formula, for every element (Lion, arXiv:2302.06675):
    g = factor * grad
    p = p - lr * weight_decay * p
    p = p - lr * sign(m + (1 - beta1) * (g - m))
    m = m + (1 - beta2) * (g - m)
    out = p, rounded
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_zero_ops.chunks import step_in_chunks
from lightning_zero_ops.elementwise import launch
from lightning_zero_ops.registry import check_factor, check_flat, define, jit, tl

__all__ = ["lion_step_"]

_FP32 = (torch.float32,)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_MOMENTS = (torch.float32, torch.bfloat16)

# -- Reference ---------------------------------------------------------------------------------------------------------


def _reference(
    param: Tensor, exp_avg: Tensor, out: Tensor | None, grad: Tensor, factor: Tensor | None, lr: float, beta1: float,
    beta2: float, weight_decay: float,
) -> None:  # fmt: skip
    def kernel(grads: list[Tensor], states: list[list[Tensor]]) -> None:
        for value, p, m in zip(grads, *states, strict=True):
            p.mul_(1.0 - lr * weight_decay)
            direction = torch.lerp(m, value, 1.0 - beta1)
            p.add_(torch.where(direction.isnan(), direction, direction.sign()), alpha=-lr)  # `sign` of NaN is 0
            m.lerp_(value, 1.0 - beta2)

    step_in_chunks(kernel, grad, (param, exp_avg), out=out, factor=factor, tails=())


# -- Kernel ------------------------------------------------------------------------------------------------------------


@jit
def _lion_kernel(  # type: ignore[no-untyped-def]
    param, exp_avg, out, grad, factor, numel, lr, rest1, rest2, decay, BLOCK: tl.constexpr
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < numel
    g = tl.load(grad + offsets, mask=inside, other=0.0).to(tl.float32)
    p = tl.load(param + offsets, mask=inside, other=0.0)
    m = tl.load(exp_avg + offsets, mask=inside, other=0.0).to(tl.float32)
    if factor is not None:
        g *= tl.load(factor)
    direction = m + tl.cast(rest1, tl.float32) * (g - m)
    # Not infinity less infinity, which would be NaN.
    p -= tl.where(tl.abs(p) < float("inf"), tl.cast(decay, tl.float32) * p, 0.0)
    p -= tl.cast(lr, tl.float32) * tl.where(
        direction > 0, 1.0, tl.where(direction < 0, -1.0, direction)
    )  # zero and NaN stay
    m += tl.cast(rest2, tl.float32) * (g - m)
    tl.store(param + offsets, p, mask=inside)
    tl.store(exp_avg + offsets, m.to(exp_avg.dtype.element_ty), mask=inside)
    if out is not None:
        tl.store(out + offsets, p.to(out.dtype.element_ty), mask=inside)


# -- Launcher ----------------------------------------------------------------------------------------------------------


def _launch(
    param: Tensor, exp_avg: Tensor, out: Tensor | None, grad: Tensor, factor: Tensor | None, lr: float, beta1: float,
    beta2: float, weight_decay: float,
) -> None:  # fmt: skip
    launch(
        _lion_kernel, param, exp_avg, out, grad, factor, param.numel(), lr, 1.0 - beta1, 1.0 - beta2, lr * weight_decay
    )  # fmt: skip


# -- Registration ------------------------------------------------------------------------------------------------------

_lion_step = define(
    "lion_step_(Tensor(a!) param, Tensor(b!) exp_avg, Tensor(c!)? out, Tensor grad, Tensor? factor, float lr,"
    " float beta1, float beta2, float weight_decay) -> ()",
    reference=_reference,
    launcher=_launch,
    fake=lambda *_: None,
)

# -- Public function ---------------------------------------------------------------------------------------------------


def lion_step_(
    param: Tensor,
    exp_avg: Tensor,
    grad: Tensor,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
    factor: Tensor | None = None,
    out: Tensor | None = None,
) -> None:
    """Step ``param`` in place by Lion, in one pass over memory. Arithmetic is fp32.

    Args:
        param: (n,) fp32, the master.
        exp_avg: (n,) fp32 or bf16, the moment, written.
        grad: (n,) fp32, bf16 or fp16; not written.
        lr: Learning rate, a third to a tenth of AdamW's.
        betas: Weight of the moment in the direction, and its decay.
        weight_decay: Decay of the parameters.
        factor: () fp32 on the same device; the gradient is multiplied by it (unscaling, clipping).
        out: (n,) fp32, bf16 or fp16; takes the rounded parameters.

    Raises:
        ValueError: A tensor is not flat and contiguous, or lengths or devices differ.
        TypeError: A dtype is not among those above.
    """
    check_flat("lion_step_", _FP32, param=param)
    check_flat("lion_step_", _FLOATS, param=param, grad=grad, out=out)
    check_flat("lion_step_", _MOMENTS, param=param, exp_avg=exp_avg)
    check_factor("lion_step_", factor, param)
    _lion_step(param, exp_avg, out, grad, factor, lr, betas[0], betas[1], weight_decay)
