from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from lightning_zero_ops import elementwise, round_stochastic, rounding
from tests.ops.accuracy import SIZES, fresh, ulp
from tests.ops.ahead_of_time import Compilation, assert_lean
from tests.ops.processes import CAPABILITIES, compiled, interpreted
from tests.sampling import sample

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SEEDS = (0, 1, 2**31, 2**32 + 5, 2**63 - 1)

# -- In the interpreter ------------------------------------------------------------------------------------------------


def _interpret(dtype: str) -> None:
    """The kernel has the bits of the reference: what is cut to bf16 needs no rounding, so the interpreter is exact."""
    for numel in (0, 1, 63, 1000, 4097):
        x = (100 * torch.randn(numel)).to(DTYPES[dtype])
        for seed in SEEDS:
            assert torch.equal(rounding._launch(x, seed), rounding._reference(x, seed))
    small = 1e-40 if dtype == "fp32" else 1e-4  # the interpreter reads subnormal numbers of 16 bits as zero
    special = torch.tensor([float("inf"), -float("inf"), 0.0, -0.0, small]).to(DTYPES[dtype])
    assert torch.equal(rounding._launch(special, 1), rounding._reference(special, 1))
    assert rounding._launch(torch.tensor([float("nan")]), 1).isnan().all()


INTERPRETED = {dtype: partial(_interpret, dtype) for dtype in DTYPES}


@pytest.mark.parametrize("case", INTERPRETED)
def test_kernel_has_the_bits_of_its_reference_in_the_interpreter(case: str) -> None:
    assert interpreted(__name__, case) == ""


# -- Ahead of time -----------------------------------------------------------------------------------------------------

COMPILED = {
    dtype: Compilation(
        rounding._round_stochastic_kernel,
        {"x": f"*{dtype}", "y": "*bf16", "numel": "i64", "key_low": "i64", "key_high": "i64"},
        {"BLOCK": elementwise.BLOCK},
        elementwise.NUM_WARPS,
    )
    for dtype in DTYPES
}


@pytest.mark.parametrize("capability", sample(CAPABILITIES, 80, 90))
@pytest.mark.parametrize("case", sample(COMPILED, "fp32"))
def test_kernel_compiles_without_spills_and_loads_128_bits(case: str, capability: int) -> None:
    assert_lean(compiled(__name__, case, capability))


# -- On this machine ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", SIZES)
def test_result_is_one_of_the_two_neighbours(numel: int) -> None:
    x = torch.randn(numel, generator=fresh())
    rounded = round_stochastic(x, 7)
    assert rounded.dtype == torch.bfloat16
    toward_zero = (x.view(torch.int32) & -65536).view(torch.float32)
    step = ulp(toward_zero.bfloat16()) * x.sign()
    assert ((rounded.double() == toward_zero.double()) | (rounded.double() == toward_zero.double() + step)).all()


@pytest.mark.parametrize("value", [1.0 + 1 / 512, -1.0 - 3 / 512, 3e-39, 1234.5])
def test_expected_result_is_the_value(value: float) -> None:
    numel = 1 << 20
    seed = int(torch.randint(2**62, (), generator=fresh()))
    x = torch.full((numel,), value)
    rounded = round_stochastic(x, seed).double()
    step = (rounded.max() - rounded.min()).item()
    # Five standard deviations of the mean of numel draws, each at most half a step wide.
    assert abs(rounded.mean().item() - x[0].item()) <= 5 * 0.5 * step / numel**0.5


def test_draws_of_neighbours_and_of_other_seeds_are_independent() -> None:
    x = torch.full((1 << 20,), 1.0 + 1 / 256)
    first, second = (round_stochastic(x, seed).double() - 1.0 for seed in (5, 6))
    draws = torch.stack((first[:-1], first[1:], second[:-1], first.roll(512)[:-1]))
    correlation = torch.corrcoef(draws) - torch.eye(4)
    assert correlation.abs().max() < 5 / 2**10


def test_same_seed_gives_the_same_bits_and_another_seed_others() -> None:
    x = torch.randn(200_000)
    assert torch.equal(round_stochastic(x, 3), round_stochastic(x, 3))
    assert not torch.equal(round_stochastic(x, 3), round_stochastic(x, 4))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_what_bf16_can_hold_stays(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, 1.0, -2.5, 1024.0, float("inf"), -float("inf")], dtype=dtype)
    assert torch.equal(round_stochastic(x, 11), x.bfloat16())
    assert round_stochastic(torch.tensor([float("nan")], dtype=dtype), 11).isnan().all()


def test_nothing_rounds_to_nothing() -> None:
    assert round_stochastic(torch.empty(0), 1).shape == (0,)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: round_stochastic(torch.ones(2).double(), 0), "`x` has dtype torch.float64"),
        (lambda: round_stochastic(torch.ones(2, 2), 0), r"`x` must be flat and contiguous, got shape \(2, 2\)"),
        (lambda: round_stochastic(torch.ones(4)[::2], 0), r"strides \(2,\)"),
        (lambda: round_stochastic(torch.ones(4), -1), "`seed=-1` must not be negative"),
        (lambda: round_stochastic(torch.ones(4, requires_grad=True), 0), "`x` requires a gradient"),
    ],
)
def test_wrong_arguments_are_refused(call: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_op_is_sound_and_compiles_into_one_graph() -> None:
    x = torch.randn(8)
    torch.library.opcheck(rounding._op, (x, 3))
    step = torch.compile(lambda x: round_stochastic(x, 3) + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(step(x), round_stochastic(x, 3) + 1)
