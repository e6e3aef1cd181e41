"""Block-wise int8 and int4 quantization, and sums of quantized tensors.

Note [Format]
    A flat tensor of ``n`` elements is cut into blocks of ``block``; the last one may be short. A block has one fp32
    scale ``s = max(max|x| / L, 2^-126)`` with ``L = 127`` for 8 bits and 7 for 4, and codes ``q = round(x / s)`` in
    ``[-L, L]``, half to even. So ``|x - q s| <= s / 2``, and zero stays zero.

    * 8 bits: ``(n,)`` int8.
    * 4 bits: ``(ceil(n / block) block / 2,)`` uint8. Byte ``i`` of a block holds the codes of its elements ``i`` (low
      four bits, two's complement) and ``i + block / 2``, so that both are read in consecutive loads.

    A block with an infinity or a NaN has an infinite scale and zeros for codes: all of it reads as NaN, none of it as a
    number. Scales per block of 8-bit codes: arXiv:2110.02861. Sums of quantized gradients: ZeRO++, arXiv:2306.10209,
    section 3.3.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lightning_zero_ops.elementwise import pieces
from lightning_zero_ops.registry import cdiv, check_devices, define, jit, on_device_of, refuse_transforms, tl

__all__ = ["dequantize_blockwise", "dequantize_reduce", "quantize_blockwise"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MIN_SCALE = 2.0**-126

# -- Reference ---------------------------------------------------------------------------------------------------------


def _quantize_reference(x: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor]:
    _check(x, bits, block)
    codes, scales = _fake_quantize(x, bits, block)
    for piece in pieces(x):
        some_codes, some_scales = _quantize_few(x[piece], bits, block)
        first_code, first_scale = piece.start * bits // 8, piece.start // block
        codes[first_code : first_code + some_codes.numel()] = some_codes
        scales[first_scale : first_scale + some_scales.numel()] = some_scales
    return codes, scales


def _quantize_few(x: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor]:
    blocks = _padded(x.float(), block).view(-1, block)
    level = 127.0 if bits == 8 else 7.0
    largest = torch.where(blocks.isnan(), torch.inf, blocks.abs()).amax(1) if len(blocks) else blocks.new_empty(0)
    # PyTorch divides by a number on CUDA by multiplying with its inverse, which rounds twice.
    scales = (largest / torch.full_like(largest, level)).clamp_(min=_MIN_SCALE)
    codes = torch.round(blocks * (1.0 / scales).unsqueeze(1)).nan_to_num_(nan=0.0).to(torch.int8)
    if bits == 8:
        return codes.view(-1)[: x.numel()].clone(), scales
    low, high = codes.view(torch.uint8).chunk(2, 1)
    return ((low & 15) | (high << 4)).view(-1), scales


def _dequantize_reduce_reference(
    codes: Tensor, scales: Tensor, numel: int, bits: int, block: int, factor: float, dtype: torch.dtype
) -> Tensor:
    _check_codes(codes, scales, numel, bits, block, dtype)
    y = codes.new_empty(numel, dtype=dtype)
    for piece in pieces(y):
        start, stop = piece.start, piece.stop
        some_codes = codes[:, start * bits // 8 : stop if bits == 8 else cdiv(stop, block) * block // 2]
        some_scales = scales[:, start // block : cdiv(stop, block)]
        total = scales.new_zeros(some_scales.shape[1] * block)
        for rank_codes, rank_scales in zip(some_codes, some_scales, strict=True):
            total += (_unpacked(rank_codes, bits, block).float() * rank_scales.unsqueeze(1)).view(-1)
        y[piece] = total[: stop - start] * factor
    return y


def _padded(x: Tensor, block: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, -x.numel() % block))


def _unpacked(codes: Tensor, bits: int, block: int) -> Tensor:
    """Return the codes of one rank, (blocks, block) int8."""
    if bits == 8:
        return _padded(codes, block).view(-1, block)
    packed = codes.view(-1, block // 2).view(torch.int8)
    return torch.cat(((packed << 4) >> 4, packed >> 4), 1)


# -- Tuning space ------------------------------------------------------------------------------------------------------

# Elements that a program holds. Not measured on a GPU; chosen so that every thread has one 128-bit load of 16-bit
# values.
_TILE = 2048
_NUM_WARPS = 4

# -- Kernels -----------------------------------------------------------------------------------------------------------

# As in `adamw.py`, every operation rounds once: codes are those of the reference on any device.


@jit
def _codes_of(x, scale, LEVEL: tl.constexpr):  # type: ignore[no-untyped-def]
    value = x * tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    value = tl.where(value == value, value, 0.0)
    # In fp32, adding and taking away 1.5 * 2^23 rounds to an integer, half to even.
    return ((value + 12582912.0) - 12582912.0).to(tl.int32)


@jit
def _quantize8_kernel(x, codes, scales, numel, num_blocks, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    value = tl.load(x + at, mask=at < numel, other=0.0).to(tl.float32)
    largest = tl.max(tl.where(value == value, tl.abs(value), float("inf")), 1)
    scale = tl.maximum(tl.div_rn(largest, tl.full(largest.shape, 127.0, tl.float32)), 1.1754943508222875e-38)
    tl.store(codes + at, _codes_of(value, scale[:, None], 127).to(tl.int8), mask=at < numel)
    tl.store(scales + row, scale, mask=row < num_blocks)


@jit
def _quantize4_kernel(x, codes, scales, numel, num_blocks, ROWS: tl.constexpr, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    element = tl.arange(0, HALF)[None, :]
    at = row[:, None] * (2 * HALF) + element
    low = tl.load(x + at, mask=at < numel, other=0.0).to(tl.float32)
    high = tl.load(x + at + HALF, mask=at + HALF < numel, other=0.0).to(tl.float32)
    low_size = tl.where(low == low, tl.abs(low), float("inf"))
    high_size = tl.where(high == high, tl.abs(high), float("inf"))
    largest = tl.max(tl.maximum(low_size, high_size), 1)
    scale = tl.maximum(tl.div_rn(largest, tl.full(largest.shape, 7.0, tl.float32)), 1.1754943508222875e-38)
    code = (_codes_of(low, scale[:, None], 7) & 15) | ((_codes_of(high, scale[:, None], 7) & 15) << 4)
    tl.store(codes + row[:, None] * HALF + element, code.to(tl.uint8), mask=(row < num_blocks)[:, None])
    tl.store(scales + row, scale, mask=row < num_blocks)


@jit
def _dequantize8_kernel(  # type: ignore[no-untyped-def]
    codes,
    scales,
    y,
    numel,
    num_blocks,
    num_ranks,
    factor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for rank in range(num_ranks):
        scale = tl.load(scales + tl.cast(rank, tl.int64) * num_blocks + row, mask=row < num_blocks, other=0.0)
        code = tl.load(codes + tl.cast(rank, tl.int64) * numel + at, mask=at < numel, other=0)
        total += code.to(tl.float32) * scale[:, None]
    tl.store(y + at, (total * tl.cast(factor, tl.float32)).to(y.dtype.element_ty), mask=at < numel)


@jit
def _dequantize4_kernel(  # type: ignore[no-untyped-def]
    codes,
    scales,
    y,
    numel,
    num_blocks,
    num_ranks,
    factor,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    element = tl.arange(0, HALF)[None, :]
    low = tl.zeros([ROWS, HALF], tl.float32)
    high = tl.zeros([ROWS, HALF], tl.float32)
    for rank in range(num_ranks):
        at = tl.cast(rank, tl.int64) * num_blocks + row
        scale = tl.load(scales + at, mask=row < num_blocks, other=0.0)[:, None]
        code = tl.load(codes + at[:, None] * HALF + element, mask=(row < num_blocks)[:, None], other=0).to(tl.int32)
        low += ((code << 28) >> 28).to(tl.float32) * scale
        high += ((code << 24) >> 28).to(tl.float32) * scale
    factor = tl.cast(factor, tl.float32)
    at = row[:, None] * (2 * HALF) + element
    tl.store(y + at, (low * factor).to(y.dtype.element_ty), mask=at < numel)
    tl.store(y + at + HALF, (high * factor).to(y.dtype.element_ty), mask=at + HALF < numel)


# -- Launchers ---------------------------------------------------------------------------------------------------------


def _check(x: Tensor, bits: int, block: int) -> None:
    if x.dtype not in _DTYPES:
        raise TypeError(f"`x` has dtype {x.dtype}; quantization takes float32, bfloat16 and float16.")
    if x.dim() != 1 or not x.is_contiguous():
        raise ValueError(f"`x` must be flat and contiguous, got shape {tuple(x.shape)} and strides {x.stride()}.")
    if bits not in (4, 8):
        raise ValueError(f"`bits={bits}` is not known. Use 4 or 8.")
    if block < 2 or block & (block - 1) or block > _TILE:
        raise ValueError(f"`block={block}` must be a power of two from 2 to {_TILE}.")


def _check_codes(codes: Tensor, scales: Tensor, numel: int, bits: int, block: int, dtype: torch.dtype) -> None:
    if dtype not in _DTYPES:
        raise TypeError(f"`dtype={dtype}` is not a result of dequantization. Use float32, bfloat16 or float16.")
    _check(scales.new_empty(0), bits, block)
    num_blocks = cdiv(numel, block)
    length, kind = (numel, torch.int8) if bits == 8 else (num_blocks * block // 2, torch.uint8)
    expected = {
        "codes": (codes, (len(codes), length), kind),
        "scales": (scales, (len(codes), num_blocks), torch.float32),
    }
    for name, (tensor, shape, wanted) in expected.items():
        if tensor.shape != shape or tensor.dtype != wanted or not tensor.is_contiguous():
            raise ValueError(
                f"`{name}` must be contiguous {wanted} of shape {shape} for `numel={numel}`, `bits={bits}`,"
                f" `block={block}`, got {tensor.dtype} of shape {tuple(tensor.shape)}."
            )


def _launch_quantize(x: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor]:
    _check(x, bits, block)
    codes, scales = _fake_quantize(x, bits, block)
    rows, num_blocks = _TILE // block, scales.numel()
    if num_blocks:
        with on_device_of(x):
            grid, warps = (cdiv(num_blocks, rows),), {"num_warps": _NUM_WARPS, "enable_fp_fusion": False}
            if bits == 8:
                _quantize8_kernel[grid](x, codes, scales, x.numel(), num_blocks, ROWS=rows, BLOCK=block, **warps)
            else:
                _quantize4_kernel[grid](x, codes, scales, x.numel(), num_blocks, ROWS=rows, HALF=block // 2, **warps)
    return codes, scales


def _launch_dequantize_reduce(
    codes: Tensor, scales: Tensor, numel: int, bits: int, block: int, factor: float, dtype: torch.dtype
) -> Tensor:
    _check_codes(codes, scales, numel, bits, block, dtype)
    y = codes.new_empty(numel, dtype=dtype)
    rows, num_blocks = _TILE // block, scales.shape[1]
    if num_blocks:
        with on_device_of(codes):
            grid, size = (cdiv(num_blocks, rows),), {"ROWS": rows, "num_warps": _NUM_WARPS, "enable_fp_fusion": False}
            if bits == 8:
                _dequantize8_kernel[grid](codes, scales, y, numel, num_blocks, len(codes), factor, BLOCK=block, **size)
            else:
                _dequantize4_kernel[grid](
                    codes, scales, y, numel, num_blocks, len(codes), factor, HALF=block // 2, **size
                )
    return y


# -- Registration ------------------------------------------------------------------------------------------------------


def _fake_quantize(x: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor]:
    num_blocks = cdiv(x.numel(), block)
    if bits == 8:
        return torch.empty_like(x, dtype=torch.int8), x.new_empty(num_blocks, dtype=torch.float32)
    return x.new_empty(num_blocks * (block // 2), dtype=torch.uint8), x.new_empty(num_blocks, dtype=torch.float32)


_quantize_op = define(
    "quantize_blockwise(Tensor x, int bits, int block) -> (Tensor, Tensor)",
    reference=_quantize_reference,
    launcher=_launch_quantize,
    fake=_fake_quantize,
)
_dequantize_reduce_op = define(
    "dequantize_reduce(Tensor codes, Tensor scales, SymInt numel, int bits, int block, float factor, ScalarType dtype)"
    " -> Tensor",
    reference=_dequantize_reduce_reference,
    launcher=_launch_dequantize_reduce,
    fake=lambda codes, scales, numel, bits, block, factor, dtype: codes.new_empty(numel, dtype=dtype),
)

# -- Public functions --------------------------------------------------------------------------------------------------


def quantize_blockwise(x: Tensor, *, bits: Literal[4, 8] = 8, block: int = 256) -> tuple[Tensor, Tensor]:
    """Round a flat tensor to 8 or 4 bits with one scale per block (Note [Format]).

    Args:
        x: ``(n,)``, fp32, bf16 or fp16.
        bits: Bits per element.
        block: Elements per scale, a power of two from 2 to 2,048.

    Returns:
        Codes, ``(n,)`` int8 or ``(ceil(n / block) * block / 2,)`` uint8, and scales, ``(ceil(n / block),)`` fp32.

    Raises:
        TypeError: Another dtype.
        ValueError: Not flat and contiguous, other bits, another block; a tensor that requires a gradient.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError("`x` requires a gradient, but quantization has none. Call it under `torch.no_grad()`.")
    refuse_transforms("quantize_blockwise", x)
    codes, scales = _quantize_op(x, bits, block)
    return codes, scales


def dequantize_blockwise(
    codes: Tensor,
    scales: Tensor,
    *,
    numel: int,
    bits: Literal[4, 8] = 8,
    block: int = 256,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the ``(numel,)`` values that ``quantize_blockwise`` rounded, in ``dtype``.

    Args:
        codes: As ``quantize_blockwise`` returned them.
        scales: As ``quantize_blockwise`` returned them.
        numel: Length of the quantized tensor.
        bits: As there.
        block: As there.
        dtype: Of the result.

    Raises:
        TypeError: Another dtype.
        ValueError: Codes or scales that do not fit the other arguments.
    """
    check_devices("dequantize_blockwise", codes=codes, scales=scales)
    y: Tensor = _dequantize_reduce_op(codes.unsqueeze(0), scales.unsqueeze(0), numel, bits, block, 1.0, dtype)
    return y


def dequantize_reduce(
    codes: Tensor,
    scales: Tensor,
    *,
    numel: int,
    bits: Literal[4, 8] = 8,
    block: int = 256,
    factor: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Add the quantized values of several ranks, in fp32 and in rank order, times ``factor``, in one pass.

    Args:
        codes: ``(ranks, ...)``: the codes of every rank.
        scales: ``(ranks, ceil(numel / block))`` fp32.
        numel: Length of every rank's quantized tensor.
        bits: As in ``quantize_blockwise``.
        block: As in ``quantize_blockwise``.
        factor: ``1 / ranks`` gives the mean.
        dtype: Of the result.

    Returns:
        ``(numel,)`` in ``dtype``; all of a block is NaN where a rank's block had a non-finite value.

    Raises:
        TypeError: Another dtype.
        ValueError: Codes or scales that do not fit the other arguments.
    """
    check_devices("dequantize_reduce", codes=codes, scales=scales)
    y: Tensor = _dequantize_reduce_op(codes, scales, numel, bits, block, factor, dtype)
    return y
