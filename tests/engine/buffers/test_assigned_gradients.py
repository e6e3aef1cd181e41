"""A tensor that was assigned to ``grad`` is known to be as it was, or to be changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_zero.engine.buffers.assigned_gradients import Source

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128]


def _gradient(dtype: torch.dtype) -> Tensor:
    """Return small elements beside a large one, in the rounding of which they vanish, and one that is no number."""
    grad = (torch.linspace(1, 2, 4096) * 1e-5).to(dtype)
    grad[0] = 1e4
    grad[7] = float("nan")
    return grad


def _exchange(grad: Tensor) -> None:
    grad[[1, 4095]] = grad[[4095, 1]]


WRITES: dict[str, Callable[[Tensor], object]] = {
    "small": lambda g: g[1:5].zero_(),
    "one": lambda g: g[4095].mul_(1.5),
    "signs": lambda g: g[8:].neg_(),
    "all signs": lambda g: g.neg_(),
    "exchanged": _exchange,
    "numpy": lambda g: g.view(torch.uint8).numpy().__setitem__(9, 1),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_writes_without_a_trace_are_found_however_small(name: str, dtype: torch.dtype) -> None:
    grad = _gradient(dtype)
    source = Source.of(grad)
    assert not source.is_changed
    WRITES[name](grad.data)
    assert grad._version == source.version
    assert source.is_changed


def test_writes_into_tensors_that_are_transposed_or_large_are_found_too() -> None:
    for grad in (_gradient(torch.float32).view(64, 64).T, torch.zeros(2**20 + 5)):
        source = Source.of(grad)
        assert not source.is_changed
        grad.data[-1] = 3.0
        assert source.is_changed


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
def test_strided_tensors_are_sources(dtype: torch.dtype) -> None:
    for tensor in (
        torch.ones(10, dtype=dtype)[::2],
        torch.ones(1, dtype=dtype).expand(4, 1)[:1],
        torch.ones((), dtype=dtype),
    ):
        source = Source.of(tensor)
        assert not source.is_changed
        tensor.data.zero_()
        assert source.is_changed
