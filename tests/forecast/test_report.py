from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from lightning_zero.forecast.report import draw, json_of, table
from tests.forecast.test_settings import forecast


def test_the_table_has_a_row_per_setting() -> None:
    head, names, *rows = table(forecast(), 55).splitlines()
    assert "8 rank(s), precision bf16-mixed" in head
    assert names.split()[-2:] == ["across", "fits"]
    assert len(rows) == 5
    assert [row.startswith(">") for row in rows] == [False, True, False, False, False]
    assert [row.split()[-1] for row in rows] == ["no", "no", "yes", "yes", "yes"]
    assert all("backward blocks.1" in row for row in rows)


def test_bytes_on_disks_have_a_column_if_there_are_any() -> None:
    rows = forecast()
    assert " disk " not in table(rows)
    one = replace(rows.settings[0], disk={"optimizer": 3 * 2**20})
    found = [line.split() for line in table(replace(rows, settings=[one, *rows.settings[1:]])).splitlines()[1:]]
    place = found[0].index("disk") - len(found[0])
    assert [row[place] for row in found[1:]] == ["3.00", "0.00", "0.00", "0.00", "0.00"]


def test_json_is_in_bytes() -> None:
    content = json.loads(json_of(forecast(), 55))
    assert content["world_size"] == 8
    assert content["settings"][0]["setting"] == {"stage": 0}
    assert content["settings"][0]["peak_bytes"] == 100
    assert content["fastest"] == 2
    assert json.loads(json_of(forecast(), 1))["fastest"] is None


def test_the_picture_is_written(tmp_path: Path) -> None:
    draw(forecast(), tmp_path / "bars.png", 55)
    assert Image.open(tmp_path / "bars.png").width > 500


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the folder .* does not exist"):
        draw(forecast(), tmp_path / "none" / "bars.png")


def test_matplotlib_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(RuntimeError, match="`--plot` needs matplotlib: `pip install matplotlib`"):
        draw(forecast(), tmp_path / "bars.png")
