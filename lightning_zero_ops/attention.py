"""Causal attention by the best of torch's ``scaled_dot_product_attention``.

Note [Slow arguments]
    Torch has fast kernels and a plain one that holds all scores, ``(B, heads, S, S)``; it takes the plain one without a
    word where the arguments suit no other. This function passes arguments that the fast ones take:

    * no mask tensor: ``is_causal`` for squares, no mask for one query, and for several queries behind a cache a
      ``causal_lower_right`` bias, which torch's kernels know, because ``is_causal`` aligns the first query with the
      first key;
    * grouped keys and values as they are (``enable_gqa``), except where no fast kernel takes groups (fp32 on a GPU):
      there they are repeated, which costs their bytes and saves those of the scores;
    * a last dimension that is contiguous.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["causal_attention"]


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None, dropout_p: float = 0.0
) -> Tensor:
    """Attend to all keys up to the query's own position; the last query stands at the last key.

    Args:
        query: ``(B, heads, S, D)``.
        key: ``(B, groups, T, D)`` with ``T >= S``; ``groups`` divides ``heads``.
        value: ``(B, groups, T, E)``.
        scale: Factor of the scores; by default ``D**-0.5``.
        dropout_p: Probability of dropping a weight. Pass 0 in evaluation.

    Returns:
        ``(B, heads, S, E)``.

    Raises:
        ValueError: Shapes that do not fit. With fewer keys than queries some queries would see nothing.
    """
    _check(query, key, value)
    # Branches, not comparisons as arguments: sizes may be symbols in a compiler, and torch wants booleans.
    is_grouped = True if query.shape[1] != key.shape[1] else False  # noqa: SIM210
    if is_grouped and query.is_cuda and query.dtype == torch.float32:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        is_grouped = False
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    bias, is_square = _mask(query.shape[2], key.shape[2])
    return scaled_dot_product_attention(
        query, key, value, bias, dropout_p, is_causal=is_square, scale=scale, enable_gqa=is_grouped
    )


def _mask(num_queries: int, num_keys: int) -> tuple[Tensor | None, bool]:
    """Return a bias, or None, and whether torch's own causal mask is meant."""
    if num_queries == num_keys:
        return None, True
    return None if num_queries == 1 else causal_lower_right(num_queries, num_keys), False


def _check(query: Tensor, key: Tensor, value: Tensor) -> None:
    shapes = [tuple(x.shape) for x in (query, key, value)]
    if any(len(shape) != 4 for shape in shapes):
        raise ValueError(f"`query`, `key` and `value` must have shape (B, heads, S, D), got {shapes}.")
    if shapes[1][:3] != shapes[2][:3] or shapes[0][0] != shapes[1][0] or shapes[0][3] != shapes[1][3]:
        raise ValueError(f"`query`, `key` and `value` do not fit each other: {shapes}.")
    if not shapes[1][1] or shapes[0][1] % shapes[1][1]:
        raise ValueError(f"The heads of `key` ({shapes[1][1]}) must divide those of `query` ({shapes[0][1]}).")
    if shapes[0][2] > shapes[1][2]:
        raise ValueError(
            f"`query` has {shapes[0][2]} positions and `key` only {shapes[1][2]}. Pass at least as many keys."
        )
