"""Values that a module on the meta device waits for until it is sharded, because only then it has memory.

Note [On the module]
    The values that a module waits for are noted in its ``__dict__``. A table of ours would lose the note where a module
    is pickled for a new process, or copied, and the parameters would start with other values without a word (ADR 0020).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

__all__ = ["DeferredValues", "Registration", "defer_values", "deferred_params", "deferred_values", "forget_deferred"]

_KEY = "_lightning_zero_awaited"


@dataclass(frozen=True)
class Registration:
    """The attribute ``module.<key>``, a parameter or buffer: whichever tensor is registered there."""

    name: str
    module: nn.Module
    key: str

    @property
    def tensor(self) -> torch.Tensor | None:
        """The parameter or buffer that is registered there now; None if there is none."""
        found = self.module._parameters.get(self.key)
        return self.module._buffers.get(self.key) if found is None else found


class DeferredValues(Protocol):
    """A source of values for parameters and buffers. Must pickle."""

    @property
    def places(self) -> Sequence[Registration]:
        """The parameters and buffers that get values."""
        ...

    def load(self, engine: Any) -> None:
        """Give it to them through the ``ZeroEngine`` that has sharded them. Collective: all ranks."""
        ...


def defer_values(module: nn.Module, values: DeferredValues) -> None:
    """Note that parts of a module get their values when it is sharded."""
    vars(module).setdefault(_KEY, []).append(values)


def deferred_values(root: nn.Module) -> list[DeferredValues]:
    """Return the values that a module and its submodules wait for, in the order in which they were registered.

    Raises:
        ValueError: A part of the module that waits for values is not there any more.
    """
    found: list[DeferredValues] = [values for module in root.modules() for values in vars(module).get(_KEY, ())]
    present = {id(module) for module in root.modules()}
    for place in (place for values in found for place in values.places):
        if id(place.module) not in present or place.tensor is None:
            raise ValueError(
                f"`{place.name}` waits for its pretrained values, and was taken out of the module or replaced. Call"
                " `load_pretrained` after changing the module."
            )
    return found


def deferred_params(root: nn.Module) -> set[tuple[int, str]]:
    """Return ``(id of a module, key)`` of all parameters and buffers that wait, under each name of a tied one."""
    waiting = {id(place.tensor) for values in deferred_values(root) for place in values.places}
    return {
        (id(module), key)
        for module in root.modules()
        for tensors in (module._parameters, module._buffers)
        for key, tensor in tensors.items()
        if tensor is not None and id(tensor) in waiting
    }


def forget_deferred(root: nn.Module) -> None:
    """Take the notes off a module: it has its values."""
    for module in root.modules():
        vars(module).pop(_KEY, None)
