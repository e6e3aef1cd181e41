"""Schedule-free optimizers, whose ``train`` and ``eval`` move the parameters, in Lightning's Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import schedulefree
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_zero.lightning.strategy import ZeroStrategy
from tests.engine.optimizers import ScheduleFree
from tests.lightning_programs import WORLD, Net, assert_equal, assert_moved, loader, seeded, trainer, weights
from tests.sampling import sample
from tests.worlds import run

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda params: schedulefree.AdamWScheduleFree(params, lr=0.05, warmup_steps=3, weight_decay=0.1),
    "radam": lambda params: schedulefree.RAdamScheduleFree(params, lr=0.05),
    "sgd": lambda params: schedulefree.SGDScheduleFree(params, lr=0.5, foreach=False),
    "closure": lambda params: schedulefree.AdamWScheduleFreeClosure(params, lr=0.05),
    "own": lambda params: ScheduleFree(params, lr=0.5),
}


class Free(Net):
    """Trains and evaluates as the optimizer's authors say."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.seen: list[Tensor] = []

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.name](self.parameters())

    def _set(self, mode: str) -> None:
        optimizer: Any = self.optimizers()
        if self.name != "closure":
            getattr(optimizer, mode)()

    def on_train_epoch_start(self) -> None:
        self._set("train")

    def on_validation_model_eval(self) -> None:
        super().on_validation_model_eval()
        self._set("eval")

    def on_validation_model_train(self) -> None:
        super().on_validation_model_train()
        self._set("train")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert self.name == "closure" or self.trainer.optimizers[0].param_groups[0].get("train_mode", False) is False

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(self.loss(batch).detach())


def fit(rank: int, world: int, strategy: Any, name: str, folder: str, **options: Any) -> dict[str, Tensor]:
    resume = options.pop("resume", None)
    module = seeded(lambda: Free(name))
    saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    options = {"max_epochs": 3, "val_check_interval": 2, "enable_checkpointing": True, **options}
    fitted = trainer(rank, world, strategy, callbacks=[saver], **options)
    fitted.fit(module, loader(rank, world), loader(rank, world), ckpt_path=resume)
    values = weights(fitted)
    return {**values, **({} if resume else {"losses": torch.stack(module.seen)})}  # type: ignore[attr-defined]


def trains(rank: int, world: int, name: str, folder: str, ours: list[dict[str, Any]]) -> None:
    expected = fit(rank, world, "ddp", name, f"{folder}/ddp")
    assert_moved({key: value for key, value in expected.items() if key != "losses"}, lambda: Free(name))
    for number, options in enumerate(ours):
        got = fit(rank, world, ZeroStrategy(**options), name, f"{folder}/{number}")
        assert_equal(got, expected, 1e-6, options)
        saved = f"{folder}/{number}/epoch=0.ckpt"
        again = ZeroStrategy(**{**options, "stage": 3 - options["stage"]})
        resumed = fit(rank, world, again, name, f"{folder}/{number}-resumed", resume=saved)
        assert_equal(resumed, {key: value for key, value in expected.items() if key != "losses"}, 1e-6, options)


@pytest.mark.parametrize("name", sample(OPTIMIZERS))
def test_schedule_free_optimizers_train_evaluate_and_resume_as_under_ddp(name: str, tmp_path: Path) -> None:
    ours: list[dict[str, Any]] = [{"stage": stage} for stage in (0, 1, 2, 3)]
    run(trains, WORLD, name, str(tmp_path), ours, timeout_s=120)


def test_schedule_free_optimizers_step_in_host_memory(tmp_path: Path) -> None:
    run(trains, WORLD, "adamw", str(tmp_path), [{"stage": 2, "offload": "cpu"}])
