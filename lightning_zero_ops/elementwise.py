"""Starts kernels of which every program takes the next elements of flat tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_zero_ops.registry import cdiv, on_device_of

__all__ = ["BLOCK", "NUM_WARPS", "launch"]

# 8 elements per thread: one 128-bit load of a 16-bit tensor, two of an fp32 one. No GPU has measured it yet.
BLOCK = 1024
NUM_WARPS = 4


def launch(kernel: Any, first: Tensor, *rest: Any, **constants: Any) -> None:
    """Run a kernel over all elements of ``first``, its first argument; nothing if there are none."""
    if first.numel():
        with on_device_of(first):
            kernel[(cdiv(first.numel(), BLOCK),)](first, *rest, **constants, BLOCK=BLOCK, num_warps=NUM_WARPS)
