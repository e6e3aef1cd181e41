"""What the tests of the three optimizers' ops share: dtypes, and a launcher beside its reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.ops.accuracy import ulp

__all__ = ["DTYPES", "ODD", "compare", "tensors"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ODD = (1, 63, 1000, 4097)


def tensors(numel: int, grad: str, out: str | None, **states: torch.dtype) -> dict[str, Tensor | None]:
    """Return a parameter, states (the second moment of positive values), a gradient and an unwritten ``out``."""
    made: dict[str, Tensor | None] = {"param": torch.randn(numel)}
    for name, dtype in states.items():
        value = 0.1 * torch.randn(numel)
        made[name] = (value.square() if name == "exp_avg_sq" else value).to(dtype)
    made["out"] = None if out is None else torch.full((numel,), float("nan"), dtype=DTYPES[out])
    made["grad"] = torch.randn(numel).to(DTYPES[grad])
    return made


def compare(
    launch: Callable[..., None], reference: Callable[..., None], given: Mapping[str, Tensor | None], *options: Any
) -> None:
    """Run both on copies; 16-bit results within one unit in the last place, since the interpreter truncates.

    fp32: within 1e-6 of the largest value. NumPy rounds every operation, PyTorch's kernel contracts some. The
    reference runs on the CPU: PyTorch's fused kernels for CUDA take ``1 - beta2`` in fp32, which is 2e-5 off for 0.999.
    """
    mine = {name: None if value is None else value.clone() for name, value in given.items()}
    theirs = {name: None if value is None else value.to("cpu", copy=True) for name, value in given.items()}
    launch(*mine.values(), *options)
    with torch.device("cpu"):
        reference(*theirs.values(), *options)
    for name, expected in theirs.items():
        actual = mine[name]
        if expected is None or actual is None:
            continue
        assert torch.isfinite(actual).all(), f"`{name}` was not written"
        actual, bound = actual.cpu(), 1e-6 * expected.double().abs().max()
        if actual.dtype != torch.float32:
            bound = bound + ulp(expected)
        assert ((actual.double() - expected.double()).abs() <= bound).all(), name
