"""Steps in three parts, for models whose code around the blocks cannot be traced: begin, the blocks, finish.

The first stage begins: its result is given to the first block. A block's output is given to the next one. The
last stage finishes. In between goes a tensor, or a tuple of tensors, of the same shapes in all micro-batches with as
many samples.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.errors import PipelineError
from lightning_zero.parallel.pipeline.pipeline import MOST_KINDS, PipelineStage
from lightning_zero.parallel.pipeline.schedule.microbatches import copy_of
from lightning_zero.parallel.pipeline.stages.attributes import Written
from lightning_zero.parallel.pipeline.stages.sources import Source
from lightning_zero.parallel.pipeline.stages.written_tensors import undone_in, unwritten
from lightning_zero.parallel.pipeline.tracing.traces import Message
from lightning_zero.parallel.writable import writable

__all__ = ["ExplicitStep", "ExplicitSteps"]


@dataclass(frozen=True)
class ExplicitStep:
    """The parts of a step; they may change the micro-batch.

    Attributes:
        begin: Given a micro-batch and its index, returns the input of the first block.
        finish: Given the last block's output, the micro-batch and its index, returns the step's result.
        context: Around everything.
        pieces: The micro-batches.
        apart: Around runs that do not count.
    """

    begin: Callable[[Any, int], Any]
    finish: Callable[[Any, Any, int], Any]
    context: Callable[[], AbstractContextManager[Any]]
    pieces: Sequence[Any]
    apart: Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class _Boundary:
    """The tensors that go from one chunk to the next."""

    is_tuple: bool
    messages: tuple[Message, ...]

    def state(self, tensors: Sequence[Tensor]) -> Any:
        return tuple(tensors) if self.is_tuple else tensors[0]

    def zeros(self, device: torch.device) -> Any:
        return self.state([torch.zeros((), dtype=one.dtype, device=device).expand(one.shape) for one in self.messages])


class ExplicitSteps:
    """Runs the blocks of a chunk, each on the output of the one before."""

    def __init__(self, stage: PipelineStage) -> None:
        self._stage = stage
        self._split = stage.split
        self._mesh = stage.mesh
        self._streams = stage.streams
        places = [place for place in stage.split.places if place.block is not None]
        names = [place.name for place in sorted(places, key=lambda one: one.block or 0)]
        self._blocks = [(name, stage.module.get_submodule(name)) for name in names]
        self._known: dict[Hashable, dict[int, _Boundary]] = {}  # into every chunk, and behind the last, by kind of step
        self._boundaries: list[dict[int, _Boundary]] = []  # of the step that follows, by micro-batch

    def is_new(self, kind: Hashable) -> bool:
        """Say whether this kind of micro-batch is new."""
        return kind not in self._known

    def forget(self, kinds: Collection[Hashable]) -> None:
        """Forget all kinds but some, if there are very many."""
        if len(self._known) > MOST_KINDS:
            self._known = {kind: self._known[kind] for kind in kinds if kind in self._known}

    def messages(self, kinds: Sequence[Hashable]) -> list[dict[int, tuple[Message, ...]]]:
        """Return the messages into every chunk in the step that follows, by micro-batch."""
        self._boundaries = [self._known[kind] for kind in kinds]
        return [{chunk: one.messages for chunk, one in boundaries.items()} for boundaries in self._boundaries]

    def describe(self, step: ExplicitStep, index: int, kind: Hashable) -> None:
        """Describe the messages into every chunk. Collective: all ranks."""
        self._known[kind] = self._stage.apart(lambda: self._described(step, index), self._stage.module.modules())

    def _described(self, step: ExplicitStep, index: int) -> dict[int, _Boundary]:
        """Run a micro-batch once, with zeros where a chunk receives."""
        self._streams.begin()
        boundaries: dict[int, _Boundary] = {}
        for chunk in range(self._split.num_chunks):
            stage = chunk % self._mesh.stages
            found: _Boundary | None = None
            if self._mesh.stage == stage:
                self._streams.enter(chunk, 0)
                self._streams.leave_common()
                self._streams.enter_own()
                kept = unwritten(self._stage.held(self._stage.module.modules()))
                part, undone = self._stage.engine.part(f"chunk {chunk}"), self._undone()
                with part, self._stage.engine.scope("arguments"), kept, undone, step.context(), step.apart():
                    state = self._through(chunk, self._start(step, index, chunk, boundaries))
                    found = self._boundary(chunk, state)
            boundaries[chunk + 1] = self._mesh.broadcast(found, stage, "the description of a step")
        return boundaries

    def _undone(self) -> AbstractContextManager[None]:
        """Undo writes of modules into parameters that no other stage has: all other code of a step writes once more."""
        module, mine = self._stage.module, (self._mesh.stage,)
        params = {id(param) for name, param in module.named_parameters() if self._split.holders.get(name) == mine}
        return undone_in(module.modules(), params)

    def _start(self, step: ExplicitStep, index: int, chunk: int, boundaries: dict[int, _Boundary]) -> Any:
        if chunk == 0:
            return step.begin(copy_of(step.pieces[index]), index)
        tensors = [
            torch.zeros(one.shape, dtype=one.dtype, device=self._stage.device).requires_grad_(one.requires_grad)
            for one in boundaries[chunk].messages
        ]
        return boundaries[chunk].state([writable(tensor) for tensor in tensors])

    def _boundary(self, chunk: int, state: Any) -> _Boundary:
        tensors = self._tensors(chunk, state)
        return _Boundary(
            isinstance(state, (tuple, list)),
            tuple(
                Message(index, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
                for index, tensor in enumerate(tensors)
            ),
        )

    def _tensors(self, chunk: int, state: Any) -> list[Tensor]:
        tensors = list(state) if isinstance(state, (tuple, list)) else [state]
        if not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
            name = self._blocks[self._split.bounds[chunk + 1] - 1][0]
            raise PipelineError(
                f"`{name}` returned {', '.join(type(one).__name__ for one in tensors) or 'nothing'}. With"
                " `pipeline_step` a block must return a tensor or a tuple of tensors, which the next one is given."
            )
        return tensors

    def _through(self, chunk: int, state: Any) -> Any:
        bounds = self._split.bounds
        self._stage.draws.note()
        with self._stage.draws.inside():
            for _, block in self._blocks[bounds[chunk] : bounds[chunk + 1]]:
                state = block(*state) if isinstance(state, (tuple, list)) else block(state)
        return state

    def run(
        self,
        step: ExplicitStep,
        index: int,
        *,
        chunk: int,
        expected: Sequence[Message],
        receive: Callable[[], Sequence[Tensor]],
        send: Callable[[Mapping[int | Source, Any]], None],
    ) -> tuple[bool, Any]:
        """Run the blocks of a chunk; begin in front of the first, finish behind the last one."""
        self._streams.leave_common()
        self._streams.enter_own()
        with step.context():
            piece = step.pieces[index]
            if chunk == 0:
                state = step.begin(piece, index)
            else:
                state = self._boundaries[index][chunk].state([writable(one) for one in receive()])
            state = self._through(chunk, state)
            if chunk == self._split.num_chunks - 1:
                return True, step.finish(state, piece, index)
            send(dict(enumerate(self._tensors(chunk, state))))
        return False, None

    def showing(self, chunk: int, index: int, *, is_last: bool) -> AbstractContextManager[None]:
        """Return a context that does nothing: no modules are passed over."""
        return nullcontext()

    def note_written(self, places: Collection[str] | None) -> None:
        """Do nothing: the parts of a step run where their modules are."""

    def take_written(self) -> Written | None:
        """Return None: all changes of attributes in modules of other stages count."""
        return None

    def end_batch(self) -> None:
        """Do nothing: no micro-batch is remembered."""

    @property
    def modules_in_survey(self) -> Iterable[nn.Module]:
        """The modules whose state a survey may change."""
        return self._stage.module.modules()

    def survey(self, step: ExplicitStep, index: int) -> None:
        """Finish a micro-batch on zeros."""
        self._streams.leave_common()
        self._streams.enter_own()
        with self._undone(), step.context(), step.apart():
            zeros = self._boundaries[index][self._split.num_chunks].zeros(self._stage.device)
            step.finish(zeros, copy_of(step.pieces[index]), index)
