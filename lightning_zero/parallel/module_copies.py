"""Copies of modules with attributes that cannot be copied, such as locks and connections: the copy shares those."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator, Mapping
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MappingProxyType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

__all__ = ["copied", "copied_to_cpu"]

_Module = TypeVar("_Module", bound=nn.Module)
_ATOMS = (str, bytes, int, float, complex, type(None), FunctionType, BuiltinFunctionType, ModuleType)  # hold no tensors


def copied(module: _Module, memo: Mapping[int, Any] | None = None) -> _Module:
    """Return a copy of a module, which shares with it the objects below its attributes that cannot be copied.

    Args:
        module: Is not changed.
        memo: As of ``copy.deepcopy``, by the id of an object: the one that the copy has in its place.

    Raises:
        ValueError: An iterator, or a file that is read, cannot be copied: a run of the copy would move on what the
            module reads.
    """
    given = dict(memo or {})
    try:
        return copy.deepcopy(module, dict(given))
    except Exception:
        tensors = chain(module.parameters(), module.buffers())
        _share(module, "self", {**{id(one): one for one in tensors}, **given}, given)
        return copy.deepcopy(module, given)


def copied_to_cpu(module: _Module, memo: Mapping[int, Any] | None = None) -> _Module:
    """Return a copy of a module on the CPU, as ``copied`` does: tensors and devices in its attributes too."""
    given = dict(memo or {})
    seen: dict[int, Any] = dict.fromkeys(given)  # keeps values alive, and their ids their own, until they are copied
    for value in _placed_below(module, seen):
        device = value if isinstance(value, torch.device) else value.device
        if device.type not in ("cpu", "meta"):
            given[id(value)] = _on_cpu(value)
    return copied(module, given)


def _on_cpu(value: Tensor | torch.device) -> Tensor | torch.device:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    values = value.detach().cpu()
    return nn.Parameter(values, value.requires_grad) if isinstance(value, nn.Parameter) else values


def _placed_below(value: Any, seen: dict[int, Any]) -> Iterator[Tensor | torch.device]:
    """Yield the tensors and devices in the attributes of a module, and in objects below them, once each."""
    if id(value) in seen or isinstance(value, _ATOMS):
        return
    seen[id(value)] = value
    if isinstance(value, (Tensor, torch.device)):
        yield value
        return
    try:
        parts = list(_parts(value))
    except Exception:  # a mapping that computes its values, such as a configuration with one that is missing
        return
    for _, part in parts:
        yield from _placed_below(part, seen)


def _share(value: Any, path: str, trial: Mapping[int, Any], memo: dict[int, Any]) -> None:
    """Put the smallest objects of a value that cannot be copied into a memo."""
    if id(value) in memo or _can_be_copied(value, {**trial, **memo}):
        return
    parts = list(_parts(value))
    for name, part in parts:
        _share(part, f"{path}{name}", trial, memo)
    if parts and _can_be_copied(value, {**trial, **memo}):
        return
    if isinstance(value, Iterator) and not (isinstance(value, io.IOBase) and not value.readable()):
        raise ValueError(
            f"`{path}` is a `{type(value).__name__}`, which cannot be copied, and the module is copied to be run before"
            " the training: the run would move it on. Make it in `on_fit_start`."
        )
    memo[id(value)] = value


def _can_be_copied(value: Any, memo: dict[int, Any]) -> bool:
    try:
        copy.deepcopy(value, memo)
    except Exception:
        return False
    return True


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects of a container, or an object's attributes, with their places."""
    if isinstance(value, (dict, MappingProxyType)):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{number}]", part) for number, part in enumerate(value))
    elif hasattr(value, "__dict__") and not isinstance(value, (type, Iterator)):
        for name, one in _state(value).items():
            if isinstance(value, nn.Module) and name in ("_modules", "_parameters", "_buffers"):
                yield from ((f".{key}", part) for key, part in one.items())
            else:
                yield f".{name}", one


def _state(value: Any) -> dict[str, Any]:
    """Return the attributes that a copy would have; a LightningModule's copy has no Trainer."""
    try:
        state = value.__getstate__()
    except Exception:
        state = None
    return state if isinstance(state, dict) else vars(value)
