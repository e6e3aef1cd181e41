"""Right plans of blocks are accepted, wrong ones refused (``MUTANTS``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
from torch import Tensor, nn

from lightning_zero.parallel.tensor.blocks import Block, blocks_of, capture, distinct_blocks
from lightning_zero.parallel.tensor.check import BlockCheck, CutBlock, check_block
from lightning_zero.parallel.tensor.collectives import Ranks, reduce_from_ranks
from lightning_zero.parallel.tensor.cuts import ParamRecord
from lightning_zero.parallel.tensor.examples import Arguments
from lightning_zero.parallel.tensor.forwards import (
    ColumnForward,
    CutArgumentsForward,
    Divided,
    ExpertsForward,
    RowForward,
    copied,
)
from lightning_zero.parallel.tensor.plan import Cut, CutArgument, Packed, Rule, TensorPlan
from lightning_zero.parallel.tensor.transform import cut_module
from tests.parallel.tensor.families import make

LLAMA: dict[str, Rule] = {
    "self_attn.q_proj": "column", "self_attn.k_proj": "column", "self_attn.v_proj": "column",
    "self_attn.o_proj": "row", "mlp.gate_proj": "column", "mlp.up_proj": "column", "mlp.down_proj": "row",
}  # fmt: skip
NORMS: dict[str, Rule] = {"self_attn.q_norm": "partial", "self_attn.k_norm": "partial"}
OPT: dict[str, Rule] = {
    "self_attn.q_proj": "column", "self_attn.k_proj": "column", "self_attn.v_proj": "column",
    "self_attn.out_proj": "row", "fc1": "column", "fc2": "row",
}  # fmt: skip
T5_BLOCK: dict[str, Rule] = {
    "layer.0.SelfAttention.q": "column", "layer.0.SelfAttention.k": "column", "layer.0.SelfAttention.v": "column",
    "layer.0.SelfAttention.o": "row", "layer.1.DenseReluDense.wi_0": "column", "layer.1.DenseReluDense.wi_1": "column",
    "layer.1.DenseReluDense.wo": "row",
}  # fmt: skip
BIAS = "layer.0.SelfAttention.relative_attention_bias.weight"
FUSED: dict[str, Rule] = {"mlp.dense_h_to_4h": "column", "mlp.dense_4h_to_h": "row"}
EXPERTS: dict[str, Rule] = {
    **{name: rule for name, rule in LLAMA.items() if "mlp" not in name},
    "mlp.experts": "experts", "mlp.experts.gate_up_proj": Cut(1, 2), "mlp.experts.down_proj": Cut(2),
}  # fmt: skip
HEADS = {"layer.0.SelfAttention": ["n_heads"]}
RIGHT: dict[str, TensorPlan] = {
    "llama": TensorPlan(LLAMA),
    "qwen3": TensorPlan({**LLAMA, **NORMS}),
    "phi3": TensorPlan(
        {
            "self_attn.qkv_proj": Packed([64, 32, 32]), "self_attn.o_proj": "row", "mlp.gate_up_proj": Packed(2),
            "mlp.down_proj": "row",
        },
        divided={"self_attn": ["num_key_value_heads", "config.num_attention_heads"]},
    ),
    "gpt-neox": TensorPlan({"attention.query_key_value": "column", "attention.dense": "row", **FUSED}),
    "gpt2": TensorPlan(
        {"attn.c_attn": Packed(3), "attn.c_proj": "row", "mlp.c_fc": "column", "mlp.c_proj": "row"},
        divided={"attn": ["split_size"]},
    ),
    "bloom": TensorPlan(
        {"self_attention.query_key_value": "column", "self_attention.dense": "row", **FUSED},
        divided={"self_attention": ["num_heads"]},
        arguments={"self_attention": {"alibi": CutArgument(0, 8)}},
    ),
    "opt": TensorPlan(OPT, divided={"self_attn": ["num_heads"]}),
    "bert": TensorPlan(
        {
            "attention.self.query": "column", "attention.self.key": "column", "attention.self.value": "column",
            "attention.output.dense": "row", "intermediate.dense": "column", "output.dense": "row",
        }
    ),
    "vit": TensorPlan(
        {
            "attention.q_proj": "column", "attention.k_proj": "column", "attention.v_proj": "column",
            "attention.o_proj": "row", "mlp.fc1": "column", "mlp.fc2": "row",
        }
    ),
    "t5": TensorPlan({**T5_BLOCK, BIAS: Cut(1)}, divided=HEADS),
    "t5:encoder.block.1": TensorPlan(T5_BLOCK, divided=HEADS, arguments={"": {2: CutArgument(1, 8)}}),
    "mixtral": TensorPlan(EXPERTS),
    "torch-encoder": TensorPlan({"self_attn": "attention", "linear1": "column", "linear2": "row"}),
    "hand-separate": TensorPlan(
        {
            "attn.q": "column", "attn.k": "column", "attn.v": "column", "attn.proj": "row", "mlp.0": "column",
            "mlp.2": "row",
        },
        divided={"attn": ["n_heads"]},
    ),
}  # fmt: skip


@cache
def _block(family: str) -> tuple[Block, Arguments]:
    name, _, wanted = family.partition(":")
    model, call = make(name)
    blocks = distinct_blocks(model, blocks_of(model))
    block = next(one for one in blocks if not wanted or one.name == wanted)
    return block, capture(model, call, [block.name]).arguments[block.name]


def _check(family: str, plan: TensorPlan | CutBlock, size: int = 2) -> BlockCheck:
    block, arguments = _block(family)
    return check_block(block.module, arguments, plan, size)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", RIGHT)
def test_right_plans_are_accepted(family: str, size: int) -> None:
    check = _check(family, RIGHT[family], size)
    assert check.is_right, (check.failure, check.wrong, check.suspect)
    assert check.error < 1e-6


# -- Mutants -----------------------------------------------------------------------------------------------------------


def _with(family: str, rules: Mapping[str, Rule]) -> TensorPlan:
    plan = RIGHT[family]
    return TensorPlan({**plan.rules, **rules}, divided=plan.divided, arguments=plan.arguments)


def _without(family: str, part: str) -> TensorPlan:
    plan = RIGHT[family]
    rules = {name: rule for name, rule in plan.rules.items() if part not in name}
    return TensorPlan(rules, divided=plan.divided, arguments=plan.arguments)


def _undivided(family: str) -> TensorPlan:
    return TensorPlan(RIGHT[family].rules, arguments=RIGHT[family].arguments)


def _damaged(family: str, module: str, method: Callable[[Any], Callable[..., Any]]) -> CutBlock:
    """Cut a block as is right, and give the forward of one module another implementation."""

    def cut(block: nn.Module, ranks: Ranks) -> dict[str, ParamRecord]:
        records = cut_module(block, RIGHT[family], ranks)
        child = block.get_submodule(module)
        stand_in = child.__dict__["forward"]
        assert isinstance(stand_in, Divided)
        child.forward = method(stand_in)
        return records

    return cut


def _no_sum(forward: RowForward) -> Callable[..., Any]:
    return lambda x: forward.with_bias(forward.product(x))


def _bias_on_every_rank(forward: RowForward) -> Callable[..., Any]:
    return lambda x: reduce_from_ranks(forward.with_bias(forward.product(x)), forward.ranks)


def _no_copy(forward: ColumnForward) -> Callable[..., Any]:
    return lambda x: forward.run(x)


def _weights_not_copied(forward: ExpertsForward) -> Callable[..., Any]:
    def run(x: Tensor, *rest: Tensor) -> Tensor:
        return reduce_from_ranks(forward.run(copied(x, forward.ranks), *rest), forward.ranks)

    return run


def _part_of_rank_0(key: str | int, dim: int, folded: bool) -> Callable[[Any], Callable[..., Any]]:
    def damage(forward: CutArgumentsForward) -> Callable[..., Any]:
        def first(value: Tensor) -> Tensor:
            if not folded:
                return value.chunk(2, dim)[0]
            return value.view(2, -1, *value.shape[1:]).chunk(2, 1)[0].flatten(0, 1)

        def run(*args: Any, **kwargs: Any) -> Any:
            given: Any = {**dict(enumerate(args)), **kwargs}
            given[key] = first(given[key])
            return forward.run(*(given[place] for place in range(len(args))), **{name: given[name] for name in kwargs})

        return run

    return damage


MUTANTS: dict[str, tuple[str, Callable[[], TensorPlan | CutBlock]]] = {
    "a row layer taken for a column layer": ("llama", lambda: _with("llama", {"self_attn.o_proj": "column"})),
    "a column layer taken for a row layer": ("llama", lambda: _with("llama", {"mlp.up_proj": "row"})),
    "a missing sum": ("llama", lambda: _damaged("llama", "mlp.down_proj", _no_sum)),
    "a missing sum of gradients": ("llama", lambda: _damaged("llama", "mlp.gate_proj", _no_copy)),
    "keys left whole": ("llama", lambda: _without("llama", "k_proj")),
    "one of two columns left whole": ("llama", lambda: _without("llama", "up_proj")),
    "the size of a head divided": ("llama", lambda: TensorPlan(LLAMA, divided={"self_attn": ["head_dim"]})),
    "a whole gradient marked partial": ("llama", lambda: _with("llama", {"input_layernorm": "partial"})),
    "a partial gradient not marked": ("qwen3", lambda: _without("qwen3", "q_norm")),
    "a bias added on every rank": ("gpt2", lambda: _damaged("gpt2", "mlp.c_proj", _bias_on_every_rank)),
    "a row bias marked partial": ("opt", lambda: _with("opt", {"fc2.bias": "partial"})),
    "packed sections taken for one": ("gpt2", lambda: _with("gpt2", {"attn.c_attn": "column"})),
    "a size of sections not divided": ("gpt2", lambda: _undivided("gpt2")),
    "two packed matrices taken for one": ("phi3", lambda: _with("phi3", {"mlp.gate_up_proj": "column"})),
    "unequal sections taken for equal ones": ("phi3", lambda: _with("phi3", {"self_attn.qkv_proj": Packed(2)})),
    "interleaved heads taken for packed": (
        "gpt-neox", lambda: _with("gpt-neox", {"attention.query_key_value": Packed(3)})
    ),
    "a forgotten head count": ("opt", lambda: _undivided("opt")),
    "a forgotten head count, in silence": ("hand-separate", lambda: _undivided("hand-separate")),
    "ALiBi not cut": ("bloom", lambda: TensorPlan(RIGHT["bloom"].rules, divided=RIGHT["bloom"].divided)),
    "one ALiBi for all ranks": (
        "bloom", lambda: _damaged("bloom", "self_attention", _part_of_rank_0("alibi", 0, folded=True))
    ),
    "a table of biases left whole": ("t5", lambda: _with("t5", {BIAS: "partial"})),
    "one position bias for all ranks": (
        "t5:encoder.block.1", lambda: _damaged("t5:encoder.block.1", "", _part_of_rank_0(2, 1, folded=False))
    ),
    "packed experts taken for plain ones": ("mixtral", lambda: _with("mixtral", {"mlp.experts.gate_up_proj": Cut(1)})),
    "weights of a router not copied": ("mixtral", lambda: _damaged("mixtral", "mlp.experts", _weights_not_copied)),
    "gathered, then taken for parts": (
        "llama", lambda: _with("llama", {"mlp.up_proj": "column_gather", "mlp.gate_proj": "column_gather"})
    ),
}  # fmt: skip


def test_there_are_25_wrong_plans() -> None:
    assert len(MUTANTS) == 25


@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_plans_are_refused(mutant: str) -> None:
    family, plan = MUTANTS[mutant]
    check = _check(family, plan())
    assert not check.is_right
    assert check.failure is not None or check.error > 0.05


@pytest.mark.parametrize(
    ("mutant", "suspect", "remedy"),
    [
        ("a partial gradient not marked", None, "the sum over the ranks is right: mark `self_attn.q_norm.weight` 'par"),
        ("a whole gradient marked partial", None, "every rank has the whole gradient: do not mark it 'partial'"),
        ("a bias added on every rank", "mlp.c_proj", ""),
        ("a row layer taken for a column layer", None, ""),
        ("one ALiBi for all ranks", "self_attention.attention_dropout", ""),
    ],
)
def test_a_refusal_names_module_and_remedy(mutant: str, suspect: str | None, remedy: str) -> None:
    family, plan = MUTANTS[mutant]
    check = _check(family, plan())
    assert suspect is None or (check.suspect is not None and check.suspect.module == suspect), check.suspect
    assert not remedy or any(one.remedy.startswith(remedy) for one in check.wrong), check.wrong
