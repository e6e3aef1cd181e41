"""Random modules: what they are made of is plain data, so that a failing one can be made smaller and printed.

A module is described by a dict; what it does not name has the plainest value (``PLAIN``). Blocks have names of their
own ("a", "b", ...), so that one can be taken out without renaming the others.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

__all__ = ["KINDS", "PLAIN", "VOCAB", "WIDTH", "Block", "Net", "build", "draw"]

WIDTH = 4
VOCAB = 5  # no multiple of a world size
PLAIN: dict[str, Any] = {
    "dtype": "fp32",
    "blocks": [],
    "tied": False,  # the head's weight is the embedding's
    "scale": False,  # a parameter of the root, which its forward multiplies by
    "unused": False,  # a layer that no forward uses
    "norm": False,  # a layer norm in front of the head
    "frozen": [],  # names of parameters that start frozen
}
KINDS = (
    "linear",
    "ff",
    "batchnorm",
    "nested",
    "weight_norm",
    "spectral_norm",
    "attention",
    "counter",
    "odd",
    "dropout",
)


class Block(nn.Module):
    """A residual block of some kind.

    Args:
        kind: One of ``KINDS``.
        shared: A layer of an earlier block that this one uses too.
        checkpointed: Whether activations are recomputed.
    """

    def __init__(self, kind: str, shared: nn.Module | None = None, checkpointed: bool = False) -> None:
        super().__init__()
        self.kind = kind
        self.checkpointed = checkpointed
        self.up: nn.Module = shared or nn.Linear(WIDTH, WIDTH + 1)
        if kind == "weight_norm":
            self.down: nn.Module = parametrizations.weight_norm(nn.Linear(WIDTH + 1, WIDTH))
        elif kind == "spectral_norm":
            self.down = parametrizations.spectral_norm(nn.Linear(WIDTH + 1, WIDTH, bias=False))
        else:
            self.down = nn.Linear(WIDTH + 1, WIDTH, bias=kind != "odd")
        if kind == "ff":
            self.norm = nn.LayerNorm(WIDTH)
        elif kind == "batchnorm":
            self.norm = nn.BatchNorm1d(WIDTH + 1)
        elif kind == "nested":
            self.inner = nn.ModuleList([Block("linear"), Block("linear")])
        elif kind == "attention":
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        elif kind == "counter":
            self.register_buffer("count", torch.zeros((), dtype=torch.long))
            self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)
        elif kind == "odd":
            self.gain = nn.Parameter(torch.ones(()))
            self.empty = nn.Parameter(torch.empty(0))
            self.spare = nn.Parameter(torch.ones(1, 3))  # never used
        elif kind == "dropout":
            self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed and self.training and torch.is_grad_enabled():
            return x + checkpoint(self.residual, x, use_reentrant=False)
        return x + self.residual(x)

    def residual(self, x: Tensor) -> Tensor:
        y: Tensor
        if self.kind == "ff":
            y = F.gelu(self.up(self.norm(x)))
        elif self.kind == "attention":
            y = torch.tanh(self.up(self.attention(x, x, x)[0]))
        else:
            y = torch.tanh(self.up(x))
        if self.kind == "batchnorm":
            y = self.norm(y.flatten(0, 1)).view_as(y)
        elif self.kind == "dropout":
            y = self.dropout(y)
        y = self.down(y)
        if self.kind == "nested":
            for block in self.inner:
                y = block(y)
        elif self.kind == "counter" and self.training:
            self.count += 1
            with torch.no_grad():
                self.mean.lerp_(y.detach().mean((0, 1)), 0.5)
        elif self.kind == "counter":
            y = y + self.mean
        elif self.kind == "odd":
            y = y * self.gain + self.empty.sum()
        return y


class Net(nn.Module):
    """Embedding, blocks, of which a forward uses some, and head.

    Args:
        spec: What it is made of; see ``PLAIN``.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__()
        spec = {**PLAIN, **spec}
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleDict()
        for name, block in spec["blocks"]:
            earlier = self.blocks[block["shares"]].up if block.get("shares") in self.blocks else None
            self.blocks[name] = Block(block["kind"], earlier, block.get("checkpointed", False))
        self.norm = nn.LayerNorm(WIDTH) if spec["norm"] else nn.Identity()
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if spec["tied"]:
            self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(WIDTH)) if spec["scale"] else None
        self.unused = nn.Linear(WIDTH, 3) if spec["unused"] else None

    def forward(self, x: Tensor, use: Collection[str] | None = None) -> Tensor:
        """Compute with the blocks in ``use`` (by default all); ``x`` holds token numbers, or vectors.

        Args:
            x: (batch, length) of integers, or (batch, length, WIDTH).
            use: Names of blocks.
        """
        x = x if x.is_floating_point() else self.embedding(x)
        if self.scale is not None:
            x = x * self.scale
        for name, block in self.blocks.items():
            if use is None or name in use:
                x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build(spec: dict[str, Any]) -> Net:
    """Build the module that ``spec`` describes."""
    net = Net(spec)
    net = net.double() if spec.get("dtype") == "fp64" else net
    names = dict(net.named_parameters())
    for name in spec.get("frozen", ()):
        if name in names:
            names[name].requires_grad_(False)
    return net


def draw(rng: random.Random) -> dict[str, Any]:
    """Draw a module."""
    blocks: list[tuple[str, dict[str, Any]]] = []
    for name in "abcd"[: rng.choice((1, 2, 2, 3, 3, 4))]:
        block: dict[str, Any] = {"kind": rng.choice(KINDS + ("linear", "ff"))}
        if blocks and rng.random() < 0.12:
            block["shares"] = rng.choice(blocks)[0]
        if block["kind"] not in ("batchnorm", "counter", "spectral_norm") and rng.random() < 0.1:
            block["checkpointed"] = True
        blocks.append((name, block))
    spec: dict[str, Any] = {"blocks": blocks}
    for key, chance in (("tied", 0.2), ("scale", 0.3), ("unused", 0.2), ("norm", 0.5)):
        if rng.random() < chance:
            spec[key] = True
    if rng.random() < 0.35:
        spec["dtype"] = "fp64"
    if rng.random() < 0.25:
        net = build(spec)
        names = [name for name, param in net.named_parameters() if param is not net.head.weight]  # some loss remains
        spec["frozen"] = sorted(rng.sample(names, rng.randint(1, max(1, len(names) // 2))))
    return spec
