from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero_ops import adamw_int8, adamw_step_
from lightning_zero_ops.adamw_int8 import BLOCK
from tests.ops.accuracy import fresh, ulp
from tests.ops.ahead_of_time import Compilation, assert_lean
from tests.ops.optimizers import DTYPES, ODD
from tests.ops.processes import CAPABILITIES, compiled, interpreted
from tests.sampling import sample

OPTIONS = (3, 0.01, 0.9, 0.999, 1e-8)  # step, lr, betas, eps


def _moments(numel: int, generator: torch.Generator | None = None) -> list[Tensor]:
    """Return codes and scales of both moments after some steps."""
    first = 0.1 * torch.randn(numel, generator=generator)
    second = (0.1 * torch.randn(numel, generator=generator)).square()
    return [*adamw_int8.encode_exp_avg(first), *adamw_int8.encode_exp_avg_sq(second)]


def _decoded(moments: list[Tensor]) -> tuple[Tensor, Tensor]:
    return adamw_int8.decode_exp_avg(*moments[:2]), adamw_int8.decode_exp_avg_sq(*moments[2:])


# -- In the interpreter ------------------------------------------------------------------------------------------------


def _interpret(grad: str, out: str | None, weight_decay: float, l2: float) -> None:
    """Few codes may be one apart, where a rounding in fp32 meets the bits of chance."""
    for numel, factor in itertools.product(ODD, (None, torch.tensor(0.3))):
        rounded = None if out is None else torch.full((numel,), float("nan"), dtype=DTYPES[out])
        given = [torch.randn(numel), *_moments(numel), rounded, torch.randn(numel).to(DTYPES[grad])]
        results = []
        for step in (adamw_int8._launch, adamw_int8.pytorch_step_):
            copies = [None if tensor is None else tensor.clone() for tensor in given]
            step(*copies, factor, *OPTIONS, weight_decay, l2)  # type: ignore[arg-type]
            results.append(copies)
        for index, (mine, theirs) in enumerate(zip(*results, strict=True)):
            if mine is None or theirs is None:
                continue
            if mine.dtype == torch.int8:
                # Codes of roots have no sign: 127 and 128 are neighbours.
                one, other = (codes.view(torch.uint8) if index == 3 else codes for codes in (mine, theirs))
                apart = (one.int() - other.int()).abs()
                assert apart.max() <= 1, index
                assert apart.sum() <= 1 + numel // 1000, index
                continue
            bound = 1e-6 * theirs.double().abs().max() + (0 if mine.dtype == torch.float32 else ulp(theirs))
            if index in (2, 4):
                bound = 2**-16 * theirs  # one step of a scale of 17 bits
            assert torch.isfinite(mine).all(), index
            assert ((mine.double() - theirs.double()).abs() <= bound).all(), index


INTERPRETED = {
    "fp32": partial(_interpret, "fp32", None, 0.1, 0.0),
    "bf16": partial(_interpret, "bf16", "bf16", 0.1, 0.0),
    "fp16": partial(_interpret, "fp16", "fp16", 0.0, 0.1),
}


@pytest.mark.parametrize("case", sample(INTERPRETED, "bf16"))
def test_kernel_is_its_reference_in_the_interpreter(case: str) -> None:
    assert interpreted(__name__, case) == ""


# -- Ahead of time -----------------------------------------------------------------------------------------------------

_SCALARS = ("rest1", "beta2", "rest2", "eps", "decay", "l2", "step_size", "root_bias2")


def _compilation(grad: str, out: str | None, factor: bool) -> Compilation:
    types = {"param": "*fp32", "exp_avg": "*i8", "exp_avg_sq": "*i8", "grad": f"*{grad}", "key": "i64"}
    types |= dict.fromkeys(("exp_avg_scales", "exp_avg_sq_scales"), "*fp32") | dict.fromkeys(
        ("numel", "num_blocks"), "i64"
    )
    types |= dict.fromkeys(_SCALARS, "fp32") | {"out": f"*{out}", "factor": "*fp32"}
    absent = {name: None for name, given in {"out": out, "factor": factor}.items() if not given}
    constants = {"ROWS": adamw_int8._ROWS, "BLOCK": BLOCK, **absent}
    return Compilation(adamw_int8._adamw_int8_kernel, types, constants, adamw_int8._NUM_WARPS)


COMPILED = {
    f"{grad}-{out}{'-scaled' if factor else ''}": _compilation(grad, out, factor)
    for grad, out, factor in itertools.product(DTYPES, (None, "bf16", "fp16"), (True, False))
}


@pytest.mark.parametrize("capability", sample(CAPABILITIES, 80, 90))
@pytest.mark.parametrize("case", sample(COMPILED, "bf16-bf16-scaled"))
def test_kernel_compiles_without_spills_and_loads_128_bits(case: str, capability: int) -> None:
    # The scales of blocks and the factor are single values.
    assert_lean(compiled(__name__, case, capability), scalar_loads=2 + int(case.endswith("scaled")))


# -- Codes -------------------------------------------------------------------------------------------------------------


def _gap(values: Tensor, scales: Tensor, mantissa: int) -> Tensor:
    """Return the distance of the two codes around each value, float64."""
    each = scales.double().repeat_interleave(BLOCK)[: values.numel()]
    octave = (values.double().abs() / each).clamp(min=2.0**-13).log2().floor()
    return each * 2.0 ** (octave - mantissa)


@pytest.mark.parametrize("numel", [1, 63, 1000, 4097])
def test_codes_are_the_nearest_and_blocks_know_nothing_of_each_other(numel: int) -> None:
    values = torch.randn(numel, generator=fresh()) * torch.logspace(-20, 2, numel)
    codes, scales = adamw_int8.encode_exp_avg(values)
    assert (codes.shape, codes.dtype, scales.shape) == ((numel,), torch.int8, (-(-numel // BLOCK),))
    largest = torch.nn.functional.pad(values, (0, -numel % BLOCK)).view(-1, BLOCK).abs().amax(1)
    assert ((scales < largest) & (largest <= 2 * scales)).all()
    apart = (adamw_int8.decode_exp_avg(codes, scales).double() - values.double()).abs()
    assert (apart <= 0.5 * _gap(values, scales, 3)).all()
    assert torch.equal(adamw_int8.encode_exp_avg(values[:BLOCK])[0], codes[:BLOCK])
    squares = values.square()
    codes, scales = adamw_int8.encode_exp_avg_sq(squares)
    decoded = adamw_int8.decode_exp_avg_sq(codes, scales)
    gap = _gap(squares.sqrt(), scales, 4)
    apart = (decoded.double().sqrt() - squares.double().sqrt()).abs()
    is_smallest = decoded.double().sqrt() <= scales.double().repeat_interleave(BLOCK)[:numel] * 2.0**-17 * 1.001
    assert (apart <= torch.where(is_smallest, 1.0, 0.5 + 1e-6) * gap).all()
    assert torch.equal(codes != 0, squares != 0)


def test_every_code_is_read_as_it_is_written() -> None:
    scales = torch.tensor([0.25])
    for bits, decode, encode in (
        (range(-120, 121), adamw_int8.decode_exp_avg, adamw_int8.encode_exp_avg),
        (range(241), adamw_int8.decode_exp_avg_sq, adamw_int8.encode_exp_avg_sq),
    ):
        codes = torch.zeros(BLOCK, dtype=torch.int16)
        codes[: len(bits)] = torch.tensor(bits)
        written = codes.to(torch.uint8).view(torch.int8)
        values = decode(written, scales)
        assert values.unique().numel() == len(bits)
        assert torch.equal(encode(values)[0], written)


def test_moments_that_are_decoded_and_encoded_are_the_same() -> None:
    """So a run that is resumed from a checkpoint goes on as it was; scales of blocks may be others."""
    generator = fresh()
    for magnitude in (1e-12, 1e-3, 1.0, 1e8):
        param, moments = torch.randn(5000, generator=generator), _moments(5000, generator)
        for step in range(1, 5):
            grad = magnitude * torch.randn(5000, generator=generator)
            _step(param, moments, grad, step)
        first, second = _decoded(moments)
        again = [*adamw_int8.encode_exp_avg(first), *adamw_int8.encode_exp_avg_sq(second)]
        for name, before, after in zip("mv", (first, second), _decoded(again), strict=True):
            assert torch.equal(before, after), (magnitude, name)


def test_codes_have_the_shape_of_what_they_stand_for() -> None:
    values = torch.rand(3, 5, 40)
    codes, scales = adamw_int8.encode_exp_avg(values)
    assert codes.shape == values.shape
    assert adamw_int8.decode_exp_avg(codes, scales).shape == values.shape


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_shows_in_its_block_only(bad: float) -> None:
    param, moments, grad = torch.randn(3 * BLOCK), _moments(3 * BLOCK), torch.randn(3 * BLOCK)
    grad[BLOCK + 7] = bad
    _step(param, moments, grad, 1)
    for decoded in _decoded(moments):
        assert decoded[BLOCK : 2 * BLOCK].isnan().all()
        assert torch.cat((decoded[:BLOCK], decoded[2 * BLOCK :])).isfinite().all()


# -- Steps -------------------------------------------------------------------------------------------------------------


def _step(param: Tensor, moments: list[Tensor], grad: Tensor, step: int, **options: Any) -> None:
    adamw_step_(
        param, moments[0], moments[2], grad, **{"step": step, "lr": 0.01, **options}, exp_avg_scales=moments[1],
        exp_avg_sq_scales=moments[3],
    )  # fmt: skip


@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 63, 1000, 4097, 200_000])
def test_a_step_is_that_of_fp32_moments_but_for_how_moments_are_kept(numel: int, grad_dtype: str) -> None:
    generator = fresh()
    for options in ({"weight_decay": 0.1}, {"l2": 0.1}):
        param, moments = torch.randn(numel, generator=generator), _moments(numel, generator)
        grad = torch.randn(numel, generator=generator).to(DTYPES[grad_dtype])
        options = {"factor": torch.tensor(0.25), **options}
        exact, first, second = param.clone(), *_decoded(moments)
        adamw_step_(exact, first, second, grad, step=3, lr=0.01, **options)
        out = torch.full((numel,), float("nan"), dtype=torch.bfloat16)
        _step(param, moments, grad, 3, out=out, **options)
        torch.testing.assert_close(param, exact, rtol=1e-6, atol=1e-7)
        assert torch.equal(out, param.bfloat16())
        found = _decoded(moments)
        for index, (one, value) in enumerate(((found[0], first), (found[1].sqrt(), second.sqrt()))):
            gap = _gap(value, moments[2 * index + 1], 3 + index)
            assert ((one - value).abs() <= 1.0001 * gap).all()


def test_moments_are_right_on_average() -> None:
    """To the nearest, first moments would not decay to zero, and second ones would not move."""
    moments = _moments(64 * BLOCK)
    first, second = _decoded(moments)
    for step in range(1, 101):
        _step(torch.zeros(64 * BLOCK), moments, torch.zeros(64 * BLOCK), step)
    one, two = _decoded(moments)
    assert (one.abs().mean() / first.abs().mean()).item() < 1e-3  # 0.9^100 = 3e-5
    assert abs(two.sqrt().mean().item() / (second * 0.999**100).sqrt().mean().item() - 1) < 0.005


@pytest.mark.parametrize("decades", [0, 2, 4, 5])
def test_small_gradients_beside_large_ones_move_as_under_fp32_moments(decades: int) -> None:
    """With linear codes they moved at half of Adam's rate where gradients were 250 times apart, at a 79th with 10^4."""
    generator, numel = fresh(), 16 * BLOCK
    scale = torch.logspace(0, -decades, BLOCK).repeat(16)
    moments = [tensor.zero_() for tensor in _moments(numel)]
    param, exact, first, second = (torch.zeros(numel) for _ in range(4))
    paths = torch.zeros(2, numel)
    for step in range(1, 301):
        grad = scale * (0.3 + torch.randn(numel, generator=generator))
        before = param.clone(), exact.clone()
        _step(param, moments, grad, step)
        adamw_step_(exact, first, second, grad, step=step, lr=0.01)
        for path, after, old in zip(paths, (param, exact), before, strict=True):
            path += (after - old).square()
    # Of 16 elements of one size each: how far they came, and the length of their steps.
    come = (param.view(16, BLOCK).sum(0) / exact.view(16, BLOCK).sum(0)).view(8, -1).mean(1)
    length = (paths[0] / paths[1]).view(16, 8, -1).mean((0, 2)).sqrt()
    print([f"{one:.2f} {other:.2f}" for one, other in zip(come.tolist(), length.tolist(), strict=True)])
    assert ((come - 1).abs() < 0.1).all()
    # Of 10^5 the first moment is near its smallest code: steps are right on average only.
    assert ((length - 1).abs() < (0.1 if decades <= 4 else 0.6)).all()


def test_a_second_moment_above_zero_is_never_stored_as_zero() -> None:
    param, moments = torch.zeros(2 * BLOCK), [tensor.zero_() for tensor in _moments(2 * BLOCK)]
    grad = torch.full((2 * BLOCK,), 1e-6)
    grad[0] = 1.0
    grad[5] = 0.0
    _step(param, moments, grad, 1)
    expected = torch.ones(2 * BLOCK, dtype=torch.bool)
    expected[5] = False
    assert torch.equal(_decoded(moments)[1] > 0, expected)


def test_zeros_stay_zero() -> None:
    param, moments = torch.zeros(300), [tensor.zero_() for tensor in _moments(300)]
    _step(param, moments, torch.zeros(300), 1, weight_decay=0.1)
    assert not any(tensor.any() for tensor in (param, moments[0], moments[2]))


def test_codes_do_not_depend_on_the_chunks_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    param, moments, grad = torch.randn(5000), _moments(5000), torch.randn(5000)
    for chunk in (BLOCK, 1 << 20):
        monkeypatch.setattr(adamw_int8, "_CPU_CHUNK", chunk)
        mine = [tensor.clone() for tensor in (param, *moments)]
        _step(mine[0], mine[1:], grad, 2)
        results.append(mine)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"exp_avg_scales": None}, r"`exp_avg_scales` must be contiguous fp32 of shape \(2,\) on cpu.*got None"),
        ({"exp_avg_sq_scales": torch.ones(3)}, r"`exp_avg_sq_scales` must .* got torch.float32 of shape \(3,\)"),
        ({"exp_avg_scales": torch.ones(2).half()}, "`exp_avg_scales` must .* got torch.float16"),
        ({"exp_avg_sq": torch.ones(300)}, "`exp_avg` is torch.int8 and `exp_avg_sq` torch.float32. Use one dtype"),
        ({"exp_avg": torch.ones(300), "exp_avg_sq": torch.ones(300)}, "Scales are for int8 moments, but `exp_avg` is"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    names = ("exp_avg", "exp_avg_scales", "exp_avg_sq", "exp_avg_sq_scales")
    given: dict[str, Any] = {"param": torch.ones(300), "grad": torch.ones(300)}
    given |= dict(zip(names, _moments(300), strict=True))
    with pytest.raises((ValueError, TypeError), match=message):
        adamw_step_(**{**given, "step": 1, "lr": 0.1, **change})


# -- torch.compile -----------------------------------------------------------------------------------------------------


def test_op_is_sound() -> None:
    op = torch.ops.lightning_zero.adamw_int8_step_.default
    made = [torch.ones(20), *_moments(20), torch.empty(20).bfloat16(), torch.ones(20), None]
    torch.library.opcheck(op, (*made, *OPTIONS, 0.1, 0.0))


def test_op_compiles_into_one_graph() -> None:
    def step(param: Tensor, moments: list[Tensor], grad: Tensor) -> Tensor:
        _step(param, moments, grad * 2, 1)
        return param * 2

    param, moments, grad = torch.randn(20), _moments(20), torch.randn(20)
    expected = step(param.clone(), [tensor.clone() for tensor in moments], grad)
    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(param, moments, grad), expected)
