"""The plan of a pipeline: every rank's actions in order, as data for the run, the picture and the tests.

The orders of computation are those of PyTorch's ``ScheduleGPipe``, ``Schedule1F1B`` and ``ScheduleInterleaved1F1B``,
and of ``ScheduleInterleavedZeroBubble`` with one chunk a stage.

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

__all__ = [
    "Action",
    "ActionKind",
    "Span",
    "bubble_share",
    "compute_order",
    "evaluation_order",
    "most_microbatches",
    "simulate",
]

ActionKind = Literal[
    "forward", "backward", "backward_input", "backward_weight",
    "send_output", "recv_input", "send_gradient", "recv_gradient",
]  # fmt: skip


@dataclass(frozen=True)
class Action:
    """One thing that a rank does.

    ``backward_input`` and ``backward_weight`` are a ``backward`` in two halves; the first brings the input's gradient.
    ``send_output`` and ``recv_gradient`` are about the output of ``chunk``, ``recv_input`` and ``send_gradient`` about
    its input.
    """

    kind: ActionKind
    chunk: int
    microbatch: int

    @property
    def is_backward(self) -> bool:
        """Whether it computes gradients."""
        return self.kind in ("backward", "backward_input", "backward_weight")


@dataclass(frozen=True)
class Span:
    """The time in which a rank computes an action of a simulated run."""

    rank: int
    action: Action
    start: float
    stop: float


def compute_order(schedule: Schedule, stages: int, chunks: int, microbatches: int) -> list[list[Action]]:
    """Return for every rank its forwards and backwards in order; with ``zb_h1`` backwards are in two halves.

    Args:
        schedule: Name of the schedule.
        stages: Ranks; chunk c is computed on rank ``c % stages``.
        chunks: Chunks of the whole model.
        microbatches: Micro-batches of a step.
    """
    if schedule == "gpipe":
        return [_gpipe(rank, microbatches) for rank in range(stages)]
    if schedule == "1f1b":
        return [_one_by_one(rank, stages, microbatches) for rank in range(stages)]
    if schedule == "zb_h1":
        return [_zero_bubble(rank, stages, microbatches) for rank in range(stages)]
    return [_interleaved(rank, stages, chunks, microbatches) for rank in range(stages)]


def most_microbatches(schedule: Schedule, stages: int, samples: int) -> int:
    """Return into how many micro-batches a batch of few samples can be cut: interleaved ones go in full groups."""
    return samples - samples % stages if schedule == "interleaved_1f1b" and samples > stages else samples


def evaluation_order(stages: int, chunks: int) -> list[list[Action]]:
    """Return for every rank its forwards of one micro-batch."""
    return [[Action("forward", chunk, 0) for chunk in range(rank, chunks, stages)] for rank in range(stages)]


def _gpipe(rank: int, microbatches: int) -> list[Action]:
    forwards = [Action("forward", rank, index) for index in range(microbatches)]
    return forwards + [Action("backward", rank, index) for index in range(microbatches)]


def _one_by_one(rank: int, stages: int, microbatches: int) -> list[Action]:
    return _alternating([rank], microbatches, microbatches, stages - 1 - rank)


def _zero_bubble(rank: int, stages: int, microbatches: int) -> list[Action]:
    """Return the order of ZB-H1 (arXiv:2401.10241): 1F1B, with gradients of weights ``rank`` backwards later.

    A stage then never has more than ``stages`` micro-batches between their forward and their gradients of weights.
    """
    actions: list[Action] = []
    for action in _one_by_one(rank, stages, microbatches):
        if action.kind == "forward":
            actions.append(action)
            continue
        actions.append(Action("backward_input", rank, action.microbatch))
        if action.microbatch >= rank:
            actions.append(Action("backward_weight", rank, action.microbatch - rank))
    late = range(max(microbatches - rank, 0), microbatches)
    return actions + [Action("backward_weight", rank, index) for index in late]


def _interleaved(rank: int, stages: int, chunks: int, microbatches: int) -> list[Action]:
    """Return the order of arXiv:2104.04473, section 2.2: groups of ``stages`` micro-batches go chunk by chunk."""
    own = list(range(rank, chunks, stages))
    group = min(stages, microbatches)
    return _alternating(own, group, microbatches, (len(own) - 1) * group + 2 * (stages - 1 - rank))


def _alternating(own: Sequence[int], group: int, microbatches: int, warm_up: int) -> list[Action]:
    """Return ``warm_up`` forwards, then one forward and one backward in turn, then the backwards that are left."""
    forwards = _grouped("forward", own, group, microbatches)
    backwards = _grouped("backward", own[::-1], group, microbatches)
    warm_up = min(warm_up, len(forwards))
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
    orders: Sequence[Sequence[Action]],
    chunks: int,
    *,
    forward: float = 1.0,
    backward: float = 2.0,
    weight: float | None = None,
) -> tuple[list[list[Action]], list[Span]]:
    """Return every rank's actions with its messages among them, and the time span of each computation.

    Args:
        orders: Forwards and backwards of every rank.
        chunks: Chunks of the whole model.
        forward: Time of a forward; messages take none.
        backward: Time of a backward.
        weight: The part of it for gradients of weights, where it is in two halves. The default is one half.
    """
    stages = len(orders)
    weight = backward / 2 if weight is None else weight
    seconds = {
        "forward": forward,
        "backward": backward,
        "backward_input": backward - weight,
        "backward_weight": weight,
    }
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
    """Return when the inputs of an action are there; None if it is not known yet."""
    if action.kind == "forward":
        needed = [Action("forward", action.chunk - 1, action.microbatch)] if action.chunk > 0 else []
    elif action.kind == "backward_weight":
        needed = [Action("backward_input", action.chunk, action.microbatch)]
    else:
        needed = [Action("forward", action.chunk, action.microbatch)]
        if action.chunk < chunks - 1:
            needed.append(Action(action.kind, action.chunk + 1, action.microbatch))
    times = [done.get(one) for one in needed]
    return None if None in times else max((time for time in times if time is not None), default=0.0)


def _send_on(action: Action, lists: list[list[Action]], chunks: int) -> None:
    stages, chunk, index = len(lists), action.chunk, action.microbatch
    if action.kind == "forward" and chunk < chunks - 1:
        lists[chunk % stages].append(Action("send_output", chunk, index))
        lists[(chunk + 1) % stages].append(Action("recv_input", chunk + 1, index))
    elif action.kind in ("backward", "backward_input") and chunk > 0:
        lists[chunk % stages].append(Action("send_gradient", chunk, index))
        lists[(chunk - 1) % stages].append(Action("recv_gradient", chunk - 1, index))


def bubble_share(spans: Sequence[Span]) -> float:
    """Return the part of all ranks' time in which they do not compute; ``(p - 1) / (m + p - 1)`` for even stages."""
    end = max(span.stop for span in spans)
    ranks = len({span.rank for span in spans})
    return 1.0 - sum(span.stop - span.start for span in spans) / (end * ranks)
