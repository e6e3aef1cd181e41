"""The sums of one flat buffer's gradients over the ranks of a node, before they are averaged over the nodes.

Note [Sums of nodes]
    Where ranks are in nodes, a reduction has two halves. Gradients that are sharded over the ranks of a node wait
    behind the first for the last micro-batch: it adds a node's average to that of earlier micro-batches, and the second
    half, over the nodes, follows once a step. Until then nobody has the average, so using it is refused. Gradients that
    are sharded over all ranks are reduced in both halves every time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from lightning_zero.engine.buffers.spec import BufferSpec
from lightning_zero.sharding import ShardingScope

__all__ = ["NodeSums"]


class NodeSums:
    """The sum of a node in this rank's range: (n / ranks of a node,) reduce dtype, while there is any.

    Call protocol: ``add`` what the first half of a reduction has written; ``send`` for the second half, then
    ``end_sending``. ``drop`` at any time.

    Args:
        spec: The facts of the buffer.
    """

    def __init__(self, spec: BufferSpec) -> None:
        self._spec = spec
        self._sum: torch.Tensor | None = None
        self._sent: torch.Tensor | None = None  # the same, while it is averaged over the nodes
        self.are_waiting = False  # there are gradients in it on some rank; the same on all

    def wait_for_last(self, reach: ShardingScope) -> bool:
        """Say whether gradients stay in the nodes behind a reduction that goes as far as ``reach`` says."""
        return self._spec.sharding.grads is ShardingScope.NODE and reach is ShardingScope.NODE

    def add(self, average: torch.Tensor) -> None:
        """Add a node's average of a micro-batch, whose memory may become the sum's."""
        if self._sum is None:
            self._sum = average
            return
        with torch.inference_mode(False), torch.no_grad():
            self._sum.add_(average)
        self._spec.store.release("gradients", average.nbytes)

    def send(self) -> torch.Tensor:
        """Return the sum, which a reduction over the nodes uses up."""
        assert self._sum is not None
        self._sent, self._sum = self._sum, None
        return self._sent

    def end_sending(self) -> None:
        """Give up the sum that was sent."""
        self._release(self._sent)
        self._sent = None

    def drop(self) -> None:
        """Give up the sum: nothing waits."""
        self._release(self._sum)
        self._sum, self.are_waiting = None, False

    def change(self, indices: Iterable[int], change: Callable[[torch.Tensor], Any]) -> None:
        """Change the sums of some slots in place."""
        if self._sum is None:
            return
        first, stop = self._spec.node_range.start, self._spec.node_range.stop
        for slot in (self._spec.layout.slots[index] for index in indices):
            change(self._sum[max(slot.offset - first, 0) : max(min(slot.stop, stop) - first, 0)])

    def _release(self, values: torch.Tensor | None) -> None:
        if values is not None:
            self._spec.store.release("gradients", values.nbytes)
