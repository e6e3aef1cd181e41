"""Steps as the user wrote them, from chunk to chunk: both ends of a boundary compare their tensors there."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_zero.errors import PipelineError
from lightning_zero.parallel.module_state import contents_put_back
from lightning_zero.parallel.pipeline.pipeline import MOST_KINDS, PipelineStage
from lightning_zero.parallel.pipeline.schedule.microbatches import copy_of
from lightning_zero.parallel.pipeline.stages.attributes import Written
from lightning_zero.parallel.pipeline.stages.sources import Shape, Source, is_fake
from lightning_zero.parallel.pipeline.stages.split import modules_around
from lightning_zero.parallel.pipeline.stages.written_tensors import unwritten
from lightning_zero.parallel.pipeline.tracing.module_interception import ModuleInterception
from lightning_zero.parallel.pipeline.tracing.operations import Operation
from lightning_zero.parallel.pipeline.tracing.outcomes import Outcome
from lightning_zero.parallel.pipeline.tracing.outside_state import OutsideState
from lightning_zero.parallel.pipeline.tracing.sent_numbers import NUMBER
from lightning_zero.parallel.pipeline.tracing.traces import Message, Needs
from lightning_zero.parallel.pipeline.tracing.whole_run import require_as_whole

__all__ = ["TracedStep", "TracedSteps"]

T = TypeVar("T")

_MOST_COMPARED = 4  # descriptions of a method's steps with which the whole step is compared


@dataclass(frozen=True)
class TracedStep:
    """The user's step; it may change its micro-batch.

    Attributes:
        run: Given a micro-batch and its index.
        pieces: The micro-batches.
        apart: Around runs that do not count.
        read: Filled by a run that does not count with values that it would read besides those of its result.
        logged: Likewise with values that it would log.
    """

    run: Callable[[Any, int], Any]
    pieces: Sequence[Any]
    apart: Callable[[], AbstractContextManager[None]]
    read: list[Any]
    logged: list[Any]

    def on_piece(self, index: int) -> Callable[[], Any]:
        """Return a run on a micro-batch itself: the last one on this rank."""
        return partial(self.run, self.pieces[index], index)

    def on_copy(self, index: int) -> Callable[[], Any]:
        """Return a run that leaves a micro-batch as it is, and returns all values that the step reads."""
        piece = copy_of(self.pieces[index])

        def run() -> Any:
            try:
                with self.apart():
                    return self.run(piece, index), [*self.read, *self.logged]
            finally:
                self.read.clear()
                self.logged.clear()

        return run


class TracedSteps:
    """Runs steps as the user wrote them, and intercepts calls of modules."""

    def __init__(self, stage: PipelineStage) -> None:
        self._stage = stage
        self._own_chunks = range(stage.mesh.stage, stage.split.num_chunks, stage.mesh.stages)
        self._around = list(modules_around(stage.module, stage.split))
        around = set(map(id, self._around))
        self._placed = [child for child in stage.module.modules() if id(child) not in around]
        self._interception = ModuleInterception(
            stage.module,
            stage.split,
            self._on_call,
            inside=self._inside,
            unnoticed=self._unnoticed,
            device=stage.device,
            logging=stage.logging,
        )
        self._messages: dict[Hashable, dict[int, tuple[Message, ...]]] = {}  # into every chunk, by kind of step
        self._outcomes: dict[Hashable, dict[int, dict[tuple[str, int], Outcome]]] = {}  # of own chunks, by kind of step
        self._showing: dict[
            tuple[int, int], Callable[[], AbstractContextManager[None]]
        ] = {}  # by chunk and micro-batch
        self._described: Counter[Hashable] = Counter()  # descriptions, by method
        self._partial: set[tuple[Hashable, int]] = set()  # kinds and chunks whose descriptions have ended by an error
        self._late: dict[tuple[Hashable, int], set[Source]] = {}  # numbers that these read all the same, by method
        self._kinds: Sequence[Hashable] = ()  # of the step that follows, by micro-batch
        self._running: list[dict[int, tuple[Message, ...]]] = []  # of the step that follows, by micro-batch

    def _on_call(self) -> None:
        self._stage.streams.leave_common()
        self._stage.draws.note()

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Run a module of this chunk with its own random numbers."""
        with self._stage.streams.inside(), self._stage.draws.inside():
            yield

    @contextmanager
    def _unnoticed(self) -> Iterator[None]:
        """Run forwards that compute nothing: the engine does not notice, and numbers that they draw do not count."""
        with self._stage.engine.ignore_forwards(), self._stage.streams.inside(), self._stage.logging.elsewhere():
            yield

    def run(
        self,
        step: TracedStep,
        index: int,
        *,
        chunk: int,
        expected: Sequence[Message],
        receive: Callable[[], Sequence[Tensor]],
        send: Callable[[Mapping[int | Source, Any]], None],
    ) -> tuple[bool, Any]:
        """Run the step until the next chunk's first block; see ``ModuleInterception.run``."""
        later = [
            message.leaf for message in self._running[index].get(chunk + 1, ()) if isinstance(message.leaf, Source)
        ]
        wanted = [source for source in later if self._stage.split.chunk_of(source.module) == chunk]
        kind = self._kinds[index]
        late: set[Source] | None = set() if (kind, chunk) in self._partial else None
        found = self._interception.run(
            step.on_piece(index) if chunk == self._own_chunks[-1] else step.on_copy(index),
            chunk,
            expected=expected,
            receive=receive,
            send=send,
            wanted=wanted,
            outcomes=self._outcomes[kind][chunk],
            late=late,
        )
        showing = self._interception.showing_again() if torch.is_grad_enabled() else None
        if showing is not None:
            self._showing[chunk, index] = showing
        if late:
            self._late.setdefault((_method_of(kind), chunk), set()).update(late)
            self._messages.pop(kind, None)  # it is described once more, before the next batch
        return found

    def survey(self, step: TracedStep, index: int) -> None:
        """Run the step as it would go on if no module of the split computed."""
        with contents_put_back(self._placed):
            self._interception.survey(step.on_copy(index))

    def showing(self, chunk: int, index: int, *, is_last: bool) -> AbstractContextManager[None]:
        """Return a context in which modules of other chunks have the attributes that the forward has found in them."""
        showing = (self._showing.pop if is_last else self._showing.get)((chunk, index), None)
        return nullcontext() if showing is None else showing()

    def end_batch(self) -> None:
        """Forget the micro-batches that have run."""
        self._showing.clear()

    def note_written(self, places: Collection[str] | None) -> None:
        """Note in the step that follows which attributes of modules with a place change behind their calls."""
        self._interception.noted = places

    def take_written(self) -> Written | None:
        """Return these attributes."""
        return self._interception.take_written()

    @property
    def modules_in_survey(self) -> Iterable[nn.Module]:
        """The modules whose state a survey may change."""
        return self._around

    def is_new(self, kind: Hashable) -> bool:
        """Say whether this kind of micro-batch is new."""
        return kind not in self._messages

    def forget(self, kinds: Collection[Hashable]) -> None:
        """Forget all kinds but some, if there are very many."""
        if len(self._messages) > MOST_KINDS:
            for known in (self._messages, self._outcomes):
                for kind in known.keys() - set(kinds):
                    del known[kind]
            self._partial = {one for one in self._partial if one[0] in self._messages}

    def messages(self, kinds: Sequence[Hashable]) -> list[dict[int, tuple[Message, ...]]]:
        """Return which leaves go into every chunk in the step that follows, by micro-batch."""
        self._kinds = kinds
        self._running = [self._messages[kind] for kind in kinds]
        return self._running

    def describe(self, step: TracedStep, index: int, kind: Hashable) -> None:
        """Find out which leaves go into every chunk.

        Every chunk runs the step on fakes and finds the sources that it needs (see ``sources.py``). Then both ends run
        it as the receiving chunk does, and compare. Leaves computed from sources that it does not have are sent, and so
        are leaves that differ between them, for example a mask that is drawn inside the model.
        Collective: all ranks.
        """
        with self._stage.engine.scope("arguments"):  # one for all runs: copies of the model may need other runs
            self._describe(step, index, kind)

    def _describe(self, step: TracedStep, index: int, kind: Hashable) -> None:
        copied = partial(step.on_copy, index)
        outside = self._outside(kind)
        needed = {
            # A stage logs by itself the values that the step logs before the next stage begins.
            chunk: self._needed(kind, chunk, copied, on_start=step.logged.clear)
            for chunk in self._own_chunks
        }
        self._outcomes[kind] = {chunk: outcomes for chunk, (_, outcomes) in needed.items()}
        mine = {chunk: sources for chunk, (sources, _) in needed.items()}
        self._messages[kind] = self._found(copied, self._on_all_stages(mine))
        if outside is not None:
            self._compare_with_whole(copied, outside)

    def _needed(
        self, kind: Hashable, chunk: int, copied: Callable[[], Callable[[], Any]], *, on_start: Callable[[], None]
    ) -> tuple[dict[Source, Shape], dict[tuple[str, int], Outcome]]:
        """Return the sources that a chunk needs, whichever way flags lead that the step reads, and its outcomes."""

        def look(guess: bool) -> Callable[[], Needs]:
            return partial(self._interception.needed, copied(), chunk, on_start=on_start, guess=guess)

        found = [self._apart(chunk, look(False))]
        if found[0].has_guessed:
            found.append(self._apart(chunk, look(True), may_write=True))
        late = self._late.setdefault((_method_of(kind), chunk), set())
        is_partial = not any(one.is_whole for one in found)
        (self._partial.add if is_partial else self._partial.discard)((kind, chunk))
        if is_partial:
            late |= self._apart(chunk, partial(self._interception.read_in_survey, copied(), chunk))
        needed = {source: shape for one in found for source, shape in one.sources.items()}
        needed |= dict.fromkeys(sorted(late, key=repr), NUMBER)
        return needed, {key: outcome for one in reversed(found) for key, outcome in one.outcomes.items()}

    def _outside(self, kind: Hashable) -> OutsideState | None:
        """Return the state outside of modules if a step is to be compared with the whole one: the first ones are."""
        method = _method_of(kind)
        self._described[method] += 1  # the same on all ranks
        is_late = self._described[method] > _MOST_COMPARED
        return None if is_late or not any(self._own_chunks) else OutsideState(self._stage.module.modules())

    def _compare_with_whole(self, copied: Callable[[], Callable[[], Any]], outside: OutsideState) -> None:
        """Refuse a step that does something else in stages than as a whole; see ``whole_run.py``."""

        def record(chunk: int, is_whole: bool) -> list[Operation] | None:
            def run() -> list[Operation] | None:
                self._enter(chunk)
                return self._interception.recorded(copied(), chunk, is_whole=is_whole)

            return outside.run(partial(self._stage.apart, run, self._around))

        for chunk in self._own_chunks:
            if chunk > 0:
                require_as_whole(partial(record, chunk))

    def _enter(self, chunk: int) -> None:
        self._stage.streams.begin()
        self._stage.streams.enter(chunk, 0)

    def _found(
        self, copied: Callable[[], Callable[[], Any]], needed: Mapping[int, Mapping[Source, Shape]]
    ) -> dict[int, tuple[Message, ...]]:
        num_chunks = self._stage.split.num_chunks
        sources = {chunk: self._passing(chunk, needed) for chunk in range(1, num_chunks)}
        table = self._on_all_stages({
            (chunk, acting): self._description(copied(), chunk, acting, sources[chunk])
            for acting in self._own_chunks
            for chunk in (acting, acting + 1)
            if 0 < chunk < num_chunks
        })  # fmt: skip
        lacking = {
            chunk: self._lacking(chunk, table[chunk, chunk].origins, sources.get(chunk - 1, {})) for chunk in sources
        }
        if any(lacking.values()):
            return self._found(
                copied, {chunk: {**found, **lacking.get(chunk, {})} for chunk, found in sorted(needed.items())}
            )
        return {
            chunk: _differing(chunk, table[chunk, chunk].leaves, table[chunk, chunk - 1].leaves)
            + tuple(Message(source, one.shape, one.dtype, one.requires_grad) for source, one in sources[chunk].items())
            for chunk in range(1, num_chunks)
        }

    def _lacking(
        self, chunk: int, origins: Iterable[Mapping[Source, Shape]], sources: Collection[Source]
    ) -> dict[Source, Shape]:
        """Return the sources of arguments that the chunk before does not have: both are sent them instead.

        Args:
            chunk: Whose first block has the arguments.
            origins: Of each argument, the sources that the chunk does not have.
            sources: That the chunk before is sent.
        """
        chunk_of = self._stage.split.chunk_of
        return {
            source: shape
            for one in origins
            if any(chunk_of(source.module) < chunk - 1 and source not in sources for source in one)
            for source, shape in one.items()
        }

    def _on_all_stages(self, mine: dict[Any, Any]) -> dict[Any, Any]:
        """Return the entries of all stages. Collective: all ranks of a copy."""
        everyone = self._stage.mesh.gather(mine, "the description of a step")
        return {key: value for one in everyone for key, value in one.items()}

    def _passing(self, chunk: int, needed: Mapping[int, Mapping[Source, Shape]]) -> dict[Source, Shape]:
        """Return the sources that a chunk is sent: those of earlier chunks that it or a later one needs."""
        return {
            source: shape
            for user in sorted(needed)
            if user >= chunk
            for source, shape in needed[user].items()
            if self._stage.split.chunk_of(source.module) < chunk
        }

    def _description(self, run: Callable[[], Any], chunk: int, acting: int, sources: Iterable[Source]) -> _Description:
        """Describe the arguments of a chunk's first block as ``acting`` would find them."""

        def look() -> _Description:
            leaves, origins = self._interception.arguments(run, chunk, sources)
            missing = [origins.is_missing(leaf) for leaf in leaves]
            is_sent = self._interception.is_sent_number
            described = [
                _Number(repr(leaf), True) if is_sent(leaf) else _describe(leaf, is_missing=one)
                for leaf, one in zip(leaves, missing, strict=True)
            ]
            return _Description(described, [origins.shapes_of(leaf) for leaf in leaves])

        return self._apart(acting, look)

    def _apart(self, chunk: int, look: Callable[[], T], *, may_write: bool = False) -> T:
        """Run the step for a chunk, and leave no trace; ``may_write`` where it need not run as this run does."""

        def run() -> T:
            self._enter(chunk)
            scope, kept = self._stage.engine.scope("arguments"), contents_put_back(self._placed)
            held = self._stage.held(self._around, self._interception.lost_writes)
            with scope, kept, unwritten(held, may_write=held.names if may_write else ()):
                return look()

        return self._stage.apart(run, self._around)


def _method_of(kind: Hashable) -> Hashable:
    """Return the name of the method whose step a kind is one of."""
    return kind[0] if isinstance(kind, tuple) else kind


@dataclass(frozen=True)
class _Description:
    """The arguments of a chunk's first block.

    Attributes:
        leaves: Described.
        origins: Of each, the sources that the chunk does not have.
    """

    leaves: list[Any]
    origins: list[dict[Source, Shape]]


@dataclass(frozen=True)
class _Number:
    """A value that is no tensor, as text; whether it is that very one that a block of an earlier stage returns."""

    text: str
    is_sent: bool = False

    def is_like(self, other: Any) -> bool:
        """Say whether both ends know it. A number may be one that a block returns, and another one, by chance."""
        return isinstance(other, _Number) and (self.text == other.text or (self.is_sent and other.is_sent))

    def __str__(self) -> str:
        return "a number that a block of an earlier stage returns" if self.is_sent else self.text


_MISSING = "missing"
_AVAILABLE = "available"
_PLAIN = (int, float, complex, str, bytes, type(None), torch.Size, torch.dtype)


def _describe(leaf: Any, *, is_missing: bool) -> Any:
    if not isinstance(leaf, Tensor):
        kind = type(leaf).__name__
        text = f"{kind}.{leaf.name}" if isinstance(leaf, Enum) else repr(leaf) if isinstance(leaf, _PLAIN) else kind
        return _Number(text)
    values: int | str = _MISSING if is_missing else _AVAILABLE if is_fake(leaf) else _checksum(leaf)
    return (tuple(leaf.shape), leaf.dtype, leaf.requires_grad, values)


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def _differing(chunk: int, here: Sequence[Any], there: Sequence[Any]) -> tuple[Message, ...]:
    """Return the messages to send into a chunk, given the descriptions of its arguments on both ends."""
    if len(here) != len(there):
        raise PipelineError(f"Pipeline stages call the first block of chunk {chunk} with different arguments.")
    messages = []
    for index, (mine, theirs) in enumerate(zip(here, there, strict=True)):
        if isinstance(mine, tuple) and (mine[3] == _MISSING or mine != theirs):
            messages.append(Message(index, *mine[:3]))
        elif not (isinstance(mine, _Number) and mine.is_like(theirs)) and mine != theirs:
            raise PipelineError(
                f"The first block of pipeline chunk {chunk} is called with {mine} on its stage and {theirs} on the one"
                " before. Values that are no tensors must not depend on random numbers drawn inside the model, nor on"
                " numbers that a block counts: pass the number that a block returns on as it is, or as a tensor."
            )
    return tuple(messages)
