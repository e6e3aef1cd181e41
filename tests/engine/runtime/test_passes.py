"""Kinds of passes, with units and an order that only write down what they are asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from lightning_zero.engine.runtime.compute_dtypes import ComputeDtypes
from lightning_zero.engine.runtime.passes import Passes
from lightning_zero.engine.units.unit import UnitState


class _Order:
    def __init__(self, *, gathers: bool) -> None:
        self.gathers = gathers
        self.meets = False
        self.is_suspended = 0
        self.begun: list[tuple[Any, bool]] = []
        self.may_reduce: list[bool] = []

    def begin(self, kind: Any, *, gathers: bool, in_original: bool = False, may_reduce: bool = True) -> None:
        self.begun.append((kind, gathers))
        self.may_reduce.append(may_reduce)


def _passes(*, shards: bool, state: UnitState = UnitState.UNSHARDED) -> tuple[Passes, _Order, Any]:
    unit = SimpleNamespace(is_sharded_between_uses=shards, state=state, buffers=[], computes_lower=False, holds=0)
    order = _Order(gathers=shards)
    return Passes([unit], order, ComputeDtypes([unit])), order, unit  # type: ignore[list-item, arg-type]


def test_passes_of_a_step_are_counted_and_a_new_scope_begins_again() -> None:
    passes, order, _ = _passes(shards=True)
    for _ in range(2):
        passes.enter_scope("training_step")
        passes.enter_scope("inside")
        passes.begin("forward")
        passes.leave_scopes()
        passes.begin("backward")
    step = [(("training_step:train", 0, "forward", False, False), True)]
    assert order.begun == 2 * [*step, (("training_step:train", 1, "backward", False, False), True)]
    with torch.no_grad():
        passes.enter_scope("step")
    passes.begin_reductions()
    assert order.begun[-1] == (("step:eval", 0, "backward of inputs"), False)


def test_parts_of_a_module_have_passes_of_their_own() -> None:
    passes, order, _ = _passes(shards=True)
    passes.part = " of chunk 2"
    passes.enter_scope("training_step")
    passes.begin("forward")
    passes.begin_reductions()
    assert [kind[0] for kind, _ in order.begun] == 2 * ["training_step:train of chunk 2"]


def test_backwards_that_only_gather_are_passes_of_their_own() -> None:
    passes, order, _ = _passes(shards=True)
    passes.begin("backward without reductions")
    passes.begin("backward")
    assert len({kind for kind, _ in order.begun}) == 2
    assert order.may_reduce == [False, True]


def test_a_forward_without_gathers_is_no_pass_below_stage_3() -> None:
    passes, order, unit = _passes(shards=False)
    passes.begin("forward")
    passes.begin("backward of inputs")
    assert order.begun == []
    passes.begin("backward")
    assert [gathers for _, gathers in order.begun] == [False]
    unit.state = UnitState.STALE
    passes.begin("forward")
    assert [gathers for _, gathers in order.begun] == [False, True]


def test_a_scope_of_units_that_are_held_has_no_forward_passes() -> None:
    passes, order, unit = _passes(shards=True)
    unit.holds = 1
    passes.note_held([unit])
    passes.enter_scope("step")
    passes.enter_scope("inside")
    passes.leave_scopes(to=1)
    passes.begin("forward")
    assert order.begun == []
    passes.leave_scopes()
    passes.begin("forward")
    assert len(order.begun) == 1
