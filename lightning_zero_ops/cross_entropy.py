"""The output projection and its cross-entropy in one op: logits exist for a chunk of tokens at a time.

Note [Formula]
    Per token with logits ``l = softcap tanh((W x + b) / softcap)`` (no cap: ``W x + b``), ``lse = log sum exp l``,
    label ``k``, smoothing ``e``, vocabulary ``V`` and z-loss weight ``z``::

        loss   = (1 - e) (lse - l_k) + e (lse - mean l) + z lse^2
        dl_v   = p_v (1 + 2 z lse) - (1 - e) [v = k] - e / V          p = softmax l

    summed over the tokens whose label is not ``ignore_index``, or averaged over them.

Note [Gradients in forward]
    While a chunk's logits are there they are overwritten with their gradients, and those of ``x``, ``weight`` and
    ``bias`` follow by matrix products. So there are three products per chunk instead of the four of recomputing, and
    backward only multiplies by the gradient of the loss (after Liger-Kernel's fused linear cross-entropy,
    arXiv:2410.10989).

Note [Headroom]
    fp16 has no room for ``softmax / number of tokens``. There the gradients carry a power of two, at most the number of
    tokens that are counted, until backward, which divides by it: the loss scale of mixed precision comes too late for
    them. So they are at most those of the sum over tokens, which carry nothing. An element of the mean gradient of the
    weight is at most the largest of ``x``, which one frequent label reaches. Where that times the power of two exceeds
    2^15, ``x`` is divided by another one for the weight's products: they would be inf at every loss scale.

Note [Length of chunks]
    Each chunk moves the sum of the weight's gradient through memory, ``12 V H`` bytes where it is kept in fp32 and its
    product is rounded to 16 bits first, beside products of ``6 V H`` operations per token. At 3.35 TB/s and 600
    TFLOP/s, by arithmetic and not measured, that takes 1.4 of the time of the products where chunks have 256 tokens,
    as of 128 MiB with 262,144 words, and 0.17 with 2,048. So where tokens suffice for eight chunks a chunk has up to
    ``V H`` bytes of logits, a quarter of that sum.

Note [Values that are not finite]
    A logit of -inf (a padded vocabulary, an overflow of fp16) has probability 0; loss and gradients are finite where
    the label has another. With smoothing, or for its own label, the loss is inf. A logit of inf or NaN, and a row of
    -inf alone, make loss and gradients of their token NaN, and so does a label outside of the vocabulary, which a CPU
    refuses: asking a GPU would wait for it. Tokens that are not counted have neither.

Note [Sums over chunks]
    A 16-bit sum over chunks rounds at every one. The largest error over that of PyTorch's one rounding, in 72 draws
    each of 336 tokens and 1,000 words in bf16 and fp16: two chunks 1.9, three 2.6, four 2.6, six 3.0. So two are within
    twice PyTorch's error. Over more chunks the sum is kept in fp32, or there are only two: whichever needs fewer bytes.
    Transient, for 8,192 tokens in bf16 and 32,000 words: two 265 MiB at any width, fp32 516 at width 4,096, eager
    PyTorch 3,000.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero_ops.cut_cross_entropy import CutRows, Terms
from lightning_zero_ops.registry import (
    cdiv,
    check_devices,
    define,
    differentiable_gradients,
    is_transformed,
    jit,
    next_power_of_2,
    on_device_of,
    refuse_transforms,
    tl,
)

__all__ = ["linear_cross_entropy"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CHUNK_BYTES = 128 << 20
_FEWEST_LONG_CHUNKS = 8  # that longer chunks cut the tokens into
_ROUNDED_CHUNKS = 2
_SUM_ROWS = 4096
_SCRATCH_TOKENS = 64


# -- Reference ---------------------------------------------------------------------------------------------------------


def _rows_reference(logits: Tensor, target: Tensor, losses: Tensor, factor: Tensor, terms: Terms) -> None:
    """Write the losses of a chunk, and put ``factor`` times their gradients in the place of the logits."""
    for start in range(0, len(target), _SCRATCH_TOKENS):
        part = slice(start, start + _SCRATCH_TOKENS)
        _few_rows_reference(logits[part], target[part], losses[part], factor, terms)


def _few_rows_reference(logits: Tensor, target: Tensor, losses: Tensor, factor: Tensor, terms: Terms) -> None:
    vocabulary = logits.shape[1]
    value = logits.float()
    value = torch.tanh(value / terms.softcap).mul_(terms.softcap) if terms.softcap else value
    slope = 1.0 - (value / terms.softcap).square_() if terms.softcap else None
    is_counted = target != terms.ignore_index
    is_known = (target >= 0) & (target < vocabulary)
    label = torch.where(is_known, target, 0).unsqueeze(1)
    smoothing = terms.label_smoothing
    largest = value.amax(1)
    of_label, mean = value.gather(1, label).squeeze(1), value.mean(1)
    grad = value.sub_(largest.unsqueeze(1)).exp_()
    total = grad.sum(1)
    lse = largest + torch.log(total)
    loss = lse - (1.0 - smoothing) * of_label
    if terms.z_loss:  # the square overflows, and 0 times that is NaN
        loss = loss + terms.z_loss * lse.square()
    if smoothing:
        loss = loss - smoothing * mean
    loss = torch.where(is_known, loss, torch.nan)
    losses.copy_(torch.where(is_counted, loss, 0.0))
    # Not exp(value - lse), which has the rounding of lse in all of a row.
    grad.mul_(((1.0 + 2.0 * terms.z_loss * lse) / total).unsqueeze(1))
    grad.sub_(smoothing / vocabulary)
    grad.scatter_add_(1, label, torch.full_like(label, smoothing - 1.0, dtype=grad.dtype))
    if slope is not None:
        grad.mul_(slope)
    grad.masked_fill_(~is_known.unsqueeze(1), torch.nan)
    logits.copy_(torch.where(is_counted.unsqueeze(1), grad.mul_(factor), 0.0))


# -- Tuning space ------------------------------------------------------------------------------------------------------

# Columns that a program holds at a time. Not measured on a GPU.
_MAX_BLOCK = 8192
_NUM_WARPS = 16

# -- Kernel ------------------------------------------------------------------------------------------------------------


@jit
def _capped(value, softcap, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    value = value.to(tl.float32)
    if CAPPED:
        # tanh: its series where the quotient of exponentials would cancel.
        part = value / softcap
        square = part * part
        series = part * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
        value = softcap * tl.where(square < 0.04, series, 2.0 / (1.0 + tl.exp(-2.0 * part)) - 1.0)
    return value


@jit
def _rows_kernel(  # type: ignore[no-untyped-def]
    logits,
    target,
    losses,
    factor,
    stride,
    vocabulary,
    ignore_index,
    smoothing,
    z_loss,
    softcap,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    column = tl.arange(0, BLOCK)
    smoothing = tl.cast(smoothing, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    label = tl.load(target + row)
    is_counted = label != ignore_index
    # Note [Values that are not finite]
    is_known = (label >= 0) & (label < vocabulary)
    of_label = _capped(tl.load(logits + label, mask=is_known, other=float("nan")), softcap, CAPPED)
    largest = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    exponentials = tl.full([], 0.0, tl.float32)
    for start in range(0, vocabulary, BLOCK):
        inside = start + column < vocabulary
        value = _capped(tl.load(logits + start + column, mask=inside, other=0.0), softcap, CAPPED)
        total += tl.sum(tl.where(inside, value, 0.0), 0)
        value = tl.where(inside, value, float("-inf"))
        larger = tl.maximum(largest, tl.max(value, 0))
        # So far only -inf: their exponentials are 0, not those of -inf + inf.
        base = tl.where(larger == float("-inf"), 0.0, larger)
        exponentials = exponentials * tl.exp(largest - base) + tl.sum(tl.exp(value - base), 0)
        largest = larger
    lse = largest + tl.log(exponentials)
    # Not smoothing times the mean, which is NaN where there is no smoothing and a logit is -inf.
    smoothed = tl.where(smoothing > 0.0, smoothing * (total / vocabulary), 0.0)
    # The square overflows, and 0 times that is NaN.
    squared = tl.where(z_loss > 0.0, tl.cast(z_loss, tl.float32) * lse * lse, 0.0)
    loss = lse - (1.0 - smoothing) * of_label - smoothed + squared
    tl.store(losses + row, tl.where(is_counted, loss, 0.0))
    scale = tl.where(is_known, tl.load(factor), float("nan"))
    # Not exp(value - lse), which has the rounding of lse in all of a row.
    on_all = (1.0 + 2.0 * tl.cast(z_loss, tl.float32) * lse) / exponentials
    for start in range(0, vocabulary, BLOCK):
        inside = start + column < vocabulary
        value = _capped(tl.load(logits + start + column, mask=inside, other=0.0), softcap, CAPPED)
        grad = tl.exp(value - largest) * on_all - smoothing / vocabulary
        grad -= tl.where(start + column == label, 1.0 - smoothing, 0.0)
        if CAPPED:
            grad *= 1.0 - (value / softcap) * (value / softcap)
        grad = tl.where(is_counted, grad * scale, 0.0)
        tl.store(logits + start + column, grad.to(logits.dtype.element_ty), mask=inside)


# -- Launcher ----------------------------------------------------------------------------------------------------------


def _launch_rows(logits: Tensor, target: Tensor, losses: Tensor, factor: Tensor, terms: Terms) -> None:
    block = min(next_power_of_2(logits.shape[1]), _MAX_BLOCK)
    with on_device_of(logits):
        _rows_kernel[(len(target),)](
            logits,
            target,
            losses,
            factor,
            logits.stride(0),
            logits.shape[1],
            terms.ignore_index,
            terms.label_smoothing,
            terms.z_loss,
            terms.softcap,
            CAPPED=terms.softcap != 0.0,
            BLOCK=block,
            num_warps=min(max(block // 256, 4), _NUM_WARPS),
        )


def _check(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> None:
    num_tokens, hidden = x.shape
    vocabulary = len(weight)
    if not vocabulary:
        raise ValueError(f"`weight` must have at least one row, one for every word, got {tuple(weight.shape)}.")
    shapes = {
        "weight": (weight, (vocabulary, hidden)),
        "target": (target, (num_tokens,)),
        "bias": (bias, (vocabulary,)),
    }
    for name, (tensor, shape) in shapes.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(
                f"`{name}` must have shape {shape} beside `x` of {tuple(x.shape)}, got {tuple(tensor.shape)}."
            )
    for name, tensor in {"x": x, "weight": weight, "bias": bias}.items():
        if tensor is None:
            continue
        if tensor.dtype not in _DTYPES or tensor.dtype != x.dtype:
            raise TypeError(
                f"`{name}` has dtype {tensor.dtype} beside `x` of {x.dtype}. All must be"
                " float32, bfloat16 or float16, and the same."
            )
        if not tensor.is_contiguous():
            raise ValueError(f"`{name}` must be contiguous, but has strides {tensor.stride()}.")
    if target.dtype != torch.int64:
        raise TypeError(f"`target` has dtype {target.dtype}; labels are int64.")


def _check_labels(target: Tensor, vocabulary: int, ignore_index: int) -> None:
    """Refuse labels outside of the vocabulary, on CPUs; on a GPU, where asking would wait, they give NaN."""
    is_wrong = (target != ignore_index) & ((target < 0) | (target >= vocabulary))
    if target.device.type == "cpu" and bool(is_wrong.any()):
        raise ValueError(
            f"`target` contains {int(target[is_wrong][0])}. Labels are 0 to {vocabulary - 1}, or"
            f" `ignore_index={ignore_index}`."
        )


@dataclass(frozen=True)
class _Chunks:
    """The number of tokens projected at a time, and whether the sum over chunks is kept in fp32."""

    tokens: int
    is_wide: bool

    @classmethod
    def plan(cls, x: Tensor, weight: Tensor, chunk_tokens: int) -> _Chunks:
        """Choose by bytes: Note [Sums over chunks]. ``chunk_tokens`` other than 0 is the number of tokens."""
        vocabulary, hidden = weight.shape
        row_bytes = vocabulary * x.element_size()
        tokens = chunk_tokens or cls._default_tokens(len(x), vocabulary, hidden, row_bytes)
        if weight.dtype == torch.float32 or len(x) <= tokens * _ROUNDED_CHUNKS:
            return cls(tokens, is_wide=False)
        fewest = cdiv(len(x), _ROUNDED_CHUNKS)
        if chunk_tokens == 0 and fewest * row_bytes <= tokens * row_bytes + 4 * vocabulary * hidden:
            return cls(fewest, is_wide=False)
        return cls(tokens, is_wide=True)

    @staticmethod
    def _default_tokens(num_tokens: int, vocabulary: int, hidden: int, row_bytes: int) -> int:
        """Return a multiple of 64 tokens, by Note [Length of chunks]."""
        nbytes = max(_CHUNK_BYTES, min(vocabulary * hidden, cdiv(num_tokens, _FEWEST_LONG_CHUNKS) * row_bytes))
        return max(nbytes // row_bytes // 64 * 64, 64)


def _headroom(x: Tensor, target: Tensor, ignore_index: int, is_mean: bool) -> Tensor | float:
    if x.dtype != torch.float16 or not is_mean:
        return 1.0
    return _power_of_2((target != ignore_index).sum().float().clamp(1.0, 2.0**14))


def _factor_of_x(x: Tensor, headroom: Tensor | float) -> Tensor | float:
    """Return the factor of ``x`` with which the products for the weight fit: a power of 2 up to 1."""
    if not isinstance(headroom, Tensor) or not x.numel():
        return 1.0
    fitting = 2.0**15 / (torch.linalg.vector_norm(x, math.inf, dtype=torch.float32) * headroom)
    return _power_of_2(torch.where(fitting < 1.0, fitting, 1.0))  # not one that is NaN


def _power_of_2(value: Tensor) -> Tensor:
    mantissa, _ = torch.frexp(value)  # from 0.5
    return value / (2.0 * mantissa)


def _chunked(
    rows: Callable[[Tensor, Tensor, Tensor, Tensor, Terms], None],
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    terms: Terms,
    is_mean: bool,
    chunk_tokens: int,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the loss and the gradients that are needed (of x, weight, bias), times the headroom.

    That of the weight is times ``_factor_of_x`` too.
    """
    _check(x, weight, target, bias)
    _check_labels(target, len(weight) * (rows.size if isinstance(rows, CutRows) else 1), terms.ignore_index)
    _, grad_x, grad_weight, grad_bias = _empty_results(x, weight, bias, needs)
    chunks = _Chunks.plan(x, weight, chunk_tokens)
    total_weight = (
        grad_weight.new_zeros(grad_weight.shape, dtype=torch.float32) if chunks.is_wide else grad_weight.zero_()
    )
    total_bias = grad_bias.new_zeros(grad_bias.shape, dtype=torch.float64)
    losses = x.new_empty(len(x), dtype=torch.float32)
    share = (target != terms.ignore_index).sum().float().reciprocal() if is_mean else losses.new_ones(())
    headroom = _headroom(x, target, terms.ignore_index, is_mean)
    factor, x_factor = share * headroom, _factor_of_x(x, headroom)
    # Rows start at multiples of 16 bytes, so that loads are wide at any size of the vocabulary.
    width = cdiv(len(weight), 8) * 8
    scratch = x.new_empty(min(chunks.tokens, len(x)), width)
    for start in range(0, len(x), chunks.tokens):
        x_chunk = x[start : start + chunks.tokens]
        logits = scratch[: len(x_chunk), : len(weight)]
        if bias is None:
            torch.mm(x_chunk, weight.t(), out=logits)
        else:
            torch.addmm(bias, x_chunk, weight.t(), out=logits)
        part = slice(start, start + len(x_chunk))
        rows(logits, target[part], losses[part], factor, terms)
        if needs[0]:
            torch.mm(logits, weight, out=grad_x[part])
        if needs[1]:
            _add_product(total_weight, logits, x_chunk * x_factor if isinstance(x_factor, Tensor) else x_chunk)
        if needs[2]:
            total_bias += logits.sum(0, dtype=torch.float32)
    if chunks.is_wide:
        grad_weight.copy_(total_weight)
    return losses.sum(dtype=torch.float64).float() * share, grad_x, grad_weight, grad_bias.copy_(total_bias)


def _add_product(total: Tensor, grad: Tensor, x: Tensor) -> None:
    """Add ``grad^T x`` to the sum; into an fp32 sum of 16-bit factors by a few rows at a time."""
    if total.dtype == x.dtype:
        total.addmm_(grad.t(), x)
        return
    for start in range(0, len(total), _SUM_ROWS):
        total[start : start + _SUM_ROWS] += grad[:, start : start + _SUM_ROWS].t() @ x


def _reference(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *settings: Any) -> Any:
    return _chunked(_rows_reference, x, weight, target, bias, Terms(*settings[:4]), *settings[4:])


def _launch(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *settings: Any) -> Any:
    return _chunked(_launch_rows, x, weight, target, bias, Terms(*settings[:4]), *settings[4:])


# -- Registration ------------------------------------------------------------------------------------------------------


def _empty_results(
    x: Tensor, weight: Tensor, bias: Tensor | None, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss = x.new_empty((), dtype=torch.float32)
    grads = [
        x.new_empty(0) if tensor is None or not is_needed else torch.empty_like(tensor)
        for tensor, is_needed in zip((x, weight, bias), needs, strict=True)
    ]
    return loss, grads[0], grads[1], grads[2]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, target, bias, *ctx.settings = inputs
    ctx.save_for_backward(x, weight, target, bias, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, target, bias, *grads = ctx.saved_tensors
    rest = (None,) * len(ctx.settings)
    if grad is None:
        return (None, None, None, None, *rest)
    if torch.is_grad_enabled():

        def again(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return _whole(x, weight, target, bias, Terms(*ctx.settings[:4]), ctx.settings[4])

        grad_x, grad_weight, grad_bias = differentiable_gradients(again, (x, weight, bias), grad)
        return grad_x, grad_weight, None, grad_bias, *rest
    headroom = _headroom(x, target, ctx.settings[0], ctx.settings[4])
    grad_x, grad_weight, grad_bias = _scaled(grads, grad / headroom, _factor_of_x(x, headroom), ctx.settings[-1])
    return grad_x, grad_weight, None, grad_bias, *rest


def _scaled(
    grads: Sequence[Tensor], factor: Tensor, x_factor: Tensor | float, needs: Sequence[bool]
) -> list[Tensor | None]:
    factors = factor, factor / x_factor, factor
    return [
        _times(grad, one) if is_needed else None for grad, one, is_needed in zip(grads, factors, needs, strict=True)
    ]


def _times(grad: Tensor, factor: Tensor) -> Tensor:
    """Multiply a saved gradient, in place where nobody reads it again.

    Its graph may be kept for another backward, or be only traced: compilers reuse memory themselves. A batch of
    factors makes one gradient several.

    A GPU rounds a 0-dim factor to the dtype of the gradient first, and compilers do. A CPU does not, and would copy a
    gradient in 16 bits as fp32 for one of a dimension.
    """
    if type(grad) is not Tensor or _is_batched(factor):
        return (grad * factor.reshape(1)).to(grad.dtype)
    is_kept = torch._C._autograd._get_current_graph_task_keep_graph()
    return (grad.clone() if is_kept else grad).mul_(factor if grad.is_cpu else factor.reshape(1))


def _is_batched(tensor: Tensor) -> bool:
    """Whether a ``vmap``, of ``torch.func`` or of ``is_grads_batched``, runs over the tensor."""
    functorch: Any = torch._C._functorch
    return bool(functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor))


def _whole(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, terms: Terms, is_mean: bool) -> Tensor:
    """Return the loss in plain PyTorch with whole logits; for second derivatives."""
    logits = torch.nn.functional.linear(x, weight, bias).float()
    logits = terms.softcap * torch.tanh(logits / terms.softcap) if terms.softcap else logits
    counted = target != terms.ignore_index
    loss = torch.nn.functional.cross_entropy(
        logits, target, ignore_index=terms.ignore_index, label_smoothing=terms.label_smoothing, reduction="sum"
    )
    if terms.z_loss:
        loss = loss + terms.z_loss * (torch.logsumexp(logits, 1).square() * counted).sum()
    return loss / counted.sum() if is_mean else loss


_op = define(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor target, Tensor? bias, int ignore_index,"
    " float label_smoothing, float z_loss, float softcap, bool is_mean, int chunk_tokens,"
    " bool[] needs) -> (Tensor, Tensor, Tensor, Tensor)",
    reference=_reference,
    launcher=_launch,
    fake=lambda x, weight, target, bias, *settings: _empty_results(x, weight, bias, settings[-1]),
    backward=_backward,
    setup_context=_setup_context,
)

# -- Over a group of ranks ---------------------------------------------------------------------------------------------


class _CutLinearCrossEntropy(torch.autograd.Function):
    """The same with rows of the weight per rank. Collective in forward; backward sends nothing."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, group: dist.ProcessGroup, *rest: Any
    ) -> Tensor:
        *settings, needs = rest
        loss, *grads = _chunked(
            CutRows(group), x, weight, target, bias, Terms(*settings[:4]), settings[4], settings[5], needs
        )
        if needs[0]:
            dist.all_reduce(grads[0], group=group)
        ctx.save_for_backward(target, *grads)
        ctx.headroom = _headroom(x, target, settings[0], settings[4])
        ctx.x_factor = _factor_of_x(x, ctx.headroom)
        ctx.needs = needs
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "`linear_cross_entropy(group=...)` has no second derivatives (`create_graph=True`). Gather the logits,"
                " or use a whole `weight` without a group."
            )
        _, *parts = ctx.saved_tensors
        grad_x, grad_weight, grad_bias = _scaled(parts, grads[0] / ctx.headroom, ctx.x_factor, ctx.needs)
        return grad_x, grad_weight, None, grad_bias, *(None,) * 8


# -- Public function ---------------------------------------------------------------------------------------------------


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    chunk_tokens: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return the cross-entropy of ``x @ weight.T + bias`` without ever holding all logits.

    With a ``group`` each of its ranks has consecutive rows of the weight, in rank order, and the same ``x`` and
    ``target``. Forward is then collective: per token a maximum and one sum of three numbers are exchanged, and the
    gradient of ``x`` is summed over the ranks, so ``x`` needs no further reduction. Losses have the same bits on every
    rank. There are no second derivatives, and losses are computed by PyTorch's operations, not by the Triton kernel.

    Under autocast ``x``, ``weight`` and ``bias`` are cast as for ``torch.nn.functional.linear``. Gradients are made in
    forward where they are needed, and kept until backward, which may run again where its graph was retained. Second
    derivatives are those of plain PyTorch, with whole logits.

    Args:
        x: ``(..., H)`` hidden states, fp32, bf16 or fp16.
        weight: ``(V, H)`` in the dtype of ``x``; with a group this rank's ``(V / size, H)``.
        target: ``(...)`` int64 labels.
        bias: ``(V,)`` in the dtype of ``x``, or None; with a group this rank's ``(V / size,)``.
        ignore_index: Tokens with this label have no loss and no gradient.
        reduction: The mean over the other tokens (NaN where there are none), or their sum.
        label_smoothing: As in ``torch.nn.functional.cross_entropy``.
        z_loss: Weight of the squared logarithm of the softmax's denominator.
        softcap: Logits ``l`` become ``softcap * tanh(l / softcap)``.
        chunk_tokens: Tokens that are projected at a time. None: about 128 MiB of logits, more with large vocabularies
            (Note [Length of chunks]), or half of the tokens where that needs fewer bytes (Note [Sums over chunks]).
        group: The tensor ranks that the vocabulary is cut over. None: ``weight`` is whole.

    Returns:
        The loss, 0-dim fp32.

    Raises:
        TypeError: Another dtype, or several.
        ValueError: Shapes that do not fit, options out of range, on CPUs labels outside of the vocabulary and ranks
            with different numbers of rows (on a GPU the loss is NaN).
    """
    _check_options(reduction, label_smoothing, z_loss, softcap, chunk_tokens)
    check_devices("linear_cross_entropy", x=x, weight=weight, target=target, bias=bias)
    refuse_transforms("linear_cross_entropy", x, weight, bias)
    device = x.device.type
    if not x.is_meta and torch.is_autocast_enabled(device):  # the meta device has no autocast
        dtype = torch.get_autocast_dtype(device)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    x = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).contiguous()
    inputs = (x, weight.contiguous(), None if bias is None else bias.contiguous())
    # Inside of a transform a tensor does not say whether one outside requires a gradient.
    is_needed = is_transformed()
    needs = [
        torch.is_grad_enabled() and tensor is not None and (tensor.requires_grad or is_needed) for tensor in inputs
    ]
    tensors = (inputs[0], inputs[1], target.reshape(-1).contiguous(), inputs[2])
    is_mean = reduction == "mean"
    settings = (ignore_index, label_smoothing, z_loss, softcap or 0.0, is_mean, chunk_tokens or 0, needs)
    loss: Tensor = (
        _op(*tensors, *settings)[0] if group is None else _CutLinearCrossEntropy.apply(*tensors, group, *settings)  # type: ignore[no-untyped-call]
    )
    return loss


def _check_options(
    reduction: str, label_smoothing: float, z_loss: float, softcap: float | None, chunk_tokens: int | None
) -> None:
    if reduction not in ("mean", "sum"):
        raise ValueError(f"`reduction={reduction!r}` is not known. Use 'mean' or 'sum'.")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"`label_smoothing={label_smoothing}` must be from 0 to 1.")
    if not 0.0 <= z_loss < math.inf:
        raise ValueError(f"`z_loss={z_loss}` must be finite and not negative.")
    if softcap is not None and not 0.0 < softcap < math.inf:
        raise ValueError(f"`softcap={softcap}` must be positive and finite. Use None for none.")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"`chunk_tokens={chunk_tokens}` must be at least 1. Use None for the default.")
