"""Attributes that hold the memory of a parameter under another name, such as ``CB`` of 8-bit layers of bitsandbytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

__all__ = ["Aliases"]

BufferSlot = tuple[dict[str, Any], str]  # attributes of an object, and the name of one


class Aliases:
    """Lets the attributes that share a parameter's memory follow it; without that each rank would keep all of it.

    Attributes of the parameter, and of plain objects that its module holds, are looked through. While the parameter is
    sharded they are the parameter itself, which refuses operations that need values.

    Args:
        param: The parameter, with memory of its own.
        owner: Its module.
    """

    def __init__(self, param: nn.Parameter, owner: nn.Module) -> None:
        self._param = param
        self._owner = owner
        self._given: torch.Tensor = param  # value of the attributes, unless a layer has changed them
        self._places: list[BufferSlot] = []
        self.hide()

    def __bool__(self) -> bool:
        return bool(self._places)

    def hide(self) -> None:
        """Let the attributes be the parameter, which is going to be sharded; layers may have moved them."""
        with torch._C.DisableTorchFunctionSubclass():
            self._places = self._sharing(self._param.data_ptr()) or self._places
        self._give(self._param, self._places)

    def show(self, values: torch.Tensor) -> None:
        """Let the attributes that are as ``hide`` or ``show`` has left them be ``values``."""
        self._give(values, [(names, key) for names, key in self._places if names.get(key) is self._given])

    def show_own(self) -> None:
        """Let them be the values that the parameter has now."""
        self.show(self._param.data)

    def _give(self, values: torch.Tensor, places: list[BufferSlot]) -> None:
        for names, key in places:
            names[key] = values
        self._given = values

    def _sharing(self, address: int) -> list[BufferSlot]:
        return [
            (names, key)
            for names in self._holders()
            for key, value in names.items()
            if isinstance(value, torch.Tensor)
            and value is not self._param
            and value.layout is torch.strided
            and (value.data_ptr(), value.dtype, value.numel()) == (address, self._param.dtype, self._param.numel())
            and address
        ]

    def _holders(self) -> Iterator[dict[str, Any]]:
        yield vars(self._param)
        for value in vars(self._owner).values():
            if hasattr(value, "__dict__") and not isinstance(value, (nn.Module, torch.Tensor, type)):
                yield vars(value)
