"""Options of optimizers and frozen parameters that differ between ranks are an error, never other weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_zero.lightning.strategy import ZeroStrategy
from tests.lightning_programs import Net, Sgd, loader, seeded, trainer
from tests.sampling import sample
from tests.worlds import run

TIMEOUT_S = 15.0


class LocalPlateau(Net):
    """A schedule that follows a value of each rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("mine", float(self.current_epoch if self.global_rank else -self.current_epoch))
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "mine"}}


class SetsAlone(Sgd):
    """A rank that sets an option alone, after the backward of the second batch."""

    option = "lr"

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_rank == 0 and self.global_step == 1:
            optimizer.param_groups[0][self.option] /= 2


class SetsMomentumAlone(SetsAlone):
    option = "momentum"


class SetsInLastStep(Sgd):
    """A rank that sets an option alone, for the last step only."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = 0.1 if self.global_step == 11 and self.global_rank == 1 else 0.3


class FreezesAlone(Net):
    """A rank that freezes a parameter alone in the second epoch."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1 and self.global_rank == 1:
            self.blocks[0].linear.weight.requires_grad_(False)


class FreezesBlockAlone(Net):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1 and self.global_rank == 1:
            self.blocks[0].requires_grad_(False)


class FreezesAloneInStep(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 2 and self.global_rank == 1:
            self.blocks[0].linear.weight.requires_grad_(False)
        return self.loss(batch)


OPTIONS = [
    (LocalPlateau, r"`lr` of group 0 of optimizer 0 is 0\.1 on rank 0, 0\.01 on rank 1.*sync_dist=True"),
    (SetsAlone, r"`lr` of group 0 of optimizer 0 is 0\.15 on rank 0, 0\.3 on rank 1"),
    (SetsMomentumAlone, r"`momentum` of group 0 of optimizer 0 is 0\.45 on rank 0, 0\.9 on rank 1"),
    (SetsInLastStep, r"`lr` of group 0 of optimizer 0.* is 0\.3 on rank 0, 0\.1 on rank 1"),
]
FROZEN = [
    (FreezesAlone, r"`blocks\.0\.linear\.weight` is trained on rank 0, frozen on rank 1"),
    (FreezesBlockAlone, r"`blocks\.0\.norm\.weight` is trained on rank 0, frozen on rank 1"),
    (FreezesAloneInStep, r"`blocks\.0\.linear\.weight` is trained on rank 0, frozen on rank 1"),
]


def _fit(rank: int, world: int, make: Callable[[], Net], stage: int) -> str:
    """Return the error of a fit."""
    fitted = trainer(rank, world, ZeroStrategy(stage=stage, timeout=TIMEOUT_S), max_epochs=3)
    try:
        fitted.fit(seeded(make), train_dataloaders=loader(rank, world, size=32))
    except RuntimeError as error:
        return str(error)
    return "no error"


CASES = [(*one, stage) for one in OPTIONS + FROZEN for stage in (0, 1, 2, 3)]
KEPT = [CASES[4 * place + stage] for place, stage in enumerate((2, 0, 1, 3, 2, 3, 0))]


@pytest.mark.parametrize("case", sample(CASES, *KEPT), ids=lambda case: f"{case[0].__name__}-stage{case[2]}")
def test_facts_that_differ_are_an_error_on_all_ranks(case: tuple[Callable[[], Net], str, int]) -> None:
    make, message, stage = case
    for error in run(_fit, 2, make, stage, timeout_s=60):
        assert re.search(message, error.replace("\n", " ")), error
