"""The dtype of scopes and of the graphs that they leave, with units that only write down what they show."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_zero.engine.runtime.compute_dtypes import ComputeDtypes


class _Unit:
    """Computes in 16 bits."""

    def __init__(self, *, is_sharded: bool) -> None:
        self.is_sharded_between_uses = is_sharded
        self.computes_lower = True
        self.buffers: list[Any] = []
        self.is_computing = False

    def begin_computing(self) -> None:
        self.is_computing = True

    def end_computing(self) -> None:
        self.is_computing = False


def _dtype(*, is_sharded: bool = False) -> tuple[ComputeDtypes, _Unit]:
    unit = _Unit(is_sharded=is_sharded)
    return ComputeDtypes([unit]), unit  # type: ignore[list-item]


def test_a_forward_outside_of_a_step_is_exact_but_under_autocast() -> None:
    dtype, _ = _dtype()
    assert dtype.is_exact
    with torch.autocast("cpu", torch.bfloat16):
        assert not dtype.is_exact
    plain = SimpleNamespace(computes_lower=False, is_sharded_between_uses=False, buffers=[])
    assert not ComputeDtypes([plain]).is_exact  # type: ignore[list-item]


def test_autocast_is_that_of_the_device_although_the_root_has_no_parameters_of_its_own() -> None:
    """A forward of a plain loop under CUDA's autocast made whole copies of all parameters in fp32."""
    root, unit = _Unit(is_sharded=False), _Unit(is_sharded=False)
    unit.buffers = [SimpleNamespace(whole=SimpleNamespace(flat=torch.empty(1, device="meta")))]
    dtype = ComputeDtypes([root, unit])  # type: ignore[list-item]
    assert dtype._device_type == "meta"


def test_a_backward_shows_parameters_as_in_the_forwards_whose_graphs_run() -> None:
    dtype, unit = _dtype()
    dtype.choose(in_original=True)
    dtype.begin_backward()
    assert not unit.is_computing
    dtype.choose(in_original=False)
    assert unit.is_computing
    dtype.end_computing()
    dtype.choose(in_original=True)  # the graph of before waits, too
    assert not unit.is_computing
    dtype.begin_backward()
    assert unit.is_computing
    dtype.end_backward()
    assert not unit.is_computing
    with torch.no_grad():
        dtype.choose(in_original=False)
    dtype.choose(in_original=True)
    assert dtype.graphs_in_original


def test_parameters_that_are_gathered_for_each_use_are_shown_by_nobody() -> None:
    dtype, unit = _dtype(is_sharded=True)
    dtype.choose(in_original=False)
    assert not unit.is_computing
    assert not dtype.has_lowered_outside


def test_an_error_of_two_dtypes_names_the_remedy() -> None:
    dtype, _ = _dtype()
    with pytest.raises(RuntimeError, match=r"cast the input to `layer.weight.dtype`"):
        dtype.explain(RuntimeError("mat1 and mat2 must have the same dtype"))
    dtype.explain(RuntimeError("another"))
    dtype.explain(KeyError("same dtype"))
