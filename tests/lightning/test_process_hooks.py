"""How processes are started, what each of them reads, and what they tell one another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher

from lightning_zero.lightning.strategy import ZeroStrategy


@pytest.mark.parametrize(
    ("start_method", "launcher"),
    [("popen", _SubprocessScriptLauncher), ("spawn", _MultiProcessingLauncher), ("fork", _MultiProcessingLauncher)],
)
def test_start_method_chooses_the_launcher(start_method: Any, launcher: type) -> None:
    strategy = ZeroStrategy(start_method=start_method)
    Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)
    assert isinstance(strategy.launcher, launcher)


def test_data_is_sliced_over_all_nodes() -> None:
    strategy = ZeroStrategy()
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, num_nodes=3, logger=False)
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 6, "rank": 0}
    assert strategy.is_distributed
    assert trainer.world_size == 6


def test_collectives_work_before_the_process_group_exists() -> None:
    strategy = ZeroStrategy()
    tensor = torch.ones(2)
    assert strategy.reduce(tensor) is tensor
    assert strategy.reduce(3.0) == 3.0
    assert strategy.broadcast("x") == "x"
    strategy.barrier()
