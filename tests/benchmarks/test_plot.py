from __future__ import annotations

from pathlib import Path

from benchmarks.plot import MISSED, draw, latest
from benchmarks.table import RESULTS

HEADER = "what,variant,shape,ratio,lo,hi,bound,verdict\n"


def test_every_promise_is_drawn_once_with_its_last_row(tmp_path: Path) -> None:
    path = tmp_path / "step.csv"
    path.write_text(
        HEADER
        + "step,engine3/fsdp2,10m-64tok,0.7,0.6,0.8,0.6,ok\n"
        + "step,fsdp23/fsdp2,10m-64tok,,,,,\n"
        + "step,engine1/ddp,10m-64tok,1.0,0.9,1.1,1.1,ok\n"
        + "step,engine3/fsdp2,10m-64tok,0.7,0.65,0.8,0.6,FAIL\n"
    )
    rows = latest(path)
    assert [(row["variant"], row["verdict"]) for row in rows] == [("engine1/ddp", "ok"), ("engine3/fsdp2", "FAIL")]
    (axes,) = draw(rows).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "stage 1 / ddp, 10m, 64 tokens",
        "stage 3 / fsdp2, 10m, 64 tokens",
    ]
    assert [one.lines[0].get_color() == MISSED for one in axes.containers] == [False, True]


def test_the_committed_rows_can_be_drawn(tmp_path: Path) -> None:
    draw(latest(RESULTS / "step.csv")).savefig(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 0
