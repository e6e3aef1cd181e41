"""Which cases of a matrix run every time, and which with ``make test-all`` only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["sample"]


def sample(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Return the values as parameters; those that are not ``kept`` are marked slow."""
    return [value if value in kept else pytest.param(value, marks=pytest.mark.slow) for value in values]
