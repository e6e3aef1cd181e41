from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_zero.__main__ import main
from lightning_zero.diagnostics import command, machine, rates


def test_the_report_has_a_line_for_each_thing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--measure=false"]) == 0
    shown = capsys.readouterr().out
    for title, section in (
        ("versions", machine.versions()),
        ("devices", machine.devices()),
        ("works", machine.features()),
    ):
        assert f"{title}\n" in shown
        assert all(f"\n  {name}  " in shown for name in section)
    assert "rates" not in shown


def test_a_part_that_fails_is_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(ranks: int | None) -> dict[str, str]:
        raise RuntimeError("no route to host\nand more")

    monkeypatch.setattr(rates, "collectives", fail)
    monkeypatch.setattr(rates, "copies_and_steps", lambda: {"AdamW": "1"})
    command.report(json=True)
    shown = json.loads(capsys.readouterr().out)
    assert shown["rates"] == {"AdamW": "1", "collectives": "failed: RuntimeError: no route to host"}


def test_a_disk_is_measured_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rates, "collectives", lambda ranks: {})
    monkeypatch.setattr(rates, "copies_and_steps", dict)
    monkeypatch.setattr(rates, "disk", lambda path: {"write": str(path)})
    command.report(tmp_path, json=True)
    assert json.loads(capsys.readouterr().out)["rates"] == {"write": str(tmp_path)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks=1"], "error: `--ranks=1`: collectives are measured between at least 2 processes.\n"),
        (["--disk=nowhere"], "error: `--disk=nowhere` is not a directory. Give one on a local disk.\n"),
    ],
)
def test_wrong_arguments_are_one_clear_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", *arguments]) == 1
    assert capsys.readouterr().err == message
