"""Which cases of a matrix run every time, and which with ``make test-all`` only.

Note [Cases within a time]
    ``make test`` is to take minutes, so of a test function whose cases take long together it runs as many as fit into
    ``SECONDS``, and at least one; the others are marked slow. Cases that take more than ``LONGEST`` seconds each are
    all slow, but for those marked ``always``, which stand for a whole part. ``costs.json`` has the seconds per case, as
    ``python -m tests.sampling REPORT`` reads them from a report of ``pytest --junitxml=REPORT``; functions of which the
    report says nothing keep theirs. Cases are chosen by the checksum of their names: the same ones every time, and from
    all parts of a matrix.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from xml.etree import ElementTree

import pytest

__all__ = ["highest_stages", "measured", "sample", "within_time"]

SECONDS = 2.0
LONGEST = 4.0
COSTS = Path(__file__).with_name("costs.json")


def within_time(names: Sequence[str], costs: Mapping[str, float]) -> set[str]:
    """Return the cases that run every time.

    Args:
        names: Of cases: ``file::function[parameters]``.
        costs: Seconds per case of functions that take more than ``SECONDS`` with all of theirs, and of single cases
            that take more than ``LONGEST``.
    """
    functions: dict[str, list[str]] = defaultdict(list)
    for name in names:
        functions[name.partition("[")[0]].append(name)
    kept: set[str] = set()
    for function, cases in functions.items():
        cost = costs.get(function)
        number = len(cases) if cost is None else 0 if cost > LONGEST else max(1, int(SECONDS / cost))
        kept.update(sorted(cases, key=lambda name: zlib.crc32(name.encode()))[:number])
    return kept


def measured(report: str | Path) -> dict[str, float]:
    """Return the seconds per case of functions that take long, from a report in JUnit's format; see ``within_time``."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        file = case.attrib["classname"].replace(".", "/") + ".py"
        seconds[f"{file}::{case.attrib['name'].partition('[')[0]}"].append(float(case.attrib["time"]))
    return {
        function: round(sum(times) / len(times), 2)
        for function, times in sorted(seconds.items())
        if sum(times) > (SECONDS if len(times) > 1 else LONGEST)
    }


def sample(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Return the values as parameters; those that are not ``kept`` are marked slow."""
    return [value if value in kept else pytest.param(value, marks=pytest.mark.slow) for value in values]


class _HasStages(Protocol):
    @property
    def stages(self) -> Sequence[int]: ...


def highest_stages(cases: Mapping[str, _HasStages]) -> list[Any]:
    """Return the names of cases with the highest stage of each as parameters, and marked slow, with the others."""
    parameters = []
    for name, case in cases.items():
        *others, highest = case.stages
        parameters.append(pytest.param(name, (highest,), id=name))
        parameters.append(pytest.param(name, tuple(others), id=f"{name}-others", marks=pytest.mark.slow))
    return parameters


if __name__ == "__main__":
    found = {**json.loads(COSTS.read_text()), **measured(sys.argv[1])}
    COSTS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
