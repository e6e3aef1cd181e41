from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from lightning_zero.__main__ import main
from lightning_zero.checkpoint import directory
from lightning_zero.checkpoint.consolidate import consolidate
from lightning_zero.checkpoint.export import export_safetensors
from lightning_zero.checkpoint.ranks import CheckpointError
from lightning_zero.engine.engine import ZeroEngine
from tests import worlds
from tests.checkpoint import programs
from tests.checkpoint.peak import peak_bytes

MiB = 1 << 20


def _save(rank: int, world: int, path: str) -> dict[str, torch.Tensor]:
    engine, model, optimizer = programs.make(3, 0)
    programs.step(engine, model, optimizer, 0)
    directory.save(engine, programs.snapshot(engine, model, optimizer), path, full=False)
    values = {alias: engine.full_param(rec.parameter) for rec in engine.records() for alias in rec.aliases}
    return {**values, **dict(model.named_buffers())}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    path = tmp_path_factory.mktemp("consolidate") / "saved.ckpt"
    return path, worlds.run(_save, 2, str(path))[0]


Saved = tuple[Path, dict[str, torch.Tensor]]


def _load_folder(folder: Path) -> dict[str, torch.Tensor]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {file: safetensors.torch.load_file(folder / file) for file in set(index["weight_map"].values())}
    return {name: files[file][name] for name, file in index["weight_map"].items()}


def _equal(loaded: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return loaded.keys() == expected.keys() and all(torch.equal(loaded[name], expected[name]) for name in expected)


# -- What is written ---------------------------------------------------------------------------------------------------


def test_the_command_makes_a_folder_in_the_manner_of_hugging_face(
    checkpoint: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, values = checkpoint
    assert main(["consolidate", str(path), str(tmp_path / "out"), "--max_shard_size", "400"]) == 0
    assert _equal(_load_folder(tmp_path / "out"), values)
    assert "head.weight" in values
    assert capsys.readouterr().out == "`_extra_state` is not a tensor, and not written.\n"


def test_a_name_that_ends_in_safetensors_is_one_file(checkpoint: Saved, tmp_path: Path) -> None:
    path, values = checkpoint
    consolidate(str(path), str(tmp_path / "runs" / "all.safetensors"), max_shard_size="10")
    assert _equal(safetensors.torch.load_file(tmp_path / "runs" / "all.safetensors"), values)
    assert os.listdir(tmp_path / "runs") == ["all.safetensors"]


def test_names_are_chosen_by_pattern_and_prefix(checkpoint: Saved, tmp_path: Path) -> None:
    path, values = checkpoint
    consolidate(str(path), str(tmp_path / "out"), include=["blocks.*.linear.*", "conv.*"], prefix="blocks.")
    names = [f"{number}.linear.{kind}" for number in (0, 1) for kind in ("weight", "bias")]
    loaded = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert _equal(loaded, {name: values[f"blocks.{name}"] for name in names})


def test_floating_point_weights_are_converted_and_others_are_not(checkpoint: Saved, tmp_path: Path) -> None:
    path, values = checkpoint
    consolidate(str(path), str(tmp_path / "out"), dtype="bf16")
    loaded = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert _equal(loaded, {name: v.bfloat16() if v.is_floating_point() else v for name, v in values.items()})
    assert loaded["batch_norm.num_batches_tracked"].dtype == torch.int64


def test_a_ckpt_is_what_a_single_device_resumes_from(checkpoint: Saved, tmp_path: Path) -> None:
    path, values = checkpoint
    consolidate(str(path), str(tmp_path / "out.ckpt"), format="ckpt")
    whole = torch.load(tmp_path / "out.ckpt", weights_only=True, mmap=True)
    assert whole["epoch"] == 3
    assert whole["callbacks"] == {"best": torch.tensor(0.25), "path": "somewhere"}
    model = programs.Model()
    model.load_state_dict(whole["state_dict"])
    assert all(torch.equal(value, values[name]) for name, value in model.named_parameters())
    assert whole["state_dict"]["head.weight"].data_ptr() == whole["state_dict"]["embedding.weight"].data_ptr()
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in params if p.ndim >= 2]}, {"params": [p for p in params if p.ndim < 2]}]
    )
    optimizer.load_state_dict(whole["optimizer_states"][0])
    assert optimizer.state[model.scale]["step"] == 1
    assert optimizer.state[model.conv.weight]["exp_avg"].shape == model.conv.weight.shape


def test_weights_of_a_ckpt_are_converted_and_states_of_optimizers_are_not(checkpoint: Saved, tmp_path: Path) -> None:
    path, values = checkpoint
    consolidate(str(path), str(tmp_path / "out.ckpt"), format="ckpt", dtype="fp16")
    whole = torch.load(tmp_path / "out.ckpt", weights_only=True)
    assert torch.equal(whole["state_dict"]["conv.weight"], values["conv.weight"].half())
    assert whole["state_dict"]["embedding.weight"].data_ptr() == whole["state_dict"]["head.weight"].data_ptr()
    assert whole["optimizer_states"][0]["state"][0]["exp_avg"].dtype == torch.float32


def test_a_file_of_a_single_device_becomes_safetensors(tmp_path: Path) -> None:
    values = {"a": torch.randn(3, 5), "b": torch.randn(4).bfloat16()}
    torch.save({"state_dict": {**values, "c": values["a"]}}, tmp_path / "in.ckpt")
    consolidate(str(tmp_path / "in.ckpt"), str(tmp_path / "out"))
    assert _equal(safetensors.torch.load_file(tmp_path / "out" / "model.safetensors"), {**values, "c": values["a"]})


# -- What goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"include": ["blok*"]}, r"`include` has `blok\*`, which fits no weight"),
        ({"prefix": "model."}, "`include` and `prefix='model.'` leave no weight. Names start with `batch_norm.`"),
        ({"max_shard_size": "big"}, "`max_shard_size='big'` is not a size"),
    ],
)
def test_what_fits_nothing_is_refused(options: dict[str, Any], message: str, checkpoint: Saved, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        consolidate(str(checkpoint[0]), str(tmp_path / "out"), **options)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("format", ["safetensors", "ckpt"])
def test_what_is_there_is_kept_unless_it_is_to_be_replaced(format: Any, checkpoint: Saved, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("mine")
    with pytest.raises(FileExistsError, match="out` exists. Remove it, .*, or use `--overwrite=true`.$"):
        consolidate(str(checkpoint[0]), str(out), format=format)
    assert out.read_text() == "mine"
    consolidate(str(checkpoint[0]), str(out), format=format, overwrite=True)
    assert out.is_dir() == (format == "safetensors")
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("format", ["safetensors", "ckpt"])
def test_a_full_disk_leaves_nothing_behind(
    format: Any, checkpoint: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite" if format == "safetensors" else "fsync", full)
    assert main(["consolidate", str(checkpoint[0]), str(tmp_path / "out"), f"--format={format}"]) == 1
    assert "error: [Errno 28] No space left on device" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_a_target_that_cannot_be_made_is_an_error(checkpoint: Saved, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert main(["consolidate", str(checkpoint[0]), str(tmp_path / "file" / "out")]) == 1


@pytest.mark.parametrize("format", ["safetensors", "ckpt"])
def test_a_damaged_shard_is_named(format: Any, checkpoint: Saved, tmp_path: Path) -> None:
    content = {path.name: path.read_bytes() for path in checkpoint[0].iterdir()}
    (tmp_path / "bad").mkdir()
    flipped = bytearray(content["__1_0.distcp"])
    flipped[len(flipped) // 2] ^= 4
    for name, data in {**content, "__1_0.distcp": bytes(flipped)}.items():
        (tmp_path / "bad" / name).write_bytes(data)
    with pytest.raises(ValueError, match="__1_0.distcp` is damaged"):
        consolidate(str(tmp_path / "bad"), str(tmp_path / "out"), format=format)
    assert os.listdir(tmp_path) == ["bad"]


def test_a_file_without_weights_is_refused(tmp_path: Path) -> None:
    torch.save({"epoch": 3}, tmp_path / "in.ckpt")
    with pytest.raises(ValueError, match="in.ckpt` is not a checkpoint: it has no `state_dict`"):
        consolidate(str(tmp_path / "in.ckpt"), str(tmp_path / "out"))


# -- Memory ------------------------------------------------------------------------------------------------------------

LARGEST = 4096 * 4096 * 4


def _save_large(rank: int, world: int, path: str) -> None:
    engine = ZeroEngine(3)
    model = nn.ModuleList([nn.Linear(4096, 4096, bias=False) for _ in range(4)])
    engine.shard(model)
    directory.save(engine, programs.snapshot(engine, model), path, full=False)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four tensors of 64 MiB, which is what may be needed in all, each the chunk of one rank."""
    path = tmp_path_factory.mktemp("large") / "saved.ckpt"
    worlds.run(_save_large, 1, str(path))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("format", ["safetensors", "ckpt"])
def test_consolidation_needs_memory_for_the_largest_tensor_at_most(format: str, large: Path, tmp_path: Path) -> None:
    code = "from tests.checkpoint.test_consolidate import print_peak; print_peak()"
    arguments = [str(large), str(tmp_path / "out"), f"--format={format}"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) <= LARGEST + 64 * MiB
    assert int(done.stdout.split()[-1]) <= 64 * MiB  # what it is now: pieces only


def print_peak() -> None:
    print(peak_bytes(lambda: main(["consolidate", *sys.argv[1:]])))


# -- What is not deleted -----------------------------------------------------------------------------------------------


def _tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("out", [".", "saved.ckpt", "saved.ckpt/out"], ids=["around", "itself", "inside"])
@pytest.mark.parametrize("format", ["safetensors", "ckpt"])
def test_overwriting_never_deletes_the_checkpoint_that_is_read(
    checkpoint: Saved, out: str, format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(checkpoint[0], tmp_path / "saved.ckpt")
    (tmp_path / "notes.txt").write_text("mine")
    before = _tree(tmp_path)
    target = tmp_path / out
    args = ["consolidate", str(tmp_path / "saved.ckpt"), str(target), "--overwrite=true", f"--format={format}"]
    assert main(args) == 1
    assert f"`{target}` is, has or lies in the checkpoint" in capsys.readouterr().err
    assert _tree(tmp_path) == before


@pytest.mark.parametrize("name", ["config.json", "more.safetensors/mine"])
def test_overwriting_deletes_no_folder_with_something_else(name: str, checkpoint: Saved, tmp_path: Path) -> None:
    out = tmp_path / "out"
    consolidate(str(checkpoint[0]), str(out))
    consolidate(str(checkpoint[0]), str(out), overwrite=True)
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_text("{}")
    refused = f"is a folder with `{name.split('/')[0]}`, which would be deleted"
    with pytest.raises(FileExistsError, match=refused):
        consolidate(str(checkpoint[0]), str(out), overwrite=True)
    with pytest.raises(FileExistsError, match=refused):
        export_safetensors(nn.Linear(2, 2), out, overwrite=True)
    assert (out / name).is_file()


@pytest.mark.parametrize("full", [False, True], ids=["directory", "file"])
def test_saving_deletes_no_folder_that_is_no_checkpoint(full: bool, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "notes.txt").write_text("mine")
    worlds.run(_save_over, 2, str(tmp_path / "runs"), full)
    assert _tree(tmp_path) == ["runs", "runs/notes.txt"]


def _save_over(rank: int, world: int, path: str, full: bool) -> None:
    engine, model, optimizer = programs.make(1, 0)
    with pytest.raises((FileExistsError, CheckpointError), match="is a folder with `notes.txt`, which would be"):
        directory.save(engine, programs.snapshot(engine, model, optimizer), path, full=full)
