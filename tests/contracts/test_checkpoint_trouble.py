"""What goes wrong with checkpoints is an error on every rank that says what to do, and the last good one stays."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_zero.checkpoint import directory
from lightning_zero.checkpoint.ranks import CheckpointError
from lightning_zero.errors import CollectiveError
from lightning_zero.lightning.strategy import ZeroStrategy
from tests import worlds
from tests.lightning_programs import Net, assert_equal, loader, seeded, trainer, weights
from tests.sampling import sample

KINDS = pytest.mark.parametrize("kind", ["sharded", "full"])


def _fit(rank: int, world: int, folder: str, strategy: Any, make: Any = Net, **options: Any) -> Any:
    callback = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    fitted = trainer(rank, world, strategy, callbacks=[callback], enable_checkpointing=True, max_epochs=1)
    fitted.fit(seeded(make), loader(rank, world), **options)
    return fitted


# -- The ranks ---------------------------------------------------------------------------------------------------------


class _SavesAlone(Callback):
    def __init__(self, rank: int, path: str) -> None:
        self.rank, self.path = rank, path

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_rank == self.rank:
            trainer.save_checkpoint(self.path)


def _save_alone(rank: int, world: int, lone: int, kind: Any, folder: str) -> None:
    strategy = ZeroStrategy(stage=3, state_dict_type=kind, timeout=2.0)
    fitted = trainer(rank, world, strategy, callbacks=[_SavesAlone(lone, f"{folder}/alone.ckpt")])
    if rank == lone:
        with pytest.raises(CheckpointError, match="(?s)Saving a checkpoint (needs|was given up) .* on every rank"):
            fitted.fit(seeded(Net), loader(rank, world))
    else:
        with pytest.raises((CollectiveError, RuntimeError), match="failed|Timed out|timeout|closed"):
            fitted.fit(seeded(Net), loader(rank, world))


@KINDS
@pytest.mark.parametrize("lone", sample([0, 1], 1))
def test_a_save_on_one_rank_is_an_error_and_no_hang(lone: int, kind: str, tmp_path: Path) -> None:
    worlds.run(_save_alone, 2, lone, kind, str(tmp_path))
    assert os.listdir(tmp_path) == []


# -- The disk ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _no_room_on_the_disk(here: bool) -> Iterator[None]:
    """Let every write past the first 100 bytes of a file fail."""
    if not here:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def _fill_the_disk(rank: int, world: int, kind: Any, async_save: bool, victim: int, folder: str) -> None:
    strategy = ZeroStrategy(stage=3, state_dict_type=kind, async_save=async_save)
    fitted = _fit(rank, world, folder, strategy)
    path = f"{folder}/step=2.ckpt"
    old = directory.load(None, path)["global_step"]
    said = "File too large|could not be written"
    with contextlib.ExitStack() as stack:
        # Behind the meeting of the ranks, whose store is a file here.
        fill = _no_room_on_the_disk(rank == victim)
        vars(fitted.lightning_module)["on_save_checkpoint"] = lambda _: stack.enter_context(fill)
        with pytest.raises((CheckpointError, OSError), match=said):
            fitted.save_checkpoint(path) or fitted.strategy.wait_for_save()
    del vars(fitted.lightning_module)["on_save_checkpoint"]
    fitted.strategy.barrier()
    assert directory.load(None, path)["global_step"] == old
    fitted.save_checkpoint(path)
    fitted.strategy.wait_for_save()
    assert directory.load(None, path)["global_step"] == fitted.global_step


@pytest.mark.parametrize("async_save", [False, True], ids=["waiting", "async"])
@pytest.mark.parametrize(("kind", "victim"), [("sharded", 0), ("sharded", 1), ("full", 0)])
def test_a_full_disk_keeps_the_old_checkpoint(kind: str, async_save: bool, victim: int, tmp_path: Path) -> None:
    worlds.run(_fill_the_disk, 2, kind, async_save, victim, str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["step=2.ckpt", "step=4.ckpt"]


def _save_below_a_file(rank: int, world: int, kind: Any, path: str) -> None:
    fitted = trainer(rank, world, ZeroStrategy(stage=3, state_dict_type=kind), max_epochs=1)
    fitted.fit(seeded(Net), loader(rank, world))
    with pytest.raises((CheckpointError, OSError), match="Saving `.*`|Not a directory|File exists"):
        fitted.save_checkpoint(path)
    with pytest.raises((CheckpointError, FileNotFoundError, NotADirectoryError)):
        fitted.fit(seeded(Net), loader(rank, world), ckpt_path=path)


@KINDS
def test_a_folder_that_cannot_be_made_is_an_error_on_every_rank(kind: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    worlds.run(_save_below_a_file, 2, kind, str(tmp_path / "file" / "saved.ckpt"))


# -- Other file systems ------------------------------------------------------------------------------------------------


def _save_by_protocol(rank: int, world: int, folder: str) -> None:
    url = f"file://{folder}/saved.ckpt"
    fitted = trainer(rank, world, ZeroStrategy(stage=3, state_dict_type="full"), max_epochs=1)
    fitted.fit(seeded(Net), loader(rank, world))
    fitted.save_checkpoint(url)
    again = trainer(rank, world, ZeroStrategy(stage=2), max_epochs=1)
    again.fit(seeded(Net), loader(rank, world), ckpt_path=url)
    assert_equal(weights(again), weights(fitted))
    for refused in (ZeroStrategy(stage=3), ZeroStrategy(stage=1, async_save=True)):
        other = trainer(rank, world, refused, max_epochs=1)
        other.fit(seeded(Net), loader(rank, world))
        with pytest.raises((ValueError, CheckpointError), match="has a protocol"):
            other.save_checkpoint(url)
    fitted.strategy.barrier()
    fitted.strategy.remove_checkpoint(url)
    fitted.strategy.barrier()
    assert os.listdir(folder) == []


def test_single_files_go_to_any_file_system_and_directories_say_that_they_do_not(tmp_path: Path) -> None:
    worlds.run(_save_by_protocol, 2, str(tmp_path))


# -- Edits in hooks ----------------------------------------------------------------------------------------------------


class _Edits(Net):
    """Keeps its own names in files, and leaves a layer out."""

    strict_loading = False

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        values = checkpoint["state_dict"]
        checkpoint["state_dict"] = {f"renamed.{key}": value for key, value in values.items() if "last" not in key}
        checkpoint["added"] = torch.ones(2)
        checkpoint["model_names"] = ["mine"]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        values = checkpoint["state_dict"]
        assert torch.equal(checkpoint["added"], torch.ones(2))
        assert checkpoint["model_names"] == ["mine"]
        checkpoint["state_dict"] = {key.removeprefix("renamed."): value for key, value in values.items()}
        checkpoint["state_dict"]["first.bias"] = checkpoint["state_dict"]["first.bias"] * 2
        checkpoint["state_dict"]["unknown"] = torch.zeros(3)


def _edit(rank: int, world: int, kind: Any, folder: str) -> None:
    results = []
    for strategy in ("ddp", ZeroStrategy(stage=1, state_dict_type=kind), ZeroStrategy(stage=3, state_dict_type=kind)):
        name = strategy if isinstance(strategy, str) else str(strategy.stage)
        _fit(rank, world, f"{folder}/{name}", strategy, _Edits)
        again = trainer(rank, world, strategy if isinstance(strategy, str) else ZeroStrategy(stage=3), max_epochs=1)
        again.fit(seeded(_Edits), loader(rank, world), ckpt_path=f"{folder}/{name}/step=4.ckpt")
        results.append(weights(again))
    for values in results[1:]:
        assert_equal(values, results[0])


@KINDS
def test_edits_of_the_state_dict_in_hooks_work_as_under_ddp(kind: str, tmp_path: Path) -> None:
    worlds.run(_edit, 2, kind, str(tmp_path))


class _TrainsALayer(Net):
    """Trains one layer, and takes a layer of a checkpoint that has another name now."""

    def __init__(self, trained: str, name: str = "linear") -> None:
        super().__init__()
        self.blocks[1] = nn.Sequential(OrderedDict([("norm", nn.LayerNorm(6)), (name, nn.Linear(6, 6))]))
        self.trained = trained

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([param for name, param in self.named_parameters() if name.startswith(self.trained)])

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        values = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name.replace("layer", "linear"): value for name, value in values.items()}


def _resume_layers(rank: int, world: int, path: str) -> None:
    def fit(module: Net, epochs: int, **options: Any) -> Any:
        fitted = trainer(rank, world, ZeroStrategy(stage=2, state_dict_type="full"), max_epochs=epochs)
        fitted.fit(module, loader(rank, world), **options)
        return fitted

    fit(_TrainsALayer("blocks.1.layer", "layer"), 1).save_checkpoint(path)
    with pytest.raises(ValueError, match=r"state of `blocks.1.layer.weight`, which optimizer 0 does not step"):
        fit(_TrainsALayer("blocks.0.linear"), 2, ckpt_path=path)
    again = fit(_TrainsALayer("blocks.1.linear"), 2, ckpt_path=path)
    assert [int(state["step"]) for state in again.optimizers[0].state.values()] == [8, 8]


def test_a_renamed_layer_resumes_from_a_file_and_a_layer_that_was_frozen_does_not_take_its_states(
    tmp_path: Path,
) -> None:
    worlds.run(_resume_layers, 2, str(tmp_path / "saved.ckpt"))
