"""What `ZeroMonitor` writes, and what it is computed from."""

from __future__ import annotations

import csv
import mmap
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero.lightning.callbacks import ZeroMonitor
from lightning_zero.lightning.flops import FlopsProfile
from lightning_zero.lightning.monitor import Meter, Phases, memory_in_use, samples_in, tokens_in
from lightning_zero.lightning.strategy import ZeroStrategy
from tests.lightning_programs import Net, loader, trainer, weights
from tests.worlds import run

WORLD = 2
GIB = 2**30
PHASES = ("data", "forward", "backward", "optimizer")
MEMORY = {
    f"memory/{name}_GiB" for name in ("parameters", "gradients", "optimizer", "gathered", "gathered_peak", "other")
}


def rows(folder: Path) -> list[dict[str, str]]:
    path = next(folder.rglob("metrics.csv"))
    return [row for row in csv.DictReader(path.open()) if row["time/wait_s"]]


def monitored(rank: int, world: int, folder: str, strategy: Any) -> dict[str, int]:
    fitted = trainer(
        rank, world, strategy, max_epochs=2, callbacks=ZeroMonitor(tokens=lambda batch: 10, grad_norm=True),
        logger=CSVLogger(folder), log_every_n_steps=2,
    )  # fmt: skip
    fitted.fit(Net(), loader(rank, world), loader(rank, world))
    weights(fitted)
    return dict(fitted.strategy.engine.stats().memory)  # type: ignore[attr-defined]


@pytest.mark.parametrize("stage", [1, 3])
def test_monitor_writes_a_row_per_interval(stage: int, tmp_path: Path) -> None:
    memory = run(monitored, WORLD, str(tmp_path), stage)[0]
    written = rows(tmp_path)
    assert len(written) == 4
    for row in written:
        assert row.keys() >= MEMORY | {"throughput/tokens_per_s", "throughput/samples_per_s", "grad_norm"}
        assert float(row["traffic/reduce_scatter_MiB"]) > 0
        assert float(row["grad_norm"]) > 0
        assert float(row["throughput/tokens_per_s"]) == pytest.approx(2.5 * float(row["throughput/samples_per_s"]))
        phases = [float(row[f"time/{phase}_s"]) for phase in PHASES]
        assert all(seconds > 0 for seconds in phases)
        assert sum(phases) <= float(row["time/step_s"]) * 1.1
    assert float(written[-1]["memory/parameters_GiB"]) == memory["parameters"] / GIB
    assert float(written[-1]["memory/optimizer_GiB"]) == memory["optimizer"] / GIB
    for kind in ("reduce_scatter", "all_gather", "broadcast"):  # there is a validation between the second and the third
        assert written[1][f"traffic/{kind}_MiB"] == written[2][f"traffic/{kind}_MiB"]


class ClipsSome(Net):
    """Steps by hand; the gradients of both optimizers are clipped in the first batch, those of one in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.norms: list[tuple[float, float]] = []

    def configure_optimizers(self) -> Any:
        body = [*self.first.parameters(), *self.blocks.parameters()]
        return [torch.optim.SGD(params, lr=0.1) for params in (body, list(self.last.parameters()))]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        strategy: Any = self.trainer.strategy
        body, head = (float(strategy.grad_norm(optimizer)) for optimizer in optimizers)
        self.norms.append((body, head))
        for optimizer in optimizers[batch_idx:]:
            self.clip_gradients(optimizer, gradient_clip_val=100.0, gradient_clip_algorithm="norm")
        for optimizer in optimizers:
            optimizer.step()


def norms_of_two(rank: int, world: int, folder: str, grad_norm: Any) -> list[tuple[float, float]]:
    module = ClipsSome()
    trainer(
        rank, world, 1, max_epochs=1, callbacks=ZeroMonitor(grad_norm=grad_norm), logger=CSVLogger(folder),
        log_every_n_steps=1,
    ).fit(module, loader(rank, world))  # fmt: skip
    return module.norms


def test_norms_of_several_optimizers_are_logged_one_by_one(tmp_path: Path) -> None:
    norms = run(norms_of_two, 1, str(tmp_path), True)[0]
    for row, (body, head) in zip(rows(tmp_path), norms, strict=True):
        assert float(row["grad_norm/0"]) == pytest.approx(body, rel=1e-5)
        assert float(row["grad_norm/1"]) == pytest.approx(head, rel=1e-5)
        assert "grad_norm" not in row


def test_norms_that_clipping_has_computed_are_logged_once_and_one_by_one(tmp_path: Path) -> None:
    """That of the last optimizer was logged as if it were the norm of all gradients."""
    norms = run(norms_of_two, 1, str(tmp_path), False)[0]
    written = [[row.get(name) for name in ("grad_norm/0", "grad_norm/1")] for row in rows(tmp_path)]
    assert [float(norm or 0) for norm in written[0]] == pytest.approx(norms[0], rel=1e-5)
    assert not written[1][0]
    assert float(written[1][1] or 0) == pytest.approx(norms[1][1], rel=1e-5)
    assert not any(any(row) for row in written[2:])
    assert not any(row.get("grad_norm") for row in rows(tmp_path))


def test_norms_of_units_are_refused_with_several_optimizers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not work with several optimizers"):
        run(norms_of_two, 1, str(tmp_path), "units")


def unlogged(rank: int, world: int, folder: str) -> None:
    fitted = trainer(
        rank, world, 1, max_epochs=1, callbacks=ZeroMonitor(grad_norm=True), logger=CSVLogger(folder),
        log_every_n_steps=0,
    )  # fmt: skip
    fitted.fit(Net(), loader(rank, world))


def test_a_trainer_that_never_logs_has_no_rows(tmp_path: Path) -> None:
    run(unlogged, 1, str(tmp_path))
    assert not list(tmp_path.rglob("metrics.csv"))


def watched(rank: int, world: int, folder: str, forecast: str) -> list[str]:
    monitor = ZeroMonitor(grad_norm="units", forecast=forecast, flops=True, peak_tflops=0.5)
    fitted = trainer(
        rank, world, 2, max_epochs=1, callbacks=monitor, logger=CSVLogger(folder), log_every_n_steps=1,
        accumulate_grad_batches=2,
    )  # fmt: skip
    fitted.fit(Net(), loader(rank, world), loader(rank, world))
    units = fitted.strategy.engine._state.param_index.units  # type: ignore[attr-defined]
    return [unit.name for unit in units if unit.buffers]


def test_monitor_writes_norms_of_units_operations_and_a_forecast(tmp_path: Path) -> None:
    forecast = tmp_path / "forecast.json"
    forecast.write_text('{"world_size": 2, "settings": [{"is_own": true, "peak_bytes": 1073741824}]}')
    names = run(watched, WORLD, str(tmp_path), str(forecast))[0]
    model = 2 * 2 * 4 * (3 * (4 * 6 + 2 * 6 * 6 + 6 * 3) - 4 * 6)  # of two micro-batches
    assert len(names) > 1
    first, *later = rows(tmp_path)
    assert not first["throughput/mfu"]  # the step that was counted is slower
    assert later
    for row in (first, *later):
        assert float(row["memory/forecast_peak_GiB"]) == 1.0
        norms = [float(row[f"grad_norm/{name}"]) for name in names]
        assert float(row["grad_norm"]) == pytest.approx(sum(norm**2 for norm in norms) ** 0.5, rel=1e-5)
    for row in later:
        reached = model / float(row["time/step_s"]) / 1e12
        assert float(row["throughput/model_TFLOP_per_s"]) == pytest.approx(reached, rel=1e-4)
        assert float(row["throughput/mfu"]) == pytest.approx(reached / 0.5, rel=1e-4)


class TwoOptimizers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.first, self.last)]


def counted_per_step(rank: int, world: int, folder: str) -> int:
    profile = FlopsProfile()
    fitted = trainer(
        rank, world, 0, max_epochs=1, callbacks=[ZeroMonitor(flops=True), profile], logger=CSVLogger(folder),
        log_every_n_steps=1,
    )  # fmt: skip
    fitted.fit(TwoOptimizers(), loader(rank, world))
    assert profile.count is not None
    return profile.count.model


def test_operations_of_several_optimizers_are_those_of_a_step_each(tmp_path: Path) -> None:
    count = run(counted_per_step, WORLD, str(tmp_path))[0]
    forward = 2 * 4 * (4 * 6 + 2 * 6 * 6 + 6 * 3)
    assert 2 * forward * 2 < count <= 2 * forward * 3
    for row in rows(tmp_path)[1:]:
        reached = count / 2 / float(row["time/step_s"]) / 1e12
        assert float(row["throughput/model_TFLOP_per_s"]) == pytest.approx(reached, rel=1e-4)


def test_a_forecast_for_other_ranks_warns(tmp_path: Path) -> None:
    forecast = tmp_path / "forecast.json"
    forecast.write_text('{"world_size": 8, "settings": [{"is_own": true, "peak_bytes": 1}]}')
    strategy = ZeroStrategy(parallel_devices=[torch.device("cpu")] * 4)
    strategy._engine = Mock(stats=lambda: Mock(traffic={}, wait_s=0.0))
    monitor = ZeroMonitor(forecast=forecast)
    with patch.object(ZeroStrategy, "global_rank", 0), pytest.warns(UserWarning, match="is for 8 rank.s., and this"):
        monitor.on_train_start(Mock(strategy=strategy, world_size=4, global_step=0), Net())


def test_norms_of_units_are_refused_in_a_pipeline() -> None:
    strategy = ZeroStrategy(pipeline=2, parallel_devices=[torch.device("cpu")] * 4)
    strategy._engine = Mock(stats=lambda: Mock(traffic={}, wait_s=0.0))
    with patch.object(ZeroStrategy, "global_rank", 1), pytest.raises(ValueError, match="stages have different units"):
        ZeroMonitor(grad_norm="units").on_train_start(Mock(strategy=strategy, world_size=4, global_step=0), Net())


def offloaded(rank: int, world: int, folder: str) -> tuple[dict[str, int], list[str]]:
    strategy = ZeroStrategy(stage=3, offload="cpu")
    fitted = trainer(
        rank, world, strategy, max_epochs=1, callbacks=ZeroMonitor(), logger=CSVLogger(folder), log_every_n_steps=1
    )
    fitted.fit(Net(), loader(rank, world))
    return strategy.engine.stats().host, strategy.engine.plan()


def test_monitor_and_plan_tell_what_is_in_host_memory(tmp_path: Path) -> None:
    host, plan = run(offloaded, WORLD, str(tmp_path))[0]
    assert float(rows(tmp_path)[-1]["memory/host_optimizer_GiB"]) == host["optimizer"] / GIB > 0
    assert any("in host memory: parameters 0 B, masters" in line for line in plan)


def other_strategy(rank: int, world: int, folder: str) -> None:
    fitted = trainer(
        rank, world, "ddp", max_epochs=1, callbacks=ZeroMonitor(), logger=TensorBoardLogger(folder), log_every_n_steps=1
    )
    fitted.fit(Net(), loader(rank, world))


def test_monitor_runs_with_another_strategy_and_tensorboard(tmp_path: Path) -> None:
    run(other_strategy, WORLD, str(tmp_path))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(next(tmp_path.rglob("events*")).parent))
    events.Reload()
    assert {"throughput/samples_per_s", "time/forward_s", "time/step_s"} <= set(events.Tags()["scalars"])


@pytest.mark.parametrize(
    ("options", "copies"), [({}, 4), ({"pipeline": 2}, 2), ({"tensor_parallel": 2}, 2), ({"tensor_parallel": 4}, 1)]
)
def test_a_monitor_counts_each_copy_of_the_model_once(options: Any, copies: int) -> None:
    strategy = ZeroStrategy(**options, parallel_devices=[torch.device("cpu")] * 4)
    strategy._engine = Mock(stats=lambda: Mock(traffic={}, wait_s=0.0))
    monitor = ZeroMonitor()
    with patch.object(ZeroStrategy, "global_rank", 1):
        monitor.on_train_start(Mock(strategy=strategy, world_size=4, global_step=0), Net())
    assert monitor._meter.copies == copies


def test_a_monitor_counts_ranks_with_the_same_batches_once_under_other_strategies() -> None:
    """The ranks of a tensor group of `ModelParallelStrategy` counted apart."""
    strategy = Mock(root_device=torch.device("cpu"), distributed_sampler_kwargs={"num_replicas": 2, "rank": 0})
    monitor = ZeroMonitor()
    monitor.on_train_start(Mock(strategy=strategy, world_size=4, global_step=0), Net())
    assert monitor._meter.copies == 2


def watched_on_one_rank(rank: int, world: int, folder: str) -> None:
    callbacks = [ZeroMonitor()] if rank == 0 else []
    fitted = trainer(
        rank, world, 2, max_epochs=1, limit_train_batches=2, callbacks=callbacks, logger=CSVLogger(folder),
        log_every_n_steps=1,
    )  # fmt: skip
    fitted.fit(Net(), loader(rank, world))


def test_a_monitor_may_be_on_one_rank_where_nothing_is_summed(tmp_path: Path) -> None:
    run(watched_on_one_rank, WORLD, str(tmp_path))
    assert rows(tmp_path)


class Saves(Net):
    def on_train_batch_end(self, *args: Any) -> None:
        self.trainer.save_checkpoint("nowhere")


def saving(rank: int, world: int, folder: str) -> bool:
    fitted = trainer(
        rank, world, 1, max_epochs=1, limit_train_batches=4, callbacks=ZeroMonitor(), logger=CSVLogger(folder),
        log_every_n_steps=2,
    )  # fmt: skip
    with patch.object(ZeroStrategy, "save_checkpoint", lambda *args, **kwargs: time.sleep(0.5)):
        fitted.fit(Saves(), loader(rank, world))
    return "save_checkpoint" in vars(fitted)


def test_the_time_of_saving_is_not_that_of_steps(tmp_path: Path) -> None:
    assert run(saving, 1, str(tmp_path)) == [False]
    for row in rows(tmp_path):
        assert float(row["time/step_s"]) < 0.5
        assert float(row["time/data_s"]) < 0.5


def twice(rank: int, world: int, folder: str) -> None:
    module, monitor = Net(), ZeroMonitor(flops=True)
    for stage in (1, 3):  # so the first engine is closed when the second fit begins
        trainer(
            rank, world, stage, max_epochs=1, limit_train_batches=2, callbacks=monitor, log_every_n_steps=1,
            logger=CSVLogger(f"{folder}/{stage}"), num_sanity_val_steps=1,
        ).fit(module, loader(rank, world), loader(rank, world))  # fmt: skip
        assert monitor._meter.engine is None


def test_a_monitor_serves_a_second_fit_of_the_same_module(tmp_path: Path) -> None:
    """The validation before the first batch asked the engine of the first fit, which was closed."""
    run(twice, 1, str(tmp_path))
    for stage in (1, 3):
        assert rows(tmp_path / str(stage))


class OneIsSlow(Net):
    """Takes long for its steps on rank 1."""

    def on_train_batch_end(self, *args: Any) -> None:
        time.sleep(0.5 * self.trainer.global_rank)


def waiting(rank: int, world: int, folder: str) -> None:
    trainer(
        rank, world, 1, max_epochs=1, limit_train_batches=3, callbacks=ZeroMonitor(), logger=CSVLogger(folder),
        log_every_n_steps=3,
    ).fit(OneIsSlow(), loader(rank, world))  # fmt: skip


def test_a_wait_for_other_ranks_is_not_that_for_data(tmp_path: Path) -> None:
    run(waiting, WORLD, str(tmp_path))
    (row,) = rows(tmp_path)
    assert 3 * float(row["time/wait_s"]) > 0.9
    assert 3 * float(row["time/data_s"]) < 0.9


class StartsSlowly(DataLoader):
    def __iter__(self) -> Any:
        time.sleep(1.0)
        return super().__iter__()


def validating(rank: int, world: int, folder: str) -> bool:
    fitted = trainer(
        rank, world, 1, max_epochs=1, limit_train_batches=3, val_check_interval=2, num_sanity_val_steps=0,
        callbacks=ZeroMonitor(), logger=CSVLogger(folder), log_every_n_steps=3,
    )  # fmt: skip
    fitted.fit(Net(), loader(rank, world), StartsSlowly(TensorDataset(torch.randn(4, 4), torch.randn(4, 3))))
    return "run" in vars(fitted.fit_loop.epoch_loop.val_loop)


def test_the_time_in_which_loaders_of_validations_start_is_not_that_of_steps(tmp_path: Path) -> None:
    """Lightning starts them before `on_validation_start`."""
    assert run(validating, 1, str(tmp_path)) == [False]
    (row,) = rows(tmp_path)
    for name in ("step", "data"):
        assert 3 * float(row[f"time/{name}_s"]) < 1.0


@dataclass
class Batch:
    weights: torch.Tensor
    ids: torch.Tensor


@pytest.mark.parametrize(
    ("batch", "tokens", "samples"),
    [
        ({"x": torch.zeros(3, 5), "ids": torch.zeros(3, 7, dtype=torch.long)}, 21, 3),
        ((torch.zeros(4, 2), torch.zeros(4, dtype=torch.long)), None, 4),
        (Batch(torch.zeros(2, 2), torch.zeros(2, 3, dtype=torch.int32)), 6, 2),
        ("text", None, None),
    ],
    ids=["mapping", "labels-are-no-tokens", "dataclass", "no-tensor"],
)
def test_tokens_and_samples_are_found_in_a_batch(batch: Any, tokens: int | None, samples: int | None) -> None:
    assert tokens_in(batch) == tokens
    assert samples_in(batch) == samples


def test_paused_time_does_not_count() -> None:
    meter = Meter(None, copies=3)
    meter.start()
    meter.count(tokens=100, samples=None)
    meter.pause()
    time.sleep(0.05)
    meter.resume()
    row = meter.row(1)
    assert row.keys() == {"throughput/tokens_per_s", "time/step_s"}
    assert row["time/step_s"] < 0.05
    assert row["throughput/tokens_per_s"] > 300 / 0.05


def test_the_peak_of_a_gpu_is_that_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was that of the process: of set-up and validation too."""
    allocated = {"now": 1, "most": 9}  # GiB
    stats = SimpleNamespace(memory={}, host={}, disk={}, traffic={}, wait_s=0.0, peak_gathered=0)
    engine: Any = SimpleNamespace(
        stats=lambda: stats, internals=SimpleNamespace(communicator=SimpleNamespace(device=torch.device("cuda")))
    )

    def reset(device: torch.device) -> None:
        allocated["most"] = allocated["now"]

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated["now"] * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: allocated["most"] * 2**30)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    meter = Meter(engine)
    meter.start()
    allocated["most"] = 3
    with meter.paused():
        allocated["most"] = 7
    assert meter.row(1)["memory/peak_GiB"] == 3
    allocated["most"] = 2
    assert meter.row(1)["memory/peak_GiB"] == 3
    allocated["most"] = 4
    assert meter.row(1)["memory/peak_GiB"] == 4
    allocated["most"] = 5
    meter.note_peak()
    reset(torch.device("cuda"))  # by a choice of checkpointing, which measures the first steps
    assert meter.row(1)["memory/peak_GiB"] == 5


def test_phases_are_summed_and_those_that_run_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 1.0, 3.0, 10.0, 11.0, 16.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(seconds))
    phases = Phases(torch.device("cpu"))
    for phase in ("forward", "backward", None, "forward"):
        phases.begin(phase)
    assert phases.take() == {"forward": 1.0, "backward": 2.0}
    phases.begin("backward")
    assert phases.take() == {"forward": 1.0}
    assert phases.take() == {}
    phases.begin(None)
    assert len(phases._stamps) == 1  # the sums of the others are kept, whenever they are taken
    assert phases.take() == {"backward": 5.0}


def test_phases_on_a_gpu_are_taken_when_it_has_come_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        made = 0
        past = 0

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            Event.made += 1
            self.at = Event.made

        def record(self, stream: str) -> None:
            assert stream == "current"

        def query(self) -> bool:
            return self.at <= Event.past

        def elapsed_time(self, end: Event) -> float:
            return 1e3 * (end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "current")
    phases = Phases(torch.device("cuda"))
    for phase in ("forward", "backward", "optimizer"):
        phases.begin(phase)
    Event.past = 2
    assert phases.take() == {"forward": 1.0}
    Event.past = 3
    assert phases.take() == {"backward": 1.0}


def by_hand(rank: int, world: int, folder: str) -> None:
    class ByHand(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(Net.training_step(self, batch, batch_idx))
            optimizer.step()

    fitted = trainer(
        rank, world, 2, max_epochs=1, callbacks=ZeroMonitor(), logger=CSVLogger(folder), log_every_n_steps=1
    )
    fitted.fit(ByHand(), loader(rank, world))


def test_steps_by_hand_have_no_phases(tmp_path: Path) -> None:
    run(by_hand, WORLD, str(tmp_path))
    (row, *_) = rows(tmp_path)
    assert float(row["time/step_s"]) > 0
    assert not {f"time/{phase}_s" for phase in PHASES} & row.keys()


def test_memory_in_use_sees_a_large_tensor() -> None:
    block = mmap.mmap(-1, 64 << 20)  # fresh from the system: the process keeps memory that was freed
    before = memory_in_use(torch.device("cpu"))
    tensor = torch.frombuffer(block, dtype=torch.float32).fill_(1.0)
    assert memory_in_use(torch.device("cpu")) - before > tensor.nbytes // 2


class Thaws(Net):
    """Trains its first layer from the third epoch on."""

    def on_train_epoch_start(self) -> None:
        self.first.requires_grad_(self.current_epoch >= 2)


def reached_by_epochs(rank: int, world: int, folder: str) -> None:
    fitted = trainer(
        rank, world, 1, max_epochs=3, logger=CSVLogger(folder), log_every_n_steps=1,
        callbacks=[ZeroMonitor(flops=True), GradientAccumulationScheduler({0: 1, 1: 2})],
    )  # fmt: skip
    samples = TensorDataset(torch.randn(15, 4), torch.randn(15, 3))
    fitted.fit(Thaws(), DataLoader(samples, batch_size=2))  # the last batch is smaller


def test_rows_tell_the_operations_of_their_own_steps(tmp_path: Path) -> None:
    """Those of the first step were taken for all."""
    run(reached_by_epochs, 1, str(tmp_path))
    layer, middle, last = 2 * 4 * 6, 2 * 6 * 6, 2 * 6 * 3
    frozen = 2 * (layer + 3 * (2 * middle + last))  # of a batch of two; blocks begin with a norm, which is trained
    thawed = 2 * (2 * layer + 3 * (2 * middle + last))
    found = [
        round(float(row["throughput/model_TFLOP_per_s"]) * float(row["time/step_s"]) * 1e12)
        if row["throughput/model_TFLOP_per_s"]
        else None
        for row in rows(tmp_path)
    ]
    assert found[:8] == [None, *[frozen] * 6, None]  # counted; the smaller batch
    assert set(found[8:12]) == {None, 2 * frozen}
    assert set(found[12:]) == {None, 2 * thawed}
