"""Parameters as users pass them: a module, a parameter, or several."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn

__all__ = ["Gatherable", "described", "parameter", "params_of"]

Gatherable = nn.Module | torch.Tensor | Iterable[nn.Module | torch.Tensor]


def params_of(params_or_module: Gatherable) -> list[torch.Tensor]:
    """Return the parameters of modules and parameters.

    Raises:
        TypeError: Something else is among them.
    """
    if isinstance(params_or_module, nn.Module):
        return list(params_or_module.parameters())
    if isinstance(params_or_module, torch.Tensor):
        return [params_or_module]
    if isinstance(params_or_module, (str, bytes)) or not isinstance(params_or_module, Iterable):
        raise TypeError(
            f"Pass a module, a parameter, or several, not {described(params_or_module)}: `gathered(layer.weight)`."
        )
    return [param for item in params_or_module for param in params_of(item)]


def parameter(param: torch.Tensor | nn.Module) -> nn.Parameter:
    """Return one parameter.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(param, torch.Tensor):
        raise TypeError(f"`{type(param).__name__}` is no parameter. Pass one parameter; `gathered` takes modules too.")
    return cast(nn.Parameter, param)  # to a type checker `module.weight` is a tensor or a module


def described(value: Any) -> str:
    """Return words for a value in an error."""
    if isinstance(value, type):
        return f"the class `{value.__name__}`"
    return f"`{value!r}`" if isinstance(value, str) or value is None else f"a `{type(value).__name__}`"
