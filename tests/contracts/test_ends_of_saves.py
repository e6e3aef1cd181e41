"""However a program ends around a save, the checkpoint is whole or an error says that it is not."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.distributed.checkpoint import default_planner

from lightning_zero.checkpoint import directory
from lightning_zero.checkpoint.asynchronous import AsyncSaver
from lightning_zero.checkpoint.ranks import CheckpointError
from lightning_zero.errors import CollectiveError
from lightning_zero.lightning.strategy import ZeroStrategy
from tests import worlds
from tests.checkpoint import programs
from tests.lightning_programs import Net, assert_equal, loader, seeded, trainer, weights

KINDS = pytest.mark.parametrize("kind", ["sharded", "full"])
ASYNC = pytest.mark.parametrize("async_save", [False, True], ids=["waiting", "async"])


def _fitted(rank: int, world: int, *callbacks: Callback, **options: Any) -> Any:
    fitted = trainer(rank, world, ZeroStrategy(stage=3, **options), callbacks=list(callbacks), max_epochs=1)
    fitted.fit(seeded(Net), loader(rank, world))
    return fitted


def _slow_writes(patch: pytest.MonkeyPatch) -> None:
    write = directory.write

    def write_late(*args: Any) -> None:
        time.sleep(0.5)
        write(*args)

    patch.setattr(directory, "write", write_late)


# -- The process group is destroyed ------------------------------------------------------------------------------------


def _save_and_destroy(rank: int, world: int, kind: Any, path: str) -> dict[str, Tensor]:
    fitted = _fitted(rank, world, state_dict_type=kind, async_save=True)
    with pytest.MonkeyPatch.context() as patch:
        _slow_writes(patch)
        fitted.save_checkpoint(path)
        expected = weights(fitted)
        dist.destroy_process_group()
        fitted.strategy.wait_for_save()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the pool destroys one
    return expected


@KINDS
def test_a_script_that_saves_and_destroys_its_group_has_saved(kind: str, tmp_path: Path) -> None:
    expected = worlds.run(_save_and_destroy, 2, kind, str(tmp_path / "saved.ckpt"))[0]
    saved = directory.load(None, tmp_path / "saved.ckpt")["state_dict"]
    assert_equal({name: saved[name] + 0 for name in saved}, expected)
    assert os.listdir(tmp_path) == ["saved.ckpt"]


def _destroy_and_save(rank: int, world: int, kind: Any, async_save: bool, path: str) -> None:
    fitted = _fitted(rank, world, state_dict_type=kind, async_save=async_save)
    dist.destroy_process_group()
    try:
        with pytest.raises(CheckpointError, match=r"process group, .*destroy_process_group\(\)` after the last"):
            fitted.save_checkpoint(path)
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@KINDS
@ASYNC
def test_a_save_behind_the_end_of_its_group_is_refused(kind: str, async_save: bool, tmp_path: Path) -> None:
    worlds.run(_destroy_and_save, 2, kind, async_save, str(tmp_path / "saved.ckpt"))
    assert os.listdir(tmp_path) == []


def _destroy_while_saving(rank: int, world: int, full: bool, before: str, path: str) -> None:
    engine, model, optimizer = programs.make(1, 0)
    programs.step(engine, model, optimizer, 0)
    saver = AsyncSaver(engine)
    original = getattr(directory, before)

    def destroy_first(*args: Any) -> Any:
        if dist.is_initialized() and dist.get_world_size() == world:
            dist.destroy_process_group()
        return original(*args)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(directory, before, destroy_first)
            saver.save(programs.snapshot(engine, model, optimizer), path, full)
            with pytest.raises((CheckpointError, CollectiveError), match="process group|exchange about"):
                saver.close()
    finally:
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.parametrize(
    ("full", "before"),
    [(False, "write"), (False, "_write_tensors"), (False, "block_sums"), (False, "write_sums"), (True, "write_file")],
)
def test_a_group_that_ends_during_a_save_leaves_no_checkpoint(full: bool, before: str, tmp_path: Path) -> None:
    worlds.run(_destroy_while_saving, 2, full, before, str(tmp_path / "saved.ckpt"))
    assert [name for name in os.listdir(tmp_path) if ".tmp-" not in name] == []


# -- What was written is looked at before it has its name --------------------------------------------------------------


def _lose(rank: int, world: int, what: str, path: str) -> None:
    engine, model, optimizer = programs.make(3, 0)
    programs.step(engine, model, optimizer, 0)
    sums = directory.block_sums

    def lose(file: Path) -> list[int]:
        taken = sums(file)
        if file.name == "__1_0.distcp" and what == "file":
            file.unlink()
        if file.name == "__1_0.distcp" and what == "end":
            os.truncate(file, file.stat().st_size // 2)
        return taken

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(directory, "block_sums", lose)
        with pytest.raises(CheckpointError, match="__1_0.distcp.* all ranks see"):
            directory.save(engine, programs.snapshot(engine, model, optimizer), path, full=False)


@pytest.mark.parametrize("what", ["file", "end"])
def test_a_checkpoint_without_the_file_of_a_rank_is_not_published(what: str, tmp_path: Path) -> None:
    worlds.run(_lose, 2, what, str(tmp_path / "saved.ckpt"))
    assert os.listdir(tmp_path) == []


def _leave_out(rank: int, world: int, full: bool, alone: bool, path: str) -> None:
    engine, model, optimizer = programs.make(3, 0)
    programs.step(engine, model, optimizer, 0)
    checkpoint = programs.snapshot(engine, model, optimizer)
    if rank == 1:
        del checkpoint["state_dict"]["conv.weight"], checkpoint["state_dict"]["blocks.0.linear.weight"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default_planner, "_validate_global_plan", lambda *args: [] if alone else original(*args))
        with pytest.raises(CheckpointError, match="No rank has all of `model.(conv|blocks.0.linear).weight`|validate"):
            directory.save(engine, checkpoint, path, full=full)


original = default_planner._validate_global_plan


@pytest.mark.parametrize(("full", "alone"), [(True, False), (False, False), (False, True)])
def test_a_tensor_that_one_rank_leaves_out_is_not_published(full: bool, alone: bool, tmp_path: Path) -> None:
    worlds.run(_leave_out, 2, full, alone, str(tmp_path / "saved.ckpt"))
    assert os.listdir(tmp_path) == []


# -- The disk is full --------------------------------------------------------------------------------------------------


class _FullDisk:
    def __init__(self, patch: pytest.MonkeyPatch, rank: int) -> None:
        self._rank, self._write = rank, directory.write
        patch.setattr(directory, "write", self)

    def __call__(self, prepared: Any, ranks: Any) -> None:
        with ranks.agree("Saving"):
            if self._rank == 1:
                raise OSError("no space left")
        self._write(prepared, ranks)


class _SavesAtTheEnd(Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def teardown(self, trainer: Any, *args: Any, **options: Any) -> None:
        trainer.save_checkpoint(self.path)


def _fail_after_the_fit(rank: int, world: int, kind: Any, path: str) -> None:
    fitted = _fitted(rank, world, state_dict_type=kind, async_save=True)
    with pytest.MonkeyPatch.context() as patch:
        _FullDisk(patch, rank)
        with pytest.raises((CheckpointError, OSError), match="no space left"):
            fitted.save_checkpoint(path)
        with pytest.raises((CheckpointError, OSError), match="no space left"):
            _fitted(rank, world, _SavesAtTheEnd(path), state_dict_type=kind, async_save=True)


@KINDS
def test_a_background_save_behind_the_fit_that_fails_is_an_error(kind: str, tmp_path: Path) -> None:
    worlds.run(_fail_after_the_fit, 2, kind, str(tmp_path / "saved.ckpt"))
    assert os.listdir(tmp_path) == []


class _Leaves(Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.save_checkpoint(self.path)
        raise SystemExit(0)


def _leave_the_fit(rank: int, world: int, path: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        _FullDisk(patch, rank)
        with pytest.raises((CheckpointError, OSError), match="no space left"):
            _fitted(rank, world, _Leaves(path), async_save=True)


def test_a_failed_save_is_an_error_of_a_program_that_leaves_the_fit_with_status_0(tmp_path: Path) -> None:
    worlds.run(_leave_the_fit, 2, str(tmp_path / "saved.ckpt"))
    assert os.listdir(tmp_path) == []


# -- Names and watchers ------------------------------------------------------------------------------------------------


class _Worse(Net):
    """Is validated as worse each time."""

    loss_of_validation = 0.0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", torch.tensor(self.loss_of_validation), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.loss_of_validation += 1.0


def _named_alike(rank: int, world: int, stage: Any, async_save: bool, path: str) -> tuple[list[str], float, bool]:
    saver = ModelCheckpoint(dirpath=path, filename="best", monitor="val_loss", save_top_k=2)
    strategy = ZeroStrategy(stage=stage, async_save=async_save)
    options = {"max_epochs": 1, "val_check_interval": 2, "enable_checkpointing": True, "callbacks": [saver]}
    with pytest.MonkeyPatch.context() as patch:
        if async_save:
            _slow_writes(patch)
        one = trainer(rank, world, strategy, **options)
        one.fit(seeded(_Worse), loader(rank, world), loader(rank, world))
    assert saver.best_model_score is not None
    return sorted(os.listdir(path)), float(saver.best_model_score), "file_exists" in vars(saver)


@pytest.mark.parametrize("stage", [2, 3])
def test_background_saves_of_one_name_keep_the_best_as_others_do(stage: int, tmp_path: Path) -> None:
    expected = worlds.run(_named_alike, 2, stage, False, str(tmp_path / "now"))
    assert expected[0] == (["best-v1.ckpt", "best.ckpt"], 0.0, False)
    assert worlds.run(_named_alike, 2, stage, True, str(tmp_path / "later")) == expected


def _waiting(rank: int, world: int, path: str) -> bool:
    """Say whether the saver counts as running for the thread that ends ranks, while the rank waits for it."""
    one = _fitted(rank, world)
    saver, is_held, seen = AsyncSaver(one.strategy.engine), threading.Event(), []
    saver._running = saver._thread.submit(is_held.wait)
    watcher = threading.Thread(target=lambda: (time.sleep(0.2), seen.append(saver.is_running), is_held.set()))
    watcher.start()
    saver.close()
    watcher.join()
    return seen[0]


def test_a_rank_that_waits_for_its_background_save_counts_as_saving(tmp_path: Path) -> None:
    assert worlds.run(_waiting, 2, str(tmp_path)) == [True, True]
