"""The least a stage can cost: compute, optimizer and one gradient copy alone, then the same collectives alone.

A correct trainer (it passes the same check as the others), but one that keeps everything and overlaps nothing, so each
phase is timed by itself. The collectives are the engine's own calls on flat tensors of the same sizes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.models import UNITS
from benchmarks.opponents import Clock, fused_adamw
from lightning_zero.comm.communicator import Communicator
from lightning_zero.config import Communication
from lightning_zero.engine.units.partition import Territory, choose_territories
from lightning_zero.layout import FlatLayout
from lightning_zero.sharding import ShardedOver

__all__ = ["FloorSide"]


class FloorSide:
    """A plain local module whose parameters are views of one flat tensor per unit."""

    def __init__(self, model: nn.Module, *, stage: int) -> None:
        self.model = model
        self.sharding = ShardedOver.from_stage(stage)
        self.communicator = Communicator(Communication(), torch.device("cpu"))
        self.units = [_FlatUnit(territory, self.communicator) for territory in choose_territories(model, UNITS)]
        self.optimizer = fused_adamw([unit.shard if self.sharding.optim else unit.full for unit in self.units])

    def step(self, batch: Tensor, clock: Clock) -> Tensor:
        """Train on this rank's batch."""
        with clock.phase("compute"):
            loss: Tensor = self.model(batch)
            loss.backward()
            for unit in self.units:
                unit.collect_gradients()
        with clock.phase("collectives"):
            for unit in reversed(self.units):
                unit.reduce()
                if not self.sharding.optim:
                    unit.gather(unit.grad_full, unit.grad_shard)
        with clock.phase("compute"):
            self._give_gradients()
            self.optimizer.step()
        with clock.phase("collectives"):
            for unit in self._gathered:
                unit.gather(unit.full, unit.shard)
        return loss.detach()

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of all parameters by name."""
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def close(self) -> None:
        """Forget the process groups."""
        self.communicator.close()

    @property
    def _gathered(self) -> list[_FlatUnit]:
        """The gathers of a step: at stage 3 again in backward, but for the root, which stays whole."""
        if not self.sharding.optim:
            return []
        return [*self.units, *self.units[1:]] if self.sharding.params else self.units

    def _give_gradients(self) -> None:
        for unit in self.units:
            if self.sharding.optim:
                unit.shard.grad = unit.grad_shard
            else:
                unit.full.grad = unit.grad_full


class _FlatUnit:
    def __init__(self, territory: Territory, communicator: Communicator) -> None:
        self.communicator = communicator
        self.name = territory.name
        self.parameters = territory.params
        shapes = [(names[0], p.shape) for names, p in zip(territory.names, territory.params, strict=True)]
        layout = FlatLayout.build(shapes, communicator.world_size)
        self.full = torch.zeros(layout.padded_numel)
        self.grad_full = torch.zeros(layout.padded_numel)
        self.shard = self.full.chunk(layout.world_size)[communicator.rank]
        self.grad_shard = self.grad_full.chunk(layout.world_size)[communicator.rank]
        self.grads: list[Tensor] = []
        for slot, p in zip(layout.slots, self.parameters, strict=True):
            view = self.full[slot.offset : slot.stop].view(slot.shape)
            p.data = view.copy_(p.detach())
            self.grads.append(self.grad_full[slot.offset : slot.stop].view(slot.shape))

    def collect_gradients(self) -> None:
        for p, place in zip(self.parameters, self.grads, strict=True):
            assert p.grad is not None
            place.copy_(p.grad)
            p.grad = None

    def reduce(self) -> None:
        self.communicator.reduce_scatter(self.grad_shard, self.grad_full, self.name).wait()

    def gather(self, full: Tensor, shard: Tensor) -> None:
        self.communicator.all_gather(full, shard, self.name).wait()
