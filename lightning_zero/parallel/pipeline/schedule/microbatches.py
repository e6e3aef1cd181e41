"""A batch in pieces, and whether two ranks have the same one.

Note [Steps that change their batch]
    A step may write into its micro-batch, and runs on it several times: to be described, to be surveyed, once per chunk
    of a stage. The last run on a rank has the micro-batch itself, so that hooks find in the batch what the step has
    written there, and all others have copies. A micro-batch shares the memory of the batch and not its version counter,
    because autograd would take a write into one of them for a write into all.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
import zlib
from collections import UserDict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from lightning_zero.parallel.module_state import assign_slots, copies_of, is_of_the_program, slots_of

__all__ = [
    "batch_digest",
    "copy_of",
    "leaves_of",
    "list_of_samples",
    "num_samples",
    "rebuilt",
    "shapes_of",
    "split_batch",
    "weighted_mean",
]

_DEPTH = 3  # of objects in objects that are copied
_PERIOD = 8191  # weights of a digest; a prime, so that samples of usual sizes have different ones
_ROWS = 512  # of as many elements that are summed at once: 32 MiB of int64


def split_batch(batch: Any, number: int) -> list[Any]:
    """Cut a batch into pieces along the first dimension of its tensors: ``number`` of them, or as many as samples.

    Sizes are those of ``torch.tensor_split``: the first ones have one sample more where ``number`` does not divide.
    Lists and NumPy arrays as long as the batch that hold no tensors are cut as well; of other values every piece has a
    copy.

    Raises:
        ValueError: The tensors have no first dimension, or different ones; one of them cannot be cut, or lies in an
            object that is not cut.
    """
    if number == 1:
        return [batch]
    size = _size_of(batch)
    _require_cut(batch, size)
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


def _require_cut(batch: Any, size: int) -> None:
    for path, tensor in _tensors(batch, "batch"):
        if tensor.layout is not torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise ValueError(
                f"A pipeline cuts batches along the first dimension of their tensors, and `{path}` is a tensor of the"
                f" layout {kind}, which PyTorch does not cut without a copy. Let `collate_fn` return a dense (padded)"
                " tensor, or use `Pipeline(microbatches=1)`."
            )
    for path, tensor in _hidden_tensors(batch, "batch"):
        if tensor.ndim > 0 and tensor.shape[0] == size:
            raise ValueError(
                f"A pipeline cuts batches along the first dimension of their tensors, and `{path}`, which is as long as"
                f" the batch ({size} samples), lies in an object that is not cut: every micro-batch would have all"
                " samples. Let `collate_fn` put it into a dictionary, list, tuple, named tuple or dataclass, or use"
                " `Pipeline(microbatches=1)`."
            )


def _hidden_tensors(value: Any, path: str, depth: int = _DEPTH) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors in objects, sets and deques, which are not cut, with their paths."""
    for name, leaf in leaves_of(value, path):
        if depth and not isinstance(leaf, (torch.Tensor, nn.Module, Dataset)):
            for key, one in _uncut_in(leaf).items():
                yield from _tensors(one, name + key)
                yield from _hidden_tensors(one, name + key, depth - 1)


def _uncut_in(leaf: Any) -> dict[str, Any]:
    """Return the values that are not cut in a set, a deque, an object, or the rest of a dataclass, by path."""
    if isinstance(leaf, (set, frozenset, deque)):
        return {f"[{index}]": one for index, one in enumerate(leaf)}
    if isinstance(leaf, _Rest):
        return {f".{key}": one for key, one in leaf.attributes.items()}
    if not _is_object(leaf):
        return {}
    return {f".{key}": one for key, one in {**getattr(leaf, "__dict__", {}), **slots_of(leaf)}.items()}


@dataclasses.dataclass(frozen=True)
class _Rest:
    """The attributes of a dataclass that are no fields."""

    attributes: dict[str, Any]


def _rest_of(value: Any) -> dict[str, Any]:
    """Return the attributes of a dataclass that are no fields."""
    if not dataclasses.is_dataclass(value) or isinstance(value, (type, Mapping, list, tuple)):
        return {}
    fields = {field.name for field in dataclasses.fields(value)}
    return {key: one for key, one in getattr(value, "__dict__", {}).items() if key not in fields}


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
        return _part(value, start, length)
    if _is_array(value) and value.ndim > 0 and len(value) == size:
        return value[start : start + length]
    if isinstance(value, (list, tuple)) and len(value) == size and not any(True for _ in _tensors(value, "")):
        piece = value[start : start + length]
        return piece if type(value) in (list, tuple) else type(value)(piece)
    if not _is_container(value):
        return copy_of(value)
    result = rebuilt(value, same)
    for key, one in _rest_of(value).items():
        object.__setattr__(result, key, copy_of(one))
    return result


def _part(tensor: torch.Tensor, start: int, length: int) -> torch.Tensor:
    """Return samples of a tensor, with a version counter of their own (see the note)."""
    part = tensor.narrow(0, start, length) if tensor.ndim > 0 else tensor
    if part.requires_grad:
        return part
    is_shared = tensor.ndim == 0 or (tensor.layout is torch.strided and tensor.stride(0) == 0)
    return part.clone() if is_shared else part.data


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def copy_of(piece: Any) -> Any:
    """Return a micro-batch for a run that leaves no trace in this one.

    Containers, tensors, NumPy arrays and objects of the program are copies; tensors that share memory have copies that
    do. Modules, datasets, and objects that cannot be copied are the same.
    """
    tensors: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        return tensors.setdefault(id(tensor), tensor)

    _Copier(note).copy(piece)
    copies = copies_of({key: tensor for key, tensor in tensors.items() if not tensor.requires_grad})
    copies.update({key: tensor.clone() for key, tensor in tensors.items() if tensor.requires_grad})  # with their graph
    return _Copier(lambda tensor: copies[id(tensor)]).copy(piece)


class _Copier:
    """Copies a value with all that it holds.

    Args:
        of_tensor: Returns the copy of a tensor.
    """

    def __init__(self, of_tensor: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._of_tensor = of_tensor
        self._copies: dict[int, Any] = {}  # by ``id`` of the value
        self._depth = 0

    def copy(self, value: Any) -> Any:
        if isinstance(value, (str, bytes, bool, int, float, type(None), nn.Module, Dataset)):
            return value
        if id(value) not in self._copies:
            self._copies[id(value)] = self._copied(value)
        return self._copies[id(value)]

    def _copied(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value)
        if _is_array(value):
            return value.copy()
        if isinstance(value, bytearray):
            return copy.copy(value)
        if isinstance(value, frozenset):
            return type(value)(map(self.copy, value))
        if isinstance(value, (set, deque)):
            return self._items(value)
        if _is_object(value):
            return self._object(value)
        result = rebuilt(value, self.copy)
        for key, one in _rest_of(value).items():
            object.__setattr__(result, key, self.copy(one))
        return result

    def _items(self, value: Any) -> Any:
        result = self._copies[id(value)] = copy.copy(value)
        items = [self.copy(item) for item in value]
        result.clear()
        (result.update if isinstance(result, set) else result.extend)(items)
        return result

    def _object(self, value: Any) -> Any:
        try:
            result = copy.copy(value)
        except Exception:  # an object may refuse it with any error
            return value
        if result is value or self._depth == _DEPTH:
            return value
        self._copies[id(value)] = result  # it may hold itself
        self._depth += 1
        if hasattr(value, "__dict__"):
            vars(result).update({key: self.copy(item) for key, item in vars(value).items()})
        assign_slots(result, {key: self.copy(item) for key, item in slots_of(value).items()})
        self._depth -= 1
        return result


def _is_object(value: Any) -> bool:
    """Say whether a value is an object of the program, and none of the containers."""
    return not _is_container(value) and (is_of_the_program(value) or bool(slots_of(value)))


def _is_container(value: Any) -> bool:
    """Say whether ``rebuilt`` makes a new one."""
    is_record = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return is_record or isinstance(value, (dict, list, tuple, UserDict))


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a container with changed items; other values as they are."""
    result: Any
    if isinstance(value, UserDict):
        result = copy.copy(value)
        result.data = {key: change(item) for key, item in value.data.items()}
        return result
    if isinstance(value, dict):
        result = copy.copy(value)
        for key, item in value.items():
            result[key] = change(item)  # `update` of an output of transformers is an error
        if getattr(value, "__dict__", None) is value:  # items are attributes
            result.__dict__ = result
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
        (path, tuple(value.shape), str(value.dtype)) if hasattr(value, "dtype") else (path, repr(value))
        for path, value in leaves_of(batch, "batch")
        if isinstance(value, (torch.Tensor, int, float, bool)) or _is_array(value)
    )


def batch_digest(batch: Any) -> int:
    """Return a number that differs where the values of batches do, almost certainly: int64."""
    leaves = [leaf for _, leaf in leaves_of(batch, "batch")]
    tensors = [one.contiguous() for leaf in leaves if isinstance(leaf, torch.Tensor) for one in _parts(leaf.detach())]
    digest = 0
    for array in filter(_is_array, leaves):
        digest = zlib.crc32(str(array.tolist()).encode() if array.dtype.hasobject else array.tobytes(), digest)
    for tensor in tensors:
        if tensor.device.type == "cpu":
            digest = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().tobytes(), digest)
    sums = [_weighted_sum(tensor) for tensor in tensors if tensor.device.type != "cpu"]
    return zlib.crc32(str(torch.stack(sums).tolist()).encode(), digest) if sums else digest  # the host waits once


def _parts(tensor: Any) -> tuple[torch.Tensor, ...]:
    """Return the strided tensors that a tensor is made of."""
    if tensor.is_nested:
        return (tensor.values(), tensor.offsets()) if tensor.layout is torch.jagged else tuple(tensor.unbind())
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return tensor.indices(), tensor.values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def _weighted_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a number made of a tensor's bytes, weighted by their places: () int64, on its device.

    Needs memory for ``_PERIOD * _ROWS`` int64 beside the tensor, whatever its size.
    """
    flat = tensor.reshape(-1).view(torch.uint8)
    if flat.numel() % 4 == 0:
        flat = (flat.clone() if flat.storage_offset() % 4 else flat).view(torch.int32)
    columns = torch.zeros(_PERIOD, dtype=torch.int64, device=flat.device)  # sums over elements of one weight
    for piece in torch.split(flat, _PERIOD * _ROWS):
        rows = piece.numel() // _PERIOD
        columns += piece[: rows * _PERIOD].view(rows, _PERIOD).sum(0, dtype=torch.int64)
        columns[: piece.numel() - rows * _PERIOD] += piece[rows * _PERIOD :]
    return (columns * torch.arange(1, _PERIOD + 1, device=flat.device)).sum()


def _tensors(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    for name, leaf in leaves_of(value, path):
        if isinstance(leaf, torch.Tensor):
            yield name, leaf


def leaves_of(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the values in containers, with their paths."""
    if isinstance(value, (Mapping, UserDict)):
        for key, item in value.items():
            yield from leaves_of(item, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from leaves_of(item, f"{path}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, (type, _Rest)):
        for field in dataclasses.fields(value):
            yield from leaves_of(getattr(value, field.name), f"{path}.{field.name}")
        if rest := _rest_of(value):
            yield path, _Rest(rest)
    else:
        yield path, value
