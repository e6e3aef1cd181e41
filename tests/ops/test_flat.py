from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch

from lightning_zero_ops import accumulate_, clip_value_, elementwise, flat, sq_norm_and_finite
from lightning_zero_ops.flat import sq_norm
from tests.ops.accuracy import AT_LEAST, SIZES, assert_close, fresh, ulp
from tests.ops.ahead_of_time import Compilation, assert_lean
from tests.ops.processes import CAPABILITIES, compiled, interpreted
from tests.sampling import sample

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ODD = (1, 63, 1000, 4097)
MANY = 1056 * 4096 + 4097  # a program of the norm has more than one block

# -- In the interpreter ------------------------------------------------------------------------------------------------


def _close_to_reference(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """One unit in the last place: the interpreter truncates to bf16, and a GPU may fuse a product with a sum."""
    assert torch.isfinite(actual).all()
    assert ((actual.double() - expected.double()).abs() <= ulp(expected)).all()


def _interpret_accumulate(total_dtype: str, grad_dtype: str) -> None:
    for numel, (alpha, beta) in itertools.product(ODD, [(1.0, 1.0), (1.0, 0.0), (0.25, 0.0), (0.5, 1.0)]):
        grad = torch.randn(numel).to(DTYPES[grad_dtype])
        total = torch.randn(numel).to(DTYPES[total_dtype])
        expected = total.clone()
        flat._accumulate_reference(expected, grad, alpha, beta)
        if beta == 0.0:
            total.fill_(float("nan"))
        flat._launch_accumulate(total, grad, alpha, beta)
        _close_to_reference(total, expected)


def _interpret_sq_norm(dtype: str) -> None:
    for numel in ODD:
        grad = torch.randn(numel).to(DTYPES[dtype])
        total = flat._launch_sq_norm(grad)
        torch.testing.assert_close(total, flat._sq_norm_reference(grad), rtol=1e-14, atol=0.0)
        grad[numel // 2] = float("inf")
        assert flat._launch_sq_norm(grad) == float("inf")
        grad[0] = float("nan")
        assert flat._launch_sq_norm(grad).isnan()


def _interpret_sq_norm_and_finite(dtype: str) -> None:
    for numel in ODD:
        grad = torch.randn(numel).to(DTYPES[dtype])
        total, finite = flat._launch_sq_norm_and_finite(grad)
        torch.testing.assert_close(total, flat._sq_norm_and_finite_reference(grad)[0], rtol=1e-6, atol=0.0)
        assert finite
        for bad in (float("nan"), float("inf"), -float("inf")):
            poisoned = grad.clone()
            poisoned[numel // 2] = bad
            assert not flat._launch_sq_norm_and_finite(poisoned)[1]


def _interpret_sq_norm_of_many(dtype: str) -> None:
    grad = torch.randn(MANY).to(DTYPES[dtype])
    for bad in (0.0, float("inf")):
        grad[-1] = bad
        total, finite = flat._launch_sq_norm_and_finite(grad)
        torch.testing.assert_close(total, flat._sq_norm_and_finite_reference(grad)[0], rtol=1e-6, atol=0.0)
        assert finite == (bad == 0.0)


def _interpret_clip_value(dtype: str) -> None:
    for numel in ODD:
        grad = torch.randn(numel).to(DTYPES[dtype])
        expected = grad.clamp(-0.5, 0.5)
        flat._launch_clip_value(grad, 0.5)
        assert torch.equal(grad, expected)
        grad.fill_(float("nan"))
        flat._launch_clip_value(grad, 0.5)
        assert grad.isnan().all()


INTERPRETED = {
    **{f"accumulate-{a}-{b}": partial(_interpret_accumulate, a, b) for a in DTYPES for b in DTYPES},
    **{f"sq-norm-and-finite-{a}": partial(_interpret_sq_norm_and_finite, a) for a in DTYPES},
    **{f"sq-norm-{a}": partial(_interpret_sq_norm, a) for a in DTYPES},
    "sq-norm-of-many": partial(_interpret_sq_norm_of_many, "bf16"),
    **{f"clip-value-{a}": partial(_interpret_clip_value, a) for a in DTYPES},
}


@pytest.mark.parametrize("case", INTERPRETED)
def test_kernel_is_its_reference_in_the_interpreter(case: str) -> None:
    assert interpreted(__name__, case) == ""


# -- Ahead of time -----------------------------------------------------------------------------------------------------


def _accumulate_case(total: str, grad: str, reads: bool) -> Compilation:
    types = {"total": f"*{total}", "grad": f"*{grad}", "numel": "i64", "alpha": "fp32", "beta": "fp32"}
    return Compilation(
        flat._accumulate_kernel, types, {"READS": reads, "BLOCK": elementwise.BLOCK}, elementwise.NUM_WARPS
    )


COMPILED = {
    **{f"accumulate-{a}-{b}": _accumulate_case(a, b, True) for a, b in itertools.product(DTYPES, DTYPES)},
    "overwrite-fp32-bf16": _accumulate_case("fp32", "bf16", False),
    **{
        f"sq-norm-{a}": Compilation(
            flat._sq_norm_kernel,
            {"grad": f"*{a}", "partial_sums": "*fp64", "numel": "i64"},
            {"BLOCK": flat._NORM_BLOCK},
            flat._NUM_WARPS,
        )
        for a in DTYPES
    },
    **{
        f"sq-norm-and-finite-{a}": Compilation(
            flat._sq_norm_and_finite_kernel,
            {
                "grad": f"*{a}",
                "partial_sums": "*fp64",
                "partial_flags": "*i32",
                "numel": "i64",
                "num_blocks": "i32",
            },
            {"BLOCK": flat._NORM_BLOCK, "STAGES": flat._STAGES},
            2 * flat._NUM_WARPS,
        )
        for a in DTYPES
    },
    "sum-up": Compilation(
        flat._sum_up_kernel,
        {"partial_sums": "*fp64", "partial_flags": "*i32", "out": "*fp32", "out_flag": "*i8", "programs": "i32"},
        {"BLOCK": flat._LAST_BLOCK},
        2 * flat._NUM_WARPS,
    ),
    **{
        f"clip-value-{a}": Compilation(
            flat._clip_value_kernel,
            {"grad": f"*{a}", "numel": "i64", "limit": "fp32"},
            {"BLOCK": elementwise.BLOCK},
            elementwise.NUM_WARPS,
        )
        for a in DTYPES
    },
}


@pytest.mark.parametrize("capability", sample(CAPABILITIES, 90))
@pytest.mark.parametrize("case", sample(COMPILED, "accumulate-fp32-bf16", "sq-norm-bf16", "clip-value-fp32"))
def test_kernel_compiles_without_spills_and_loads_128_bits(case: str, capability: int) -> None:
    assert_lean(compiled(__name__, case, capability))


# -- On this machine ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("total_dtype", DTYPES)
@pytest.mark.parametrize("grad_dtype", DTYPES)
def test_accumulate_is_as_exact_as_pytorch(numel: int, total_dtype: str, grad_dtype: str) -> None:
    generator = fresh()
    grad, total = torch.randn(2, max(numel, AT_LEAST), generator=generator)
    grad, total = grad.to(DTYPES[grad_dtype]), total.to(DTYPES[total_dtype])
    exact = total.double() + 0.3 * grad.double()
    plain = (total.float() + 0.3 * grad.float()).to(total.dtype)
    assert_close(accumulate_(total[:numel].clone(), grad[:numel], alpha=0.3), exact, plain)
    untouched = torch.full_like(total[:numel], float("nan"))
    scaled = (0.3 * grad.float()).to(total.dtype)
    assert_close(accumulate_(untouched, grad[:numel], alpha=0.3, beta=0.0), 0.3 * grad.double(), scaled)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_squared_norm_is_as_exact_as_pytorch(numel: int, dtype: str) -> None:
    grad = torch.randn(numel, generator=fresh()).to(DTYPES[dtype])
    total, finite = sq_norm_and_finite(grad)
    assert_close(total, grad.double().square().sum(), grad.float().square().sum(), is_reduction=True)
    assert finite


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_squared_norm_leaves_out_what_is_not_finite(bad: float) -> None:
    grad = torch.tensor([3.0, bad, 4.0])
    total, finite = sq_norm_and_finite(grad)
    assert total.item() == 25.0
    assert not finite


def test_squared_norm_that_overflows_is_infinite_and_its_gradient_finite() -> None:
    total, finite = sq_norm_and_finite(torch.full((4,), 1e30))
    assert total.isinf()
    assert finite


def test_squared_norm_in_double_overflows_nowhere_and_shows_what_is_not_finite() -> None:
    assert sq_norm(torch.full((4,), 1e30)).item() == pytest.approx(4e60)
    assert sq_norm(torch.tensor([3.0, float("inf")])).isinf()
    assert sq_norm(torch.tensor([3.0, float("inf"), float("nan")])).isnan()


def test_squared_norm_of_nothing_is_zero() -> None:
    assert sq_norm(torch.empty(0)).item() == 0.0
    total, finite = sq_norm_and_finite(torch.empty(0))
    assert total.item() == 0.0
    assert finite


def test_clipped_values_keep_nan() -> None:
    grad = clip_value_(torch.tensor([-2.0, 0.5, float("nan"), 2.0]), 1.0)
    assert grad[[0, 1, 3]].tolist() == [-1.0, 0.5, 1.0]
    assert grad[2].isnan()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: accumulate_(torch.ones(2, 2), torch.ones(2, 2)), r"`total` has shape \(2, 2\)"),
        (lambda: accumulate_(torch.ones(4), torch.ones(8)[::2]), r"`grad` has shape \(4,\) and strides \(2,\)"),
        (lambda: accumulate_(torch.ones(4), torch.ones(5)), "`grad` has 5 elements"),
        (lambda: sq_norm(torch.ones(8)[::2]), r"`grad` has shape \(4,\) and strides \(2,\)"),
        (lambda: sq_norm_and_finite(torch.ones(4, dtype=torch.int64)), "`grad` is torch.int64"),
        (lambda: clip_value_(torch.ones(4), -1.0), "`limit=-1.0` must be 0 or more"),
    ],
)
def test_wrong_tensors_are_refused(call: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_writes_are_counted() -> None:
    total = torch.ones(4)
    version = total._version
    accumulate_(total, torch.ones(4))
    assert total._version > version


# -- torch.compile -----------------------------------------------------------------------------------------------------

OPS: dict[str, Any] = {
    "accumulate": (torch.ops.lightning_zero.accumulate_.default, lambda: (torch.ones(8), torch.ones(8), 0.5, 1.0)),
    "sq-norm": (torch.ops.lightning_zero.sq_norm.default, lambda: (torch.ones(8),)),
    "sq-norm-and-finite": (torch.ops.lightning_zero.sq_norm_and_finite.default, lambda: (torch.ones(8),)),
    "clip-value": (torch.ops.lightning_zero.clip_value_.default, lambda: (torch.ones(8), 0.5)),
}


@pytest.mark.parametrize("name", OPS)
def test_op_is_sound(name: str) -> None:
    op, arguments = OPS[name]
    torch.library.opcheck(op, arguments())


def test_ops_compile_into_one_graph() -> None:
    def step(total: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        accumulate_(total, grad, alpha=0.5)
        clip_value_(total, 1.2)
        return sq_norm_and_finite(total)

    compiled_step = torch.compile(step, fullgraph=True, backend="aot_eager")
    total, expected = torch.ones(8), torch.ones(8)
    found = compiled_step(total, torch.ones(8))
    assert found[0] == step(expected, torch.ones(8))[0]
    assert torch.equal(total, expected)
