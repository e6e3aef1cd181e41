"""What is on the disk when: a power cut at any moment leaves the old or the new checkpoint whole."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_zero.checkpoint import directory, paths
from lightning_zero.checkpoint.consolidate import consolidate


class _Disk:
    """Notes what is synced, which names appear, and what is deleted, in order."""

    def __init__(self, patch: pytest.MonkeyPatch, exchanges: bool) -> None:
        self.synced: set[str] = set()
        self.named: list[str] = []
        self._exchanges = exchanges
        self._originals = paths._exchange, os.fsync, Path.rename, Path.replace, shutil.rmtree, Path.unlink
        patch.setattr(os, "fsync", self._fsync)
        patch.setattr(paths, "_exchange", self._exchange)
        patch.setattr(Path, "rename", lambda path, target: self._rename(2, path, target))
        patch.setattr(Path, "replace", lambda path, target: self._rename(3, path, target))
        patch.setattr(shutil, "rmtree", lambda path, **options: self._delete(4, path, **options))
        patch.setattr(Path, "unlink", lambda path, **options: self._delete(5, path, **options))

    def _fsync(self, descriptor: int) -> None:
        self.synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        self._originals[1](descriptor)

    def _exchange(self, first: Path, second: Path) -> bool:
        if not self._exchanges:
            return False
        self._names(first, second)
        return self._originals[0](first, second)

    def _rename(self, which: int, path: Path, target: Any) -> Any:
        if ".tmp-" in str(path) and ".tmp-" not in str(target):
            self._names(path, Path(target))
        self.synced.discard(str(path.parent))
        return self._originals[which](path, target)

    def _names(self, path: Path, target: Path) -> None:
        files = [path, *path.iterdir()] if path.is_dir() else [path]
        assert {str(file) for file in files} <= self.synced
        self.named.append(target.name)
        self.synced.discard(str(target.parent))

    def _delete(self, which: int, path: Any, **options: Any) -> None:
        if Path(path).exists() and self.named:
            assert str(Path(path).parent) in self.synced, "deleted before the new name was on the disk"
        self._originals[which](path, **options)


@pytest.mark.parametrize("exchanges", [True, False], ids=["exchange", "two renames"])
@pytest.mark.parametrize("kind", ["directory", "file", "export"])
def test_files_and_folders_are_on_the_disk_before_the_old_checkpoint_goes(
    kind: str, exchanges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = {"state_dict": {"w": torch.ones(3)}, "epoch": 1}
    source, target = tmp_path / "source", tmp_path / "new" / "folder" / "saved"
    directory.save(None, content, source, full=False)

    def save() -> None:
        if kind == "directory":
            directory.save(None, content, target, full=False)
        else:
            consolidate(str(source), str(target), format="ckpt" if kind == "file" else "safetensors", overwrite=True)

    disk = _Disk(monkeypatch, exchanges)
    save()
    save()
    assert disk.named == ["saved", "saved"]
    assert {str(tmp_path), str(tmp_path / "new")} <= disk.synced  # each got a folder
    assert os.listdir(target.parent) == ["saved"]


def _fail_second_rename(patch: pytest.MonkeyPatch, error: type[BaseException], target: Path) -> None:
    """Let a checkpoint be put in place by two renames, of which the second raises."""
    rename = Path.rename

    def fail(path: Path, new: Any) -> Path:
        if Path(new) == target and not (path / "old").exists():
            raise error("no second rename")
        return rename(path, new)

    patch.setattr(paths, "_exchange", lambda first, second: False)
    patch.setattr(Path, "rename", fail)


def test_a_checkpoint_stays_at_its_path_where_the_new_one_cannot_take_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, temporary = tmp_path / "saved", tmp_path / ".tmp-1234abcd"
    for folder in (target / "old", temporary):
        folder.mkdir(parents=True)
    _fail_second_rename(monkeypatch, OSError, target)
    with pytest.raises(OSError, match="no second rename"):
        paths.put_in_place(temporary, target)
    assert sorted(os.listdir(tmp_path)) == [".tmp-1234abcd", "saved"]
    assert (target / "old").is_dir()


def test_a_path_between_two_renames_is_missing_by_the_name_of_what_was_there(tmp_path: Path) -> None:
    directory.save(None, {"state_dict": {"w": torch.ones(3)}}, tmp_path / "saved", full=False)
    (tmp_path / "saved").rename(paths.beside(tmp_path / "saved", "1234abcd"))
    with pytest.raises(FileNotFoundError, match=r"nothing at `.*saved`. A save that was killed left `.*tmp-1234abcd`"):
        directory.load(None, tmp_path / "saved")


def test_what_a_killed_save_leaves_is_not_taken_for_a_checkpoint_of_slurm(tmp_path: Path) -> None:
    connector = Trainer(default_root_dir=tmp_path, logger=False, accelerator="cpu")._checkpoint_connector
    paths.beside(tmp_path / "hpc_ckpt_1.ckpt", "1234abcd").mkdir()
    assert connector._hpc_resume_path is None
    (tmp_path / "hpc_ckpt_3.ckpt").mkdir()
    assert connector._hpc_resume_path == str(tmp_path / "hpc_ckpt_3.ckpt")
