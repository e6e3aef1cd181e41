"""Gated activations, SwiGLU and GeGLU, each with its backward.

Note [Formulas]
    ``y = a(gate) up`` over tensors of one shape, where ``a`` is::

        silu        x s(x)                              s the logistic function
        gelu        x (1 + erf(x / sqrt 2)) / 2
        gelu_tanh   x s(2 u),  u = sqrt(2 / pi) (x + 0.044715 x^3)      equal to x (1 + tanh u) / 2

    and with ``d`` the gradient of ``y``: ``dgate = d up a'(gate)``, ``dup = d a(gate)``. Forward and backward are one
    pass each, and ``a(gate)`` is not kept. Arithmetic is fp32, results are rounded once. Of ``s(x)`` and ``s(-x)`` the
    smaller one is computed, and the larger one is 1 less it, so that neither cancels. GLU variants: arXiv:2002.05202.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_zero_ops.elementwise import launch, pieces
from lightning_zero_ops.registry import check_devices, define, differentiable_gradients, jit, refuse_transforms, tl

__all__ = ["geglu", "swiglu"]

_ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SQRT_HALF = math.sqrt(0.5)
_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
_INV_SQRT_2_PI = 1 / math.sqrt(2 * math.pi)
_CUBIC = 0.044715

# -- Reference ---------------------------------------------------------------------------------------------------------


def _reference(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    _check(gate, up, activation)
    y, flat_gate, flat_up = torch.empty_like(gate), gate.view(-1), up.view(-1)
    for piece in pieces(y):
        y.view(-1)[piece] = _plain(flat_gate[piece], flat_up[piece], activation)
    return y


def _plain(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return (_activate(gate.float(), activation)[0] * up.float()).to(gate.dtype)


def _backward_reference(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    flat_grad, flat_gate, flat_up = grad.view(-1), gate.view(-1), up.view(-1)
    for piece in pieces(gate):
        value, slope = _activate(flat_gate[piece].float(), activation)
        grad_y = flat_grad[piece].float()
        grad_gate.view(-1)[piece] = grad_y * flat_up[piece].float() * slope
        grad_up.view(-1)[piece] = grad_y * value
    return grad_gate, grad_up


def _activate(x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Return the activation of an fp32 tensor and its derivative."""
    if activation == "silu":
        part, rest = _logistic(x)
        return x * part, part * (1.0 + x * rest)
    if activation == "gelu":
        part = 0.5 * torch.special.erfc(-x * _SQRT_HALF)
        return x * part, part + x * torch.exp(-0.5 * x * x) * _INV_SQRT_2_PI
    square = x * x
    twice_u = 2.0 * _SQRT_2_OVER_PI * x * (1.0 + _CUBIC * square)
    part, rest = _logistic(twice_u)
    slope = 2.0 * _SQRT_2_OVER_PI * (1.0 + 3.0 * _CUBIC * square)
    return x * part, part + x * part * rest * slope


def _logistic(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``s(x)`` and ``s(-x)``; the larger one is computed as 1 minus the smaller one, which is exact."""
    tail = torch.sigmoid(-x.abs())
    return torch.where(x >= 0, 1.0 - tail, tail), torch.where(x >= 0, tail, 1.0 - tail)


# -- Kernels -----------------------------------------------------------------------------------------------------------


@jit
def _logistic_pair(x):  # type: ignore[no-untyped-def]
    power = tl.exp(-tl.abs(x))
    tail = power / (1.0 + power)
    return tl.where(x >= 0, 1.0 - tail, tail), tl.where(x >= 0, tail, 1.0 - tail)


@jit
def _activation(x, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    if ACTIVATION == "silu":
        part, rest = _logistic_pair(x)
        slope = part * (1.0 + x * rest)
    elif ACTIVATION == "gelu":
        part = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        slope = part + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    else:
        part, rest = _logistic_pair(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
        slope = part + x * part * rest * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    return x * part, slope


@jit
def _gated_kernel(gate, up, y, numel, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    value, _ = _activation(tl.load(gate + at, mask=inside, other=0.0).to(tl.float32), ACTIVATION)
    value *= tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)


@jit
def _gated_backward_kernel(grad, gate, up, grad_gate, grad_up, numel, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    value, slope = _activation(tl.load(gate + at, mask=inside, other=0.0).to(tl.float32), ACTIVATION)
    grad_y = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    slope *= grad_y * tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(grad_gate + at, slope.to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(grad_up + at, (grad_y * value).to(grad_up.dtype.element_ty), mask=inside)


# -- Launchers ---------------------------------------------------------------------------------------------------------


def _check(gate: Tensor, up: Tensor, activation: str) -> None:
    if activation not in _ACTIVATIONS:
        raise ValueError(f"`activation={activation!r}` is not known. Use one of {', '.join(_ACTIVATIONS)}.")
    for name, tensor in {"gate": gate, "up": up}.items():
        if tensor.dtype not in _DTYPES or tensor.dtype != gate.dtype:
            raise TypeError(
                f"`{name}` has dtype {tensor.dtype} beside `gate` of {gate.dtype}."
                " Both must be float32, bfloat16 or float16, and the same."
            )
        if tensor.shape != gate.shape:
            raise ValueError(f"`up` must have the shape of `gate`, {tuple(gate.shape)}, got {tuple(up.shape)}.")
        if not tensor.is_contiguous():
            raise ValueError(f"`{name}` must be contiguous, but has strides {tensor.stride()}.")


def _launch(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    _check(gate, up, activation)
    y = torch.empty_like(gate)
    launch(_gated_kernel, gate, up, y, y.numel(), ACTIVATION=activation)
    return y


def _launch_backward(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    launch(_gated_backward_kernel, grad, gate, up, grad_gate, grad_up, gate.numel(), ACTIVATION=activation)
    return grad_gate, grad_up


# -- Registration ------------------------------------------------------------------------------------------------------

_backward_op = define(
    "gated_backward(Tensor grad, Tensor gate, Tensor up, str activation) -> (Tensor, Tensor)",
    reference=_backward_reference,
    launcher=_launch_backward,
    fake=lambda grad, gate, up, activation: (torch.empty_like(gate), torch.empty_like(up)),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, ctx.activation = inputs
    ctx.save_for_backward(gate, up)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    gate, up = ctx.saved_tensors
    if torch.is_grad_enabled():

        def again(gate: Tensor, up: Tensor) -> Tensor:
            return _plain(gate, up, ctx.activation)

        return *differentiable_gradients(again, (gate, up), grad), None
    return *_backward_op(grad.contiguous(), gate, up, ctx.activation), None


_op = define(
    "gated(Tensor gate, Tensor up, str activation) -> Tensor",
    reference=_reference,
    launcher=_launch,
    fake=lambda gate, up, activation: torch.empty_like(gate),
    backward=_backward,
    setup_context=_setup_context,
)

# -- Public functions --------------------------------------------------------------------------------------------------


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` in one pass.

    Args:
        gate: Any shape; fp32, bf16 or fp16.
        up: Shape and dtype of ``gate``.

    Returns:
        Shape and dtype of ``gate``. Second derivatives are those of plain PyTorch.

    Raises:
        TypeError: Another dtype, or two.
        ValueError: Two shapes.
    """
    check_devices("swiglu", gate=gate, up=up)
    refuse_transforms("swiglu", gate, up)
    y: Tensor = _op(gate.contiguous(), up.contiguous(), "silu")
    return y


def geglu(gate: Tensor, up: Tensor, *, approximate: Literal["none", "tanh"] = "tanh") -> Tensor:
    """Return ``gelu(gate) * up`` in one pass.

    Args:
        gate: Any shape; fp32, bf16 or fp16.
        up: Shape and dtype of ``gate``.
        approximate: As in ``torch.nn.functional.gelu``.

    Returns:
        Shape and dtype of ``gate``. Second derivatives are those of plain PyTorch.

    Raises:
        TypeError: Another dtype, or two.
        ValueError: Two shapes, or another approximation.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"`approximate={approximate!r}` is not known. Use 'none' or 'tanh'.")
    check_devices("geglu", gate=gate, up=up)
    refuse_transforms("geglu", gate, up)
    y: Tensor = _op(gate.contiguous(), up.contiguous(), "gelu_tanh" if approximate == "tanh" else "gelu")
    return y
