from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch

from lightning_zero_ops import adamw, adamw_step_, elementwise
from tests.ops.accuracy import AT_LEAST, SIZES, assert_close, fresh
from tests.ops.ahead_of_time import Compilation, Report, assert_lean
from tests.ops.optimizers import DTYPES, ODD, compare, tensors
from tests.ops.processes import CAPABILITIES, compiled, interpreted
from tests.sampling import sample

OPTIONS = (3, 0.01, 0.9, 0.999, 1e-8)  # step, lr, betas, eps

# -- In the interpreter ------------------------------------------------------------------------------------------------


def _interpret(grad: str, out: str | None, moments: str, weight_decay: float, l2: float) -> None:
    for numel, factor in itertools.product(ODD, (None, torch.tensor(0.3))):
        given = tensors(numel, grad, out, exp_avg=DTYPES[moments], exp_avg_sq=DTYPES[moments])
        compare(adamw._launch, adamw.pytorch_step_, {**given, "factor": factor}, *OPTIONS, weight_decay, l2, ())


def _twin(
    param: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, grad: torch.Tensor, factor: torch.Tensor,
    weight_decay: float, l2: float,
) -> list[torch.Tensor]:  # fmt: skip
    """Step as Note [Arithmetic of the kernel] says, operation by operation; PyTorch rounds the result of each."""
    step, lr, beta1, beta2, eps = OPTIONS
    root_bias2 = torch.tensor((1 - beta2**step) ** 0.5)
    g = grad.float() * factor + torch.tensor(l2) * param
    param = param - torch.tensor(lr * weight_decay) * param
    exp_avg = exp_avg + torch.tensor(1 - beta1) * (g - exp_avg)
    exp_avg_sq = torch.tensor(beta2) * exp_avg_sq + torch.tensor(1 - beta2) * g * g
    root = exp_avg_sq.double().sqrt().float()  # that of PyTorch in fp32 is not always the nearest number
    denominator = root / root_bias2 + torch.tensor(eps)
    return [param - torch.tensor(lr / (1 - beta1**step)) * (exp_avg / denominator), exp_avg, exp_avg_sq]


def _interpret_bits() -> None:
    """The kernel has its twin's bits, however the tensors are cut."""
    for numel, options in itertools.product(ODD, ((0.1, 0.0), (0.0, 0.1))):
        given = tensors(numel, "bf16", None, exp_avg=torch.float32, exp_avg_sq=torch.float32)
        states = [given[name] for name in ("param", "exp_avg", "exp_avg_sq")]
        grad, factor = given["grad"], torch.tensor(0.3)
        expected = _twin(*states, grad, factor, *options)
        for cut in (0, numel // 3):
            found = [state.clone() for state in states]
            for start, stop in ((0, cut), (cut, numel)):
                param, exp_avg, exp_avg_sq = [state[start:stop] for state in found]
                adamw._launch(param, exp_avg, exp_avg_sq, None, grad[start:stop], factor, *OPTIONS, *options, ())
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


INTERPRETED = {
    "bits": _interpret_bits,
    "fp32": partial(_interpret, "fp32", None, "fp32", 0.1, 0.0),
    "bf16": partial(_interpret, "bf16", "bf16", "fp32", 0.1, 0.0),
    "fp16": partial(_interpret, "fp16", "fp16", "fp32", 0.0, 0.1),
    "bf16-moments": partial(_interpret, "bf16", "bf16", "bf16", 0.1, 0.0),
}


@pytest.mark.parametrize("case", sample(INTERPRETED, "bits", "bf16", "bf16-moments"))
def test_kernel_is_its_reference_in_the_interpreter(case: str) -> None:
    assert interpreted(__name__, case) == ""


# -- Ahead of time -----------------------------------------------------------------------------------------------------

_SCALARS = ("rest1", "beta2", "rest2", "eps", "decay", "l2", "step_size", "root_bias2")


def _compilation(grad: str, out: str | None, moments: str, factor: bool) -> Compilation:
    types = {
        "param": "*fp32",
        "exp_avg": f"*{moments}",
        "exp_avg_sq": f"*{moments}",
        "grad": f"*{grad}",
        "numel": "i64",
    }
    types |= dict.fromkeys(_SCALARS, "fp32") | {"out": f"*{out}", "factor": "*fp32"}
    absent = {name: None for name, given in {"out": out, "factor": factor}.items() if not given}
    constants = {"BLOCK": elementwise.BLOCK, **absent}
    return Compilation(adamw._adamw_kernel, types, constants, elementwise.NUM_WARPS, enable_fp_fusion=False)


COMPILED = {
    f"{grad}-{out}-{moments}{'-scaled' if factor else ''}": _compilation(grad, out, moments, factor)
    for grad, out, moments, factor in itertools.product(DTYPES, (None, "bf16", "fp16"), ("fp32", "bf16"), (True, False))
}


@pytest.mark.parametrize("capability", sample(CAPABILITIES, 80, 90))
@pytest.mark.parametrize("case", sample(COMPILED, "bf16-bf16-bf16-scaled"))
def test_kernel_compiles_without_spills_and_loads_128_bits(case: str, capability: int) -> None:
    report = compiled(__name__, case, capability)
    assert_lean(report, scalar_loads=int(case.endswith("scaled")))
    assert isinstance(report, Report)
    assert not report.inexact, report  # Note [Arithmetic of the kernel]


# -- Against float64 ---------------------------------------------------------------------------------------------------


def _step_by_hand(
    param: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, grad: torch.Tensor, decay: float, l2: float
) -> list[torch.Tensor]:
    """Return parameter and moments after a step in the dtype of ``param``."""
    step, lr, beta1, beta2, eps = OPTIONS
    value = grad.to(param.dtype) * 0.25 + l2 * param
    exp_avg = exp_avg.to(param.dtype) * beta1 + (1 - beta1) * value
    exp_avg_sq = exp_avg_sq.to(param.dtype) * beta2 + (1 - beta2) * value * value
    denominator = exp_avg_sq.sqrt() / (1 - beta2**step) ** 0.5 + eps
    param = param * (1 - lr * decay) - lr / (1 - beta1**step) * exp_avg / denominator
    return [param, exp_avg, exp_avg_sq]


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize(("grad_dtype", "moments"), [("fp32", "fp32"), ("bf16", "fp32"), ("fp16", "bf16")])
def test_step_is_as_exact_as_pytorch(numel: int, grad_dtype: str, moments: str) -> None:
    generator = fresh()
    step, lr, beta1, beta2, eps = OPTIONS
    for decay, l2 in ((0.1, 0.0), (0.0, 0.1)):
        param, exp_avg, grad = torch.randn(3, max(numel, AT_LEAST), generator=generator)
        exp_avg, grad = exp_avg.to(DTYPES[moments]), grad.to(DTYPES[grad_dtype])
        exp_avg_sq = torch.rand(max(numel, AT_LEAST), generator=generator).add_(0.1).to(DTYPES[moments])
        exact = _step_by_hand(param.double(), exp_avg, exp_avg_sq, grad, decay, l2)
        plain = _step_by_hand(param, exp_avg, exp_avg_sq, grad, decay, l2)
        out = torch.full((numel,), float("nan"), dtype=torch.bfloat16)
        param, exp_avg, exp_avg_sq = param[:numel], exp_avg[:numel], exp_avg_sq[:numel]
        adamw_step_(
            param, exp_avg, exp_avg_sq, grad[:numel], step=step, lr=lr, betas=(beta1, beta2), eps=eps,
            weight_decay=decay, l2=l2, factor=torch.tensor(0.25), out=out,
        )  # fmt: skip
        for actual, values, usual in zip((param, exp_avg, exp_avg_sq), exact, plain, strict=True):
            assert_close(actual, values, usual.to(actual.dtype))
        assert torch.equal(out, param.bfloat16())


def test_gradient_is_not_written() -> None:
    grad = torch.randn(100)
    before = grad.clone()
    adamw_step_(torch.ones(100), torch.zeros(100), torch.zeros(100), grad, step=1, lr=0.1, factor=torch.tensor(0.5))
    assert torch.equal(grad, before)


def test_padding_of_zeros_stays_zero() -> None:
    param, exp_avg, exp_avg_sq = torch.zeros(40), torch.zeros(40), torch.zeros(40)
    adamw_step_(param, exp_avg, exp_avg_sq, torch.zeros(40), step=1, lr=0.1, weight_decay=0.1)
    assert not torch.cat([param, exp_avg, exp_avg_sq]).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 0}, "`step=0` must be 1 at the first step"),
        ({"weight_decay": 0.1, "l2": 0.2}, "exclude each other"),
        ({"grad": torch.ones(5)}, "`grad` has 5 elements"),
        ({"param": torch.ones(4, dtype=torch.float64)}, "`param` is torch.float64"),
        ({"exp_avg": torch.ones(4, dtype=torch.float16)}, "`exp_avg` is torch.float16"),
        ({"out": torch.ones(2, 2)}, r"`out` has shape \(2, 2\)"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {name: torch.ones(4) for name in ("param", "exp_avg", "exp_avg_sq", "grad")}
    with pytest.raises((ValueError, TypeError), match=message):
        adamw_step_(**{**given, "step": 1, "lr": 0.1, **change})


# -- torch.compile -----------------------------------------------------------------------------------------------------


def test_op_is_sound() -> None:
    made = [torch.ones(20), torch.zeros(20), torch.zeros(20), torch.empty(20).bfloat16(), torch.ones(20), None]
    op = torch.ops.lightning_zero.adamw_step_.default
    torch.library.opcheck(op, (*made, *OPTIONS, 0.1, 0.0, [4, 6]))


def test_op_compiles_into_one_graph() -> None:
    def step(param: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        adamw_step_(param, exp_avg, exp_avg_sq, grad * 2, step=1, lr=0.1)
        return param * 2

    given = [torch.randn(20), torch.zeros(20), torch.zeros(20), torch.randn(20)]
    expected = step(*[tensor.clone() for tensor in given])
    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(*given), expected)
