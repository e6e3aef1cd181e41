"""Runs of a step for one chunk: messages, state of a run, its description and its ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_zero.errors import PipelineError
from lightning_zero.parallel.pipeline.stages.sources import Origins, Shape, Source
from lightning_zero.parallel.pipeline.tracing.gradient_hooks import GradientHooks
from lightning_zero.parallel.pipeline.tracing.operations import Operations
from lightning_zero.parallel.pipeline.tracing.outcomes import Outcome
from lightning_zero.parallel.pipeline.tracing.own_gradients import OwnGradients
from lightning_zero.parallel.pipeline.tracing.recomputation import Again, Checkpoints, NotedCall
from lightning_zero.trees import tree_flatten

__all__ = ["BrokenOff", "CalledBehindEnd", "Logging", "Message", "Needs", "Trace"]


@dataclass(frozen=True)
class Message:
    """A tensor that goes from one chunk to the next.

    Attributes:
        leaf: Position among the leaves of the arguments of the next chunk's first block, or a source.
        shape: Of the tensor.
        dtype: Of the tensor.
        requires_grad: Whether its gradient comes back.
    """

    leaf: int | Source
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass
class Trace:
    """A run of the step for one chunk."""

    chunk: int
    start: int  # first block of the chunk
    stop: int  # first block of the next one
    computes: bool = True  # False: a survey
    expected: Sequence[Message] = ()
    receive: Callable[[], Sequence[Tensor]] = tuple
    send: Callable[[Mapping[int | Source, Any]], None] | None = None
    wanted: Collection[Source] = ()  # of this chunk, by later ones
    origins: Origins | None = None  # of a run on fakes
    available: Sequence[Source] = ()  # of a run on fakes that finds arguments, sources that the chunk has
    on_start: Callable[[], None] = lambda: None  # called at the chunk's first block
    received: dict[int | Source, Tensor] | None = None
    copies: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # of sources, and these, by id of the copy
    computed: dict[Source, Tensor] = field(default_factory=dict)  # that are wanted
    times: Counter[str] = field(default_factory=Counter)  # calls of modules that compute, by name
    outcomes: dict[tuple[str, int], Outcome] = field(default_factory=dict)  # described, by name and number of the call
    calls: Counter[str] = field(default_factory=Counter)  # that have been described or compared, by name
    seen: set[str] = field(default_factory=set)  # modules outside of the blocks that were called
    reached: int = -1  # block that was run last
    passed: int = -1  # block that was passed over last
    is_inside: bool = False  # a module with a place in the split is running
    hidden: str = ""  # advice on fakes that an argument has hidden
    has_failed_inside: bool = False  # a module that computes has raised an error
    is_computing: bool = False  # one of this chunk
    end: BrokenOff | None = None  # the next chunk's first block was reached
    refusal: PipelineError | None = None  # of a call, or of code between them, whoever has caught it
    raised: Counter[int] = field(default_factory=Counter)  # calls that a caught error has ended, by id of the module
    has_given_up: bool = False  # a loop that catches all errors was given zeros
    gradients: GradientHooks = field(default_factory=GradientHooks)
    own: OwnGradients = field(default_factory=partial(OwnGradients, -1, {}))
    swaps: dict[int, tuple[Any, int, Tensor]] = field(default_factory=dict)  # fake leaf and version, by id -> received
    again: Again | None = None  # of a recomputation
    checkpoints: Checkpoints | None = None  # of the program, around modules
    operations: Operations | None = None  # of a run on fakes in which modules of this chunk run their forwards

    @property
    def notes_calls(self) -> bool:
        """Whether a function is running that the backward may run again."""
        return self.checkpoints is not None and self.checkpoints.is_open

    def note(self, call: NotedCall) -> None:
        """Note a call of a module for recomputations."""
        if self.checkpoints is not None:
            self.checkpoints.note(call)


@dataclass(frozen=True)
class Needs:
    """A description of a chunk.

    Attributes:
        sources: That it needs besides its first block's arguments.
        outcomes: Of calls of its modules, by name of the module and number of the call.
        has_guessed: Values that the step reads were guessed.
        is_whole: The step has come to its end, or to the next chunk.
    """

    sources: dict[Source, Shape]
    outcomes: dict[tuple[str, int], Outcome]
    has_guessed: bool
    is_whole: bool


class Logging(Protocol):
    """The calls of ``self.log`` in a step."""

    def num_calls(self) -> int:
        """Return how many were made."""
        ...

    def inside(self, place: str) -> AbstractContextManager[None]:
        """Note calls that a module makes."""
        ...


class BrokenOff(Exception):
    """The next chunk's first block was reached. An ``Exception``, because module hooks see no other end of a call."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.leaves = tree_flatten((args, kwargs))[0]


class CalledBehindEnd(BaseException):
    """The program has caught ``BrokenOff`` and calls another module."""
