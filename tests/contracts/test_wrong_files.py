"""A file that is no checkpoint is one error that names it and says what it is, wherever it is given."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from safetensors.torch import save_file

import lightning_zero
from lightning_zero.checkpoint.consolidate import consolidate
from lightning_zero.checkpoint.convert import convert
from lightning_zero.lightning.checkpoint_io import ZeroCheckpointIO
from lightning_zero.lightning.strategy import ZeroStrategy
from tests import worlds
from tests.lightning_programs import Net, loader, trainer


def _folder(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("nothing else")


def _cut(path: Path) -> None:
    torch.save({"state_dict": {"a": torch.ones(100)}}, path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def _zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "b")


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "nothing at|does not exist"),
    "empty": (lambda path: path.write_bytes(b""), "is empty"),
    "text": (lambda path: path.write_text("ein Text\n" * 9), "another kind of file, such as text"),
    "cut": (_cut, "cut off"),
    "folder": (_folder, "has no `.metadata`|no weights that are known"),
    "zip": (_zip, "another kind of zip archive"),
    "list": (lambda path: torch.save([1, 2], path), "holds a `list`"),
    "tensor": (lambda path: torch.save(torch.ones(2), path), "holds a `Tensor`"),
    "dictionary": (lambda path: torch.save({"foo": 1}, path), "no `state_dict`|no `pytorch-l|no state dictionary"),
    "safetensors": (lambda path: save_file({"a": torch.ones(2)}, path), "safetensors file|does not fit `Net`"),
    "old": (lambda path: path.write_bytes(b"\x80\x02garbage"), "is damaged, or no file of `torch.save`|Weights only"),
}


def _alone() -> Trainer:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return Trainer(strategy=ZeroStrategy(stage=1), accelerator="cpu", devices=1, max_epochs=1, **quiet)


READERS: dict[str, Callable[[Path], object]] = {
    "fit": lambda path: _alone().fit(Net(), loader(0, 1), ckpt_path=str(path)),
    "load_from_checkpoint": lambda path: lightning_zero.load_from_checkpoint(Net, path),
    "load_pretrained": lambda path: lightning_zero.load_pretrained(Net(), path),
    "consolidate": lambda path: consolidate(str(path), str(path.parent / "out")),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_is_no_checkpoint_is_named_with_what_it_is(reader: str, wrong: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.ckpt"
    make, pattern = WRONG[wrong]
    make(path)
    with pytest.raises(Exception, match=pattern) as caught:
        READERS[reader](path)
    said = [str(caught.value), *getattr(caught.value, "__notes__", [])]
    assert any(str(path) in line for line in said), said


@pytest.mark.parametrize("wrong", ["missing", "text", "folder"])
def test_convert_names_what_is_no_directory_of_another_strategy(wrong: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.ckpt"
    WRONG[wrong][0](path)
    with pytest.raises(FileNotFoundError, match=f"`{path}`"):
        convert(str(path), str(tmp_path / "out"))


def test_the_plugin_for_other_strategies_names_the_file(tmp_path: Path) -> None:
    WRONG["text"][0](tmp_path / "wrong.ckpt")
    with pytest.raises(ValueError, match="wrong.ckpt` is no checkpoint: it is another kind of file"):
        ZeroCheckpointIO().load_checkpoint(tmp_path / "wrong.ckpt")


def test_weights_in_the_safetensors_format_are_read_under_any_name(tmp_path: Path) -> None:
    net, other = Net(), Net()
    save_file(dict(net.state_dict()), tmp_path / "weights.bin")
    lightning_zero.load_pretrained(other, tmp_path / "weights.bin")
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in net.state_dict().items())


def _resume(rank: int, world: int, path: str) -> str:
    with pytest.raises(Exception, match="wrong.ckpt") as caught:
        trainer(rank, world, 3).fit(Net(), loader(rank, world), ckpt_path=path)
    return str(caught.value)


def test_every_rank_names_the_file(tmp_path: Path) -> None:
    WRONG["text"][0](tmp_path / "wrong.ckpt")
    for said in worlds.run(_resume, 2, str(tmp_path / "wrong.ckpt")):
        assert "another kind of file, such as text" in said
