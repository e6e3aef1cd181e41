"""When units are stepped: the verbs by which the engine asks the option ``step``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from lightning_zero.comm.communicator import Communicator
from lightning_zero.engine.optim.optimizer import ShardedOptimizer
from lightning_zero.engine.runtime.reduction import Reducer
from lightning_zero.engine.units.unit import Unit

__all__ = ["DeferredTiming", "ImmediateTiming", "StepTiming"]


class StepTiming:
    """Steps that ``optimizer.step()`` makes, and requests of offloaded units.

    Call protocol: ``check``, then ``reducer``, when a module is sharded; ``attach`` and ``let_go`` of optimizers, which
    are of ``optimizer_class``.

    Args:
        communicator: Over the ranks that share the model.
    """

    keeps_gradients: ClassVar[bool] = True  # until the step, so that all of them can be read and scaled at once
    optimizer_class: ClassVar[type[ShardedOptimizer]] = ShardedOptimizer

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def check(self, *, stage: int, is_pipeline: bool, obstacle: str | None) -> None:
        """Refuse options that do not go together with it.

        Args:
            stage: ZeRO stage.
            is_pipeline: The model is cut into pipeline stages.
            obstacle: Why the stores of offloaded units do not let them be stepped in the backward.
        """

    def reducer(self, units: Sequence[Unit], prefetch: int) -> Reducer:
        """Return the reducer of units, of which ``prefetch`` are gathered before their use."""
        return Reducer(units, self._communicator, min(prefetch, 1))

    def defers(self, is_apart: bool) -> bool:
        """Say whether the step of a buffer is deferred, whose home is apart from the device or not."""
        return is_apart

    def refuse_many(self, num_optimizers: int) -> None:
        """Refuse optimizers that are too many."""

    def attach(self, optimizer: ShardedOptimizer) -> None:
        """Begin to step an optimizer."""

    def let_go(self) -> None:
        """Let go of the optimizers."""

    def refuse(self, action: str) -> None:
        """Refuse an operation on all gradients if they are not kept until the step."""


class ImmediateTiming(StepTiming):
    """Steps that ``optimizer.step()`` makes."""

    def defers(self, is_apart: bool) -> bool:
        """Return False."""
        return False


class DeferredTiming(StepTiming):
    """Steps that ``optimizer.step()`` requests."""

    def defers(self, is_apart: bool) -> bool:
        """Return True."""
        return True
