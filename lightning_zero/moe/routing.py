"""Which experts each token uses, with which weights, and the auxiliary loss.

Note [DeepSpeed's gates]
    The formulas are those of DeepSpeed's ``TopKGate``, of which it has three, for one choice, two and more. With the
    scores ``s`` of ``T`` tokens for ``E`` experts (a softmax of the logits), and ``f[e]`` the share of tokens that
    chose expert ``e``:

    * weights are the scores of the chosen experts, and for two choices or more those divided by their sum over the
      choices that were not dropped;
    * the auxiliary loss is ``E sum over e of mean(s[:, e]) f[e]``, where ``f`` counts the first choices alone if there
      are two, and all choices divided by their number if there are more;
    * an expert takes at most ``ceil(T k factor / E)`` tokens, and no fewer than ``min_capacity``. One choice: tokens
      are dropped at random, or the last ones; two: all first choices come before all second ones, the last ones are
      dropped; more: those with the lowest scores are dropped.

    Shapes: T tokens, E experts, k choices. Everything is computed in fp32 (fp64 for fp64 tokens).
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["NoisyGatePolicy", "Router", "Routing", "ScoreFunction", "capacity_of", "count_choices"]

NoisyGatePolicy = Literal["RSample", "Jitter"]
ScoreFunction = Literal["softmax", "sigmoid"]

_JITTER = 1e-2  # as in DeepSpeed


@dataclass(frozen=True)
class Routing:
    """The experts of each token.

    Args:
        experts: (T, k) int64; E for a choice that is not made, because the token is unused.
        scores: (T, k): the scores of the chosen experts, with gradients.
        priority: (T, k): of the choices of one expert those with the highest are kept; None: the first ones are.
        aux_loss: () with gradients.
        counts: (E,) int64: tokens that chose each expert, before any is dropped.
        shares: (T, E) without gradients: the scores of all experts, which sum to 1; None where they are not known.
    """

    experts: Tensor
    scores: Tensor
    priority: Tensor | None
    aux_loss: Tensor
    counts: Tensor
    shares: Tensor | None = None


class Router(nn.Module):
    """Chooses the experts of tokens.

    Args:
        hidden_size: H, size of a token.
        num_experts: E.
        k: Experts per token.
        noisy_gate_policy: As in ``MoE``.
        use_rts: Draw priorities for one choice, by which tokens are dropped.
        top2_2nd_expert_sampling: As in ``MoE``.
        score_function: As in ``MoE``.
        z_loss_factor: As in ``MoE``.
        is_balanced: Whether choices are balanced by a bias (arXiv:2408.15664).
    """

    expert_bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        *,
        k: int,
        noisy_gate_policy: NoisyGatePolicy | None,
        use_rts: bool,
        top2_2nd_expert_sampling: bool,
        score_function: ScoreFunction,
        z_loss_factor: float,
        is_balanced: bool,
    ) -> None:
        super().__init__()
        # The default of `nn.Linear`, in fp32 whatever the default dtype is.
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, dtype=torch.float32))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        # Added to scores when experts are chosen, and not to weights.
        bias = torch.zeros(num_experts, dtype=torch.float32) if is_balanced else None
        self.register_buffer("expert_bias", bias)
        # Tokens that chose each expert in training, since the bias was updated; None: none did.
        self.load: Tensor | None = None
        self._k = k
        self._noise = noisy_gate_policy
        self._use_rts = use_rts
        self._samples_second = top2_2nd_expert_sampling
        self._score_function = score_function
        self._z_loss_factor = z_loss_factor

    def extra_repr(self) -> str:
        """Show the sizes."""
        return f"num_experts={len(self.weight)}, k={self._k}"

    @property
    def is_random(self) -> bool:
        """Whether it draws random numbers in training."""
        return self._noise is not None or self._samples_second or (self._k == 1 and self._use_rts)

    def stop_drawing(self) -> None:
        """Choose by scores alone from now on, as in evaluation."""
        self._noise, self._samples_second, self._use_rts = None, False, False

    def forward(self, tokens: Tensor, used_token: Tensor | None = None) -> Routing:
        """Choose.

        Args:
            tokens: (T, H).
            used_token: (T,) bool or 0 and 1: others choose no expert; None: all do.

        Returns:
            The choices; ``experts`` in the order of preference.
        """
        has_autocast = not tokens.is_meta  # the meta device has no autocast
        with torch.autocast(tokens.device.type, enabled=False) if has_autocast else contextlib.nullcontext():
            return self._choose(tokens, used_token)

    def _choose(self, tokens: Tensor, used_token: Tensor | None) -> Routing:
        dtype = torch.promote_types(tokens.dtype, torch.float32)
        inputs = tokens.to(dtype)
        if self._noise == "Jitter" and self.training:
            inputs = inputs * torch.empty_like(inputs).uniform_(1.0 - _JITTER, 1.0 + _JITTER)
        logits = F.linear(inputs, self.weight.to(dtype))
        shares, scores = self._score(logits)
        experts = self._select(logits.detach(), scores.detach())
        if used_token is not None:
            experts = experts.masked_fill((used_token.reshape(-1) == 0).unsqueeze(1), len(self.weight))
        by_choice = count_choices(experts, len(self.weight))
        counts = by_choice.sum(0)
        if self.training and self.expert_bias is not None:
            self.load = counts if self.load is None else self.load + counts
        return Routing(
            experts=experts,
            scores=scores.gather(1, experts.clamp(max=len(self.weight) - 1)),
            priority=self._priority(experts, scores.detach()),
            aux_loss=self._aux_loss(logits, shares, by_choice.to(dtype)),
            counts=counts,
            shares=shares.detach(),
        )

    def _score(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores that sum to 1 over the experts, for the loss, and those of the weights."""
        if self._score_function == "softmax":
            scores = logits.softmax(1)
            return scores, scores
        scores = logits.sigmoid()
        return scores / scores.sum(1, keepdim=True).clamp(min=torch.finfo(scores.dtype).eps), scores

    def _select(self, logits: Tensor, scores: Tensor) -> Tensor:
        """Return the experts of highest preference: (T, k), the first choice first."""
        preference = logits if self.expert_bias is None else scores + self.expert_bias.to(scores.dtype)
        if self._noise == "RSample" and self.training:
            preference = preference + _gumbel(preference)
        if self._k == 2 and self._samples_second and self.training:
            first = preference.argmax(1, keepdim=True)
            others = (preference + _gumbel(preference)).scatter(1, first, -math.inf)
            return torch.cat([first, others.argmax(1, keepdim=True)], 1)
        return preference.topk(self._k, 1).indices

    def _priority(self, experts: Tensor, scores: Tensor) -> Tensor | None:
        if self._k == 1:
            return torch.rand_like(scores[:, :1]) if self._use_rts and self.training else None
        if self._k == 2:
            return None
        return scores.gather(1, experts.clamp(max=len(self.weight) - 1))

    def _aux_loss(self, logits: Tensor, shares: Tensor, by_choice: Tensor) -> Tensor:
        """Return the loss of ``Note [DeepSpeed's gates]`` and the z-loss (arXiv:2202.08906), 0 for no tokens."""
        num_tokens = max(len(logits), 1)
        counted = by_choice[0] if self._k <= 2 else by_choice.sum(0) / self._k
        loss = len(self.weight) * ((shares.sum(0) / num_tokens) * (counted / num_tokens)).sum()
        if self._z_loss_factor:
            loss = loss + self._z_loss_factor * logits.logsumexp(1).square().sum() / num_tokens
        return loss


def capacity_of(num_tokens: int, num_experts: int, *, k: int, factor: float, min_capacity: int) -> int:
    """Return how many tokens an expert takes at most."""
    # Rounded, because 10 * 1.1 in floating point is a little more than 11.
    return max(math.ceil(round(num_tokens * k * factor / num_experts, 6)), min_capacity)


def count_choices(experts: Tensor, num_experts: int) -> Tensor:
    """Return (k, E) int64: tokens by choice and expert. ``torch.bincount`` waits for the device."""
    return (experts.unsqueeze(-1) == torch.arange(num_experts, device=experts.device)).sum(0)


def _gumbel(like: Tensor) -> Tensor:
    return -torch.empty_like(like).exponential_().log()
