from __future__ import annotations

from pathlib import Path

import pytest

from lightning_zero.__main__ import COMMANDS, main


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
