"""The GPT of ``examples/gpt`` with mixtures of experts in the place of its feed-forward layers.

Shapes: B sequences, T positions, V values of a byte (256), C width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from language_model import LanguageModel
from model import GPT, Block, GPTConfig, rotations
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_zero.moe import MoE

__all__ = ["MixtureConfig", "MixtureGPT", "MixtureLanguageModel"]


@dataclass(frozen=True, kw_only=True)
class MixtureConfig(GPTConfig):
    """Size of the model.

    Args:
        experts: Feed-forward networks in each block; 0: the one of the dense GPT, of ``4 * width`` hidden features.
        k: Experts of each token, with ``4 * width / k`` hidden features each: as many operations as the dense GPT.
    """

    experts: int = 8
    k: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.experts and not 1 <= self.k <= self.experts:
            raise ValueError(f"`k={self.k}` must be 1 to `experts={self.experts}`.")


class Expert(nn.Module):
    """The feed-forward network of the GPT, with ``4 * width / k`` hidden features."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        features = 4 * config.width // config.k
        self.hidden = nn.Linear(config.width, features, bias=False)
        self.out = nn.Linear(features, config.width, bias=False)
        nn.init.normal_(self.out.weight, std=(2 * config.depth * features) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(M, C) → (M, C)."""
        return self.out(F.relu(self.hidden(x)).square())


class MixtureBlock(Block):
    """One transformer block with experts."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__(config)
        experts = [Expert(config) for _ in range(config.experts)]
        self.feed_forward = MoE(config.width, experts, config.experts, k=config.k)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """``x``: (B, T, C), ``cos`` and ``sin``: (T, D) → (B, T, C), and the auxiliary loss of the router."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out, aux_loss, _ = self.feed_forward(self.feed_forward_norm(x))
        return x + out, aux_loss


class MixtureGPT(GPT):
    """Predict every next byte, by experts."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__(config)
        self.blocks = nn.ModuleList(MixtureBlock(config) for _ in range(config.depth))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """``tokens``: (B, T) int64 → logits (B, T, V), and the mean auxiliary loss of the blocks."""
        cos, sin = rotations(tokens.size(1), self.config.width // self.config.heads, tokens.device)
        x, losses = self.embedding(tokens), []
        for block in self.blocks:
            x, aux_loss = block(x, cos, sin)
            losses.append(aux_loss)
        return self.head(self.norm(x)), torch.stack(losses).mean()


class MixtureLanguageModel(LanguageModel):
    """Train a GPT on bytes, with experts or without.

    Args:
        size: Size of the model.
        aux_loss_factor: Factor of the auxiliary loss, which evens out the loads of experts.
        **kwargs: As in ``LanguageModel``.
    """

    def __init__(
        self,
        size: MixtureConfig = MixtureConfig(),
        aux_loss_factor: float = 0.01,
        **kwargs: Any,
    ) -> None:
        super().__init__(size=size, **kwargs)
        self.aux_loss_factor = aux_loss_factor

    def configure_model(self) -> None:
        """Build the model, once."""
        if self.model is None:
            with torch.device(self.init_device):
                self.model = MixtureGPT(self.size) if self.size.experts else GPT(self.size)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss in nats per byte, plus the auxiliary loss."""
        loss, aux_loss = self._losses(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss + self.aux_loss_factor * aux_loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the loss over all processes, without the auxiliary one."""
        self.log("val/loss", self._losses(batch)[0], prog_bar=True, sync_dist=True)

    def _losses(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | float]:
        tokens, targets = batch
        found = self(tokens)
        logits, aux_loss = found if self.size.experts else (found, 0.0)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()), aux_loss
