"""The exception types of the package and the helper that suggests a name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = [
    "CollectiveError",
    "PartialParameterError",
    "PipelineError",
    "ReleasedParameterError",
    "ShardedGradientError",
    "nearest",
    "noting_pipeline_errors",
]


class ReleasedParameterError(RuntimeError):
    """The values of a parameter were touched while they are sharded over the ranks."""


class ShardedGradientError(RuntimeError):
    """An operation needs the whole gradient, but this rank holds one segment of it."""


class PartialParameterError(RuntimeError):
    """An operation needs a whole parameter, but with tensor parallelism this rank has a part of it."""


class CollectiveError(RuntimeError):
    """A collective failed or did not complete in time."""


class PipelineError(RuntimeError):
    """A step cannot be run in pipeline stages as it is."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        note = _noting.get()
        if note is not None:
            note(self)


_noting: ContextVar[Callable[[PipelineError], None] | None] = ContextVar("noting", default=None)


@contextmanager
def noting_pipeline_errors(note: Callable[[PipelineError], None]) -> Iterator[None]:
    """Call ``note`` with every ``PipelineError`` that is made: a program may catch one, and go on with a fallback."""
    token = _noting.set(note)
    try:
        yield
    finally:
        _noting.reset(token)


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return `` Did you mean `X`?`` for the choices closest to ``name``, or an empty string."""
    matches = difflib.get_close_matches(name, list(choices), n=3, cutoff=0.5)
    return " Did you mean " + " or ".join(f"`{match}`" for match in matches) + "?" if matches else ""
