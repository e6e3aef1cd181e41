"""Parameters that come into a module after it was sharded are refused by name."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_zero import ZeroEngine, ZeroStrategy
from tests import worlds
from tests.references import TinyGPT, token_loss, tokens


def _assign_weight(module: TinyGPT) -> None:
    module.head.weight = nn.Parameter(torch.zeros(11, 6))


def _replace_head(module: TinyGPT) -> None:
    module.head = nn.Linear(6, 11, bias=False)


def _add_frozen(module: TinyGPT) -> None:
    module.blocks[1].register_parameter("extra", nn.Parameter(torch.zeros(2), requires_grad=False))


CHANGES: dict[str, tuple[Callable[[TinyGPT], None], str]] = {
    "weight": (_assign_weight, "head.weight"),
    "head": (_replace_head, "head.weight"),
    "frozen": (_add_frozen, "blocks.1.extra"),
}


def _strange(rank: int, world: int, stage: int, name: str, where: str) -> None:
    module = TinyGPT()
    engine = ZeroEngine(stage, units=("Block",))
    engine.shard(module)
    optimizer = engine.attach(torch.optim.SGD(module.parameters(), lr=0.1))
    token_loss(module, rank, 0).backward()
    change, param = CHANGES[name]
    change(module)
    act = {"forward": lambda: token_loss(module, rank, 1), "step": optimizer.step, "save": engine.records}[where]
    with pytest.raises(RuntimeError, match=f"`{param}` came into the module after it was sharded"):
        act()


@pytest.mark.parametrize("where", ["forward", "step", "save"])
@pytest.mark.parametrize("name", list(CHANGES))
@pytest.mark.parametrize("stage", [1, 3])
def test_a_parameter_that_was_put_into_the_module_later_is_refused_by_name(stage: int, name: str, where: str) -> None:
    worlds.run(_strange, 2, stage, name, where)


def _fewer(rank: int, world: int, stage: int) -> None:
    """What is taken out, tied anew or moved is no stranger."""
    module = TinyGPT()
    engine = ZeroEngine(stage, units=("Block",))
    engine.shard(module)
    optimizer = engine.attach(torch.optim.SGD(module.parameters(), lr=0.1))
    token_loss(module, rank, 0).backward()
    optimizer.step()
    module.blocks = module.blocks[:2]
    module.head.weight = module.embedding.weight
    token_loss(module, rank, 1).backward()
    optimizer.step()
    engine.close()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_module_may_lose_and_tie_parameters(stage: int) -> None:
    worlds.run(_fewer, 2, stage)


class _Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.head(self.body(batch)).square().mean()
        return loss

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(4, 4), batch_size=2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_head_may_be_replaced_between_two_fits() -> None:
    module = _Net()
    for width in (2, 3):
        module.head = nn.Linear(4, width)
        before = module.head.weight.detach().clone()
        trainer = pl.Trainer(
            strategy=ZeroStrategy(stage=2), accelerator="cpu", devices=1, max_epochs=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module)
        assert not torch.equal(module.head.weight, before)


def _lent(rank: int, world: int, stage: int) -> None:
    """The parameters of a copy may be lent to the module for a forward."""
    module, average = TinyGPT(), TinyGPT()
    with torch.no_grad():
        for param in average.parameters():
            param.mul_(0.5)
    batch = tokens(rank, 0)
    expected = average(batch)
    engine = ZeroEngine(stage, units=("Block",))
    engine.shard(module)
    with torch.no_grad():
        found = torch.func.functional_call(module, dict(average.named_parameters()), (batch,))
    torch.testing.assert_close(found, expected)
    token_loss(module, rank, 0).backward()
    engine.close()


@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_that_functional_call_lends_are_no_strangers(stage: int) -> None:
    worlds.run(_lent, 2, stage)


def _second(rank: int, world: int, stage: int, drops: bool) -> None:
    module = TinyGPT()
    first: ZeroEngine | None = ZeroEngine(stage)
    first.shard(module)
    token_loss(module, rank, 0).backward()
    if drops:
        first = None
        gc.collect()
    with pytest.raises(RuntimeError, match="is sharded by another engine"):
        ZeroEngine(1).shard(nn.Sequential(module))
    if first is not None:
        first.unshard()
        second = ZeroEngine(1)
        second.shard(module)
        token_loss(module, rank, 0).backward()
        assert second.grad_norm() > 0
        second.close()


@pytest.mark.parametrize("drops", [False, True], ids=["kept", "dropped"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_module_that_another_engine_shards_is_refused(stage: int, drops: bool) -> None:
    worlds.run(_second, 2, stage, drops)
