"""A step in pipeline stages, compared with the whole step before anything is computed.

Note [The whole step on fakes]
    A stage passes over modules of earlier stages: it knows their outputs and the tensors in their attributes from a
    description, and of other effects nothing. A number in a global, an index in an object that blocks share, a tensor
    that goes through a closure: code of this stage would read an old value, with no error. Each of these has a rule
    where one is known. This is the net below the rules. Every stage runs the step twice on fakes up to the end of its
    chunk: as it does in training, and whole, where all modules run their own forwards, which needs no memory and no
    values. Both runs do the same operations between the modules and in modules of the chunk, on tensors from the same
    places and the same numbers, or the step reads something that does not travel.

Note [No false alarms]
    A step that does not run on fakes (it reads values) is not compared. Where two runs differ, both are made once more:
    a step that does not repeat itself (it counts in an iterator, or reads the clock) is not compared either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_zero.errors import PipelineError
from lightning_zero.parallel.pipeline.tracing.operations import Difference, Operation, first_difference

__all__ = ["require_as_whole"]

Record = Callable[[bool], Sequence[Operation] | None]


def require_as_whole(record: Record) -> None:
    """Refuse a step that does something else in stages than as a whole.

    Args:
        record: Runs the step, whole or in stages, and returns its operations, or None where they cannot be told.

    Raises:
        PipelineError: The runs differ.
    """
    whole = record(True)
    if whole is None:
        return
    staged = record(False)
    if staged is None:
        return
    found = first_difference(whole, staged)
    if found is not None and _repeats(record, True, whole) and _repeats(record, False, staged):
        raise _error(found)


def _repeats(record: Record, is_whole: bool, before: Sequence[Operation]) -> bool:
    again = record(is_whole)
    return again is not None and first_difference(before, again) is None


def _error(found: Difference) -> PipelineError:
    whole, staged = found.words()
    where = f" at {found.line}" if found.line else ""
    return PipelineError(
        f"The step does something else in pipeline stages than without a pipeline{where}: without one {whole}, and in"
        f" stages {staged}. The step, or a block, uses a value that a module of an earlier stage leaves in a place from"
        " which it is not sent: a number or an object in a global, a closure, a class, a context variable, an object"
        " that modules share, or an object in an attribute. Let the module return the tensor or the number, or keep it"
        " in an attribute of its own (`self.loss = ...`), which are sent; compute other values in the step and pass"
        " them to the blocks as arguments."
    )
