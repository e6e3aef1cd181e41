from __future__ import annotations

from benchmarks.schedules import SCHEDULES, draw, rates


def test_the_picture_has_a_line_for_each_schedule() -> None:
    plots = draw().axes
    drawn = {
        line.get_label(): [float(value) for value in line.get_ydata()] for axes in plots for line in axes.get_lines()
    }
    assert drawn == {label: rates(make) for label, make in SCHEDULES.items()}
