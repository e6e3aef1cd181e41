"""Attributes of two modules, compared: forwards find the same in copies, and in those that the same code has made."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["are_alike"]

_DEEPEST = 8  # of a value in containers, objects and functions


def are_alike(one: Any, other: Any, depth: int = 0) -> bool:
    """Say whether two values are alike; modules and parameters are, because they are compared by their names."""
    if one is other or depth > _DEEPEST:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, (nn.Module, nn.Parameter, weakref.ReferenceType)):
        return True
    if isinstance(one, Tensor):
        return _same_values(one, other)
    if isinstance(one, torch.Generator):
        return one.device == other.device and torch.equal(one.get_state(), other.get_state())
    if type(one) is object:  # a sentinel, which each has of its own
        return True
    mine, theirs = _parts(one), _parts(other)
    if mine is None or theirs is None:
        return _are_equal(one, other)
    return mine.keys() == theirs.keys() and all(are_alike(mine[key], theirs[key], depth + 1) for key in mine)


def _same_values(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if one.is_meta or other.is_meta:
        return True
    if one.device != other.device:
        return False
    return torch.equal(one, other) or (one.layout is torch.strided and _are_equal_or_nan(one, other))


def _are_equal_or_nan(one: Tensor, other: Tensor) -> bool:
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _parts(value: Any) -> Mapping[Any, Any] | None:
    """Return the values that one is made of, by name or place; None for one that is equal to its copies."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if isinstance(value, MethodType):
        return {"function": value.__func__, "object": value.__self__}
    if isinstance(value, partial):
        return {"function": value.func, "arguments": value.args, "keywords": value.keywords}
    if isinstance(value, FunctionType):
        cells = [_content(cell) for cell in value.__closure__ or ()]
        return {"code": value.__code__, "defaults": (value.__defaults__, value.__kwdefaults__), "cells": cells}
    rule: Any = type(value).__eq__
    has_none = rule is object.__eq__ and hasattr(value, "__dict__")
    return vars(value) if has_none and not isinstance(value, type) else None


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _are_equal(one: Any, other: Any) -> bool:
    try:
        found = one == other
        return bool(found.all() if hasattr(found, "all") else found) or (one != one and other != other)
    except Exception:  # of a class of the user
        return False
