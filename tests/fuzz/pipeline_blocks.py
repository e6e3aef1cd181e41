"""Pieces of which random programs for pipelines are made: blocks of several kinds, and the module around them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["BLOCKS", "VOCAB", "WIDTH", "Around", "hidden_of"]

VOCAB, WIDTH = 11, 8


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        return x + torch.tanh(self.linear(self.norm(x)))


class Attends(Linear):
    def forward(self, x: Tensor, mask: Tensor) -> Any:
        scores = x @ self.linear(self.norm(x)).transpose(1, 2) + (mask.transpose(1, 2) - 1.0)
        return x + 0.3 * scores.softmax(-1) @ x * mask


class ReturnsTuple(Linear):
    def forward(self, x: Tensor, mask: Tensor) -> Any:
        out = super().forward(x, mask)
        return out, out.square().mean(-1)


class ReturnsDict(Linear):
    def forward(self, x: Tensor, mask: Tensor) -> Any:
        out = super().forward(x, mask)
        return {"extra": self.norm.weight.abs().mean() * out[:, 0], "hidden": out}


class LeavesAttribute(Linear):
    def forward(self, x: Tensor, mask: Tensor) -> Any:
        self.aux = self.linear(x).square().mean()
        return super().forward(x, mask)


class LeavesList(Linear):
    def forward(self, x: Tensor, mask: Tensor) -> Any:
        self.aux = [self.linear(x).square().mean(), x.detach().mean()]
        return super().forward(x, mask)


class LeavesBuffer(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("aux", torch.zeros(()))

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        self.aux = self.linear(x).square().mean()
        return super().forward(x, mask)


class Averages(Linear):
    """Keeps a running mean in a module buffer, and computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        return super().forward(x, mask) - self.mean


class Counts(Linear):
    """Counts its calls in an attribute and in a module buffer, and computes with both."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        self.calls += 1
        self.count += 1
        return super().forward(x, mask) * (1.0 + 0.05 * (self.calls % 3) + 0.02 * self.count)


class Recomputed(Linear):
    def forward(self, x: Tensor, mask: Tensor) -> Any:
        return checkpoint(super().forward, x, mask, use_reentrant=False)


class Writes(Linear):
    """Changes its argument in place."""

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        x *= 0.9
        return super().forward(x, mask)


class WritesView(Linear):
    """Returns a view of what it keeps."""

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        both = torch.stack([super().forward(x, mask), x])
        self.aux = both[1].mean()
        return both[0]


class WithoutParameters(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Any:
        return F.gelu(x) * mask + x


BLOCKS: dict[str, type[nn.Module]] = {
    one.__name__: one
    for one in (Linear, Attends, ReturnsTuple, ReturnsDict, LeavesAttribute, LeavesList, LeavesBuffer, Averages, Counts,
                Recomputed, Writes, WritesView, WithoutParameters)
}  # fmt: skip


def hidden_of(output: Any) -> Tensor:
    """Return the hidden states among what a block returns."""
    output = output["hidden"] if isinstance(output, dict) else output
    return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]


class Around(LightningModule):
    """The module that programs derive from."""

    def __init__(self, kinds: list[str], tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(BLOCKS[kind]() for kind in kinds)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.shift = nn.Parameter(0.1 * torch.randn(WIDTH))
        if tied:
            self.head.weight = self.embedding.weight
        self.losses: list[float] = []  # of the batches
        self.num_steps = 0  # of the optimizer

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.num_steps += 1

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
