from __future__ import annotations

import gc
import os
import random
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import numpy
import pytest
import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import nn

from lightning_zero import MachineRates, Offload, Pipeline, Simulation, ZeroStrategy, estimate_memory, simulate_step
from tests.lightning.test_estimate import BATCH, DEEPSPEED, WIDTH, Asks, Configured, Program, Ready, WithoutOptimizer

WEIGHTS = 3 * (WIDTH + 1) * WIDTH * 4  # bytes


def _simulate(module: Any = Program, strategy: ZeroStrategy | None = None, **options: Any) -> Simulation:
    return simulate_step(module, strategy, **{"world_size": 4, "batch": BATCH, "accelerator": "cpu", **options})


def _kinds(simulation: Simulation, kind: str) -> list[str]:
    return [one.call.what for one in simulation.calls if one.call.kind == kind]


def test_a_step_of_any_rank_is_told_and_module_and_strategy_stay() -> None:
    module, strategy = Program(), ZeroStrategy(stage=3, units=["Linear"])
    before = {name: value.clone() for name, value in module.state_dict().items()}
    found = _simulate(module, strategy, rank=3, rates=MachineRates(launch_us=10))
    assert (found.rank, found.world_size, found.ranks_per_node) == (3, 4, 4)
    assert _kinds(found, "all_gather")[:3] == [f"all-gather of unit `net.{place}.0`" for place in range(3)]
    assert len(_kinds(found, "reduce_scatter")) == 3
    assert found.sent_bytes["reduce_scatter"] == WEIGHTS * 3 // 4
    assert {one.call.ranks for one in found.calls} == {(0, 1, 2, 3)}
    assert set(found.phases) >= {"forward", "backward", "step"}
    assert found.seconds == pytest.approx(sum(found.phases.values()) + found.exposed_s)
    assert max(one.nbytes for one in found.memory) == found.peak_bytes == sum(found.at_peak.values())
    assert found.flops == 2 * 8 * WIDTH * WIDTH * (3 + 3 + 2)  # the first layer has no gradient of its input
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert strategy.communication.backend is None


def test_the_process_is_as_before() -> None:
    rank, num_threads = getattr(rank_zero_only, "rank", None), torch.get_num_threads()
    _simulate(rank=2)
    assert not dist.is_initialized()
    assert gc.isenabled()
    assert (getattr(rank_zero_only, "rank", None), torch.get_num_threads()) == (rank, num_threads)


def test_every_rank_sends_the_same() -> None:
    ranks = [_simulate(rank=rank).sent_bytes for rank in range(4)]
    assert ranks == ranks[:1] * 4


def test_one_rank_sends_nothing() -> None:
    found = _simulate(world_size=1)
    assert found.calls == []
    assert found.exposed_s == 0


@pytest.mark.parametrize("make", [Configured, lambda: Configured()])
def test_modules_are_made_as_in_a_fit(make: Any) -> None:
    assert _simulate(make).peak_bytes == _simulate().peak_bytes


@pytest.mark.parametrize("name", ["max_steps", "estimated_stepping_batches", "num_training_batches"])
def test_hooks_may_ask_how_many_steps_there_are(name: str) -> None:
    """They got the numbers of the three steps, which schedules refuse."""
    found: list[Any] = []

    class Told(Asks):
        def configure_optimizers(self) -> Any:
            found.append((type(self.trainer).__name__, self.trainer.world_size, getattr(self.trainer, self.name)))
            return super().configure_optimizers()

        def on_train_start(self) -> None:
            found.append((type(self.trainer), self.trainer.max_steps))

    assert _simulate(lambda: Told(name)).device["parameters"] == _simulate().device["parameters"]
    assert found == [("Trainer", 4, 1000), (pl.Trainer, -1)]
    assert _simulate(lambda: Ready(name)).device["parameters"] > _simulate().device["parameters"]


def test_a_module_on_the_meta_device() -> None:
    with torch.device("meta"):
        module = Program()
    assert _simulate(module).sent_bytes == _simulate().sent_bytes
    assert all(one.is_meta for one in module.parameters())


class Scale(nn.Module):
    """Has no `reset_parameters`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Scaled(Program):
    def configure_model(self) -> None:
        with torch.device("meta"):
            self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Scale())


def test_meta_modules_need_no_values() -> None:
    with torch.device("meta"):
        module = Program(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Scale()))
    assert _simulate(module).sent_bytes == _simulate(Scaled).sent_bytes


def test_micro_batches_at_stage_2_reduce_each() -> None:
    once = _simulate(strategy=ZeroStrategy(stage=2))
    twice = _simulate(strategy=ZeroStrategy(stage=2), accumulate_grad_batches=2)
    assert twice.sent_bytes["reduce_scatter"] == 2 * once.sent_bytes["reduce_scatter"]
    assert twice.sent_bytes["all_gather"] == once.sent_bytes["all_gather"]
    assert twice.flops == 2 * once.flops


def test_clipping_reduces_a_norm_and_another_optimizer_has_other_states() -> None:
    options: dict[str, Any] = {"gradient_clip_val": 1.0, "optimizer": torch.optim.AdamW}
    found = _simulate(**options)
    assert "all-reduce of a norm" in [one.call.what for one in found.calls]
    assert found.at_peak["optimizer"] > _simulate().at_peak["optimizer"]


def test_links_between_nodes_are_slower() -> None:
    slow = MachineRates(network=0.01)
    inside = _simulate(rates=slow, ranks_per_node=4)
    outside = _simulate(rates=slow, ranks_per_node=2)
    assert outside.exposed_s > 10 * inside.exposed_s
    assert _simulate(world_size=16).ranks_per_node == 8


def test_offloaded_states_are_not_on_the_device_and_take_time() -> None:
    kept = _simulate(optimizer=torch.optim.AdamW)
    away = _simulate(optimizer=torch.optim.AdamW, strategy=ZeroStrategy(offload="cpu"), rates=MachineRates(host=0.01))
    assert away.at_peak["optimizer"] == 0 < kept.at_peak["optimizer"]
    step = 28 * WEIGHTS / 4 / 4 / 0.01e9  # a gradient, and 3 values that are read and written, of a quarter
    assert away.seconds - kept.seconds == pytest.approx(step, rel=0.1)


@pytest.mark.parametrize("stage", [2, 3])
def test_disks_are_pretended_and_take_time(stage: Literal[2, 3], tmp_path: Path) -> None:
    folder = tmp_path / "disks"
    away = ZeroStrategy(stage=stage, offload=Offload(optimizer="nvme", path=folder))
    slow = _simulate(optimizer=torch.optim.AdamW, strategy=away, rates=MachineRates(disk=0.001))
    fast = _simulate(optimizer=torch.optim.AdamW, strategy=away, rates=MachineRates(disk=1000.0))
    assert not folder.exists()
    assert slow.at_peak["optimizer"] == 0
    step = 28 * WEIGHTS / 4 / 4  # the bytes of a gradient that comes and goes, and of states, which do too
    assert slow.seconds - fast.seconds == pytest.approx(step / 0.001e9, rel=0.3)
    assert slow.seconds == pytest.approx(sum(slow.phases.values()) + slow.exposed_s)


def test_a_configuration_of_deepspeed_is_the_strategy_that_it_stands_for() -> None:
    config = DEEPSPEED | {"fp16": {"enabled": True}, "bf16": {"enabled": False}}
    found = _simulate(WithoutOptimizer, ZeroStrategy.from_deepspeed(config), accelerator="gpu")
    assert found.precision.startswith("16-")
    strategy = ZeroStrategy(stage=2)
    options: dict[str, Any] = {"accumulate_grad_batches": 3, "gradient_clip_val": 1.0, "optimizer": torch.optim.AdamW}
    expected = _simulate(WithoutOptimizer, strategy, precision=found.precision, accelerator="gpu", **options)
    assert [one.call for one in found.calls] == [one.call for one in expected.calls]
    assert found.peak_bytes == expected.peak_bytes


class Manual(Program):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.optimizers().zero_grad()  # type: ignore[union-attr]
        self.manual_backward(self.net(batch).square().mean())
        self.optimizers().step()  # type: ignore[union-attr]


def test_manual_optimization_is_simulated() -> None:
    assert _simulate(Manual).sent_bytes["reduce_scatter"] == _simulate().sent_bytes["reduce_scatter"]


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ({"stage": 3}, {}),
        ({"stage": 2}, {"accumulate_grad_batches": 2}),
        ({"stage": 1, "offload": "cpu"}, {"precision": "bf16-mixed"}),
        ({"stage": 2}, {"precision": "16-mixed", "accelerator": "gpu"}),
        ({"stage": 3}, {"precision": "16-true"}),
    ],
)
def test_the_peak_is_that_of_an_estimate(strategy: dict[str, Any], options: dict[str, Any]) -> None:
    batch = torch.ones(512, WIDTH)
    given = {"world_size": 4, "batch": batch, "accelerator": "cpu", "optimizer": torch.optim.AdamW, **options}
    found = simulate_step(Program, ZeroStrategy(**strategy), **given)
    expected = estimate_memory(Program, ZeroStrategy(**strategy), **given, side_by_side=False).own
    assert found.peak_bytes == pytest.approx(expected.peak_bytes, rel=0.005)


class Accumulates(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.net(batch).square().mean())
        if batch_idx % 2:
            self.optimizers().step()  # type: ignore[union-attr]


class TwoOptimizers(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
            self.manual_backward(self.net(batch).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net[0], self.net[2])]  # type: ignore[index]


def test_several_optimizers_step_in_a_batch() -> None:
    found = _simulate(TwoOptimizers, strategy=ZeroStrategy(stage=1))
    assert {one.phase for one in found.calls} >= {"backward"}
    assert found.phases["step"] > 0
    alone = _simulate(Manual, strategy=ZeroStrategy(stage=1))
    assert found.phases["forward"] == pytest.approx(2 * alone.phases["forward"], rel=0.05)  # the second one too


class Watches(Program):
    def __init__(self, folder: Any) -> None:
        super().__init__()
        self.folder = folder

    def configure_callbacks(self) -> Any:
        return [pl.callbacks.ModelCheckpoint(self.folder), pl.callbacks.EarlyStopping("val_loss")]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch.add_(1)
        self.logger.experiment.add_scalar("x", 1)  # type: ignore[union-attr]
        return super().training_step(batch, batch_idx)


def test_callbacks_schedules_and_loggers_of_a_module_do_nothing(tmp_path: Any) -> None:
    batch = torch.zeros(8, WIDTH)
    _simulate(lambda: Watches(tmp_path), batch=batch)
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(batch, torch.zeros(8, WIDTH))


def test_random_numbers_and_the_environment_are_as_before() -> None:
    pl.seed_everything(3, verbose=False)
    expected = [torch.rand(1).item(), random.random(), numpy.random.rand()]
    pl.seed_everything(3, verbose=False)
    environment = dict(os.environ)
    _simulate()
    with pytest.raises(ValueError, match="needs a batch"):
        _simulate(batch=None)
    assert dict(os.environ) == environment
    assert [torch.rand(1).item(), random.random(), numpy.random.rand()] == expected


def test_a_compiled_module_is_simulated_as_it_is() -> None:
    compiled: Any = torch.compile(Program(), backend="eager")
    assert _simulate(compiled).sent_bytes == _simulate().sent_bytes


def test_clipping_by_value_reduces_no_norm() -> None:
    found = _simulate(gradient_clip_val=1.0, gradient_clip_algorithm="value")
    assert "all-reduce of a norm" not in [one.call.what for one in found.calls]


class Lbfgs(Program):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Unoptimized(Program):
    def configure_optimizers(self) -> Any:
        return None


def _of_a_trainer() -> ZeroStrategy:
    strategy = ZeroStrategy(stage=1)
    pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, logger=False, enable_checkpointing=False)
    return strategy


class Stops(Program):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int:
        return -1 if batch_idx == 1 else 0


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (Program, {"rank": 4}, "`rank=4` must be one of the ranks 0 to 3 of `world_size=4`"),
        (Program, {"rank": -1}, "`rank=-1` must be"),
        (Program, {"world_size": 0}, "`world_size=0` must be a number of ranks"),
        (Program, {"ranks_per_node": 3}, "`ranks_per_node=3` must be a number that divides `world_size=4`"),
        (Program, {"batch": None}, "A simulation needs a batch of `Program`"),
        (nn.Identity, {}, "A simulation trains a `LightningModule`, and `Identity` is none"),
        (Program, {"precision": "nf4"}, "`precision='nf4'` is not forecast yet"),
        (
            Program,
            {"strategy": ZeroStrategy(pipeline=Pipeline(stages=2, partition="measured"))},
            r"`Pipeline\(partition='measured'\)` is not simulated yet",
        ),
        (Program, {"strategy": ZeroStrategy(pipeline=3)}, "`pipeline=3` does not divide `world_size=4`"),
        (Stops, {}, "`Stops` does not step in every 1 batch"),
        (Accumulates, {}, "`Accumulates` does not step in every 1 batch"),
        (Lbfgs, {"strategy": ZeroStrategy(stage=0)}, "`LBFGS`, whose step needs a closure, is not simulated yet"),
        (Program, {"accumulate_grad_batches": 0}, "`accumulate_grad_batches=0` must be a number of 1 or more"),
        (Program, {"accumulate_grad_batches": 2.0}, "`accumulate_grad_batches=2.0` must be"),
        (Program, {"device_memory": 2**30}, "`device_memory=1073741824` is that of a GPU. With `acc"),
        (Program, {"device_memory": "80GiB"}, "`device_memory='80GiB'` must be a number of bytes above 0"),
        (Program, {"rates": 5}, "`rates=5` must be `MachineRates"),
        (Program, {"strategy": "zero_3"}, "`strategy='zero_3'` is not simulated"),
        (Program, {"strategy": _of_a_trainer()}, "`strategy` is that of a Trainer"),
    ],
)
def test_errors_name_the_option_and_the_remedy(module: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _simulate(module, **options)
    assert not dist.is_initialized()


class Fails(Program):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise KeyError("labels")


def test_an_error_of_the_program_is_its_own() -> None:
    with pytest.raises(KeyError, match="labels"):
        _simulate(Fails)
    assert not dist.is_initialized()
    assert isinstance(pl.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu"), pl.Trainer)
