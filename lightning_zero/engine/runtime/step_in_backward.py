"""Steps that are made in the backward, each when its unit's gradients are reduced (ADR 0027).

Note [Which buffers may go ahead]
    A step must see the average of all gradients. So before a unit is reduced every rank says whether all gradients of
    the unit have arrived there, beside the reduction and without waiting. Where all ranks said so, and the optimizer
    steps everything in a buffer, the buffer is stepped as soon as it is reduced and its gradients are given up. The
    others are stepped when ``optimizer.step()`` is called, which also shows the stepped values: until then a backward
    that comes back to a unit sees the old ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from lightning_zero.comm.communicator import Communicator, Pending
from lightning_zero.engine.buffers.buffer import FlatBuffer
from lightning_zero.engine.optim.optimizer import ShardedOptimizer
from lightning_zero.engine.optim.optimizer_in_backward import OptimizerInBackward
from lightning_zero.engine.runtime.reduction import Reducer
from lightning_zero.engine.runtime.step_timing import StepTiming
from lightning_zero.engine.units.unit import Unit
from lightning_zero.sharding import ShardingScope

__all__ = ["StepInBackward", "SteppingReducer"]


class SteppingReducer(Reducer):
    """Reduces units, and steps the buffers of one optimizer as soon as they are reduced.

    Args:
        units: All units.
        communicator: Over which ranks agree.
        in_flight: How many buffers may be reducing while backward goes on.
    """

    def __init__(self, units: Sequence[Unit], communicator: Communicator, in_flight: int) -> None:
        super().__init__(units, communicator, in_flight)
        self.optimizer: OptimizerInBackward | None = None  # set when it is attached
        self._promises: dict[Unit, tuple[torch.Tensor, Pending]] = {}  # whether all gradients have arrived everywhere

    def begin(self, reach: ShardingScope = ShardingScope.WORLD) -> None:
        """Begin a backward.

        Args:
            reach: See ``Reducer.begin``.

        Raises:
            RuntimeError: Gradients of an earlier backward were stepped, and `step` or `zero_grad` did not follow.
        """
        self._promises.clear()
        for unit in self._units:
            for buffer in unit.buffers:
                if buffer.gradients.is_spent:
                    missing = "optimizer.step()" if buffer.gradients.is_ahead else "optimizer.zero_grad()"
                    raise RuntimeError(
                        f"With `step='backward'` every backward is followed by `optimizer.step()` and"
                        f" `optimizer.zero_grad()`, and `{missing}` is missing (unit `{unit.name}`). Call it, or use"
                        " `step='auto'`."
                    )
        super().begin(reach)

    def _announce(self, unit: Unit) -> None:
        """Tell the other ranks whether all gradients of a unit have arrived here. Collective: all ranks, in order."""
        flag = torch.tensor([unit.is_complete], dtype=torch.uint8, device="cpu")
        what = f"agreement on the gradients of unit `{unit.name}`"
        self._promises[unit] = flag, self._communicator.agree_later(flag, what, dist.ReduceOp.MIN)

    def settle(self) -> None:
        """Wait for the agreements of abandoned backwards too. Collective: all ranks have made them."""
        super().settle()
        while self._promises:
            self._promises.popitem()[1][1].wait()

    def _after_reduction(self, unit: Unit, buffer: FlatBuffer) -> None:
        """Step a buffer that was reduced, if it may go ahead."""
        flag, pending = self._promises[unit]
        pending.wait()
        is_trained = any(param.requires_grad for param in buffer.params)
        if flag.item() and is_trained and self.optimizer is not None and self.optimizer.holds_all_of(buffer):
            self.optimizer.step_early(buffer)

    def _check_late(self, units: Iterable[Unit]) -> None:
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


class StepInBackward(StepTiming):
    """Steps that are made in the backward where all gradients have arrived, and the others in ``optimizer.step()``."""

    keeps_gradients = False
    optimizer_class = OptimizerInBackward

    def __init__(self, communicator: Communicator) -> None:
        super().__init__(communicator)
        self._reducer: SteppingReducer | None = None

    def check(self, *, stage: int, is_pipeline: bool, obstacle: str | None) -> None:
        """Refuse options with which no step can be made in the backward.

        Raises:
            ValueError: Names them.
        """
        if is_pipeline or (stage == 0 and self._communicator.world_size > 1):
            what = "a pipeline" if is_pipeline else "`stage=0`"
            raise ValueError(
                f"`step='backward'` does not work with {what}: gradients are complete after the backward. Use"
                " stage 1, 2 or 3 without a pipeline, or `step='auto'`."
            )
        if obstacle is not None:
            raise ValueError(f"`step='backward'` does not work with {obstacle}")

    def reducer(self, units: Sequence[Unit], prefetch: int) -> Reducer:
        """Return the reducer that steps the units."""
        in_flight = 0 if self._communicator.world_size == 1 else min(prefetch, 1)
        self._reducer = SteppingReducer(units, self._communicator, in_flight)
        return self._reducer

    def refuse_many(self, num_optimizers: int) -> None:
        """Refuse several optimizers.

        Raises:
            ValueError: There are several.
        """
        if num_optimizers > 1:
            raise ValueError(
                f"`step='backward'` is for one optimizer, got {num_optimizers}: a backward does not say which of"
                " them is going to step. Use `step='auto'`."
            )

    def attach(self, optimizer: ShardedOptimizer) -> None:
        """Begin to step an optimizer in the backward (ADR 0027).

        Raises:
            ValueError: The engine does not step all groups itself.
        """
        assert isinstance(optimizer, OptimizerInBackward)
        assert self._reducer is not None
        optimizer.checks.require_runs("step='backward'")
        self._reducer.optimizer = optimizer

    def let_go(self) -> None:
        """Let go of the optimizer."""
        if self._reducer is not None:
            self._reducer.optimizer = None

    def refuse(self, action: str) -> None:
        """Refuse an operation on all gradients.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            f"{action} does not work with `step='backward'`: a unit's gradients are stepped and given up before"
            " those of the next one are there. Use `step='auto'`."
        )
