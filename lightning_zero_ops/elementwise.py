"""Flat tensors piece by piece: one program of a kernel for each piece, or pieces that fit a CPU's cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from lightning_zero_ops.registry import cdiv, on_device_of

__all__ = ["BLOCK", "NUM_WARPS", "launch", "pieces"]

# 8 elements per thread: one 128-bit load of a 16-bit tensor, two of an fp32 one. On an H200 AdamW moves 0.99 of
# the bytes per second of a copy.
BLOCK = 1024
NUM_WARPS = 4


def launch(kernel: Any, first: Tensor, *rest: Any, **constants: Any) -> None:
    """Run a kernel over all elements of ``first``, its first argument; nothing if there are none."""
    if first.numel():
        with on_device_of(first):
            kernel[(cdiv(first.numel(), BLOCK),)](first, *rest, **constants, BLOCK=BLOCK, num_warps=NUM_WARPS)


# So that values between input and result stay in a cache of 1 MB; a multiple of all blocks that share a scale.
_CPU_CHUNK = 65536


def pieces(tensor: Tensor) -> Iterator[slice]:
    """Yield ranges of elements for a plain implementation: short ones on a CPU, elsewhere all at once."""
    chunk = _CPU_CHUNK if tensor.is_cpu else max(tensor.numel(), 1)
    for start in range(0, tensor.numel(), chunk):
        yield slice(start, min(start + chunk, tensor.numel()))
