"""Checks of options: names against a signature, values against its annotations."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from lightning_zero.errors import nearest

__all__ = ["checked_arguments", "checked_fields", "from_fields"]

P = ParamSpec("P")
T = TypeVar("T")

_NAMES: dict[Any, str] = {
    NoneType: "None",
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a string",
    dict: "a dict",
    Callable: "a function",
}


def checked_arguments(
    *, use: Mapping[str, str] | None = None, foreign: Mapping[str, str] | None = None, unchecked: Collection[str] = ()
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Check the arguments of an ``__init__`` before it runs. The signature stays visible.

    Args:
        use: By option, the sentence that an error says instead of the types of the annotation.
        foreign: By option of another library, the sentence that names its counterpart here.
        unchecked: Options that ``__init__`` checks itself.
    """

    def decorate(init: Callable[P, None]) -> Callable[P, None]:
        check = _Check(init, use or {}, foreign=foreign or {}, unchecked=unchecked)

        @functools.wraps(init)
        def checked(*args: P.args, **kwargs: P.kwargs) -> None:
            check(args, kwargs)
            init(*args, **kwargs)

        return checked

    return decorate


def checked_fields(*, use: Mapping[str, str] | None = None) -> Callable[[type[T]], type[T]]:
    """Check the fields of a dataclass before ``__post_init__`` runs; errors name the class."""

    def decorate(cls: type[T]) -> type[T]:
        init = cls.__init__
        check = _Check(init, use or {}, owner=cls.__name__)

        @functools.wraps(init)
        def checked(*args: Any, **kwargs: Any) -> None:
            check(args, kwargs)
            init(*args, **kwargs)

        cls.__init__ = checked  # type: ignore[method-assign]
        return cls

    return decorate


def from_fields(cls: type[T], value: Any) -> Any:
    """Return ``cls(**value)`` for a dict of fields, and anything else as it is."""
    if not isinstance(value, dict):
        return value
    wrong = next((name for name in value if not isinstance(name, str)), None)
    if wrong is not None:
        raise TypeError(f"`{cls.__name__}` has no option {wrong!r}. Use names of its fields as keys of the dict.")
    return cls(**value)


class _Check:
    """The check of one signature.

    Args:
        init: The function with the signature.
        use: See ``checked_arguments``.
        foreign: See ``checked_arguments``.
        unchecked: See ``checked_arguments``.
        owner: Of fields, the dataclass, which is part of the name in an error: ``Offload(params='disk')``.
    """

    def __init__(
        self,
        init: Callable[..., None],
        use: Mapping[str, str],
        *,
        foreign: Mapping[str, str] | None = None,
        unchecked: Collection[str] = (),
        owner: str | None = None,
    ) -> None:
        self._init = init
        self._signature = inspect.signature(init)
        self._use = use
        self._foreign = foreign or {}
        self._unchecked = {*unchecked, "self", "return"}
        self._owner = owner
        self._name = owner or init.__qualname__.split(".")[0]

    @functools.cached_property
    def _hints(self) -> dict[str, Any]:
        """The annotations, which name classes that may be defined after ``__init__``."""
        return {name: hint for name, hint in get_type_hints(self._init).items() if name not in self._unchecked}

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Check one call.

        Raises:
            TypeError: An option is not known, or its value has another type than the annotation says.
            ValueError: The value of an option is none of the words it may be, or is not finite.
        """
        self._refuse_unknown(kwargs)
        try:
            given = self._signature.bind(*args, **kwargs).arguments
        except TypeError:
            return  # Python's own message says more
        for name, hint in self._hints.items():
            if name in given:
                self._check(name, given[name], hint)

    def _refuse_unknown(self, given: Collection[str]) -> None:
        known = [name for name in self._signature.parameters if name != "self"]
        for name in given:
            if name in known:
                continue
            if name in self._foreign:
                raise TypeError(f"`{self._name}` has no option `{name}`. {self._foreign[name]}")
            raise TypeError(
                f"`{self._name}` has no option `{name}`.{nearest(name, known)} The options are {', '.join(known)}."
            )

    def _check(self, name: str, value: Any, hint: Any) -> None:
        if not _suits(value, hint):
            use = self._use.get(name) or f"Use {_described(hint)}."
            label = self._label(name, value)
            if isinstance(value, str) and any(isinstance(choice, str) for choice in _choices(hint)):
                raise ValueError(f"{label} is not known. {use}")
            raise TypeError(f"{label} is {_kind(value, hint)}. {use}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{self._label(name, value)} is not a finite number.")

    def _label(self, name: str, value: Any) -> str:
        option = f"{name}={_shown(value)}"
        return f"`{self._owner}({option})`" if self._owner else f"`{option}`"


def _suits(value: Any, hint: Any) -> bool:
    """Say whether a value has the type of an annotation. A bool is no number, a string no list."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, UnionType):
        return any(_suits(value, arg) for arg in args)
    if origin is Literal:
        return any(_suits(value, type(choice)) and value == choice for choice in args)
    if origin is type:
        return isinstance(value, type) and issubclass(value, args[0])
    if origin in (list, Sequence):
        return _is_list(value) and all(_suits(item, args[0]) for item in value)
    if hint in (int, float):
        return isinstance(value, int if hint is int else (int, float)) and not isinstance(value, bool)
    return isinstance(value, origin or hint)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _choices(hint: Any) -> Iterator[Any]:
    """Yield the words that an annotation allows."""
    if get_origin(hint) is Literal:
        yield from get_args(hint)
    elif get_origin(hint) in (Union, UnionType):
        for arg in get_args(hint):
            yield from _choices(arg)


def _described(hint: Any) -> str:
    """Return the values that an annotation allows, in words."""
    items = list(dict.fromkeys(_allowed(hint)))
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} or {items[-1]}"


def _allowed(hint: Any) -> Iterator[str]:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        for arg in args:
            yield from _allowed(arg)
    elif origin is Literal:
        yield from (repr(choice) for choice in args)
    elif origin is type:
        yield f"a subclass of `{args[0].__name__}`"
    elif origin in (list, Sequence):
        yield f"a list (each element {_described(args[0])})"
    elif dataclasses.is_dataclass(hint):
        yield f"`{hint.__name__}(...)`"  # type: ignore[union-attr]
    else:
        kind = origin or hint
        yield _NAMES.get(kind, _with_article(kind))


def _kind(value: Any, hint: Any) -> str:
    """Return the kind of a given value that an annotation does not allow; of a list, of its first wrong element."""
    if isinstance(value, type):
        return "a class"
    items = next(_element_hints(hint), None)
    if not _is_list(value) or items is None:
        return _with_article(type(value))
    wrong = next(item for item in value if not _suits(item, items))
    return f"a list with {_with_article(type(wrong))} in it"


def _element_hints(hint: Any) -> Iterator[Any]:
    """Yield the annotations of elements of the lists that an annotation allows."""
    if get_origin(hint) in (list, Sequence):
        yield get_args(hint)[0]
    elif get_origin(hint) in (Union, UnionType):
        for arg in get_args(hint):
            yield from _element_hints(arg)


def _with_article(kind: type) -> str:
    is_builtin_or_deep = kind.__module__ == "builtins" or "." in kind.__module__
    name = kind.__name__ if is_builtin_or_deep else f"{kind.__module__}.{kind.__name__}"
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} `{name}`"


def _shown(value: Any) -> str:
    """Return the value as an error shows it; modules and the like print pages."""
    text = repr(value)
    return text if len(text) <= 80 and "\n" not in text else f"{type(value).__name__}(...)"
