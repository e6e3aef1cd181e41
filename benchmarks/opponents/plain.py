"""The plain PyTorch loop in one process."""

from __future__ import annotations

from torch import Tensor, nn

from benchmarks.opponents import Clock, fused_adamw

__all__ = ["PlainSide"]


class PlainSide:
    """Forward, backward, step, zero_grad."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = fused_adamw(model.parameters())

    def step(self, batch: Tensor, clock: Clock) -> Tensor:
        """Train on one batch."""
        with clock.phase("step"):
            loss: Tensor = self.model(batch)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of all parameters by name."""
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def close(self) -> None:
        """Nothing to give up."""
