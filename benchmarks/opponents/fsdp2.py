"""PyTorch's FSDP2, grouped as torchtitan groups a decoder: embeddings, every block, norm with head, root."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.models import GPT
from benchmarks.opponents import Clock
from benchmarks.opponents.plain import PlainSide

__all__ = ["FSDP2Side"]


class FSDP2Side:
    """The plain loop over a model whose parameters are DTensors."""

    def __init__(self, model: GPT) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard([model.embedding, model.position], mesh=mesh)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        # Gathered again at once in backward, so it is kept.
        fully_shard([model.norm, model.head], mesh=mesh, reshard_after_forward=False)
        fully_shard(model, mesh=mesh)
        self.model = model
        self._loop = PlainSide(model)

    def step(self, batch: Tensor, clock: Clock) -> Tensor:
        """Train on this rank's batch."""
        return self._loop.step(batch, clock)

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of all parameters by name. Collective: all ranks."""
        whole: dict[str, Tensor] = {}
        for name, p in self.model.named_parameters():
            assert isinstance(p, DTensor)
            whole[name] = p.full_tensor().detach()
        return whole

    def close(self) -> None:
        """Nothing to give up."""
