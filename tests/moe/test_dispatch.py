from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_zero.moe import MoE
from lightning_zero.moe.dispatch import sort_by_expert
from lightning_zero.moe.routing import Routing


def _routing(experts: list[list[int]], num_experts: int, priority: list[list[float]] | None = None) -> Routing:
    chosen = torch.tensor(experts)
    counts = torch.stack([(chosen == index).sum() for index in range(num_experts)])
    order = None if priority is None else torch.tensor(priority)
    return Routing(chosen, torch.ones(chosen.shape), order, torch.zeros(()), counts)


def test_rows_are_sorted_by_expert() -> None:
    order = sort_by_expert(_routing([[2, 0], [0, 2], [0, 1]], 4), capacity=None)
    assert order.offsets.tolist() == [3, 4, 6, 6]
    # Slots 2 and 4 are first choices of expert 0, slot 1 is a second one.
    assert order.slots.tolist() == [2, 4, 1, 5, 0, 3]
    assert order.rows.tolist() == [[4, 2], [0, 5], [1, 3]]


def test_choices_above_the_capacity_have_no_row() -> None:
    order = sort_by_expert(_routing([[2, 0], [0, 2], [0, 1]], 4), capacity=1)
    assert order.offsets.tolist() == [1, 2, 3, 3]
    assert order.slots.tolist() == [2, 5, 0, -1]
    assert order.rows.tolist() == [[2, -1], [0, -1], [-1, 1]]


def test_those_of_the_highest_priority_are_kept() -> None:
    order = sort_by_expert(_routing([[0], [0], [0]], 1, [[0.1], [0.3], [0.2]]), capacity=2)
    assert order.slots.tolist() == [1, 2]
    assert order.rows.tolist() == [[-1], [0], [1]]


def test_unused_tokens_have_no_row() -> None:
    order = sort_by_expert(_routing([[1], [2], [0]], 2), capacity=None)
    assert order.offsets.tolist() == [1, 2]
    assert order.slots.tolist() == [2, 0, -1]


# -- Memory ------------------------------------------------------------------------------------------------------------


class _Storages(TorchDispatchMode):
    """Counts the storages that operations make, of as many bytes as a tensor has or more."""

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self.made: dict[int, tuple[str, int]] = {}
        self._nbytes = like.nbytes
        self._given = like.untyped_storage().data_ptr()
        self._alive: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, Tensor) and one.untyped_storage().nbytes() >= self._nbytes:
                self._alive.append(one)  # so that no address is used twice
                self.made.setdefault(one.untyped_storage().data_ptr(), (str(func), one.numel()))
        self.made.pop(self._given, None)
        return result


@pytest.mark.parametrize("drop_tokens", [False, True])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_tokens_are_copied_into_the_permuted_input_and_the_output_alone(k: int, drop_tokens: bool) -> None:
    """The experts of this test are the identity: all that is as large as the tokens is made by the dispatch."""
    hidden, num_tokens = 512, 64

    class Identity(nn.Module):
        def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
            return rows.view_as(rows)

    moe = MoE(hidden, nn.Linear(hidden, hidden), 4, k=k, drop_tokens=drop_tokens)
    moe.experts = Identity()  # type: ignore[assignment]
    x = torch.randn(num_tokens, hidden, requires_grad=True)
    gc.collect()
    with _Storages(x) as storages:
        out, _, _ = moe(x)
    assert sorted(numel for _, numel in storages.made.values()) == sorted([k * x.numel(), x.numel()])
    grad = torch.ones_like(out)
    with _Storages(grad) as storages:
        torch.autograd.grad(out, x, grad)
    # Gradients of the permuted rows; of the tokens by the experts, by the router, and their sum.
    assert sorted(numel for _, numel in storages.made.values()) == sorted([k * x.numel(), *[x.numel()] * 3])


def test_nobody_waits_for_a_device() -> None:
    """On the meta device any read of a value raises; the layer has shapes that follow from sizes alone."""
    for options in ({}, {"drop_tokens": True}, {"noisy_gate_policy": "RSample"}, {"bias_balancing": True}):
        with torch.device("meta"):
            moe = MoE(8, nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), 4, k=2, **options)  # type: ignore[arg-type]
            x = torch.randn(10, 8, requires_grad=True)
            out, aux, counts = moe(x, torch.ones(10))
        (out.sum() + aux).backward()
        assert (out.shape, counts.shape) == ((10, 8), (4,))
        assert all(one.grad is not None for one in moe.parameters())
