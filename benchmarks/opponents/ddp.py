"""PyTorch's DistributedDataParallel, with the options that make it fastest here."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.opponents import Clock
from benchmarks.opponents.plain import PlainSide

__all__ = ["DDPSide"]


class DDPSide:
    """The plain loop over a wrapped model."""

    def __init__(self, model: nn.Module) -> None:
        self.module = model
        self._loop = PlainSide(DistributedDataParallel(model, gradient_as_bucket_view=True))

    def step(self, batch: Tensor, clock: Clock) -> Tensor:
        """Train on this rank's batch."""
        return self._loop.step(batch, clock)

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of all parameters by name."""
        return {name: p.detach().clone() for name, p in self.module.named_parameters()}

    def close(self) -> None:
        """Nothing to give up."""
