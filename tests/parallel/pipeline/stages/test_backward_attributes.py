"""Attributes are kept for the backward of each micro-batch, and left as the backward leaves them."""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics.classification import BinaryAUROC

from lightning_zero.config import Pipeline
from lightning_zero.parallel.pipeline.stages.backward_attributes import BackwardAttributes
from lightning_zero.parallel.pipeline.stages.split import split_module
from tests.simulated_device import SimulatedDevice


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mask: Any = None
        self.calls = 0
        self.table: dict[str, Any] = {}
        self.register_buffer("scale", torch.ones(()), persistent=False)


def _forward(attributes: BackwardAttributes, index: int, **values: Any) -> None:
    (block,) = attributes.modules[0]
    with attributes.forward(0, index, looks_inside=True):
        for name, value in values.items():
            setattr(block, name, value)


@contextmanager
def _backward(attributes: BackwardAttributes, index: int, *, is_last: bool = True) -> Iterator[Any]:
    with attributes.backward(0, index, is_last=is_last):
        yield attributes.modules[0][0]


def _two_forwards(name: str, first: Any, second: Any) -> tuple[BackwardAttributes, Any]:
    attributes = BackwardAttributes({0: [Block()]})
    _forward(attributes, 0, **{name: first})
    _forward(attributes, 1, **{name: second})
    return attributes, attributes.modules[0][0]


def test_a_backward_finds_the_attributes_of_its_forward() -> None:
    for name, first, second in (
        ("mask", torch.zeros(1), torch.ones(1)),
        ("mask", None, torch.ones(1)),
        ("scale", torch.zeros(()), torch.ones(())),
        ("new", 1, 2),
        ("training", False, True),
    ):
        attributes, block = _two_forwards(name, first, second)
        with _backward(attributes, 0):
            assert getattr(block, name) is first
        assert getattr(block, name) is second


def test_an_attribute_that_came_later_is_missing_and_comes_back() -> None:
    attributes = BackwardAttributes({0: [Block()]})
    (block,) = attributes.modules[0]
    _forward(attributes, 0, new=1)
    with attributes.forward(0, 1, looks_inside=False):
        del block.new
    with _backward(attributes, 0):
        assert block.new == 1
    assert not hasattr(block, "new")


@pytest.mark.parametrize("make", [OrderedDict, lambda: defaultdict(int), dict])
def test_an_item_that_came_later_keeps_its_place(make: Any) -> None:
    attributes = BackwardAttributes({0: [Block()]})
    (block,) = attributes.modules[0]
    block.table = make()
    for index in range(2):
        with attributes.forward(0, index, looks_inside=True):
            block.table.update({f"of-{index}": index, f"and-{index}": index})
    with _backward(attributes, 0):
        assert [*block.table] == ["of-0", "and-0"]
    assert [*block.table] == ["of-0", "and-0", "of-1", "and-1"]


def test_attributes_of_objects_are_those_of_the_forward() -> None:
    one, other = Block(), Block()
    one.mask = other.mask = SimpleNamespace(mask=None, calls=0)  # of both
    attributes = BackwardAttributes({0: [one, other]})
    for index in range(2):
        with attributes.forward(0, index, looks_inside=True):
            one.mask.mask = index
            one.mask.calls += 1
    with _backward(attributes, 0):
        assert other.mask.mask == 0
        other.mask.calls += 1
    assert vars(other.mask) == {"mask": 1, "calls": 3}


def test_large_dictionaries_are_left_alone() -> None:
    attributes = BackwardAttributes({0: [Block()]})
    (block,) = attributes.modules[0]
    for index in range(200):
        with attributes.forward(0, index, looks_inside=True):
            block.table[index] = index
    assert len(attributes._kept[0, 199]) == 0
    assert len(attributes._changing) <= 64


def test_keys_of_dictionaries_are_attributes() -> None:
    attributes = BackwardAttributes({0: [Block()]})
    (block,) = attributes.modules[0]
    for index in range(2):
        with attributes.forward(0, index, looks_inside=True):
            block.table["mask"] = index
    with _backward(attributes, 0):
        assert block.table == {"mask": 0}
    assert block.table == {"mask": 1}


@pytest.mark.parametrize("make", [int, float, torch.tensor])
def test_what_forwards_and_backwards_count_is_a_sum(make: Any) -> None:
    attributes = BackwardAttributes({0: [Block()]})
    (block,) = attributes.modules[0]
    block.calls = make(0)
    for index in range(4):
        _forward(attributes, index, calls=block.calls + 1)
    for index in range(4):
        with _backward(attributes, index):
            block.calls = block.calls + 1
    assert int(block.calls) == 8


def test_a_value_that_a_backward_assigns_behind_a_forward_that_resets_it_stays() -> None:
    attributes, block = _two_forwards("calls", 0.0, 0.0)
    for index, norm in enumerate((2.0, 3.0)):
        with _backward(attributes, index):
            block.calls = norm
    assert block.calls == 3.0


def test_a_flag_that_a_backward_binds_is_no_count() -> None:
    attributes, block = _two_forwards("mask", True, False)
    with _backward(attributes, 0):
        block.mask = "done"
    assert block.mask == "done"


def test_both_halves_of_a_backward_find_them_and_nothing_is_held_behind_it() -> None:
    first = torch.zeros(1)
    held = weakref.ref(first)
    attributes, block = _two_forwards("mask", first, torch.ones(1))
    del first
    for is_last in (False, True):
        with _backward(attributes, 0, is_last=is_last):
            assert block.mask is held()
    assert held() is None
    assert block.mask.item() == 1.0


def test_an_error_in_a_backward_leaves_the_values_of_now() -> None:
    attributes, block = _two_forwards("mask", 1, 2)
    try:
        with _backward(attributes, 0):
            raise ValueError
    except ValueError:
        assert block.mask == 2


def test_forgotten_micro_batches_show_nothing() -> None:
    attributes, block = _two_forwards("mask", 1, 2)
    attributes.forget()
    with _backward(attributes, 0):
        assert block.mask == 2


def test_keys_that_come_and_go_are_forgotten() -> None:
    attributes = BackwardAttributes({0: [Block()]})
    (block,) = attributes.modules[0]
    for index in range(200):
        with attributes.forward(0, 0, looks_inside=True):
            block.table[index] = 1.0
            block.table.pop(index - 8, None)
        with _backward(attributes, 0):
            pass
        attributes.forget()
    assert len(attributes._changing) <= 16


def test_an_equal_value_that_a_backward_assigns_again_is_none_of_its_own() -> None:
    attributes = BackwardAttributes({0: [Block()]})
    (block,) = attributes.modules[0]
    for index in range(3):
        _forward(attributes, index, mask=torch.tensor(float(index)))
    for index in range(3):
        with _backward(attributes, index):
            assert block.mask.item() == index
            block.mask = block.mask.clone()
    assert block.mask.item() == 2.0


class WithMetric(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2) for _ in range(2)])
        self.metric = BinaryAUROC()  # its hash is that of its states


def test_a_metric_that_is_updated_is_not_watched() -> None:
    module = WithMetric()
    attributes = BackwardAttributes.of(module, split_module(module, Pipeline(stages=2)), 1)
    for index in range(8):
        with attributes.forward(1, index, looks_inside=True):
            module.metric.update(torch.rand(4), torch.arange(4) % 2)
            module.mask = index  # type: ignore[assignment]
        with attributes.backward(1, index, is_last=True):
            pass
        attributes.forget()
    assert {name for _, name, _ in attributes._changing} == {""}
    assert {item for _, _, item in attributes._changing} == {"mask"}


class Hashed(Block):
    """Has the hash of its values, as metrics have."""

    def __hash__(self) -> int:
        return hash(self.calls)


def test_attributes_of_a_module_whose_hash_changes_are_kept_once() -> None:
    attributes = BackwardAttributes({0: [Hashed()]})
    for index in range(4):
        _forward(attributes, index, calls=index)
    assert len(attributes._changing) == 1
    for index in range(4):
        with _backward(attributes, index) as block:
            assert block.calls == index
    assert block.calls == 3


@pytest.mark.parametrize("make", [lambda value: torch.tensor(value).item(), torch.tensor], ids=["float", "tensor"])
def test_a_value_that_equals_the_forwards_at_first_and_later_not_stays(make: Any) -> None:
    attributes = BackwardAttributes({0: [Block()]})
    for index in range(4):
        _forward(attributes, index, calls=make(0.0))
    for index, norm in enumerate((0.0, 2.0, 0.0, 3.0)):
        with _backward(attributes, index) as block:
            block.calls = make(norm)
    assert float(block.calls) == 3.0


def test_a_value_on_a_device_that_equals_the_forwards_in_one_batch_stays_in_the_next() -> None:
    with SimulatedDevice():
        attributes = BackwardAttributes({0: [Block()]})
        for norm in (0.0, 2.0):
            for index in range(2):
                _forward(attributes, index, calls=torch.zeros((), device="cuda"))
            for index in range(2):
                with _backward(attributes, index) as block:
                    block.calls = torch.full((), norm, device="cuda")
            attributes.forget()
        assert float(block.calls) == 2.0
