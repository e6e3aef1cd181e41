"""Text as bytes: a folder or file cut into a training and a validation part."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

__all__ = ["ByteText", "bigram_entropy", "read_text", "split_text", "unigram_entropy"]


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive windows of a text, each with the same window one byte later."""

    def __init__(self, text: Tensor, length: int) -> None:
        if text.numel() <= length:
            raise ValueError(f"the text has {text.numel()} bytes, `context={length}` needs at least {length + 1}.")
        self._text = text
        self._length = length

    def __len__(self) -> int:
        return (self._text.numel() - 1) // self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self._length
        window = self._text[start : start + self._length + 1].long()
        return window[:-1], window[1:]


class ByteText(L.LightningDataModule):
    """The bytes of a file, or of the files of a folder in alphabetical order.

    Args:
        path: File or folder; the default is the standard library of the running Python.
        pattern: Which files of a folder are read.
        max_bytes: Size at which reading stops.
        context: Bytes per sequence.
        batch_size: Sequences per process and step.
        num_workers: Processes that prepare batches.
    """

    def __init__(
        self,
        path: Path | None = None,
        pattern: str = "**/*.py",
        max_bytes: int = 4_000_000,
        context: int = 128,
        batch_size: int = 8,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.path = Path(sysconfig.get_path("stdlib")) if path is None else path
        self.pattern = pattern
        self.max_bytes = max_bytes
        self.context = context
        self.batch_size = batch_size
        self.num_workers = num_workers
        # The two parts of the text, (bytes,) uint8; filled by `setup`.
        self.train_text = self.val_text = torch.empty(0, dtype=torch.uint8)

    def setup(self, stage: str) -> None:
        """Read and split the text, once per process."""
        if not self.train_text.numel():
            self.train_text, self.val_text = split_text(read_text(self.path, self.pattern, self.max_bytes))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Return shuffled windows of the training text."""
        windows = Windows(self.train_text, self.context)
        return DataLoader(windows, self.batch_size, shuffle=True, drop_last=True, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Return the windows of the validation text in order."""
        windows = Windows(self.val_text, self.context)
        return DataLoader(windows, 4 * self.batch_size, num_workers=self.num_workers)


def read_text(path: Path, pattern: str, max_bytes: int) -> Tensor:
    """Return at most ``max_bytes`` bytes of a file, or of a folder's files in alphabetical order, as uint8."""
    text = bytearray()
    for file in _files(path, pattern):
        text += file.read_bytes()[: max_bytes - len(text)]
        if len(text) >= max_bytes:
            break
    if not text:
        raise ValueError(f"`path={str(path)!r}` has no text: no file matches `pattern={pattern!r}`.")
    return torch.frombuffer(text, dtype=torch.uint8)


def _files(path: Path, pattern: str) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for file in sorted(path.glob(pattern)):
        if "site-packages" not in file.parts and file.is_file():
            yield file


def split_text(text: Tensor, block_bytes: int = 16_384, every: int = 20) -> tuple[Tensor, Tensor]:
    """Give every ``every``-th block of the text to validation and the rest to training.

    A text of fewer blocks than that is cut into ``every`` blocks.
    """
    blocks = text.split(max(1, min(block_bytes, text.numel() // every)))
    train = [block for index, block in enumerate(blocks) if index % every != every - 1]
    return torch.cat(train), torch.cat(list(blocks[every - 1 :: every]))


def unigram_entropy(text: Tensor) -> float:
    """Return the entropy of single bytes in nats: the loss of a model that knows only their frequencies."""
    return _entropy(np.bincount(text.numpy(), minlength=256))


def bigram_entropy(text: Tensor) -> float:
    """Return the entropy of a byte given the one before it in nats: the loss of a table of byte pairs."""
    values = text.numpy().astype(np.int64)
    return _entropy(np.bincount(256 * values[:-1] + values[1:])) - _entropy(np.bincount(values[:-1]))


def _entropy(counts: np.ndarray[tuple[int], np.dtype[np.int64]]) -> float:
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())
