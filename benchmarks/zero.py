"""The engine under measurement: a plain loop around ``ZeroEngine``."""

from __future__ import annotations

from torch import Tensor, nn

from benchmarks.models import UNITS
from benchmarks.opponents import Clock, fused_adamw
from lightning_zero.engine.engine import ZeroEngine

__all__ = ["ZeroSide"]


class ZeroSide:
    """Forward, backward, step, zero_grad, in the scopes that the Lightning strategy opens."""

    def __init__(self, model: nn.Module, *, stage: int) -> None:
        self.engine = ZeroEngine(stage, units=UNITS)
        self.model = self.engine.shard(model)
        self.optimizer = fused_adamw(self.model.parameters())
        self.engine.attach(self.optimizer)

    def step(self, batch: Tensor, clock: Clock) -> Tensor:
        """Train on this rank's batch."""
        with clock.phase("step"):
            with self.engine.scope("training_step"):
                loss: Tensor = self.model(batch)
                with self.engine.backward_scope():
                    loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of all parameters by name. Collective: all ranks."""
        return {name: self.engine.full_param(p) for name, p in self.model.named_parameters()}

    def close(self) -> None:
        """Give up hooks and buffers."""
        self.engine.close()
