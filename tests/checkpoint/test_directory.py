from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_zero.checkpoint import directory, paths, state
from lightning_zero.checkpoint.planner import Segment, SegmentSavePlanner
from lightning_zero.checkpoint.ranks import CheckpointError
from tests import worlds
from tests.checkpoint import programs


def _save(rank: int, world: int, path: str, full: bool = False, seed: int = 0, stage: int = 3) -> programs.Whole:
    engine, model, optimizer = programs.make(stage, seed)
    programs.step(engine, model, optimizer, 0)
    directory.save(engine, programs.snapshot(engine, model, optimizer), path, full=full)
    return {record.name: {"value": engine.full_param(record.parameter)} for record in engine.records()}


def _read(path: Path) -> dict[str, Any]:
    return directory.load(None, path)


def _is(path: Path, saved: programs.Whole) -> bool:
    values = _read(path)["state_dict"]
    return all(torch.equal(values[name], slots["value"]) for name, slots in saved.items())


# -- What is in a checkpoint -------------------------------------------------------------------------------------------


def test_a_directory_has_the_files_of_the_format(tmp_path: Path) -> None:
    worlds.run(_save, 2, str(tmp_path / "runs" / "saved.ckpt"))
    path = tmp_path / "runs" / "saved.ckpt"
    assert sorted(os.listdir(path)) == [
        ".metadata", "__0_0.distcp", "__1_0.distcp", "checksums", "format.json", "meta.pt",
    ]  # fmt: skip
    assert os.listdir(path.parent) == ["saved.ckpt"]
    assert json.loads((path / "format.json").read_text())["version"] == directory.FORMAT_VERSION
    assert torch.load(path / "meta.pt", weights_only=True)["epoch"] == 3
    assert set(json.loads((path / "checksums").read_text())["files"]) == set(os.listdir(path)) - {"checksums"}


@pytest.mark.slow
def test_lightnings_consolidation_gives_what_a_single_device_loads(tmp_path: Path) -> None:
    saved = worlds.run(_save, 2, str(tmp_path / "saved.ckpt"))[0]
    tool = "lightning.pytorch.utilities.consolidate_checkpoint"
    subprocess.run([sys.executable, "-W", "ignore", "-m", tool, str(tmp_path / "saved.ckpt")], check=True, timeout=100)
    whole = torch.load(tmp_path / "saved.ckpt.consolidated", weights_only=True)
    assert whole["epoch"] == 3
    model = programs.Model()
    model.load_state_dict(whole["state_dict"])
    assert all(torch.equal(param, saved[name]["value"]) for name, param in model.named_parameters())
    slots = whole["optimizer_states"][0]["state"]["conv.weight"]
    assert {name: tuple(slot.shape) for name, slot in slots.items()} == {
        "step": (), "exp_avg": (3, 1, 2, 3), "exp_avg_sq": (3, 1, 2, 3),
    }  # fmt: skip


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_file_is_what_a_single_device_would_have_saved(stage: int, tmp_path: Path) -> None:
    saved = worlds.run(_save, 2, str(tmp_path / "saved.ckpt"), True, 0, stage)[0]
    whole = torch.load(tmp_path / "saved.ckpt", weights_only=True)
    worlds.seed(1)
    model = programs.Model()
    assert list(whole["state_dict"]) == list(model.state_dict())
    model.load_state_dict(whole["state_dict"])
    assert all(torch.equal(param, saved[name]["value"]) for name, param in model.named_parameters())
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [{"params": [p for p in params if p.ndim >= 2]}, {"params": [p for p in params if p.ndim < 2]}]
    optimizer = torch.optim.AdamW(groups)
    optimizer.load_state_dict(whole["optimizer_states"][0])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert optimizer.state[model.scale]["step"] == 1
    sizes = {value.untyped_storage().nbytes() for key, value in whole["state_dict"].items() if key == "conv.weight"}
    assert sizes == {18 * 4}


def _load_single(rank: int, world: int, path: str, stage: int) -> Any:
    engine, model, optimizer = programs.make(stage, 1)
    programs.restore(engine, model, optimizer, path)
    return programs.held(engine, optimizer)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_file_of_a_single_device_loads_with_its_optimizer(stage: int, tmp_path: Path) -> None:
    worlds.seed()
    model = programs.Model()
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [{"params": [p for p in params if p.ndim >= 2]}, {"params": [p for p in params if p.ndim < 2]}]
    optimizer = torch.optim.AdamW(groups)
    for param in params[1:]:
        param.grad = torch.randn_like(param)
    optimizer.step()
    content = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    torch.save(content, tmp_path / "single.ckpt")
    loaded = programs.whole(worlds.run(_load_single, 2, str(tmp_path / "single.ckpt"), stage))
    for name, param in model.named_parameters():
        slots = optimizer.state.get(param, {})
        assert loaded[name].keys() == {"value", *slots}
        assert torch.equal(loaded[name]["value"], param)
        assert all(torch.equal(loaded[name][slot], value) for slot, value in slots.items())


def _save_copies(rank: int, world: int, path: str, full: bool) -> list[torch.Tensor]:
    engine, model, optimizer = programs.make(3, 0)
    content = programs.snapshot(engine, model, optimizer)
    content["current"] = content.pop("state_dict")  # as `WeightAveraging` does
    content["state_dict"] = {"averaged": torch.ones(3)}
    segment = content["current"]["conv.weight"]
    content["deep"] = {"list": [1, (segment, Segment(segment.local * 2, segment.start, segment.shape, segment.saved))]}
    directory.save(engine, content, path, full=full)
    return [engine.full_param(param) for param in (model.conv.weight, model.head.weight)]


@pytest.mark.parametrize("full", [False, True], ids=["directory", "file"])
def test_sharded_tensors_anywhere_in_the_dictionary_are_kept(full: bool, tmp_path: Path) -> None:
    conv, head = worlds.run(_save_copies, 2, str(tmp_path / "saved"), full)[0]
    content = _read(tmp_path / "saved")
    one, (first, second) = content["deep"]["list"]
    assert one == 1
    assert torch.equal(first, conv)
    assert torch.equal(second, conv * 2)
    assert torch.equal(content["current"]["head.weight"], head)
    assert torch.equal(content["state_dict"]["averaged"], torch.ones(3))
    if not full:
        dcp_to_torch_save(tmp_path / "saved", tmp_path / "whole.pt")


# -- Atomic ------------------------------------------------------------------------------------------------------------


def _occupy_with_directory(path: Path) -> None:
    worlds.run(_save, 3, str(path))


def _occupy_with_file(path: Path) -> None:
    path.write_bytes(b"old")


def _occupy_with_link(path: Path) -> None:
    (path.parent / "best").mkdir()
    (path.parent / "best" / "kept").write_text("kept")
    path.symlink_to("best")


@pytest.mark.world(3)
@pytest.mark.parametrize("full", [False, True], ids=["directory", "file"])
@pytest.mark.parametrize("occupy", [_occupy_with_directory, _occupy_with_file, _occupy_with_link])
@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two-renames"])
def test_what_was_at_the_path_is_replaced(
    exchange: bool, occupy: Callable[[Path], None], full: bool, tmp_path: Path
) -> None:
    path = tmp_path / "last.ckpt"
    occupy(path)
    saved = worlds.run(_save_without_exchange if not exchange else _save, 2, str(path), full)[0]
    assert _is(path, saved)
    assert not path.is_symlink()
    assert path.is_file() == full
    assert set(os.listdir(tmp_path)) - {"best"} == {"last.ckpt"}
    if (tmp_path / "best").exists():
        assert os.listdir(tmp_path / "best") == ["kept"]


def _save_without_exchange(rank: int, world: int, path: str, full: bool) -> programs.Whole:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "_exchange", lambda first, second: False)
        return _save(rank, world, path, full)


@pytest.mark.parametrize("full", [False, True], ids=["directory", "file"])
@pytest.mark.parametrize("name", ["notes.txt", "epoch=1.ckpt/meta.pt", "logs.distcp/events"])
def test_what_lies_beside_a_checkpoint_in_its_folder_is_not_deleted(name: str, full: bool, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    directory.save(None, {"state_dict": {"w": torch.ones(3)}}, path, full=False)
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).write_text("mine")
    with pytest.raises(FileExistsError, match=f"is a folder with `{name.split('/')[0]}`, which would be deleted"):
        worlds.run(_save, 1, str(path), full)
    assert torch.equal(_read(path)["state_dict"]["w"], torch.ones(3))
    with pytest.warns(UserWarning, match=f"was removed, except for `{name.split('/')[0]}`"):
        directory.remove(path)
    assert [file for file in path.rglob("*") if file.is_file()] == [path / name]


def test_what_is_put_beside_a_checkpoint_during_a_save_is_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = {"state_dict": {"w": torch.ones(3)}}
    directory.save(None, content, tmp_path / "saved", full=False)
    write = directory.write_sums

    def write_sums(*args: Any) -> None:
        write(*args)
        (tmp_path / "saved" / "notes.txt").write_text("mine")

    monkeypatch.setattr(directory, "write_sums", write_sums)
    with pytest.raises(FileExistsError, match=r"is a folder with `notes.txt`, which would be deleted"):
        directory.save(None, content, tmp_path / "saved", full=False)
    assert os.listdir(tmp_path) == ["saved"]


def _fail(rank: int, world: int, path: str, full: bool, where: str) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if rank == (0 if full else 1):
            owner: Any = SegmentSavePlanner if where == "resolve_data" else directory
            patch.setattr(owner, where, fail)
        expected = (
            "No space left" if rank == (0 if full else 1) and where != "resolve_data" else "rank [01]: .*No space"
        )
        with pytest.raises((CheckpointError, OSError), match=expected):
            _save(rank, world, path, full, seed=1)


@pytest.mark.parametrize(
    ("full", "where"),
    [(False, "resolve_data"), (False, "block_sums"), (False, "FlatCheckpoint"), (True, "write_file")],
)
def test_an_error_on_one_rank_is_an_error_on_all_and_keeps_the_old(full: bool, where: str, tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    saved = worlds.run(_save, 2, str(path), full)[0]
    worlds.run(_fail, 2, str(path), full, where)
    assert _is(path, saved)
    assert os.listdir(tmp_path) == ["saved.ckpt"]


def _die(rank: int, world: int, path: str, full: bool) -> None:
    def die(*args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(directory, "put_in_place" if full else "block_sums", die)
        _save(rank, world, path, full, seed=1)


@pytest.mark.parametrize("full", [False, True], ids=["directory", "file"])
def test_a_kill_while_saving_leaves_the_old_checkpoint(full: bool, tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    saved = worlds.run(_save, 2, str(path), full)[0]
    with pytest.raises(worlds.RankError):
        worlds.run(_die, 2, str(path), full)
    assert _is(path, saved)
    left = set(os.listdir(tmp_path)) - {"saved.ckpt"}
    assert len(left) == 1
    assert left.pop().startswith(".tmp-")
    saved = worlds.run(_save, 2, str(path), full, 2)[0]
    assert _is(path, saved)


def _save_apart(rank: int, world: int, paths: list[str]) -> None:
    _save(rank, world, paths[rank])
    engine, model, optimizer = programs.make(2, 1)
    programs.restore(engine, model, optimizer, paths[rank])


def test_ranks_use_the_path_of_rank_0(tmp_path: Path) -> None:
    worlds.run(_save_apart, 2, [str(tmp_path / "version_0"), str(tmp_path / "version_1")])
    assert os.listdir(tmp_path) == ["version_0"]


@pytest.mark.parametrize("kind", ["directory", "file", "link"])
def test_remove_takes_the_checkpoint_and_nothing_else(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    if kind == "directory":
        path.mkdir()
        for name in (".metadata", "meta.pt", "format.json", "checksums", "__0_0.distcp"):
            (path / name).write_bytes(b"")
    elif kind == "file":
        path.write_bytes(b"")
    else:
        _occupy_with_link(path)
    directory.remove(path)
    assert os.listdir(tmp_path) == (["best"] if kind == "link" else [])


def test_a_second_removal_leaves_what_the_first_one_kept(tmp_path: Path) -> None:
    worlds.run(_save, 1, str(tmp_path / "saved"))
    (tmp_path / "saved" / "notes.txt").write_text("kept")
    for _ in range(2):
        with pytest.warns(UserWarning, match="except for `notes.txt`"):
            directory.remove(tmp_path / "saved")
        assert os.listdir(tmp_path / "saved") == ["notes.txt"]


# -- What cannot be read -----------------------------------------------------------------------------------------------


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _load_damaged(rank: int, world: int, path: str) -> None:
    engine, model, optimizer = programs.make(3, 1)
    programs.restore(engine, model, optimizer, path)


@pytest.mark.parametrize("name", ["__1_0.distcp", ".metadata", "meta.pt"])
def test_a_flipped_byte_is_an_error(name: str, tmp_path: Path) -> None:
    worlds.run(_save, 2, str(tmp_path / "saved"))
    _flip(tmp_path / "saved" / name)
    with pytest.raises((ValueError, CheckpointError), match="is damaged"):
        worlds.run(_load_damaged, 2, str(tmp_path / "saved"))


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    worlds.run(_save, 1, str(tmp_path / "saved"))
    (tmp_path / "saved" / "checksums").unlink()
    (tmp_path / "saved" / "format.json").write_text('{"version": 2}')
    with pytest.raises(ValueError, match="format version 2, and this release reads versions up to 1"):
        _read(tmp_path / "saved")


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"is not a checkpoint: it has no `.metadata`"):
        _read(tmp_path)
    with pytest.raises(ValueError, match="`s3://bucket/x` has a protocol"):
        directory.load(None, "s3://bucket/x")


class Custom:
    pass


def test_code_in_a_checkpoint_is_loaded_on_request_only(tmp_path: Path) -> None:
    torch.save({"state_dict": {}, "custom": Custom()}, tmp_path / "saved.ckpt")
    with pytest.raises(Exception, match="Weights only load failed") as caught:
        _read(tmp_path / "saved.ckpt")
    assert "ZeroStrategy(weights_only=False)" in caught.value.__notes__[0]
    assert isinstance(directory.load(None, tmp_path / "saved.ckpt", weights_only=False)["custom"], Custom)


def _read_lazily(rank: int, world: int, path: str) -> None:
    engine, model, optimizer = programs.make(3, 0)
    directory.save(engine, programs.snapshot(engine, model, optimizer), path, full=False)
    checkpoint = directory.load(engine, path)
    value = checkpoint["state_dict"]["conv.weight"]
    checkpoint["state_dict"]["conv.weight"] = value * 2  # in `on_load_checkpoint`
    before = engine.full_param(model.conv.weight)
    state.load_model_state(engine, model, checkpoint["state_dict"])
    assert torch.equal(engine.full_param(model.conv.weight), before * 2)


def test_a_loaded_value_can_be_changed_before_it_is_used(tmp_path: Path) -> None:
    worlds.run(_read_lazily, 2, str(tmp_path / "saved"))
