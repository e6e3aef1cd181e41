"""Containers of tensors are taken apart alike by all versions of PyTorch."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch

from lightning_zero.trees import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

Pair = namedtuple("Pair", ["first", "second"])


def _given() -> dict[str, Any]:
    x = torch.ones(2, 3)
    return {"x": x, "shape": x.shape, "pair": Pair(x, (1, None)), "slice": slice(2), "word": "ab"}


def test_a_size_is_one_leaf_and_stays_a_size() -> None:
    leaves, spec = tree_flatten(_given())
    assert torch.Size([2, 3]) in [leaf for leaf in leaves if isinstance(leaf, torch.Size)]
    again = tree_unflatten(leaves, spec)
    assert type(again["shape"]) is torch.Size
    assert type(again["pair"]) is Pair


def test_maps_see_a_size_once() -> None:
    seen = []
    tree_map(seen.append, {"shape": torch.Size([2, 3]), "tuple": (2, 3)})
    assert seen == [torch.Size([2, 3]), 2, 3]


def test_maps_of_a_class_leave_other_leaves() -> None:
    doubled = tree_map_only(torch.Tensor, lambda tensor: 2 * tensor, _given())
    assert float(doubled["x"].sum()) == 12.0
    assert float(doubled["pair"].first.sum()) == 12.0
    assert doubled["shape"] == torch.Size([2, 3])
    assert [type(leaf) for leaf in tree_leaves(doubled)] == [type(leaf) for leaf in tree_leaves(_given())]
