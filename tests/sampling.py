"""Which cases of a matrix run every time, and which with ``make test-all`` only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import pytest

__all__ = ["highest_stages", "sample"]


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
