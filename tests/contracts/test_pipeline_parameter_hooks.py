"""Hooks of the program on gradients of parameters, of which a pipeline stage may have a part alone."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero.errors import PipelineError
from lightning_zero.lightning.strategy import ZeroStrategy
from tests.contracts.test_pipeline_programs import Program, _loader, _pipeline
from tests.fuzz.pipeline_runner import check, report
from tests.fuzz.pipelines import EMBEDDED, INIT, PipelineProgram
from tests.lightning_programs import seeded, trainer
from tests.sampling import sample
from tests.worlds import run

LINEAR = ("Linear",) * 4
LOSS = len(LINEAR) + 2
INTERLEAVED = {"stages": 2, "schedule": "interleaved_1f1b", "partition": "uniform"}
CLAMPS = "lambda grad: grad.clamp(-1e-3, 1e-3)"
CLAMPS_SUM = "lambda param: (param.grad.clamp_(-1e-3, 1e-3), None)[1]"
ALIKE = {
    "parameter-of-one-stage": (
        (INIT, f"self.blocks[0].linear.weight.register_hook({CLAMPS})"),
        (INIT, f"self.blocks[3].linear.weight.register_hook({CLAMPS})"),
    ),
    "parameter-around-that-the-loss-uses": (
        (INIT, f"self.shift.register_hook({CLAMPS})"),
        (LOSS, "loss = loss + self.shift.square().sum()"),
    ),
    "parameter-around-that-the-first-stage-uses": (
        (INIT, f"self.shift.register_hook({CLAMPS})"),
        (EMBEDDED, "hidden = hidden + self.shift"),
    ),
    "frozen-parameter-around": (
        (INIT, f"self.shift.register_hook({CLAMPS})\nself.shift.requires_grad_(False)"),
        (EMBEDDED, "hidden = hidden + self.shift"),
        (LOSS, "loss = loss + self.shift.sum() * hidden.mean()"),
    ),
}  # fmt: skip
USED_AROUND = (EMBEDDED, "hidden = hidden + self.shift"), (LOSS, "loss = loss + self.shift.square().sum()")
REFUSED = {
    "parameter-around-that-two-stages-use": (((INIT, f"self.shift.register_hook({CLAMPS})"), *USED_AROUND), {}),
    "post-accumulate-hook-around": (
        ((INIT, f"self.shift.register_post_accumulate_grad_hook({CLAMPS_SUM})"), *USED_AROUND), {}
    ),
    "parameter-around-that-two-chunks-of-a-stage-use": (
        (
            (INIT, f"self.shift.register_hook({CLAMPS})"),
            (EMBEDDED, "hidden = hidden + self.shift"),
            (2, "hidden = hidden * self.shift"),
        ),
        {"options": INTERLEAVED},
    ),
    "weight-of-two-chunks-of-a-stage": (
        (
            (INIT, "self.blocks[2].linear.weight = self.blocks[0].linear.weight"),
            (INIT, f"self.blocks[0].linear.weight.register_hook({CLAMPS})"),
        ),
        {"options": INTERLEAVED},
    ),
    "hook-that-a-step-registers": (
        ((EMBEDDED, f"self.shift.register_hook({CLAMPS})"), *USED_AROUND), {}
    ),
}  # fmt: skip


@pytest.mark.parametrize("zero", sample((1, 3), 1))
@pytest.mark.parametrize("name", sample(ALIKE, *list(ALIKE)[:3]))
def test_hooks_on_a_parameter_that_one_stage_uses_train_as_without_a_pipeline(name: str, zero: int) -> None:
    program = PipelineProgram(LINEAR, (ALIKE[name],), zero=zero)
    outcome = check(program)
    assert outcome.kind == "alike", report(program, outcome)


@pytest.mark.parametrize("zero", sample((1, 3), 3))
@pytest.mark.parametrize("name", sample(REFUSED, *list(REFUSED)[:3]))
def test_hooks_on_a_parameter_that_several_chunks_use_are_refused(name: str, zero: int) -> None:
    features, options = REFUSED[name]
    program = PipelineProgram(LINEAR, (features,), zero=zero, **options)
    outcome = check(program)
    assert outcome.kind == "refused", report(program, outcome)
    assert re.search(r"hook on the gradient of `(shift|blocks\.0\.linear\.weight)` \(`register_\w+`\)", outcome.text)


class Hooked(Program):
    """Has a hook on the weight that its embedding and its head share, from a batch on."""

    def __init__(self, method: str, since: int, is_tied: bool) -> None:
        super().__init__()
        if is_tied:
            self.net.head.weight = self.net.embedding.weight
        self.seen: list[Any] = []
        self._method, self._since = method, since
        if since < 0:
            self._register()

    def _register(self) -> None:
        getattr(self.net.embedding.weight, self._method)(lambda one: self.seen.append(1))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == self._since:
            self._register()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trained = batch_idx


def _refused(rank: int, world: int, method: str, since: int, shared: Any) -> None:
    options = _pipeline(shared=shared)
    strategy = ZeroStrategy(**options)
    module: Any = seeded(lambda: Hooked(method, since, shared is None))
    before: dict[str, Tensor] = {}

    def keep() -> None:
        before.update((name, strategy.full_param(param).clone()) for name, param in module.named_parameters())

    vars(module)["on_train_start"] = keep
    with pytest.raises(PipelineError, match=re.escape(f"gradient of `net.embedding.weight` (`{method}`), which")):
        trainer(rank, world, strategy, max_epochs=1).fit(module, _loader(1, 0))
    assert not module.seen
    assert getattr(module, "trained", -1) == since - 1 or since < 0
    if since <= 0:
        for name, param in module.named_parameters():
            assert torch.equal(strategy.full_param(param), before[name])


@pytest.mark.parametrize("since", sample((-1, 0, 2), 2))
@pytest.mark.parametrize("method", sample(("register_hook", "register_post_accumulate_grad_hook"), "register_hook"))
def test_hooks_on_a_tied_weight_are_refused_before_anything_is_computed(method: str, since: int) -> None:
    run(_refused, 2, method, since, None)


def test_hooks_on_a_weight_that_code_uses_by_name_are_refused() -> None:
    run(_refused, 2, "register_hook", 0, ["net.embedding.weight"])
