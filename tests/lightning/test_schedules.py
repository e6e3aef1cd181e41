from __future__ import annotations

import math
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, SequentialLR, StepLR
from torch.utils.data import DataLoader, IterableDataset

from lightning_zero import OneCycle, WarmupCosineLR, WarmupDecayLR, ZeroStrategy
from tests.lightning_programs import WORLD, Net, parity
from tests.worlds import run

STEPS = 12
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Rates(Callback):
    """The learning rate of every step of the optimizer."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.seen.append(float(optimizer.param_groups[0]["lr"]))


class Module(BoringModel):
    """A small model with a schedule that is made when the optimizer is."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return [optimizer], [self.make(optimizer)]


def data() -> DataLoader[Any]:
    return DataLoader(torch.ones(STEPS, 32), batch_size=1)


def rates(
    make: Any, tmp_path: Path, *, loader: Any = None, ckpt_path: Any = None, callbacks: Any = (), **options: Any
) -> list[float]:
    """Fit, leave `last.ckpt`, and return the learning rates."""
    seen = Rates()
    options = {"max_epochs": 1, "enable_checkpointing": False, **QUIET, **options}
    callbacks = [seen, *callbacks]
    fitted = Trainer(strategy=ZeroStrategy(stage=1), callbacks=callbacks, default_root_dir=tmp_path, **options)
    fitted.fit(Module(make), data() if loader is None else loader, ckpt_path=ckpt_path)
    fitted.save_checkpoint(tmp_path / "last.ckpt")
    return seen.seen


def cosine(steps: int, total: int, count: int) -> list[float]:
    ratios = [0.0, 0.0, *(math.log(b + 1, steps) for b in range(1, steps))]
    waves = [math.cos(math.pi * (b - steps + 1) / (total - steps)) for b in range(steps, total)]
    ratios += [1e-4 + (1 - 1e-4) * (1 + wave) / 2 for wave in waves]
    return [0.1 * ratio for ratio in ratios[:count]]


def decay(steps: int, total: int, count: int) -> list[float]:
    heights = [0.0, 0.0, *(math.log(b + 1, steps) for b in range(1, steps))]
    heights += [(total - b) / (total - steps) for b in range(steps, total)]
    return [0.1 * height for height in heights[:count]]


@pytest.mark.parametrize("make", [WarmupDecayLR, WarmupCosineLR])
@pytest.mark.parametrize(
    ("options", "total"),
    [({}, STEPS), ({"max_epochs": 2}, 2 * STEPS), ({"accumulate_grad_batches": 3, "max_epochs": 2}, 8)],
    ids=["epoch", "epochs", "accumulated"],
)
def test_auto_is_the_number_of_steps_of_the_training(make: Any, options: Any, total: int, tmp_path: Path) -> None:
    seen = rates(lambda o: make(o, "auto", warmup_num_steps=4), tmp_path, **options)
    expected = (decay if make is WarmupDecayLR else cosine)(4, total, total)
    assert seen == pytest.approx(expected)


def test_a_resumed_fit_goes_on_as_uninterrupted(tmp_path: Path) -> None:
    def make(optimizer: Any) -> Any:
        return WarmupDecayLR(optimizer, 2 * STEPS, warmup_num_steps=4)

    whole = rates(make, tmp_path, max_epochs=2)
    first = rates(make, tmp_path, max_epochs=1)
    second = rates(make, tmp_path, max_epochs=2, ckpt_path=tmp_path / "last.ckpt")
    assert first + second == whole


def test_auto_of_a_resumed_fit_is_the_steps_made_and_those_left(tmp_path: Path) -> None:
    """It was the steps from 0 with the new loader: the rate was 0 for the rest."""

    def make(optimizer: Any) -> Any:
        return WarmupDecayLR(optimizer, "auto", warmup_num_steps=4)

    rates(make, tmp_path, max_epochs=2)
    half = {"limit_train_batches": STEPS // 2, "ckpt_path": tmp_path / "last.ckpt"}
    seen = rates(make, tmp_path, max_epochs=4, **half)
    assert seen == pytest.approx(decay(4, 3 * STEPS, 3 * STEPS)[2 * STEPS :])
    rates(make, tmp_path, max_epochs=2)
    seen = rates(make, tmp_path, max_epochs=4, max_steps=30, **half)
    assert seen == pytest.approx(decay(4, 30, 30)[2 * STEPS :])


@pytest.mark.parametrize("accumulated", [1, 3])
def test_auto_of_a_fit_that_is_resumed_in_the_middle_of_an_epoch(accumulated: int, tmp_path: Path) -> None:
    def make(optimizer: Any) -> Any:
        return WarmupDecayLR(optimizer, "auto", warmup_num_steps=2)

    class Save(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.current_epoch == 1 and batch_idx == 5:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    options: dict[str, Any] = {"max_epochs": 3, "accumulate_grad_batches": accumulated}
    whole = rates(make, tmp_path, callbacks=[Save()], **options)
    seen = rates(make, tmp_path, ckpt_path=tmp_path / "middle.ckpt", **options)
    assert seen == pytest.approx(whole[-len(seen) :])
    assert len(seen) == (STEPS + 6) // accumulated


def resumed(tmp_path: Path, *, at: int, batches: int, steps_with: Any = (), **options: Any) -> tuple[int, int]:
    """Save behind a batch of the second epoch, go on with epochs of other lengths; return the end, and the steps."""
    made: list[Any] = []

    def make(optimizer: Any) -> Any:
        made[:] = [WarmupDecayLR(optimizer, "auto", warmup_num_steps=2)]
        return made[0]

    class Save(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.current_epoch == 1 and batch_idx == at - 1:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    rates(make, tmp_path, callbacks=[Save(), *steps_with], **{**options, "max_epochs": 2})
    loader = DataLoader(torch.ones(batches, 32), batch_size=1)
    middle = torch.load(tmp_path / "middle.ckpt", weights_only=False)["global_step"]
    callbacks = list(steps_with)
    seen = rates(make, tmp_path, loader=loader, ckpt_path=tmp_path / "middle.ckpt", callbacks=callbacks, **options)
    return made[0].total_num_steps, middle + len(seen)


@pytest.mark.parametrize(
    ("at", "batches", "expected"),
    [(8, 6, 20 + 6 + 6), (8, 8, 20 + 8 + 8), (8, 9, 20 + 1 + 9), (8, 20, 20 + 12 + 20), (STEPS, 20, 24 + 8)],
    ids=["shorter", "as-long-as-trained", "longer-by-one", "longer", "behind-the-last-batch"],
)
@pytest.mark.parametrize("options", [{}, {"max_steps": 100}], ids=["epochs", "steps"])
def test_auto_of_a_fit_resumed_with_other_batches_is_the_steps_that_it_makes(
    at: int, batches: int, expected: int, options: dict[str, Any], tmp_path: Path
) -> None:
    """Lightning begins an epoch anew that has no batch left; the rate was 0 for the rest."""
    assert resumed(tmp_path, at=at, batches=batches, max_epochs=3, **options) == (expected, expected)


def test_auto_of_a_resumed_epoch_accumulates_as_lightning_does(tmp_path: Path) -> None:
    """Lightning does not begin the epoch, so the callback sets nothing in it; the schedule ended too early."""
    plan = [GradientAccumulationScheduler({0: 4})]
    total, made = resumed(tmp_path, at=4, batches=STEPS, steps_with=plan, max_epochs=3)
    assert total == made == 3 + 1 + 8 + 3


@pytest.mark.parametrize("limit", ["max_epochs", "max_steps"])
def test_auto_of_a_second_fit_in_a_trainer_is_the_steps_that_it_makes(limit: str, tmp_path: Path) -> None:
    """It was the sum of both: the schedule ended half way."""
    module = Module(lambda o: WarmupDecayLR(o, "auto", warmup_num_steps=2))
    seen = Rates()
    options: dict[str, Any] = {"max_epochs": 1, "enable_checkpointing": False, **QUIET}
    if limit == "max_steps":
        options |= {"max_epochs": -1, "max_steps": STEPS}
    trainer = Trainer(strategy=ZeroStrategy(stage=1), callbacks=[seen], default_root_dir=tmp_path, **options)
    trainer.fit(module, data())
    if limit == "max_steps":
        trainer.fit_loop.epoch_loop.max_steps = 3 * STEPS
    else:
        trainer.fit_loop.max_epochs = 3
    trainer.fit(module, data())
    assert seen.seen == pytest.approx(decay(2, STEPS, STEPS) + decay(2, 2 * STEPS, 2 * STEPS))


def test_auto_in_an_early_part_of_a_sequence_ends_at_the_next_milestone(tmp_path: Path) -> None:
    """It went on to the end of the training, and was cut off at the milestone."""
    made: list[Any] = []

    def make(optimizer: Any) -> Any:
        made[:] = [WarmupDecayLR(optimizer, "auto", warmup_num_steps=2) for _ in range(3)]
        return {"scheduler": SequentialLR(optimizer, made, milestones=[4, 9]), "interval": "step"}

    rates(make, tmp_path)
    assert [one.total_num_steps for one in made] == [4, 5, STEPS - 9]
    rates(make, tmp_path, max_epochs=2, ckpt_path=tmp_path / "last.ckpt")
    assert [one.total_num_steps for one in made] == [4, 5, 2 * STEPS - 9]


def test_a_warm_up_until_the_end_is_warned_of_once(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="^The warm-up of") as caught:
        rates(lambda o: WarmupDecayLR(o, "auto", warmup_num_steps=STEPS), tmp_path)
    assert sum("warm-up" in str(one.message) for one in caught) == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The warm-up")
        rates(lambda o: WarmupDecayLR(o, "auto", warmup_num_steps=STEPS), tmp_path, fast_dev_run=True)


def test_auto_in_a_sequence_of_schedules_is_the_steps_after_its_milestone(tmp_path: Path) -> None:
    made: list[Any] = []

    def make(optimizer: Any) -> Any:
        made[:] = [ConstantLR(optimizer, 1.0), WarmupDecayLR(optimizer, "auto", warmup_num_steps=2)]
        return {"scheduler": SequentialLR(optimizer, made, milestones=[4]), "interval": "step"}

    seen = rates(make, tmp_path)
    assert made[1].total_num_steps == STEPS - 4
    assert seen == pytest.approx([0.1] * 4 + decay(2, STEPS - 4, STEPS - 4))


@pytest.mark.parametrize(
    "outer", [lambda o, s: SequentialLR(o, s, milestones=[1]), lambda o, s: ChainedScheduler(s, o)]
)
def test_a_schedule_in_one_that_is_stepped_once_an_epoch_is_refused(outer: Any, tmp_path: Path) -> None:
    """It was filled with the number of steps, and stepped once an epoch."""

    def make(optimizer: Any) -> Any:
        return outer(optimizer, [ConstantLR(optimizer, 1.0), WarmupDecayLR(optimizer, "auto", warmup_num_steps=2)])

    with pytest.raises(ValueError, match=r'^`WarmupDecayLR` counts .* Return `{"scheduler": ..., "interval": "step"}`'):
        rates(make, tmp_path)


def test_a_schedule_with_a_frequency_is_refused(tmp_path: Path) -> None:
    """Half of it was run: `auto` is the number of all steps."""
    with pytest.raises(ValueError, match=r"^`WarmupDecayLR` counts .* `frequency=2` .* Leave `frequency` out"):
        rates(lambda o: {"scheduler": WarmupDecayLR(o, "auto"), "interval": "step", "frequency": 2}, tmp_path)


def test_auto_with_accumulation_that_changes_between_epochs_is_the_steps_of_all_epochs(tmp_path: Path) -> None:
    """It was the number of batches: the schedule ended in its middle."""
    plan = GradientAccumulationScheduler({0: 8, 1: 3})
    seen = rates(lambda o: WarmupDecayLR(o, "auto", warmup_num_steps=2), tmp_path, callbacks=[plan], max_epochs=3)
    assert seen == pytest.approx(decay(2, 2 + 4 + 4, 10))
    seen = rates(
        lambda o: WarmupDecayLR(o, "auto", warmup_num_steps=2), tmp_path, callbacks=[plan], max_epochs=3, max_steps=7
    )
    assert seen == pytest.approx(decay(2, 7, 7))


def test_auto_behind_the_end_of_the_training_is_warned_of(tmp_path: Path) -> None:
    def make(optimizer: Any) -> Any:
        parts: list[Any] = [ConstantLR(optimizer, 1.0), WarmupDecayLR(optimizer, "auto", warmup_num_steps=2)]
        return {"scheduler": SequentialLR(optimizer, parts, milestones=[STEPS]), "interval": "step"}

    message = r"^`WarmupDecayLR` is not reached: .* step 12, and the training has 12 steps"
    with pytest.warns(UserWarning, match=message) as caught:
        assert rates(make, tmp_path) == pytest.approx([0.1] * STEPS)
    assert sum("WarmupDecayLR" in str(one.message) for one in caught) == 1


def test_a_training_without_an_end_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^`total_num_steps='auto'` of `WarmupDecayLR` .* has no end"):
        rates(lambda o: WarmupDecayLR(o, "auto"), tmp_path, max_epochs=-1)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(torch.ones(STEPS, 32))


def test_a_loader_without_a_length_is_an_error_without_max_steps(tmp_path: Path) -> None:
    """The learning rate was 0 from the end of the warm-up on."""

    def make(optimizer: Any) -> Any:
        return WarmupDecayLR(optimizer, "auto", warmup_num_steps=2)

    with pytest.raises(ValueError, match=r"has no end .* Use `Trainer\(max_steps=...\)`, .* loader that has a length"):
        rates(make, tmp_path, loader=DataLoader(Endless()), max_epochs=3)
    seen = rates(make, tmp_path, loader=DataLoader(Endless()), max_epochs=3, max_steps=8)
    assert seen == pytest.approx(decay(2, 8, 8))


def test_schedules_are_stepped_at_every_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        seen = rates(lambda o: OneCycle(o, 0.1, 0.4, cycle_first_step_size=3), tmp_path, max_steps=7)
    assert seen == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.3, 0.2, 0.1])
    assert sum("`OneCycle` counts steps of the optimizer" in message for message in caplog.messages) == 1


class ByHand(Module):
    """Makes two steps for each batch, and steps schedules as often."""

    def __init__(self, make: Any) -> None:
        super().__init__(make)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for _ in range(2):
            self.optimizers().zero_grad()
            self.manual_backward(self.step(batch))
            self.optimizers().step()
            self.lr_schedulers().step()


def fit_by_hand(make: Any, tmp_path: Path) -> Any:
    module = ByHand(make)
    options: dict[str, Any] = {"max_epochs": 1, "enable_checkpointing": False, **QUIET}
    fitted = Trainer(strategy=ZeroStrategy(stage=1), default_root_dir=tmp_path, **options)
    fitted.fit(module, data())
    return fitted.lr_scheduler_configs[0].scheduler


@pytest.mark.parametrize("is_inner", [False, True], ids=["alone", "in-a-sequence"])
def test_auto_in_manual_optimization_is_refused(is_inner: bool, tmp_path: Path) -> None:
    """It was the number of steps of all optimizers, or of batches."""

    def make(optimizer: Any) -> Any:
        schedule = WarmupDecayLR(optimizer, "auto")
        return SequentialLR(optimizer, [ConstantLR(optimizer), schedule], milestones=[1]) if is_inner else schedule

    message = r"^`total_num_steps='auto'` of `WarmupDecayLR` .* `automatic_optimization=False` .* Say the number: how"
    with pytest.raises(ValueError, match=message):
        fit_by_hand(make, tmp_path)


def test_who_steps_a_schedule_in_manual_optimization_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Rank 0 said that it is stepped with the optimizer, and nobody did."""
    with caplog.at_level("INFO"):
        schedule = fit_by_hand(lambda o: WarmupDecayLR(o, 24, warmup_num_steps=2), tmp_path)
    assert schedule.last_epoch == 24
    (said,) = [one for one in caplog.messages if one.startswith("`WarmupDecayLR`")]
    assert "nobody steps it but the program: call `self.lr_schedulers().step()`" in said


def test_schedules_of_pytorch_are_stepped_as_before(tmp_path: Path) -> None:
    assert rates(lambda o: StepLR(o, 1, 0.5), tmp_path, max_epochs=2) == [0.1] * STEPS + [0.05] * STEPS


class Plain(BoringModel):
    configure_optimizers = LightningModule.configure_optimizers


YAML = """
optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1, momentum: 0.9}}
lr_scheduler: {class_path: lightning_zero.%s, init_args: {%s}}
trainer:
  accelerator: cpu
  devices: 1
  max_steps: 8
  limit_val_batches: 0
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  callbacks: [{class_path: tests.lightning.test_schedules.Rates}]
  strategy: {class_path: lightning_zero.ZeroStrategy, init_args: {stage: 2}}
"""


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("LRRangeTest", "lr_range_test_min_lr: 0.1, lr_range_test_step_size: 2", [0.1, 0.15, 0.2, 0.25]),
        ("OneCycle", "cycle_min_lr: [0.1], cycle_max_lr: 0.3, cycle_first_step_size: 2", [0.1, 0.2, 0.3, 0.2, 0.1]),
        ("WarmupLR", "warmup_num_steps: 2, warmup_type: linear", [0.0, 0.0, 0.05, 0.1, 0.1]),
        ("WarmupDecayLR", "total_num_steps: auto, warmup_num_steps: 4", decay(4, 8, 8)),
        ("WarmupCosineLR", "total_num_steps: auto, warmup_num_steps: 4", cosine(4, 8, 8)),
    ],
)
def test_schedules_are_made_from_yaml(name: str, options: str, expected: list[float], tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(YAML % (name, options))
    cli = LightningCLI(
        Plain,
        BoringDataModule,
        args=["fit", f"--config={tmp_path / 'run.yaml'}"],
        save_config_callback=None,
    )
    seen = next(one for one in cli.trainer.callbacks if isinstance(one, Rates)).seen
    assert seen[: len(expected)] == pytest.approx(expected)


def test_schedules_are_named_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text(YAML % ("WarmupLR", ""))
    args = ["fit", f"--config={tmp_path / 'run.yaml'}", "--lr_scheduler", "lightning_zero.WarmupDecayLR"]
    cli = LightningCLI(
        Plain, BoringDataModule, args=[*args, "--lr_scheduler.total_num_steps=auto"], save_config_callback=None
    )
    assert cli.trainer.lr_scheduler_configs[0].scheduler.total_num_steps == 8
    with pytest.raises(SystemExit):
        LightningCLI(Plain, args=[*args, "--lr_scheduler.total_num_steps=all"], save_config_callback=None)
    assert "total_num_steps" in capsys.readouterr().err


def test_programs_of_the_document_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    exec(compile(program, "schedules.md", "exec"), {"__name__": "document"})
    (config,) = re.findall(r"^```yaml\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    Path("run.yaml").write_text(config)
    quiet = ["--trainer.accelerator=cpu", "--trainer.limit_val_batches=0", "--trainer.callbacks+=Rates"]
    cli = LightningCLI(Plain, BoringDataModule, args=["fit", "--config=run.yaml", *quiet], save_config_callback=None)
    seen = next(one for one in cli.trainer.callbacks if isinstance(one, Rates)).seen
    assert seen == pytest.approx([0.0, 0.0, 0.001, *(0.001 * (8 - n) / 6 for n in range(2, 7))])


class Cycled(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, fused=True)
        schedule = OneCycle(optimizer, 0.002, 0.02, cycle_first_step_size=2, decay_lr_rate=0.5, decay_step_size=1)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def fit_with_a_cycle(rank: int, world: int) -> None:
    parity(rank, world, Cycled)
    parity(rank, world, Cycled, stages=(2,), ours={"offload": "cpu"})


def test_rates_and_momenta_of_a_cycle_train_as_under_ddp() -> None:
    run(fit_with_a_cycle, WORLD)
