"""Writes into parameters and module buffers are seen and refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.errors import PipelineError
from lightning_zero.parallel.pipeline.stages.written_tensors import unwritten

SMALL, LARGE = 16, 2**13


def _clamp(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.clamp_(max=0.5)


def _data(tensor: Tensor) -> None:
    tensor.data.mul_(0.5)


@pytest.mark.parametrize(("size", "write"), [(SMALL, _clamp), (SMALL, _data), (LARGE, _clamp)])
def test_writes_are_refused_and_small_tensors_get_their_values_back(size: int, write: Callable[[Tensor], None]) -> None:
    param = nn.Parameter(torch.ones(size))
    with pytest.raises(PipelineError, match="The step writes into `scale` in place"), unwritten([("scale", param)]):
        write(param)
    assert bool(param.eq(1).all()) == (size == SMALL)


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_what_is_read_and_missing_numbers_are_no_writes(size: int) -> None:
    buffer = torch.full((size,), float("nan"))
    with unwritten([("buffer", buffer)]):
        buffer.sum()
    limited = nn.Parameter(torch.zeros(SMALL))
    with unwritten([("scale", limited)]):
        _clamp(limited)  # changes nothing


def test_tensors_without_memory_are_passed_over() -> None:
    released = nn.Parameter(torch.ones(SMALL))
    released.data.untyped_storage().resize_(0)
    with unwritten([("released", released), ("meta", torch.empty(3, device="meta"))]):
        pass
