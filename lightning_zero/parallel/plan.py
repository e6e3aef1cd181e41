"""Which rank computes what when: the plan of a pipeline, as data that the run, the picture and the tests read.

The orders of computation are those of PyTorch's ``ScheduleGPipe``, ``Schedule1F1B`` and ``ScheduleInterleaved1F1B``.

Note [Messages]
    A message is put into the lists of its sender and of its receiver at the same moment of a simulated run. So any two
    ranks list their messages in one order, in both directions, and no rank waits for one that is sent behind a message
    of its own: the lists can be run as they are on transports that match messages by order alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_zero.config import Schedule

__all__ = ["Action", "ActionKind", "Span", "bubble_share", "compute_order", "evaluation_order", "simulate"]

ActionKind = Literal["forward", "backward", "send_output", "recv_input", "send_gradient", "recv_gradient"]


@dataclass(frozen=True)
class Action:
    """One thing that a rank does.

    ``send_output`` and ``recv_gradient`` are about the output of ``chunk``, ``recv_input`` and ``send_gradient`` about
    its input.
    """

    kind: ActionKind
    chunk: int
    microbatch: int


@dataclass(frozen=True)
class Span:
    """When a rank computes something in a simulated run."""

    rank: int
    action: Action
    start: float
    stop: float


def compute_order(schedule: Schedule, stages: int, chunks: int, microbatches: int) -> list[list[Action]]:
    """Return for every rank its forwards and backwards in order.

    Args:
        schedule: Name of the schedule.
        stages: Ranks; chunk c is computed on rank ``c % stages``.
        chunks: Chunks of the whole model.
        microbatches: Micro-batches of a step.
    """
    if schedule == "gpipe":
        return [_gpipe(rank, microbatches) for rank in range(stages)]
    if schedule == "1f1b":
        return [_alternating([rank], microbatches, microbatches, stages - 1 - rank) for rank in range(stages)]
    return [_interleaved(rank, stages, chunks, microbatches) for rank in range(stages)]


def evaluation_order(stages: int, chunks: int) -> list[list[Action]]:
    """Return for every rank its forwards of one micro-batch."""
    return [[Action("forward", chunk, 0) for chunk in range(rank, chunks, stages)] for rank in range(stages)]


def _gpipe(rank: int, microbatches: int) -> list[Action]:
    forwards = [Action("forward", rank, index) for index in range(microbatches)]
    return forwards + [Action("backward", rank, index) for index in range(microbatches)]


def _interleaved(rank: int, stages: int, chunks: int, microbatches: int) -> list[Action]:
    """Return the order of arXiv:2104.04473, section 2.2: groups of ``stages`` micro-batches go chunk by chunk."""
    own = list(range(rank, chunks, stages))
    warm_up = (len(own) - 1) * stages + 2 * (stages - 1 - rank)
    return _alternating(own, stages, microbatches, min(warm_up, len(own) * microbatches))


def _alternating(own: Sequence[int], group: int, microbatches: int, warm_up: int) -> list[Action]:
    """Return ``warm_up`` forwards, then one forward and one backward in turn, then the backwards that are left."""
    forwards = _grouped("forward", own, group, microbatches)
    backwards = _grouped("backward", own[::-1], group, microbatches)
    actions = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        actions += [forward, backward]
    return actions + backwards[len(forwards) - warm_up :]


def _grouped(kind: ActionKind, own: Sequence[int], group: int, microbatches: int) -> list[Action]:
    return [
        Action(kind, chunk, index)
        for start in range(0, microbatches, group)
        for chunk in own
        for index in range(start, min(start + group, microbatches))
    ]


def simulate(
    orders: Sequence[Sequence[Action]], chunks: int, *, forward: float = 1.0, backward: float = 2.0
) -> tuple[list[list[Action]], list[Span]]:
    """Return every rank's list with its messages in it, and when it would compute what.

    Args:
        orders: Forwards and backwards of every rank.
        chunks: Chunks of the whole model.
        forward: Time of a forward; messages take none.
        backward: Time of a backward.
    """
    stages = len(orders)
    seconds = {"forward": forward, "backward": backward}
    lists: list[list[Action]] = [[] for _ in orders]
    spans: list[Span] = []
    clocks = [0.0] * stages
    position = [0] * stages
    done: dict[Action, float] = {}
    while any(position[rank] < len(orders[rank]) for rank in range(stages)):
        ready = [
            (max(clocks[rank], start), rank)
            for rank in range(stages)
            if position[rank] < len(orders[rank])
            and (start := _ready_at(orders[rank][position[rank]], chunks, done)) is not None
        ]
        assert ready, "the schedule waits for itself"
        start, rank = min(ready)
        action = orders[rank][position[rank]]
        position[rank] += 1
        done[action] = clocks[rank] = start + seconds[action.kind]
        spans.append(Span(rank, action, start, clocks[rank]))
        lists[rank].append(action)
        _send_on(action, lists, chunks)
    return lists, spans


def _ready_at(action: Action, chunks: int, done: dict[Action, float]) -> float | None:
    """Return when what an action needs is there; None if it is not known yet."""
    if action.kind == "forward":
        needed = [Action("forward", action.chunk - 1, action.microbatch)] if action.chunk > 0 else []
    else:
        needed = [Action("forward", action.chunk, action.microbatch)]
        if action.chunk < chunks - 1:
            needed.append(Action("backward", action.chunk + 1, action.microbatch))
    times = [done.get(one) for one in needed]
    return None if None in times else max((time for time in times if time is not None), default=0.0)


def _send_on(action: Action, lists: list[list[Action]], chunks: int) -> None:
    stages, chunk, index = len(lists), action.chunk, action.microbatch
    if action.kind == "forward" and chunk < chunks - 1:
        lists[chunk % stages].append(Action("send_output", chunk, index))
        lists[(chunk + 1) % stages].append(Action("recv_input", chunk + 1, index))
    elif action.kind == "backward" and chunk > 0:
        lists[chunk % stages].append(Action("send_gradient", chunk, index))
        lists[(chunk - 1) % stages].append(Action("recv_gradient", chunk - 1, index))


def bubble_share(spans: Sequence[Span]) -> float:
    """Return the part of all ranks' time in which they do not compute; ``(p - 1) / (m + p - 1)`` for even stages."""
    end = max(span.stop for span in spans)
    ranks = len({span.rank for span in spans})
    return 1.0 - sum(span.stop - span.start for span in spans) / (end * ranks)
