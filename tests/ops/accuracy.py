"""How exact an op must be against float64: the bounds, and tensors that differ from test to test."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["AT_LEAST", "SIZES", "SPECIAL", "assert_close", "assert_same_specials", "fresh", "specials", "ulp"]

SIZES = (1, 63, 1000, 4097, 1_000_000)
AT_LEAST = 4096  # elements from which the error of plain PyTorch is taken
SPECIAL = (0.0, -0.0, float("inf"), float("-inf"), float("nan"))
NORM_WISE = 1e-6
TIMES_PLAIN = 2.0  # how much larger than plain PyTorch's own error the largest element-wise error may be


def fresh() -> torch.Generator:
    """Return a generator with the test's own seed: a largest error is a statistic, and some draws exceed it."""
    return torch.Generator().manual_seed(zlib.crc32(os.environ["PYTEST_CURRENT_TEST"].encode()))


def ulp(values: Tensor) -> Tensor:
    """Return the distance of 16-bit or fp32 values to the next one away from zero, in float64."""
    magnitude = values.abs()
    bits = {2: torch.int16, 4: torch.int32}[values.itemsize]
    return (magnitude.view(bits) + 1).view(values.dtype).double() - magnitude.double()


def assert_close(actual: Tensor, exact: Tensor, plain: Tensor, *, is_reduction: bool = False) -> None:
    """Assert the bounds of exactness.

    fp32: norm-wise relative error at most 1e-6; largest error at most twice that of ``plain``, or one unit of an
    element. 16 bits: one unit in the last place, and what fp32 loses where terms cancel; where ``is_reduction``, twice
    the largest error of ``plain``.

    One element says little about the error of plain PyTorch, and its terms may cancel: ``exact`` and ``plain`` of
    element-wise ops may have more elements than ``actual``, which is compared with the first of them.

    Args:
        actual: What the op returned.
        exact: Float64, from the same input.
        plain: What PyTorch gives in the dtype of ``actual``.
        is_reduction: The op adds over elements or multiplies matrices.
    """
    assert actual.dtype == plain.dtype
    assert exact.dtype == torch.float64
    assert torch.isfinite(actual).all(), "not every output was written"
    head = exact[: len(actual)] if exact.shape != actual.shape else exact
    error = (actual.double() - head).abs()
    one = ulp(head.to(actual.dtype))
    if actual.dtype == torch.float32:
        relative = _mean_square(error) ** 0.5 / _mean_square(exact) ** 0.5
        assert relative <= NORM_WISE, relative
    elif not is_reduction:
        cancelled = torch.finfo(torch.float32).eps * exact.abs().max()
        assert (error <= one + cancelled).all(), (error / one).max().item()
        return
    bound = TIMES_PLAIN * (plain.double() - exact).abs().max()
    assert ((error <= bound) | (error <= one)).all(), (error.max() / bound).item()


def _mean_square(values: Tensor) -> float:
    return values.square().mean().item()


def specials(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return random values of which one in seven is special; the first 63 are not, nor are the last 63."""
    values = torch.randn(numel)
    chosen = torch.arange(63, max(numel - 63, 63), 7)
    values[chosen] = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), chosen.shape)]
    return values.to(dtype)


def assert_same_specials(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    """Assert that a kernel and its twin are NaN and infinite in the same places, and close elsewhere."""
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        if one is None or other is None:
            assert one is other
            continue
        is_short = one.dtype in (torch.bfloat16, torch.float16)
        rtol = 2 * torch.finfo(one.dtype).eps if is_short else 2e-5
        assert one.dtype == other.dtype, index
        torch.testing.assert_close(
            one.double().cpu(),
            other.double().cpu(),
            rtol=rtol,
            atol=rtol,
            equal_nan=True,
            msg=lambda text, at=index: f"{at}: {text}",
        )
