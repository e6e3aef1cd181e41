"""Values outside of modules that code of the program may change: globals, closures, class and context variables."""

from __future__ import annotations

import builtins
import contextvars
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import _lru_cache_wrapper
from types import CellType, CodeType, FunctionType
from typing import Any, TypeVar

from torch import Tensor, nn

from lightning_zero.parallel.module_state import LIBRARIES, KeptValues, fields_of

__all__ = ["OutsideState"]

T = TypeVar("T")

_MISSING = object()
_MOST_FUNCTIONS = 2048
_MOST_BYTES = 2**26  # of a tensor that is copied
_CONTAINERS = (list, dict, set, deque, bytearray, tuple)


class OutsideState:
    """Globals and closures of the methods of modules, attributes of their classes, and context variables, as now.

    Those of functions that methods name are among them. Contents of containers and objects are kept as well.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        classes = {base: None for child in modules for base in type(child).__mro__ if _is_of_a_program(base.__module__)}
        found = _Found(classes)
        self._globals = [(space, name, space.get(name, _MISSING)) for space, name in found.globals]
        self._cells = [(cell, _content(cell)) for cell in found.cells]
        self._attributes = [(cls, name, value) for cls in classes for name, value in _attributes_of(cls).items()]
        self._context = contextvars.copy_context()
        values = [one for _, _, one in [*self._globals, *self._attributes]] + [one for _, one in self._cells]
        self._values = [one for one in values if _can_change(one)]
        self._contents = self._kept()

    def _kept(self) -> KeptValues:
        kept = KeptValues()
        for value in self._values:
            kept.add(value, "a global or closure")
        return kept

    def run(self, function: Callable[[], T]) -> T:
        """Run a function with this state; the present one comes back afterwards, but for contents of containers."""
        with self._shown():
            return self._context.copy().run(function)

    @contextmanager
    def _shown(self) -> Iterator[None]:
        now = [(space, name, space.get(name, _MISSING)) for space, name, _ in self._globals]
        cells = [(cell, _content(cell)) for cell, _ in self._cells]
        attributes = [(cls, name, vars(cls).get(name, _MISSING)) for cls, name, _ in self._attributes]
        contents = self._kept()
        self._bind(self._globals, self._cells, self._attributes)
        self._contents.put_back()
        try:
            yield
        finally:
            self._bind(now, cells, attributes)
            contents.put_back()

    @staticmethod
    def _bind(
        names: Iterable[tuple[dict[str, Any], str, Any]],
        cells: Iterable[tuple[CellType, Any]],
        attributes: Iterable[tuple[type, str, Any]],
    ) -> None:
        for space, name, value in names:
            if value is _MISSING:
                space.pop(name, None)
            elif space.get(name, _MISSING) is not value:
                space[name] = value
        for cell, value in cells:
            if value is not _MISSING and _content(cell) is not value:
                cell.cell_contents = value
        for cls, name, value in attributes:
            if vars(cls).get(name, _MISSING) is value:
                continue
            if value is _MISSING:
                delattr(cls, name)
            else:
                setattr(cls, name, value)


class _Found:
    """The globals and cells that functions of classes name, directly or in functions that they call."""

    def __init__(self, classes: Iterable[type]) -> None:
        self.globals: list[tuple[dict[str, Any], str]] = []
        self.cells: list[CellType] = []
        self._seen: set[int] = set()
        self._waiting: list[FunctionType] = []
        for cls in classes:
            for value in vars(cls).values():
                self._look_at(value.__func__ if isinstance(value, (classmethod, staticmethod)) else value)
        while self._waiting and len(self._seen) < _MOST_FUNCTIONS:
            self._follow(self._waiting.pop())

    def _look_at(self, value: Any) -> None:
        if isinstance(value, _lru_cache_wrapper):
            value = value.__wrapped__
        if isinstance(value, FunctionType) and _is_of_a_program(value.__globals__.get("__name__")):
            self._waiting.append(value)

    def _follow(self, function: FunctionType) -> None:
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        for cell in function.__closure__ or ():
            self.cells.append(cell)
            self._look_at(_content(cell))
        space = function.__globals__
        for name in _names_in(function.__code__):
            if not hasattr(builtins, name):
                self.globals.append((space, name))
                self._look_at(space.get(name))


def _names_in(code: CodeType) -> set[str]:
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _names_in(constant)
    return found


def _attributes_of(cls: type) -> dict[str, Any]:
    """Return the attributes of a class that are values."""
    hidden = (FunctionType, classmethod, staticmethod, property)
    return {
        name: value
        for name, value in vars(cls).items()
        if not name.startswith(("__", "_abc_")) and not isinstance(value, hidden) and not hasattr(value, "__get__")
    }


def _can_change(value: Any) -> bool:
    """Say whether a value is a container, an array or an object of the program that is not too large to be copied."""
    if isinstance(value, Tensor):
        return value.nbytes <= _MOST_BYTES
    is_array = type(value).__module__ == "numpy"
    return is_array or isinstance(value, _CONTAINERS) or fields_of(value) is not None


def _is_of_a_program(name: Any) -> bool:
    return str(name).partition(".")[0] not in LIBRARIES


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _MISSING
