"""Plans of whole models: how much is found, what is reported, what is refused."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.moe import MoE
from lightning_zero.parallel.tensor.plan import Cut, CutArgument, TensorParallel, TensorPlan
from lightning_zero.parallel.tensor.planning import ModelPlan, plan_model
from lightning_zero.parallel.tensor.threads import ThreadRanks, run_threads
from lightning_zero.parallel.tensor.transform import cut_module
from tests.parallel.tensor.families import FAMILIES, VOCAB, make

# Of the matrices in its blocks, the part that is cut; those that are not listed are cut whole.
IN_PART = {"gpt-bigcode": 0.75, "falcon-mqa": 0.6, "deepseek-v3": 0.5, "gpt-oss": 0.1, "mamba": 0.0}
QUICK = ("llama", "gpt2", "t5", "hand-fixed", "torch-transformer")
CASES = [
    pytest.param(family, size, marks=() if family in QUICK and size == 2 else pytest.mark.slow)
    for family in FAMILIES
    for size in (2, 4)
]


def _plan(family: str, size: int = 2, **options: Any) -> ModelPlan:
    model, call = make(family)
    return plan_model(model, TensorParallel(size=size, **options), call)


def _share_of_blocks(planned: ModelPlan) -> float:
    blocks = [one for one in planned.blocks if one.names[0].rpartition(".")[2].isdigit() or not one.names[0]]
    return sum(one.cut_numel for one in blocks) / sum(one.numel for one in blocks)


@pytest.mark.parametrize(("family", "size"), CASES)
def test_plans_are_found_for_unmodified_models(family: str, size: int) -> None:
    planned = _plan(family, size)
    assert all(one.check is None or one.check.is_right for one in planned.blocks)
    assert _share_of_blocks(planned) >= IN_PART.get(family, 0.98)
    if family in IN_PART:
        assert _share_of_blocks(planned) < 0.98  # else it belongs to the others


def test_at_least_34_of_40_families_are_cut() -> None:
    assert len(FAMILIES) >= 40
    assert len(set(FAMILIES) - set(IN_PART)) >= 34


def _outputs(result: Any) -> Tensor:
    return result.logits if "logits" in result else result.last_hidden_state  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("family", "sequence"),
    [("bloom", False), ("t5", False), ("gpt2", False), ("mixtral", False), ("llama", True), ("t5", True)],
)
def test_a_whole_model_in_parts_computes_the_same(family: str, sequence: bool) -> None:
    """Blocks are verified one by one; here they follow each other, with arguments that earlier ones have cut."""
    model, call = make(family)
    model.eval()
    planned = plan_model(model, TensorParallel(size=4, sequence=sequence), call)

    def work(ranks: ThreadRanks) -> Tensor:
        part = copy.deepcopy(model)
        cut_module(part, planned.plan, ranks)
        return _outputs(call(part))

    with torch.no_grad():
        expected = _outputs(call(model))
        for found in run_threads(ThreadRanks.group(4), work):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_cut_fraction_is_that_of_all_elements() -> None:
    planned = _plan("mamba")
    assert planned.cut_numel == VOCAB * 64  # the tied embedding alone
    assert planned.cut_fraction == planned.cut_numel / planned.numel < 0.2
    assert f"{planned.cut_fraction:.1%} of {planned.numel} elements cut" in planned.lines()[0]


def test_a_plan_in_words_has_patterns_and_checks() -> None:
    text = "\n".join(_plan("opt").lines())
    assert "model.decoder.layers.*.self_attn.q_proj    column" in text
    assert "divides num_heads" in text
    assert "model.decoder.layers.0 and 1 more: 98.7% cut, largest error" in text


def test_one_rank_cuts_nothing() -> None:
    planned = _plan("llama", 1)
    assert (planned.cut_fraction, planned.plan) == (0.0, TensorPlan({}))


def test_a_model_without_values_is_planned() -> None:
    model, call = make("llama")
    for module in model.modules():
        for name, param in list(module._parameters.items()):
            if param is not None:
                module._parameters[name] = nn.Parameter(param.detach().to("meta"))
    assert plan_model(model, TensorParallel(), call).cut_fraction > 0.99


# -- The vocabulary ----------------------------------------------------------------------------------------------------


def test_a_vocabulary_stays_whole_where_code_reads_the_weight() -> None:
    planned = _plan("hand-tied")
    assert planned.notes == ("the vocabulary stays whole: the weights of `emb` are read by other modules",)
    assert "emb" not in planned.plan.rules


def test_a_vocabulary_that_cannot_be_divided_stays_whole() -> None:
    model, call = make("gpt2", vocab_size=127 + 2)
    planned = plan_model(model, TensorParallel(), call)
    assert planned.notes == ("the vocabulary of 129 tokens stays whole, because 2 ranks do not divide it",)


def test_a_vocabulary_stays_whole_if_asked() -> None:
    assert "lm_head" not in _plan("llama", vocabulary=False).plan.rules
    assert "lm_head" not in _plan("llama", vocabulary=False, plan="model").plan.rules


def test_a_bias_under_two_names_is_cut_under_both() -> None:
    assert set(_plan("bert").plan.rules) >= {"cls.predictions.decoder", "cls.predictions.bias"}


# -- Plans of users ----------------------------------------------------------------------------------------------------


class Tailed(nn.Module):
    """Has layers outside of its blocks that a pattern of the blocks matches too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self._mlp(), self._mlp()])
        self.tail = nn.ModuleDict({"mlp": self._mlp()})

    @staticmethod
    def _mlp() -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.tail["mlp"](x)
        return result


def test_patterns_count_inside_of_blocks_and_outside() -> None:
    plan = TensorPlan({"*.*.0": "column", "*.*.2": "row"})
    planned = plan_model(Tailed(), TensorParallel(plan=plan), lambda model: model(torch.ones(2, 8)))
    assert planned.cut_fraction > 0.95
    assert [one.names for one in planned.blocks] == [("blocks.0", "blocks.1"), ("tail",)]
    assert planned.plan.rules["tail.mlp.2"] == "row"


# -- Refusals ----------------------------------------------------------------------------------------------------------

PACKED = {"blocks.*.attn.qkv": "column", "blocks.*.attn.proj": "row"}


def test_a_wrong_plan_is_refused_by_block_module_and_remedy() -> None:
    plan = TensorPlan({"model.layers.*.self_attn.o_proj": "row"})
    with pytest.raises(
        ValueError, match=r"over 2 ranks, block `model.layers.0` fails .*Correct the `TensorPlan`, or use"
    ):
        _plan("llama", plan=plan)


def test_a_missing_head_count_is_refused_with_the_integers_in_question() -> None:
    with pytest.raises(ValueError, match=r"`blocks.0`.*(`attn.n_heads`|`blocks.0.attn)"):
        _plan("hand-packed", plan=TensorPlan(PACKED))  # type: ignore[arg-type]


def test_a_partial_gradient_is_refused_with_its_remedy() -> None:
    rules = {name.replace("model.layers.*.", ""): rule for name, rule in _plan("qwen3").plan.rules.items()}
    rules = {f"model.layers.*.{name}": rule for name, rule in rules.items() if "norm" not in name and "." in name}
    rules.pop("model.layers.*.model.embed_tokens", None)
    with pytest.raises(
        ValueError, match=r"Remedy: the sum over the ranks is right: mark `self_attn.._norm.weight` 'part"
    ):
        _plan("qwen3", plan=TensorPlan(rules))


def test_a_warning_lets_a_wrong_plan_pass() -> None:
    plan = TensorPlan({"model.layers.*.input_layernorm": "partial"})
    with pytest.warns(UserWarning, match="do not mark it 'partial'"):
        planned = _plan("llama", plan=plan, check="warn")
    assert any("WRONG" in line for line in planned.lines())


def test_fewer_key_value_heads_than_ranks_are_named() -> None:
    with pytest.raises(ValueError, match="It has 4 key-value heads, which 8 ranks do not divide: use a smaller size"):
        _plan("llama", 8, plan="model")


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("hand-packed", {"plan": "model"}, "needs a model that brings a plan, and `HandWritten` has none"),
        ("hand-packed", {"plan": TensorPlan({"layers.*": "row"})}, "`TensorPlan` names `layers..`, but no module"),
        ("hand-packed", {"plan": TensorPlan({"blocks.*.ln1": "row"})}, "`blocks.0.ln1` is a `LayerNorm`"),
        ("hand-packed", {"plan": TensorPlan({"head": "row"})}, "block `head` .*"),
        (
            "t5",
            {"plan": TensorPlan({}, arguments={"encoder.block.*": {0: CutArgument(1, 7)}})},
            "names 7 heads, which 2 ranks do not divide",
        ),
    ],
)
def test_plans_that_do_not_fit_are_refused(family: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        _plan(family, **options)


# -- Code that sees a part ---------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    """A block whose subclasses do one more thing with the hidden features."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.layer_idx = number
        self.register_buffer("peak", torch.zeros(()))

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.fc1(self.norm(x)))

    def forward(self, x: Tensor) -> Any:
        return x + self.fc2(self.features(x))


class Odd(Mlp):
    def features(self, x: Tensor) -> Tensor:
        h = super().features(x)
        return h - h.mean(-1, keepdim=True) if self.layer_idx == 1 else h


class Remembering(Mlp):
    def features(self, x: Tensor) -> Tensor:
        h = super().features(x)
        self.aux = h.abs().mean()
        return h


class Counting(Mlp):
    def features(self, x: Tensor) -> Tensor:
        h = super().features(x)
        self.peak.copy_(torch.maximum(self.peak, h.detach().abs().mean()))
        return h


class Returning(Mlp):
    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        return x + self.fc2(h), h


class Stack(nn.Module):
    """Blocks, and perhaps a loss on what they return behind the first."""

    def __init__(self, block: type[Mlp], reads: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.blocks = nn.Linear(16, 16), nn.ModuleList([block(number) for number in range(3)])
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        x, loss = self.stem(x), torch.zeros(())
        for block in self.blocks:
            result = block(x)
            x, *more = result if isinstance(result, tuple) else (result,)
            if more and self.reads:
                loss = loss + more[0].square().mean()
        return x + loss


class Penalty(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.abs().mean()


LOSSES: list[Tensor] = []


class Beside(Mlp):
    """Puts the penalty of its tokens into a list that the model sums up."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.penalty, self.of = Penalty(), of

    def forward(self, x: Tensor, losses: list[Tensor] | None = None) -> Tensor:
        (LOSSES if losses is None else losses).append(x.abs().mean() if self.of == "operations" else self.penalty(x))
        result: Tensor = super().forward(x)
        return result


class Summing(nn.Module):
    """Adds the losses that blocks leave in a list: one that they are given, or one of the program."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.stem, self.blocks, self.of = nn.Linear(16, 16), nn.ModuleList([Beside(of), Beside(of)]), of

    def forward(self, x: Tensor) -> Tensor:
        LOSSES.clear()
        losses: list[Tensor] = []
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, losses) if self.of == "arguments" else block(x)
        return x + sum(losses or LOSSES)


class Mixed(nn.Module):
    """A feed-forward network and a noisy mixture, whose loss nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 16)
        expert = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5))
        self.moe = MoE(16, expert[0], 4, k=2, noisy_gate_policy="RSample", shared_expert=expert)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.fc2(self.fc1(x).relu())
        return x + self.moe(x)[0]


class Noisy(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x + torch.randn_like(x)).relu())


def _plan_stack(model: nn.Module, **options: Any) -> ModelPlan:
    return plan_model(model, TensorParallel(size=2, **options), lambda one: one(torch.randn(2, 4, 16)))


CUT = TensorPlan({"blocks.*.fc1": "column", "blocks.*.fc2": "row"})


def test_a_block_that_reads_its_number_has_a_plan_of_its_own() -> None:
    planned = _plan_stack(Stack(Odd))
    assert [(one.names, planned.plan.rules.get(f"{one.names[0]}.fc1")) for one in planned.blocks] == [
        (("blocks.0",), "column"), (("blocks.1",), None), (("blocks.2",), "column"),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="block `blocks.1` computes something else"):
        _plan_stack(Stack(Odd), plan=CUT)


@pytest.mark.parametrize("plan", ["auto", "model"])
def test_experts_that_are_divided_stay_whole(plan: str) -> None:
    model, call = make("mixtral")
    experts = [name for name, _ in model.named_modules() if name.endswith(".experts")]
    cut = plan_model(model, TensorParallel(plan=plan), call)  # type: ignore[arg-type]
    whole = plan_model(model, TensorParallel(plan=plan), call, experts)  # type: ignore[arg-type]
    assert any("experts" in name for name in cut.plan.rules)
    assert not any("experts" in name for name in whole.plan.patterns)
    assert all(one.check is None or one.check.is_right for one in whole.blocks)
    assert {name for name in cut.plan.rules if "experts" not in name} == set(whole.plan.rules)
    assert whole.notes[0] == (
        "`expert_parallel` divides the experts: rules for `model.layers.0.mlp.experts.gate_up_proj` and 5 more are left"
        " out"
    )


def test_a_plan_of_the_program_that_names_divided_experts_leaves_them_out() -> None:
    model = Stack(lambda _: Mixed())
    whole = [f"blocks.{number}.moe.experts" for number in range(3)]
    rules: dict[str, Any] = {"blocks.*.fc1": "column", "blocks.*.fc2": "row", "blocks.*.moe.experts.weight": Cut(1)}
    planned = plan_model(model, TensorParallel(plan=TensorPlan(rules)), lambda one: one(torch.randn(2, 4, 16)), whole)
    assert "rules for `blocks.0.moe.experts.weight` and 2 more are left out" in planned.notes[0]
    found = plan_model(model, TensorParallel(), lambda one: one(torch.randn(2, 4, 16)), whole)
    assert set(planned.plan.rules) == set(found.plan.rules) == {"blocks.*.fc1", "blocks.*.fc2"}


def test_a_block_that_draws_other_numbers_each_time_stays_whole() -> None:
    planned = _plan_stack(Stack(Noisy))
    assert planned.cut_numel == 0
    assert planned.lines()[3] == "  blocks.0 and 2 more: 0.0% cut, computes something else in each run, and stays whole"


def test_blocks_that_do_not_read_their_number_are_of_one_kind() -> None:
    (planned,) = _plan_stack(Stack(Mlp)).blocks
    assert (planned.names, planned.plan.rules["fc1"]) == (("blocks.0", "blocks.1", "blocks.2"), "column")


@pytest.mark.parametrize(("block", "name"), [(Remembering, "aux"), (Counting, "peak")])
def test_tensors_that_a_forward_leaves_on_modules_are_compared(block: type[Mlp], name: str) -> None:
    assert _plan_stack(Stack(block)).plan.rules.get("blocks.*.fc1") != "column"
    with pytest.raises(ValueError, match=f"the tensor that the forward leaves as `{name}` is off by"):
        _plan_stack(Stack(block), plan=CUT)


@pytest.mark.parametrize(
    ("of", "is_cut", "message"),
    [
        ("arguments", True, "the tensor that the forward leaves in its arguments is off by"),
        ("modules", True, "`penalty.captured_results` is off by"),
        ("operations", False, "code outside of the block reads a tensor that the block computes and does not return"),
    ],
)
def test_losses_that_leave_blocks_by_a_list_are_those_of_all_tokens(of: str, is_cut: bool, message: str) -> None:
    """Each rank had the loss of its part of the sequence, and its gradients counted once for every rank."""
    planned = _plan_stack(Summing(of))
    assert (planned.cut_numel > 0) == is_cut
    assert is_cut or planned.notes == (f"`blocks.0` stays whole, because {message}",)
    for plan in ("auto", CUT):
        with pytest.raises(ValueError, match=message):
            _plan_stack(Summing(of), plan=plan, sequence=True)


def test_results_behind_the_first_may_be_parts_if_no_code_reads_them() -> None:
    assert _plan_stack(Stack(Returning)).plan.rules["blocks.*.fc1"] == "column"
    assert _plan_stack(Stack(Returning), plan=CUT).plan.rules["blocks.*.fc1"] == "column"
    assert _plan_stack(Stack(Returning, reads=True)).plan.rules.get("blocks.*.fc1") != "column"
    with pytest.raises(ValueError, match="the result 1 is off by"):
        _plan_stack(Stack(Returning, reads=True), plan=CUT)


@pytest.mark.parametrize("register", ["register_forward_hook", "register_full_backward_hook"])
@pytest.mark.parametrize("plan", ["auto", CUT], ids=["auto", "given"])
def test_hooks_inside_of_cut_blocks_are_refused(plan: Any, register: str) -> None:
    model = Stack(Mlp)
    getattr(model.blocks[2], register)(lambda *_: None)  # sees whole tensors
    assert _plan_stack(model, plan=plan).cut_numel
    getattr(model.blocks[2].fc1, register)(lambda *_: None)
    with pytest.raises(ValueError, match=r"`blocks.2.fc1` has the hook `.*<lambda>`, and its block is cut"):
        _plan_stack(model, plan=plan)


def test_hooks_on_blocks_are_refused_where_these_have_parts_of_the_sequence() -> None:
    """They saw a part on all blocks but the last, and the check of a block alone did not show it."""
    model = Stack(Mlp)
    assert _plan_stack(model, sequence=True, plan=CUT).cut_numel
    model.blocks[1].register_forward_hook(lambda module, args, output: output - output.mean(1, keepdim=True))
    with pytest.raises(ValueError, match=r"`blocks.1` has the hook .* leave the block out of a `TensorPlan`"):
        _plan_stack(model, sequence=True, plan=CUT)


def test_hooks_of_pytorch_are_no_hooks_of_the_program() -> None:
    model = Stack(Mlp)
    nn.utils.spectral_norm(model.blocks[2].fc1)
    assert _plan_stack(model).cut_numel


def test_a_weight_that_is_tied_to_a_whole_one_stays_whole() -> None:
    model = Stack(Mlp)
    model.mirror = nn.Linear(32, 16)
    model.mirror.weight = model.blocks[1].fc2.weight
    planned = _plan_stack(model)
    assert planned.cut_numel == 0
    assert planned.notes == (
        "the layers around `blocks.1.fc2.weight` stay whole, because it is tied to a whole parameter",
    )
    with pytest.raises(ValueError, match="cuts a tied parameter differently"):
        _plan_stack(model, plan=CUT)


def test_a_plan_is_found_with_another_default_device() -> None:
    model, call = make("hand-fixed")
    expected = plan_model(model, TensorParallel(size=2), call)
    with torch.device("meta"):  # as of `torch.set_default_device("cuda")`
        found = plan_model(model, TensorParallel(size=2), call)
    assert found.lines() == expected.lines()


def _plan_reading(family: str, name: str, **options: Any) -> ModelPlan:
    """Plan a model of transformers for a step that reads what hooks take from the blocks."""
    model: Any = make(family)[0]
    model.set_attn_implementation("eager")
    ids = torch.randint(8, (2, 8), generator=torch.Generator().manual_seed(0))

    def call(one: Any) -> None:
        result = one(input_ids=ids, **{f"output_{name}": True})
        sum(part.float().square().mean() for part in getattr(result, name) if part is not None)

    return plan_model(model, TensorParallel(size=2, **options), call)


def test_attention_weights_that_hooks_of_transformers_take_are_whole_if_code_reads_them() -> None:
    """They were those of a rank's heads."""
    rules = _plan_reading("llama", "attentions").plan.rules
    assert rules.get("model.layers.*.self_attn.q_proj") != "column"
    assert rules["model.layers.*.mlp.gate_proj"] == "column"
    with pytest.raises(ValueError, match="`self_attn.captured_results` is off by"):
        _plan_reading("llama", "attentions", plan=_plan("llama").plan)


def test_logits_of_routers_that_hooks_of_transformers_take_are_those_of_all_tokens() -> None:
    plan = _plan("mixtral", vocabulary=False).plan
    attention = plan.only(lambda name: "self_attn" in name)
    assert _plan_reading("mixtral", "router_logits", plan=attention).cut_numel
    with pytest.raises(ValueError, match=r"`mlp.gate.captured_results` is off by"):
        _plan_reading("mixtral", "router_logits", plan=attention, sequence=True)


@pytest.mark.parametrize("name", ["layerdrop", "encoder_layerdrop"])
def test_layerdrop_is_refused_with_parts_of_the_sequence(name: str) -> None:
    model = Stack(Mlp)
    model.config = SimpleNamespace(**{name: 0.0})  # type: ignore[assignment]
    assert _plan_stack(model, sequence=True, plan=CUT).cut_numel
    setattr(model.config, name, 0.1)
    assert _plan_stack(model, plan=CUT).cut_numel
    with pytest.raises(ValueError, match=f"`config.{name}` is above 0: LayerDrop .* Set it to 0.0"):
        _plan_stack(model, sequence=True, plan=CUT)


class Deepening(Stack):
    """Calls its middle block, which is of another kind, later only."""

    def __init__(self) -> None:
        super().__init__(Mlp)
        self.blocks[1] = Odd()
        self.depth = 1

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.stem(x))
        x = self.blocks[1](x) if self.depth > 1 else x
        result: Tensor = self.blocks[2](x)
        return result


def test_blocks_that_are_called_later_are_refused_with_parts_of_the_sequence() -> None:
    """They stayed whole, and got a part of the sequence."""
    model = Deepening()
    assert "`blocks.1` is not called, and stays whole" in _plan_stack(model, plan=CUT).notes
    with pytest.raises(ValueError, match="Block `blocks.1` is not called in the run that finds a plan"):
        _plan_stack(model, sequence=True, plan=CUT)
    model.depth = 2
    assert _plan_stack(model, sequence=True, plan=CUT).cut_numel


def test_a_parameter_of_a_block_and_of_code_outside_is_refused_with_parts_of_the_sequence() -> None:
    """The gradients of its use outside counted once for every rank."""
    model = Stack(Mlp)
    model.stem = nn.Sequential(model.stem, model.blocks[2].norm)  # type: ignore[assignment]
    assert _plan_stack(model, plan=CUT).cut_numel
    message = "The gradient of `blocks.2.norm.weight` is a sum .* and `stem.1.weight` is the same parameter outside of"
    with pytest.raises(ValueError, match=message):
        _plan_stack(model, sequence=True, plan=CUT)
    shared = Stack(Mlp)
    shared.blocks[1].norm = shared.blocks[2].norm
    assert _plan_stack(shared, sequence=True, plan=CUT).cut_numel


def test_fixed_capacities_of_routers_are_refused_with_parts_of_the_sequence() -> None:
    model = Stack(Mlp)
    model.blocks[1].penalty = Penalty()
    model.blocks[1].penalty.expert_capacity = None  # type: ignore[assignment]
    assert _plan_stack(model, sequence=True, plan=CUT).cut_numel
    model.blocks[1].penalty.expert_capacity = 64  # type: ignore[assignment]
    with pytest.raises(ValueError, match="`blocks.1.penalty` has `expert_capacity=64`, and .* leave `sequence` out"):
        _plan_stack(model, sequence=True, plan=CUT)
