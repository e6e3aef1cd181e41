"""The class of parameters in the step window whose values are on a disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lightning_zero.engine.buffers.parameter import TO_EDGES, OwnedParameter, note_pointed
from lightning_zero.storage.disk_tensor import call_in_memory

__all__ = ["DiskParameter"]


class DiskParameter(OwnedParameter):
    """A parameter in the step window whose values are on a disk; see ``lightning_zero/storage/disk_tensor.py``."""

    is_read_lazily = True

    @property
    def data(self) -> torch.Tensor:
        """The values."""
        values: torch.Tensor = super().data
        return values

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        note_pointed(self)
        super(DiskParameter, type(self)).data.__set__(self, values)  # type: ignore[attr-defined]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer questions about metadata, make views, and wake for everything else."""
        if func in TO_EDGES:
            return TO_EDGES[func](*args, **(kwargs or {}))
        return call_in_memory(func, args, kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        """Return an ordinary copy."""
        return memo.setdefault(id(self), nn.Parameter(self.detach().clone(), self.requires_grad))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle an ordinary copy."""
        copied = nn.Parameter(self.detach().clone(), self.requires_grad)
        return copied.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
