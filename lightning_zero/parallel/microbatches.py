"""A batch in pieces, and whether two ranks have the same one."""

from __future__ import annotations

import copy
import dataclasses
import zlib
from collections import UserDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch

__all__ = ["batch_digest", "shapes_of", "split_batch"]


def split_batch(batch: Any, number: int) -> list[Any]:
    """Cut a batch into ``number`` equal pieces along the first dimension of its tensors.

    Lists as long as the batch that hold no tensors are cut as well; other values are in every piece.

    Raises:
        ValueError: The tensors have different first dimensions, or ``number`` does not divide them.
    """
    if number == 1:
        return [batch]
    sizes = {tensor.shape[0]: path for path, tensor in _tensors(batch, "batch") if tensor.ndim > 0}
    if not sizes:
        raise ValueError("A pipeline cuts batches along the first dimension of their tensors, and this one has none.")
    if len(sizes) > 1:
        found = ", ".join(f"`{path}` has {size}" for size, path in sizes.items())
        raise ValueError(
            f"A pipeline cuts batches along the first dimension of their tensors, and theirs differ: {found}."
            " Give every tensor the samples as its first dimension, or use `Pipeline(microbatches=1)`."
        )
    size = next(iter(sizes))
    if size % number:
        raise ValueError(
            f"`microbatches={number}` does not divide a batch of {size} samples. Use a batch size that is a multiple of"
            f" {number}, and `drop_last=True` in the DataLoader, or another `Pipeline(microbatches=...)`."
        )
    return [_piece(batch, size, index * (size // number), size // number) for index in range(number)]


def _piece(value: Any, size: int, start: int, length: int) -> Any:
    def same(inner: Any) -> Any:
        return _piece(inner, size, start, length)

    if isinstance(value, torch.Tensor):
        return value.narrow(0, start, length) if value.ndim > 0 else value
    if isinstance(value, (list, tuple)) and len(value) == size and not any(True for _ in _tensors(value, "")):
        piece = value[start : start + length]
        return piece if type(value) in (list, tuple) else type(value)(piece)
    return _rebuilt(value, same)


def _rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a container with changed items; other values as they are."""
    result: Any
    if isinstance(value, UserDict):
        result = copy.copy(value)
        result.data = {key: change(item) for key, item in value.data.items()}
        return result
    if isinstance(value, dict):
        result = copy.copy(value)
        result.update({key: change(item) for key, item in value.items()})
        return result
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(change(item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(change(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        result = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(result, field.name, change(getattr(value, field.name)))
        return result
    return value


def shapes_of(batch: Any) -> Hashable:
    """Return what differs where batches lead to other shapes inside a model."""
    return tuple(
        (path, tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else (path, repr(value))
        for path, value in _leaves(batch, "batch")
        if isinstance(value, (torch.Tensor, int, float, bool))
    )


def batch_digest(batch: Any) -> int:
    """Return a number that differs where the values of batches do, almost certainly: int64."""
    tensors = [tensor.detach().contiguous() for _, tensor in _tensors(batch, "batch")]
    digest = 0
    for tensor in tensors:
        if tensor.device.type == "cpu":
            digest = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().tobytes(), digest)
    sums = [_weighted_sum(tensor) for tensor in tensors if tensor.device.type != "cpu"]
    return zlib.crc32(str(torch.stack(sums).tolist()).encode(), digest) if sums else digest  # the host waits once


def _weighted_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a number made of a tensor's bytes: () int64, on its device."""
    flat = tensor.reshape(-1).view(torch.uint8).to(torch.int64)
    return (flat * (torch.arange(flat.numel(), device=flat.device) % 8191 + 1)).sum()


def _tensors(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    for name, leaf in _leaves(value, path):
        if isinstance(leaf, torch.Tensor):
            yield name, leaf


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (Mapping, UserDict)):
        for key, item in value.items():
            yield from _leaves(item, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name), f"{path}.{field.name}")
    else:
        yield path, value
