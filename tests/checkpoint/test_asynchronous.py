"""Saving in the background: what is written is the state at the call, in order, and errors are not lost."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO

from lightning_zero.checkpoint import directory
from lightning_zero.checkpoint.asynchronous import AsyncSaver, StagingBuffer
from lightning_zero.checkpoint.ranks import CheckpointError
from lightning_zero.lightning.strategy import ZeroStrategy
from tests import worlds
from tests.checkpoint import programs
from tests.lightning_programs import Net, assert_equal, loader, seeded, trainer, weights
from tests.simulated_device import SimulatedDevice

KINDS = pytest.mark.parametrize("full", [False, True], ids=["directory", "file"])


class _Gate:
    """Holds ``directory.write`` back until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch, fails: bool = False) -> None:
        self.open = threading.Event()
        self._write, self._fails = directory.write, fails
        patch.setattr(directory, "write", self)

    def __call__(self, prepared: Any, ranks: Any) -> None:
        assert self.open.wait(30)
        with ranks.agree("Saving"):
            if self._fails and ranks.rank == 1:
                raise OSError("no space left")
        self._write(prepared, ranks)


# -- What is written ---------------------------------------------------------------------------------------------------


def _save_and_go_on(rank: int, world: int, stage: int, full: bool, path: str) -> Any:
    engine, model, optimizer = programs.make(stage, 0)
    programs.step(engine, model, optimizer, 0)
    expected = programs.held(engine, optimizer)
    running = model.batch_norm.running_mean.clone()
    checkpoint = programs.snapshot(engine, model, optimizer)
    checkpoint["callbacks"]["list"] = [1]
    saver = AsyncSaver(engine)
    with pytest.MonkeyPatch.context() as patch:
        gate = _Gate(patch)
        saver.save(checkpoint, path, full)
        checkpoint["callbacks"]["best"].fill_(7)
        checkpoint["callbacks"]["list"].append(2)
        optimizer.param_groups[0]["lr"] = 7
        for number in (1, 2):
            programs.step(engine, model, optimizer, number)
        assert not os.path.lexists(path)
        gate.open.set()
        saver.close()
    _, model, optimizer = programs.make(stage, 1)
    return expected, running


def _load(rank: int, world: int, path: str) -> Any:
    engine, model, optimizer = programs.make(3, 1)
    checkpoint = programs.restore(engine, model, optimizer, path)
    assert checkpoint["callbacks"] == {"best": torch.tensor(0.25), "path": "somewhere", "list": [1]}
    assert optimizer.param_groups[0]["lr"] == 1e-2
    return programs.held(engine, optimizer), model.batch_norm.running_mean.clone()


@KINDS
@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow), 3], ids="stage{}".format)
def test_what_is_written_is_the_state_at_the_call(stage: int, full: bool, tmp_path: Path) -> None:
    path = str(tmp_path / "saved.ckpt")
    saved = worlds.run(_save_and_go_on, 2, stage, full, path)
    loaded = worlds.run(_load, 2, path)
    expected = programs.whole([held for held, _ in saved])
    actual = programs.whole([held for held, _ in loaded])
    for name, slots in expected.items():
        assert all(torch.equal(actual[name][slot], value) for slot, value in slots.items()), name
    assert torch.equal(loaded[0][1], saved[0][1])
    assert os.listdir(tmp_path) == ["saved.ckpt"]


def test_a_staging_buffer_is_kept_and_no_larger_than_what_it_takes() -> None:
    buffer = StagingBuffer(pinned=False)
    parts = [torch.arange(5, dtype=torch.int16), torch.empty(0), torch.arange(7, dtype=torch.float64)]
    first = buffer.copy(parts)
    assert all(
        torch.equal(copied, part) and copied.dtype == part.dtype for copied, part in zip(first, parts, strict=True)
    )
    storage = first[0].untyped_storage()
    assert storage.nbytes() == 2 * 64
    again = buffer.copy([torch.ones(3)])
    assert again[0].untyped_storage().data_ptr() == storage.data_ptr()


def test_a_staging_buffer_of_a_device_locks_the_pages_that_it_needs() -> None:
    """PyTorch's pinned memory is as large as the next power of two."""
    with SimulatedDevice() as device:
        buffer = StagingBuffer(pinned=True)
        for numel in (1, 5000, 9000, 3000):
            values = torch.arange(float(numel)).to("cuda")
            copied = buffer.copy([values])[0]
            assert torch.equal(copied, torch.arange(float(numel)))
            assert copied.is_pinned()
        assert list(device.driver.locked.values()) == [9 * 4096]
        buffer.close()
        assert not device.driver.locked


# -- In which order, and with which errors -----------------------------------------------------------------------------


def _fail_then_save(rank: int, world: int, full: bool, folder: str) -> list[str]:
    engine, model, optimizer = programs.make(3, 0)
    programs.step(engine, model, optimizer, 0)
    saver, removed = AsyncSaver(engine), list[str]()

    def save(name: str) -> None:
        saver.save(programs.snapshot(engine, model, optimizer), f"{folder}/{name}", full)

    save("first")
    saver.wait()
    with pytest.MonkeyPatch.context() as patch:
        gate = _Gate(patch, fails=True)
        save("second")
        if rank == 0:
            saver.remove(f"{folder}/first", then=lambda: removed.append("too early"))
        gate.open.set()
        with pytest.raises((CheckpointError, OSError), match="no space left"):
            saver.wait()
    saver.wait()
    after_failure = sorted(os.listdir(folder))
    save("third")
    assert not removed
    if rank == 0:
        saver.remove(f"{folder}/first", then=lambda: removed.append("first"))
    saver.close()
    assert removed == ["first"] * (rank == 0)
    engine.internals.communicator.agree_on([0], "end")
    return [*after_failure, "then", *sorted(os.listdir(folder))]


@KINDS
def test_an_old_checkpoint_goes_only_when_the_new_one_is_whole(full: bool, tmp_path: Path) -> None:
    for seen in worlds.run(_fail_then_save, 2, full, str(tmp_path)):
        assert seen == ["first", "then", "third"]


ENDS_AT_ONCE = """
import sys, torch
from lightning_zero.checkpoint.asynchronous import AsyncSaver
from tests.checkpoint import programs
engine, model, optimizer = programs.make(3, 0)
programs.step(engine, model, optimizer, 0)
AsyncSaver(engine).save(programs.snapshot(engine, model, optimizer), sys.argv[1], False)
raise SystemExit(3)
"""


@pytest.mark.slow
def test_a_save_is_finished_when_the_program_ends(tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    command = [sys.executable, "-c", textwrap.dedent(ENDS_AT_ONCE), str(path)]
    assert subprocess.run(command, timeout=100, env={**os.environ, "PYTHONPATH": os.getcwd()}).returncode == 3
    assert directory.load(None, path)["epoch"] == 3


# -- Through the Trainer -----------------------------------------------------------------------------------------------


def _fit(rank: int, world: int, strategy: ZeroStrategy, folder: str) -> tuple[dict[str, Any], list[str]]:
    callback = ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=1, save_top_k=2, monitor="step", mode="max"
    )
    fitted = trainer(rank, world, strategy, callbacks=[callback], enable_checkpointing=True, max_epochs=2)
    fitted.fit(seeded(Net), loader(rank, world))
    fitted.strategy.barrier()  # rank 0 removes what is no longer wanted
    names = sorted(os.listdir(folder))
    assert os.path.basename(callback.best_model_path) in names
    values = weights(fitted)
    fitted.test(datamodule=None, dataloaders=loader(rank, world), ckpt_path="best", verbose=False)
    return values, names


def _fit_both(rank: int, world: int, stage: int, folder: str) -> None:
    values, names = _fit(rank, world, ZeroStrategy(stage=stage), f"{folder}/now")
    later, later_names = _fit(rank, world, ZeroStrategy(stage=stage, async_save=True), f"{folder}/later")
    assert names == later_names
    assert_equal(later, values)
    for name in names:
        now, later = (directory.load(None, f"{folder}/{kind}/{name}")["state_dict"] for kind in ("now", "later"))
        assert_equal({key: now[key] + 0 for key in now}, {key: later[key] + 0 for key in later})


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3], ids="stage{}".format)
def test_a_fit_keeps_the_same_checkpoints(stage: int, tmp_path: Path) -> None:
    worlds.run(_fit_both, 2, stage, str(tmp_path))


def _fit_on_full_disk(rank: int, world: int, folder: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        _Gate(patch, fails=True).open.set()
        with pytest.raises((CheckpointError, OSError), match="no space left"):
            _fit(rank, world, ZeroStrategy(stage=3, async_save=True), folder)


def test_a_failed_save_is_an_error_of_the_fit_on_every_rank(tmp_path: Path) -> None:
    worlds.run(_fit_on_full_disk, 2, str(tmp_path))
    assert os.listdir(tmp_path) == []


def _refused(rank: int, world: int, folder: str) -> None:
    linking = ModelCheckpoint(folder, save_last="link")
    refused = trainer(rank, world, ZeroStrategy(async_save=True), callbacks=[linking], enable_checkpointing=True)
    with pytest.raises(ValueError, match="`save_last='link'` links to a checkpoint"):
        refused.fit(seeded(Net), loader(rank, world))
    strategy = ZeroStrategy(stage=1, async_save=True)
    refused = trainer(rank, world, strategy, plugins=[AsyncCheckpointIO()])
    with pytest.raises(ValueError, match="`AsyncCheckpointIO` would not be asked"):
        refused.fit(seeded(Net), loader(rank, world))


def test_what_a_background_save_cannot_keep_is_refused(tmp_path: Path) -> None:
    worlds.run(_refused, 1, str(tmp_path))
