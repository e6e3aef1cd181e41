"""Where a module is cut."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.config import Pipeline
from lightning_zero.parallel.pipeline.stages.split import balanced_bounds, split_module
from tests.references import TinyGPT


class Program(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.net = TinyGPT(**options)


def split(root: nn.Module | None = None, stages: int = 2, **options: Any) -> Any:
    return split_module(root or Program(depth=4), Pipeline(stages=stages, **options))


def test_modules_in_front_and_behind_go_to_the_first_and_last_stage() -> None:
    made = split(partition="uniform")
    chunks = {place.name: place.chunk for place in made.places}
    assert made.blocks == "net.blocks"
    assert chunks == {
        "net.embedding": 0, "net.blocks.0": 0, "net.blocks.1": 0, "net.blocks.2": 1, "net.blocks.3": 1, "net.norm": 1,
        "net.head": 1,
    }  # fmt: skip


def test_parameters_around_the_list_are_on_every_stage() -> None:
    holders = split(stages=4).holders
    assert holders["scale"] == (0, 1, 2, 3)
    assert holders["net.embedding.weight"] == (0,)
    assert holders["net.head.weight"] == (3,)


def test_tied_parameters_are_on_the_stages_of_all_their_names() -> None:
    holders = split(Program(depth=4, tied=True), stages=4).holders
    assert holders["net.embedding.weight"] == (0, 3)
    assert "net.head.weight" not in holders


def test_interleaved_chunks_go_round_the_stages() -> None:
    made = split(schedule="interleaved_1f1b", partition="uniform")
    assert made.bounds == (0, 1, 2, 3, 4)
    assert [made.holders[f"net.blocks.{block}.norm.weight"] for block in range(4)] == [(0,), (1,), (0,), (1,)]


def test_a_sequential_is_cut() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    made = split(module, partition="uniform")
    assert made.blocks == ""
    assert [place.name for place in made.places if place.chunk == 1] == ["2", "3", "4"]
    assert made.holders == {
        "0.weight": (0,),
        "0.bias": (0,),
        **dict.fromkeys(("2.weight", "2.bias", "4.weight", "4.bias"), (1,)),
    }


def test_blocks_are_evened_out_with_what_is_around_them() -> None:
    assert balanced_bounds([1] * 8, 2) == (0, 4, 8)
    assert balanced_bounds([1] * 8, 2, first=4) == (0, 2, 8)
    assert balanced_bounds([1] * 8, 2, last=4) == (0, 6, 8)
    assert balanced_bounds([5, 1, 1, 1, 1, 1], 2) == (0, 1, 6)


@pytest.mark.parametrize("seed", range(5))
def test_no_cut_has_a_smaller_largest_chunk(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    costs = torch.randint(1, 20, (9,), generator=generator).tolist()
    first, last = torch.randint(0, 30, (2,), generator=generator).tolist()

    def largest(bounds: Any) -> int:
        sizes = [sum(costs[start:stop]) for start, stop in itertools.pairwise(bounds)]
        return max([sizes[0] + first, *sizes[1:-1], sizes[-1] + last])

    best = min(largest((0, *inner, 9)) for inner in itertools.combinations(range(1, 9), 2))
    assert largest(balanced_bounds(costs, 3, first, last)) == best


def test_modules_of_other_lists_lie_where_their_lists_do() -> None:
    root = Program(depth=4)
    root.net.downs = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    root.net.ups = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.ModuleList([nn.ReLU(), nn.Linear(2, 2)])})
    chunks = {place.name: place.chunk for place in split(root, partition="uniform", first=["net.downs"]).places}
    assert [name for name in chunks if "downs" in name] == ["net.downs.0", "net.downs.1"]
    assert [name for name in chunks if "ups" in name] == ["net.ups.a", "net.ups.b.1"]
    assert (chunks["net.downs.0"], chunks["net.ups.b.1"]) == (0, 1)


def test_types_are_counted() -> None:
    module = nn.Sequential(nn.ReLU(), nn.ReLU(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert split(module, partition="type:linear").bounds in ((0, 3, 5), (0, 4, 5))


def test_split_points_are_names_or_positions() -> None:
    assert split(partition=["net.blocks.1"]).bounds == (0, 1, 4)
    assert split(partition=[3]).bounds == (0, 3, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": 5}, "needs 5 blocks, and `net.blocks` has 4. Use fewer stages"),
        ({"module": "net.block"}, "is no module of `Program`. Did you mean `net.blocks`"),
        ({"partition": ["net.blocks.7"]}, "which is no block of `net.blocks`"),
        ({"partition": [0]}, "must name the first blocks of the second and further chunks"),
        ({"partition": "type:Conv"}, "matches no class of the blocks. They are: Block"),
        ({"shared": ["net.embedding.weights"]}, "is no parameter. Did you mean `net.embedding.weight`"),
        ({"first": ["net.blocks"]}, "is no module around `net.blocks`"),
        ({"module": "net.head"}, "has no `ModuleList` or `Sequential` of two or more modules"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        split(**options)


def test_a_list_that_holds_a_module_twice_is_refused() -> None:
    block = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="holds a module twice"):
        split(nn.Sequential(block, nn.ReLU(), block))


class UsedElsewhere(nn.Module):
    """Uses its modules in another order than it registers them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2)
        self.both = nn.Linear(2, 2)
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
        self.positions = nn.Embedding(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.both(x) + self.positions(x.long())
        for layer in self.layers:
            x = layer(x)
        return self.norm(self.both(x))


def test_modules_lie_on_the_side_on_which_forward_uses_them() -> None:
    split = split_module(UsedElsewhere(), Pipeline(stages=2))
    chunks = {place.name: place.chunk for place in split.places if place.block is None}
    assert chunks == {"both": 0, "positions": 0, "norm": 1}


def _blocks(number: int, width: int = 4) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(width, width) for _ in range(number))


class Student(nn.Module):
    """Has a frozen copy of its blocks, with the embedding and the head, in one list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = _blocks(4)
        self.teacher = nn.Sequential(nn.Linear(4, 4), *_blocks(4), nn.Linear(4, 4)).requires_grad_(False)


class Probe(nn.Module):
    """Has a frozen model and a small head that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = _blocks(6).requires_grad_(False)
        self.head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


@pytest.mark.parametrize("make", [Student, Probe])
def test_a_frozen_teacher_beside_the_model_is_not_cut(make: Any) -> None:
    assert split(make()).blocks == "blocks"


class Outer(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = _blocks(4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _in_place(module: nn.Module) -> nn.Module:
    module.compile()
    return module


def _method(module: Any) -> nn.Module:
    module.forward = torch.compile(module.forward)
    result: nn.Module = module
    return result


@pytest.mark.parametrize("compiled", [torch.compile, _in_place, _method])
def test_a_model_that_is_compiled_around_its_blocks_is_refused(compiled: Any) -> None:
    with pytest.raises(
        ValueError, match=r"`inner` is compiled .* `for block in model.inner.blocks: block.compile\(\)`"
    ):
        split(Outer(compiled(Inner())))


def test_blocks_that_are_compiled_one_by_one_are_cut() -> None:
    inner = Inner()
    for block in inner.blocks:
        block.compile()
    assert split(Outer(inner)).blocks == "inner.blocks"
