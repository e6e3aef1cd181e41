"""A causal language model of Hugging Face's transformers as a LightningModule, all of it trained or adapters alone."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import torch
from adapters import Adapters, add_adapters
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from lightning_zero import load_pretrained

__all__ = ["LanguageModel"]


class LanguageModel(L.LightningModule):
    """Fine-tune a Llama-style model.

    Args:
        path: Local folder with ``config.json`` and safetensors files. The default is a small model with random weights.
        adapters: Train adapters and nothing else. The default trains all parameters.
        width: Features per position of the small model.
        depth: Blocks of the small model.
        lr: Learning rate.
        weight_decay: Decay of matrices; vectors do not decay.
    """

    def __init__(
        self,
        path: Path | None = None,
        adapters: Adapters | None = None,
        width: int = 128,
        depth: int = 4,
        lr: float = 3e-4,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__()
        self.path = path
        self.adapters = adapters
        self.width = width
        self.depth = depth
        self.lr = lr
        self.weight_decay = weight_decay
        # Made by `configure_model`, when the strategy is ready to place it.
        self.model: nn.Module | None = None

    def configure_model(self) -> None:
        """Build the model, once. One that is read from a folder is never whole in any process at stage 3."""
        if self.model is not None:
            return
        self.model = self._small_model() if self.path is None else _empty_model(self.path)
        if self.adapters is not None:
            add_adapters(self.model, self.adapters)
        if self.path is not None:
            keys = load_pretrained(self.model, self.path, strict=False)
            missing = [name for name in keys.missing_keys if ".adapter." not in name]
            if missing or keys.unexpected_keys:
                raise ValueError(f"`{self.path}` lacks {missing} and has {keys.unexpected_keys} too much.")

    def _small_model(self) -> nn.Module:
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=self.width,
            intermediate_size=3 * self.width,
            num_hidden_layers=self.depth,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
        )
        return AutoModelForCausalLM.from_config(config)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, T, V) of every next token."""
        assert self.model is not None
        return self.model(input_ids=tokens, use_cache=False).logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss in nats per token."""
        loss = self._loss(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the loss over all processes."""
        self.log("val/loss", self._loss(batch), prog_bar=True, sync_dist=True)

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        return F.cross_entropy(self(tokens).float().flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over what is trained."""
        trained = [param for param in self.parameters() if param.requires_grad]
        groups = [
            {"params": [param for param in trained if param.ndim >= 2], "weight_decay": self.weight_decay},
            {"params": [param for param in trained if param.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW([group for group in groups if group["params"]], lr=self.lr)


def _empty_model(path: Path) -> nn.Module:
    """Return a model on the meta device; what is in no file, the frequencies of rotary embeddings, is real."""
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for module in model.modules():
        if hasattr(module, "rotary_emb"):
            module.rotary_emb = type(module.rotary_emb)(config=config)
    return model
