"""Subclasses that stand in for a module's class while a step runs: attributes set on them are set on the class."""

from __future__ import annotations

from collections.abc import Callable
from copyreg import _reconstructor  # type: ignore[attr-defined]
from functools import cache
from typing import Any

from torch import nn

__all__ = ["original_class", "subclass_of"]


def subclass_of(
    cls: type[nn.Module], names: dict[str, Any], *, copied: Callable[[nn.Module], None] | None = None
) -> type[nn.Module]:
    """Return a subclass of the same name with other methods; ``type(module).total = ...`` changes ``cls`` itself.

    Args:
        cls: The class.
        names: The methods.
        copied: Is called with a module before it is copied or pickled.
    """

    def reduce(module: nn.Module, protocol: Any) -> Any:
        """Let copies and pickles be of the original class."""
        if copied is not None:
            copied(module)
        reduced = cls.__reduce_ex__(module, protocol)
        if isinstance(reduced, str):
            return reduced
        function, arguments, *rest = reduced
        found = tuple(original_class(one) if one is type(module) else one for one in arguments)
        if len(found) == 1 and getattr(function, "__name__", "") == "__newobj__":  # pickle compares its class
            return _reconstructor, (*found, object, None), *rest
        return function, found, *rest

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__reduce_ex__": reduce, **names}
    kind: Any = type(cls)
    made: Any = _passing_on(kind)(cls.__name__, (cls,), names)
    if "forward" in vars(made) and "forward" not in names:  # a base class has wrapped it once more
        delattr(made, "forward")
    made.stands_in = True
    result: type[nn.Module] = made
    return result


def original_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class that a class of ``subclass_of`` stands in for; another class as it is."""
    while "stands_in" in vars(cls):
        cls = cls.__base__  # type: ignore[assignment]
    return cls


@cache
def _passing_on(kind: Any) -> Any:
    """Return a subclass of a metaclass whose classes set attributes on their base once they stand in for it."""

    def set_on_base(cls: type, name: str, value: Any) -> None:
        if "stands_in" in vars(cls):
            setattr(cls.__base__, name, value)
        else:
            kind.__setattr__(cls, name, value)

    def delete_on_base(cls: type, name: str) -> None:
        if "stands_in" in vars(cls):
            delattr(cls.__base__, name)
        else:
            kind.__delattr__(cls, name)

    return type(kind.__name__, (kind,), {"__setattr__": set_on_base, "__delattr__": delete_on_base})
