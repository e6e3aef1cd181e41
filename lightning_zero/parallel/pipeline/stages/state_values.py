"""Values of attributes: marks that tell changes in place, fingerprints that ranks compare, packing for messages.

Note [Objects of the program]
    Of an object whose class is the program's own, or a namespace, the attributes are looked at as the items of a
    dictionary are. They are sent only if the object is the same as before the batch, and the other stage fills them
    into its own one. Objects inside of containers and of objects are marked, and not sent.
"""

from __future__ import annotations

import sys
import zlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.parallel.module_state import fields_of, set_field, version_of
from lightning_zero.parallel.pipeline.stages.sources import is_fake

__all__ = [
    "MOST_BYTES",
    "Appended",
    "Fields",
    "Mark",
    "Unknown",
    "assign",
    "differ",
    "fingerprint",
    "has_fake",
    "mark",
    "packed_change",
    "take_fields",
    "unpacked",
]

MOST_BYTES = 2**16  # of a tensor that is sent
_MOST_NUMBERS = 2**16  # of a list of numbers that is sent
_MOST_ITEMS = 256  # of another container
_DEPTH = 4  # of containers in containers
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_NUMBERS = (bool, int, float, complex, str, type(None))


class Mark(Enum):
    """Replaces a value that is not sent."""

    MISSING = "missing"  # there is none
    UNSENT = "unsent"  # a graph, an object that is new, or too large


@dataclass(frozen=True)
class _Sent:
    """A tensor on its way, and whether it lies on the device of its rank."""

    tensor: Tensor
    is_on_device: bool


@dataclass(frozen=True)
class Appended:
    """New items of a list.

    Attributes:
        start: Index of the first one; those before are as they were before the batch.
        items: As they are sent.
    """

    start: int
    items: list[Any]


@dataclass(frozen=True)
class Fields:
    """Attributes of an object of the program.

    Attributes:
        cls: Name of its class.
        values: As they are sent; ``MISSING`` for one that was deleted.
    """

    cls: str
    values: dict[str, Any]


class Unknown:
    """A value of which a mark tells no more than which one it is; kept alive, so that no other one has its ``id``."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unknown) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


# -- Marks and fingerprints --------------------------------------------------------------------------------------------


def mark(value: Any, depth: int = _DEPTH) -> Any:
    """Return a cheap mark that is another one when a value has changed in place."""
    if isinstance(value, _NUMBERS):
        return type(value), value
    if isinstance(value, nn.Parameter):
        return Unknown(value), 0
    if isinstance(value, Tensor):
        return Unknown(value), version_of(value)
    if _is_array(value):
        is_read = value.nbytes <= MOST_BYTES and not value.dtype.hasobject
        return Unknown(value), zlib.crc32(value.tobytes()) if is_read else 0
    entries = _entries(value) if depth else None
    if entries is not None and len(entries) <= _MOST_ITEMS:
        return Unknown(value), tuple((key, mark(item, depth - 1)) for key, item in entries)
    return Unknown(value), len(value) if isinstance(value, _CONTAINERS) else 0


def _num_kept(before: Any, value: list[Any]) -> int:
    """Return how many items a list had if it has more now, and 0 if some are not the same.

    Of a long list (see ``mark``) the earlier ones are taken for the same.
    """
    kept = before[1]
    number = kept if isinstance(kept, int) else len(kept)
    if len(value) <= number:
        return 0
    if isinstance(kept, int):
        return number
    now = tuple((index, mark(one, _DEPTH - 1)) for index, one in enumerate(value[:number]))
    return number if now == kept else 0


def fingerprint(value: Any, depth: int = _DEPTH) -> Any:
    """Return a mark that two ranks have alike where their values are; None for a value of another stage."""
    if has_fake(value):
        return None
    if isinstance(value, (Mark, *_NUMBERS)):
        return type(value).__name__, repr(value)
    if isinstance(value, Tensor):
        is_read = value.layout is torch.strided and not value.is_quantized and not isinstance(value, nn.Parameter)
        if not is_read:
            return "tensor", tuple(value.shape)
        return tuple(value.shape), value.dtype, _digest(value.detach().contiguous().reshape(-1).view(torch.uint8))
    if _is_array(value):
        return value.shape, str(value.dtype), 0 if value.dtype.hasobject else zlib.crc32(value.tobytes())
    entries = _entries(value) if depth else None
    if entries is not None:
        return _kind(value), tuple((repr(key), fingerprint(item, depth - 1)) for key, item in entries)
    return (type(value).__name__,)


def _kind(value: Any) -> str:
    """Return the class of a container as it arrives; of an object its own."""
    if isinstance(value, dict):
        return "dict"
    if isinstance(value, (tuple, *_CONTAINERS)):
        return "tuple" if type(value) is tuple else "list"
    return type(value).__name__


def _digest(values: Tensor) -> tuple[int, int]:
    """Return a checksum of bytes; that of large tensors is computed on their device."""
    num_added = len(values) // 8 * 8 if len(values) > MOST_BYTES else 0
    total = int(values[:num_added].clone().view(torch.int64).sum())
    return total, zlib.crc32(values[num_added:].cpu().numpy().tobytes())


def differ(one: Any, other: Any) -> bool:
    """Say whether two fingerprints are those of different values."""
    return one is not None and other is not None and one != other


def has_fake(value: Any, depth: int = _DEPTH) -> bool:
    """Say whether a value is one of another stage, or holds one."""
    if is_fake(value):
        return True
    if isinstance(value, (Tensor, *_NUMBERS)) or not depth:
        return False
    items = value if isinstance(value, _CONTAINERS) else fields_of(value)
    return items is not None and any(
        has_fake(item, depth - 1) for item in (items.values() if isinstance(items, dict) else items)
    )


def _entries(value: Any) -> list[tuple[Any, Any]] | None:
    """Return keys and items of a container, or of an object of the program; None of anything else.

    Items of sets are in an order of their own.
    """
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (set, frozenset)):
        return list(enumerate(sorted(value, key=repr)))
    if isinstance(value, _CONTAINERS):
        return list(enumerate(value)) if type(value) in (list, tuple, deque) else None
    fields = fields_of(value)
    return None if fields is None else list(fields.items())


def _is_array(value: Any) -> bool:
    """Say whether a value is an array of NumPy, which the program may not have."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


# -- Values on their way -----------------------------------------------------------------------------------------------


def packed_change(value: Any, before: Any, device: torch.device, *, is_in_place: bool) -> Any:
    """Return a value, or the items appended to it, as it is sent.

    Args:
        value: The value now.
        before: Its mark before the batch.
        device: Of this rank.
        is_in_place: It is the same object as before the batch.
    """
    if has_fake(value):
        return Mark.UNSENT
    fields = None if isinstance(value, (Tensor, *_NUMBERS, *_CONTAINERS)) else fields_of(value)
    if fields is not None:
        return _packed_fields(value, fields, before, device) if is_in_place else Mark.UNSENT
    start = _num_kept(before, value) if is_in_place and type(value) is list else 0
    if not is_in_place and isinstance(value, _CONTAINERS) and type(value) not in (list, tuple, dict):
        return Mark.UNSENT  # containers of other classes are filled, not made
    packed = _packed(value[start:] if start else value, device)
    return Appended(start, packed) if start and packed is not Mark.UNSENT else packed


def _packed_fields(value: Any, fields: Mapping[str, Any], before: Any, device: torch.device) -> Any:
    """Return the attributes of an object: all that can be sent, and none if another one has changed."""
    was = dict(before[1]) if isinstance(before[1], tuple) else {}
    packed: dict[str, Any] = dict.fromkeys(was.keys() - fields.keys(), Mark.MISSING)
    for name, item in fields.items():
        one = _packed(item, device, _DEPTH - 1)
        if one is not Mark.UNSENT:
            packed[name] = one
        elif name not in was or was[name] != mark(item, _DEPTH - 1):
            return Mark.UNSENT
    return Fields(type(value).__name__, packed)


def _packed(value: Any, device: torch.device, depth: int = _DEPTH) -> Any:
    """Return a value as it is sent."""
    if isinstance(value, (Mark, *_NUMBERS)):
        return value
    if isinstance(value, Tensor):
        if (
            isinstance(value, nn.Parameter)
            or value.requires_grad
            or value.nbytes > MOST_BYTES
            or value.layout is not torch.strided
        ):
            return Mark.UNSENT
        return _Sent(value.detach().to("cpu", copy=True), value.device == device)
    if _is_array(value):
        return value.copy() if value.nbytes <= MOST_BYTES and not value.dtype.hasobject else Mark.UNSENT
    is_whole = depth == _DEPTH or type(value) in (list, tuple, dict)  # others keep their class: they are filled
    items = _entries(value) if isinstance(value, _CONTAINERS) and is_whole and depth else None
    if items is None or (len(items) > _MOST_ITEMS and not _are_numbers(value)):
        return Mark.UNSENT
    packed = [_packed(item, device, depth - 1) for _, item in items]
    if any(item is Mark.UNSENT for item in packed):
        return Mark.UNSENT
    if isinstance(value, dict):
        is_known = all(isinstance(key, _NUMBERS) for key, _ in items)
        return dict(zip([key for key, _ in items], packed, strict=True)) if is_known else Mark.UNSENT
    return tuple(packed) if type(value) is tuple else packed


def _are_numbers(value: Any) -> bool:
    """Say whether a long list has numbers alone, which are sent."""
    return (
        type(value) in (list, tuple) and len(value) <= _MOST_NUMBERS and all(isinstance(one, _NUMBERS) for one in value)
    )


def unpacked(value: Any, device: torch.device) -> Any:
    """Return a value that was sent."""
    if isinstance(value, _Sent):
        return value.tensor.to(device) if value.is_on_device else value.tensor
    if isinstance(value, Fields):
        return Fields(value.cls, {name: unpacked(item, device) for name, item in value.values.items()})
    if isinstance(value, dict):
        return {key: unpacked(item, device) for key, item in value.items()}
    return type(value)([unpacked(one, device) for one in value]) if isinstance(value, (list, tuple)) else value


def take_fields(old: Any, new: Fields) -> bool | None:
    """Give an object the attributes of another stage's; say whether it had others. None if it is of another class."""
    fields = None if isinstance(old, (Tensor, *_NUMBERS, *_CONTAINERS)) else fields_of(old)
    if fields is None or type(old).__name__ != new.cls:
        return None
    differs = False
    for name, value in new.values.items():
        mine = fields.get(name, Mark.MISSING)
        if differ(fingerprint(mine), fingerprint(value)) or has_fake(mine):
            set_field(old, name, value, is_deleted=value is Mark.MISSING)
            differs = True
    return differs


def assign(space: dict[str, Any], name: str, old: Any, new: Any, *, is_in_place: bool) -> None:
    """Bind a value, or write it into the old one."""
    if new is Mark.MISSING:
        space.pop(name, None)
    elif is_in_place and isinstance(old, Tensor) and isinstance(new, Tensor) and old.shape == new.shape:
        with torch.inference_mode(old.is_inference()), torch.no_grad():
            old.copy_(new)
    elif is_in_place and _is_array(old) and _is_array(new) and old.shape == new.shape:
        old[...] = new
    elif is_in_place and type(old) is type(new) is list:
        old[:] = new
    elif is_in_place and isinstance(old, deque) and type(new) is list:
        old.clear()
        old.extend(new)
    elif is_in_place and isinstance(old, (dict, set)) and type(new) in (dict, list):
        old.clear()
        old.update(new)
    else:
        space[name] = new
