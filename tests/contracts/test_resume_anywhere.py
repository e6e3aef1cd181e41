"""A checkpoint of any stage and world size is read by any other, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn

from lightning_zero.checkpoint import directory
from lightning_zero.checkpoint_io import ZeroCheckpointIO
from lightning_zero.config import MixedPrecision
from lightning_zero.strategy import ZeroStrategy
from tests import worlds
from tests.checkpoint import programs
from tests.contracts.test_lightning_programs import Net, assert_equal, loader, seeded, trainer, weights

STAGES = (0, 1, 2, 3)
WORLDS = (1, 2, 3)


def _save(rank: int, world: int, stage: int, path: str, full: bool, precision: MixedPrecision | None) -> Any:
    engine, model, optimizer = programs.make(stage, 0, precision)
    for number in range(2):
        programs.step(engine, model, optimizer, number)
    model.note = "saved"
    optimizer.param_groups[1]["lr"] = 0.125
    directory.save(engine, programs.snapshot(engine, model, optimizer), path, full=full)
    return programs.held(engine, optimizer), {key: value.clone() for key, value in model.named_buffers()}


def _load(rank: int, world: int, stage: int, path: str, precision: MixedPrecision | None) -> Any:
    engine, model, optimizer = programs.make(stage, 1, precision)
    checkpoint = programs.restore(engine, model, optimizer, path)
    assert checkpoint["epoch"] == 3
    assert checkpoint["callbacks"] == {"best": torch.tensor(0.25), "path": "somewhere"}
    assert model.note == "saved"
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 0.125]
    held = programs.held(engine, optimizer), {key: value.clone() for key, value in model.named_buffers()}
    values = {record.name: engine.full_param(record.parameter) for record in engine.records()}
    programs.step(engine, model, optimizer, 2)
    return *held, values


def _load_all(rank: int, world: int, path: str, precision: MixedPrecision | None) -> list[Any]:
    return [_load(rank, world, stage, path, precision) for stage in STAGES]


def _assert_same(actual: programs.Whole, expected: programs.Whole) -> None:
    assert actual.keys() == expected.keys()
    for name, slots in expected.items():
        assert actual[name].keys() == slots.keys(), name
        for slot, value in slots.items():
            assert torch.equal(actual[name][slot], value), (name, slot)
            assert actual[name][slot].dtype == value.dtype, (name, slot)


def _assert_buffers(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


@pytest.mark.world(3)
@pytest.mark.parametrize(
    ("kind", "world"),
    [
        pytest.param("directory", 1, marks=pytest.mark.slow),
        ("directory", 2),
        pytest.param("directory", 3, marks=pytest.mark.slow),
        pytest.param("file", 3, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("stage", STAGES, ids="stage{}".format)
def test_resume_on_other_world_and_stage_is_exact(kind: str, stage: int, world: int, tmp_path: Path) -> None:
    path = str(tmp_path / "saved.ckpt")
    _check_everywhere(path, stage, world, kind == "file", None)


@pytest.mark.world(3)
@pytest.mark.parametrize("stage", [1, 3], ids="stage{}".format)
def test_masters_of_16_bit_parameters_are_kept(stage: int, tmp_path: Path) -> None:
    _check_everywhere(str(tmp_path / "saved.ckpt"), stage, 2, False, MixedPrecision(compute_dtype=torch.bfloat16))


def _check_everywhere(path: str, stage: int, world: int, full: bool, precision: MixedPrecision | None) -> None:
    saved = worlds.run(_save, world, stage, path, full, precision)
    expected = programs.whole([held for held, _ in saved])
    for other in WORLDS:
        loaded = worlds.run(_load_all, other, path, precision)
        for index in range(len(STAGES)):
            ranks = [rank[index] for rank in loaded]
            _assert_same(programs.whole([held for held, _, _ in ranks]), expected)
            for _, buffers, values in ranks:
                _assert_buffers(buffers, saved[0][1])
                assert all(torch.equal(values[name], slots["value"]) for name, slots in expected.items())


# -- Through the Trainer -----------------------------------------------------------------------------------------------


class Tied(Net):
    """Two groups, a schedule, a tied and a frozen layer, something of its own in the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(6, 3)
        self.again.weight = self.last.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        hidden = self.first(self.frozen(x))
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden) + self.again(hidden)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"at": self.global_step}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded_at = checkpoint["mine"]["at"]

    def configure_optimizers(self) -> Any:
        params = [param for param in self.parameters() if param.requires_grad]
        groups = [
            {"params": [param for param in params if param.ndim >= 2], "weight_decay": 0.1},
            {"params": [param for param in params if param.ndim < 2]},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class Alternating(Net):
    """Two optimizers by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()[batch_idx % 2]
        self.manual_backward(self.loss(batch))
        optimizer.step()
        for one in self.optimizers():
            one.zero_grad()

    def configure_optimizers(self) -> Any:
        inner, outer = [*self.blocks.parameters()], [*self.first.parameters(), *self.last.parameters()]
        return torch.optim.AdamW(inner, lr=0.02), torch.optim.SGD(outer, lr=0.1, momentum=0.9)


def _fit(rank: int, world: int, make: Any, strategy: Any, folder: str, **options: Any) -> dict[str, Tensor]:
    """Fit, keeping a checkpoint of every epoch, and return the weights."""
    callback = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    resume = options.pop("ckpt_path", None)
    fitted = trainer(rank, world, strategy, callbacks=[callback], enable_checkpointing=True, max_epochs=3, **options)
    module = seeded(make)
    fitted.fit(module, loader(rank, world), ckpt_path=resume)
    if resume is not None and make is Tied:
        assert module.loaded_at == 4
    return weights(fitted)


def _resume(rank: int, world: int, folder: str, make: Any, saved: Any, resumed: Any, options: dict[str, Any]) -> None:
    expected = _fit(rank, world, make, _strategy(saved), f"{folder}/whole", **options)
    path = f"{folder}/whole/epoch=0.ckpt"
    actual = _fit(rank, world, make, _strategy(resumed), f"{folder}/resumed", ckpt_path=path, **options)
    assert_equal(actual, expected)
    assert sorted(Path(folder, "resumed").iterdir()) == [Path(folder, "resumed", f"epoch={n}.ckpt") for n in (1, 2)]


def _strategy(kind: Any) -> Any:
    if not isinstance(kind, tuple):
        return kind
    stage, state_dict_type = kind
    return ZeroStrategy(stage=stage, state_dict_type=state_dict_type)


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 3),
        (0, 3),
        (3, 0),
        (1, 2),
        ((3, "full"), 1),
        ((0, "sharded"), 2),
        ("ddp", 3),
        (2, "ddp"),
    ],
    ids=str,
)
def test_a_resumed_fit_equals_an_uninterrupted_one(saved: Any, resumed: Any, tmp_path: Path) -> None:
    worlds.run(_resume, 2, str(tmp_path), Tied, saved, resumed, {})


@pytest.mark.parametrize("stage", [1, 3], ids="stage{}".format)
def test_two_optimizers_by_hand_resume(stage: int, tmp_path: Path) -> None:
    worlds.run(_resume, 2, str(tmp_path), Alternating, stage, stage, {})


@pytest.mark.parametrize("stage", [2, 3], ids="stage{}".format)
def test_mixed_precision_resumes(stage: int, tmp_path: Path) -> None:
    worlds.run(_resume, 2, str(tmp_path), Tied, stage, stage, {"precision": "bf16-mixed"})


def _resume_elsewhere(rank: int, world: int, folder: str) -> None:
    expected = _fit(rank, world, Tied, 3, f"{folder}/whole")
    plugins = [ZeroCheckpointIO()]
    path = f"{folder}/whole/epoch=0.ckpt"
    actual = _fit(rank, world, Tied, "ddp", f"{folder}/resumed", ckpt_path=path, plugins=plugins)
    assert_equal(actual, expected)


def test_a_directory_resumes_under_ddp(tmp_path: Path) -> None:
    worlds.run(_resume_elsewhere, 2, str(tmp_path))


def _save_and_test(rank: int, world: int, folder: str, stage: int) -> float:
    _fit(rank, world, Tied, stage, folder)
    return _test(rank, world, f"{folder}/epoch=2.ckpt", stage)


def _test(rank: int, world: int, path: str, stage: int) -> float:
    tested = trainer(rank, world, stage)
    torch.manual_seed(5)
    (result,) = tested.test(Tied(), loader(rank, world), ckpt_path=path, verbose=False)
    return float(result["test_loss"])


@pytest.mark.world(3)
@pytest.mark.parametrize("stage", [2, 3], ids="stage{}".format)
def test_a_test_run_reads_it_on_other_worlds(stage: int, tmp_path: Path) -> None:
    loss = worlds.run(_save_and_test, 2, str(tmp_path), stage)[0]
    for world in (1, 3):
        losses = worlds.run(_test, world, str(tmp_path / "epoch=2.ckpt"), 3)
        assert losses == pytest.approx([loss] * world, abs=0.02 if world == 3 else 1e-6)  # 3 ranks pad the data


def test_load_from_checkpoint_reads_a_full_file(tmp_path: Path) -> None:
    worlds.run(_save_and_test, 2, str(tmp_path), 1)
    module = Tied.load_from_checkpoint(tmp_path / "epoch=2.ckpt")
    assert module.again.weight is module.last.weight
    assert module.seen == 12


def _average(rank: int, world: int, folder: str, kind: Any) -> None:
    def fit(strategy: Any, name: str, resume: str | None = None) -> dict[str, Tensor]:
        callbacks: list[Any] = [EMAWeightAveraging(decay=0.5)]
        callbacks.append(ModelCheckpoint(f"{folder}/{name}", filename="{epoch}", save_top_k=-1))
        fitted = trainer(rank, world, strategy, callbacks=callbacks, enable_checkpointing=True, max_epochs=3)
        fitted.fit(seeded(Tied), loader(rank, world), ckpt_path=resume)
        return weights(fitted)

    expected = fit(_strategy(kind), "whole")
    assert_equal(fit(_strategy(kind), "resumed", f"{folder}/whole/epoch=0.ckpt"), expected)


@pytest.mark.parametrize("kind", [1, (2, "sharded")], ids=str)
def test_averaged_weights_resume(kind: Any, tmp_path: Path) -> None:
    worlds.run(_average, 2, str(tmp_path), kind)
