"""Whether the values of a tensor are in memory, and that memory, whatever class of tensor it is.

A class of tensors whose values are stored elsewhere, and read when they are used, says ``is_read_lazily = True``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["is_in_memory", "ordinary", "lazily_read_class"]


def is_in_memory(tensor: Any) -> bool:
    """Say whether the values of a tensor need not be read before they are used."""
    return not getattr(type(tensor), "is_read_lazily", False)


def ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """Return an ordinary tensor over the same memory, for those who know when there is something in it."""
    if is_in_memory(tensor):
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach()


def lazily_read_class(types: Iterable[type]) -> Any:
    """Return the first class of tensors whose values are read when they are used; None if there is none."""
    return next((kind for kind in types if getattr(kind, "is_read_lazily", False)), None)
