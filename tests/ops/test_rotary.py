from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero_ops import apply_rotary, rotary
from tests.ops.accuracy import assert_close, fresh
from tests.ops.ahead_of_time import Compilation, assert_lean
from tests.ops.processes import CAPABILITIES, compiled, interpreted
from tests.sampling import sample

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Batch, heads, tokens, size of a head: 2, 63, 1000, 4098 and a million elements.
SHAPES = [(1, 1, 1, 2), (1, 3, 3, 6), (2, 5, 10, 10), (1, 3, 683, 2), (2, 8, 500, 128)]


def _inputs(
    shape: tuple[int, int, int, int], dtype: torch.dtype, generator: torch.Generator, batch: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x as it comes out of a projection, cos and sin, whose halves differ."""
    size, heads, tokens, width = shape
    x = torch.randn(size, tokens, heads, width, generator=generator).to(dtype).transpose(1, 2)
    angle = torch.randn(batch, tokens, width, generator=generator)
    return x, angle.cos().to(dtype), angle.sin().to(dtype)


def _plain(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn as Hugging Face's models do."""
    first, second = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1)


def _with_gradient(function: Any, x: Tensor, cos: Tensor, sin: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.detach().requires_grad_()
    y = function(leaf, cos, sin)
    return y.detach(), torch.autograd.grad(y, leaf, grad)[0]


# -- In the interpreter ------------------------------------------------------------------------------------------------


def _interpret(dtype: str) -> None:
    """Compare the launcher with the reference; the interpreter truncates, so 16 bits may be one unit apart."""
    for shape in ((1, 1, 1, 2), (2, 3, 5, 6), (1, 33, 3, 10), (2, 4, 0, 8)):
        for batch in (1, shape[0]):
            x, cos, sin = _inputs(shape, DTYPES[dtype], torch.Generator().manual_seed(1), batch)
            found, expected = rotary._launch(x, cos, sin), rotary._reference(x, cos, sin)
            assert found.stride() == expected.stride()
            rtol = 1e-6 if dtype == "fp32" else torch.finfo(x.dtype).eps
            torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-6)


INTERPRETED = {dtype: partial(_interpret, dtype) for dtype in DTYPES}


@pytest.mark.parametrize("case", INTERPRETED)
def test_kernel_is_its_reference_in_the_interpreter(case: str) -> None:
    assert interpreted(__name__, case) == ""


# -- Ahead of time -----------------------------------------------------------------------------------------------------

STRIDES = [f"{name}_{dim}" for name in ("x", "y") for dim in ("batch", "head", "token")]
COMPILED = {
    f"{dtype}-{half}": Compilation(
        rotary._rotary_kernel,
        {
            **dict.fromkeys(("x", "cos", "sin", "y"), f"*{dtype}"),
            **dict.fromkeys(("num_heads", "num_tokens", "half", "cos_batch", *STRIDES), "i32"),
        },
        {"HEADS": rotary._MAX_HEADS, "HALF": half},
        rotary._NUM_WARPS,
    )
    for dtype in DTYPES
    for half in (32, 64)
}


@pytest.mark.parametrize("capability", sample(CAPABILITIES, 80, 90))
@pytest.mark.parametrize("case", sample(COMPILED, "bf16-64"))
def test_kernel_compiles_without_spills_and_loads_128_bits(case: str, capability: int) -> None:
    assert_lean(compiled(__name__, case, capability))


# -- On this machine ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_and_its_gradient_are_as_exact_as_pytorch(dtype: str, shape: tuple[int, int, int, int]) -> None:
    generator = fresh()
    inputs = _inputs(shape, DTYPES[dtype], generator)
    grad = torch.randn(shape, generator=generator).to(DTYPES[dtype])
    exact = _with_gradient(_plain, *(tensor.double() for tensor in inputs), grad.double())
    plain = _with_gradient(_plain, *inputs, grad)
    for ours, plain_one, exact_one in zip(_with_gradient(apply_rotary, *inputs, grad), plain, exact, strict=True):
        assert_close(ours, exact_one, plain_one)


def test_every_batch_has_its_own_positions() -> None:
    x, cos, sin = _inputs((2, 3, 5, 6), torch.float32, torch.Generator().manual_seed(0), batch=2)
    torch.testing.assert_close(apply_rotary(x, cos, sin), _plain(x, cos, sin))


def test_result_has_the_strides_of_its_input() -> None:
    x, cos, sin = _inputs((2, 3, 5, 6), torch.float32, torch.Generator().manual_seed(0))
    assert apply_rotary(x, cos, sin).stride() == x.stride() != x.contiguous().stride()


def test_second_derivatives_are_those_of_pytorch() -> None:
    x, cos, sin = _inputs((1, 2, 3, 4), torch.float32, torch.Generator().manual_seed(0))

    def penalty(function: Any) -> Tensor:
        leaf = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(function(leaf, cos, sin).pow(3).sum(), leaf, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), leaf)[0]

    torch.testing.assert_close(penalty(apply_rotary), penalty(_plain), rtol=1e-4, atol=1e-4)


X, COS = torch.ones(2, 3, 5, 6), torch.ones(1, 5, 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X[0], COS, COS), r"`x` must have shape \(B, heads, S, D\)"),
        ((X[..., :5], COS, COS), "with an even D"),
        ((X.double(), COS, COS), "`x` has dtype torch.float64"),
        ((X, COS[..., :4], COS[..., :4]), r"`cos` must have shape \(2, 5, 6\) or \(1, 5, 6\) to turn all of `x`"),
        ((X, COS, COS.expand(2, 5, 6)), "`cos` and `sin` must have one shape"),
        ((X.transpose(2, 3).contiguous().transpose(2, 3), COS, COS), "The last dimension of `x` must be contiguous"),
        ((X, COS.clone().requires_grad_(), COS), "`cos` and `sin` have no gradients here"),
    ],
)
def test_wrong_tensors_are_refused(arguments: tuple[Tensor, Tensor, Tensor], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        apply_rotary(*arguments)


# -- torch.compile -----------------------------------------------------------------------------------------------------


def test_op_is_sound() -> None:
    x, cos, sin = _inputs((2, 3, 5, 6), torch.float32, torch.Generator().manual_seed(0))
    torch.library.opcheck(rotary._op, (x.requires_grad_(), cos, sin))


def test_rotary_compiles_into_one_graph() -> None:
    x, cos, sin = _inputs((2, 3, 5, 6), torch.float32, torch.Generator().manual_seed(0))
    x.requires_grad_()

    def step(x: Tensor) -> Tensor:
        return apply_rotary(x, cos, sin).square().mean()

    compiled_step = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled_step(x), x), torch.autograd.grad(step(x), x))


def test_backward_runs_under_an_autocast_of_another_dtype() -> None:
    """PyTorch's `cat` takes no bf16 under an autocast to fp16 of CPUs."""
    x = torch.randn(1, 2, 3, 8, dtype=torch.bfloat16, requires_grad=True)
    cos, sin = torch.randn(2, 1, 3, 8, dtype=torch.bfloat16)
    (expected,) = torch.autograd.grad(apply_rotary(x, cos, sin).float().sum(), x)
    with torch.autocast("cpu", dtype=torch.float16):
        (found,) = torch.autograd.grad(apply_rotary(x, cos, sin).float().sum(), x)
    assert torch.equal(found, expected)
