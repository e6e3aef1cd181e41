"""Sequence parallelism is added to plans, and verified with them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.parallel.tensor.blocks import blocks_of, capture
from lightning_zero.parallel.tensor.check import check_block
from lightning_zero.parallel.tensor.examples import Arguments, keep
from lightning_zero.parallel.tensor.plan import TensorParallel, TensorPlan
from lightning_zero.parallel.tensor.planning import plan_model
from lightning_zero.parallel.tensor.search import find_plan
from lightning_zero.parallel.tensor.streams import with_sequence
from tests.parallel.tensor.families import make


@cache
def _planned(family: str) -> tuple[nn.Module, Arguments, TensorPlan]:
    model, call = make(family)
    name = blocks_of(model)[-1]
    block, arguments = model.get_submodule(name), capture(model, call, [name]).arguments[name]
    return block, arguments, with_sequence(block, arguments, find_plan(block, arguments, 2).plan, 2)


EXPECTED: dict[str, dict[str, dict[Any, str]]] = {
    "llama": {"": {0: "scatter"}, "self_attn": {"hidden_states": "gather"}, "mlp": {0: "gather"}},
    "gpt2": {"": {0: "scatter"}, "attn": {0: "gather"}, "mlp": {0: "gather"}},
    "bert": {"": {0: "scatter"}, "attention.self": {0: "gather"}, "intermediate.dense": {0: "gather"}},
    "bloom": {"": {0: "scatter"}, "self_attention": {0: "gather"}, "mlp": {0: "gather"}},  # a residual is not gathered
    "opt": {"": {0: "scatter"}, "self_attn": {"hidden_states": "gather"}, "fc1": {0: "gather"}},
    "whisper": {
        "": {0: "scatter"},
        "self_attn": {0: "gather"},
        "encoder_attn": {0: "gather", "key_value_states": "copy"},
        "fc1": {0: "gather"},
    },
}


@pytest.mark.parametrize("family", EXPECTED)
def test_regions_gather_their_hidden_states(family: str) -> None:
    assert dict(_planned(family)[2].sequence) == EXPECTED[family]


@pytest.mark.parametrize("family", EXPECTED)
def test_blocks_with_parts_of_the_sequence_are_verified(family: str) -> None:
    check = check_block(*_planned(family), 2)
    assert check.is_right, (check.failure, check.wrong)


WRONG: dict[str, dict[str, dict[str | int, Any]]] = {
    "not-gathered": {"": {0: "scatter"}, "self_attn": {0: "gather"}, "fc1": {0: "gather"}, "encoder_attn": {}},
    "not-copied": {
        "": {0: "scatter"}, "self_attn": {0: "gather"}, "fc1": {0: "gather"}, "encoder_attn": {0: "gather"},
    },
    "copied-in-place-of-gathered": {
        "": {0: "scatter"}, "self_attn": {0: "copy"}, "fc1": {0: "gather"},
        "encoder_attn": {0: "gather", "key_value_states": "copy"},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_sequences_are_refused(name: str) -> None:
    block, arguments, plan = _planned("whisper")
    assert not check_block(block, arguments, replace(plan, sequence=WRONG[name]), 2).is_right


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("vit", r"Dimension 1 of a tensor of shape \(2, 17, 64\) cannot be divided over 2 ranks"),
        ("torch-encoder", r"`TensorParallel\(sequence=True\)` does not exist for `self_attn: 'attention'`"),
        ("mixtral", r"does not exist for `mlp.experts: 'experts'`"),
    ],
)
def test_blocks_that_cannot_have_parts_of_the_sequence_are_refused(family: str, message: str) -> None:
    model, call = make(family)
    with pytest.raises(ValueError, match=message):
        plan_model(model, TensorParallel(sequence=True), call)


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.up(x))
        return result


def test_a_block_without_a_sequence_is_refused() -> None:
    arguments = keep((torch.ones(4, 4, requires_grad=True),), {})
    with pytest.raises(ValueError, match="needs blocks with hidden states .batch, sequence, features. as an argument"):
        with_sequence(Flat(), arguments, TensorPlan({"up": "column", "down": "row"}), 2)


def test_a_word_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="is not known. Use 'scatter', 'gather' or 'copy'"):
        TensorPlan({}, sequence={"": {0: "split"}})  # type: ignore[dict-item]
