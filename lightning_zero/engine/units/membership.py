"""Whether a module has the parameters that were sharded, and no others: some are assigned, added or taken out later."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.utils.stateless import _functional_call

from lightning_zero.engine.buffers.parameter import is_called_by

__all__ = ["Membership"]


class Membership:
    """Compares the parameters of a module with those that were sharded.

    Args:
        module: The module.
        is_sharded: Says whether a parameter is one that was sharded.
    """

    def __init__(self, module: nn.Module, is_sharded: Callable[[torch.Tensor], bool]) -> None:
        self._module = module
        self._is_sharded = is_sharded
        self._note()

    def _note(self) -> None:
        """Note where everything is, so that a look at the same places tells whether something was moved."""
        modules = list(self._module.modules())
        self._sizes = [(table, len(table)) for child in modules for table in (child._parameters, child._modules)]
        self._entries = [
            (table, key, value)
            for child in modules
            for table in (child._parameters, child._modules)
            for key, value in table.items()
        ]

    @property
    def stranger(self) -> str | None:
        """The name of a parameter that was not sharded; None if there is none."""
        is_as_noted = all(len(table) == size for table, size in self._sizes) and all(
            table.get(key) is value for table, key, value in self._entries
        )
        if is_as_noted:
            return None
        params = dict(self._module.named_parameters())
        is_lent = not all(
            isinstance(param, nn.Parameter) for param in params.values()
        )  # nobody else can assign tensors
        if is_lent or is_called_by(_functional_call):
            return None
        for name, param in params.items():
            if not self._is_sharded(param):
                return name
        self._note()
        return None

    def require(self) -> None:
        """Refuse parameters that were not sharded. No collective.

        Raises:
            RuntimeError: There is one; names it.
        """
        name = self.stranger
        if name is not None:
            raise RuntimeError(
                f"Parameter `{name}` came into the module after it was sharded (an assigned parameter, another"
                " submodule, a parametrization): nobody would reduce, step or save it. Change the module before it is"
                " sharded (in Lightning in `configure_model` or before `Trainer.fit`; `on_load_checkpoint` is called"
                " after it), or call `engine.unshard()`,"
                " change it, and shard and attach again. To change values alone write into the parameter that was"
                " there, inside `gathered(param, write='all')`."
            )
