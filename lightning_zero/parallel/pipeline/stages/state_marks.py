"""Marks that tell whether a value has changed in place, and fingerprints that ranks compare.

Note [Marks]
    A mark keeps the objects that it tells apart alive, so that no other one gets their ``id``. Tensors and arrays are
    told by their bytes, because PyTorch does not count writes through ``tensor.data``. The items of a long container
    are told by which objects they are, and by their own marks as far as these are not plain numbers.
"""

from __future__ import annotations

import io
import pickle
import sys
import uuid
import zlib
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.parallel.module_state import fields_of, version_of
from lightning_zero.parallel.pipeline.stages.sources import is_fake

__all__ = [
    "CONTAINERS",
    "DEPTH",
    "MOST_BYTES",
    "MOST_ITEMS",
    "NUMBERS",
    "Items",
    "Mark",
    "Own",
    "Unknown",
    "dict_of",
    "differ",
    "entries_of",
    "fingerprint",
    "has_fake",
    "is_array",
    "mark",
]

MOST_BYTES = 2**16  # of a tensor that is sent
MOST_ITEMS = 256  # of a container that is sent and has other items than numbers
DEPTH = 4  # of containers in containers
CONTAINERS = (list, tuple, dict, set, frozenset, deque)
NUMBERS = (bool, int, float, complex, str, type(None))
_MOST_COPIED = 2**26  # bytes of a tensor or an array that is told by its bytes
_MOST_WALKED = 2**12  # items of a long container that have marks of their own


class Mark(Enum):
    """Replaces a value that is not sent."""

    MISSING = "missing"  # there is none
    UNSENT = "unsent"  # a graph, an object that is new, or too large


@dataclass(frozen=True)
class Own:
    """The name of an attribute of a container, which a class of the program has."""

    name: str


class Unknown:
    """A value of which a mark tells no more than which one it is; kept alive, so that no other one has its ``id``."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unknown) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class _Written:
    """The values of a tensor.

    Args:
        tensor: The tensor.
        is_copied: Its values may change while this is kept.
    """

    def __init__(self, tensor: Tensor, *, is_copied: bool) -> None:
        self._version = version_of(tensor)
        self._is_read = (
            not is_fake(tensor)
            and tensor.layout is torch.strided
            and not (tensor.requires_grad or tensor.is_quantized or tensor.is_meta)
            and tensor.nbytes <= _MOST_COPIED
        )
        self._values: Tensor | None = None
        if self._is_read:
            self._values = tensor.detach().clone() if is_copied else tensor.detach()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Written) or self._version != other._version:
            return False
        one, two = self._values, other._values
        if one is None or two is None:
            return one is two
        if one.dtype != two.dtype or one.device != two.device:
            return False
        return torch.equal(_bits(one), _bits(two))

    __hash__ = None  # type: ignore[assignment]


class Items:
    """The items of a long container.

    Args:
        keys: Of the items.
        items: In their order.
        depth: Of containers inside of them.
    """

    def __init__(self, keys: Sequence[Any], items: Sequence[Any], depth: int) -> None:
        self.keys = keys
        self.items = items
        is_plain = all(issubclass(kind, NUMBERS) for kind in set(map(type, items)))
        self._marks = [] if is_plain else [mark(item, depth - 1) for item in items[:_MOST_WALKED]]

    def begins(self, other: Items) -> bool:
        """Say whether the items of another one, which has at least as many, begin with these."""
        number = len(self.items)
        return (
            all(one is two for one, two in zip(self.items, other.items, strict=False))
            and self.keys == other.keys[:number]
            and self._marks == other._marks[: min(number, _MOST_WALKED)]
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Items) and len(self.items) == len(other.items) and self.begins(other)

    __hash__ = None  # type: ignore[assignment]


# -- Marks -------------------------------------------------------------------------------------------------------------


def mark(value: Any, depth: int = DEPTH, *, is_kept: bool = False) -> Any:
    """Return a mark that is another one when a value has changed in place.

    Args:
        value: The value.
        depth: Of containers and objects that are looked into.
        is_kept: The value may change while the mark is kept, which costs a copy of tensors.
    """
    if isinstance(value, NUMBERS):
        return type(value), value
    if isinstance(value, nn.Parameter):
        return Unknown(value), 0
    if isinstance(value, Tensor):
        return Unknown(value), _Written(value, is_copied=is_kept)
    if is_array(value) and not value.dtype.hasobject:
        is_read = value.nbytes <= _MOST_COPIED
        return Unknown(value), (value.shape, str(value.dtype), value.tobytes() if is_read else b"")
    found = entries_of(value, in_order=False) if depth else None
    if found is None:
        return Unknown(value), len(value) if isinstance(value, CONTAINERS) else 0
    keys, items = found
    if len(items) > MOST_ITEMS:
        return Unknown(value), Items(keys, items, depth)
    return Unknown(value), [
        (key, mark(item, depth - 1, is_kept=is_kept)) for key, item in zip(keys, items, strict=True)
    ]


def _bits(tensor: Tensor) -> Tensor:
    """Return a tensor as integers, of which NaN equal themselves."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point():
        return tensor
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.resolve_neg().view(kinds[tensor.element_size()])


def entries_of(value: Any, *, in_order: bool = True) -> tuple[Sequence[Any], Sequence[Any]] | None:
    """Return keys and items of a container, or of an object of the program; None of anything else.

    Attributes of containers of other classes are behind their items.

    Args:
        value: The value.
        in_order: Items of sets are in an order that all ranks have, not in the set's own.
    """
    if not isinstance(value, CONTAINERS):
        if is_array(value) and value.dtype.hasobject:
            items = value.reshape(-1).tolist()
            return range(len(items)), items
        fields = fields_of(value)
        return None if fields is None else (tuple(fields), tuple(fields.values()))
    if isinstance(value, dict):
        keys: Sequence[Any] = tuple(dict_of(value).keys(value))
        items = tuple(dict_of(value).values(value))
    else:
        kind: Any = next(kind for kind in CONTAINERS if isinstance(value, kind))
        items = tuple(kind.__iter__(value))
        if in_order and kind in (set, frozenset):
            items = tuple(sorted(items, key=repr))
        keys = range(len(items))
    own = getattr(value, "__dict__", None)
    return (keys, items) if not own else ((*keys, *map(Own, own)), (*items, *own.values()))


def dict_of(value: dict[Any, Any]) -> Any:
    """Return the class whose methods change a dictionary, also if its own class has others."""
    return OrderedDict if isinstance(value, OrderedDict) else dict


def is_array(value: Any) -> bool:
    """Say whether a value is an array of NumPy, which the program may not have."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


def has_fake(value: Any, depth: int = DEPTH) -> bool:
    """Say whether a value is one of another stage, or holds one."""
    if is_fake(value):
        return True
    if isinstance(value, (Tensor, *NUMBERS)) or not depth:
        return False
    found = entries_of(value, in_order=False)
    return found is not None and any(has_fake(item, depth - 1) for item in found[1])


# -- Fingerprints ------------------------------------------------------------------------------------------------------


def fingerprint(value: Any, depth: int = DEPTH) -> Any:
    """Return a mark that two ranks have alike where their values are; None for a value of another stage.

    An object that cannot be told has a fingerprint that no other one has.
    """
    if has_fake(value):
        return None
    if isinstance(value, (Mark, *NUMBERS)):
        return type(value).__name__, repr(value)
    if isinstance(value, Enum):
        return type(value).__qualname__, value.name
    if isinstance(value, Tensor):
        is_read = value.layout is torch.strided and not value.is_quantized and not isinstance(value, nn.Parameter)
        if not is_read:
            return "tensor", tuple(value.shape)
        return tuple(value.shape), value.dtype, _digest(value.detach().contiguous().reshape(-1).view(torch.uint8))
    if is_array(value) and not value.dtype.hasobject:
        return value.shape, str(value.dtype), zlib.crc32(value.tobytes())
    found = entries_of(value) if depth else None
    if found is None:
        return _fingerprint_of_object(value)
    return _kind(value), tuple((repr(key), fingerprint(item, depth - 1)) for key, item in zip(*found, strict=True))


def _kind(value: Any) -> str:
    """Return the class of a container as it arrives; of an object its own."""
    if isinstance(value, dict):
        return "dict"
    if isinstance(value, (tuple, *CONTAINERS)):
        return "tuple" if isinstance(value, tuple) else "list"
    return type(value).__name__


def _fingerprint_of_object(value: Any) -> Any:
    """Return the fingerprint of an object of a library, from its pickle."""
    name = type(value).__qualname__
    if callable(value) or isinstance(value, (nn.Module, torch.Generator, ModuleType)):
        return (name,)
    file = _Limited()
    try:
        _Pickler(file, protocol=4).dump(value)
    except Exception:  # of the object's own code, too
        return name, uuid.uuid4().hex
    return name, zlib.crc32(file.getvalue())


class _Limited(io.BytesIO):
    """A file that refuses to be large."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > MOST_BYTES:
            raise ValueError("too large")
        return super().write(data)


class _Pickler(pickle.Pickler):
    """A pickler that takes fingerprints of tensors, whose pickles differ on ranks."""

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.nbytes > MOST_BYTES or is_fake(value):
                raise ValueError("too large")
            return repr(fingerprint(value))
        return None


def _digest(values: Tensor) -> tuple[int, int]:
    """Return a checksum of bytes; that of large tensors is computed on their device."""
    num_added = len(values) // 8 * 8 if len(values) > MOST_BYTES else 0
    total = int(values[:num_added].clone().view(torch.int64).sum())
    return total, zlib.crc32(values[num_added:].cpu().numpy().tobytes())


def differ(one: Any, other: Any) -> bool:
    """Say whether two fingerprints are those of different values."""
    return one is not None and other is not None and one != other
