"""Watches which attributes of modules the program reads, inside of steps and between them.

Note [Between steps]
    A value that the last stage has and could not send is an old one on the other stages. Hooks of the module and of
    callbacks run on all of them, and what they log is what rank 0 has. So such an attribute is watched until the
    program has assigned it, or the last stage has sent it: whoever reads it between two steps is refused.
"""

from __future__ import annotations

import dis
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torch import Tensor, nn

from lightning_zero.parallel.module_state import fields_of
from lightning_zero.parallel.pipeline.stages.subclasses import original_class, subclass_of

__all__ = ["AttributeReads", "Key", "Watch", "When"]

Key = tuple[str, str]  # name of a module and of its attribute or module buffer

_RESETS = frozenset({"clear", "copy_", "fill_", "zero_"})  # methods that overwrite all of the old value
_ADDS = frozenset({"__setitem__", "add", "append", "extend", "update"})  # methods of containers that read nothing
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_LOADS = ("LOAD_CONST", "LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_SMALL_INT")


class When(Enum):
    """Times of reads."""

    IN_STEP = "in a step"
    IN_BACKWARD = "in a backward"
    BETWEEN = "between two steps"


@dataclass
class Watch:
    """Attributes that are watched.

    Attributes:
        refused: Keys that must not be read.
        is_noting: Other reads are noted.
        is_backward: A backward reads them.
        seen: Keys that were read before they were written.
        written: Keys that were written.
        touched: Keys that were read or written in any way.
        refusal: The error of a read that the program may have caught.
    """

    refused: Collection[Key]
    is_noting: bool
    is_backward: bool = False
    seen: set[Key] = field(default_factory=set)
    written: set[Key] = field(default_factory=set)
    touched: set[Key] = field(default_factory=set)
    refusal: Exception | None = None


class AttributeReads:
    """Lets modules tell which of their attributes are read.

    Args:
        modules: By name.
        noted: Names of those whose reads are noted.
        ignored: Names of attributes that are not watched.
        refuse: Returns the error of a read of a key at a time.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        noted: Collection[str],
        ignored: Collection[str],
        refuse: Callable[[Key, When], Exception],
    ) -> None:
        self._modules = modules
        self._names = {id(child): name for name, child in modules.items()}
        self._noted = noted
        self._ignored = ignored
        self._refuse = refuse
        self._classes: dict[type[nn.Module], type[nn.Module]] = {}
        self._watch: Watch | None = None
        self._between: list[nn.Module] = []  # modules that are watched between steps
        for child in modules.values():
            child.__class__ = original_class(type(child))  # of a fit before

    @contextmanager
    def watched(self, watch: Watch) -> Iterator[None]:
        """Watch the modules of the refused keys, and if reads are noted, those whose reads are."""
        names = {name for name, _ in watch.refused}.union(self._noted if watch.is_noting else ())
        modules = [child for name, child in self._modules.items() if name in names]
        before = [(module, type(module)) for module in modules]
        self._watch = watch
        try:
            self._install(modules)
            yield
            if watch.refusal is not None:
                raise watch.refusal
        finally:
            self._watch = None
            for module, cls in before:
                module.__class__ = cls

    def watch_between_steps(self, refused: set[Key]) -> None:
        """Refuse reads of keys from now on; keys that are written are dropped from the set."""
        self.end_between_steps()
        if refused:
            self._watch = Watch(refused, is_noting=False)
            self._between = [self._modules[name] for name in {name for name, _ in refused} if name in self._modules]
            self._install(self._between)

    def end_between_steps(self) -> None:
        """Let the program read everything again."""
        self._watch = None
        while self._between:
            module = self._between.pop()
            module.__class__ = original_class(type(module))

    def _install(self, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            module.__class__ = self._watched_class(type(module))

    def _watched_class(self, cls: type[nn.Module]) -> type[nn.Module]:
        if cls not in self._classes:

            def read(module: nn.Module, name: str) -> Any:
                # The program may make modules of the class of one: `blocks[:4]` is a new list.
                if name not in self._ignored and not name.startswith("__") and id(module) in self._names:
                    self._note_read(module, name)
                return cls.__getattribute__(module, name)

            def write(module: nn.Module, name: str, value: Any) -> None:
                cls.__setattr__(module, name, value)
                self._note_write(module, name)

            def delete(module: nn.Module, name: str) -> None:
                cls.__delattr__(module, name)
                self._note_write(module, name)

            names = {"__getattribute__": read, "__setattr__": write, "__delattr__": delete}
            self._classes[cls] = subclass_of(cls, names, copied=self._require_fresh)
        return self._classes[cls]

    def _require_fresh(self, module: nn.Module) -> None:
        """Refuse a copy of a module with attributes that must not be read."""
        watch, name = self._watch, self._names.get(id(module))
        if watch is None:
            return
        for key in sorted(watch.refused):
            if key[0] == name and key not in watch.written:
                self._raise(key, watch)

    def _raise(self, key: Key, watch: Watch) -> None:
        inside = When.IN_BACKWARD if watch.is_backward else When.IN_STEP
        watch.refusal = self._refuse(key, When.BETWEEN if self._between else inside)
        raise watch.refusal

    def _note_write(self, module: nn.Module, name: str) -> None:
        if self._watch is not None and id(module) in self._names:
            self._written((self._names[id(module)], name), self._watch)

    def _written(self, key: Key, watch: Watch) -> None:
        watch.written.add(key)
        watch.touched.add(key)
        if self._between and isinstance(watch.refused, set):
            watch.refused.discard(key)

    def _note_read(self, module: nn.Module, name: str) -> None:
        watch, key = self._watch, (self._names[id(module)], name)
        if watch is not None:
            watch.touched.add(key)
        if watch is None or key in watch.written or not (watch.is_noting or key in watch.refused):
            return
        space = vars(module)
        value = space["_buffers"].get(name, space.get(name))
        if isinstance(value, (Tensor, list, dict, set, deque)) or fields_of(value) is not None:
            use = _use_above(value, 2)
            if use is _Use.RESET:
                self._written(key, watch)
            if use is not _Use.READ:
                return
        if key in watch.refused:
            self._raise(key, watch)
        watch.seen.add(key)


class _Use(Enum):
    """Uses of an attribute's value."""

    READ = "read"
    ADD = "add"  # it reads nothing of the value, and does not overwrite all of it
    RESET = "reset"


def _use_above(value: Any, depth: int) -> _Use:
    """Return the use of a value that the code above this reads now."""
    frame = sys._getframe(depth + 1)
    following = (one for one in dis.get_instructions(frame.f_code) if one.offset > frame.f_lasti)
    is_part = False
    while True:
        first = next(following, None)
        if first is None:
            return _Use.READ
        fields = None if isinstance(value, (Tensor, list, dict, set, deque)) else fields_of(value)
        if fields is None or first.opname not in _ATTRIBUTES:
            break
        if first.argval not in fields:
            return _Use.READ
        value, is_part = fields[first.argval], True
    if fields is not None:
        return _Use.ADD if first.opname == "STORE_ATTR" else _Use.READ
    if not isinstance(value, (Tensor, list, dict, set, deque)):
        return _Use.READ
    second = next(following, None)
    if first.opname in _LOADS and second is not None and second.opname == "STORE_SUBSCR":
        return _Use.ADD
    if first.opname in _ATTRIBUTES and first.argval in _RESETS:
        return _Use.ADD if is_part else _Use.RESET
    is_added = first.opname in _ATTRIBUTES and first.argval in _ADDS and not isinstance(value, Tensor)
    return _Use.ADD if is_added else _Use.READ
