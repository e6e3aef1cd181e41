"""Plans are found for blocks of unmodified models."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.parallel.tensor.blocks import blocks_of, capture, distinct_blocks
from lightning_zero.parallel.tensor.examples import Arguments, keep
from lightning_zero.parallel.tensor.plan import Cut, CutArgument, Packed, Rule
from lightning_zero.parallel.tensor.regions import find_regions
from lightning_zero.parallel.tensor.search import FoundPlan, find_plan, integers_of
from tests.parallel.tensor.families import make


@cache
def _block(family: str) -> tuple[nn.Module, Arguments]:
    model, call = make(family)
    block = distinct_blocks(model, blocks_of(model))[0]
    return block.module, capture(model, call, [block.name]).arguments[block.name]


@cache
def _found(family: str, size: int) -> FoundPlan:
    return find_plan(*_block(family), size)


RULES: list[tuple[str, str, Rule]] = [
    ("llama", "self_attn.k_proj", "column"),
    ("llama", "mlp.down_proj", "row"),
    ("qwen3", "self_attn.q_norm.weight", "partial"),
    ("phi3", "self_attn.qkv_proj", Packed([64, 32, 32])),
    ("gpt2", "attn.c_attn", Packed(3)),
    ("gpt-neox", "attention.query_key_value", "column"),  # interleaved
    ("t5", "layer.0.SelfAttention.relative_attention_bias.weight", Cut(1)),
    ("torch-encoder", "self_attn", "attention"),
    ("hand-packed", "mlp.0", "column"),  # behind it a ReLU that switches features off
    ("hand-fixed", "attn.qkv", "column_gather"),
    ("hand-fixed", "attn.proj", "row_split"),
]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("family", "name", "rule"), RULES, ids=lambda one: str(one))
def test_rules_are_found(family: str, name: str, rule: Rule, size: int) -> None:
    found = _found(family, size)
    assert found.check.is_right
    assert found.plan.rules[name] == rule


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("opt", {"self_attn": ("num_heads",)}),
        ("gpt2", {"attn": ("split_size",)}),
        ("hand-packed", {"attn": ("n_heads",)}),
        ("llama", {}),
    ],
)
def test_integers_are_divided_where_the_forward_needs_it(family: str, expected: dict[str, Any]) -> None:
    assert dict(_found(family, 2).plan.divided) == expected


def test_arguments_with_a_part_for_every_head_are_found() -> None:
    assert dict(_found("bloom", 2).plan.arguments) == {"": {"alibi": CutArgument(0, 8)}}


def test_key_value_heads_of_one_for_all_are_left_whole() -> None:
    found = _found("falcon-mqa", 2)
    assert found.check.is_right
    assert set(found.plan.rules) == {"mlp.dense_h_to_4h", "mlp.dense_4h_to_h"}


def test_integers_that_a_forward_reads_are_listed() -> None:
    assert ("attn", "n_heads") in integers_of(*_block("hand-packed"), 2)
    assert ("attn", "n_heads") not in integers_of(*_block("hand-packed"), 3)


class Stepwise(nn.Module):
    """Integer results have no gradients to follow; a layer that runs twice is nobody's region."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(self.down(self.up(x))))
        return y


def test_a_layer_that_runs_twice_is_left_whole() -> None:
    arguments = keep((torch.ones(2, 4, requires_grad=True),), {})
    assert find_regions(Stepwise(), arguments, 2) == []
