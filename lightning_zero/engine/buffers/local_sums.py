"""The sums of one flat buffer's gradients on this rank, before they are reduced."""

from __future__ import annotations

import torch

from lightning_zero.engine.buffers.spec import BufferSpec
from lightning_zero.storage.references import num_tensors_in

__all__ = ["LocalSums"]


class LocalSums:
    """The local sums of one buffer: memory for n elements, while there is any, and the slots that hold a sum.

    Args:
        spec: The facts of the buffer.
    """

    def __init__(self, spec: BufferSpec) -> None:
        self._spec = spec
        self.flat: torch.Tensor | None = None
        self.slots: set[int] = set()  # that hold a sum
        self.sparse: set[int] = set()  # to which a sparse gradient was added since the gradients were dropped
        self.is_read = False  # a program has read a gradient, and may keep a view of ``flat``

    def take(self) -> torch.Tensor:
        """Return the memory, made if there is none, with zeros between the slots: (n,) reduce dtype."""
        if self.flat is None:
            spec = self._spec
            with torch.inference_mode(False):
                numel, dtype = spec.layout.padded_numel, spec.kind.reduce
                self.flat = torch.empty(numel, dtype=dtype, device=spec.store.device)
            spec.store.adopt("gradients", self.flat.nbytes)
            for lo, hi in spec.layout.gaps():
                self.flat[lo:hi].zero_()
        return self.flat

    def give_up(self) -> None:
        """Leave the memory to whoever sees it, or to a reduction that is running."""
        if self.flat is not None:
            self._spec.store.release("gradients", self.flat.nbytes)
            self.flat = None

    @property
    def is_kept(self) -> bool:
        """Whether the program keeps an earlier gradient (``kept = p.grad``) where the next ones would be summed."""
        return self.flat is not None and num_tensors_in(self.flat) > 1

    def of(self, index: int) -> torch.Tensor | None:
        """Return a slot's sum, a view in the shape of the parameter, or None."""
        if index not in self.slots or self.flat is None:
            return None
        slot = self._spec.layout.slots[index]
        return self.flat[slot.offset : slot.stop].view(slot.shape)
