"""Changed values of attributes on their way to other stages.

Note [One object stays one]
    An object that was there before the batch is sent with the place where it was: an attribute, and keys of containers
    and objects inside of it. The other stage finds its own object there, and fills it, so that everything which refers
    to this object sees the new content: another name, a view, an object of the program. An object without such a place
    is made, once per message. Objects of the program are filled, and never made.
"""

from __future__ import annotations

import datetime
import pickle
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.parallel.module_state import fields_of, set_field
from lightning_zero.parallel.pipeline.stages.state_marks import (
    CONTAINERS,
    DEPTH,
    MOST_BYTES,
    MOST_ITEMS,
    NUMBERS,
    Items,
    Mark,
    Own,
    Unknown,
    dict_of,
    differ,
    entries_of,
    fingerprint,
    has_fake,
    is_array,
    mark,
)

__all__ = ["Before", "Node", "Packing", "Taking", "Untaken"]

Before = Mapping[tuple[str, str], tuple[Any, Any]]  # attributes before a batch: their values and marks
Place = tuple[tuple[str, str], tuple[Any, ...]]  # an attribute, and keys of containers and objects inside of it

_MOST_NUMBERS = 2**16  # of a container of numbers that is sent
_ATOMS = (
    Enum, bytes, Decimal, Fraction, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, PurePath, range,
    torch.dtype, torch.device,
)  # fmt: skip


class Untaken(Exception):
    """A value that another stage has sent cannot be made here."""


@dataclass(frozen=True)
class _Atom:
    """A value that never changes, pickled: its class may be one that other ranks do not find."""

    pickled: bytes


@dataclass(frozen=True, eq=False)
class Node:
    """An object on its way. One that is sent under several names is one object of these.

    Attributes:
        place: Where it was before the batch; None for a new one.
        kind: Name of its class.
        items: A tensor, an array, or items as they are sent; None if it has not changed.
        start: Of a list: index of the first of the items; those before are as they were before the batch.
        fields: Attributes of an object of the program, or of a container of a class of its own, as they are sent;
            ``MISSING`` for one that was deleted.
        made_by: What a container is made by if there is none: see ``_made_by``; None if it is only filled.
        is_on_device: A tensor lies on the device of its rank.
    """

    place: Place | None
    kind: str
    items: Any = None
    start: int = 0
    fields: dict[str, Any] | None = None
    made_by: Any = None
    is_on_device: bool = False


class Packing:
    """Packs the values of one batch for other stages.

    Args:
        before: The attributes before the batch.
        device: Of this rank.
    """

    def __init__(self, before: Before, device: torch.device) -> None:
        self._before = before
        self._device = device
        self._known: dict[int, tuple[Place, Any]] | None = None  # by `id`: places and marks before the batch
        self._nodes: dict[int, tuple[Any, Node]] = {}  # that were made, by `id` of their values, which they keep alive

    def pack(self, key: tuple[str, str], value: Any) -> Any:
        """Return the value of an attribute as it is sent."""
        if has_fake(value):
            return Mark.UNSENT
        return self._packed(value, DEPTH)

    def unchanged(self, key: tuple[str, str], value: Any) -> Any:
        """Return the value of an attribute that is as it was before the batch, as it is sent."""
        is_object = not isinstance(value, (Mark, *NUMBERS, *_ATOMS))
        return Node((key, ()), type(value).__name__) if is_object else self._packed(value, DEPTH)

    def _packed(self, value: Any, depth: int) -> Any:
        if isinstance(value, _ATOMS) and not isinstance(value, Mark):
            return _pickled(value)
        if isinstance(value, (Mark, *NUMBERS)) or (is_array(value) and not hasattr(value, "__setitem__")):
            return value
        if id(value) not in self._nodes:
            node = self._node(value, depth)
            if node is None:
                return Mark.UNSENT
            self._nodes[id(value)] = value, node
        return self._nodes[id(value)][1]

    def _node(self, value: Any, depth: int) -> Node | None:
        if self._known is None:
            self._known = _places(self._before)
        place, was = self._known.get(id(value), (None, None))
        is_leaf = isinstance(value, Tensor) or is_array(value)
        node = self._of_leaf(value, place) if is_leaf else self._of_container(value, place, was, depth)
        if node is None and place is not None and mark(value, DEPTH - len(place[1])) == was:
            return Node(place, type(value).__name__)
        return node

    def _of_leaf(self, value: Any, place: Place | None) -> Node | None:
        kind = type(value).__name__
        if value.nbytes > MOST_BYTES:
            return None
        if not isinstance(value, Tensor):
            return None if value.dtype.hasobject else Node(place, kind, value.copy())
        if isinstance(value, nn.Parameter) or value.requires_grad or value.layout is not torch.strided:
            return None
        return Node(place, kind, value.detach().to("cpu", copy=True), is_on_device=value.device == self._device)

    def _of_container(self, value: Any, place: Place | None, was: Any, depth: int) -> Node | None:
        found = entries_of(value) if depth else None
        made_by = _made_by(value)
        if found is None or (place is None and made_by is None):
            return None
        start = _num_kept(was, value, DEPTH - len(place[1])) if place is not None and type(value) is list else 0
        keys, items = found[0][start:], found[1][start:]
        if len(items) > MOST_ITEMS and not _are_numbers(items):
            return None
        packed = [self._packed(item, depth - 1) for item in items]
        if any(item is Mark.UNSENT for item in packed):
            return None
        is_object = not isinstance(value, CONTAINERS)
        owned = {key if is_object else key.name: item for key, item in zip(keys, packed, strict=True)
                 if is_object or isinstance(key, Own)}  # fmt: skip
        held = packed[: len(packed) - len(owned)]
        if isinstance(value, dict):
            keys = keys[: len(held)]
            if not all(isinstance(key, NUMBERS) and not isinstance(key, Enum) for key in keys):
                return None
            content: Any = dict(zip(keys, held, strict=True))
        else:
            content = None if is_object else held
        if is_object or owned:
            owned |= dict.fromkeys(_owned(was) - owned.keys(), Mark.MISSING)
        return Node(place, type(value).__name__, content, start, owned if is_object or owned else None, made_by)


def _places(before: Before) -> dict[int, tuple[Place, Any]]:
    """Return where objects were before a batch, and their marks; of several places the outermost one."""
    found: dict[int, tuple[Place, Any]] = {}
    inner: list[tuple[Place, Any]] = [((key, ()), was) for key, (_, was) in before.items()]
    while inner:
        outer, inner = inner, []
        for place, was in outer:
            if isinstance(was[0], Unknown):
                found.setdefault(id(was[0].value), (place, was))
                items = was[1] if isinstance(was[1], list) else []
                inner += [((place[0], (*place[1], key)), one) for key, one in items]
    return found


def _owned(was: Any) -> set[str]:
    """Return the names of the attributes that an object, or a container of a class of its own, had."""
    if was is None or not isinstance(was[1], list):
        return set()
    is_object = not isinstance(was[0].value, CONTAINERS)
    return {key if is_object else key.name for key, _ in was[1] if is_object or isinstance(key, Own)}


def _made_by(value: Any) -> Any:
    """Return how a container can be made: the pickled class of a tuple, the length at most of a deque; else ()."""
    if isinstance(value, tuple):
        packed = _pickled(type(value))
        return packed.pickled if isinstance(packed, _Atom) else None
    if type(value) is deque:
        return (value.maxlen,)
    return () if type(value) in (list, dict, set, frozenset) else None


def _pickled(value: Any) -> Any:
    try:
        return _Atom(pickle.dumps(value))
    except Exception:  # of a class that no other rank can import
        return Mark.UNSENT


def _are_numbers(items: Any) -> bool:
    """Say whether there are numbers alone, of which many are sent."""
    return len(items) <= _MOST_NUMBERS and all(issubclass(kind, NUMBERS) for kind in set(map(type, items)))


def _num_kept(was: Any, value: list[Any], depth: int) -> int:
    """Return how many items a list had if it has more now, and 0 if some are not the same."""
    kept = was[1]
    if isinstance(kept, Items):
        now = Items(range(len(value)), value, depth)
        return len(kept.items) if len(kept.items) < len(value) and kept.begins(now) else 0
    number = len(kept)
    if len(value) <= number:
        return 0
    return number if [(index, mark(one, depth - 1)) for index, one in enumerate(value[:number])] == kept else 0


class Taking:
    """Takes over the values that another stage has packed for one batch.

    Args:
        before: The attributes of this stage before the batch.
        stale: Attributes of which it has old values.
        device: Of this rank.
    """

    def __init__(self, before: Before, stale: set[tuple[str, str]], device: torch.device) -> None:
        self._before = before
        self._stale = stale
        self._device = device
        self._taken: dict[int, tuple[Node, Any, bool]] = {}  # by `id` of the node: the object, whether it has changed
        self._differs = False

    def take(self, sent: Any, old: Any) -> tuple[Any, bool]:
        """Return the object that an attribute is to have, and whether that is another one, or has changed.

        Raises:
            Untaken: It cannot be made here.
        """
        self._differs = False
        return self._of(sent, old), self._differs

    def _of(self, sent: Any, old: Any) -> Any:
        if not isinstance(sent, Node):
            new = pickle.loads(sent.pickled) if isinstance(sent, _Atom) else sent
            return self._unless_same(old, new)
        if id(sent) not in self._taken:
            before, self._differs = self._differs, False
            base = None if sent.place is None else self._found(sent)
            new = self._made(sent) if base is None else self._filled(base, sent)
            if base is None or isinstance(base, (tuple, frozenset)):  # this stage may have bound an equal one
                new = self._unless_same(old, new)
            self._taken[id(sent)] = sent, new, self._differs
            self._differs |= before
        _, new, has_changed = self._taken[id(sent)]
        self._differs |= has_changed or new is not old
        return new

    def _unless_same(self, old: Any, new: Any) -> Any:
        """Return the old object if it has the values of the new one."""
        if type(old) is type(new) and not has_fake(old) and not differ(fingerprint(old), fingerprint(new)):
            return old
        self._differs = True
        return new

    def _found(self, node: Node) -> Any:
        """Return the object that this stage had in a place before the batch; None if there is none of that kind."""
        assert node.place is not None
        key, path = node.place
        is_part = node.start > 0 or (node.items is None and node.fields is None)
        was = self._before.get(key, (None, None))[1] if not (is_part and key in self._stale) else None
        for step in path:
            inner = was[1] if was is not None and isinstance(was[1], list) else []
            was = next((one for name, one in inner if name == step), None)
        found = was[0].value if was is not None and isinstance(was[0], Unknown) else None
        is_there = found is not None and type(found).__name__ == node.kind
        if is_there and node.items is None and node.fields is None:
            is_there = mark(found, DEPTH - len(path)) == was
        if not is_there and (is_part or node.fields is not None):
            raise Untaken
        return found if is_there else None

    def _made(self, node: Node) -> Any:
        """Return a new object."""
        items = node.items
        if isinstance(items, Tensor):
            return items.to(self._device) if node.is_on_device else items
        if is_array(items):
            return items
        if node.made_by is None:
            raise Untaken
        if isinstance(items, dict):
            return dict(zip(items, self._new_items(items.values()), strict=True))
        held = self._new_items(items)
        if isinstance(node.made_by, bytes):
            cls = pickle.loads(node.made_by)
            return getattr(cls, "_make", cls)(held)
        made: Any = {"list": list, "set": set, "frozenset": frozenset, "deque": deque}[node.kind]
        return made(held, *node.made_by)

    def _new_items(self, items: Iterable[Any]) -> list[Any]:
        """Return the items of a container of which the whole is compared, and not item by item."""
        held = []
        for item in items:
            before = self._differs
            held.append(self._of(item, Mark.MISSING))
            if not isinstance(item, Node):
                self._differs = before
        return held

    def _filled(self, base: Any, node: Node) -> Any:
        """Give an object the content of another stage's; return it, or one to be bound in its place."""
        items = node.items
        fields = fields_of(base) or getattr(base, "__dict__", {})
        for name, field in (node.fields or {}).items():
            own = fields.get(name, Mark.MISSING)
            new = self._of(field, own)
            if new is not own:
                set_field(base, name, new, is_deleted=new is Mark.MISSING)
        if items is None:
            return base
        if isinstance(items, Tensor) or is_array(items):
            return self._written(base, node)
        if isinstance(base, (tuple, set, frozenset)):
            return self._refilled(base, node)
        if isinstance(items, dict):
            new = {key: self._of(item, dict.get(base, key, Mark.MISSING)) for key, item in items.items()}
            is_same = list(new) == list(base) and all(new[key] is base[key] for key in new)
            if not is_same:
                kind = dict_of(base)
                kind.clear(base)
                kind.update(base, new)
        else:
            held = list(base)
            if len(held) < node.start:
                raise Untaken
            was = held[node.start :]
            new = [self._of(item, was[index] if index < len(was) else Mark.MISSING) for index, item in enumerate(items)]
            is_same = len(new) == len(was) and all(one is two for one, two in zip(new, was, strict=True))
            if not is_same and isinstance(base, list):
                list.__setitem__(base, slice(node.start, None), new)
            elif not is_same:
                deque.clear(base)
                deque.extend(base, new)
        self._differs |= not is_same
        return base

    def _refilled(self, base: Any, node: Node) -> Any:
        """Return a tuple of other items, or write the items of a set."""
        held = list(base)
        if isinstance(base, tuple):
            if len(held) != len(node.items):
                return getattr(base, "_make", type(base))(self._new_items(node.items))
            new = [self._of(item, old) for item, old in zip(node.items, held, strict=True)]
            if all(one is two for one, two in zip(new, held, strict=True)):
                return base
            return getattr(base, "_make", type(base))(new)
        new = self._new_items(node.items)
        if not differ(fingerprint(base), fingerprint(set(new))):
            return base
        if isinstance(base, frozenset):
            return frozenset(new)
        self._differs = True
        set.clear(base)
        set.update(base, new)
        return base

    def _written(self, base: Any, node: Node) -> Any:
        """Write a tensor or an array; return a new one if the old one has another shape."""
        new = node.items
        if base.shape != new.shape or base.dtype != new.dtype:
            self._differs = True
            return self._made(node)
        if has_fake(base) or differ(fingerprint(base), fingerprint(new)):
            self._differs = True
            if isinstance(base, Tensor):
                with torch.inference_mode(base.is_inference()), torch.no_grad():
                    base.copy_(new)
            else:
                base[...] = new
        return base
