"""How processes are started, what each of them reads, and what they tell one another."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher

from lightning_zero.comm.peers import Peers
from lightning_zero.lightning.process_hooks import _Stacked
from lightning_zero.lightning.strategy import ZeroStrategy
from tests import worlds
from tests.lightning_programs import Net, assert_moved, loader, trainer, weights


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


class _FailsToo(Callback):
    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        raise KeyError("the error of the callback")


class _Fails(Net):
    """Fails once, in its second batch, on some ranks."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails = fails

    def loss(self, batch: Any) -> torch.Tensor:
        if self.fails and self.trainer.fit_loop.epoch_loop.batch_idx == 1:
            self.fails = False
            raise ValueError("the first error")
        return super().loss(batch)


def _error_behind_an_error(rank: int, world: int) -> str:
    fitted = trainer(rank, world, ZeroStrategy(stage=2, timeout=30), callbacks=[_FailsToo()] if rank else [])
    with pytest.raises((KeyError, RuntimeError)) as caught:
        fitted.fit(_Fails(rank == 1), loader(rank, world))
    if rank:
        Peers.of_world().end_run(fitted.strategy)
    return "".join(traceback.format_exception(caught.value))


def test_a_callback_that_fails_after_an_error_does_not_hide_it_from_other_ranks() -> None:
    told = worlds.run(_error_behind_an_error, 2)[0]
    assert "irst error was on rank 1: ValueError: the first error" in told


def _fit_after_an_error(rank: int, world: int, failing: int, is_same: bool) -> None:
    strategy = ZeroStrategy(stage=1, pipeline=2, timeout=6)
    fitted = trainer(rank, world, strategy, max_epochs=1)
    module = _Fails(rank >= failing)
    with pytest.raises((ValueError, RuntimeError)):
        fitted.fit(module, loader(0, 1))
    mesh = strategy._mesh
    module.fails = False
    fitted.fit(module if is_same else _Fails(False), loader(0, 1))
    assert fitted.state.finished
    assert strategy._mesh is not mesh
    assert_moved(weights(fitted), Net)


@pytest.mark.parametrize("is_same", [False, True], ids=["other", "same"])
@pytest.mark.parametrize("failing", [pytest.param(0, id="all"), pytest.param(1, id="last", marks=pytest.mark.slow)])
def test_a_strategy_that_has_seen_an_error_makes_its_groups_anew(failing: int, is_same: bool) -> None:
    worlds.run(_fit_after_an_error, 2, failing, is_same)
