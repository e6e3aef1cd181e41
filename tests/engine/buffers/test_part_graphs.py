"""In a backward modules compute with parts, and the program's hooks and functions see wholes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_zero.boxes import Part
from lightning_zero.engine.buffers import part_graphs
from lightning_zero.engine.buffers.part_parameter import computing_with_parts, show_as_whole
from lightning_zero.errors import PartialParameterError

PART = Part.along((6, 4), 0, (0, 3))


def _weight() -> Any:
    weight = nn.Parameter(torch.ones(3, 4))
    show_as_whole({"w": weight}, {"w": PART})
    return weight


class Scaled(torch.autograd.Function):
    """Multiplies by the mean of a weight, in the backward too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return values * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (weight,) = ctx.saved_tensors
        return grad * weight.mean(), torch.ones_like(weight)


def _plain(values: Tensor, weight: Any) -> Tensor:
    return Scaled.apply(values, weight)  # type: ignore[no-any-return]


def _recomputed(values: Tensor, weight: Any) -> Tensor:
    return checkpoint(lambda one: (one * weight.mean()).sin(), values, use_reentrant=False)  # type: ignore[no-any-return]


def _reentrant(values: Tensor, weight: Any) -> Tensor:
    again = lambda one: _plain((one * weight.mean()).sin(), weight)  # noqa: E731
    return checkpoint(again, values, use_reentrant=True)  # type: ignore[no-any-return]


@pytest.mark.parametrize("compute", [_plain, _recomputed, _reentrant])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["same thread", "other thread"])
def test_modules_compute_with_parts_in_a_backward(compute: Callable[..., Tensor], elsewhere: bool) -> None:
    weight, values = _weight(), torch.ones(3, requires_grad=True)
    with computing_with_parts([weight]):
        loss = compute(values, weight).sum()
    if elsewhere:
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    else:
        loss.backward()
    assert values.grad is not None


def _reads(weight: Any) -> Callable[..., None]:
    def read(*_: Any) -> None:
        weight.norm()

    return read


def _behind_a_module(hook: Any, weight: Any) -> Tensor:
    with computing_with_parts([weight]):
        hidden = _plain(torch.ones(3, requires_grad=True), weight)
    hidden.register_hook(hook)  # at a node of the module
    return hidden


def _outside(hook: Any, weight: Any) -> Tensor:
    hidden = torch.ones(3, requires_grad=True) * 2
    hidden.register_hook(hook)
    return hidden


def _uncut(hook: Any, weight: Any) -> Tensor:
    bias = nn.Parameter(torch.ones(3))
    bias.register_hook(hook)
    return bias * 2


def _accumulated(hook: Any, weight: Any) -> Tensor:
    bias = nn.Parameter(torch.ones(3))
    bias.register_post_accumulate_grad_hook(hook)
    return bias * 2


def _of_a_module(hook: Any, weight: Any) -> Tensor:
    layer = nn.Linear(3, 3)
    layer.register_full_backward_hook(hook)
    return layer(torch.ones(3))  # type: ignore[no-any-return]


def _of_a_module_that_is_cut(hook: Any, weight: Any) -> Tensor:
    layer = nn.Linear(3, 3)
    layer.register_full_backward_hook(hook)
    with computing_with_parts([weight]):
        return layer(torch.ones(3))  # type: ignore[no-any-return]


def _of_a_part(hook: Any, weight: Any) -> Tensor:
    weight.register_hook(hook)
    with computing_with_parts([weight]):
        return weight * 2  # type: ignore[no-any-return]


def _own_function(hook: Any, weight: Any) -> Tensor:
    return _plain(torch.ones(3, requires_grad=True), weight)


def _own_recomputation(hook: Any, weight: Any) -> Tensor:
    class Later(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, values: Tensor) -> Tensor:
            return values * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            hook()
            return grad

    values = torch.ones(3, requires_grad=True)
    with computing_with_parts([weight]):
        weight.sum()
    return Later.apply(values)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "make",
    [
        _behind_a_module,
        _outside,
        _uncut,
        _accumulated,
        _of_a_module,
        _of_a_module_that_is_cut,
        _of_a_part,
        _own_function,
        _own_recomputation,
    ],
)
def test_programs_see_wholes_in_a_backward(make: Callable[..., Tensor]) -> None:
    weight = _weight()
    loss = make(_reads(weight), weight).sum()
    with pytest.raises(PartialParameterError, match="needs the whole parameter `w`"):
        loss.backward()


def test_ranges_of_nodes_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_graphs, "_MOST_RANGES", 4)
    monkeypatch.setattr(part_graphs, "_ranges", {})
    values = torch.ones(3, requires_grad=True)
    for _ in range(9):
        with part_graphs.recorded_as_module():
            with part_graphs.recorded_as_module():
                kept = values * 2
            kept = kept * 2
    (ranges,) = part_graphs._ranges.values()
    assert len(ranges) <= 4
    assert ranges == sorted(ranges)
    assert ranges[-1][1] - ranges[-1][0] == 2
