"""AdamW and Adam with moments of one byte: a code per element and one fp32 scale per block.

Formula: that of ``lightning_zero_ops/adamw.py`` in fp32, on decoded moments. Bytes per element: 8 of p, 4.06 of m and
v, and those of the gradient and of ``out``; fp32 moments need 24 for p, m and v.

Note [Int8 moments]
    A tensor is cut into blocks of ``BLOCK`` elements from its start; it is a rank's piece of one parameter, so no block
    crosses a shard or a parameter. A block has a scale ``s``, a power of two such that its largest magnitude is in
    ``(s, 2 s]``, and a code per element: a floating point number below ``2 s`` of 4 bits of exponent and, for the first
    moment, a sign and 3 bits of mantissa; for the second, whose root is kept, 4. So the 14 octaves from ``2 s`` down to
    ``2^-13 s`` have 8 or 16 codes each, and the values below have as many, evenly. A linear code would store every root
    below a 127th of the largest one as that: elements with small gradients would hardly move (ADR 0024). Products with
    powers of two are exact: moments that are decoded, saved, loaded and encoded are the same. Blocks: arXiv:2110.02861.
    A block with a value that is not finite has an infinite scale and decodes to NaN.

Note [Rounded by chance]
    In a step m moves by a tenth of its difference to the gradient and sqrt(v) by 0.05 % (beta2 = 0.999), and two codes
    are 3 to 12 % of a value apart. Rounded to the nearest, small first moments would never fall and second moments
    would stand still. So a value becomes the upper or the lower code with the probability of its nearness, and the
    expected moment is the exact one. The bits of chance are a hash of position and step. A second moment that is not
    zero is never stored as zero: no step is divided by ``eps`` alone.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from lightning_zero_ops.registry import cdiv, define, jit, jit_for_any, on_device_of, tl
from lightning_zero_ops.rounding import hash_bits, keys_of, mix, wrapped

__all__ = [
    "BLOCK",
    "adamw_int8_step_",
    "decode_exp_avg",
    "decode_exp_avg_sq",
    "encode_exp_avg",
    "encode_exp_avg_sq",
    "pytorch_step_",
]

BLOCK = 256
_MANTISSA, _MANTISSA_SQ = 3, 4  # bits of the codes of the first moment and of the root of the second
_SMALLEST = 2.0**-13  # times the scale: the smallest value whose code has all bits of its mantissa
_OFFSET = 113  # bits of the exponent in fp32 less those in a code
_CHANCE_BITS = 16
_NEAREST = 1 << (_CHANCE_BITS - 1)
_MIN_LARGEST = 2.0**-100  # so that no value of a code is subnormal in fp32
_MAX_LARGEST = 2.0**126  # so that no inverse of a scale is

# -- Codes -------------------------------------------------------------------------------------------------------------


def decode_exp_avg(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the first moment, fp32 in the shape of ``codes``."""
    return _decode(codes.reshape(-1), scales)[: codes.numel()].view(codes.shape)


def decode_exp_avg_sq(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the second moment, fp32 in the shape of ``codes``."""
    return _decode_root(codes.reshape(-1), scales)[: codes.numel()].view(codes.shape).square_()


def encode_exp_avg(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes in the shape of ``values``, and scales (ceil(n / BLOCK),): to the nearest, for loaded values."""
    codes, scales = _encode(_padded(values.reshape(-1).float()), _NEAREST)
    return codes[: values.numel()].clone().view(values.shape), scales


def encode_exp_avg_sq(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes in the shape of ``values``, and scales (ceil(n / BLOCK),), of a second moment."""
    codes, scales = _encode_root(_padded(values.reshape(-1).float()).sqrt_(), _NEAREST)
    return codes[: values.numel()].clone().view(values.shape), scales


def _padded(values: Tensor) -> Tensor:
    return torch.nn.functional.pad(values, (0, -values.numel() % BLOCK))


def _decode(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the values of signed codes, with zeros up to whole blocks."""
    return _looked_up(_values(codes.device), codes, scales)


def _decode_root(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the values of codes of roots, with zeros up to whole blocks."""
    return _looked_up(_root_values(codes.device), codes, scales)


def _looked_up(values: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    found = values.index_select(0, _padded(codes.view(torch.uint8)).int())
    found.view(-1, BLOCK).mul_(scales.unsqueeze(1))
    return found


@cache
def _values(device: torch.device) -> Tensor:
    """Return the values of the 256 signed codes, by their bits; -128 does not occur."""
    positive = _magnitudes(torch.arange(128), _MANTISSA)
    return torch.cat((positive, -positive.flip(0)[:1], -positive[1:].flip(0))).to(device)


@cache
def _root_values(device: torch.device) -> Tensor:
    """Return the values of the 256 codes of roots."""
    return _magnitudes(torch.arange(256), _MANTISSA_SQ).to(device)


def _magnitudes(codes: Tensor, mantissa: int) -> Tensor:
    values = ((codes.int() << (23 - mantissa)) + (_OFFSET << 23)).view(torch.float32)
    return torch.where(codes < 1 << mantissa, codes * (_SMALLEST / (1 << mantissa)), values)


def _encode(values: Tensor, chance: Tensor | int) -> tuple[Tensor, Tensor]:
    """Return signed codes and scales of whole blocks.

    Args:
        values: (n,) fp32, of whole blocks.
        chance: From 0 to 2^16 - 1: the upper code is taken where its nearness is above ``1 - chance / 2^16``.
    """
    relative, scales = _relative(values.abs())
    return _codes(relative, chance, _MANTISSA).copysign(values).to(torch.int8), scales


def _encode_root(roots: Tensor, chance: Tensor | int) -> tuple[Tensor, Tensor]:
    """Return codes, unsigned in the bits of int8, and scales of whole blocks; no code is zero but that of zero."""
    relative, scales = _relative(roots)
    codes = torch.maximum(_codes(relative, chance, _MANTISSA_SQ), relative.sign_().int())
    return codes.to(torch.uint8).view(torch.int8), scales


def _relative(size: Tensor) -> tuple[Tensor, Tensor]:
    """Return magnitudes over their scales, zeros in blocks that are not finite, and the scales."""
    largest = size.view(-1, BLOCK).amax(1)
    is_finite = largest <= _MAX_LARGEST  # false for NaN as well
    exponent = (largest.clamp_(_MIN_LARGEST, _MAX_LARGEST).view(torch.int32) - 1) & 0x7F800000
    inverse = torch.where(is_finite, (0x7F000000 - exponent).view(torch.float32), 0.0)
    relative = (size.view(-1, BLOCK) * inverse.unsqueeze(1)).nan_to_num_(nan=0.0).view(-1)
    return relative, torch.where(is_finite, exponent.view(torch.float32), torch.inf)


def _codes(relative: Tensor, chance: Tensor | int, mantissa: int) -> Tensor:
    """Return codes of magnitudes from 0 to 2, int32."""
    # Evenly spaced, as below the smallest value of a full mantissa, where these are the lower ones.
    even = (relative * ((1 << mantissa) / _SMALLEST)).add_(chance, alpha=2.0**-_CHANCE_BITS).int()
    bits = torch.add(relative.view(torch.int32), chance, alpha=1 << (23 - mantissa - _CHANCE_BITS))
    return bits.bitwise_right_shift_(23 - mantissa).sub_(_OFFSET << mantissa).clamp_(min=1 << mantissa).minimum(even)


# -- Reference ---------------------------------------------------------------------------------------------------------

# Elements at a time: on a CPU they fit a cache, elsewhere they bound the fp32 copies of the moments.
_CPU_CHUNK = 65536
_CHUNK = 1 << 24


def pytorch_step_(
    param: Tensor, exp_avg: Tensor, exp_avg_scales: Tensor, exp_avg_sq: Tensor, exp_avg_sq_scales: Tensor,
    out: Tensor | None, grad: Tensor, factor: Tensor | None, step: int, lr: float, beta1: float, beta2: float,
    eps: float, weight_decay: float, l2: float,
) -> None:  # fmt: skip
    """Step as ``adamw_int8_step_`` does, with PyTorch's kernels on every device."""
    fused, decay = (torch._fused_adam_, l2) if l2 else (torch._fused_adamw_, weight_decay)
    steps = torch.full((), float(step), dtype=torch.float32, device=param.device)
    key, _ = keys_of(step)
    chunk = _CPU_CHUNK if param.is_cpu else _CHUNK
    for start in range(0, param.numel(), chunk):
        stop = min(start + chunk, param.numel())
        part, blocks = slice(start, stop), slice(start // BLOCK, cdiv(stop, BLOCK))
        m = _decode(exp_avg[part], exp_avg_scales[blocks])
        v = _decode_root(exp_avg_sq[part], exp_avg_sq_scales[blocks]).square_()
        value = grad[part].float() if factor is None else grad[part].float() * factor
        fused(
            [param[part]], [value], [m[: stop - start]], [v[: stop - start]], [], [steps], lr=lr, beta1=beta1,
            beta2=beta2, weight_decay=decay, eps=eps, amsgrad=False, maximize=False,
        )  # fmt: skip
        positions = torch.arange(m.numel(), dtype=torch.int32, device=param.device).add_(wrapped(start))
        bits = hash_bits(positions, key)
        codes, exp_avg_scales[blocks] = _encode(m, bits & 0xFFFF)
        exp_avg[part].copy_(codes[: stop - start])
        codes, exp_avg_sq_scales[blocks] = _encode_root(v.sqrt_(), (bits >> 16) & 0xFFFF)
        exp_avg_sq[part].copy_(codes[: stop - start])
        if out is not None:
            out[part].copy_(param[part])


# -- Tuning space ------------------------------------------------------------------------------------------------------

# 16 elements a thread: one 128-bit load of codes, four of an fp32 tensor. No GPU has measured it yet.
_ROWS = 8
_NUM_WARPS = 4

# -- Kernel ------------------------------------------------------------------------------------------------------------


@jit
def _value_of(code, MANTISSA: tl.constexpr):  # type: ignore[no-untyped-def]
    small = code.to(tl.float32) * (0.0001220703125 / (1 << MANTISSA))
    value = ((code << (23 - MANTISSA)) + (113 << 23)).to(tl.float32, bitcast=True)
    return tl.where(code < (1 << MANTISSA), small, value)


@jit
def _scale_and_inverse(size):  # type: ignore[no-untyped-def]
    largest = tl.max(tl.where(size == size, size, float("inf")), 1)
    is_finite = largest <= 8.507059173023462e37  # 2^126
    bounded = tl.minimum(tl.maximum(largest, 7.888609052210118e-31), 8.507059173023462e37)  # from 2^-100
    exponent = (bounded.to(tl.int32, bitcast=True) - 1) & 0x7F800000
    scale = tl.where(is_finite, exponent.to(tl.float32, bitcast=True), float("inf"))
    return scale, tl.where(is_finite, (0x7F000000 - exponent).to(tl.float32, bitcast=True), 0.0)


@jit
def _code_of(size, inverse, chance, MANTISSA: tl.constexpr):  # type: ignore[no-untyped-def]
    relative = size * inverse[:, None]
    relative = tl.where(relative == relative, relative, 0.0)
    small = relative * (8192.0 * (1 << MANTISSA)) + chance.to(tl.float32) * 1.52587890625e-05
    bits = relative.to(tl.int32, bitcast=True) + (chance.to(tl.int32) << (7 - MANTISSA))
    return tl.where(relative < 0.0001220703125, small.to(tl.int32), (bits >> (23 - MANTISSA)) - (113 << MANTISSA))


@jit_for_any("key")
def _adamw_int8_kernel(  # type: ignore[no-untyped-def]
    param, exp_avg, exp_avg_scales, exp_avg_sq, exp_avg_sq_scales, out, grad, factor, numel, num_blocks, rest1, beta2,
    rest2, eps, decay, l2, step_size, root_bias2, key, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside, is_block = at < numel, row < num_blocks
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    p = tl.load(param + at, mask=inside, other=0.0)
    code = tl.load(exp_avg + at, mask=inside, other=0).to(tl.int32)
    m = _value_of(tl.abs(code), 3) * tl.load(exp_avg_scales + row, mask=is_block, other=0.0)[:, None]
    m = tl.where(code < 0, -m, m)
    code = tl.load(exp_avg_sq + at, mask=inside, other=0).to(tl.int32) & 0xFF
    v = _value_of(code, 4) * tl.load(exp_avg_sq_scales + row, mask=is_block, other=0.0)[:, None]
    if factor is not None:
        g *= tl.load(factor)
    # Neither 0 times infinity nor infinity less infinity: both would be NaN.
    g += tl.where(l2 == 0.0, 0.0, tl.cast(l2, tl.float32) * p)
    p -= tl.where(tl.abs(p) < float("inf"), tl.cast(decay, tl.float32) * p, 0.0)
    m += tl.cast(rest1, tl.float32) * (g - m)
    v = tl.cast(beta2, tl.float32) * (v * v) + tl.cast(rest2, tl.float32) * g * g
    root = tl.sqrt(v)
    p -= tl.cast(step_size, tl.float32) * (m / (root / tl.cast(root_bias2, tl.float32) + tl.cast(eps, tl.float32)))
    tl.store(param + at, p, mask=inside)
    if out is not None:
        tl.store(out + at, p.to(out.dtype.element_ty), mask=inside)
    bits = mix(at.to(tl.uint32) ^ tl.cast(key, tl.uint32))
    m, root = tl.where(inside, m, 0.0), tl.where(inside, root, 0.0)
    scale, inverse = _scale_and_inverse(tl.abs(m))
    code = _code_of(tl.abs(m), inverse, bits & 0xFFFF, 3)
    tl.store(exp_avg + at, tl.where(m < 0.0, -code, code).to(tl.int8), mask=inside)
    tl.store(exp_avg_scales + row, scale, mask=is_block)
    scale, inverse = _scale_and_inverse(root)
    code = _code_of(root, inverse, bits >> 16, 4)
    code = tl.where((root > 0.0) & (scale < float("inf"))[:, None], tl.maximum(code, 1), code)
    tl.store(exp_avg_sq + at, code.to(tl.int8), mask=inside)
    tl.store(exp_avg_sq_scales + row, scale, mask=is_block)


# -- Launcher ----------------------------------------------------------------------------------------------------------


def _launch(
    param: Tensor, exp_avg: Tensor, exp_avg_scales: Tensor, exp_avg_sq: Tensor, exp_avg_sq_scales: Tensor,
    out: Tensor | None, grad: Tensor, factor: Tensor | None, step: int, lr: float, beta1: float, beta2: float,
    eps: float, weight_decay: float, l2: float,
) -> None:  # fmt: skip
    if not param.numel():
        return
    step_size, root_bias2 = lr / (1.0 - beta1**step), math.sqrt(1.0 - beta2**step)
    num_blocks, key = exp_avg_scales.numel(), wrapped(keys_of(step)[0])
    with on_device_of(param):
        _adamw_int8_kernel[(cdiv(num_blocks, _ROWS),)](
            param, exp_avg, exp_avg_scales, exp_avg_sq, exp_avg_sq_scales, out, grad, factor, param.numel(), num_blocks,
            1.0 - beta1, beta2, 1.0 - beta2, eps, lr * weight_decay, l2, step_size, root_bias2, key,
            ROWS=_ROWS, BLOCK=BLOCK, num_warps=_NUM_WARPS,
        )  # fmt: skip


# -- Registration ------------------------------------------------------------------------------------------------------

_adamw_int8_step = define(
    "adamw_int8_step_(Tensor(a!) param, Tensor(b!) exp_avg, Tensor(c!) exp_avg_scales, Tensor(d!) exp_avg_sq,"
    " Tensor(e!) exp_avg_sq_scales, Tensor(f!)? out, Tensor grad, Tensor? factor, int step, float lr, float beta1,"
    " float beta2, float eps, float weight_decay, float l2) -> ()",
    reference=pytorch_step_,
    launcher=_launch,
    fake=lambda *_: None,
)

# -- For ``adamw_step_`` -----------------------------------------------------------------------------------------------


def adamw_int8_step_(
    param: Tensor, exp_avg: Tensor, exp_avg_scales: Tensor | None, exp_avg_sq: Tensor, exp_avg_sq_scales: Tensor | None,
    *rest: object,
) -> None:  # fmt: skip
    """Step as ``adamw_step_`` does, on int8 moments; the order of arguments is the op's.

    Raises:
        ValueError: Scales are missing, or are not fp32 of shape (ceil(n / BLOCK),) on the device of ``param``.
    """
    shape = (cdiv(param.numel(), BLOCK),)
    for name, scales in {"exp_avg_scales": exp_avg_scales, "exp_avg_sq_scales": exp_avg_sq_scales}.items():
        fits = scales is not None and (scales.shape, scales.dtype) == (shape, torch.float32) and scales.is_contiguous()
        if not fits or scales.device != param.device:  # type: ignore[union-attr]
            found = "None" if scales is None else f"{scales.dtype} of shape {tuple(scales.shape)} on {scales.device}"
            raise ValueError(
                f"`{name}` must be contiguous fp32 of shape {shape} on {param.device}, one value for {BLOCK} elements"
                f" of int8 moments, got {found}."
            )
    _adamw_int8_step(param, exp_avg, exp_avg_scales, exp_avg_sq, exp_avg_sq_scales, *rest)
