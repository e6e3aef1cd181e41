"""PyTorch's trees, with a ``torch.Size`` as one leaf.

Some versions of PyTorch take it for a tuple, and rebuild it as a plain one: a module would be given ``(2, 3)`` in the
place of ``x.shape``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._pytree import TreeSpec, tree_unflatten

__all__ = [
    "TreeSpec",
    "is_size",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
]


def is_size(value: Any) -> bool:
    """Say whether a value is a ``torch.Size``, a leaf."""
    return type(value) is torch.Size


tree_flatten = partial(_pytree.tree_flatten, is_leaf=is_size)
tree_flatten_with_path = partial(_pytree.tree_flatten_with_path, is_leaf=is_size)
tree_leaves = partial(_pytree.tree_leaves, is_leaf=is_size)
tree_map = partial(_pytree.tree_map, is_leaf=is_size)


def tree_map_only(cls: type, function: Callable[[Any], Any], tree: Any) -> Any:
    """Return a tree with a function of each leaf of a class in its place."""
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, cls) else leaf, tree)
