from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_zero_ops import grouped, grouped_linear
from tests.ops.accuracy import assert_close, fresh
from tests.ops.processes import interpreted

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
COUNTS = {"even": [3, 3, 3], "uneven": [1, 7, 2], "empty": [0, 9, 0], "one": [0, 0, 1], "none": [0, 0, 0]}


def _inputs(counts: list[int], dtype: torch.dtype, width: int = 16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = fresh() if "PYTEST_CURRENT_TEST" in __import__("os").environ else None
    random = partial(torch.randn, generator=generator)
    offsets = torch.tensor(counts).cumsum(0).int()
    x, weight = random(sum(counts), width), random(len(counts), 2 * width, width)
    return x.to(dtype), weight.to(dtype), random(len(counts), 2 * width).to(dtype), offsets


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    experts = torch.searchsorted(offsets, torch.arange(len(x), dtype=torch.int32), right=True)
    y = (weight[experts] @ x.unsqueeze(-1)).squeeze(-1)
    return y if bias is None else y + bias[experts]


def _with_gradients(function: Any, x: Tensor, weight: Tensor, bias: Tensor, offsets: Tensor, grad: Tensor) -> Any:
    leaves = [tensor.detach().requires_grad_() for tensor in (x, weight, bias)]
    y = function(*leaves, offsets)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


# -- The launchers, with torch._grouped_mm -----------------------------------------------------------------------------


def _with_grouped_mm(dtype: str) -> None:
    """Compare the launchers with the references, on rows of which some are nobody's."""
    known = grouped._has_grouped_mm
    grouped._has_grouped_mm = lambda x, weight: True
    try:
        for counts in COUNTS.values():
            x, weight, bias, offsets = _inputs([*counts, 4], DTYPES[dtype])
            grad = torch.randn(len(x), 32).to(x.dtype)
            ends = offsets.clone()
            ends[-1] -= 2
            found = grouped._launch(x, weight, bias, ends)
            assert found.isfinite().all()
            # What becomes of these rows between two layers may be anything.
            x[-2:], grad[-2:] = float("nan"), float("nan")
            pairs = [(found[:-2], grouped._reference(x, weight, bias, ends)[:-2])]
            saved = (grad, x, weight, ends, True, True, True)
            pairs += zip(grouped._launch_backward(*saved), grouped._backward_reference(*saved), strict=True)
            for one, other in pairs:
                rtol = 1e-5 if dtype == "fp32" else 2 * torch.finfo(x.dtype).eps
                torch.testing.assert_close(one, other, rtol=rtol, atol=10 * rtol)
    finally:
        grouped._has_grouped_mm = known


INTERPRETED = {dtype: partial(_with_grouped_mm, dtype) for dtype in DTYPES}


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this PyTorch has no `_grouped_mm`")
@pytest.mark.parametrize("case", INTERPRETED)
def test_grouped_mm_is_the_loop(case: str) -> None:
    assert interpreted(__name__, case) == ""


def _grouped_mm_of_capability_10(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """Multiply as ``torch._grouped_mm`` does on a B200, which writes nothing for products over no rows."""
    groups = [slice(start, stop) for start, stop in pairwise([0, *offs.tolist()])]
    if b.dim() == 3:
        return torch.cat([a[rows] @ b[expert] for expert, rows in enumerate(groups)])
    result = torch.full((len(groups), a.shape[0], b.shape[1]), 7.0, dtype=a.dtype)
    for expert, rows in enumerate(groups):
        if rows.stop > rows.start:
            result[expert] = a[:, rows] @ b[rows]
    return result


class _Allocated(TorchDispatchMode):
    """Adds up the elements of empty tensors that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "new_empty" in str(func):
            self.numel += result.numel()
        return result


@pytest.mark.parametrize("by_weight", [False, True], ids=["frozen", "trained"])
def test_experts_without_rows_have_gradients_of_zeros_and_nothing_is_allocated_twice(
    by_weight: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a B200 their gradients were other values of the memory (https://github.com/pytorch/pytorch/issues/172439)."""
    monkeypatch.setattr(grouped, "_has_grouped_mm", lambda x, weight: True)
    monkeypatch.setattr(torch, "_grouped_mm", _grouped_mm_of_capability_10, raising=False)
    x, weight, _, offsets = _inputs([0, 4, 0, 5, 0], torch.float32)
    saved = (torch.randn(len(x), 32, generator=fresh()), x, weight, offsets, True, by_weight, False)
    with _Allocated() as allocated:
        found = grouped._launch_backward(*saved)
    assert allocated.numel == 0
    for one, other in zip(found, grouped._backward_reference(*saved), strict=True):
        torch.testing.assert_close(one, other)


# -- On this machine ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_and_their_gradients_are_as_exact_as_pytorch(dtype: str, counts: str) -> None:
    inputs = _inputs(COUNTS[counts], DTYPES[dtype])
    grad = torch.randn(len(inputs[0]), 32, generator=fresh()).to(DTYPES[dtype])
    exact = _with_gradients(_plain, *(one.double() for one in inputs[:3]), inputs[3], grad.double())
    plain = _with_gradients(_plain, *inputs, grad)
    for ours, plain_one, exact_one in zip(_with_gradients(grouped_linear, *inputs, grad), plain, exact, strict=True):
        if exact_one.any():
            assert_close(ours, exact_one, plain_one, is_reduction=True)
        else:
            assert not ours.any()


def test_second_derivatives_are_those_of_pytorch() -> None:
    x, weight, bias, offsets = _inputs(COUNTS["uneven"], torch.float64, 3)
    leaves = [one.requires_grad_() for one in (x, weight, bias)]
    torch.autograd.gradcheck(lambda *args: grouped_linear(*args, offsets), leaves)
    torch.autograd.gradgradcheck(lambda *args: grouped_linear(*args, offsets), leaves)


def test_frozen_weights_have_no_gradients() -> None:
    x, weight, _, offsets = _inputs(COUNTS["uneven"], torch.float32)
    grouped_linear(x.requires_grad_(), weight, None, offsets).sum().backward()
    assert x.grad is not None
    assert weight.grad is None


def test_rows_of_nobody_are_finite() -> None:
    x, weight, bias, offsets = _inputs(COUNTS["even"], torch.float32)
    assert grouped_linear(torch.cat([x, x]), weight, bias, offsets).isfinite().all()


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, torch.ones(9, 16).half(), "`weight` has dtype torch.float32 beside `x` of torch.float16"),
        (0, torch.ones(9, 15), r"`x` must have shape \(M, in\)"),
        (2, torch.ones(3, 31), r"`bias` must have shape \(3, 32\)"),
        (3, torch.zeros(3), r"`offsets` must be int32 of shape \(3,\), got torch.float32"),
        (3, torch.zeros(2).int(), r"`offsets` must be int32 of shape \(3,\)"),
        (1, torch.ones(3, 32, 16, device="meta"), "`grouped_linear` takes .* on meta"),
    ],
)
def test_wrong_arguments_are_refused(index: int, value: Tensor, message: str) -> None:
    inputs = [*_inputs(COUNTS["even"], torch.float32)]
    inputs[index] = value
    with pytest.raises((ValueError, TypeError), match=message):
        grouped_linear(*inputs)


# -- torch.compile -----------------------------------------------------------------------------------------------------


def test_op_is_sound() -> None:
    x, weight, bias, offsets = _inputs(COUNTS["uneven"], torch.float32)
    leaves = tuple(one.requires_grad_() for one in (x, weight, bias))
    torch.library.opcheck(grouped._op, (*leaves, offsets))
    torch.library.opcheck(grouped._op, (x, weight, None, offsets))
    saved = (torch.ones(10, 32), x.detach(), weight.detach(), offsets, True, False, True)
    torch.library.opcheck(grouped._backward_op, saved)


def test_products_compile_into_one_graph() -> None:
    x, weight, bias, offsets = _inputs(COUNTS["uneven"], torch.float32)
    leaves = tuple(one.requires_grad_() for one in (x, weight, bias))
    compiled_step = torch.compile(
        lambda *args: grouped_linear(*args, offsets).square().mean(), fullgraph=True, backend="aot_eager"
    )
    found = torch.autograd.grad(compiled_step(*leaves), leaves)
    expected = torch.autograd.grad(grouped_linear(*leaves, offsets).square().mean(), leaves)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
