"""Where modules keep attributes."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["OF_MODULES", "Key", "attribute_spaces", "own_spaces"]

Key = tuple[str, str, str]  # submodule, dictionary among its attributes, and key
OF_MODULES = frozenset(vars(nn.Module()))  # names of attributes that every module has


def own_spaces(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Return where a module itself has attributes ("" for these), module buffers and dictionaries of them, by name."""
    own = vars(module)
    kept = {name: value for name, value in own.items() if type(value) is dict and name not in OF_MODULES}
    return {"": own, "_buffers": module._buffers, **kept}


def attribute_spaces(module: nn.Module) -> dict[tuple[str, str], dict[str, Any]]:
    """Return where a module and its submodules have attributes, module buffers and dictionaries of them.

    Returns:
        By name of the submodule, and of the dictionary among its attributes ("" for these).
    """
    spaces: dict[int, tuple[tuple[str, str], dict[str, Any]]] = {}
    for child_name, child in module.named_modules():
        for name, space in own_spaces(child).items():
            spaces.setdefault(id(space), ((child_name, name), space))
    return dict(spaces.values())
