"""Steps as the user wrote them, from chunk to chunk: both ends of a boundary compare what they have there."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.errors import PipelineError
from lightning_zero.parallel.gates import Gates, Message
from lightning_zero.parallel.pipeline import PipelineStage
from lightning_zero.parallel.sources import Shape, Source, is_fake
from lightning_zero.parallel.split import modules_around

__all__ = ["CapturedStep", "CapturedSteps"]

T = TypeVar("T")

CapturedStep = Callable[[int], Any]  # runs the user's step on a micro-batch


class CapturedSteps:
    """Runs steps through gates."""

    def __init__(self, stage: PipelineStage) -> None:
        self._stage = stage
        self._own_chunks = range(stage.mesh.stage, stage.split.num_chunks, stage.mesh.stages)
        self._around = list(modules_around(stage.module, stage.split))
        self._gates = Gates(
            stage.module, stage.split, stage.streams.leave_common, inside=stage.streams.inside, asleep=self._asleep
        )
        self._messages: dict[Hashable, dict[int, tuple[Message, ...]]] = {}  # into every chunk, by kind of step
        self._running: dict[int, tuple[Message, ...]] = {}  # of the steps that follow

    @contextmanager
    def _asleep(self) -> Iterator[None]:
        """Run forwards that compute nothing: the engine does not notice, and numbers that they draw do not count."""
        with self._stage.engine.asleep(), self._stage.streams.inside():
            yield

    def run(
        self,
        step: CapturedStep,
        index: int,
        chunk: int,
        expected: Sequence[Message],
        receive: Callable[[], Sequence[Tensor]],
        send: Callable[[Mapping[int | Source, Any]], None],
    ) -> tuple[bool, Any]:
        """Run the step until the next chunk's first block; see ``Gates.run``."""
        later = [message.leaf for message in self._running.get(chunk + 1, ()) if isinstance(message.leaf, Source)]
        wanted = [source for source in later if self._stage.split.chunk_of(source.module) == chunk]
        return self._gates.run(lambda: step(index), chunk, expected, receive, send, wanted=wanted)

    def survey(self, step: CapturedStep, index: int) -> None:
        """Run the step as it would go on if no module of the split computed."""
        self._gates.survey(lambda: step(index))

    @property
    def modules_in_survey(self) -> Iterable[nn.Module]:
        """The modules whose state a survey may change."""
        return self._around

    def is_new(self, step: CapturedStep, kind: Hashable) -> bool:
        """Say whether this kind of step is new."""
        return kind not in self._messages

    def messages(self, step: CapturedStep, kind: Hashable, *, is_new: bool) -> dict[int, tuple[Message, ...]]:
        """Return which leaves go into every chunk this rank sends to or receives from.

        Every chunk runs the step on fakes and finds the sources that it needs (see ``sources.py``). Then both ends run
        it as the receiving chunk does, and compare: what is computed from sources that it does not have is sent, and so
        is what differs between them, for example a mask that is drawn inside the model.
        Collective: all ranks of this stage; where the kind of step is new to one of them, or changed, all ranks.
        """
        if self._stage.any_copy(is_new, "agreement on a new kind of step"):
            self._messages[kind] = self._found(step, self._on_all_stages(self._needs_of(step)))
        self._running = self._messages[kind]
        return self._running

    def _found(
        self, step: CapturedStep, needed: Mapping[int, Mapping[Source, Shape]]
    ) -> dict[int, tuple[Message, ...]]:
        num_chunks = self._stage.split.num_chunks
        sources = {chunk: self._passing(chunk, needed) for chunk in range(1, num_chunks)}
        table = self._on_all_stages({
            (chunk, acting): self._description(step, chunk, acting, sources[chunk])
            for acting in self._own_chunks
            for chunk in (acting, acting + 1)
            if 0 < chunk < num_chunks
        })  # fmt: skip
        return {
            chunk: _differing(chunk, table[chunk, chunk], table[chunk, chunk - 1])
            + tuple(Message(source, one.shape, one.dtype, one.requires_grad) for source, one in sources[chunk].items())
            for chunk in range(1, num_chunks)
        }

    def _on_all_stages(self, mine: dict[Any, Any]) -> dict[Any, Any]:
        """Return the entries of all stages. Collective: all ranks of a copy."""
        everyone: list[Any] = [None] * self._stage.mesh.stages
        dist.all_gather_object(everyone, mine, group=self._stage.mesh.host_group)
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

    def _needs_of(self, step: CapturedStep) -> dict[int, dict[Source, Shape]]:
        """Return the sources that each chunk of this stage needs."""

        def needed(chunk: int) -> dict[Source, Shape]:
            return self._apart(chunk, lambda: self._gates.needed(lambda: step(0), chunk))

        return {chunk: needed(chunk) for chunk in self._own_chunks}

    def _description(self, step: CapturedStep, chunk: int, acting: int, sources: Iterable[Source]) -> list[Any]:
        """Describe the arguments of a chunk's first block as ``acting`` would find them."""

        def look() -> list[Any]:
            leaves, origins = self._gates.arguments(lambda: step(0), chunk, sources)
            return [_describe(leaf, is_missing=origins.is_missing(leaf)) for leaf in leaves]

        return self._apart(acting, look)

    def _apart(self, chunk: int, look: Callable[[], T]) -> T:
        """Run the step for a chunk, and leave no trace."""

        def run() -> T:
            self._stage.streams.begin()
            self._stage.streams.enter(chunk, 0)
            with self._stage.engine.scope("arguments"):
                return look()

        return self._stage.apart(run, self._around)


_MISSING = "missing"
_AVAILABLE = "available"


def _describe(leaf: Any, *, is_missing: bool) -> Any:
    if not isinstance(leaf, Tensor):
        return repr(leaf) if isinstance(leaf, (int, float, str, bool)) or leaf is None else type(leaf).__name__
    values: int | str = _MISSING if is_missing else _AVAILABLE if is_fake(leaf) else _checksum(leaf)
    return (tuple(leaf.shape), leaf.dtype, leaf.requires_grad, values)


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def _differing(chunk: int, here: Sequence[Any], there: Sequence[Any]) -> tuple[Message, ...]:
    """Return what must be sent into a chunk, given what both ends have."""
    if len(here) != len(there):
        raise PipelineError(f"Pipeline stages call the first block of chunk {chunk} with different arguments.")
    messages = []
    for index, (mine, theirs) in enumerate(zip(here, there, strict=True)):
        if isinstance(mine, tuple) and (mine[3] == _MISSING or mine != theirs):
            messages.append(Message(index, *mine[:3]))
        elif mine != theirs:
            raise PipelineError(
                f"The first block of pipeline chunk {chunk} is called with {mine} on its stage and {theirs} on the one"
                " before. Values that are no tensors must not depend on random numbers drawn inside the model."
            )
    return tuple(messages)
