from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_zero_ops import elementwise, gated, geglu, swiglu
from tests.ops.accuracy import SIZES, assert_close, fresh
from tests.ops.ahead_of_time import Compilation, assert_lean
from tests.ops.processes import CAPABILITIES, compiled, interpreted
from tests.sampling import sample

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def _plain(activation: str, gate: Tensor, up: Tensor) -> Tensor:
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def _ours(activation: str, gate: Tensor, up: Tensor) -> Tensor:
    if activation == "silu":
        return swiglu(gate, up)
    return geglu(gate, up, approximate="tanh" if activation == "gelu_tanh" else "none")


def _with_gradients(function: Any, activation: str, gate: Tensor, up: Tensor, grad: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in (gate, up)]
    y = function(activation, *leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


def _joined(results: Iterable[list[Tensor]]) -> list[Tensor]:
    return [torch.cat(parts) for parts in zip(*results, strict=True)]


# -- In the interpreter ------------------------------------------------------------------------------------------------


def _interpret(activation: str, dtype: str) -> None:
    """Compare the launchers with the references; the interpreter truncates, so 16 bits may be one unit apart."""
    for numel in (0, 1, 63, 1000, 4097):
        gate, up, grad = (3 * torch.randn(3, numel)).to(DTYPES[dtype])
        found = (gated._launch(gate, up, activation), *gated._launch_backward(grad, gate, up, activation))
        expected = (gated._reference(gate, up, activation), *gated._backward_reference(grad, gate, up, activation))
        for one, other in zip(found, expected, strict=True):
            rtol = 1e-6 if dtype == "fp32" else torch.finfo(other.dtype).eps
            torch.testing.assert_close(one, other, rtol=rtol, atol=2e-6)


INTERPRETED = {
    f"{activation}-{dtype}": partial(_interpret, activation, dtype) for activation in ACTIVATIONS for dtype in DTYPES
}


@pytest.mark.parametrize("case", INTERPRETED)
def test_kernel_is_its_reference_in_the_interpreter(case: str) -> None:
    assert interpreted(__name__, case) == ""


# -- Ahead of time -----------------------------------------------------------------------------------------------------


def _compilation(kernel: Any, names: tuple[str, ...], dtype: str, activation: str) -> Compilation:
    types = {**dict.fromkeys(names, f"*{dtype}"), "numel": "i64"}
    return Compilation(kernel, types, {"ACTIVATION": activation, "BLOCK": elementwise.BLOCK}, elementwise.NUM_WARPS)


BACKWARD_NAMES = ("grad", "gate", "up", "grad_gate", "grad_up")
COMPILED = {
    f"{name}-{activation}-{dtype}": _compilation(kernel, names, dtype, activation)
    for name, kernel, names in (
        ("forward", gated._gated_kernel, ("gate", "up", "y")),
        ("backward", gated._gated_backward_kernel, BACKWARD_NAMES),
    )
    for activation in ACTIVATIONS
    for dtype in DTYPES
}


@pytest.mark.parametrize("capability", sample(CAPABILITIES, 80, 90))
@pytest.mark.parametrize("case", sample(COMPILED, "forward-silu-bf16", "backward-gelu_tanh-bf16"))
def test_kernel_compiles_without_spills_and_loads_128_bits(case: str, capability: int) -> None:
    assert_lean(compiled(__name__, case, capability))


# -- On this machine ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_and_its_gradients_are_as_exact_as_pytorch(activation: str, dtype: str, numel: int) -> None:
    generator = fresh()
    # Many draws of few elements, none of them far out: the largest error is not that of a single element.
    draws = [8 * torch.rand(3, numel, generator=generator) - 4 for _ in range(max(1000 // numel, 1))]
    draws = [draw.to(DTYPES[dtype]) for draw in draws]
    exact = _joined(_with_gradients(_plain, activation, *draw.double()) for draw in draws)
    plain = _joined(_with_gradients(_plain, activation, *draw) for draw in draws)
    found = _joined(_with_gradients(_ours, activation, *draw) for draw in draws)
    for ours, plain_one, exact_one in zip(found, plain, exact, strict=True):
        assert_close(ours, exact_one, plain_one)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_large_values_stay_finite(activation: str) -> None:
    gate = torch.tensor([-1e4, -100.0, 100.0, 1e4])
    for ours in _with_gradients(_ours, activation, gate, torch.ones(4), torch.ones(4)):
        assert ours.isfinite().all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_second_derivatives_are_those_of_pytorch(activation: str) -> None:
    gate, up = torch.randn(2, 16)

    def penalty(function: Any) -> list[Tensor]:
        leaf = gate.clone().requires_grad_()
        # The second argument depends on the first: their gradients must not mix.
        result = function(activation, leaf, up * leaf.sin())
        (grad,) = torch.autograd.grad(result.square().sum(), leaf, create_graph=True)
        return [grad.detach(), *torch.autograd.grad(grad.square().sum(), leaf)]

    for ours, plain in zip(penalty(_ours), penalty(_plain), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: swiglu(torch.ones(4), torch.ones(4).half()), "`up` has dtype torch.float16 beside `gate`"),
        (lambda: swiglu(torch.ones(4).double(), torch.ones(4).double()), "`gate` has dtype torch.float64"),
        (lambda: swiglu(torch.ones(4), torch.ones(5)), r"`up` must have the shape of `gate`, \(4,\)"),
        (lambda: geglu(torch.ones(4), torch.ones(4), approximate="erf"), "`approximate='erf'` is not known"),  # type: ignore[arg-type]
        (lambda: gated._op(torch.ones(4), torch.ones(4), "relu"), "`activation='relu'` is not known"),
        (lambda: gated._op(torch.ones(4, 2).t(), torch.ones(2, 4), "silu"), "`gate` must be contiguous"),
    ],
)
def test_wrong_arguments_are_refused(call: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call()


# -- torch.compile -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_op_is_sound(activation: str) -> None:
    gate, up, grad = torch.randn(3, 8)
    torch.library.opcheck(gated._op, (gate.requires_grad_(), up.requires_grad_(), activation))
    torch.library.opcheck(gated._backward_op, (grad, gate.detach(), up.detach(), activation))


def test_activations_compile_into_one_graph() -> None:
    def step(gate: Tensor, up: Tensor) -> Tensor:
        return geglu(swiglu(gate, up), up).square().mean()

    inputs = [torch.randn(8, requires_grad=True) for _ in range(2)]
    compiled_step = torch.compile(step, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled_step(*inputs), inputs)
    for one, other in zip(found, torch.autograd.grad(step(*inputs), inputs), strict=True):
        torch.testing.assert_close(one, other)
