"""Writes into parameters and module buffers are seen and refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.errors import PipelineError
from lightning_zero.parallel.pipeline.stages.written_tensors import Held, undone_in, unwritten

SMALL, LARGE = 16, 2**13


def _held(**params: nn.Parameter) -> Held:
    """Return parameters, whose versions count writes."""
    return Held(params.items(), (), lambda: {name: one._version for name, one in params.items()}, [])


def _held_buffer(buffer: Tensor) -> Held:
    return Held((), [("buffer", buffer)], dict, [])


def _clamp(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.clamp_(max=0.5)


def _data(tensor: Tensor) -> None:
    tensor.data.mul_(0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "write"), [(SMALL, _clamp), (SMALL, _data), (LARGE, _clamp)])
def test_writes_are_refused_and_small_tensors_get_their_values_back(
    size: int, write: Callable[[Tensor], None], dtype: torch.dtype
) -> None:
    param = nn.Parameter(torch.ones(size, dtype=dtype))
    with pytest.raises(PipelineError, match="The step writes into `scale` in place"), unwritten(_held(scale=param)):
        write(param)
    assert bool(param.eq(1).all()) == (size == SMALL)


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_what_is_read_and_missing_numbers_are_no_writes(size: int) -> None:
    buffer = torch.full((size,), float("nan"))
    with unwritten(_held_buffer(buffer)):
        buffer.sum()


@pytest.mark.parametrize("of", [lambda one: _held(scale=one), _held_buffer])
def test_a_write_of_the_same_values_is_one(of: Callable[[Any], Held]) -> None:
    """It would be refused in the batch in which it changes them."""
    limited = nn.Parameter(torch.zeros(SMALL))
    with pytest.raises(PipelineError, match="The step writes into"), unwritten(of(limited), compares_values=False):
        _clamp(limited)


def test_fakes_that_are_written_into_buffers_move_versions_only() -> None:
    buffer = torch.zeros(SMALL)
    held = _held_buffer(buffer)
    with unwritten(held):
        for written in (buffer, buffer[0], buffer.detach(), buffer.data):
            torch.autograd.graph.increment_version(written)
            held.lost.append(written)
    assert not held.lost
    with pytest.raises(PipelineError, match="`buffer`"), unwritten(held):
        torch.autograd.graph.increment_version(buffer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("write", [_clamp, _data])
@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_code_that_may_write_has_no_effect(size: int, write: Callable[[Tensor], None], dtype: torch.dtype) -> None:
    """The engine would take values of 16 bits over into masters that have more of them."""
    param, other = nn.Parameter(torch.ones(size, dtype=dtype)), nn.Parameter(torch.ones(LARGE))
    version = param._version
    with unwritten(_held(scale=param, other=other), may_write={"scale"}) as undone:
        write(param)
    assert param.eq(1).all()
    assert (param._version, undone) == (version, {"scale"})
    with pytest.raises(PipelineError, match="`other`"), unwritten(_held(other=other), may_write={"scale"}):
        _clamp(other)


class _Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.other = nn.Parameter(torch.ones(LARGE)), nn.Parameter(torch.ones(SMALL))
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor, *, fails: bool = False) -> Tensor:
        _clamp(self.scale)
        _clamp(self.other)
        _data(self.other)
        if fails:
            raise ValueError("of the program")
        result: Tensor = self.inner(x)
        return result


def test_modules_may_write_their_own_parameters_in_their_forwards() -> None:
    module = _Writes()
    held = _held(scale=module.scale)
    before = module.scale._version
    with unwritten(held), undone_in(module.modules(), {id(module.scale)}):
        with pytest.raises(ValueError, match="of the program"):
            module(torch.ones(2), fails=True)
        assert module.scale.eq(1).all()
    assert (module.scale._version, bool(module.other.eq(0.25).all())) == (before, True)
    with (
        pytest.raises(PipelineError, match="`scale`"),
        unwritten(held),
        undone_in(module.modules(), {id(module.scale)}),
    ):
        _clamp(module.scale)


class _Arrived(nn.Parameter):
    pass


def test_values_that_arrive_are_no_writes() -> None:
    moved, pending = nn.Parameter(torch.full((1,), float("nan"))), nn.Parameter(torch.ones(SMALL))
    with unwritten(_held(moved=moved, pending=pending)):
        moved.data = torch.ones(1)
        pending.data.mul_(2)
        pending.__class__ = _Arrived
    assert moved.item() == 1
    assert pending.eq(2).all()


def test_tensors_without_memory_are_passed_over() -> None:
    released = nn.Parameter(torch.ones(SMALL))
    released.data.untyped_storage().resize_(0)
    with unwritten(_held(released=released, meta=nn.Parameter(torch.empty(3, device="meta")))):
        pass
