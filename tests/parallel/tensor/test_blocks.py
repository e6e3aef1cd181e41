from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.moe import MoE
from lightning_zero.parallel.tensor.blocks import blocks_of, capture, distinct_blocks
from lightning_zero.parallel.tensor.examples import replay, tensors_of
from tests.parallel.tensor.families import WIDTH, make


def _on_meta(model: nn.Module) -> nn.Module:
    """Return a copy whose parameters have no values; buffers keep theirs."""
    memo: dict[int, Any] = {id(one): nn.Parameter(one.detach().to("meta")) for one in model.parameters()}
    return copy.deepcopy(model, memo)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("hand-packed", ["blocks.0", "blocks.1"]),
        ("t5", ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"]),
        ("mlp", [""]),
    ],
)
def test_blocks_are_the_children_of_the_outermost_lists(family: str, expected: list[str]) -> None:
    assert blocks_of(make(family)[0]) == expected


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", [("model.layers.0", "model.layers.1")]),
        ("gemma2", [("model.layers.0",), ("model.layers.1",)]),  # one has a window
        ("t5", [("encoder.block.0",), ("encoder.block.1",), ("decoder.block.0",), ("decoder.block.1",)]),
    ],
)
def test_blocks_of_one_kind_are_grouped(family: str, expected: list[tuple[str, ...]]) -> None:
    model = make(family)[0]
    assert [block.names for block in distinct_blocks(model, blocks_of(model))] == expected


def test_blocks_with_mixtures_are_of_one_kind() -> None:
    """Experts hide a template in a tuple, and each one counted as another: every block was planned on its own."""

    def kinds(*experts: nn.Module) -> int:
        blocks = nn.ModuleList([nn.ModuleDict({"moe": MoE(4, one, 2), "up": nn.Linear(4, 4)}) for one in experts])
        return len(distinct_blocks(nn.ModuleDict({"blocks": blocks}), ["blocks.0", "blocks.1"]))

    assert kinds(nn.Linear(4, 4), nn.Linear(4, 4)) == 1
    assert kinds(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Sequential(nn.Linear(4, 4), nn.GELU())) == 2


@pytest.mark.parametrize("family", ["llama", "bloom", "bert"])
def test_arguments_are_found_without_values_of_parameters(family: str) -> None:
    """What the model computes between its modules, as masks, is that of the model itself."""
    model, call = make(family)
    name = blocks_of(model)[0]
    found = capture(_on_meta(model), call, [name]).arguments[name]
    seen: list[Any] = []
    model.get_submodule(name).register_forward_pre_hook(lambda _, *given: seen.append(given), with_kwargs=True)
    call(model)
    values = [one for one in _tensors(seen[0]) if not one.requires_grad]
    replayed = [one for one in _tensors(replay(found, torch.float32)) if not one.requires_grad]
    assert len(values) == len(replayed) > 0
    for one, other in zip(values, replayed, strict=True):
        torch.testing.assert_close(other, one)


def _tensors(tree: Any) -> list[Tensor]:
    return [one for one in torch.utils._pytree.tree_leaves(tree) if isinstance(one, Tensor)]


def test_a_run_changes_neither_the_model_nor_the_random_numbers() -> None:
    model, call = make("gpt2")
    before, hooks = copy.deepcopy(model.state_dict()), [len(one._forward_pre_hooks) for one in model.modules()]
    torch.manual_seed(1)
    state = torch.get_rng_state()
    capture(model, call, blocks_of(model))
    assert torch.equal(torch.get_rng_state(), state)
    assert [len(one._forward_pre_hooks) for one in model.modules()] == hooks
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(one.grad is None for one in model.parameters())


def test_replayed_activations_are_random_and_the_same_each_time() -> None:
    model, call = make("hand-packed")
    arguments = capture(model, call, ["blocks.0"]).arguments["blocks.0"]
    (one,), (other,) = (tensors_of(replay(arguments, torch.float64)) for _ in range(2))
    assert torch.equal(one, other)
    assert one.dtype == torch.float64
    assert one.std() > 0.5


def test_reads_of_a_weight_outside_of_its_module_are_found() -> None:
    for family, expected in (("hand-tied", {"emb.weight"}), ("hand-packed", set())):
        model, call = make(family)
        assert capture(model, call, ["blocks.0"], blocks_of(model)).read_outside == expected


@pytest.mark.parametrize(
    "read",
    [
        lambda model, weight: sum(param.norm() for param in model.parameters()),
        lambda model, weight: torch.cat([weight, weight]).sum(),
        lambda model, weight: nn.functional.linear(torch.ones(WIDTH), weight=weight),
        lambda model, weight: weight.data.sum(),
    ],
)
def test_every_kind_of_read_is_found(read: Any) -> None:
    model, call = make("hand-separate")
    name = "blocks.0.attn.q.weight"
    found = capture(model, lambda one: (call(one), read(one, one.get_parameter(name))), ["blocks.0"], blocks_of(model))
    assert name in found.read_outside


def test_results_that_code_between_the_blocks_uses_are_found() -> None:
    model, call = make("hand-separate")

    def between(one: Any) -> Any:
        hidden = one.emb(torch.ones(2, 4, dtype=torch.long))
        first = one.blocks[0](hidden)
        return one.blocks[1](first * 2.0) + first.mean()

    assert not capture(model, call, ["blocks.0"], blocks_of(model)).used_between
    assert capture(model, between, ["blocks.0"], blocks_of(model)).used_between == {"blocks.0"}


class Asking(nn.Module):
    """Asks for values, which a run without them cannot give."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 4), nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))])

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.first(x))
        return x * self.first.weight.sum()


def test_a_model_that_asks_for_values_runs_with_them() -> None:
    model = Asking()
    assert capture(model, lambda one: one(torch.ones(2, 4)), ["blocks.0"]).arguments
    with pytest.raises(ValueError, match="The model cannot be run without values of its parameters"):
        capture(_on_meta(model), lambda one: one(torch.ones(2, 4)), ["blocks.0"])


class Options:
    """A configuration of a program."""

    def __init__(self, norm: bool) -> None:
        self.norm = norm


def _softmax(scale: float) -> Any:
    return lambda h: h.softmax(-1) * scale


def _layer(**attributes: Any) -> nn.Module:
    layer = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for key, value in attributes.items():
        setattr(layer[0], key, value)
    return layer


@pytest.mark.parametrize(
    ("one", "like", "other"),
    [
        (torch.tanh, torch.tanh, torch.relu),
        (_softmax(5), _softmax(5), _softmax(6)),
        ({"norm": [False]}, {"norm": [False]}, {"norm": [True]}),
        (Options(False), Options(False), Options(True)),
        (partial(torch.sum, dim=1), partial(torch.sum, dim=1), partial(torch.sum, dim=2)),
        (torch.tensor(True), torch.tensor(True), torch.tensor(False)),
        ({1, 2}, {2, 1}, {1, 3}),
    ],
    ids=["function", "closure", "dict", "object", "partial", "flag", "set"],
)
def test_blocks_that_differ_by_an_attribute_are_of_two_kinds(one: Any, like: Any, other: Any) -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList([_layer(option=value, layer_idx=i) for i, value in enumerate((one, like, other))])
    kinds = [block.names for block in distinct_blocks(model, blocks_of(model))]
    assert kinds == [("blocks.0", "blocks.1"), ("blocks.2",)]


def test_methods_of_a_block_are_alike_in_all_blocks() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList([_layer() for _ in range(2)])
    for block in model.blocks:
        block[0].act = block[0].extra_repr
        block[0].around = [block, block[0].act]
    assert len(distinct_blocks(model, blocks_of(model))) == 1
