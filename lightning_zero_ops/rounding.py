"""Stochastic rounding to bf16.

Note [Stochastic rounding]
    An fp32 value lies between two neighbours in bf16. Adding 16 random bits below the bf16 ones and cutting takes the
    upper neighbour with the probability of its nearness, so the expected result is the value. The bits are a hash of
    seed and index (the finalizer "lowbias32", twice), the same on every device, and do not depend on how a tensor is
    cut into programs. Infinities and NaNs stay.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_zero_ops.elementwise import launch
from lightning_zero_ops.registry import define, jit, jit_for_any, refuse_transforms, tl

__all__ = ["hash_bits", "keys_of", "mix", "round_stochastic", "wrapped"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_SCRATCH_NUMEL = 1 << 16

# -- Reference ---------------------------------------------------------------------------------------------------------


def _reference(x: Tensor, seed: int) -> Tensor:
    _check(x)
    y = torch.empty_like(x, dtype=torch.bfloat16)
    low, high = keys_of(seed)
    for start in range(0, x.numel(), _SCRATCH_NUMEL):
        part = x[start : start + _SCRATCH_NUMEL].float()
        index = torch.arange(start, start + part.numel(), device=x.device)
        noise = hash_bits(hash_bits(index.int(), low) ^ (index >> 32).int(), high) & 0xFFFF
        rounded = ((part.view(torch.int32) + noise) & -65536).view(torch.float32)
        y[start : start + _SCRATCH_NUMEL] = torch.where(part.isfinite(), rounded, part)
    return y


def keys_of(seed: int) -> tuple[int, int]:
    """Return two 32-bit numbers that differ wholly for seeds that hardly do (the step of "splitmix64")."""
    bits = (seed + 0x9E3779B97F4A7C15) & (2**64 - 1)
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    bits ^= bits >> 31
    return bits & 0xFFFFFFFF, bits >> 32


def hash_bits(bits: Tensor, key: int) -> Tensor:
    """Mix 32 bits and a 32-bit key: int32, whose products wrap."""
    bits = bits ^ wrapped(key)
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    bits *= 0x7FEB352D
    bits ^= (bits >> 15).bitwise_and_(0x1FFFF)
    bits *= wrapped(0x846CA68B)
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    return bits


def wrapped(number: int) -> int:
    """Return the int32 with the lower 32 bits of a number."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


# -- Kernel ------------------------------------------------------------------------------------------------------------


@jit
def mix(bits):  # type: ignore[no-untyped-def]
    """Mix 32 bits, uint32, as ``hash_bits`` does."""
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@jit_for_any("key_low", "key_high")
def _round_stochastic_kernel(x, y, numel, key_low, key_high, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < numel, other=0.0).to(tl.float32)
    noise = mix(at.to(tl.uint32) ^ tl.cast(key_low, tl.uint32))
    noise = mix(noise ^ (at >> 32).to(tl.uint32) ^ tl.cast(key_high, tl.uint32)) & 0xFFFF
    bits = value.to(tl.uint32, bitcast=True)
    bits = tl.where(tl.abs(value) < float("inf"), bits + noise, bits)
    bits = tl.where(value == value, bits, 0x7FC00000)
    # The upper half of the bits is the result: no conversion rounds it again.
    tl.store(y + at, (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True), mask=at < numel)


# -- Launcher ----------------------------------------------------------------------------------------------------------


def _check(x: Tensor) -> None:
    if x.dtype not in _DTYPES:
        raise TypeError(f"`x` has dtype {x.dtype}; stochastic rounding takes float32, bfloat16 and float16.")
    if x.dim() != 1 or not x.is_contiguous():
        raise ValueError(f"`x` must be flat and contiguous, got shape {tuple(x.shape)} and strides {x.stride()}.")


def _launch(x: Tensor, seed: int) -> Tensor:
    _check(x)
    y = torch.empty_like(x, dtype=torch.bfloat16)
    launch(_round_stochastic_kernel, x, y, x.numel(), *map(wrapped, keys_of(seed)))
    return y


# -- Registration ------------------------------------------------------------------------------------------------------

_op = define(
    "round_stochastic(Tensor x, int seed) -> Tensor",
    reference=_reference,
    launcher=_launch,
    fake=lambda x, seed: torch.empty_like(x, dtype=torch.bfloat16),
)

# -- Public function ---------------------------------------------------------------------------------------------------


def round_stochastic(x: Tensor, seed: int) -> Tensor:
    """Round a flat tensor to bf16, up or down at random so that the expected result is the value.

    Args:
        x: ``(n,)``, fp32, bf16 or fp16.
        seed: From 0 to ``2^63 - 1``. The same seed rounds the same tensor alike on every device; take another one per
            use.

    Raises:
        TypeError: Another dtype.
        ValueError: Not flat and contiguous, or a negative seed; a tensor that requires a gradient.
    """
    if seed < 0:
        raise ValueError(f"`seed={seed}` must not be negative.")
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError("`x` requires a gradient, but rounding has none. Call it under `torch.no_grad()`.")
    refuse_transforms("round_stochastic", x)
    y: Tensor = _op(x, seed)
    return y
