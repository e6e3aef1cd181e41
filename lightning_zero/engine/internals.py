"""The engine's methods that users do not call, by who calls them."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_zero.comm.communicator import Communicator
from lightning_zero.engine.checkpoint_access import CheckpointAccess
from lightning_zero.engine.engine_state import EngineState
from lightning_zero.engine.fit_control import FitControl
from lightning_zero.engine.step_control import StepControl

__all__ = ["Internals"]


@dataclass(frozen=True)
class Internals:
    """Parts of an engine that the strategy, pipelines and checkpoints use; no promise to users.

    Attributes:
        fits: Between fits and evaluations.
        steps: In a step.
        checkpoints: To save and to load.
    """

    fits: FitControl
    steps: StepControl
    checkpoints: CheckpointAccess

    @classmethod
    def of(cls, state: EngineState) -> Internals:
        """Return the parts over one engine's state."""
        return cls(FitControl(state), StepControl(state), CheckpointAccess(state))

    @property
    def communicator(self) -> Communicator:
        """The communicator over the ranks that share the parameters."""
        return self.steps.communicator

    @property
    def world_communicator(self) -> Communicator:
        """The communicator over all ranks of the model, other parts included."""
        return self.checkpoints.world_communicator
