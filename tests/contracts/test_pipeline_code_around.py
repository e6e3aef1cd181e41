"""Code around the blocks in pipeline stages: views of parameters, copies of modules, attributes of blocks, hooks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_zero
from lightning_zero.config import Pipeline
from lightning_zero.errors import PipelineError
from lightning_zero.lightning.strategy import ZeroStrategy
from tests.fuzz.pipeline_runner import check, report
from tests.fuzz.pipelines import EMBEDDED, INIT, PipelineProgram
from tests.lightning_programs import Net, loader, trainer
from tests.sampling import sample
from tests.worlds import run

LINEAR = ("Linear",) * 4
LOSS = len(LINEAR) + 2
OPTIONS = {"stages": 2, "schedule": "1f1b", "partition": "uniform", "microbatches": 2}

ADDS = "register_forward_hook(lambda block, args, out: out + 0.1 * block.{})"
ALIKE = {
    "view-of-a-parameter": (
        (INIT, "self.scales = nn.Parameter(torch.ones(4))"),
        *((place, f"hidden = hidden * self.scales[{place - 1}]") for place in (1, 2, 3)),
    ),
    "copy": ((LOSS, "import copy\nloss = loss + 0.1 * copy.deepcopy(self.head)(hidden).square().mean()"),),
    "pickle": ((LOSS, "import pickle\nblock = pickle.loads(pickle.dumps(self.blocks[3]))\n"
                      "loss = loss + 0.1 * block(hidden, mask).square().mean()"),),
    "attribute-of-the-embedding": (
        (INIT, f"for block in self.blocks:\n    block.{ADDS.format('condition')}"),
        (EMBEDDED, "for block in self.blocks:\n    block.condition = hidden"),
    ),
    "attribute-of-a-block": (
        (INIT, f"self.blocks[3].{ADDS.format('conditions[0]')}"),
        (2, "self.blocks[3].conditions = [hidden]"),
    ),
    "dictionary-of-hooks": (
        (INIT, "self.kept = {}\ndef keep(number):\n    def hook(block, args, out):\n        self.kept[number] = out\n"
               "    return hook\nfor number in (0, 2):\n    self.blocks[number].register_forward_hook(keep(number))"),
        (LOSS, "loss = loss + 0.1 * (self.kept[0] - self.kept[2]).square().mean()"),
    ),
    "tensor-of-a-hook": (
        (INIT, "self.scale = 1.0\ndef keep(block, args, out):\n    self.scale = out.abs().mean().detach()\n"
               "self.blocks[0].register_forward_hook(keep)"),
        (LOSS, "loss = loss * self.scale"),
    ),
    "number-of-a-hook-that-nobody-reads": (
        (INIT, "self.scale = 1.0\ndef keep(block, args, out):\n    self.scale = out.abs().mean().item()\n"
               "self.blocks[0].register_forward_hook(keep)"),
    ),
    "without-gradient-later": (
        (INIT, "self.calls = 0"),
        (2, "self.calls += 1\nif self.calls > 2:\n    hidden = hidden.detach() + 0.0 * hidden"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sample([*ALIKE], "view-of-a-parameter", "pickle", "attribute-of-a-block"))
def test_code_around_the_blocks_trains(name: str) -> None:
    program = PipelineProgram(LINEAR, (ALIKE[name],), options=OPTIONS)
    outcome = check(program)
    assert outcome.kind == "alike", report(program, outcome)


REFUSED = {
    "copy-of-another-stage": (
        ((LOSS, "import copy\nloss = loss + copy.deepcopy(self.blocks[0])(hidden, mask).mean()"),),
        "Parameter `blocks.0.norm.weight` lies on pipeline stage 0",
    ),
    "number-of-a-hook": (
        (
            (INIT, "self.scale = 1.0\ndef keep(block, args, out):\n    self.scale = out.abs().mean().item()\n"
                   "self.blocks[0].register_forward_hook(keep)"),
            (LOSS, "loss = loss * self.scale"),
        ),
        "`scale` of `Program` is changed on the pipeline stage of chunk 0 alone, and read on the last stage",
    ),
    "detached-later": (
        ((INIT, "self.calls = 0"), (2, "self.calls += 1\nif self.calls > 2:\n    hidden = hidden.detach()")),
        "`x.detach() + 0.0 * x` in place of `x.detach()`",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sample([*REFUSED], "detached-later", "number-of-a-hook"))
def test_code_around_the_blocks_is_refused_by_name(name: str) -> None:
    feature, text = REFUSED[name]
    program = PipelineProgram(LINEAR, (feature,), options=OPTIONS)
    outcome = check(program)
    assert outcome.kind == "refused", report(program, outcome)
    assert text in outcome.text


# -- Between steps -----------------------------------------------------------------------------------------------------


class Hooks(Net):
    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            self.use()

    def use(self) -> None:
        raise NotImplementedError


class Calls(Hooks):
    def use(self) -> None:
        self(torch.ones(2, 4))


class Writes(Hooks):
    def use(self) -> None:
        for param in self.parameters():
            param.clamp_(-1.0, 1.0)


class Copies(Hooks):
    def use(self) -> None:
        copy.deepcopy(self.last)
        copy.deepcopy(self.first)


class Gathers(Hooks):
    def use(self) -> None:
        with lightning_zero.gathered(self):
            self(torch.ones(2, 4))
        with lightning_zero.gathered(self, write="all"):
            self.first.weight.fill_(0.5)
            self.last.weight.fill_(0.5)
        with lightning_zero.gathered(self):
            copied = copy.deepcopy(self.last)
        assert torch.equal(copied.weight, torch.full_like(copied.weight, 0.5))


class HasExample(Net):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array: Tensor = torch.ones(2, 4)


def _fit(rank: int, world: int, make: Any) -> None:
    strategy: Any = ZeroStrategy(stage=1, pipeline=Pipeline(stages=2, microbatches=2))
    lightning = trainer(rank, world, strategy, max_epochs=1, enable_model_summary=make is HasExample)
    lightning.fit(make(), loader(0, 1))


@pytest.mark.parametrize("make", sample([Calls, Writes, Copies, HasExample], Calls, HasExample))
def test_hooks_that_use_parameters_of_other_stages_are_told_the_remedy(make: Any) -> None:
    with pytest.raises(PipelineError, match=r"outside of a step. .*`with lightning_zero.gathered\(module\):`"):
        run(_fit, 2, make)


def test_hooks_use_parameters_of_other_stages_where_they_are_gathered() -> None:
    run(_fit, 2, Gathers)
