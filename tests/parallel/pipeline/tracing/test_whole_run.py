"""Steps in stages are compared with the whole step on fakes, which leaves no trace."""

from __future__ import annotations

import contextvars
import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.config import Pipeline
from lightning_zero.errors import PipelineError
from lightning_zero.parallel.pipeline.stages.sources import is_fake
from lightning_zero.parallel.pipeline.stages.split import split_module
from lightning_zero.parallel.pipeline.tracing.module_interception import ModuleInterception
from lightning_zero.parallel.pipeline.tracing.operations import Operation, Operations, first_difference
from lightning_zero.parallel.pipeline.tracing.outside_state import OutsideState
from lightning_zero.parallel.pipeline.tracing.whole_run import require_as_whole

NUMBERS = {"scale": 1.0}
LEVEL: contextvars.ContextVar[float] = contextvars.ContextVar("level", default=0.0)
KEPT: list[Tensor] = []


class Block(nn.Module):
    calls: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.table = torch.ones(3)
        self.notes = SimpleNamespace(length=0, items=[])
        self.aux: Any = None

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.norm(self.linear(x) * self.table)
        self.notes.length += x.shape[0]
        self.notes.items.append(hidden)
        self.aux = hidden.pow(2).mean()
        return hidden


class Model(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.embedding = nn.Linear(3, 3)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden).mean()


def _interception(model: nn.Module) -> ModuleInterception:
    return ModuleInterception(model, split_module(model, Pipeline(stages=2, partition="uniform")), lambda: None)


def _recorded(model: nn.Module, step: Callable[[], Any], *, is_whole: bool) -> Any:
    return _interception(model).recorded(step, 1, is_whole=is_whole)


def _fakes_with_a_graph() -> set[int]:
    gc.collect()
    tensors = (one for one in gc.get_objects() if isinstance(one, Tensor) and is_fake(one))
    return {id(one) for one in tensors if one.grad_fn is not None}


def test_a_run_on_fakes_leaves_no_trace_and_keeps_nothing() -> None:
    model = Model()
    before = {name: (id(one), one.clone()) for name, one in (*model.named_parameters(), *model.named_buffers())}
    tables = [block.table for block in model.blocks]  # type: ignore[union-attr]
    x, alive = torch.ones(2, 3), _fakes_with_a_graph()
    for is_whole in (True, False):
        assert _recorded(model, lambda: model(x), is_whole=is_whole)
    for name, one in (*model.named_parameters(), *model.named_buffers()):
        assert id(one) == before[name][0]
        assert torch.equal(one, before[name][1])
    for block, table in zip(model.blocks, tables, strict=True):
        assert block.table is table
        assert (block.aux, block.notes.length, block.notes.items) == (None, 0, [])
    assert _fakes_with_a_graph() == alive


def test_a_step_is_the_same_in_stages_and_as_a_whole() -> None:
    model = Model()
    whole, staged = (_recorded(model, lambda: model(torch.ones(2, 3)), is_whole=one) for one in (True, False))
    assert {one.scope for one in whole} == {"", "blocks.2", "blocks.3", "head"}
    assert first_difference(whole, staged) is None


def test_tensors_of_a_block_differ_from_those_of_the_batch_before() -> None:
    model = Model()

    def step() -> Tensor:
        old = model.blocks[0].notes.items
        return model(torch.ones(2, 3)) + sum(one.mean() for one in old)

    whole, staged = (_recorded(model, step, is_whole=one) for one in (True, False))
    found = first_difference(whole, staged)
    assert found is not None
    assert found.line.partition(":")[0] == __file__


def test_numbers_that_a_step_reads_are_guessed_and_it_is_compared() -> None:
    model = Model()

    def step() -> Tensor:
        loss = model(torch.ones(2, 3))
        return loss * loss.item()

    found = _recorded(model, step, is_whole=True)
    assert found is not None
    assert "aten.mul.Tensor" in [one.name for one in found]


def _operation(number: float) -> Operation:
    return Operation("", "aten.mul.Tensor", (repr(number),), "train.py:3")


def test_runs_that_differ_are_refused_by_the_line() -> None:
    with pytest.raises(
        PipelineError, match=r"at train.py:3: without one `aten.mul.Tensor` is given 1.0, and in stages 2.0"
    ):
        require_as_whole(lambda is_whole: [_operation(1.0 if is_whole else 2.0)])


@pytest.mark.parametrize("missing", [True, False])
def test_runs_that_are_not_known_are_not_compared(missing: bool) -> None:
    require_as_whole(lambda is_whole: None if is_whole is missing else [_operation(1.0)])


def test_steps_that_do_not_repeat_themselves_are_not_compared() -> None:
    numbers = iter(range(4))
    require_as_whole(lambda is_whole: [_operation(next(numbers))])


def test_one_label_in_common_is_enough() -> None:
    module = nn.Linear(2, 2)
    runs = []
    for keeps in (True, False):
        operations = Operations(module, 0)
        tensor = torch.ones(2)
        if keeps:
            operations._add(tensor, "an attribute")
        operations._add(tensor, "an output")
        with operations:
            operations.start()
            torch.exp(tensor)
        runs.append(operations.found)
    assert first_difference(*runs) is None
    assert first_difference(runs[0], []) is not None


def test_numbers_that_a_block_leaves_around_the_blocks_are_compared() -> None:
    """A hook between two steps would find the old number on the last stage."""

    class Leaves(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.notes.length = x.shape[0]
            return x

    model = Model(Leaves)
    model.notes = model.blocks[0].notes  # type: ignore[assignment]
    with pytest.raises(PipelineError, match=r"`notes` of a `Model` after the step` is given 2, and in stages 0"):
        require_as_whole(lambda is_whole: _recorded(model, lambda: model(torch.ones(2, 3)), is_whole=is_whole))


def test_keys_of_any_kind_and_constants_inside_of_modules_are_recorded() -> None:
    """Tables by number, and small tensors that a forward finds in a list."""

    class Tables(Block):
        def __init__(self) -> None:
            super().__init__()
            self.by_number = {2: torch.ones(3)}
            self.listed = [torch.ones(3)]

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.listed[0] * self.by_number[2])

    model = Model(Tables)
    whole, staged = (_recorded(model, lambda: model(torch.ones(2, 3)), is_whole=one) for one in (True, False))
    assert whole
    assert first_difference(whole, staged) is None


class Outside(nn.Module):
    total: ClassVar[float] = 0.0

    def forward(self, x: Tensor) -> Tensor:
        NUMBERS["scale"] += 1.0
        LEVEL.set(LEVEL.get() + 1.0)
        Outside.total += 1.0
        helper(x)
        return x


def helper(x: Tensor) -> None:
    KEPT.append(x)


def test_globals_class_attributes_and_context_variables_are_those_of_before() -> None:
    module = Outside()
    state = OutsideState([module])
    module(torch.ones(1))

    def run() -> tuple[float, float, float, int]:
        found = NUMBERS["scale"], LEVEL.get(), Outside.total, len(KEPT)
        module(torch.ones(1))
        return found

    try:
        assert state.run(run) == (1.0, 0.0, 0.0, 0)
        assert (NUMBERS["scale"], LEVEL.get(), Outside.total, len(KEPT)) == (2.0, 1.0, 1.0, 1)
    finally:
        KEPT.clear()
        NUMBERS["scale"], Outside.total = 1.0, 0.0
