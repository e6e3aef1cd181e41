"""Which cases the quick set runs."""

from __future__ import annotations

from pathlib import Path

from tests.sampling import LONGEST, SECONDS, measured, within_time

REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_long[1-x]" time="{long}"/>
<testcase classname="tests.test_a" name="test_long[2-x]" time="{long}"/>
<testcase classname="tests.test_a" name="test_short[1]" time="0.1"/>
<testcase classname="tests.test_a" name="test_single" time="{long}"/>
</testsuite></testsuites>"""


def test_cases_of_a_long_function_run_as_far_as_the_time_goes() -> None:
    names = [f"tests/test_a.py::test_long[{number}]" for number in range(20)]
    others = ["tests/test_a.py::test_single", *(f"tests/test_a.py::test_short[{number}]" for number in range(50))]
    kept = within_time([*names, *others], {"tests/test_a.py::test_long": SECONDS / 5})
    assert len(kept & set(names)) == 5
    assert kept >= set(others)


def test_at_least_one_case_runs_and_always_the_same() -> None:
    names = [f"tests/test_a.py::test_long[{number}]" for number in range(20)]
    costs = {"tests/test_a.py::test_long": LONGEST}
    kept = within_time(names, costs)
    assert len(kept) == 1
    assert kept == within_time(names[::-1], costs)


def test_no_case_runs_that_takes_very_long() -> None:
    assert within_time(["tests/test_a.py::test_single"], {"tests/test_a.py::test_single": LONGEST + 1}) == set()


def test_costs_are_those_of_long_functions_with_several_cases(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT.format(long=SECONDS))
    assert measured(report) == {"tests/test_a.py::test_long": SECONDS}
    report.write_text(REPORT.format(long=LONGEST + 1))
    assert measured(report).keys() == {"tests/test_a.py::test_long", "tests/test_a.py::test_single"}
