"""Pictures of schedules."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from lightning_zero.__main__ import main
from lightning_zero.parallel.pipeline.schedule.picture import draw_schedule
from lightning_zero.parallel.pipeline.schedule.plan import compute_order, simulate


def test_the_command_draws_a_row_per_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.png"
    assert main(["pipeline", "--stages=3", "--microbatches=6", "--plot", str(path)]) == 0
    assert "bubble: 25.0% of the time; (p - 1) / (m + p - 1) is 25.0%" in capsys.readouterr().out
    with Image.open(path) as image:
        assert image.height == 3 * 44 + 8


def test_the_command_prints_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", "--stages=2", "--microbatches=2", "--schedule=gpipe"]) == 0
    assert "stage 0: F0.0 F0.1 B0.0 B0.1" in capsys.readouterr().out


def test_the_command_names_both_halves_of_a_backward(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", "--stages=2", "--microbatches=2", "--schedule=zb_h1", "--weight=1"]) == 0
    assert "stage 1: F1.0 B1.0 F1.1 B1.1 W1.0 W1.1" in capsys.readouterr().out


def test_blocks_are_as_wide_as_they_take_long_and_the_bubble_is_grey() -> None:
    _, spans = simulate(compute_order("gpipe", 2, 2, 2), 2)
    image = draw_schedule(spans, 2)
    row = [image.getpixel((x, 52 + 30)) for x in range(64, image.width - 8)]
    grey = row.count((225, 225, 225)) / len(row)
    assert grey == pytest.approx(1 / 3, abs=0.03)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--schedule=zb_h1", "--weight=3"], "`--weight=3` must be above 0 and below `--backward=2`"),
        (["--schedule=zb_h1", "--weight=0"], "`--weight=0` must be above 0"),
        (["--backward=-1"], "`--backward=-1` must be a time above 0."),
        (["--forward=0", "--backward=0"], "`--forward=0` must be a time above 0."),
        (["--forward=.inf"], "`--forward=inf` must be a time above 0."),
    ],
)
def test_times_that_cannot_be_end_the_command(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pipeline", *given]) == 1
    assert message in capsys.readouterr().err


def test_options_that_do_not_fit_end_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", "--stages=4", "--microbatches=2"]) == 1
    assert "leaves stages of `schedule='1f1b'` without work" in capsys.readouterr().err
