from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch

from lightning_zero_ops import elementwise, sgd, sgd_step_
from tests.ops.accuracy import AT_LEAST, SIZES, assert_close, fresh
from tests.ops.ahead_of_time import Compilation, assert_lean
from tests.ops.optimizers import DTYPES, ODD, compare, tensors
from tests.ops.processes import CAPABILITIES, compiled, interpreted
from tests.sampling import sample

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
}

# -- In the interpreter ------------------------------------------------------------------------------------------------


def _interpret(grad: str, out: str | None, kind: str) -> None:
    options = {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, **KINDS[kind]}
    order = [options[name] for name in ("lr", "momentum", "dampening", "weight_decay", "nesterov")]
    for numel, factor, step in itertools.product(ODD, (None, torch.tensor(0.3)), (1, 2)):
        given = tensors(numel, grad, out, momentum_buffer=torch.float32)
        if kind == "plain":
            given["momentum_buffer"] = None
        compare(sgd._launch, sgd.pytorch_step_, {**given, "factor": factor}, step, *order, ())


INTERPRETED = {
    f"{grad}-{kind}": partial(_interpret, grad, out, kind)
    for (grad, out), kind in itertools.product([("fp32", None), ("bf16", "bf16")], KINDS)
}


@pytest.mark.parametrize("case", INTERPRETED)
def test_kernel_is_its_reference_in_the_interpreter(case: str) -> None:
    assert interpreted(__name__, case) == ""


# -- Ahead of time -----------------------------------------------------------------------------------------------------


def _compilation(grad: str, out: str | None, kind: str, is_first: bool) -> Compilation:
    types = {"param": "*fp32", "momentum_buffer": "*fp32", "out": f"*{out}", "grad": f"*{grad}", "factor": "*fp32"}
    types |= {"numel": "i64", "lr": "fp32", "momentum": "fp32", "undamped": "fp32", "weight_decay": "fp32"}
    constants: dict[str, Any] = {"IS_FIRST": is_first, "NESTEROV": kind == "nesterov", "BLOCK": elementwise.BLOCK}
    constants |= {"momentum_buffer": None} if kind == "plain" else {}
    constants |= {"out": None} if out is None else {}
    return Compilation(sgd._sgd_kernel, types, constants, elementwise.NUM_WARPS)


COMPILED = {
    f"{grad}-{out}-{kind}-{'first' if is_first else 'later'}": _compilation(grad, out, kind, is_first)
    for grad, out, kind, is_first in itertools.product(DTYPES, (None, "bf16", "fp16"), KINDS, (True, False))
}


@pytest.mark.parametrize("capability", sample(CAPABILITIES, 80, 90))
@pytest.mark.parametrize("case", sample(COMPILED, "bf16-bf16-nesterov-later"))
def test_kernel_compiles_without_spills_and_loads_128_bits(case: str, capability: int) -> None:
    assert_lean(compiled(__name__, case, capability), scalar_loads=1)


# -- Against float64 and PyTorch ---------------------------------------------------------------------------------------


def _step_by_hand(
    param: torch.Tensor, buffer: torch.Tensor, grad: torch.Tensor, options: dict[str, Any]
) -> list[torch.Tensor]:
    momentum = options.get("momentum", 0.0)
    value = grad.to(param.dtype) * 0.25 + options.get("weight_decay", 0.0) * param
    if not momentum:
        return [param - 0.1 * value]
    buffer = momentum * buffer.to(param.dtype) + (1 - options.get("dampening", 0.0)) * value
    return [param - 0.1 * (value + momentum * buffer if options.get("nesterov") else buffer), buffer]


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_step_is_as_exact_as_pytorch(numel: int, grad_dtype: str, kind: str) -> None:
    generator = fresh()
    param, buffer, grad = torch.randn(3, max(numel, AT_LEAST), generator=generator)
    grad = grad.to(DTYPES[grad_dtype])
    exact = _step_by_hand(param.double(), buffer, grad, KINDS[kind])
    plain = _step_by_hand(param, buffer, grad, KINDS[kind])
    out = torch.full((numel,), float("nan"), dtype=torch.bfloat16)
    param, buffer, grad = param[:numel], buffer[:numel], grad[:numel]
    state = None if kind == "plain" else buffer
    sgd_step_(param, state, grad, step=2, lr=0.1, factor=torch.tensor(0.25), out=out, **KINDS[kind])
    for actual, values, usual in zip((param, buffer), exact, plain, strict=False):
        assert_close(actual, values, usual)
    assert torch.equal(out, param.bfloat16())


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_pytorchs_fused_optimizer(kind: str) -> None:
    expected = torch.nn.Parameter(torch.randn(64))
    optimizer = torch.optim.SGD([expected], lr=0.1, fused=True, **KINDS[kind])
    param, buffer = expected.detach().clone(), None if kind == "plain" else torch.empty(64)
    for step in (1, 2, 3):
        expected.grad = torch.randn(64)
        optimizer.step()
        sgd_step_(param, buffer, expected.grad, step=step, lr=0.1, **KINDS[kind])
    assert torch.equal(param, expected.detach())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 0}, "`step=0` must be 1 at the first step"),
        ({"momentum": 0.9}, "`momentum=0.9` needs a `momentum_buffer`"),
        ({"grad": torch.ones(5)}, "`grad` has 5 elements"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"param": torch.ones(4), "momentum_buffer": None, "grad": torch.ones(4)}
    with pytest.raises(ValueError, match=message):
        sgd_step_(**{**given, "step": 1, "lr": 0.1, **change})


# -- torch.compile -----------------------------------------------------------------------------------------------------


def test_op_is_sound() -> None:
    made = [torch.ones(20), torch.zeros(20), torch.empty(20).bfloat16(), torch.ones(20), torch.tensor(0.5)]
    op = torch.ops.lightning_zero.sgd_step_.default
    torch.library.opcheck(op, (*made, 2, 0.1, 0.9, 0.0, 0.1, True, []))


def test_op_compiles_into_one_graph() -> None:
    def step(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        sgd_step_(param, None, grad * 2, step=1, lr=0.1)
        return param * 2

    given = [torch.randn(20), torch.randn(20)]
    expected = step(*[tensor.clone() for tensor in given])
    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(*given), expected)
