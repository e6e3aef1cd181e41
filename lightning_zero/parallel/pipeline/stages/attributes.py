"""Where modules keep attributes, and comparisons of their values by identity."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_zero.parallel.module_state import OF_MODULES

__all__ = ["CONSTANT", "MISSING", "Key", "Write", "Written", "are_same", "assign", "attribute_spaces", "ids_of_metrics",
           "is_metric"]  # fmt: skip

Key = tuple[str, str, str]  # submodule, dictionary among its attributes, and key
MISSING = object()  # in the place of an attribute that there is not
CONSTANT = OF_MODULES - {"training"}  # attributes of every module, which hold its parts


@dataclass(frozen=True)
class Write:
    """A change of an attribute behind the call of its module.

    Attributes:
        space: The dictionary that has it; kept alive, so that no other one has its ``id``.
        is_of_module: The module has changed it in the call, so that its own stage has another value.
    """

    space: Mapping[str, Any]
    is_of_module: bool


Written = dict[tuple[int, str], Write]  # by `id` of the dictionary, and key


def attribute_spaces(module: nn.Module) -> dict[tuple[str, str], dict[str, Any]]:
    """Return where a module and its submodules have attributes, module buffers and dictionaries of them.

    Returns:
        By name of the submodule, and of the dictionary among its attributes ("" for these).
    """
    spaces: dict[int, tuple[tuple[str, str], dict[str, Any]]] = {}
    for child_name, child in module.named_modules():
        own = vars(child)
        kept = {name: value for name, value in own.items() if type(value) is dict and name not in OF_MODULES}
        for name, space in {"": own, "_buffers": child._buffers, **kept}.items():
            spaces.setdefault(id(space), ((child_name, name), space))
    return dict(spaces.values())


def are_same(space: Mapping[Any, Any], names: Sequence[Any], values: Sequence[Any]) -> bool:
    """Say whether a dictionary has these very values under these names, in this order."""
    return [*space] == names and all(map(operator.is_, space.values(), values))


def assign(space: dict[Any, Any], name: Any, value: Any) -> None:
    """Give an attribute a value, or remove it for ``MISSING``."""
    if value is MISSING:
        space.pop(name, None)
    else:
        space[name] = value


def is_metric(module: nn.Module) -> bool:
    """Say whether a module is a metric, whose states are merged."""
    return any(cls.__module__.startswith("torchmetrics.") for cls in type(module).__mro__)


def ids_of_metrics(module: nn.Module) -> set[int]:
    """Return the ``id`` of every metric in a module, with their submodules; a metric's hash changes with its states."""
    return {id(child) for metric in filter(is_metric, module.modules()) for child in metric.modules()}
