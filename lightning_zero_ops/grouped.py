"""Linear layers of several experts on rows that are sorted by expert, with their backward.

Note [Formula]
    Rows ``offsets[e - 1]`` to ``offsets[e]`` of ``x`` belong to expert ``e``; for each of them::

        y = x weight[e]^T + bias[e]

    Rows from ``offsets[-1]`` on belong to nobody: their results mean nothing, their gradients are zeros, and they count
    in no gradient of a weight.

Note [Who multiplies]
    On CUDA devices of capability 9 and 10, in bf16, ``torch._grouped_mm`` computes all products in one launch and
    reads ``offsets`` on the device. Elsewhere the products are one call per expert: that needs ``offsets`` on the host,
    so a CUDA device is waited for. On a CPU the calls write into one result, so nothing is concatenated; PyTorch's own
    fallback there took 1.2 times as long (16 experts, 4096 x 256 by 512, one core of an EPYC).
    Gradients of experts without rows are set to zero afterwards: on capability 10 ``torch._grouped_mm`` leaves them as
    it found the memory (https://github.com/pytorch/pytorch/issues/172439).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_zero_ops.registry import check_devices, define, differentiable_gradients, refuse_transforms

__all__ = ["empty_grouped_mm", "grouped_linear"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_ALIGNMENT_BYTES = 16  # of rows, for `torch._grouped_mm`


def empty_grouped_mm(left: Tensor, right: Tensor, *rest: Any, **options: Any) -> Tensor:
    """Return an empty result of ``torch._grouped_mm``, whose own fake tensors are for bf16 only.

    Args:
        left: (M, K) with rows in groups, (G, M, K), or (M, K) with columns in groups.
        right: (G, K, N), or (K, N) with rows in groups.
        rest: ``offs`` (G,), where groups end; ``bias``; ``out_dtype``.
        options: The same by name.
    """
    given = {**dict(zip(("offs", "bias", "out_dtype"), rest, strict=False)), **options}
    offs = given.get("offs")
    groups = [len(right)] if right.dim() == 3 else [0 if offs is None else len(offs)]
    shape = [*(groups if left.dim() == right.dim() else []), left.shape[-2], right.shape[-1]]
    return left.new_empty(shape, dtype=given.get("out_dtype"))


# -- Reference ---------------------------------------------------------------------------------------------------------


def _reference(x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    _check(x, weight, bias, offsets)
    y = x.new_empty(len(x), weight.shape[1])
    stop = 0
    for expert, start, stop in _groups(offsets):
        if bias is None:
            torch.mm(x[start:stop], weight[expert].t(), out=y[start:stop])
        else:
            torch.addmm(bias[expert], x[start:stop], weight[expert].t(), out=y[start:stop])
    y[stop:].zero_()
    return y


def _backward_reference(
    grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor, by_x: bool, by_weight: bool, by_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x, grad_weight, grad_bias = _results(grad, x, weight, by_x, by_weight, by_bias)
    stop = 0
    has_rows = set()
    for expert, start, stop in _groups(offsets):
        has_rows.add(expert)
        if by_x:
            torch.mm(grad[start:stop], weight[expert], out=grad_x[start:stop])
        if by_weight:
            torch.mm(grad[start:stop].t(), x[start:stop], out=grad_weight[expert])
        if by_bias:
            torch.sum(grad[start:stop], 0, out=grad_bias[expert])
    grad_x[stop:].zero_()
    for expert in set(range(len(weight))) - has_rows:
        for one in (grad_weight, grad_bias):
            one[expert : expert + 1].zero_()
    return grad_x, grad_weight, grad_bias


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    """Return the same of operations that each have derivatives of their own."""
    parts, stop = [x.new_zeros(0, weight.shape[1])], 0
    for expert, start, stop in _groups(offsets):
        part = x[start:stop] @ weight[expert].t()
        parts.append(part if bias is None else part + bias[expert])
    return torch.cat([*parts, x.new_zeros(len(x) - stop, weight.shape[1])])


def _groups(offsets: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield expert, start and stop of the groups that have rows."""
    start = 0
    for expert, stop in enumerate(offsets.tolist()):
        if stop > start:
            yield expert, start, stop
        start = stop


def _results(
    grad: Tensor, x: Tensor, weight: Tensor, by_x: bool, by_weight: bool, by_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape if by_x else (0, x.shape[1])),
        weight.new_empty(weight.shape if by_weight else (0, *weight.shape[1:])),
        weight.new_empty(weight.shape[:2] if by_bias else (0, weight.shape[1])),
    )


# -- Launchers ---------------------------------------------------------------------------------------------------------


def _has_grouped_mm(x: Tensor, weight: Tensor) -> bool:
    """Whether ``torch._grouped_mm`` takes these tensors and waits for nobody."""
    is_aligned = all(size * x.itemsize % _ALIGNMENT_BYTES == 0 for size in weight.shape[1:])
    is_known = hasattr(torch, "_grouped_mm") and x.dtype == torch.bfloat16 and x.is_cuda
    return is_aligned and is_known and torch.cuda.get_device_capability(x.device)[0] in (9, 10)


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    if not len(x) or not _has_grouped_mm(x, weight):
        return _reference(x, weight, bias, offsets)
    _check(x, weight, bias, offsets)
    y: Tensor = torch._grouped_mm(x, weight.transpose(1, 2), offs=_to_the_end(offsets, len(x)))
    return y if bias is None else y.add_(bias[_experts(offsets, len(x))])


def _launch_backward(
    grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor, by_x: bool, by_weight: bool, by_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if not len(x) or not _has_grouped_mm(x, weight):
        return _backward_reference(grad, x, weight, offsets, by_x, by_weight, by_bias)
    ends = _to_the_end(offsets, len(x))
    is_nobodys = torch.arange(len(x), device=x.device) >= offsets[-1]
    grad = grad.masked_fill(is_nobodys.unsqueeze(1), 0.0)
    grad_x, grad_weight, grad_bias = _results(grad, x, weight, False, False, False)  # of unwanted ones
    if by_x:
        grad_x = torch._grouped_mm(grad, weight, offs=ends)
    if by_weight:
        grad_weight = torch._grouped_mm(grad.t(), x, offs=offsets)  # without rows of nobody: 0 times NaN is NaN
        has_no_rows = offsets.diff(prepend=offsets.new_zeros(1)) == 0
        grad_weight.masked_fill_(has_no_rows.view(-1, 1, 1), 0.0)
    if by_bias:  # sums as one product, because sums over rows of another number each would be atomic
        is_mine = torch.arange(len(weight), device=x.device).unsqueeze(1) == _experts(offsets, len(x))
        grad_bias = is_mine.to(grad.dtype) @ grad
    return grad_x, grad_weight, grad_bias


def _to_the_end(offsets: Tensor, num_rows: int) -> Tensor:
    """Give the rows of nobody to the last expert, so that all results are written."""
    return torch.cat([offsets[:-1], offsets.new_full((1,), num_rows)])


def _experts(offsets: Tensor, num_rows: int) -> Tensor:
    """Return the expert of every row."""
    places = torch.arange(num_rows, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets, places, right=True).clamp(max=len(offsets) - 1)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> None:
    for name, tensor in {"x": x, "weight": weight, "bias": bias}.items():
        if tensor is not None and (tensor.dtype not in _DTYPES or tensor.dtype != x.dtype):
            raise TypeError(
                f"`{name}` has dtype {tensor.dtype} beside `x` of {x.dtype}."
                " All must be float32, bfloat16, float16 or float64, and the same."
            )
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2]:
        raise ValueError(
            f"`x` must have shape (M, in) and `weight` (E, out, in), got {tuple(x.shape)} and {tuple(weight.shape)}."
        )
    if bias is not None and bias.shape != weight.shape[:2]:
        raise ValueError(f"`bias` must have shape {tuple(weight.shape[:2])} like `weight`, got {tuple(bias.shape)}.")
    if offsets.shape != weight.shape[:1] or offsets.dtype != torch.int32:
        raise ValueError(
            f"`offsets` must be int32 of shape {tuple(weight.shape[:1])}, got {offsets.dtype} of"
            f" {tuple(offsets.shape)}."
        )


# -- Registration ------------------------------------------------------------------------------------------------------

_backward_op = define(
    "grouped_linear_backward(Tensor grad, Tensor x, Tensor weight, Tensor offsets, bool by_x, bool by_weight,"
    " bool by_bias) -> (Tensor, Tensor, Tensor)",
    reference=_backward_reference,
    launcher=_launch_backward,
    fake=lambda grad, x, weight, offsets, by_x, by_weight, by_bias: _results(grad, x, weight, by_x, by_weight, by_bias),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, offsets = inputs
    ctx.save_for_backward(x, weight, bias, offsets)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias, offsets = ctx.saved_tensors
    if torch.is_grad_enabled():

        def again(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return _plain(x, weight, bias, offsets)

        return *differentiable_gradients(again, (x, weight, bias), grad), None
    wanted = tuple(ctx.needs_input_grad[:3])
    found = _backward_op(grad.contiguous(), x, weight, offsets, *wanted)
    return *(one if is_wanted else None for one, is_wanted in zip(found, wanted, strict=True)), None


_op = define(
    "grouped_linear(Tensor x, Tensor weight, Tensor? bias, Tensor offsets) -> Tensor",
    reference=_reference,
    launcher=_launch,
    fake=lambda x, weight, bias, offsets: x.new_empty(len(x), weight.shape[1]),
    backward=_backward,
    setup_context=_setup_context,
)

# -- Public function ---------------------------------------------------------------------------------------------------


def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    """Apply to each group of rows the linear layer of its expert.

    Args:
        x: ``(M, in)``, fp32, bf16, fp16 or fp64, sorted by expert.
        weight: ``(E, out, in)`` in the dtype of ``x``.
        bias: ``(E, out)`` in the dtype of ``x``, or None.
        offsets: ``(E,)`` int32: where the rows of each expert end.

    Returns:
        ``(M, out)`` in the dtype of ``x``; rows from ``offsets[-1]`` on mean nothing. Experts without rows have
        gradients of zeros. Second derivatives are those of plain PyTorch.

    Raises:
        TypeError: Another dtype, or several.
        ValueError: Shapes that do not fit, tensors on several devices.
    """
    check_devices("grouped_linear", x=x, weight=weight, bias=bias, offsets=offsets)
    refuse_transforms("grouped_linear", x, weight, bias)
    y: Tensor = _op(x.contiguous(), weight, bias, offsets)
    return y
