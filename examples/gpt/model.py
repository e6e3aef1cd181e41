"""A byte-level GPT in plain PyTorch.

Shapes: B sequences, T positions, V values of a byte (256), C width, H heads, D = C / H.

Nothing here knows of ZeRO. Two habits let it be built on the meta device and filled block by block: every module that
owns parameters has a ``reset_parameters``, and there are no buffers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["GPT", "Block", "GPTConfig", "sample"]


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Size of the model; it has about ``12 * depth * width ** 2`` parameters.

    Args:
        width: Features per position.
        depth: Number of blocks.
        heads: Attention heads; they divide the width into parts of an even size.
        vocabulary: Number of different tokens, 256 for bytes.
    """

    width: int = 128
    depth: int = 5
    heads: int = 4
    vocabulary: int = 256

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(f"`width={self.width}` must be a multiple of 2 * `heads` (got `heads={self.heads}`).")


class Embedding(nn.Embedding):
    """Embedding with small initial values."""

    def reset_parameters(self) -> None:
        """Draw the initial values."""
        nn.init.normal_(self.weight, std=0.02)


class Projection(nn.Linear):
    """Linear layer without bias that writes into the residual stream of ``depth`` blocks."""

    def __init__(self, in_features: int, out_features: int, depth: int) -> None:
        self.depth = depth
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Draw the initial values: the sum of all blocks starts with the variance of one."""
        nn.init.normal_(self.weight, std=(2 * self.depth * self.in_features) ** -0.5)


class Attention(nn.Module):
    """Causal self-attention with rotary positions (RoFormer, arXiv:2104.09864)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query_key_value = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = Projection(config.width, config.width, config.depth)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x``: (B, T, C), ``cos`` and ``sin``: (T, D) → (B, T, C)."""
        num_sequences, num_positions, width = x.shape
        qkv = self.query_key_value(x).view(num_sequences, num_positions, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotate(query, cos, sin), rotate(key, cos, sin), value, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(num_sequences, num_positions, width))


class FeedForward(nn.Module):
    """Two layers with a squared ReLU between them (Primer, arXiv:2109.08668)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.hidden = nn.Linear(config.width, 4 * config.width, bias=False)
        self.out = Projection(4 * config.width, config.width, config.depth)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) → (B, T, C)."""
        return self.out(F.relu(self.hidden(x)).square())


class Block(nn.Module):
    """One transformer block: what is gathered, computed and released together."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.width)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x``: (B, T, C), ``cos`` and ``sin``: (T, D) → (B, T, C)."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class GPT(nn.Module):
    """Predict every next byte."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """``tokens``: (B, T) int64 → logits (B, T, V)."""
        cos, sin = rotations(tokens.size(1), self.config.width // self.config.heads, tokens.device)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def rotations(num_positions: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and signed sines of the rotary angles, each (T, D) fp32."""
    frequency = 10000.0 ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
    angle = torch.outer(torch.arange(num_positions, device=device, dtype=torch.float32), frequency)
    sin = angle.sin()
    return angle.cos().repeat(1, 2), torch.cat((-sin, sin), dim=1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (d, d + D/2) of ``x``: (B, H, T, D) by the angle of their position."""
    return (x * cos + x.roll(x.size(-1) // 2, dims=-1) * sin).type_as(x)


@torch.no_grad()
def sample(model: nn.Module, prompt: bytes, length: int, *, context: int, temperature: float = 0.7) -> bytes:
    """Return the prompt continued by ``length`` bytes; the model sees the last ``context`` of them."""
    device = next(model.parameters()).device
    tokens = torch.tensor([list(prompt)], device=device)
    for _ in range(length):
        logits = model(tokens[:, -context:])[:, -1].float()
        following = torch.multinomial((logits / temperature).softmax(dim=-1), num_samples=1)
        tokens = torch.cat((tokens, following), dim=1)
    return bytes(tokens[0].tolist())
