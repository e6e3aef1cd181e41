"""Attributes are kept for the backward of each micro-batch, and left as the backward leaves them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_zero.parallel.pipeline.stages.backward_attributes import BackwardAttributes


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mask: Any = None
        self.calls = 0
        self.table: dict[str, Any] = {}
        self.register_buffer("scale", torch.ones(()), persistent=False)


def _forward(attributes: BackwardAttributes, index: int, **values: Any) -> None:
    (block,) = attributes.modules[0]
    with attributes.forward(0, index, looks_at_all=True):
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
    with attributes.forward(0, 1, looks_at_all=False):
        del block.new
    with _backward(attributes, 0):
        assert block.new == 1
    assert not hasattr(block, "new")


def test_keys_of_dictionaries_are_attributes() -> None:
    attributes = BackwardAttributes({0: [Block()]})
    (block,) = attributes.modules[0]
    for index in range(2):
        with attributes.forward(0, index, looks_at_all=True):
            block.table["mask"] = index
    with _backward(attributes, 0):
        assert block.table == {"mask": 0}
    assert block.table == {"mask": 1}


def test_values_that_a_backward_binds_stay_and_counts_go_on() -> None:
    attributes, block = _two_forwards("mask", torch.zeros(1), torch.ones(1))
    bound = torch.full((1,), 2.0)
    with _backward(attributes, 0):
        block.mask = bound
    assert block.mask is bound
    attributes, block = _two_forwards("calls", 1, 2)
    for index in range(2):
        with _backward(attributes, index):
            block.calls += 1
    assert block.calls == 4


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
