"""A model that ``parallelize_module`` and ``fully_shard`` divide, for Lightning's ``ModelParallelStrategy``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Dataset, DistributedSampler

__all__ = ["Mlp", "Plain", "TwoAxes", "batches", "parallelize"]

VOCAB, WIDTH, SAMPLES, LENGTH, BATCH = 12, 8, 32, 6, 4


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Plain(LightningModule):
    """Predicts tokens; nothing is divided."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Mlp() for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.blocks.parameters(), "weight_decay": 0.1}]
        groups += [{"params": [*self.tokens.parameters(), *self.head.parameters()], "lr": 0.05}]
        optimizer = torch.optim.AdamW(groups, lr=0.02, eps=1e-3, foreach=False)  # others refuse mixed parameters
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class TwoAxes(Plain):
    """Divided by PyTorch: layers over the axis ``tensor_parallel``, and all parameters over ``data_parallel``."""

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        parallelize(self, self.device_mesh)


def parallelize(module: nn.Module, mesh: Any) -> None:
    """Divide a model of this file over a mesh, once."""
    _clear_sharding_prop_cache()  # it has process groups of earlier tests in this process
    if mesh["tensor_parallel"].size() > 1 and not hasattr(module.head.weight, "placements"):
        layers: dict[str, Any] = {
            "tokens": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
        for number in range(len(module.blocks)):
            layers[f"blocks.{number}.up"] = ColwiseParallel()
            layers[f"blocks.{number}.down"] = RowwiseParallel()
        parallelize_module(module, mesh["tensor_parallel"], layers)
    if mesh["data_parallel"].size() > 1:
        for block in module.blocks:
            fully_shard(block, mesh=mesh["data_parallel"])
        fully_shard(module, mesh=mesh["data_parallel"])


class _Samples(Dataset[Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> Tensor:
        return torch.randint(VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(number))


def batches(data_rank: int, data_ranks: int) -> DataLoader[Tensor]:
    """Return the batches of a data rank; all grids have the same samples in a step."""
    sampler: Any = DistributedSampler(_Samples(), data_ranks, data_rank, shuffle=False)
    return DataLoader(_Samples(), batch_size=BATCH // data_ranks, sampler=sampler)
