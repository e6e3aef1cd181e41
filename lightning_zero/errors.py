"""The exception types of the package and the helper that suggests a name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["CollectiveError", "PipelineError", "ReleasedParameterError", "ShardedGradientError", "nearest"]


class ReleasedParameterError(RuntimeError):
    """The values of a parameter were touched while they are sharded over the ranks."""


class ShardedGradientError(RuntimeError):
    """An operation needs the whole gradient, but this rank holds one segment of it."""


class CollectiveError(RuntimeError):
    """A collective failed or did not complete in time."""


class PipelineError(RuntimeError):
    """A step cannot be run in pipeline stages as it is."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return `` Did you mean `X`?`` for the choices closest to ``name``, or an empty string."""
    matches = difflib.get_close_matches(name, list(choices), n=3, cutoff=0.5)
    return " Did you mean " + " or ".join(f"`{match}`" for match in matches) + "?" if matches else ""
