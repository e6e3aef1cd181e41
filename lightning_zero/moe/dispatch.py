"""The order of tokens by expert, and the way there and back.

Note [Where tokens travel]
    ``dispatch`` sorts, permutes, calls the experts and adds up. Between permuting and the experts, and between the
    experts and adding up, rows are grouped by expert and ``Order.offsets`` says where each group ends: there the
    experts exchange rows with those of other ranks (``exchange.py``). Nothing here knows of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_zero.moe.routing import Routing
from lightning_zero_ops import permute_tokens, unpermute_tokens

__all__ = ["Order", "dispatch", "sort_by_expert"]


@dataclass(frozen=True)
class Order:
    """The permuted rows of the slots of tokens, as in ``lightning_zero_ops.permute_tokens``.

    Args:
        slots: (M,) int64.
        rows: (T, k) int64; -1 for a choice that was dropped.
        offsets: (E,) int32: where the rows of each expert end. Rows from ``offsets[-1]`` on are zeros.
    """

    slots: Tensor
    rows: Tensor
    offsets: Tensor


def sort_by_expert(routing: Routing, *, capacity: int | None) -> Order:
    """Return the order of the choices, of which each expert gets at most ``capacity``.

    Shapes depend on sizes alone, so that nobody waits for a device.
    """
    num_tokens, k = routing.experts.shape
    num_slots, num_experts = num_tokens * k, len(routing.counts)
    experts, order = _sorted(routing)
    starts = routing.counts.cumsum(0) - routing.counts
    kept = routing.counts if capacity is None else routing.counts.clamp(max=capacity)
    ends = kept.cumsum(0)
    places = torch.arange(num_slots, device=experts.device)
    owner = experts.clamp(max=num_experts - 1)
    place = places - starts[owner]  # within the choices of the expert
    is_kept = (experts < num_experts) & (place < kept[owner])
    num_rows = num_slots if capacity is None else min(num_slots, num_experts * capacity)
    row = torch.where(is_kept, (ends - kept)[owner] + place, num_rows)
    # The last element is that of all choices that were dropped.
    slots = torch.full((num_rows + 1,), -1, dtype=torch.int64, device=row.device).scatter_(0, row, order)
    rows = torch.empty_like(row).scatter_(0, order, torch.where(is_kept, row, -1))
    return Order(slots=slots[:num_rows], rows=rows.view(num_tokens, k), offsets=ends.int())


def _sorted(routing: Routing) -> tuple[Tensor, Tensor]:
    """Return the experts of all slots in order, and the slots; within an expert those to be kept come first."""
    experts = routing.experts
    num_tokens, k = experts.shape
    if routing.priority is not None:
        first = routing.priority.view(-1).argsort(descending=True, stable=True)
    else:  # first choices before second ones, each in the order of tokens
        first = torch.arange(num_tokens * k, device=experts.device).view(num_tokens, k).t().reshape(-1)
    found, order = experts.view(-1)[first].sort(stable=True)
    return found, first[order]


def dispatch(
    tokens: Tensor, routing: Routing, experts: Callable[[Tensor, Tensor], tuple[Tensor, Any]], *, capacity: int | None
) -> tuple[Tensor, Any]:
    """Return for every token the weighted sum of the results of its experts, and the other value that these return.

    Args:
        tokens: (T, H).
        routing: Of these tokens.
        experts: Gets rows (M, H) sorted by expert, and offsets (E,); returns rows (M, H) and something else.
        capacity: Choices that an expert takes at most; None: all.

    Returns:
        (T, H) in the dtype of the experts' results; zeros for a token that was dropped.
    """
    order = sort_by_expert(routing, capacity=capacity)
    rows = permute_tokens(tokens, order.slots, order.rows)
    results, beside = experts(rows, order.offsets)
    return unpermute_tokens(results, _weights(routing.scores, order.rows), order.slots, order.rows), beside


def _weights(scores: Tensor, rows: Tensor) -> Tensor:
    """Return the weights of Note [DeepSpeed's gates]."""
    scores = torch.where(rows < 0, 0.0, scores)
    if scores.shape[1] == 1:
        return scores
    return scores / scores.sum(1, keepdim=True).clamp(min=torch.finfo(scores.dtype).eps)
