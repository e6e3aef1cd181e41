from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_zero.__main__ import COMMANDS, main
from lightning_zero.checkpoint import directory
from lightning_zero.checkpoint.safetensors import SafetensorsFile


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in COMMANDS)


def test_an_unknown_option_ends_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["consolidate", "here", "there", "--colour=red"])
    assert end.value.code == 2
    assert "colour" in capsys.readouterr().err


def test_an_error_ends_with_status_1_and_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["consolidate", str(tmp_path), str(tmp_path / "out"), "--format=ckpt"]) == 1
    assert capsys.readouterr().err == (
        f"error: `{tmp_path}` is not a checkpoint: it has no `.metadata`. Give a checkpoint directory, or a file that"
        " `torch.save` or a `Trainer` has written.\n"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"state_dict": {1: torch.ones(2)}}, "it has no `state_dict` of values by name"),
        ({"state_dict": {}, "optimizer_states": [{}]}, "its `optimizer_states` are not those of optimizers"),
        ({"state_dict": {}, "optimizer_states": 3}, "its `optimizer_states` are not those of optimizers"),
        ({"state_dict": {}, "o": Path("x")}, "If you trust `{path}`, use `--weights_only=false`: code in it will run."),
    ],
    ids=["numbers", "empty", "number", "code"],
)
def test_what_is_no_checkpoint_is_an_error_that_names_it(
    content: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "file")
    torch.save(content, path)
    assert main(["consolidate", path, str(tmp_path / "out"), "--format=ckpt"]) == 1
    shown = capsys.readouterr().err
    assert message.format(path=path) in shown
    assert "ZeroStrategy" not in shown


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("meta.pt", b""),
        ("meta.pt", b"hello"),
        ("meta.pt", [1]),
        ("format.json", b""),
        ("format.json", b"[]"),
        ("format.json", b"{}"),
        ("format.json", b'{"version": null}'),
        ("format.json", b'{"version": "x"}'),
        ("format.json", b"\xff"),
    ],
)
def test_a_damaged_file_of_a_directory_without_sums_is_named(
    name: str, content: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "saved"
    directory.save(None, {"state_dict": {"w": torch.ones(2)}}, path, full=False)
    (path / "checksums").unlink()
    if name == "meta.pt":
        (path / "format.json").unlink()
    (path / name).write_bytes(content) if isinstance(content, bytes) else torch.save(content, path / name)
    assert main(["consolidate", str(path), str(tmp_path / "out")]) == 1
    assert str(path / name) in capsys.readouterr().err


def test_a_cut_index_is_damaged_and_not_to_be_trusted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "saved"
    directory.save(None, {"state_dict": {"w": torch.ones(2)}}, path, full=False)
    (path / "checksums").unlink()
    (path / "format.json").unlink()
    (path / ".metadata").write_bytes((path / ".metadata").read_bytes()[:100])
    for command in ("consolidate", "convert"):
        assert main([command, str(path), str(tmp_path / "out")]) == 1
        shown = capsys.readouterr().err
        assert f"`{path / '.metadata'}` is damaged" in shown
        assert "weights_only" not in shown


def test_convert_does_not_advise_options_of_the_strategy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "saved"
    directory.save(None, {"state_dict": {"w": torch.ones(2)}, "o": Path("x")}, path, full=False)
    (path / "checksums").unlink()
    (path / "format.json").unlink()
    assert main(["convert", str(path), str(tmp_path / "out")]) == 1
    shown = capsys.readouterr().err
    assert f"`convert` runs no code of `{path}`" in shown
    assert "ZeroStrategy" not in shown


def test_groups_without_parameters_are_an_error_that_names_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "file")
    torch.save({"state_dict": {}, "optimizer_states": [{"state": {}, "param_groups": [{"lr": 1}]}]}, path)
    assert main(["consolidate", path, str(tmp_path / "out"), "--format=ckpt"]) == 1
    assert f"`{path}` is not a checkpoint: its `optimizer_states`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("include", "names"),
    [("*weight", ["a.weight", "weight"]), ("*", ["a.weight", "b", "weight"]), ("[a*,b]", ["a.weight", "b"])],
)
def test_patterns_are_given_as_they_are_written(include: str, names: list[str], tmp_path: Path) -> None:
    weights = {name: torch.ones(2) for name in ("a.weight", "b", "weight")}
    torch.save({"state_dict": weights}, tmp_path / "file")
    out = str(tmp_path / "out.safetensors")
    assert main(["consolidate", str(tmp_path / "file"), out, "--include", include]) == 0
    assert sorted(SafetensorsFile(Path(out)).entries) == names
