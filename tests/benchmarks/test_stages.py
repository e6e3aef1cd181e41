from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.stages import WORLDS, bytes_per_parameter, draw

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_bytes_are_those_of_the_documents(stage: int) -> None:
    for name in ("README.md", "docs/stages.md"):
        row = re.search(rf"^\| {stage} \| [^|]+ \| ([^|]+) \|", (ROOT / name).read_text(), flags=re.MULTILINE)
        assert row is not None
        whole, _, divided = row[1].strip().rpartition(" + ") if "/N" in row[1] else (row[1].strip(), "", "0/N")
        for world in WORLDS:
            expected = float(whole or 0) + float(divided.removesuffix("/N")) / world
            assert sum(bytes_per_parameter(stage, world).values()) == pytest.approx(expected)


def test_the_picture_has_a_bar_and_a_line_for_each_stage() -> None:
    bars, lines = draw().axes
    assert [label.get_text() for label in bars.get_yticklabels()] == [f"stage {stage}" for stage in range(4)]
    assert [line.get_label() for line in lines.get_lines()] == [f"stage {stage}" for stage in range(4)]
