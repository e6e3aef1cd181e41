"""Steps as the user wrote them, from chunk to chunk: both ends of a boundary compare what they have there."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.errors import PipelineError
from lightning_zero.parallel.fakes import is_fake
from lightning_zero.parallel.gates import Gates, Message
from lightning_zero.parallel.pipeline import PipelineStage
from lightning_zero.parallel.split import modules_around

__all__ = ["CapturedStep", "CapturedSteps"]

CapturedStep = Callable[[int], Any]  # runs the user's step on a micro-batch


class CapturedSteps:
    """Runs steps through gates."""

    def __init__(self, stage: PipelineStage) -> None:
        self._stage = stage
        self._own_chunks = range(stage.mesh.stage, stage.split.num_chunks, stage.mesh.stages)
        self._around = list(modules_around(stage.module, stage.split))
        self._gates = Gates(stage.module, stage.split, stage.streams.leave_common, stage.engine.asleep)
        self._messages: dict[Hashable, dict[int, tuple[Message, ...]]] = {}  # into every chunk, by kind of step

    def run(
        self,
        step: CapturedStep,
        index: int,
        chunk: int,
        expected: Sequence[Message],
        receive: Callable[[], Sequence[Tensor]],
        send: Callable[[Sequence[Any]], None],
    ) -> tuple[bool, Any]:
        """Run the step until the next chunk's first block; see ``Gates.run``."""
        return self._gates.run(lambda: step(index), chunk, expected, receive, send)

    def survey(self, step: CapturedStep, index: int) -> None:
        """Run the step as it would go on if no module of the split computed."""
        self._gates.survey(lambda: step(index))

    @property
    def modules_in_survey(self) -> Iterable[nn.Module]:
        """The modules whose state a survey may change."""
        return self._around

    def messages(self, step: CapturedStep, kind: Hashable) -> dict[int, tuple[Message, ...]]:
        """Return which leaves go into every chunk this rank sends to or receives from.

        Both ends run the step as the receiving chunk does, without computing, and compare: what is fake there is sent,
        and so is what differs between them, for example a mask that is drawn inside the model.
        Collective: all ranks of this stage; where the kind of step is new to one of them, all ranks.
        """
        if self._stage.any_copy(kind not in self._messages, "agreement on a new kind of step"):
            num_chunks, mesh = self._stage.split.num_chunks, self._stage.mesh
            mine = {
                (chunk, acting): self._description(step, chunk, acting)
                for acting in self._own_chunks
                for chunk in (acting, acting + 1)
                if 0 < chunk < num_chunks
            }
            everyone: list[Any] = [None] * mesh.stages
            dist.all_gather_object(everyone, mine, group=mesh.host_group)
            table = {key: value for one in everyone for key, value in one.items()}
            self._messages[kind] = {
                chunk: _needed(chunk, table[chunk, chunk], table[chunk, chunk - 1]) for chunk in range(1, num_chunks)
            }
        return self._messages[kind]

    def _description(self, step: CapturedStep, chunk: int, acting: int) -> list[Any]:
        """Describe the arguments of a chunk's first block as ``acting`` would find them."""

        def look() -> list[Any]:
            self._stage.streams.begin()
            self._stage.streams.enter(acting, 0)
            with self._stage.engine.scope("arguments"):
                return [_describe(leaf) for leaf in self._gates.arguments(lambda: step(0), chunk)]

        return self._stage.apart(look, self._around)


def _describe(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return repr(leaf) if isinstance(leaf, (int, float, str, bool)) or leaf is None else type(leaf).__name__
    values = None if is_fake(leaf) else _checksum(leaf)
    return (tuple(leaf.shape), leaf.dtype, leaf.requires_grad, values)


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def _needed(chunk: int, here: Sequence[Any], there: Sequence[Any]) -> tuple[Message, ...]:
    """Return what must be sent into a chunk, given what both ends have."""
    if len(here) != len(there):
        raise PipelineError(f"Pipeline stages call the first block of chunk {chunk} with different arguments.")
    messages = []
    for index, (mine, theirs) in enumerate(zip(here, there, strict=True)):
        if isinstance(mine, tuple) and (mine[3] is None or mine != theirs):
            messages.append(Message(index, *mine[:3]))
        elif mine != theirs:
            raise PipelineError(
                f"The first block of pipeline chunk {chunk} is called with {mine} on its stage and {theirs} on the one"
                " before. Values that are no tensors must not depend on random numbers drawn inside the model."
            )
    return tuple(messages)
