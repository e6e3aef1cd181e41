"""The GPT as a LightningModule: loss, perplexity, optimizer and learning rate."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import torch
from model import GPT, GPTConfig
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics.text import Perplexity

__all__ = ["LanguageModel"]


class LanguageModel(L.LightningModule):
    """Train a GPT on bytes.

    Args:
        size: Size of the model.
        lr: Highest learning rate.
        final_lr_ratio: Part of ``lr`` at which the cosine ends.
        warmup_steps: Steps in which the learning rate rises to ``lr``.
        weight_decay: Decay of matrices; vectors do not decay.
        init_device: Where the model is built. On ``"meta"`` no process ever holds the whole model: the strategy
            creates it block by block.
    """

    def __init__(
        self,
        size: GPTConfig = GPTConfig(),  # noqa: B008  (it is frozen, and the command line shows its fields)
        lr: float = 3e-3,
        final_lr_ratio: float = 0.05,
        warmup_steps: int = 25,
        weight_decay: float = 0.1,
        init_device: str = "cpu",
    ) -> None:
        super().__init__()
        self.size = size
        self.lr = lr
        self.final_lr_ratio = final_lr_ratio
        self.warmup_steps = warmup_steps
        self.weight_decay = weight_decay
        self.init_device = init_device
        # Made by `configure_model`, when the strategy is ready to place it.
        self.model: GPT | None = None
        self.train_perplexity = Perplexity()
        self.val_perplexity = Perplexity()

    def configure_model(self) -> None:
        """Build the model, once."""
        if self.model is None:
            with torch.device(self.init_device):
                self.model = GPT(self.size)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, T, 256) of every next byte."""
        assert self.model is not None
        return self.model(tokens)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss in nats per byte."""
        loss, logits = self._loss(batch)
        self.train_perplexity(logits.detach(), batch[1])
        self.log("train/loss", loss, prog_bar=True)
        self.log("train/perplexity", self.train_perplexity)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log loss and perplexity over all processes."""
        loss, logits = self._loss(batch)
        self.val_perplexity(logits, batch[1])
        self.log("val/loss", loss, prog_bar=True, sync_dist=True)
        self.log("val/perplexity", self.val_perplexity)

    def _loss(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        tokens, targets = batch
        logits = self(tokens).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits

    def configure_optimizers(self) -> Any:
        """AdamW, with a learning rate that rises in a line and falls as a cosine, step by step."""
        parameters = list(self.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95), fused=True)
        num_steps = int(self.trainer.estimated_stepping_batches)
        scheduler = LambdaLR(optimizer, lambda step: self._lr_ratio(step, num_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _lr_ratio(self, step: int, num_steps: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, num_steps - self.warmup_steps)
        return self.final_lr_ratio + (1 - self.final_lr_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
