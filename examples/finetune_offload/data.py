"""A text as tokens, cut into a training and a validation part."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import AutoTokenizer

__all__ = ["Text"]

VALIDATION_SHARE = 0.05


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive windows of a text, each with the same window one token later."""

    def __init__(self, tokens: Tensor, length: int) -> None:
        if tokens.numel() <= length:
            raise ValueError(f"the text has {tokens.numel()} tokens, `context={length}` needs at least {length + 1}.")
        self._tokens = tokens
        self._length = length

    def __len__(self) -> int:
        return (self._tokens.numel() - 1) // self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self._length
        window = self._tokens[start : start + self._length + 1].long()
        return window[:-1], window[1:]


class Text(L.LightningDataModule):
    """A text file.

    Args:
        path: The file; the default is a module of the running Python's standard library.
        tokenizer: Folder with the tokenizer of the model. Without one, or with a folder that has none, a token is a
            byte.
        max_bytes: Size at which reading stops.
        context: Tokens per sequence.
        batch_size: Sequences per process and step.
    """

    def __init__(
        self,
        path: Path | None = None,
        tokenizer: Path | None = None,
        max_bytes: int = 1_000_000,
        context: int = 128,
        batch_size: int = 4,
    ) -> None:
        super().__init__()
        self.path = Path(sysconfig.get_path("stdlib")) / "argparse.py" if path is None else path
        self.tokenizer = tokenizer
        self.max_bytes = max_bytes
        self.context = context
        self.batch_size = batch_size
        # The two parts of the text, (tokens,); filled by `setup`.
        self.train_tokens = self.val_tokens = torch.empty(0, dtype=torch.int32)

    def setup(self, stage: str) -> None:
        """Read and split the text, once per process."""
        if self.train_tokens.numel():
            return
        text = self.path.read_bytes()[: self.max_bytes]
        tokens = self._tokens(text)
        split = int(tokens.numel() * (1 - VALIDATION_SHARE))
        self.train_tokens, self.val_tokens = tokens[:split], tokens[split:]

    def _tokens(self, text: bytes) -> Tensor:
        if self.tokenizer is None or not list(self.tokenizer.glob("tokenizer*")):
            return torch.tensor(list(text), dtype=torch.int32)
        tokenizer = AutoTokenizer.from_pretrained(self.tokenizer, local_files_only=True)
        return torch.tensor(tokenizer(text.decode("utf-8", errors="replace"))["input_ids"], dtype=torch.int32)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Return shuffled windows of the training text."""
        return DataLoader(Windows(self.train_tokens, self.context), self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Return the windows of the validation text in order."""
        return DataLoader(Windows(self.val_tokens, self.context), self.batch_size)
