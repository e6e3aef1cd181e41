"""A checkpoint of any stage and world size is read by any other, to the bit."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, LearningRateFinder, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, default_collate

from lightning_zero.checkpoint import directory
from lightning_zero.config import MixedPrecision
from lightning_zero.lightning.checkpoint_io import ZeroCheckpointIO
from lightning_zero.lightning.strategy import ZeroStrategy
from lightning_zero.schedules import WarmupDecayLR
from tests import worlds
from tests.checkpoint import programs
from tests.lightning_programs import Net, assert_equal, data, loader, seeded, trainer, weights
from tests.sampling import sample

STAGES = (0, 1, 2, 3)
WORLDS = (1, 2, 3, 4)


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


def _assert_same(actual: programs.GatheredParams, expected: programs.GatheredParams) -> None:
    assert actual.keys() == expected.keys()
    for name, slots in expected.items():
        assert actual[name].keys() == slots.keys(), name
        for slot, value in slots.items():
            assert torch.equal(actual[name][slot], value), (name, slot)
            assert actual[name][slot].dtype == value.dtype, (name, slot)


def _assert_buffers(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


@pytest.mark.always
@pytest.mark.world(4)
@pytest.mark.parametrize(
    "saved", sample([*itertools.product(STAGES, WORLDS)], (3, 2)), ids="stage{0[0]}-w{0[1]}".format
)
def test_a_directory_of_any_stage_and_world_loads_at_any_other_bit_for_bit(
    saved: tuple[int, int], tmp_path: Path
) -> None:
    _check_everywhere(str(tmp_path / "saved.ckpt"), *saved, False, None)


@pytest.mark.world(4)
@pytest.mark.parametrize(
    "saved", sample([*itertools.product(STAGES, WORLDS)], (1, 1)), ids="stage{0[0]}-w{0[1]}".format
)
def test_a_file_of_any_stage_and_world_loads_at_any_other_bit_for_bit(saved: tuple[int, int], tmp_path: Path) -> None:
    _check_everywhere(str(tmp_path / "saved.ckpt"), *saved, True, None)


@pytest.mark.world(4)
@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3], ids="stage{}".format)
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


def _load_otherwise(rank: int, world: int, path: str, saved_in: MixedPrecision | None) -> Any:
    precision = MixedPrecision(compute_dtype=torch.bfloat16) if saved_in is None else None
    engine, model, optimizer = programs.make(3, 1, precision, units=["Linear", "Embedding"])
    programs.restore(engine, model, optimizer, path)
    held = programs.held(engine, optimizer)
    programs.step(engine, model, optimizer, 2)
    return held


@pytest.mark.parametrize("saved_in", [None, MixedPrecision(compute_dtype=torch.bfloat16)], ids=["fp32", "bf16"])
def test_another_precision_and_other_units_take_masters_and_moments_to_the_bit(
    saved_in: MixedPrecision | None, tmp_path: Path
) -> None:
    path = str(tmp_path / "saved.ckpt")
    expected = programs.whole([held for held, _ in worlds.run(_save, 2, 2, path, False, saved_in)])
    loaded = programs.whole(worlds.run(_load_otherwise, 3, path, saved_in))
    for name, slots in expected.items():
        if not name.startswith("frozen."):  # 16 bits are all that is kept of frozen parameters that compute in them
            assert all(torch.equal(loaded[name][slot], value) for slot, value in slots.items()), name


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
        optimizer = torch.optim.AdamW(groups, lr=0.02, fused=True)
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
        return torch.optim.AdamW(inner, lr=0.02, fused=True), torch.optim.SGD(outer, lr=0.1, momentum=0.9, fused=True)


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
        *[pytest.param(*pair, marks=pytest.mark.slow) for pair in ((0, 0), (1, 1), (2, 2), (0, 3), (3, 0), (1, 2))],
        (3, 3),
        ((3, "full"), 1),
        ((0, "sharded"), 2),
        ("ddp", 3),
        (2, "ddp"),
    ],
    ids=str,
)
def test_a_resumed_fit_equals_an_uninterrupted_one(saved: Any, resumed: Any, tmp_path: Path) -> None:
    worlds.run(_resume, 2, str(tmp_path), Tied, saved, resumed, {})


@pytest.mark.parametrize("stage", sample([1, 3], 3), ids="stage{}".format)
def test_two_optimizers_by_hand_resume(stage: int, tmp_path: Path) -> None:
    worlds.run(_resume, 2, str(tmp_path), Alternating, stage, stage, {})


@pytest.mark.parametrize("stage", sample([2, 3], 2), ids="stage{}".format)
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
@pytest.mark.parametrize("stage", sample([2, 3], 3), ids="stage{}".format)
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


@pytest.mark.parametrize("kind", sample([1, (2, "sharded")], 1), ids=str)
def test_averaged_weights_resume(kind: Any, tmp_path: Path) -> None:
    worlds.run(_average, 2, str(tmp_path), kind)


# -- Hooks -------------------------------------------------------------------------------------------------------------


class Looks(Tied):
    """Looks at its weights and what it has loaded in the hooks of a beginning fit."""

    def __init__(self) -> None:
        super().__init__()
        self.rate, self.looks = 0.02, []

    def look(self) -> None:
        strategy, weight = self.trainer.strategy, self.last.weight
        value = strategy.full_param(weight) if isinstance(strategy, ZeroStrategy) else weight.detach()
        self.looks.append((value.clone(), self.rate))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.rate = 0.125

    def configure_optimizers(self) -> Any:
        self.look()
        return super().configure_optimizers()

    def on_fit_start(self) -> None:
        self.look()


class Counts(Callback):
    def __init__(self) -> None:
        self.count, self.at_start = 0, -1

    def on_train_batch_end(self, *args: Any) -> None:
        self.count += 1

    def on_fit_start(self, *args: Any) -> None:
        self.at_start = self.count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


def _look(rank: int, world: int, folder: str, strategies: list[Any]) -> None:
    for index, strategy in enumerate(strategies):
        path = f"{folder}/{index}.ckpt"
        first = trainer(rank, world, strategy, max_epochs=1, callbacks=[Counts()])
        first.fit(seeded(Looks), loader(rank, world))
        first.save_checkpoint(path)
        counts, module = Counts(), Looks()
        fitted = trainer(rank, world, strategy, max_epochs=1, callbacks=[counts])
        fitted.fit(module, loader(rank, world), ckpt_path=path)
        assert counts.at_start == 4
        assert [rate for _, rate in module.looks] == [0.125, 0.125]
        for value, _ in module.looks:
            assert torch.equal(value, weights(first)["last.weight"]), strategy


def test_optimizers_and_on_fit_start_see_what_was_loaded(tmp_path: Path) -> None:
    """They saw the weights from before, and callbacks without their states."""
    worlds.run(_look, 2, str(tmp_path), ["ddp", 1, 3])


class Odd:
    """Is not loaded by ``torch.load(weights_only=True)``."""


class Keeps(Net):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["odd"] = Odd()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert isinstance(checkpoint["odd"], Odd)


def _load_objects(rank: int, world: int, path: str) -> None:
    first = trainer(rank, world, 1, max_epochs=1)
    first.fit(Keeps(), loader(rank, world))
    first.save_checkpoint(path)
    fitted = trainer(rank, world, 1, max_epochs=1)
    with pytest.raises(Exception, match="weights_only"):
        fitted.fit(Keeps(), loader(rank, world), ckpt_path=path)
    fitted.fit(Keeps(), loader(rank, world), ckpt_path=path, weights_only=False)
    fitted.test(Keeps(), loader(rank, world), ckpt_path=path, weights_only=False, verbose=False)


def test_weights_only_of_a_fit_or_test_is_heard(tmp_path: Path) -> None:
    worlds.run(_load_objects, 1, str(tmp_path / "odd.ckpt"))


class Grows(Net):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.last = nn.Linear(6, 3)


def _grow(rank: int, world: int, path: str) -> None:
    first = trainer(rank, world, 3, max_steps=1)
    first.fit(Net(), loader(rank, world))
    first.save_checkpoint(path)
    with pytest.raises(RuntimeError, match=r"`last.weight` came into the module .*`on_load_checkpoint` is called"):
        trainer(rank, world, 3).fit(Grows(), loader(rank, world), ckpt_path=path)


def test_new_layers_in_on_load_checkpoint_are_refused(tmp_path: Path) -> None:
    worlds.run(_grow, 1, str(tmp_path / "small.ckpt"))


def _find_rate(rank: int, world: int, folder: str) -> None:
    class Rated(Tied):
        lr = 0.02

    expected = _fit(rank, world, Rated, 1, f"{folder}/whole")
    finder = LearningRateFinder(num_training_steps=3, update_attr=False)
    fitted = trainer(rank, world, 1, callbacks=[finder], max_epochs=3, default_root_dir=folder)
    fitted.fit(seeded(Rated), loader(rank, world), ckpt_path=f"{folder}/whole/epoch=0.ckpt")
    assert fitted.ckpt_path == f"{folder}/whole/epoch=0.ckpt"
    assert_equal(weights(fitted), expected)


def test_a_resumed_fit_goes_on_behind_a_learning_rate_finder(tmp_path: Path) -> None:
    worlds.run(_find_rate, 1, str(tmp_path))


# -- Randomness --------------------------------------------------------------------------------------------------------


class Loader:
    """Shuffles anew in every epoch, and goes on in the middle of one."""

    def __init__(self, rank: int, world: int) -> None:
        self.mine = Subset(data(48), range(rank, 48, world))
        self.epoch, self.given, self.goes_on = 0, 0, False

    def __len__(self) -> int:
        return len(self.mine) // 2

    def __iter__(self) -> Iterator[Any]:
        if not self.goes_on:
            self.epoch, self.given = self.epoch + 1, 0
        self.goes_on = False
        order = torch.randperm(len(self.mine), generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.given < len(self):
            self.given += 1
            yield default_collate([self.mine[index] for index in order[2 * self.given - 2 : 2 * self.given]])

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.given = state["epoch"], state["given"]
        self.goes_on = self.given < len(self)


def shuffling(rank: int, world: int) -> DataLoader[Any]:
    """Torch's own loader draws when it is iterated; it cannot go on in the middle of an epoch."""
    return DataLoader(Subset(data(48), range(rank, 48, world)), batch_size=2, shuffle=True)


class Noisy(Tied):
    """Draws from every generator in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(F.dropout(x, 0.2, self.training)), 0.2, self.training)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch) * (1 + 0.1 * random.random() + 0.1 * np.random.random())
        self.losses.append(loss.item())
        return loss


class NoisyStart(Noisy):
    """Draws when an epoch starts, too."""

    def on_train_epoch_start(self) -> None:
        torch.rand(())


class Planned(Noisy):
    """Makes its schedule by the length of the training, before the states of loaders are restored."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([param for param in self.parameters() if param.requires_grad], lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.5, self.steps)]

    @property
    def steps(self) -> int:
        return int(self.trainer.estimated_stepping_batches)


class PlannedByName(Planned):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([param for param in self.parameters() if param.requires_grad], lr=0.02)
        return [optimizer], [WarmupDecayLR(optimizer, total_num_steps="auto")]


def _noisy(
    rank: int, world: int, kind: Any, folder: str, make_loader: Any, every: int | None, resume: str | None = None,
    make: Any = Noisy,
) -> Any:  # fmt: skip
    seed = rank + 10 * (resume is not None)  # as ranks and runs differ when nobody seeds
    worlds.seed(seed)
    np.random.seed(seed)
    callback = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=every)
    options = {"enable_checkpointing": True, "max_epochs": 3, "accumulate_grad_batches": 2}
    fitted = trainer(rank, world, _strategy(kind), callbacks=[callback], **options)
    # Lightning leaves out the hooks between epochs after a resume from a last batch.
    module = make() if every else NoisyStart()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted.fit(module, make_loader(rank, world), ckpt_path=resume)
    said = [str(warning.message) for warning in caught if "random number" in str(warning.message)]
    return module.losses, weights(fitted), said


def _go_on_noisily(
    rank: int, world: int, folder: str, kind: Any, make_loader: Any, every: int | None, steps: tuple[int, ...],
    make: Any = Noisy,
) -> None:  # fmt: skip
    losses, expected, _ = _noisy(rank, world, kind, f"{folder}/whole", make_loader, every, make=make)
    assert len(losses) == 72 // world
    for step in steps:
        path = f"{folder}/whole/step={step}.ckpt"
        rest, actual, said = _noisy(rank, world, kind, f"{folder}/{step}", make_loader, every, path, make)
        assert rest == losses[2 * step :]
        assert said == []
        assert_equal(actual, expected)


KINDS = [1, 2, 3, (0, "sharded"), (1, "sharded"), (3, "full")]


@pytest.mark.parametrize("kind", sample(KINDS, 3), ids=str)
def test_losses_after_a_resume_in_the_middle_of_an_epoch_are_those_of_an_uninterrupted_run(
    kind: Any, tmp_path: Path
) -> None:
    worlds.run(_go_on_noisily, 2, str(tmp_path), kind, Loader, 4, (4, 8))


@pytest.mark.parametrize("make", [Planned, PlannedByName])
def test_loaders_that_an_optimizer_asks_for_go_on_in_the_middle_of_an_epoch(make: Any, tmp_path: Path) -> None:
    """They began the epoch anew, and its last batches were never trained on."""
    worlds.run(_go_on_noisily, 1, str(tmp_path), 1, Loader, 4, (4,), make)


@pytest.mark.parametrize("kind", sample(KINDS, 1), ids=str)
@pytest.mark.parametrize(
    "saved", sample([(None, 6), (6, 6), (None, 12)], (6, 6)), ids=["epoch-end", "last-batch", "second"]
)
def test_losses_after_a_resume_between_epochs_are_those_of_an_uninterrupted_run(
    saved: tuple[int | None, int], kind: Any, tmp_path: Path
) -> None:
    every, step = saved
    worlds.run(_go_on_noisily, 2, str(tmp_path), kind, shuffling, every, (step,))


def _say(rank: int, world: int, path: str) -> list[str]:
    return _noisy(rank, world, 2, f"{path}-other", Loader, None, path)[2]


@pytest.mark.slow
def test_random_states_of_another_world_are_left_out_and_it_is_said_once(tmp_path: Path) -> None:
    worlds.run(_noisy, 2, 3, str(tmp_path), Loader, None)
    said = worlds.run(_say, 1, str(tmp_path / "step=6.ckpt"))
    assert [len(lines) for lines in said] == [1]
    assert said[0][0].startswith("The checkpoint was saved on 2 ranks and is resumed on 1")


class _SavesAt(Callback):
    def __init__(self, batch: int, path: str) -> None:
        self._batch = batch
        self._path = path

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self._batch:
            trainer.save_checkpoint(self._path)


def _lose_microbatches(rank: int, world: int, folder: str) -> list[list[str]]:
    """Return what resuming says, by the batch behind which the checkpoint was saved: of 5, three a step."""
    said = []
    for batch in (1, 2, 4):
        path, options = f"{folder}/{batch}", {"accumulate_grad_batches": 3, "limit_train_batches": 5}
        trainer(rank, world, 2, callbacks=[_SavesAt(batch, path)], **options).fit(seeded(Net), loader(rank, world))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer(rank, world, 2, **options).fit(seeded(Net), loader(rank, world), ckpt_path=path)
        said.append([str(one.message) for one in caught if "micro-batch(es)" in str(one.message)])
    return said


def test_gradients_of_an_open_accumulation_are_named_as_lost(tmp_path: Path) -> None:
    """The resumed run stepped without them, in silence."""
    ((message,), closed, at_end) = worlds.run(_lose_microbatches, 1, str(tmp_path))[0]
    assert message.startswith("The checkpoint was saved when 2 micro-batch(es) had added to the gradients of the next")
    assert closed == at_end == []
