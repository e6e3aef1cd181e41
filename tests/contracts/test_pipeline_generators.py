"""Generators of the program that code around the blocks of a pipeline draws from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero.errors import PipelineError
from tests.contracts.test_pipeline_losses import PaddedInParts
from tests.contracts.test_pipeline_programs import _fit, _pipeline
from tests.fuzz.pipeline_runner import check, report
from tests.fuzz.pipelines import EMBEDDED, FRONT, INIT, PipelineProgram
from tests.sampling import sample
from tests.worlds import run

LINEAR = ("Linear",) * 4
LOSS = len(LINEAR) + 2
TWO = {"stages": 2, "schedule": "1f1b", "partition": "uniform", "microbatches": 2}
INTERLEAVED = {**TWO, "schedule": "interleaved_1f1b"}
ONE = {**TWO, "schedule": "gpipe", "microbatches": 1}
KEPT = {  # a generator, and an expression that draws a number
    "attribute": ("self.g = torch.Generator().manual_seed(3)", "torch.rand((), generator=self.g, dtype=mask.dtype)"),
    "global": (
        "global G\nG = torch.Generator().manual_seed(3)", "torch.rand((), generator=G, dtype=mask.dtype)"
    ),
    "list": ("self.g = [torch.Generator().manual_seed(3)]", "torch.rand((), generator=self.g[0], dtype=mask.dtype)"),
    "python": ("import random\nself.g = random.Random(3)", "self.g.random()"),
    "numpy": ("import numpy\nself.g = numpy.random.default_rng(3)", "float(self.g.random())"),
    "closure": (
        "g = torch.Generator().manual_seed(3)\n"
        "type(self).number = lambda self: torch.rand((), generator=g, dtype=torch.float64)",
        "self.number()",
    ),
}  # fmt: skip


def _front(draw: str) -> Any:
    return (FRONT, f"factor = 1.0 + {draw}"), (EMBEDDED, "hidden = hidden * factor")


def _behind(draw: str) -> Any:
    return ((LOSS, f"loss = loss * (1.0 + {draw})"),)


@pytest.mark.parametrize("name", sample(KEPT, "attribute", "global"))
@pytest.mark.parametrize("options", sample((TWO, INTERLEAVED), TWO), ids=lambda one: one["schedule"])
def test_a_generator_that_both_sides_of_the_blocks_draw_from_is_refused(name: str, options: Any) -> None:
    init, draw = KEPT[name]
    program = PipelineProgram(LINEAR, (((INIT, init), *_front(draw), *_behind(draw)),), options=options)
    outcome = check(program)
    assert outcome.kind == "refused", report(program, outcome)
    assert "both before the blocks and after them" in outcome.text


@pytest.mark.parametrize("name", sample(KEPT, "global"))
def test_with_one_micro_batch_both_sides_draw_what_they_draw_without_a_pipeline(name: str) -> None:
    init, draw = KEPT[name]
    program = PipelineProgram(LINEAR, (((INIT, init), *_front(draw), *_behind(draw)),), options=ONE)
    outcome = check(program)
    assert outcome.kind == "alike", report(program, outcome)


SEEDED = "self.g.manual_seed(7)"
ALIKE = {
    "front-of-a-global": ((INIT, KEPT["global"][0]), *_front(KEPT["global"][1])),
    "behind": ((INIT, KEPT["attribute"][0]), *_behind(KEPT["attribute"][1])),
    "front-that-is-used-behind": (
        (INIT, KEPT["attribute"][0]), *_front(KEPT["attribute"][1]), (LOSS, "loss = loss * factor")
    ),
    "seeded-in-front": (
        (INIT, KEPT["attribute"][0]), (FRONT, SEEDED), *_front(KEPT["attribute"][1]), *_behind(KEPT["attribute"][1])
    ),
    "one-for-each-side": (
        (INIT, f"{KEPT['attribute'][0]}\n{KEPT['global'][0]}"),
        *_front(KEPT["attribute"][1]),
        *_behind(KEPT["global"][1]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sample(ALIKE, "front-of-a-global", "seeded-in-front"))
@pytest.mark.parametrize("options", sample((TWO, INTERLEAVED), INTERLEAVED), ids=lambda one: one["schedule"])
def test_generators_draw_what_they_draw_without_a_pipeline(name: str, options: Any) -> None:
    program = PipelineProgram(LINEAR, (ALIKE[name],), options=options)
    outcome = check(program)
    assert outcome.kind == "alike", report(program, outcome)


class DrawsInBothParts(PaddedInParts):
    """Draws in the first and in the last part of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def pipeline_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().pipeline_step(batch, batch_idx) * torch.rand((), generator=self.generator)

    def pipeline_loss(self, output: Tensor, batch: Any, batch_idx: int) -> Tensor:
        return super().pipeline_loss(output, batch, batch_idx) * torch.rand((), generator=self.generator)


def test_a_generator_that_both_parts_of_a_step_draw_from_is_refused() -> None:
    with pytest.raises(PipelineError, match="generator `DrawsInBothParts.generator` both before the blocks"):
        run(_fit, 2, DrawsInBothParts, _pipeline(), {}, True)
