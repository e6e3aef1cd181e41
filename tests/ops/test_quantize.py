from __future__ import annotations

from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from lightning_zero_ops import dequantize_blockwise, dequantize_reduce, quantize, quantize_blockwise
from tests.ops.accuracy import SIZES, assert_close, fresh
from tests.ops.ahead_of_time import Compilation, Report, assert_lean
from tests.ops.processes import CAPABILITIES, compiled, interpreted
from tests.sampling import sample

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LEVEL = {8: 127.0, 4: 7.0}
Bits = Literal[4, 8]


def _codes(codes: Tensor, numel: int, bits: Bits, block: int) -> Tensor:
    """Return the codes one per element, by the documented format."""
    if bits == 8:
        return codes
    low, high = codes.view(-1, block // 2) & 15, codes.view(-1, block // 2) >> 4
    both = torch.cat((low, high), 1).view(-1)[:numel].to(torch.int8)
    return torch.where(both > 7, both - 16, both)


# -- In the interpreter ------------------------------------------------------------------------------------------------


def _interpret_quantize(bits: Bits, dtype: str) -> None:
    """Scales and codes have the bits of the reference."""
    for numel, block in ((0, 64), (1, 2), (63, 8), (1000, 256), (4097, 64), (4097, 2048)):
        x = torch.randn(numel).to(DTYPES[dtype])
        if numel > 100:
            x[3], x[block + 5], x[-1] = 0.0, float("nan"), float("-inf")
            x[2 * block : 3 * block] = 0.0
        found, expected = quantize._launch_quantize(x, bits, block), quantize._quantize_reference(x, bits, block)
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


def _interpret_dequantize(bits: Bits, dtype: str) -> None:
    """One unit in the last place: the interpreter truncates to 16 bits, and products may be fused with sums."""
    for numel, block in ((0, 64), (1, 2), (63, 8), (1000, 256), (4097, 64)):
        parts = [quantize._quantize_reference(torch.randn(numel), bits, block) for _ in range(3)]
        codes, scales = (torch.stack(each) for each in zip(*parts, strict=True))
        arguments = (codes, scales, numel, bits, block, 0.5, DTYPES[dtype])
        found, expected = (
            quantize._launch_dequantize_reduce(*arguments),
            quantize._dequantize_reduce_reference(*arguments),
        )
        eps = torch.finfo(DTYPES[dtype]).eps
        torch.testing.assert_close(found, expected, rtol=eps, atol=1e-6)


INTERPRETED = {
    f"{name}-{bits}-{dtype}": partial(case, bits, dtype)
    for name, case in (("quantize", _interpret_quantize), ("dequantize", _interpret_dequantize))
    for bits in LEVEL
    for dtype in DTYPES
}


@pytest.mark.parametrize("case", INTERPRETED)
def test_kernel_is_its_reference_in_the_interpreter(case: str) -> None:
    assert interpreted(__name__, case) == ""


# -- Ahead of time -----------------------------------------------------------------------------------------------------


def _compilation(name: str, bits: int, dtype: str) -> Compilation:
    size = {"ROWS": quantize._TILE // 256, **({"BLOCK": 256} if bits == 8 else {"HALF": 128})}
    types = {"codes": "*i8" if bits == 8 else "*u8", "scales": "*fp32", "numel": "i64", "num_blocks": "i64"}
    types |= {"x": f"*{dtype}"} if name == "quantize" else {"y": f"*{dtype}", "num_ranks": "i32", "factor": "fp32"}
    kernel = getattr(quantize, f"_{name}{bits}_kernel")
    return Compilation(kernel, types, size, quantize._NUM_WARPS, enable_fp_fusion=False)


COMPILED = {
    f"{name}-{bits}-{dtype}": _compilation(name, bits, dtype)
    for name in ("quantize", "dequantize")
    for bits in LEVEL
    for dtype in DTYPES
}


@pytest.mark.parametrize("capability", sample(CAPABILITIES, 90))
@pytest.mark.parametrize("case", sample(COMPILED, "quantize-8-bf16", "dequantize-4-fp32"))
def test_kernel_compiles_without_spills_and_loads_wide(case: str, capability: int) -> None:
    report = compiled(__name__, case, capability)
    assert_lean(report, is_elementwise=case.startswith("quantize"))
    assert isinstance(report, Report)
    assert not report.inexact, report


# -- On this machine ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", LEVEL)
def test_codes_are_within_half_a_scale(bits: Bits, dtype: str, numel: int) -> None:
    block = 256
    x = torch.randn(numel, generator=fresh()).to(DTYPES[dtype])
    codes, scales = quantize_blockwise(x, bits=bits, block=block)
    blocks = torch.nn.functional.pad(x.double(), (0, -numel % block)).view(-1, block)
    exact = (blocks.abs().amax(1) / LEVEL[bits]).clamp(min=2.0**-126)
    assert_close(scales, exact, exact.float())
    each = scales.double().repeat_interleave(block)[:numel]
    error = (_codes(codes, numel, bits, block).double() * each - x.double()).abs()
    # x / s is up to 127 and has two roundings of fp32, together 2^-15 of a code.
    assert (error <= (0.5 + 2**-15) * each).all()
    assert _codes(codes, numel, bits, block).abs().max() == LEVEL[bits]


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", LEVEL)
def test_sum_of_quantized_tensors_is_as_exact_as_pytorch(bits: Bits, dtype: str, numel: int) -> None:
    generator, block = fresh(), 256
    parts = [quantize_blockwise(torch.randn(numel, generator=generator), bits=bits, block=block) for _ in range(4)]
    codes, scales = (torch.stack(each) for each in zip(*parts, strict=True))
    found = dequantize_reduce(codes, scales, numel=numel, bits=bits, block=block, factor=0.25, dtype=DTYPES[dtype])
    unpacked = torch.stack([_codes(one, numel, bits, block) for one in codes])
    each = scales.repeat_interleave(block, 1)[:, :numel]
    exact = (unpacked.double() * each.double()).sum(0) / 4
    assert_close(found, exact, ((unpacked.float() * each).sum(0) / 4).to(DTYPES[dtype]), is_reduction=True)


@pytest.mark.parametrize("bits", LEVEL)
def test_what_was_quantized_once_is_kept_by_the_next_time(bits: Bits) -> None:
    x = torch.randn(1000)
    arguments: dict[str, Any] = {"bits": bits, "block": 64}
    once = dequantize_blockwise(*quantize_blockwise(x, **arguments), numel=1000, **arguments)
    twice = dequantize_blockwise(*quantize_blockwise(once, **arguments), numel=1000, **arguments)
    torch.testing.assert_close(twice, once, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", LEVEL)
@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-39, 1e-30, 1e30, 3e38])
def test_blocks_of_any_size_of_values_are_kept(bits: Bits, scale: float) -> None:
    x = torch.linspace(-1, 1, 64).mul_(scale)
    codes, scales = quantize_blockwise(x, bits=bits, block=64)
    found = dequantize_blockwise(codes, scales, numel=64, bits=bits, block=64)
    assert ((found - x).abs() <= (0.5 + 2**-15) * scales).all()
    assert (found[x == 0] == 0).all()


@pytest.mark.parametrize("bits", LEVEL)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_block_with_a_value_that_is_not_finite_reads_as_nan(bits: Bits, bad: float) -> None:
    x = torch.ones(12)
    x[5] = bad
    codes, scales = quantize_blockwise(x, bits=bits, block=4)
    found = dequantize_blockwise(codes, scales, numel=12, bits=bits, block=4)
    assert found.isnan().tolist() == [False] * 4 + [True] * 4 + [False] * 4


@pytest.mark.parametrize(("bits", "factor"), [(8, 0.2532), (4, 0.1289)])
def test_bytes_are_those_of_the_format(bits: Bits, factor: float) -> None:
    """Of fp32, with one scale per 256 elements."""
    x = torch.randn(4096)
    codes, scales = quantize_blockwise(x, bits=bits)
    assert (codes.nbytes + scales.nbytes) / x.nbytes == pytest.approx(bits / 32 + 1 / 256)
    assert (codes.nbytes + scales.nbytes) / x.nbytes < factor + 0.001


CODES, SCALES = torch.zeros(2, 8, dtype=torch.int8), torch.ones(2, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize_blockwise(torch.ones(4).double()), "`x` has dtype torch.float64"),
        (lambda: quantize_blockwise(torch.ones(2, 2)), "`x` must be flat and contiguous"),
        (lambda: quantize_blockwise(torch.ones(4), bits=2), "`bits=2` is not known"),  # type: ignore[arg-type]
        (lambda: quantize_blockwise(torch.ones(4), block=48), "`block=48` must be a power of two from 2 to 2048"),
        (lambda: quantize_blockwise(torch.ones(4, requires_grad=True)), "`x` requires a gradient"),
        (lambda: dequantize_reduce(CODES, SCALES, numel=9, block=4), r"`codes` must be .* of shape \(2, 9\)"),
        (lambda: dequantize_reduce(CODES, SCALES, numel=8, block=8), r"`scales` must be .* of shape \(2, 1\)"),
        (lambda: dequantize_reduce(CODES, SCALES, numel=8, bits=4, block=4), r"`codes` must be .*uint8 of shape"),
        (lambda: dequantize_reduce(CODES, SCALES, numel=8, block=4, dtype=torch.int32), "`dtype=torch.int32`"),
    ],
)
def test_wrong_arguments_are_refused(call: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call()


# -- torch.compile -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", LEVEL)
def test_op_is_sound(bits: Bits) -> None:
    x = torch.randn(20)
    torch.library.opcheck(quantize._quantize_op, (x, bits, 8))
    codes, scales = (part.unsqueeze(0) for part in quantize_blockwise(x, bits=bits, block=8))
    torch.library.opcheck(quantize._dequantize_reduce_op, (codes, scales, 20, bits, 8, 1.0, torch.bfloat16))


def test_ops_compile_into_one_graph() -> None:
    def step(x: Tensor) -> Tensor:
        return dequantize_blockwise(*quantize_blockwise(x, block=8), numel=20, block=8) + 1

    x = torch.randn(20)
    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(x), step(x))
