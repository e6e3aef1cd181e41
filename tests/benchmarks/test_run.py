from __future__ import annotations

import sys

import pytest

from benchmarks import run


def test_a_name_of_no_row_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It ended with status 0, and nothing had been measured."""
    monkeypatch.setattr(sys, "argv", ["run", "--only", "typo"])
    with pytest.raises(SystemExit) as ended:
        run.main()
    assert ended.value.code == 2
    assert "`--only typo` is in the name of no row. The rows are: " in capsys.readouterr().err
