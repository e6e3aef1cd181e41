"""AdamW and Adam with moments of one byte: a code per element and one fp32 scale per block.

Formula: that of ``lightning_zero_ops/adamw.py`` in fp32, on decoded moments. Bytes per element: 8 of p, 4.06 of m and
v, and those of the gradient and of ``out``; fp32 moments need 24 for p, m and v.

Note [Int8 moments]
    A tensor is cut into blocks of ``BLOCK`` elements from its start; it is a rank's piece of one parameter, so no block
    crosses a shard or a parameter. With codes ``q`` and the scale ``s`` of a block, ``m = q s`` and ``v = (q s)^2``: of
    the second moment the square root is kept, because its logarithm has half the range. ``s`` is the largest magnitude
    over 127, rounded up to 17 bits, so that ``q s`` is exact in fp32: moments that are decoded, saved, loaded and
    encoded have the same codes. Blocks: arXiv:2110.02861. A block with a value that is not finite decodes to NaN.

Note [Rounded by chance]
    In a step m moves by a tenth of its difference to the gradient and sqrt(v) by 0.05 % (beta2 = 0.999), and two codes
    are a 127th of the block's largest value apart. Rounded to the nearest, small first moments would never fall and
    second moments would stand still; always away from zero, second moments never fall below the block's largest (ADR
    0024 has the figures). So a value becomes the upper or the lower code with the probability of its nearness, and the
    expected moment is the exact one. The bits of chance are a hash of position and step. A second moment that is not
    zero is never stored as zero: no step is divided by ``eps`` alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_zero_ops.registry import cdiv, define, jit, on_device_of, tl
from lightning_zero_ops.rounding import hash_bits, keys_of, mix

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
_MIN_SCALE = 2.0**-126
_LARGEST_CODE = 127.0
_ALMOST_LARGEST = 126.99  # the largest value of a block over its rounded scale is between this and 127

# -- Codes -------------------------------------------------------------------------------------------------------------


def decode_exp_avg(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the first moment, fp32 in the shape of ``codes``."""
    return _decode(codes.reshape(-1), scales)[: codes.numel()].view(codes.shape)


def decode_exp_avg_sq(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the second moment, fp32 in the shape of ``codes``."""
    return decode_exp_avg(codes, scales).square_()


def encode_exp_avg(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes in the shape of ``values``, and scales (ceil(n / BLOCK),): to the nearest, for loaded values."""
    codes, scales = _encode(_padded(values.reshape(-1).float()), 0.5)
    return codes[: values.numel()].clone().view(values.shape), scales


def encode_exp_avg_sq(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes in the shape of ``values``, and scales (ceil(n / BLOCK),), of a second moment."""
    roots = _padded(values.reshape(-1).float()).sqrt()
    codes, scales = _encode(roots, 0.5)
    _keep_from_zero(codes, roots, scales)
    return codes[: values.numel()].clone().view(values.shape), scales


def _padded(values: Tensor) -> Tensor:
    return torch.nn.functional.pad(values, (0, -values.numel() % BLOCK))


def _decode(codes: Tensor, scales: Tensor) -> Tensor:
    """Return codes times scales, with zeros up to whole blocks."""
    values = scales.new_zeros(scales.numel() * BLOCK)
    values[: codes.numel()].copy_(codes)
    values.view(-1, BLOCK).mul_(scales.unsqueeze(1))
    return values


def _encode(values: Tensor, chance: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return codes and scales of whole blocks; ``chance`` in [0, 1) is added to magnitudes that are then cut."""
    blocks = values.view(-1, BLOCK)
    size = blocks.abs()
    largest = size.amax(1)
    scales = _rounded_up(torch.where(largest.isnan(), torch.inf, largest) / _LARGEST_CODE)
    size.div_(scales.unsqueeze(1))
    is_largest = size > _ALMOST_LARGEST
    size.view(-1).add_(chance)
    size.floor_().masked_fill_(is_largest, _LARGEST_CODE).nan_to_num_(nan=0.0)
    return size.copysign_(blocks).to(torch.int8).view(-1), scales


def _rounded_up(scales: Tensor) -> Tensor:
    """Return scales of 17 bits: see Note [Int8 moments]."""
    bits = scales.clamp_(min=_MIN_SCALE).view(torch.int32)
    return ((bits + 0x7F) & -0x80).view(torch.float32)


def _keep_from_zero(codes: Tensor, roots: Tensor, scales: Tensor) -> None:
    is_above = roots.view(-1, BLOCK) / scales.unsqueeze(1) > 0  # not in a block whose scale is infinite
    codes.masked_fill_((codes == 0) & is_above.view(-1), 1)


# -- Reference ---------------------------------------------------------------------------------------------------------

# Elements at a time: on a CPU what a cache holds, elsewhere what bounds the fp32 copies of the moments.
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
        v = _decode(exp_avg_sq[part], exp_avg_sq_scales[blocks]).square_()
        value = grad[part].float() if factor is None else grad[part].float() * factor
        fused(
            [param[part]], [value], [m[: stop - start]], [v[: stop - start]], [], [steps], lr=lr, beta1=beta1,
            beta2=beta2, weight_decay=decay, eps=eps, amsgrad=False, maximize=False,
        )  # fmt: skip
        bits = hash_bits(torch.arange(start, start + m.numel(), device=param.device).int(), key)
        codes, exp_avg_scales[blocks] = _encode(m, (bits & 0xFFFF) * 2.0**-16)
        exp_avg[part].copy_(codes[: stop - start])
        codes, exp_avg_sq_scales[blocks] = _encode(v.sqrt_(), ((bits >> 16) & 0xFFFF) * 2.0**-16)
        _keep_from_zero(codes, v, exp_avg_sq_scales[blocks])
        exp_avg_sq[part].copy_(codes[: stop - start])
        if out is not None:
            out[part].copy_(param[part])


# -- Tuning space ------------------------------------------------------------------------------------------------------

# 16 elements a thread: one 128-bit load of codes, four of an fp32 tensor. No GPU has measured it yet.
_ROWS = 8
_NUM_WARPS = 4

# -- Kernel ------------------------------------------------------------------------------------------------------------


@jit
def _scales_of(size):  # type: ignore[no-untyped-def]
    largest = tl.max(tl.where(size == size, size, float("inf")), 1)
    scale = tl.maximum(largest / 127.0, 1.1754943508222875e-38)
    return ((scale.to(tl.int32, bitcast=True) + 0x7F) & -0x80).to(tl.float32, bitcast=True)


@jit
def _codes_of(size, scale, bits):  # type: ignore[no-untyped-def]
    value = size * (1.0 / scale)[:, None]
    value = tl.where(value == value, value, 0.0)
    code = tl.floor(value + bits.to(tl.float32) * 1.52587890625e-05)
    return tl.where(value > 126.99, 127.0, code)


@jit
def _adamw_int8_kernel(  # type: ignore[no-untyped-def]
    param, exp_avg, exp_avg_scales, exp_avg_sq, exp_avg_sq_scales, out, grad, factor, numel, num_blocks, rest1, beta2,
    rest2, eps, decay, l2, step_size, root_bias2, key, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside, is_block = at < numel, row < num_blocks
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    p = tl.load(param + at, mask=inside, other=0.0)
    m = tl.load(exp_avg + at, mask=inside, other=0).to(tl.float32)
    m *= tl.load(exp_avg_scales + row, mask=is_block, other=0.0)[:, None]
    v = tl.load(exp_avg_sq + at, mask=inside, other=0).to(tl.float32)
    v *= tl.load(exp_avg_sq_scales + row, mask=is_block, other=0.0)[:, None]
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
    scale = _scales_of(tl.abs(m))
    code = _codes_of(tl.abs(m), scale, bits & 0xFFFF)
    tl.store(exp_avg + at, tl.where(m < 0.0, -code, code).to(tl.int8), mask=inside)
    tl.store(exp_avg_scales + row, scale, mask=is_block)
    scale = _scales_of(root)
    code = _codes_of(root, scale, bits >> 16)
    code = tl.where(root * (1.0 / scale)[:, None] > 0.0, tl.maximum(code, 1.0), code)
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
    num_blocks = exp_avg_scales.numel()
    with on_device_of(param):
        _adamw_int8_kernel[(cdiv(num_blocks, _ROWS),)](
            param, exp_avg, exp_avg_scales, exp_avg_sq, exp_avg_sq_scales, out, grad, factor, param.numel(), num_blocks,
            1.0 - beta1, beta2, 1.0 - beta2, eps, lr * weight_decay, l2, step_size, root_bias2, keys_of(step)[0],
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
