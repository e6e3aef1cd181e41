"""Attributes of modules are alike if forwards find the same in them."""

from __future__ import annotations

import copy
import math
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_zero.moe.alike import are_alike


class _Options:
    def __init__(self, scale: float) -> None:
        self.scale = scale


class _Layer(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.values: dict[str, Any] = {
            "function": lambda x: x * scale,
            "method": self.forward,
            "partial": partial(F.leaky_relu, negative_slope=scale),
            "object": _Options(scale),
            "namespace": SimpleNamespace(scales=[scale]),
            "array": np.full(3, scale),
            "tensor": torch.full((3,), scale),
            "number": scale,
        }
        self.own = [self, self.weight, weakref.ref(self.weight)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize("key", _Layer().values)
def test_values_that_the_same_code_makes_are_alike(key: str) -> None:
    one, other = _Layer().values[key], _Layer().values[key]
    assert are_alike(one, other)
    assert are_alike([one], copy.deepcopy([one]))
    assert are_alike(one, _Layer(0.5).values[key]) == (key == "method")


def test_parameters_and_modules_are_compared_elsewhere() -> None:
    assert are_alike(_Layer().own, _Layer().own)
    looped: list[Any] = []
    looped.append(looped)
    assert are_alike(looped, copy.deepcopy(looped))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        (F.gelu, F.relu),
        ([1], [1, 2]),
        ({"a": 1}, {"b": 1}),
        (nn.Linear, nn.Conv1d),
        (None, 0),
        (torch.ones(2), torch.ones(2).double()),
        (torch.tensor([math.nan, 1.0]), torch.tensor([1.0, math.nan])),
        (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)),
    ],
)
def test_others_differ(one: Any, other: Any) -> None:
    assert not are_alike(one, other)


def test_missing_numbers_are_alike() -> None:
    assert are_alike(math.nan, float("nan"))
    assert are_alike(torch.empty(3, device="meta"), torch.empty(3, device="meta"))
    assert are_alike(torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 1.0]))


def test_sentinels_and_generators_of_one_seed_are_alike() -> None:
    """Each expert has its own, so layers were refused."""
    assert are_alike(object(), object())
    assert are_alike(torch.Generator().manual_seed(1), torch.Generator().manual_seed(1))
