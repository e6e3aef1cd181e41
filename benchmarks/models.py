"""The GPTs that the step benchmark trains: fp32, no dropout, untied head.

No biases: the true gradient of a key bias is zero, and Adam makes a whole step of its rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["GPT", "SHAPES", "UNITS", "Block", "GPTShape", "random_batch"]

UNITS = ("Block",)  # the engine's units


@dataclass(frozen=True, kw_only=True)
class GPTShape:
    """Sizes of a GPT; ``width`` is a multiple of the head size of 64."""

    width: int
    depth: int
    vocabulary: int
    context: int = 512


SHAPES: dict[str, GPTShape] = {
    "tiny": GPTShape(width=64, depth=2, vocabulary=128),  # 0.15M, for smoke runs
    "10m": GPTShape(width=256, depth=12, vocabulary=1024),  # 10.1M
    "40m": GPTShape(width=512, depth=12, vocabulary=2048),  # 40.1M
    "57m": GPTShape(width=640, depth=11, vocabulary=2048),  # 57.0M
    "wide": GPTShape(width=1024, depth=2, vocabulary=1024),  # 27.8M
    "268m": GPTShape(width=1024, depth=16, vocabulary=32768),  # 269M, for GPUs
}


class Block(nn.Module):
    """Attention and a four times wider MLP, each behind a normalisation and with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_heads = width // 64
        self.attention_norm = nn.RMSNorm(width, eps=1e-5)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-5)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        batch, length, width = hidden.shape
        qkv = self.qkv(self.attention_norm(hidden)).view(batch, length, 3, self.num_heads, 64)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        mlp: Tensor = self.down(F.gelu(self.up(self.mlp_norm(hidden))))
        return hidden + mlp


class GPT(nn.Module):
    """A decoder-only transformer that returns its own loss."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width) for _ in range(shape.depth))
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    @classmethod
    def seeded(cls, name: str, seed: int = 0) -> GPT:
        """Build the named shape with weights that depend on the seed alone."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return cls(SHAPES[name])

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean cross entropy of (batch, length + 1) tokens."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        hidden = self.embedding(inputs) + self.position(positions)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def random_batch(name: str, num_tokens: int, *, step: int, rank: int) -> Tensor:
    """Return (batch, length + 1) tokens with ``batch * length == num_tokens``, different for every step and rank."""
    length = min(num_tokens, 128)
    generator = torch.Generator().manual_seed(1_000 * step + rank)
    return torch.randint(SHAPES[name].vocabulary, (num_tokens // length, length + 1), generator=generator)
