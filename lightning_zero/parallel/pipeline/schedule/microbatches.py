"""A batch in pieces, and whether two ranks have the same one."""

from __future__ import annotations

import copy
import dataclasses
import zlib
from collections import UserDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch

__all__ = ["batch_digest", "list_of_samples", "num_samples", "shapes_of", "split_batch", "weighted_mean"]


def split_batch(batch: Any, number: int) -> list[Any]:
    """Cut a batch into pieces along the first dimension of its tensors: ``number`` of them, or as many as samples.

    Sizes are those of ``torch.tensor_split``: the first ones have one sample more where ``number`` does not divide.
    Lists as long as the batch that hold no tensors are cut as well; other values are in every piece.

    Raises:
        ValueError: The tensors have no first dimension, or different ones.
    """
    if number == 1:
        return [batch]
    size = _size_of(batch)
    number = max(min(number, size), 1)
    least, larger = divmod(size, number)
    starts = [index * least + min(index, larger) for index in range(number + 1)]
    return [_piece(batch, size, start, stop - start) for start, stop in zip(starts, starts[1:], strict=False)]


def _size_of(batch: Any) -> int:
    sizes = {tensor.shape[0]: path for path, tensor in _tensors(batch, "batch") if tensor.ndim > 0}
    if not sizes:
        raise ValueError("A pipeline cuts batches along the first dimension of their tensors, and this one has none.")
    if len(sizes) > 1:
        found = ", ".join(f"`{path}` has {size}" for size, path in sizes.items())
        raise ValueError(
            f"A pipeline cuts batches along the first dimension of their tensors, and theirs differ: {found}."
            " Give every tensor the samples as its first dimension, or use `Pipeline(microbatches=1)`."
        )
    return next(iter(sizes))


def list_of_samples(batch: Any, num_samples: int | None) -> tuple[str, int, int] | None:
    """Find a list with a tensor for each sample, whose tensors a pipeline would cut: path, items, first dimension.

    Args:
        batch: Whose tensors have the same first dimension.
        num_samples: Samples of a batch, if known. Otherwise lists are found where all tensors are in lists that are
            items of the batch and have equal lengths; ``[x, y]`` is none of these.
    """
    lists = list(_lists(batch, "batch"))
    num_inside = sum(len(one) for _, one in lists)
    items = {len(one) for path, one in lists if path != "batch"}
    for path, one in lists:
        first = one[0].shape[0] if one[0].ndim > 0 else len(one)
        if len(one) < 2 or len(one) == first:
            continue
        is_alone = len(items) == 1 and path != "batch" and num_inside == sum(1 for _ in _tensors(batch, ""))
        if len(one) == num_samples if num_samples is not None else is_alone:
            return path, len(one), first
    return None


def _lists(value: Any, path: str) -> Iterator[tuple[str, Sequence[torch.Tensor]]]:
    """Yield the lists and tuples that hold tensors and nothing else."""
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, torch.Tensor) for item in value):
        yield path, value
    elif isinstance(value, (Mapping, UserDict)):
        for key, item in value.items():
            yield from _lists(item, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _lists(item, f"{path}[{index}]")


def num_samples(piece: Any) -> int:
    """Return the first dimension of the tensors of one of several pieces."""
    return next(tensor.shape[0] for _, tensor in _tensors(piece, "batch") if tensor.ndim > 0)


def weighted_mean(values: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """Return the mean of values of micro-batches over their samples, in float32."""
    stacked = torch.stack([value.float() for value in values])
    if len(set(sizes)) == 1:
        return stacked.mean(0)
    mean: torch.Tensor = torch.tensordot(torch.tensor(sizes, device=stacked.device) / sum(sizes), stacked, dims=1)
    return mean


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
    """Return a key that differs for batches that lead to other shapes inside a model."""
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
