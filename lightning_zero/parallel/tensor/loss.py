"""Cross-entropy over logits that are cut along the vocabulary: they are never gathered.

For logits z, label y and label smoothing s over V tokens the loss is

    log sum exp(z) - (1 - s) z_y - s mean(z)

A rank sees its own columns of z, so a maximum and one sum over the ranks of three numbers per token are exchanged, in
fp32. The gradient of a rank's columns needs nothing from the others (arXiv:1909.08053, section 3).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from lightning_zero.parallel.tensor.collectives import Ranks

__all__ = ["cut_cross_entropy"]


def cut_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    ranks: Ranks,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the cross-entropy of logits of which this rank has its columns; the same value on every rank.

    Collective: all ranks of the tensor group. The logits are the result of a ``column`` layer, whose region ends here.

    Args:
        logits: ``(..., vocabulary / size)``, of consecutive tokens from ``rank * vocabulary / size`` on.
        labels: ``(...)`` of tokens of the whole vocabulary.
        ranks: The tensor group.
        ignore_index: Label of positions that do not count.
        reduction: ``"mean"`` over the positions that count, ``"sum"`` or ``"none"``.
        label_smoothing: As in ``torch.nn.functional.cross_entropy``.

    Raises:
        NotImplementedError: In a backward with ``create_graph=True``.
        ValueError: Shapes or options do not fit.
        RuntimeError: A label is outside of the vocabulary (on a GPU, when the device is next waited for).
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"`cut_cross_entropy` got logits of shape {tuple(logits.shape)} and labels of shape {tuple(labels.shape)}."
            " Labels have the shape of the logits without the last dimension."
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"`reduction={reduction!r}` is not known. Use 'mean', 'sum' or 'none'.")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"`label_smoothing={label_smoothing!r}` must be a number from 0 to 1.")
    if ranks.end_region is not None:
        ranks.end_region()
    losses: Tensor = _CutCrossEntropy.apply(logits, labels, ranks, ignore_index, label_smoothing)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return losses
    total: Tensor = losses.sum()
    if reduction == "mean":
        total = total / (labels != ignore_index).sum()
    return total


class _CutCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ranks: Ranks, ignore: int, smoothing: float) -> Tensor:
        values = logits.float() if logits.dtype != torch.float64 else logits
        width = values.shape[-1]
        local = labels - ranks.rank * width
        is_known = (labels >= 0) & (labels < width * ranks.size)  # `gather` raises for others, as on one rank
        is_elsewhere = is_known & ((local < 0) | (local >= width)) | (labels == ignore)
        local = local.masked_fill(is_elsewhere, 0).unsqueeze(-1)
        values = values - ranks.all_reduce(values.amax(-1), maximum=True).unsqueeze(-1)
        chosen = values.gather(-1, local).squeeze(-1).masked_fill(is_elsewhere, 0)
        powers = values.exp()
        total, chosen, all_values = ranks.all_reduce(torch.stack([powers.sum(-1), chosen, values.sum(-1)]))
        vocabulary = width * ranks.size
        losses: Tensor = total.log() - (1 - smoothing) * chosen - smoothing / vocabulary * all_values
        ctx.save_for_backward(powers / total.unsqueeze(-1), local, is_elsewhere, labels == ignore)
        ctx.smoothing, ctx.vocabulary, ctx.dtype = smoothing, vocabulary, logits.dtype
        return losses.masked_fill(labels == ignore, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "`cut_cross_entropy` has no second derivatives (`create_graph=True`). Leave the head whole"
                " (`vocabulary=False`) and use `torch.nn.functional.cross_entropy` for losses with gradient penalties."
            )
        probabilities, local, is_elsewhere, is_ignored = ctx.saved_tensors
        grad = probabilities - ctx.smoothing / ctx.vocabulary
        of_label = (ctx.smoothing - 1.0) * (~is_elsewhere).to(grad.dtype).unsqueeze(-1)
        grad.scatter_add_(-1, local, of_label)
        grad *= grads[0].masked_fill(is_ignored, 0).unsqueeze(-1)
        return grad.to(ctx.dtype), None, None, None, None
