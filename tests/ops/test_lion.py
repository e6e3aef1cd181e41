from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch

from lightning_zero_ops import elementwise, lion, lion_step_
from tests.ops.accuracy import AT_LEAST, SIZES, assert_close, fresh
from tests.ops.ahead_of_time import Compilation, assert_lean
from tests.ops.optimizers import DTYPES, ODD, compare, tensors
from tests.ops.processes import CAPABILITIES, compiled, interpreted
from tests.sampling import sample

OPTIONS = (0.01, 0.9, 0.99, 0.1)  # lr, betas, weight decay

# -- In the interpreter ------------------------------------------------------------------------------------------------


def _interpret(grad: str, out: str | None, moment: str) -> None:
    for numel, factor in itertools.product(ODD, (None, torch.tensor(0.25))):
        given = tensors(numel, grad, out, exp_avg=DTYPES[moment])
        compare(lion._launch, lion._reference, {**given, "factor": factor}, *OPTIONS)


INTERPRETED = {
    "fp32": partial(_interpret, "fp32", None, "fp32"),
    "bf16": partial(_interpret, "bf16", "bf16", "fp32"),
    "fp16-bf16-moment": partial(_interpret, "fp16", "fp16", "bf16"),
}


@pytest.mark.parametrize("case", INTERPRETED)
def test_kernel_is_its_reference_in_the_interpreter(case: str) -> None:
    assert interpreted(__name__, case) == ""


# -- Ahead of time -----------------------------------------------------------------------------------------------------


def _compilation(grad: str, out: str | None, moment: str) -> Compilation:
    types = {"param": "*fp32", "exp_avg": f"*{moment}", "out": f"*{out}", "grad": f"*{grad}", "factor": "*fp32"}
    types |= {"numel": "i64"} | dict.fromkeys(("lr", "rest1", "rest2", "decay"), "fp32")
    absent = {"out": None} if out is None else {}
    return Compilation(lion._lion_kernel, types, {"BLOCK": elementwise.BLOCK, **absent}, elementwise.NUM_WARPS)


COMPILED = {
    f"{grad}-{out}-{moment}": _compilation(grad, out, moment)
    for grad, out, moment in itertools.product(DTYPES, (None, "bf16", "fp16"), ("fp32", "bf16"))
}


@pytest.mark.parametrize("capability", sample(CAPABILITIES, 80, 90))
@pytest.mark.parametrize("case", sample(COMPILED, "bf16-bf16-fp32"))
def test_kernel_compiles_without_spills_and_loads_128_bits(case: str, capability: int) -> None:
    assert_lean(compiled(__name__, case, capability), scalar_loads=1)


# -- Against float64 ---------------------------------------------------------------------------------------------------


def _step_by_hand(param: torch.Tensor, exp_avg: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    lr, beta1, beta2, decay = OPTIONS
    value, exp_avg = grad.to(param.dtype) * 0.25, exp_avg.to(param.dtype)
    direction = (beta1 * exp_avg + (1 - beta1) * value).sign()
    return [param * (1 - lr * decay) - lr * direction, beta2 * exp_avg + (1 - beta2) * value]


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize(("grad_dtype", "moment"), [("fp32", "fp32"), ("bf16", "fp32"), ("fp16", "bf16")])
def test_step_is_as_exact_as_pytorch(numel: int, grad_dtype: str, moment: str) -> None:
    generator = fresh()
    lr, beta1, beta2, decay = OPTIONS
    param, exp_avg, grad = torch.randn(3, max(numel, AT_LEAST), generator=generator)
    grad = grad.to(DTYPES[grad_dtype])
    # Where the direction is a rounding error, its sign is one as well.
    exp_avg[(0.9 * exp_avg + 0.1 * 0.25 * grad.float()).abs() < 1e-3] = 1.0
    exp_avg = exp_avg.to(DTYPES[moment])
    exact = _step_by_hand(param.double(), exp_avg, grad)
    plain = _step_by_hand(param, exp_avg, grad)
    out = torch.full((numel,), float("nan"), dtype=torch.bfloat16)
    param, exp_avg, grad = param[:numel], exp_avg[:numel], grad[:numel]
    lion_step_(
        param, exp_avg, grad, lr=lr, betas=(beta1, beta2), weight_decay=decay, factor=torch.tensor(0.25), out=out
    )
    for actual, values, usual in zip((param, exp_avg), exact, plain, strict=True):
        assert_close(actual, values, usual.to(actual.dtype))
    assert torch.equal(out, param.bfloat16())


def test_nothing_moves_without_gradient_and_moment() -> None:
    param = torch.ones(8)
    lion_step_(param, torch.zeros(8), torch.zeros(8), lr=0.1)
    assert torch.equal(param, torch.ones(8))


def test_a_gradient_that_is_not_a_number_shows() -> None:
    param = torch.ones(8)
    lion_step_(param, torch.zeros(8), torch.full((8,), float("nan")), lr=0.1)
    assert param.isnan().all()


def test_wrong_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match="`param` is torch.bfloat16"):
        lion_step_(torch.ones(4).bfloat16(), torch.ones(4), torch.ones(4), lr=0.1)


# -- torch.compile -----------------------------------------------------------------------------------------------------


def test_op_is_sound() -> None:
    made = [torch.ones(20), torch.zeros(20), torch.empty(20).bfloat16(), torch.ones(20), torch.tensor(0.5)]
    torch.library.opcheck(torch.ops.lightning_zero.lion_step_.default, (*made, *OPTIONS))


def test_op_compiles_into_one_graph() -> None:
    def step(param: torch.Tensor, exp_avg: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        lion_step_(param, exp_avg, grad * 2, lr=0.1)
        return param * 2

    given = [torch.randn(20), torch.zeros(20), torch.randn(20)]
    expected = step(*[tensor.clone() for tensor in given])
    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(*given), expected)
