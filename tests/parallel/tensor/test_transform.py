"""Cut modules over two processes: the same values, losses and weights as on one rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.parallel.tensor.collectives import ProcessGroupRanks
from lightning_zero.parallel.tensor.plan import CutArgument, Packed, TensorParallel, TensorPlan
from lightning_zero.parallel.tensor.planning import plan_model
from lightning_zero.parallel.tensor.threads import ThreadRanks, run_threads
from lightning_zero.parallel.tensor.transform import cut_module
from tests.parallel.tensor.families import make
from tests.worlds import run

STEPS = 5
NO_DROPOUT: dict[str, dict[str, float]] = {
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "vit": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "t5": {"dropout_rate": 0.0},
}
TRAINED = ("llama", "gpt2", "qwen3", "bert", "vit", "t5")


def _loss(output: Any) -> Tensor:
    """Return a loss that depends on all of a model's main result."""
    value: Tensor = output.logits if "logits" in output else output.last_hidden_state
    weights = torch.linspace(-1, 1, value.shape[-1])
    return (value.tanh() * weights).mean() + 0.1 * value.square().mean()


def _train(
    model: nn.Module, call: Callable[[nn.Module], Any], partial: frozenset[str] = frozenset()
) -> tuple[list[float], dict[str, Tensor]]:
    """Train by plain SGD with a learning rate of 1, so that no optimizer hides a factor; return losses and weights."""
    losses = []
    for _ in range(STEPS):
        loss = _loss(call(model))
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for name, param in model.named_parameters():
                if param.grad is None:
                    continue
                if name in partial:
                    dist.all_reduce(param.grad)
                param -= param.grad
                param.grad = None
    return losses, {name: param.detach() for name, param in model.named_parameters()}


def _train_in_parts(
    rank: int, world: int, family: str, plan: str, sequence: bool
) -> tuple[list[float], dict[str, Tensor], float]:
    model, call = make(family, **NO_DROPOUT.get(family, {}))
    whole = copy.deepcopy(model)
    planned = plan_model(model, TensorParallel(size=world, plan=plan, sequence=sequence), call)  # type: ignore[arg-type]
    records = cut_module(model, planned.plan, ProcessGroupRanks())
    for name, param in model.named_parameters():  # initial values are those of the whole parameter
        assert torch.equal(param, records[name].local(whole.get_parameter(name)))
    assert set(records) == {name for name, _ in model.named_parameters()}
    losses, weights = _train(model, call, frozenset(name for name, one in records.items() if one.kind == "partial"))
    joined = {}
    for name, local in weights.items():
        value = torch.full(records[name].shape, float("nan"))
        for other, part in enumerate(ProcessGroupRanks().all_gather(local)):
            record = records[name]
            type(record)(**{**vars(record), "rank": other}).write_into(value, part)
        joined[name] = value
    return losses, joined, planned.cut_fraction


CASES = [
    *((family, "auto", False) for family in TRAINED),
    *((family, "model", False) for family in ("llama", "qwen3")),
    *((family, "auto", True) for family in ("llama", "gpt2", "bert", "t5")),
]


@pytest.mark.parametrize(("family", "plan", "sequence"), CASES)
def test_two_ranks_train_as_one_does(family: str, plan: str, sequence: bool) -> None:
    model, call = make(family, **NO_DROPOUT.get(family, {}))
    losses, weights = _train(model, call)
    for found, joined, fraction in run(_train_in_parts, 2, family, plan, sequence, timeout_s=120.0):
        assert fraction > 0.8
        assert found == pytest.approx(losses, rel=0, abs=1e-6)
        for name, value in weights.items():
            torch.testing.assert_close(joined[name], value, rtol=0, atol=1e-6, msg=name)


# -- nn.MultiheadAttention ---------------------------------------------------------------------------------------------

ATTENTION: dict[str, dict[str, Any]] = {
    "packed": {"batch_first": True},
    "sequence-first": {},
    "separate": {"batch_first": True, "kdim": 12, "vdim": 20},
    "without-bias": {"batch_first": True, "bias": False},
}
CALLS: dict[str, dict[str, Any]] = {
    "plain": {"need_weights": False},
    "weights": {},
    "weights-of-heads": {"average_attn_weights": False},
    "causal": {"need_weights": False, "is_causal": True, "attn_mask": "causal"},
    "padded": {"key_padding_mask": "padding"},
    "mask-of-heads": {"attn_mask": "heads"},
    "unbatched": {"need_weights": False},
}


def _attention_inputs(kind: str, call: str) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    options = ATTENTION[kind]
    widths = 16, options.get("kdim", 16), options.get("vdim", 16)
    query, key, value = (
        torch.randn(3, length, width, generator=generator) for length, width in zip((5, 7, 7), widths, strict=True)
    )
    if not options.get("batch_first"):
        query, key, value = (one.transpose(0, 1) for one in (query, key, value))
    if call == "unbatched":
        query, key, value = (one[0] if options.get("batch_first") else one[:, 0] for one in (query, key, value))
    masks = {
        "causal": torch.ones(5, 7, dtype=torch.bool).triu(1),
        "padding": torch.arange(7).expand(3, 7) > 4,
        "heads": torch.randn(3 * 4, 5, 7, generator=generator),
    }
    return (query, key, value), {name: masks[one] if isinstance(one, str) else one for name, one in CALLS[call].items()}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", ATTENTION)
def test_attention_of_torch_in_parts_is_attention(kind: str, call: str) -> None:
    torch.manual_seed(0)
    whole = nn.MultiheadAttention(16, 4, **ATTENTION[kind])
    inputs, options = _attention_inputs(kind, call)
    expected, weights = whole(*inputs, **options)

    def work(ranks: ThreadRanks) -> tuple[Tensor, Tensor | None]:
        part = copy.deepcopy(whole)
        cut_module(part, TensorPlan({"": "attention"}), ranks)
        return part(*inputs, **options)  # type: ignore[no-any-return]

    for found, found_weights in run_threads(ThreadRanks.group(2), work):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert (found_weights is None) == (weights is None)
        if weights is not None:
            torch.testing.assert_close(found_weights, weights, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_fast_path_of_torch_does_not_pass_a_cut_layer_by(norm_first: bool) -> None:
    torch.manual_seed(0)
    whole = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=norm_first).eval()
    x = torch.randn(3, 5, 16)
    plan = TensorPlan({"self_attn": "attention", "linear1": "column", "linear2": "row"})

    def work(ranks: ThreadRanks) -> Tensor:
        part = copy.deepcopy(whole)
        cut_module(part, plan, ranks)
        return part(x)  # type: ignore[no-any-return]

    with torch.no_grad():
        for found in run_threads(ThreadRanks.group(2), work):
            torch.testing.assert_close(found, whole(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.MultiheadAttention(16, 4, add_bias_kv=True), "with `add_bias_kv` or `add_zero_attn` cannot be cut"),
        (nn.MultiheadAttention(6, 1), "has 1 heads, which 2 ranks do not divide"),
    ],
)
def test_attention_that_cannot_be_cut_is_refused(module: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cut_module(module, TensorPlan({"": "attention"}), ThreadRanks.group(2)[0])


# -- Details of a cut --------------------------------------------------------------------------------------------------


class Config:
    heads = 4


class Shared(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.size = 5
        self.fc = nn.Linear(4, 12)


def test_a_shared_configuration_is_not_changed() -> None:
    config = Config()
    module = nn.ModuleList([Shared(config), Shared(config)])
    cut_module(module, TensorPlan({}, divided={"0": ["config.heads"]}), ThreadRanks.group(2)[0])
    first, second = module
    assert isinstance(first, Shared)
    assert isinstance(second, Shared)
    assert (first.config.heads, second.config.heads, config.heads) == (2, 4, 4)


@pytest.mark.parametrize("name", ["size", "nothing", "config.nothing"])
def test_an_integer_that_cannot_be_divided_is_refused(name: str) -> None:
    plan = TensorPlan({}, divided={"": [name]})
    with pytest.raises(ValueError, match=rf"`Shared.{name}` is .*, and must be a number that 2 ranks divide"):
        cut_module(Shared(Config()), plan, ThreadRanks.group(2)[0])


def test_records_name_boxes_and_kinds() -> None:
    module = nn.Sequential(nn.Linear(4, 12), nn.LayerNorm(12), nn.Linear(12, 4))
    plan = TensorPlan({"0": Packed([8, 4]), "1": "partial", "2": "row"})
    records = cut_module(module, plan, ThreadRanks.group(2)[1])
    assert {name: record.kind for name, record in records.items()} == {
        "0.weight": "cut", "0.bias": "cut", "1.weight": "partial", "1.bias": "partial", "2.weight": "cut",
        "2.bias": "whole",
    }  # fmt: skip
    part = records["0.weight"].part
    assert part is not None
    assert part.boxes == (((4, 0), (4, 4)), ((10, 0), (2, 4)))
    assert records["2.weight"].local_shape == tuple(module[2].weight.shape) == (4, 6)
    assert (module[0].out_features, module[2].in_features) == (6, 6)


def test_parameters_without_values_are_cut() -> None:
    with torch.device("meta"):
        module = nn.Linear(4, 12)
    cut_module(module, TensorPlan({"": "column"}), ThreadRanks.group(2)[0])
    assert module.weight.is_meta
    assert module.weight.shape == (6, 4)


def test_an_argument_of_another_size_is_refused() -> None:
    module = nn.Identity()
    cut_module(module, TensorPlan({}, arguments={"": {0: CutArgument(0, 8)}}), ThreadRanks.group(2)[0])
    with pytest.raises(ValueError, match=r"Argument 0 of `Identity` has shape \(7,\), and the plan"):
        module(torch.ones(7))


@pytest.mark.parametrize("padding_idx", [None, 1, 5])
def test_an_embedding_in_parts_has_the_gradients_of_the_whole(padding_idx: int | None) -> None:
    torch.manual_seed(0)
    whole = nn.Embedding(8, 3, padding_idx=padding_idx)
    ids, grad = torch.tensor([[0, 1, 5], [7, 5, 3]]), torch.randn(2, 3, 3)
    expected = whole(ids)
    expected.backward(grad)
    assert whole.weight.grad is not None
    expected_grad = whole.weight.grad

    def work(ranks: ThreadRanks) -> None:
        part = copy.deepcopy(whole)
        part.weight.grad = None
        records = cut_module(part, TensorPlan({"": "vocab"}), ranks)
        result = part(ids)
        result.backward(grad)
        assert torch.equal(result, expected)
        assert part.weight.grad is not None
        assert torch.equal(part.weight.grad, records["weight"].local(expected_grad))

    run_threads(ThreadRanks.group(2), work)


@pytest.mark.parametrize("index", [-1, 8, 12])
def test_an_index_outside_of_the_vocabulary_raises_as_in_the_whole(index: int) -> None:
    whole, ids = nn.Embedding(8, 3), torch.tensor([0, index])
    with pytest.raises(IndexError, match="index out of range"):
        whole(ids)

    def work(ranks: ThreadRanks) -> str:
        part = copy.deepcopy(whole)
        cut_module(part, TensorPlan({"": "vocab"}), ranks)
        with pytest.raises(IndexError, match="index out of range"):
            part(ids)
        return "refused"

    assert run_threads(ThreadRanks.group(2), work) == ["refused"] * 2
