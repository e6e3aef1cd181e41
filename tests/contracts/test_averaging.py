"""Lightning's averaging callbacks equal those under DDP, at every stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_avg_fn, get_ema_multi_avg_fn

from lightning_zero.lightning.callbacks import ExportSafetensors
from lightning_zero.lightning.strategy import ZeroStrategy
from tests import worlds
from tests.lightning_programs import STAGES, WORLD, Net, assert_equal, assert_moved, loader, seeded, trainer, weights
from tests.sampling import sample


class Normed(Net):
    """Has statistics of batches, a frozen and a tied parameter, a scheduler; keeps what validation saw."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6, bias=False)  # in front of a norm a bias has no gradient but rounding
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)
        self.twin = nn.Linear(6, 6)
        self.twin.weight = self.blocks[0].linear.weight  # type: ignore[union-attr, assignment]
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)) * self.frozen
        for block in self.blocks:
            x = block(x)
        return self.last(self.twin(x))

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(self.loss(batch).detach())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.02, fused=True)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


class ByEpoch(WeightAveraging):
    """A user's own schedule, average and hook."""

    def __init__(self) -> None:
        super().__init__(avg_fn=lambda averaged, current, number: averaged + (current - averaged) / (number + 2))
        self.ended: list[int] = []

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None and epoch_idx > 0

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        self.ended.append(trainer.current_epoch)


CALLBACKS: dict[str, Any] = {
    "ema": lambda: EMAWeightAveraging(decay=0.5),
    "ema-later": lambda: EMAWeightAveraging(
        decay=0.9, update_every_n_steps=2, update_starting_at_step=3, update_starting_at_epoch=1
    ),
    "ema-many": lambda: WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.5)),
    "ema-without-buffers": lambda: WeightAveraging(use_buffers=False, avg_fn=get_ema_avg_fn(0.5)),
    "equal": lambda: WeightAveraging(device="cpu"),
    "own": ByEpoch,
    "swa": lambda: StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=2),
    "swa-own": lambda: StochasticWeightAveraging(
        [0.05], swa_epoch_start=0.5, annealing_strategy="linear", avg_fn=lambda a, b, n: (a + b) / 2, device=None
    ),
}


def fit(rank: int, world: int, strategy: Any, name: str, folder: str, **options: Any) -> dict[str, Tensor]:
    resume = options.pop("resume", None)
    module = seeded(Normed)
    callbacks = [CALLBACKS[name](), ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)]
    fitted = trainer(
        rank, world, strategy, **{"max_epochs": 4, "enable_checkpointing": True, "callbacks": callbacks, **options}
    )
    fitted.fit(module, loader(rank, world, size=24), loader(rank, world, size=8), ckpt_path=resume)
    values = weights(fitted)
    seen = torch.stack(module.seen)  # type: ignore[arg-type]
    losses = [loss["val"] for loss in fitted.validate(module, loader(rank, world, size=8), verbose=False) if loss]
    assert not losses
    fitted.save_checkpoint(f"{folder}/end.ckpt")
    return {**values, "seen": seen[-2:] if resume else seen}


def _with_last(expected: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**expected, "seen": expected["seen"][-2:]}


def parity(rank: int, world: int, name: str, folder: str, ours: list[dict[str, Any]], options: dict[str, Any]) -> None:
    expected = fit(rank, world, "ddp", name, f"{folder}/ddp", **options)
    assert_moved({key: value for key, value in expected.items() if key != "seen"}, Normed)
    for number, mine in enumerate(ours):
        got = fit(rank, world, ZeroStrategy(**mine), name, f"{folder}/{number}", **options)
        assert_equal(got, expected, 1e-6, mine)


@pytest.mark.parametrize("name", sample(CALLBACKS, "ema", "swa"))
def test_averages_equal_ddps(name: str, tmp_path: Path) -> None:
    worlds.run(parity, WORLD, name, str(tmp_path), [{"stage": stage} for stage in STAGES], {}, timeout_s=120)


@pytest.mark.parametrize("name", sample(["ema", "swa"]))
def test_averages_of_offloaded_parameters_equal_ddps(name: str, tmp_path: Path) -> None:
    ours = [{"stage": stage, "offload": "cpu"} for stage in (1, 3)]
    worlds.run(parity, WORLD, name, str(tmp_path), ours, {"accumulate_grad_batches": 2})


def resumed(rank: int, world: int, name: str, folder: str, epoch: int) -> None:
    expected = _with_last(fit(rank, world, "ddp", name, f"{folder}/ddp"))
    before = f"{folder}/ddp"
    for stage, kind in ((3, "sharded"), (1, "full"), (0, "sharded"), (2, "full"), (3, "full")):
        strategy = ZeroStrategy(stage=stage, state_dict_type=kind)  # type: ignore[arg-type]
        now = f"{folder}/{stage}-{kind}"
        got = fit(rank, world, strategy, name, now, resume=f"{before}/epoch={epoch}.ckpt")
        assert_equal(got, expected, 1e-6, now)
        again = fit(rank, world, ZeroStrategy(stage=stage), name, f"{now}-all")
        assert_equal(_with_last(again), expected, 1e-6, now)
        before = f"{now}-all"
    assert_equal(
        fit(rank, world, "ddp", name, f"{folder}/back", resume=f"{folder}/2-full-all/epoch={epoch}.ckpt"),
        expected, 1e-6, "ddp",
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLBACKS)
def test_averages_resume_at_any_stage_and_under_ddp(name: str, tmp_path: Path) -> None:
    worlds.run(resumed, WORLD, name, str(tmp_path), 1, timeout_s=200)


class Renamed(Normed):
    """Saves its entries under other names."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {f"saved.{name}": value for name, value in super().state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        values = {name.removeprefix("saved."): value for name, value in state_dict.items()}
        return super().load_state_dict(values, *args, **kwargs)


def _resume_renamed(rank: int, world: int, folder: str) -> None:
    def fit(name: str, resume: str | None = None) -> dict[str, Tensor]:
        callbacks = [CALLBACKS["swa"](), ModelCheckpoint(f"{folder}/{name}", filename="{epoch}", save_top_k=-1)]
        fitted = trainer(rank, world, 3, callbacks=callbacks, enable_checkpointing=True, max_epochs=4)
        fitted.fit(seeded(Renamed), loader(rank, world, size=8), loader(rank, world, size=4), ckpt_path=resume)
        return weights(fitted)

    whole = fit("whole")
    assert_equal(fit("resumed", f"{folder}/whole/epoch=2.ckpt"), whole, 1e-6)


def test_averages_of_a_module_that_renames_its_entries_resume(tmp_path: Path) -> None:
    worlds.run(_resume_renamed, 1, str(tmp_path))


def _saved(rank: int, world: int, name: str, folder: str, stage: int) -> None:
    fit(rank, world, ZeroStrategy(stage=stage), name, folder)


def _read(rank: int, world: int, name: str, path: str, stage: int) -> dict[str, Tensor]:
    """Resume at the end: nothing is trained, and the average is the result."""
    callback = CALLBACKS[name]()
    fitted = trainer(rank, world, ZeroStrategy(stage=stage), callbacks=[callback], max_epochs=2)
    fitted.fit(seeded(Normed), loader(rank, world, size=24), loader(rank, world, size=8), ckpt_path=path)
    return {key: value for key, value in weights(fitted).items() if not key.startswith("norm.")}


@pytest.mark.world(3)
@pytest.mark.parametrize("name", sample(["ema", "swa"], "ema"))
def test_averages_resume_on_other_worlds(name: str, tmp_path: Path) -> None:
    worlds.run(_saved, 2, name, str(tmp_path), 3)
    path = str(tmp_path / "epoch=1.ckpt")
    expected = worlds.run(_read, 2, name, path, 3)[0]
    for world, stage in ((3, 3), (1, 1), (3, 0)):
        assert_equal(worlds.run(_read, world, name, path, stage)[0], expected, 1e-6, world)


def _exported(rank: int, world: int, stage: int, folder: str, name: str) -> None:
    saves = ModelCheckpoint(folder, filename="saved", save_weights_only=name == "weights-only")
    callbacks = [EMAWeightAveraging(decay=0.5), saves, ExportSafetensors()]
    strategy = ZeroStrategy(stage=stage, state_dict_type="full")
    fitted = trainer(rank, world, strategy, callbacks=callbacks, max_epochs=1, enable_checkpointing=True)
    fitted.fit(seeded(Normed), loader(rank, world, size=24), loader(rank, world, size=8))


@pytest.mark.parametrize(("stage", "name"), [(1, "average"), (3, "average"), (1, "weights-only")])
def test_an_export_beside_a_checkpoint_has_its_weights(stage: int, name: str, tmp_path: Path) -> None:
    """It had the weights that were trained last, and the checkpoint their average."""
    worlds.run(_exported, WORLD, stage, str(tmp_path), name)
    expected = torch.load(tmp_path / "saved.ckpt")["state_dict"]
    exported = load_file(tmp_path / "saved-safetensors" / "model.safetensors")
    assert exported.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(exported[key], value), key


def _traffic(rank: int, world: int, stage: int) -> tuple[dict[str, int], dict[str, int]]:
    sent = []
    for callbacks in ([], [EMAWeightAveraging(decay=0.5)]):
        fitted = trainer(rank, world, stage, callbacks=callbacks, max_epochs=1)
        module = seeded(Net)
        counted: dict[str, int] = {}

        def count(fitted: Any = fitted, counted: dict[str, int] = counted) -> None:
            counted.update(fitted.strategy.engine.stats().traffic)

        module.on_train_epoch_end = count  # type: ignore[method-assign]
        fitted.fit(module, loader(rank, world))
        sent.append(counted)
    return sent[0], sent[1]


@pytest.mark.parametrize("stage", STAGES)
def test_an_update_sends_nothing(stage: int) -> None:
    for without, with_average in worlds.run(_traffic, WORLD, stage):
        assert without == with_average
        assert without


def _elsewhere(rank: int, world: int, folder: str) -> None:
    """A callback goes from one strategy to another, and keeps its class and the key of its state."""
    callback = EMAWeightAveraging(decay=0.5)
    key = callback.state_key
    results = []
    for strategy in ("ddp", ZeroStrategy(stage=3), ZeroStrategy(stage=1), "ddp"):
        fitted = trainer(rank, world, strategy, callbacks=[callback])
        fitted.fit(seeded(Net), loader(rank, world))
        assert isinstance(callback, EMAWeightAveraging)
        assert (callback.state_key, type(callback).__name__) == (key, "EMAWeightAveraging")
        results.append(weights(fitted))
        callback._latest_update_step = 0
    for result in results[1:]:
        assert_equal(result, results[0], 1e-6)
    assert type(callback) is EMAWeightAveraging


def test_a_callback_goes_from_strategy_to_strategy(tmp_path: Path) -> None:
    worlds.run(_elsewhere, WORLD, str(tmp_path))


def _mixed(rank: int, world: int, name: str, folder: str) -> None:
    values = [
        fit(rank, world, strategy, name, f"{folder}/{number}", precision="bf16-mixed")
        for number, strategy in enumerate(["ddp", *(ZeroStrategy(stage=stage) for stage in STAGES)])
    ]
    for number, value in enumerate(values[1:]):
        assert_equal(value, values[0], 0.03, f"stage {number}")
        assert_equal(value, values[1], 1e-6, f"stage {number}")


@pytest.mark.parametrize("name", sample(["ema", "swa"], "ema"))
def test_averages_are_of_fp32_masters(name: str, tmp_path: Path) -> None:
    worlds.run(_mixed, WORLD, name, str(tmp_path))


class Thawing(Net):
    """Trains its blocks from the second epoch on; keeps an average of its own in fp32."""

    def __init__(self) -> None:
        super().__init__()
        for param in self.blocks.parameters():
            param.data = param.data.bfloat16().float()
            param.requires_grad_(False)
        self.expected: dict[str, Tensor] = {}

    def configure_optimizers(self) -> Any:
        trained = [param for param in self.parameters() if param.requires_grad]
        return torch.optim.SGD(trained, lr=1e-3)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            params = [param.requires_grad_(True) for param in self.blocks.parameters()]
            self.trainer.optimizers[0].add_param_group({"params": params})


class Averaged(EMAWeightAveraging):
    """Computes the same average of whole fp32 parameters beside Lightning's."""

    def __init__(self) -> None:
        super().__init__(decay=0.9)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *args)
        kept = pl_module.expected
        for name, param in pl_module.named_parameters():
            value = trainer.strategy.full_param(param).float().clone()
            kept[name] = value if name not in kept else kept[name].lerp(value, 0.1)


class Seeing(StochasticWeightAveraging):
    """Computes the same average of whole fp32 parameters beside Lightning's."""

    def __init__(self) -> None:
        super().__init__(1e-3, swa_epoch_start=3, annealing_epochs=1)
        self.number = 0

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_epoch_start(trainer, pl_module)
        if self._latest_update_epoch != trainer.current_epoch:
            return
        kept = pl_module.expected
        for name, param in pl_module.named_parameters():
            value = trainer.strategy.full_param(param).float().clone()
            kept[name] = value if name not in kept else kept[name] + (value - kept[name]) / (self.number + 1)
        self.number += 1


def _thawed(rank: int, world: int, name: str, stage: int) -> None:
    module, callback = seeded(Thawing), {"ema": Averaged, "swa": Seeing}[name]()
    options = {"max_epochs": 4, "precision": "bf16-mixed", "callbacks": [callback]}
    fitted = trainer(rank, world, ZeroStrategy(stage=stage), **options)
    fitted.fit(module, loader(rank, world, size=64), loader(rank, world, size=8))
    assert_equal(weights(fitted), module.expected, 1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", sample([0, 2, 3], 2))
@pytest.mark.parametrize("name", sample(["ema", "swa"], "ema"))
def test_averages_of_parameters_that_thaw_later_are_fp32(name: str, stage: int) -> None:
    worlds.run(_thawed, WORLD, name, stage)


def _thawed_half(rank: int, world: int) -> None:
    module, callback = seeded(Thawing).to(torch.bfloat16), Averaged()
    dtypes = []

    class Watch(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            assert callback._average_model is not None
            dtypes.append(callback._average_model.module._parameters["blocks.0.linear.weight"].dtype)

    options = {"max_epochs": 2, "precision": "bf16-true", "callbacks": [callback, Watch()]}
    trainer(rank, world, ZeroStrategy(stage=2), **options).fit(module, loader(rank, world, size=16))
    assert dtypes == [torch.bfloat16, torch.float32]


def test_averages_of_16_bit_parameters_are_widened_when_they_thaw() -> None:
    worlds.run(_thawed_half, WORLD)
