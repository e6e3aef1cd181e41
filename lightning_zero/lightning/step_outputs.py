"""Entries that a ``training_step`` returns beside the loss, of all micro-batches of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_zero.parallel.pipeline.schedule.microbatches import leaves_of, weighted_mean
from lightning_zero.parallel.pipeline.stages.sources import is_fake

__all__ = ["joined_outputs", "nbytes_of"]


def joined_outputs(outputs: Sequence[dict[str, Any]], sizes: Sequence[int]) -> tuple[dict[str, Any], list[str]]:
    """Return the entries beside the loss of a batch's micro-batches as those of the batch, and the names left out.

    Floating-point scalars are averaged by samples; tensors and lists with an item for each sample are joined. With one
    micro-batch all entries are those of the batch, except values of an earlier stage.
    """
    names = [name for name in outputs[0] if name != "loss"]
    found = {name: _joined([output.get(name) for output in outputs], sizes) for name in names}
    left_out = [name for name, value in found.items() if value is _NOT_JOINED]
    return {name: value for name, value in found.items() if value is not _NOT_JOINED}, left_out


_NOT_JOINED = object()


def _joined(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    if any(is_fake(leaf) for value in values for _, leaf in leaves_of(value, "")):
        return _NOT_JOINED
    if len(values) == 1:
        return values[0]
    have_samples = [isinstance(value, (torch.Tensor, list)) and _length(value) for value in values] == list(sizes)
    if all(isinstance(value, torch.Tensor) for value in values):
        if have_samples:
            return torch.cat([value.detach() for value in values])
        if all(value.ndim == 0 and value.is_floating_point() for value in values):
            return weighted_mean([value.detach() for value in values], sizes).to(values[0].dtype)
    if all(isinstance(value, list) for value in values) and have_samples:
        return [item for value in values for item in value]
    if all(isinstance(value, float) for value in values):
        return sum(value * size for value, size in zip(values, sizes, strict=True)) / sum(sizes)
    return _NOT_JOINED


def _length(value: torch.Tensor | list[Any]) -> int:
    return len(value) if isinstance(value, list) or value.ndim > 0 else -1


def nbytes_of(value: Any) -> int:
    """Return the bytes of the tensors in a value, and 64 for every other one."""
    return sum(leaf.nbytes if isinstance(leaf, torch.Tensor) else 64 for _, leaf in leaves_of(value, ""))
