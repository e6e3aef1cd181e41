"""SGD with momentum over flat tensors in one pass.

Formula, for every element:
    g = factor * grad + weight_decay * p
    b = g at the first step, else momentum * b + (1 - dampening) * g
    p = p - lr * (g + momentum * b with Nesterov's rule, else b)
    out = p, rounded

Without ``momentum`` there is no b, and p = p - lr * g. As ``torch.optim.SGD``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_zero_ops.chunks import step_in_chunks
from lightning_zero_ops.elementwise import launch
from lightning_zero_ops.registry import check_factor, check_flat, define, jit, tl

__all__ = ["sgd_step_", "pytorch_step_"]

_FP32 = (torch.float32,)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)

# -- Reference: PyTorch's fused kernel in chunks -----------------------------------------------------------------------


def pytorch_step_(
    param: Tensor, momentum_buffer: Tensor | None, out: Tensor | None, grad: Tensor, factor: Tensor | None,
    step: int, lr: float, momentum: float, dampening: float, weight_decay: float, nesterov: bool,
    tails: Sequence[int],
) -> None:  # fmt: skip
    """Step as ``sgd_step_`` does, with PyTorch's kernels on every device."""

    def kernel(grads: list[Tensor], states: list[list[Tensor]]) -> None:
        torch._fused_sgd_(
            states[0], grads, states[1] if len(states) > 1 else [], weight_decay=weight_decay, momentum=momentum,
            lr=lr, dampening=dampening, nesterov=nesterov, maximize=False, is_first_step=step == 1,
        )  # fmt: skip

    states = (param,) if momentum_buffer is None else (param, momentum_buffer)
    step_in_chunks(kernel, grad, states, out=out, factor=factor, tails=tails)


# -- Kernel ------------------------------------------------------------------------------------------------------------


@jit
def _sgd_kernel(  # type: ignore[no-untyped-def]
    param, momentum_buffer, out, grad, factor, numel, lr, momentum, undamped, weight_decay,
    IS_FIRST: tl.constexpr, NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < numel
    momentum = tl.cast(momentum, tl.float32)
    g = tl.load(grad + offsets, mask=inside, other=0.0).to(tl.float32)
    p = tl.load(param + offsets, mask=inside, other=0.0)
    if factor is not None:
        g *= tl.load(factor)
    # Not 0 times infinity, which would be NaN.
    g += tl.where(weight_decay == 0.0, 0.0, tl.cast(weight_decay, tl.float32) * p)
    if momentum_buffer is not None:
        if IS_FIRST:
            b = g
        else:
            b = tl.load(momentum_buffer + offsets, mask=inside, other=0.0) * momentum
            b += tl.cast(undamped, tl.float32) * g
        tl.store(momentum_buffer + offsets, b, mask=inside)
        g = g + momentum * b if NESTEROV else b
    p -= tl.cast(lr, tl.float32) * g
    tl.store(param + offsets, p, mask=inside)
    if out is not None:
        tl.store(out + offsets, p.to(out.dtype.element_ty), mask=inside)


# -- Launcher ----------------------------------------------------------------------------------------------------------


def _launch(
    param: Tensor, momentum_buffer: Tensor | None, out: Tensor | None, grad: Tensor, factor: Tensor | None,
    step: int, lr: float, momentum: float, dampening: float, weight_decay: float, nesterov: bool,
    tails: Sequence[int],
) -> None:  # fmt: skip
    launch(
        _sgd_kernel, param, momentum_buffer, out, grad, factor, param.numel(), lr, momentum, 1.0 - dampening,
        weight_decay, IS_FIRST=step == 1, NESTEROV=nesterov,
    )  # fmt: skip


# -- Registration ------------------------------------------------------------------------------------------------------

_sgd_step = define(
    "sgd_step_(Tensor(a!) param, Tensor(b!)? momentum_buffer, Tensor(c!)? out, Tensor grad, Tensor? factor, int step,"
    " float lr, float momentum, float dampening, float weight_decay, bool nesterov, int[] tails) -> ()",
    reference=pytorch_step_,
    launcher=_launch,
    fake=lambda *_: None,
)

# -- Public function ---------------------------------------------------------------------------------------------------


def sgd_step_(
    param: Tensor,
    momentum_buffer: Tensor | None,
    grad: Tensor,
    *,
    step: int,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    factor: Tensor | None = None,
    out: Tensor | None = None,
    tails: Sequence[int] = (),
) -> None:
    """Step ``param`` in place by stochastic gradient descent, in one pass over memory.

    Arithmetic is fp32. On a CPU the bits are those of PyTorch's fused step and do not depend on how a tensor is cut.

    Args:
        param: (n,) fp32, the master.
        momentum_buffer: (n,) fp32, written, not read at step 1; None without momentum.
        grad: (n,) fp32, bf16 or fp16; not written.
        step: Number of this step, from 1.
        lr: Learning rate.
        momentum: Decay of the momentum buffer.
        dampening: The gradient enters the momentum buffer times ``1 - dampening``, except at step 1.
        weight_decay: Added to the gradient, times the parameters.
        nesterov: As in ``torch.optim.SGD``.
        factor: () fp32 on the same device; the gradient is multiplied by it (unscaling, clipping).
        out: (n,) fp32, bf16 or fp16; takes the rounded parameters.
        tails: As in ``adamw_step_``.

    Raises:
        ValueError: A tensor is not flat and contiguous, lengths or devices differ, ``step`` is not positive, or
            ``momentum`` and ``momentum_buffer`` do not go together.
        TypeError: A dtype is not among those above.
    """
    check_flat("sgd_step_", _FP32, param=param, momentum_buffer=momentum_buffer)
    check_flat("sgd_step_", _FLOATS, param=param, grad=grad, out=out)
    check_factor("sgd_step_", factor, param)
    if step < 1:
        raise ValueError(f"`step={step!r}` must be 1 at the first step.")
    if (momentum_buffer is None) != (momentum == 0.0):
        raise ValueError(f"`momentum={momentum!r}` needs a `momentum_buffer` exactly if it is not 0.")
    _sgd_step(param, momentum_buffer, out, grad, factor, step, lr, momentum, dampening, weight_decay, nesterov, tails)
