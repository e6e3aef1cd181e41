"""Collectives of the strategy inside a step meet, also where ranks have used different modules before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_zero.lightning.strategy import ZeroStrategy
from tests.lightning_programs import WORLD, Net, assert_equal, loader, seeded, trainer, weights
from tests.worlds import run


class Branching(Net):
    """Ranks use different blocks before, between and behind calls of the strategy's collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        mine, other = self.blocks if self.global_rank == 0 else reversed(self.blocks)
        x = mine(self.first(batch[0]))
        strategy = self.trainer.strategy
        self.seen.append(float(strategy.reduce(x.detach().sum())))
        if batch_idx % 2:
            x = other(x)
        self.seen += self.all_gather(x.detach().mean()).tolist()
        if self.global_rank == 0:
            x = mine(x)
        strategy.barrier()
        self.seen.append(float(strategy.broadcast(batch_idx)))
        loss = torch.nn.functional.mse_loss(self.last(x), batch[1])
        self.log("loss", loss, sync_dist=True, on_step=True)
        if self.global_rank == 1:
            loss = loss + 0 * other(x).sum()
        self.seen.append(float(self.trainer.callback_metrics["loss"]))
        return loss


def branching(rank: int, world: int, options: dict[str, Any]) -> None:
    def fit(strategy: Any) -> tuple[list[float], dict[str, Tensor]]:
        module = seeded(Branching)
        fitted = trainer(rank, world, strategy, max_epochs=2)
        fitted.fit(module, loader(rank, world, 48))
        return module.seen, weights(fitted)  # type: ignore[return-value]

    seen, expected = fit(DDPStrategy(find_unused_parameters=True))
    found, values = fit(ZeroStrategy(timeout=20.0, **options))
    assert_equal(values, expected, 1e-6)
    assert torch.allclose(torch.tensor(found), torch.tensor(seen), atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [{"stage": 3}, {"stage": 2, "step": "deferred"}, {"stage": 1, "offload": "cpu"}],
    ids=["stage3", "stage2-deferred", "stage1-offloaded"],
)
def test_collectives_of_the_strategy_in_a_step_meet_where_ranks_use_different_blocks(options: dict[str, Any]) -> None:
    run(branching, WORLD, options, timeout_s=90)
