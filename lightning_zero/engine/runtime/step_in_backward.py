"""Steps that are made in the backward, each when its unit's gradients are reduced (ADR 0027).

Note [Which buffers may go ahead]
    A step must see the average of all gradients. So before a unit is reduced every rank says whether all gradients of
    the unit have arrived there, beside the reduction and without waiting. Where all ranks said so, and the optimizer
    steps everything in a buffer, the buffer is stepped as soon as it is reduced and its gradients are given up. The
    others are stepped when ``optimizer.step()`` is called, which also shows the stepped values: until then a backward
    that comes back to a unit sees the old ones.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from lightning_zero.comm.communicator import Communicator, Pending
from lightning_zero.engine.buffers.buffer import FlatBuffer
from lightning_zero.engine.optim.optimizer import ShardedOptimizer
from lightning_zero.engine.units.unit import Unit

__all__ = ["StepInBackward"]


class StepInBackward:
    """Steps the buffers of one optimizer in the backward.

    Args:
        communicator: Over which ranks agree.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self.optimizer: ShardedOptimizer | None = None  # set when it is attached
        self._promises: dict[Unit, tuple[torch.Tensor, Pending]] = {}  # whether all gradients have arrived everywhere

    def begin(self, units: Iterable[Unit]) -> None:
        """Begin a backward.

        Raises:
            RuntimeError: Gradients of an earlier backward were stepped, and `step` or `zero_grad` did not follow.
        """
        self._promises.clear()
        for unit in units:
            for buffer in unit.buffers:
                if buffer.gradients.is_spent:
                    missing = "optimizer.step()" if buffer.gradients.is_ahead else "optimizer.zero_grad()"
                    raise RuntimeError(
                        f"With `step='backward'` every backward is followed by `optimizer.step()` and"
                        f" `optimizer.zero_grad()`, and `{missing}` is missing (unit `{unit.name}`). Call it, or use"
                        " `step='auto'`."
                    )

    def promise(self, unit: Unit) -> None:
        """Tell the other ranks whether all gradients of a unit have arrived here. Collective: all ranks, in order."""
        flag = torch.tensor([unit.is_complete], dtype=torch.uint8)
        what = f"agreement on the gradients of unit `{unit.name}`"
        self._promises[unit] = flag, self._communicator.agree_later(flag, what, dist.ReduceOp.MIN)

    def settle(self) -> None:
        """Wait for the agreements of abandoned backwards. Collective: all ranks have made them."""
        while self._promises:
            self._promises.popitem()[1][1].wait()

    def reduced(self, unit: Unit, buffer: FlatBuffer) -> None:
        """Step a buffer that was reduced, if it may go ahead."""
        flag, pending = self._promises[unit]
        pending.wait()
        if flag.item() and self.optimizer is not None and self.optimizer.holds_all_of(buffer):
            self.optimizer.step_early(buffer)

    def refuse_late(self, units: Iterable[Unit]) -> None:
        """Refuse gradients that came after their unit's step. On all ranks alike.

        Raises:
            RuntimeError: There are some.
        """
        for unit in units:
            if any(buffer.gradients.is_ahead for buffer in unit.buffers):
                raise RuntimeError(
                    f"Unit `{unit.name}` got another gradient in the same backward after its step was made (reentrant"
                    " activation checkpointing of a module that is used twice?). Use `step='auto'`, or"
                    " checkpointing that is not reentrant."
                )
