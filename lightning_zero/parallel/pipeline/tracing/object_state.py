"""Numbers that a forward on fakes changes in objects of the program, and in modules that several stages share.

Note [Numbers without values of tensors]
    A forward on fakes changes numbers in objects as the forward itself does: it has no values of tensors, and no other
    stage would know of the change. So they are put back. What has become a fake stays one, so that code that reads it
    is refused (see ``escapes.py``).

Note [Counters that blocks share]
    A number in a module or object that blocks of several chunks hold goes from block to block without a pipeline, and
    here each stage changes its own. Where every block sets the same number, as a table that grows to the length of the
    sequence, that is as good. Where the change depends on the number before, it is not: such a forward changes the
    number again when it runs once more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from lightning_zero.parallel.module_state import OF_MODULES, fields_of, set_field
from lightning_zero.parallel.pipeline.stages.sources import is_fake
from lightning_zero.trees import tree_leaves

__all__ = ["ObjectState", "SharedNumbers", "held_leaves"]

_DEPTH = 3
_NUMBERS = (bool, int, float, complex, str)
_MISSING = object()


class ObjectState:
    """The attributes of objects of the program that a module holds, and the lists and dictionaries in them, as now."""

    def __init__(self, module: nn.Module) -> None:
        self._seen: dict[int, Any] = {}  # that are alive
        self._fields: list[tuple[Any, dict[str, Any]]] = []
        self._lists: list[tuple[Any, list[Any]]] = []
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._sets: list[tuple[set[Any], set[Any]]] = []
        for child in module.modules():
            for name, value in [*vars(child).items()]:
                if name not in OF_MODULES:
                    self._add(value, _DEPTH, is_inside=type(value) not in (list, dict))  # these are kept by others

    def _add(self, value: Any, depth: int, *, is_inside: bool = True) -> None:
        """Keep a value, and values that it holds."""
        if isinstance(value, (Tensor, nn.Module, *_NUMBERS, type(None))) or not depth or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        held: Iterable[Any] = ()
        if isinstance(value, dict):
            held = dict(value).values()
            if is_inside:
                self._dicts.append((value, dict(value)))
        elif isinstance(value, (list, deque)):
            held = list(value)
            if is_inside:
                self._lists.append((value, list(value)))
        elif isinstance(value, set):
            self._sets.append((value, set(value)))
        elif isinstance(value, tuple):
            held = value
        elif (fields := fields_of(value)) is not None:
            held = fields.values()
            self._fields.append((value, fields))
        for one in held:
            self._add(one, depth - 1)

    def put_back(self) -> list[tuple[Any, str, Any]]:
        """Put back all but fakes; return objects, names and numbers that had changed."""
        changed = []
        for one, old in self._fields:
            now = fields_of(one) or {}
            for name in now.keys() | old.keys():
                value, was = now.get(name, _MISSING), old.get(name, _MISSING)
                if value is was or _has_fake(value):
                    continue
                if isinstance(value, _NUMBERS) and value != was:
                    changed.append((one, name, value))
                set_field(one, name, was, is_deleted=was is _MISSING)
        for content, items in self._lists:
            if not _has_fake(list(content)) and not _are_same(content, items):
                content.clear()
                content.extend(items)
        for space, entries in self._dicts:
            if not _has_fake(dict(space)) and not _are_same([*space, *space.values()], [*entries, *entries.values()]):
                dict.clear(space)
                dict.update(space, entries)
        for found, members in self._sets:
            if found != members:
                found.clear()
                found.update(members)
        return changed


class SharedNumbers:
    """Numbers that a forward changes in modules and objects which modules of several chunks hold.

    Args:
        placed: The modules with a place, and the chunk of each.

    Attributes:
        changed: Objects or modules, names and numbers that the last forward has changed.
    """

    def __init__(self, placed: Iterable[tuple[nn.Module, int]]) -> None:
        self._placed = list(placed)
        self.changed: list[tuple[Any, str, Any]] = []

    def found(self) -> list[tuple[Any, str, Any]]:
        """Return those of the changed numbers whose object modules of several chunks hold."""
        if not self.changed:
            return []
        chunks = self._chunks()
        return [one for one in self.changed if len(chunks.get(id(one[0]), ())) > 1]

    def is_shared(self, module: nn.Module) -> bool:
        """Say whether modules of several chunks hold a module."""
        return len(self._chunks().get(id(module), ())) > 1

    def _chunks(self) -> dict[int, set[int]]:
        """Return the chunks whose modules hold an object, by ``id``."""
        chunks: dict[int, set[int]] = {}
        for module, chunk in self._placed:
            for key in {id(one) for one in _held(module)}:
                chunks.setdefault(key, set()).add(chunk)
        return chunks


def _held(module: nn.Module) -> Iterator[Any]:
    for child in module.modules():
        yield child
        for value in vars(child).values():
            yield from value.values() if isinstance(value, Mapping) else (value,)


def held_leaves(value: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """Yield the leaves of a value, and those in sets and objects of the program."""
    for leaf in tree_leaves(value):
        yield leaf
        held = sorted(leaf, key=repr) if isinstance(leaf, (set, frozenset)) else list((fields_of(leaf) or {}).values())
        if held and depth:
            yield from held_leaves(held, depth - 1)


def _has_fake(value: Any) -> bool:
    return any(map(is_fake, held_leaves(value)))


def _are_same(one: Iterable[Any], other: Iterable[Any]) -> bool:
    first, second = list(one), list(other)
    return len(first) == len(second) and all(mine is theirs for mine, theirs in zip(first, second, strict=True))
