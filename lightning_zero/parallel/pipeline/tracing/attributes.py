"""Where modules keep attributes."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["Key", "attribute_spaces"]

Key = tuple[str, str, str]  # submodule, dictionary among its attributes, and key


def attribute_spaces(module: nn.Module) -> dict[tuple[str, str], dict[str, Any]]:
    """Return where a module and its submodules have attributes, module buffers and dictionaries of them.

    Returns:
        By name of the submodule, and of the dictionary among its attributes ("" for these).
    """
    spaces: dict[int, tuple[tuple[str, str], dict[str, Any]]] = {}
    for child_name, child in module.named_modules():
        own = vars(child)
        kept = {name: value for name, value in own.items() if type(value) is dict and name not in _OF_MODULES}
        for name, space in {"": own, "_buffers": child._buffers, **kept}.items():
            spaces.setdefault(id(space), ((child_name, name), space))
    return dict(spaces.values())


_OF_MODULES = frozenset(vars(nn.Module()))
