"""How processes are started, what each of them reads, and what they tell one another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher

from lightning_zero.lightning.process_hooks import _Stacked
from lightning_zero.lightning.strategy import ZeroStrategy
from tests import worlds


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


def _penalty_of_gathered(rank: int, world: int) -> tuple[list[float], list[float]]:
    value = torch.tensor([rank + 1.0], requires_grad=True)
    (grad,) = torch.autograd.grad(_Stacked.apply(value, dist.group.WORLD).pow(3).sum(), value, create_graph=True)
    grad.sum().backward()
    assert value.grad is not None
    return grad.tolist(), value.grad.tolist()


def test_second_derivatives_of_gathered_values_are_summed_over_ranks() -> None:
    """The sum over ranks in the backward left no trace: a penalty on its gradient counted on the rank alone."""
    assert worlds.run(_penalty_of_gathered, 2) == [([6.0], [12.0]), ([24.0], [24.0])]
