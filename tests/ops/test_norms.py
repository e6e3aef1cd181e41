from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_zero_ops import layer_norm, norms, rms_norm
from tests.ops.accuracy import SIZES, assert_close, fresh
from tests.ops.ahead_of_time import Compilation, Report, assert_lean
from tests.ops.processes import CAPABILITIES, compiled, interpreted
from tests.sampling import sample

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Many rows: what is rounded once per row, by plain PyTorch as well, says little about few of them.
SHAPES = {1: (1000, 1), 63: (500, 63), 1000: (200, 1000), 4097: (100, 4097), 1_000_000: (1000, 1000)}
KINDS = ("rms", "gemma", "layer", "layer-no-bias")
EPS = 1e-5


def _inputs(kind: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
    """Return x, weight, gradient, and a bias where there is one."""
    hidden = shape[-1:]
    sizes = [shape, hidden, shape, hidden] if kind == "layer" else [shape, hidden, shape]
    return [torch.randn(size, generator=generator).add_(0.5).to(dtype) for size in sizes]


def _plain(kind: str, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    hidden = x.shape[-1:]
    if kind.startswith("layer"):
        return F.layer_norm(x, hidden, weight, bias, EPS)
    return F.rms_norm(x, hidden, weight + 1 if kind == "gemma" else weight, EPS)


def _ours(kind: str, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if kind.startswith("layer"):
        return layer_norm(x, weight, bias, eps=EPS)
    return rms_norm(x, weight, eps=EPS, offset=1.0 if kind == "gemma" else 0.0)


def _with_gradients(function: Any, kind: str, x: Tensor, weight: Tensor, grad: Tensor, *bias: Tensor) -> list[Tensor]:
    """Return the result and the gradients of x, weight and bias."""
    leaves = [tensor.detach().requires_grad_() for tensor in (x, weight, *bias)]
    y = function(kind, *leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


# -- In the interpreter ------------------------------------------------------------------------------------------------


def _interpret(kind: str, dtype: str) -> None:
    """Compare the launchers with the references; the interpreter truncates, so 16 bits may be one unit apart."""
    for shape in ((1, 1), (5, 63), (2, 3, 125), (2, 4097), (37, 128), (5, 9001)):
        x, weight, grad, *bias = _inputs(kind, shape, DTYPES[dtype], torch.Generator().manual_seed(1))
        settings = (bias[0] if bias else None, EPS, 1.0 if kind == "gemma" else 0.0, kind.startswith("layer"))
        y, mean, rstd = norms._launch(x, weight, *settings)
        saved = (grad, x, weight, mean, rstd, *settings[2:])
        expected = (*norms._reference(x, weight, *settings), *norms._backward_reference(*saved))
        _assert_near((y, mean, rstd, *norms._launch_backward(*saved)), expected)
    empty = torch.empty(0, 8)
    y, mean, rstd = norms._launch(empty, torch.ones(8), None, EPS, 0.0, False)
    found = norms._launch_backward(empty, empty, torch.ones(8), mean, rstd, 0.0, False)
    assert torch.equal(found[1], torch.zeros(8))


def _assert_near(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for one, other in zip(found, expected, strict=True):
        rtol = 1e-5 if one.dtype == torch.float32 else 2 * torch.finfo(one.dtype).eps
        torch.testing.assert_close(one, other, rtol=rtol, atol=rtol * other.abs().max().item() if other.numel() else 0)


INTERPRETED = {
    **{f"{kind}-{dtype}": partial(_interpret, kind, dtype) for kind in KINDS for dtype in DTYPES},
}


@pytest.mark.parametrize("case", INTERPRETED)
def test_kernel_is_its_reference_in_the_interpreter(case: str) -> None:
    assert interpreted(__name__, case) == ""


# -- Ahead of time -----------------------------------------------------------------------------------------------------


WIDE = 16384


def _forward_case(dtype: str, hidden: int, is_centred: bool) -> Compilation:
    types = dict.fromkeys(("x", "weight", "bias", "y"), f"*{dtype}")
    types |= {"mean": "*fp32", "rstd": "*fp32", "num_rows": "i32", "hidden": "i32", "eps": "fp32", "offset": "fp32"}
    kernel, block = norms._kernel_and_block(hidden, norms._norm_kernel, norms._wide_norm_kernel)
    constants = {"CENTRED": is_centred, "BIASED": is_centred, "ROWS": norms._num_rows(block), "BLOCK": block}
    return Compilation(kernel, types, constants, norms._num_warps(block), enable_fp_fusion=False)


def _backward_case(dtype: str, hidden: int, is_centred: bool) -> Compilation:
    types = dict.fromkeys(("grad", "x", "weight", "grad_x"), f"*{dtype}")
    types |= dict.fromkeys(("mean", "rstd", "partial_weight", "partial_bias"), "*fp32")
    types |= {"num_rows": "i32", "hidden": "i32", "offset": "fp32", "rows_per_program": "i32"}
    kernel, block = norms._kernel_and_block(hidden, norms._norm_backward_kernel, norms._wide_norm_backward_kernel)
    constants = {"CENTRED": is_centred, "ROWS": norms._num_rows(block), "BLOCK": block}
    return Compilation(kernel, types, constants, norms._num_warps(block), enable_fp_fusion=False)


COMPILED = {
    f"{name}-{dtype}-{hidden}": case(dtype, hidden, name.startswith("layer"))
    for name, case in {
        "rms": _forward_case,
        "layer": _forward_case,
        "rms-backward": _backward_case,
        "layer-backward": _backward_case,
    }.items()
    for dtype in DTYPES
    for hidden in (128, 1024, 4096, norms._MAX_HIDDEN, WIDE)
}


_SPILLS = (("layer-backward-fp32-8192", 120), ("rms-backward-bf16-128", 120), ("layer-backward-fp32-128", 100))


@pytest.mark.parametrize("capability", sample(CAPABILITIES, 80, 90))
@pytest.mark.parametrize(
    "case", sample(COMPILED, "rms-bf16-4096", "layer-backward-fp32-8192", "layer-backward-bf16-16384")
)
def test_kernel_compiles_without_spills_and_loads_128_bits(case: str, capability: int) -> None:
    # Backward reads two numbers of each row of a tile, and of the weight what a thread needs for narrow rows.
    report = compiled(__name__, case, capability)
    assert isinstance(report, Report), report
    assert not report.inexact, report
    if (case, capability) in _SPILLS:
        assert report.spilled_bytes <= 24
        return
    assert_lean(report, scalar_loads=18 if case.endswith("-128") else 2)


# -- On this machine ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", sample(DTYPES, "fp32", "bf16"))
@pytest.mark.parametrize("kind", KINDS)
def test_norm_and_its_gradients_are_as_exact_as_pytorch(kind: str, dtype: str, size: int) -> None:
    inputs = _inputs(kind, SHAPES[size], DTYPES[dtype], fresh())
    exact = _with_gradients(_plain, kind, *(tensor.double() for tensor in inputs))
    plain = _with_gradients(_plain, kind, *inputs)
    found = _with_gradients(_ours, kind, *inputs)
    for index, (ours, plain_one, exact_one) in enumerate(zip(found, plain, exact, strict=True)):
        # Over one element the gradients cancel: test_gradients_of_one_element_cancel.
        if exact_one.any() and (size > 1 or index == 0):
            assert_close(ours, exact_one, plain_one, is_reduction=True)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_one_element_cancel(kind: str) -> None:
    """A norm forgets the size of a row of one element, but for eps: the terms are equal up to their rounding."""
    generator = fresh()
    for x, weight, grad, *bias in (_inputs(kind, (1, 1), torch.float32, generator) for _ in range(200)):
        exact = _with_gradients(_plain, kind, *(tensor.double() for tensor in (x, weight, grad, *bias)))
        found = _with_gradients(_ours, kind, x, weight, grad, *bias)
        if kind.startswith("layer"):
            assert [found[1].item(), found[2].item()] == [0.0, 0.0]
            continue
        eps = torch.finfo(torch.float32).eps
        term = ((weight + 1 if kind == "gemma" else weight) * grad / (x.square() + EPS).sqrt()).abs().item()
        assert abs(found[1].item() - exact[1].item()) <= 4 * eps * term
        assert abs(found[2].item() - exact[2].item()) <= 4 * eps * abs(exact[2].item())


@pytest.mark.parametrize("kind", KINDS)
def test_mixed_dtypes_promote(kind: str) -> None:
    x, weight, grad, *bias = _inputs(kind, (3, 8), torch.float32, torch.Generator().manual_seed(0))
    half = x.bfloat16()
    found = _with_gradients(_ours, kind, half, weight, grad, *bias)
    assert [tensor.dtype for tensor in found[:3]] == [torch.float32, torch.bfloat16, torch.float32]
    assert torch.equal(found[0], _ours(kind, half.float(), weight, *bias))


@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives_are_those_of_pytorch(kind: str) -> None:
    x, weight, _, *bias = _inputs(kind, (3, 8), torch.float32, torch.Generator().manual_seed(0))

    def penalty(function: Any) -> list[Tensor]:
        leaf, gain = x.clone().requires_grad_(), weight.clone().requires_grad_()
        grads = torch.autograd.grad(function(kind, leaf, gain, *bias).square().sum(), (leaf, gain), create_graph=True)
        return list(torch.autograd.grad(sum(grad.square().sum() for grad in grads), (leaf, gain)))

    for ours, plain in zip(penalty(_ours), penalty(_plain), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4 * plain.abs().max().item())


def test_transposed_input_is_taken_and_its_gradient_is_right() -> None:
    x = torch.randn(8, 5).t().requires_grad_()
    weight = torch.randn(8)
    (ours,) = torch.autograd.grad(rms_norm(x, weight, eps=EPS).square().sum(), x)
    (plain,) = torch.autograd.grad(F.rms_norm(x, (8,), weight, EPS).square().sum(), x)
    torch.testing.assert_close(ours, plain)


def test_frozen_weight_has_no_gradient() -> None:
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8)
    rms_norm(x, weight).sum().backward()
    assert x.grad is not None
    assert weight.grad is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rms_norm(torch.ones(2, 4).double(), torch.ones(4)), "`x` of a norm has dtype torch.float64"),
        (lambda: rms_norm(torch.ones(2, 4), torch.ones(5)), r"`weight` of a norm must have shape \(4,\)"),
        (
            lambda: layer_norm(torch.ones(2, 4), torch.ones(4), torch.ones(2)),
            r"`bias` of a norm must have shape \(4,\)",
        ),
        (lambda: norms._op(torch.ones(4, 2).t(), torch.ones(4), None, EPS, 0.0, False), "`x` of a norm must be contig"),
    ],
)
def test_wrong_tensors_are_refused(call: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call()


# -- torch.compile -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_op_is_sound(kind: str) -> None:
    x, weight, grad, *bias = _inputs(kind, (3, 8), torch.float32, torch.Generator().manual_seed(0))
    leaves = [tensor.requires_grad_() for tensor in (x, weight, *bias)]
    settings = (EPS, 1.0 if kind == "gemma" else 0.0, kind.startswith("layer"))
    torch.library.opcheck(norms._op, (leaves[0], leaves[1], bias[0] if bias else None, *settings))
    with torch.no_grad():
        _, mean, rstd = norms._reference(x, weight, None, *settings)
    torch.library.opcheck(norms._backward_op, (grad, x.detach(), weight.detach(), mean, rstd, *settings[1:]))


def test_norms_compile_into_one_graph() -> None:
    def step(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return layer_norm(rms_norm(x, weight), weight, bias).square().mean()

    inputs = [torch.randn(shape, requires_grad=True) for shape in ((3, 8), (8,), (8,))]
    compiled_step = torch.compile(step, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled_step(*inputs), inputs)
    for one, other in zip(found, torch.autograd.grad(step(*inputs), inputs), strict=True):
        torch.testing.assert_close(one, other)
