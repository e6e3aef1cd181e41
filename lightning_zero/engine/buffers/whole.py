"""The whole flat buffer: its memory, which stage 3 frees between uses, and the views that parameters are of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lightning_zero.engine.buffers.parameter import placeholder
from lightning_zero.engine.buffers.spec import BufferSpec
from lightning_zero.layout import FlatLayout
from lightning_zero.storage.copies import keep_for_stream
from lightning_zero.storage.store import Kind

__all__ = ["WholeBuffer", "flat_views"]


class WholeBuffer:
    """The whole buffer in the compute dtype.

    Args:
        spec: The facts of the buffer.
    """

    def __init__(self, spec: BufferSpec) -> None:
        self._spec = spec
        self._account: Kind = "gathered" if spec.sharding.params else "parameters"
        self.flat = spec.store.create(self._account, spec.layout.padded_numel, spec.kind.compute)
        self.views = flat_views(self.flat, spec.layout)
        self.handles: list[None] = []  # one for each tensor in it that autograd saved and can do without
        self.moved: Callable[[int, int], None] | None = None  # called with the old and the new address of its storage
        self._own_references: int | None = None  # to the storage, when it is freed
        self._all_placeholders: dict[torch.dtype, list[torch.Tensor]] = {}
        self.placeholders: list[torch.Tensor] = []  # shown by released parameters
        if spec.sharding.params:
            self.choose_placeholders(spec.kind.compute)

    def fill(self, *, may_wait: bool) -> torch.Tensor | None:
        """Copy the parameters' values in, and take rank 0's. Collective: all ranks.

        Args:
            may_wait: Where something is offloaded, a master that has nothing the shard does not have is made when an
                optimizer is attached: a model that is only evaluated needs none.

        Returns:
            The values in the dtype of the master, if one is made now: (n,).
        """
        spec, kind = self._spec, self._spec.kind
        may_wait = may_wait and kind.original.itemsize <= kind.compute.itemsize
        exact = (kind.trained or kind.is_rounded) and kind.master != kind.compute and not may_wait
        values = torch.zeros_like(self.flat, dtype=kind.master) if exact else self.flat.zero_()
        for slot, param in zip(spec.layout.slots, spec.params, strict=True):
            values[slot.offset : slot.stop].copy_(param.detach().reshape(-1))
        spec.communicator.broadcast(values, f"parameters of unit `{spec.name}`")
        if not exact:
            return None
        self.flat.copy_(values)
        return values if kind.trained or kind.shared is not None or bool((self.flat != values).any()) else None

    @property
    def has_memory(self) -> bool:
        """Whether there is memory for its values; a buffer without elements needs none."""
        return bool(self.flat.untyped_storage().nbytes()) or not self.flat.nbytes

    def allocate(self) -> None:
        """Take memory of any content, where there is none."""
        self.flat.untyped_storage().resize_(self.flat.nbytes)
        self._spec.store.adopt(self._account, self.flat.nbytes)

    def free(self) -> None:
        """Give the memory back."""
        keep_for_stream(self.flat)
        self.flat.untyped_storage().resize_(0)
        self._spec.store.release(self._account, self.flat.nbytes)

    @property
    def is_seen_outside(self) -> bool:
        """Whether a tensor of the program's, or a graph without our handles, lies in it; asked before it is freed."""
        count = torch._C._storage_Use_Count(self.flat.untyped_storage()._cdata) - len(self.handles)
        if self._own_references is None:
            self._own_references = count
        return count > self._own_references

    def leave_storage(self) -> None:
        """Leave the memory to whoever sees it, and take other memory of any content."""
        old = self.flat.untyped_storage()._cdata
        with torch.inference_mode(False):
            self.flat = torch.empty_like(self.flat)
        self.views = flat_views(self.flat, self._spec.layout)
        self.handles = []
        if self.moved is not None:
            self.moved(old, self.flat.untyped_storage()._cdata)

    def choose_placeholders(self, dtype: torch.dtype) -> None:
        """Let released parameters show tensors of a dtype, always the same: graphs know a parameter by its own."""
        if dtype not in self._all_placeholders:
            self._all_placeholders[dtype] = [placeholder(view, dtype=dtype) for view in self.views]
        self.placeholders = self._all_placeholders[dtype]


def flat_views(flat: torch.Tensor, layout: FlatLayout) -> list[torch.Tensor]:
    """Return one view per slot, each with a version counter of its own.

    So refilling the buffer never trips autograd's version check.
    """
    return [_view(flat, slot.offset, slot.shape) for slot in layout.slots]


def _view(flat: torch.Tensor, offset: int, shape: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode(False):
        stride = torch.empty(tuple(shape), device="meta").stride()
        return torch.empty(0, dtype=flat.dtype, device=flat.device).set_(
            flat.untyped_storage(), offset, tuple(shape), stride
        )
