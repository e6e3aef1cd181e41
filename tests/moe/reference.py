"""The formulas of the layer, token by token, in fp64: independent of the layer's code."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

__all__ = ["Tokens", "expert_modules", "reference"]

Tokens = Callable[[int, Tensor], Tensor]


def reference(
    x: Tensor,
    weight: Tensor,
    expert: Tokens,
    *,
    k: int,
    noise: Tensor | None = None,
    bias: Tensor | None = None,
    priority: Tensor | None = None,
    capacity: int | None = None,
    used: Sequence[int] | None = None,
    score: str = "softmax",
    z_loss_factor: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, auxiliary loss and counts.

    Args:
        x: (T, H) tokens.
        weight: (E, H) of the router.
        expert: Applies the expert of a number to one token.
        k: Choices.
        noise: (T, E) added to logits for the choice.
        bias: (E,) added to scores for the choice.
        priority: (T,) for one choice: tokens with the highest are kept.
        capacity: Of an expert.
        used: Tokens that the experts compute.
        score: Softmax or sigmoid.
        z_loss_factor: Of the squared log-sum-exp.
    """
    logits = x @ weight.T
    scores = logits.softmax(1) if score == "softmax" else logits.sigmoid()
    liking = logits if bias is None else scores + bias
    liking = (liking if noise is None else liking + noise).detach()
    num_experts = len(weight)
    # Choices of each expert: (what decides who is kept, token, choice).
    wanted: list[list[tuple[float, int, int]]] = [[] for _ in range(num_experts)]
    for token in range(len(x)) if used is None else used:
        order = sorted(range(num_experts), key=lambda e: -liking[token, e].item())
        for choice, e in enumerate(order[:k]):
            first = -priority[token].item() if priority is not None else choice if k < 3 else -scores[token, e].item()
            wanted[e].append((first, token, choice))
    kept = {(token, e) for e, all_ in enumerate(wanted) for _, token, _ in sorted(all_)[:capacity]}
    out = []
    for token in range(len(x)):
        mine = [e for e in range(num_experts) if (token, e) in kept]
        total = sum((scores[token, e] for e in mine), torch.zeros((), dtype=x.dtype)) if k > 1 else 1.0
        parts = (scores[token, e] / total * expert(e, x[token]) for e in mine)
        out.append(sum(parts, torch.zeros_like(x[token])))
    shares = scores / scores.sum(1, keepdim=True)
    counted = torch.tensor([sum(choice == 0 or k > 2 for _, _, choice in all_) for all_ in wanted]).to(x)
    aux = num_experts * (shares.mean(0) * counted / (k if k > 2 else 1) / len(x)).sum()
    aux = aux + z_loss_factor * logits.logsumexp(1).square().mean()
    return torch.stack(out), aux, torch.tensor([len(all_) for all_ in wanted])


def capacity(num_tokens: int, num_experts: int, k: int, factor: float, least: int) -> int:
    """Return DeepSpeed's capacity."""
    return max(math.ceil(num_tokens / num_experts * factor * k), least)


def expert_modules(template: nn.Module, tensors: dict[str, Tensor]) -> Tokens:
    """Return the experts of stacked tensors as a function of number and token."""

    def apply(e: int, token: Tensor) -> Tensor:
        mine = {name: tensor[e] for name, tensor in tensors.items()}
        result: Tensor = torch.func.functional_call(template, mine, (token.unsqueeze(0),))
        return result.squeeze(0)

    return apply
