from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_zero.boxes import Box, Part
from lightning_zero.checkpoint.joined import JoinedTensors, Layout, Piece, are_copies, same
from lightning_zero.checkpoint.planner import Segment
from lightning_zero.checkpoint.stored import StoredTensor, fill
from tests.checkpoint.deepspeed_files import part


def joined(layout: Layout, parts: list[Tensor]) -> StoredTensor:
    return JoinedTensors(Path("theirs")).add("weight", layout, parts)


@pytest.mark.parametrize("widths", [[[2, 1, 1]], [[1, 1, 0], [1, 0, 1]], [[0, 4, 0]]], ids=str)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_cut_sections_are_joined(dim: int, widths: list[list[int]]) -> None:
    whole = torch.randn(4, 4, 4)
    layout = Layout.cut(whole.shape, dim, widths)
    assert layout.is_sound
    stored = joined(layout, [part(whole, (dim, widths), rank) for rank in range(3)])
    assert torch.equal(stored, whole)
    for start, stop in product((0, 5, 17), (18, 40, 64)):
        local = torch.full((stop - start,), float("nan"), dtype=torch.float64)
        fill([(stored, Segment(local, start, whole.shape))])
        assert torch.equal(local, whole.view(-1)[start:stop].double())


def test_a_part_of_a_tensor_grid_is_read_from_parts_that_were_cut_otherwise() -> None:
    whole = torch.randn(6, 4)
    stored = joined(Layout.cut(whole.shape, 0, [[4, 2]]), [whole[:4], whole[4:]])
    mine = Part.along((6, 4), 1, (1, 2))
    local = torch.empty(12)
    fill([(stored, Segment(local, 0, whole.shape, part=mine))])
    assert torch.equal(local.view(6, 2), whole[:, 1:3])


def test_a_fused_matrix_may_be_cut_in_a_view_of_it() -> None:
    """As by DeepSpeed's ``shape=[2, -1, 3]`` with ``partition_dim=1``."""
    whole, bias = torch.randn(8, 3), torch.randn(8)
    parts = [whole.view(2, 4, 3)[:, rank * 2 : rank * 2 + 2].reshape(4, 3) for rank in range(2)]
    assert torch.equal(joined(Layout.cut((2, 4, 3), 1, [[2, 2]]), parts), whole)
    parts = [bias.view(2, 4)[:, rank * 2 : rank * 2 + 2].reshape(4) for rank in range(2)]
    assert torch.equal(joined(Layout.cut((2, 4), 1, [[2, 2]]), parts), bias)


@pytest.mark.parametrize("shape", [(), (3,), (0, 3), (2, 3)], ids=str)
def test_copies_are_one_tensor(shape: tuple[int, ...]) -> None:
    whole = torch.randn(shape)
    layout = Layout.copies(shape, 3)
    assert layout.is_sound
    assert torch.equal(joined(layout, [whole.clone() for _ in range(3)]), whole)


@pytest.mark.parametrize("other", [2.0 + 1e-6, float("nan")])
def test_copies_that_differ_are_refused_unless_the_first_are_wanted(other: float) -> None:
    layout = Layout.copies((2,), 3)
    parts = [torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]), torch.tensor([1.0, other])]
    with pytest.raises(ValueError, match=r"`weight` has other values on tensor rank 2 than on tensor rank 0.*copies="):
        joined(layout, parts).clone()
    stored = JoinedTensors(Path("theirs"), "first").add("weight", layout, parts)
    assert torch.equal(stored, parts[0])


def test_copies_are_compared_by_their_bits() -> None:
    layout = Layout.copies((2,), 2)
    nan = torch.tensor([1.0, float("nan")])
    assert same(joined(layout, [nan, nan.clone()]).clone(), nan)
    with pytest.raises(ValueError, match="other values"):
        joined(layout, [torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])]).clone()


def test_a_part_may_have_cut_and_copied_pieces() -> None:
    """As the fused projection of a model whose heads share one key and value."""
    whole = torch.randn(6, 2)
    shared = Piece(Box((4, 0), (2, 2)), Box((2, 0), (2, 2)))
    own = [Piece(Box((2 * rank, 0), (2, 2)), Box((0, 0), (2, 2))) for rank in range(2)]
    layout = Layout((6, 2), ((4, 2), (4, 2)), ((own[0], shared), (own[1], shared)))
    assert layout.is_sound
    parts = [torch.cat([whole[2 * rank : 2 * rank + 2], whole[4:]]) for rank in range(2)]
    assert torch.equal(joined(layout, parts), whole)
    parts[1][3] += 1
    with pytest.raises(ValueError, match="other values on tensor rank 1"):
        joined(layout, parts).clone()


def _of(*places: tuple[int, int, int]) -> Layout:
    """Return a layout of 6 elements over two ranks of 3: whole start, part start, and length of pieces."""
    pieces = [Piece(Box((whole,), (length,)), Box((start,), (length,))) for whole, start, length in places]
    return Layout((6,), ((3,), (3,)), (tuple(pieces[:-1]), (pieces[-1],)))


@pytest.mark.parametrize(
    "layout",
    [
        _of((0, 0, 3), (2, 0, 3)),
        _of((0, 0, 2), (3, 0, 3)),
        _of((0, 0, 1), (1, 0, 2), (3, 0, 3)),
        _of((0, 0, 3), (4, 0, 3)),
        _of((0, 1, 3), (3, 0, 3)),
        _of((0, 0, 3), (0, 0, 3)),
    ],
    ids=["overlap", "gap", "twice", "outside", "outside of the part", "uncovered"],
)
def test_pieces_that_do_not_cover_whole_and_parts_once_are_unsound(layout: Layout) -> None:
    assert not layout.is_sound


@pytest.mark.parametrize(
    "parts",
    [
        [torch.ones(3, 2), torch.ones(4, 2)],
        [torch.ones(2, 3), torch.ones(2, 3)],
        [torch.ones(3, 2), torch.ones(3, 2).double()],
    ],
    ids=["sizes", "dimensions", "dtypes"],
)
def test_parts_that_do_not_fit_are_refused(parts: list[Tensor]) -> None:
    with pytest.raises(ValueError, match=r"the tensor ranks have parts of `weight` of .*, which do not make a tensor"):
        joined(Layout.cut((6, 2), 0, [[3, 3]]), parts)


def test_copies_are_told_from_parts_by_values_that_are_not_one_number() -> None:
    random = torch.randn(5000)
    assert are_copies([random, random.clone()])
    other = random.clone()
    other[-1] += 1
    assert not are_copies([random, other])
    assert not are_copies([random, random[1:]])
    assert not are_copies([torch.zeros(5000), torch.zeros(5000)])
    assert not are_copies([torch.zeros(0), torch.zeros(0)])
    stored = [joined(Layout.copies((5000,), 1), [random]) for _ in range(2)]
    assert are_copies(stored)


def test_nested_values_are_compared_by_type_and_bits() -> None:
    value = {"a": [torch.ones(2), 1.0], "b": "text"}
    assert same(value, {"a": [torch.ones(2), 1.0], "b": "text"})
    for other in (
        {"a": [torch.ones(2), 2.0], "b": "text"},
        {"a": [torch.zeros(2), 1.0], "b": "text"},
        {"a": [], "b": ""},
    ):
        assert not same(value, other)
    assert not same(torch.ones(2), torch.ones(2).double())
    assert not same((1,), [1])
