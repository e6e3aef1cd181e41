"""Subclasses that stand in for a module's class while a step runs: attributes set on them are set on the class."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn

__all__ = ["subclass_of"]


def subclass_of(cls: type[nn.Module], names: dict[str, Any]) -> type[nn.Module]:
    """Return a subclass of the same name with other methods; ``type(module).total = ...`` changes ``cls`` itself."""
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, **names}
    kind: Any = type(cls)
    made: Any = _passing_on(kind)(cls.__name__, (cls,), names)
    if "forward" in vars(made) and "forward" not in names:  # a base class has wrapped it once more
        delattr(made, "forward")
    made.stands_in = True
    result: type[nn.Module] = made
    return result


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
