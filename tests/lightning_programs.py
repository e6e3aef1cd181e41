"""Programs for Lightning's Trainer on the ranks of a pool, and what ``strategy="ddp"`` makes of them.

Every rank has its own slice of the data by an explicit sampler, because the injected one shuffles.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from lightning_zero.lightning.strategy import ZeroStrategy

__all__ = [
    "Block",
    "Grown",
    "Net",
    "Ranks",
    "STAGES",
    "Sgd",
    "WORLD",
    "assert_equal",
    "assert_moved",
    "data",
    "loader",
    "parity",
    "seeded",
    "trainer",
    "weights",
]

STAGES = (0, 1, 2, 3)
WORLD = 2

warnings.filterwarnings("ignore")


class Ranks(LightningEnvironment):
    """The processes that the test already runs in."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self._rank, self._world = rank, world

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return self._world

    def global_rank(self) -> int:
        return self._rank

    def local_rank(self) -> int:
        return self._rank

    def teardown(self) -> None:
        pass


class RanksOfNodes(Ranks):
    """The processes that the test runs in, as nodes of some ranks."""

    def __init__(self, rank: int, world: int, node: int) -> None:
        super().__init__(rank, world)
        self._node = node

    def local_rank(self) -> int:
        return self._rank % self._node

    def node_rank(self) -> int:
        return self._rank // self._node


def nodes(rank: int, world: int, node: int) -> dict[str, Any]:
    """Return the Trainer's options for nodes of some ranks."""
    return {"environment": RanksOfNodes(rank, world, node), "devices": node, "num_nodes": world // node}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(LightningModule):
    """A few blocks that fit random targets."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.last = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("val_loss", loss, sync_dist=True)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02, fused=True)


class Grown(Net):
    """A module that is changed between two runs: other names, and a module that has buffers only."""

    def __init__(self) -> None:
        super().__init__()
        self.norm: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = block(x)
        return (self.last if hasattr(self, "last") else self.head)(x)

    def grow(self) -> None:
        self.norm = nn.BatchNorm1d(6, affine=False)
        self.head = self.last
        del self.last


class Sgd(Net):
    def configure_optimizers(self) -> Any:
        # PyTorch's fused SGD leaves 16-bit parameters on a CPU as they are.
        fused = next(self.parameters()).dtype == torch.float32
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9, fused=fused)


def data(size: int = 32) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(size, 4, generator=generator), torch.randn(size, 3, generator=generator))


def loader(
    rank: int, world: int, size: int = 32, batch: int = 4, dataset: Dataset[Any] | None = None
) -> DataLoader[Any]:
    dataset = dataset or data(size)
    sampler = DistributedSampler(dataset, world, rank, shuffle=False, drop_last=False)
    return DataLoader(dataset, batch_size=batch, sampler=sampler)


def trainer(rank: int, world: int, strategy: Any, **options: Any) -> Trainer:
    """A quiet Trainer on the ranks of the pool; ``strategy`` is a stage, a strategy or a name."""
    if isinstance(strategy, int):
        strategy = ZeroStrategy(stage=strategy)  # type: ignore[arg-type]
    plugins = [options.pop("environment", None) or Ranks(rank, world), *options.pop("plugins", [])]
    defaults = {
        "accelerator": "cpu",
        "devices": world,
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
    }
    return Trainer(strategy=strategy, plugins=plugins, **{**defaults, **options})


def seeded(make: Callable[[], LightningModule]) -> LightningModule:
    torch.manual_seed(0)
    return make()


def weights(of: Trainer) -> dict[str, Tensor]:
    """The whole parameters and the buffers. Collective."""
    module, strategy = of.lightning_module, of.strategy
    if isinstance(strategy, ZeroStrategy):
        values = {name: strategy.full_param(p).clone() for name, p in module.named_parameters()}
    else:
        values = {name: p.detach().clone() for name, p in module.named_parameters()}
    return values | {name: buffer.clone() for name, buffer in module.named_buffers()}


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 0.0, what: Any = "") -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        difference = (got[name].double() - value.double()).abs().max().item() if value.numel() else 0.0
        assert difference <= atol, f"{what}: {name} differs by {difference}"


def assert_moved(values: dict[str, Tensor], make: Callable[[], LightningModule]) -> None:
    start = dict(seeded(make).named_parameters())
    assert any(not torch.equal(values[name].float(), start[name].detach().float()) for name in start)


def parity(
    rank: int,
    world: int,
    make: Callable[[], LightningModule] = Net,
    *,
    atol: float = 0.0,
    stages: tuple[int, ...] = STAGES,
    loaders: dict[str, Any] | None = None,
    reference: str = "ddp",
    ours: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Fit under DDP and at every stage; the weights must agree."""

    def fit(strategy: Any) -> dict[str, Tensor]:
        made = {name: value() if callable(value) else value for name, value in options.items()}
        fitted = trainer(rank, world, strategy, **made)
        fitted.fit(seeded(make), train_dataloaders=loader(rank, world, **(loaders or {})))
        return weights(fitted)

    expected = fit(reference)
    assert_moved(expected, make)
    for stage in stages:
        assert_equal(fit(ZeroStrategy(stage=stage, **(ours or {}))), expected, atol, f"stage {stage}")
