"""Leaves that code may write into, as it may into another module's outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["writable"]


def writable(leaf: Tensor) -> Tensor:
    """Return a tensor of the same memory that may be changed in place, which a leaf with a gradient may not."""
    if not (leaf.requires_grad and leaf.is_leaf and torch.is_grad_enabled()):
        return leaf
    result: Tensor = _Writable.apply(leaf)  # type: ignore[no-untyped-call]
    return result


class _Writable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.data

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]
