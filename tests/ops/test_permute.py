from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero_ops import permute, permute_tokens, unpermute_tokens
from tests.ops.accuracy import assert_close, fresh
from tests.ops.ahead_of_time import Compilation, assert_lean
from tests.ops.processes import CAPABILITIES, compiled, interpreted
from tests.sampling import sample

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Tokens, slots of each, elements of a row: 1, 63, 1000, 4097 and a million elements.
SHAPES = [(1, 1, 1), (9, 2, 7), (20, 4, 50), (17, 3, 241), (1000, 2, 1000)]


def _order(num_tokens: int, k: int, kept: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return slots and rows of a random order; a share of the slots is dropped, and as many rows are nobody's."""
    order = torch.randperm(num_tokens * k)
    slots = torch.where(torch.arange(len(order)) < kept * len(order), order, -1)
    rows = torch.full((num_tokens * k,), -1, dtype=torch.int64)
    rows[slots[slots >= 0]] = torch.arange(len(order))[slots >= 0]
    return slots, rows.view(num_tokens, k)


def _plain_permute(x: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
    return x[slots.clamp(min=0) // rows.shape[1]] * (slots >= 0).unsqueeze(1)


def _plain_unpermute(y: Tensor, weights: Tensor | None, slots: Tensor, rows: Tensor) -> Tensor:
    picked = y[rows.clamp(min=0)] * (rows >= 0).unsqueeze(-1)
    return (picked if weights is None else picked * weights.to(y.dtype).unsqueeze(-1)).sum(1)


# -- In the interpreter ------------------------------------------------------------------------------------------------


def _interpret(dtype: str) -> None:
    """Compare the launchers with the references; the interpreter truncates, so 16 bits may be one unit apart."""
    for num_tokens, k, hidden in [*SHAPES[:-1], (5, 2, 1500), (0, 2, 8), (3, 2, 0)]:
        for kept in (1.0, 0.6):
            index = _order(num_tokens, k, kept)
            x, grad = torch.randn(2, num_tokens, hidden).to(DTYPES[dtype])
            y = torch.randn(num_tokens * k, hidden).to(DTYPES[dtype])
            weights = torch.rand(num_tokens, k)
            saved = (grad, y, weights, *index)
            pairs = [
                (permute._launch_permute(x, *index), permute._permute_reference(x, *index)),
                (permute._launch_unpermute(y, None, *index), permute._unpermute_reference(y, None, *index)),
                (permute._launch_unpermute(y, weights, *index), permute._unpermute_reference(y, weights, *index)),
                *zip(
                    permute._launch_unpermute_backward(*saved),
                    permute._unpermute_backward_reference(*saved),
                    strict=True,
                ),
            ]
            for found, expected in pairs:
                rtol = 1e-6 if expected.dtype == torch.float32 else torch.finfo(expected.dtype).eps
                torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-6 * max(hidden, 1) ** 0.5)


INTERPRETED = {dtype: partial(_interpret, dtype) for dtype in DTYPES}


@pytest.mark.parametrize("case", INTERPRETED)
def test_kernel_is_its_reference_in_the_interpreter(case: str) -> None:
    assert interpreted(__name__, case) == ""


# -- Ahead of time -----------------------------------------------------------------------------------------------------


def _compilation(kernel: Any, tensors: str, dtype: str, hidden: int, **constants: Any) -> Compilation:
    types = {**dict.fromkeys(tensors.split(), f"*{dtype}"), **dict.fromkeys(("slots", "rows"), "*i64")}
    types |= dict.fromkeys(("weights", "grad_weights"), "*fp32")
    types |= dict.fromkeys(("num_rows", "num_tokens", "hidden", "k"), "i32")
    block = permute._block(hidden)
    sizes = {"ROWS": permute._TILE // block, "BLOCK": block}
    return Compilation(kernel, types, {**constants, **sizes}, permute._NUM_WARPS)


COMPILED = {
    f"{name}-{dtype}-{hidden}": _compilation(kernel, tensors, dtype, hidden, **constants)
    for name, kernel, tensors, constants in (
        ("permute", permute._permute_kernel, "x y", {}),
        ("unpermute", permute._unpermute_kernel, "x y", {"WEIGHTED": True}),
        ("sum", permute._unpermute_kernel, "x y", {"WEIGHTED": False}),
        ("backward", permute._unpermute_backward_kernel, "grad y grad_y", {}),
    )
    for dtype in DTYPES
    for hidden in (128, 4096)
}


@pytest.mark.parametrize("capability", sample(CAPABILITIES, 80, 90))
@pytest.mark.parametrize(
    "case", sample(COMPILED, "permute-bf16-4096", "unpermute-bf16-4096", "backward-bf16-4096", "backward-bf16-128")
)
def test_kernel_compiles_without_spills_and_loads_128_bits(case: str, capability: int) -> None:
    """All loads of values are wide; indices and weights are single values, one per row of a tile and choice."""
    assert_lean(compiled(__name__, case, capability), scalar_loads=16)


# -- On this machine ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [1.0, 0.6], ids=["all", "dropped"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("dtype", DTYPES)
def test_maps_and_their_gradients_are_as_exact_as_pytorch(dtype: str, shape: tuple[int, int, int], kept: float) -> None:
    generator = fresh()
    num_tokens, k, hidden = shape
    index = _order(num_tokens, k, kept)
    x, grad_x = torch.randn(2, num_tokens, hidden, generator=generator).to(DTYPES[dtype])
    y, grad_y = torch.randn(2, num_tokens * k, hidden, generator=generator).to(DTYPES[dtype])
    weights = torch.rand(num_tokens, k, generator=generator) + 0.1

    def run(gather: Any, combine: Any, wide: bool) -> list[Tensor]:
        a, b, w, *grads = [one.double() if wide else one for one in (x, y, weights, grad_y, grad_x)]
        a, b, w = (leaf.detach().requires_grad_() for leaf in (a, b, w))
        permuted, combined = gather(a, *index), combine(b, w, *index)
        first = torch.autograd.grad(permuted, a, grads[0])
        second = torch.autograd.grad(combined, (b, w), grads[1])
        return [permuted.detach(), combined.detach(), *first, *second]

    exact = run(_plain_permute, _plain_unpermute, True)
    plain = run(_plain_permute, _plain_unpermute, False)
    for ours, plain_one, exact_one in zip(run(permute_tokens, unpermute_tokens, False), plain, exact, strict=True):
        if exact_one.any():
            assert_close(ours, exact_one, plain_one, is_reduction=ours.shape != y.shape)
        else:
            assert not ours.any()


def test_permuting_there_and_back_counts_every_token_k_times() -> None:
    index = _order(50, 4)
    x = torch.randn(50, 8)
    torch.testing.assert_close(unpermute_tokens(permute_tokens(x, *index), None, *index), 4 * x)


def test_a_dropped_row_counts_nowhere_whatever_it_holds() -> None:
    slots, rows = _order(20, 2, 0.5)
    y = torch.randn(40, 8)
    y[slots < 0] = float("nan")
    weights = torch.rand(20, 2, requires_grad=True)
    x = unpermute_tokens(y.requires_grad_(), weights, slots, rows)
    assert x.isfinite().all()
    for grad in torch.autograd.grad(x, (y, weights), torch.ones_like(x)):
        assert grad.isfinite().all()


def test_tokens_of_which_no_slot_has_a_row_have_gradients_of_zeros() -> None:
    y, weights = torch.zeros(0, 4, requires_grad=True), torch.ones(3, 2, requires_grad=True)
    x = unpermute_tokens(y, weights, torch.zeros(0, dtype=torch.int64), torch.full((3, 2), -1))
    found = torch.autograd.grad(x.sum(), (y, weights))
    assert torch.equal(x, torch.zeros(3, 4))
    assert [one.tolist() for one in found] == [[], [[0.0, 0.0]] * 3]


def test_fp64_is_computed_in_fp64() -> None:
    index = _order(6, 2, 0.7)
    y, weights = torch.randn(12, 4).double().requires_grad_(), torch.rand(6, 2).double().requires_grad_()
    torch.autograd.gradcheck(lambda y, w: unpermute_tokens(y, w, *index), (y, weights))
    torch.autograd.gradgradcheck(lambda y, w: unpermute_tokens(y, w, *index), (y, weights))
    x = torch.randn(6, 4).double().requires_grad_()
    torch.autograd.gradcheck(lambda x: permute_tokens(x, *index), (x,))
    torch.autograd.gradgradcheck(lambda x: permute_tokens(x, *index), (x,))


SLOTS, ROWS = torch.arange(4), torch.arange(4).view(2, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: permute_tokens(torch.ones(2, 3).long(), SLOTS, ROWS), "`x` has dtype torch.int64"),
        (lambda: permute_tokens(torch.ones(3, 3), SLOTS, ROWS), r"`x` must have shape \(2, H\)"),
        (lambda: unpermute_tokens(torch.ones(3, 3), None, SLOTS, ROWS), r"`y` must have shape \(4, H\)"),
        (lambda: permute_tokens(torch.ones(2, 3), SLOTS.int(), ROWS), r"`slots` must be int64 .* got torch.int32"),
        (lambda: permute_tokens(torch.ones(2, 3), SLOTS, SLOTS), r"`rows` int64 of shape \(T, k\), got"),
        (lambda: unpermute_tokens(torch.ones(4, 3), torch.ones(2), SLOTS, ROWS), "`weights` must be floating-point"),
        (lambda: permute._permute_op(torch.ones(3, 2).t(), SLOTS, ROWS), "`x` must be contiguous"),
    ],
)
def test_wrong_arguments_are_refused(call: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call()


# -- torch.compile -----------------------------------------------------------------------------------------------------


def test_ops_are_sound() -> None:
    index = _order(5, 2, 0.7)
    x, y = torch.randn(5, 4, requires_grad=True), torch.randn(10, 4, requires_grad=True)
    weights = torch.rand(5, 2, requires_grad=True)
    torch.library.opcheck(permute._permute_op, (x, *index))
    torch.library.opcheck(permute._unpermute_op, (y, weights, *index))
    torch.library.opcheck(permute._unpermute_op, (y, None, *index))
    torch.library.opcheck(permute._unpermute_backward_op, (x.detach(), y.detach(), weights.detach(), *index))


def test_maps_compile_into_one_graph() -> None:
    index = _order(5, 2, 0.7)

    def step(x: Tensor, weights: Tensor) -> Tensor:
        return unpermute_tokens(permute_tokens(x, *index).sin(), weights, *index).square().mean()

    inputs = torch.randn(5, 4, requires_grad=True), torch.rand(5, 2, requires_grad=True)
    compiled_step = torch.compile(step, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled_step(*inputs), inputs)
    for one, other in zip(found, torch.autograd.grad(step(*inputs), inputs), strict=True):
        torch.testing.assert_close(one, other)
