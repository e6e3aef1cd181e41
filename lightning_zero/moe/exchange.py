"""Tokens on their way to the ranks of their experts, and results on their way back.

Note [Four exchanges]
    ``send_rows`` tells the ranks how many rows come from each other rank for each expert, and sends the rows; ``Sent``
    lets the local experts compute what has arrived, and sends the results back; the backward sends gradients along the
    same ways. The host waits once, for the numbers of rows. Rows arrive by rank, in each by expert, and are permuted
    into the order of experts.

    Every rank makes every exchange, in the forward and in the backward, also without a row to send: an exchange of no
    rows is in the graph as any other. Before each of them it *meets* the other ranks (``ZeroEngine.meet``). Checkpoints
    of activations repeat the exchanges of a forward inside of the backward, in the same order on all ranks.

Note [On their way]
    Rows are read by ``Sent.compute`` first, so the caller may compute something else before: the exchange is two nodes
    of the graph, ``_Send`` and ``_Receive``. In the backward ``_Receive`` starts the exchange of gradients, and
    ``_Send`` waits for it; between them the gradients are in the ``_Route``, because their shape is that of the rows
    before the exchange. PyTorch runs the latest node of those that are ready, so nodes that were made between both run
    between both in the backward too.

    An error between both leaves a transfer that nobody waits for, and so does a recomputation that ends there because
    it has what it needs. gloo would stop reading if a message came for a tensor that is gone. So the ranks keep the
    transfer, and wait for it before the next one.

Note [Padded rows]
    With ``room`` every rank sends as many rows to every expert, of which the last ones are zeros. Sizes are known on
    the host then, and nobody waits for a device; numbers of rows travel all the same, and stay on it. Rows that have
    arrived are moved together, so zeros come behind the rows of all experts, where they count in nothing, as rows that
    were dropped do.

Note [Pretended ranks]
    In a forecast or a simulation there are no other ranks and no values, so nobody knows which experts tokens choose.
    Rows are taken as spread evenly: those of this rank over all experts, and those of the others as well.

Note [The same call]
    With the numbers of rows the ranks compare the call: the layer, the dtype of rows, whether there is a graph, whether
    a backward computes it again, and the room. Ranks that run different layers, or one of them without gradients, would
    exchange rows of different layers in silence, or wait in the backward for ever. The comparison of padded rows runs
    on the device, in front of their exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from lightning_zero.comm import direct
from lightning_zero.comm.peers import is_pretended, told_error
from lightning_zero.comm.traffic import Traffic
from lightning_zero.errors import CollectiveError
from lightning_zero.storage.copies import WorkStream, keep_for_stream
from lightning_zero_ops import permute_tokens

__all__ = ["ExpertRanks", "SentRows", "compute_on_ranks", "send_rows"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_BASES = (len(_DTYPES), 2, 2, 2)  # of a call: dtype, whether gradients are on, rows have one, and a backward runs
_NUM_FACTS = 2  # the layer with those, in one number, and the room

Compute = Callable[[Tensor, Tensor], Tensor]


class ExpertRanks:
    """The ranks over which experts are divided, as one of them sees them. Copies of a module share it.

    Args:
        group: These ranks, all of which have different batches; all ranks when None.
        meet: Called before each exchange, on every rank: that of the engine which shards the module.

    Attributes:
        rank: This rank in the group.
        size: Number of ranks.
        traffic: Counts exchanges; that of the engine which shards the module.
        transport: As in ``direct.is_direct``.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, meet: Callable[[], None] = lambda: None) -> None:
        self.group = group
        self.meet = meet
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.traffic = Traffic()
        self.transport: str | None = None
        self._last: _Transfer | None = None  # that was started; see Note [On their way]

    def __deepcopy__(self, memo: Any) -> ExpertRanks:
        return self

    def move(self, group: dist.ProcessGroup) -> None:
        """Make exchanges over the group of another run, which has the same number of ranks. No collective."""
        if group is not self.group:
            self._last = None
        self.group = group

    def settle(self) -> None:
        """Wait for a transfer that nobody has waited for. All ranks of the group have started it.

        Raises:
            CollectiveError: A rank of the group did not come in time, or has failed.
        """
        if self._last is not None:
            self._last.wait()

    def broadcast(self, tensor: Tensor) -> None:
        """Give all ranks the first one's values. Collective: all ranks of the group."""
        dist.broadcast(tensor, group=self.group, group_src=0)

    def exchange(self, rows: Tensor, send: Sequence[int], receive: Sequence[int], what: str = "") -> Tensor:
        """Return the rows that the ranks have for this one, in rank order. Collective: all ranks of the engine.

        Args:
            rows: (sum of ``send``, ...).
            send: How many rows go to each rank.
            receive: How many come from each.
            what: Name of the call, for errors.

        Raises:
            CollectiveError: A rank of the group did not come in time, or has failed.
        """
        result, transfer = self.start(rows, send, receive, what)
        transfer.wait()
        return result

    def start(
        self, rows: Tensor, send: Sequence[int], receive: Sequence[int], what: str = ""
    ) -> tuple[Tensor, _Transfer]:
        """Return the rows of ``exchange`` before they have arrived, and their transfer. Collective likewise."""
        self.settle()
        self.meet()
        rows = rows.detach().contiguous()
        what = what or f"exchange of {len(rows)} rows between experts"
        sent_bytes = (len(rows) - send[self.rank]) * (rows.nbytes // max(len(rows), 1))
        ranks = dist.get_process_group_ranks(self.group or dist.group.WORLD)
        self.traffic.add("experts", what, sent_bytes, ranks=ranks, is_across=False)
        with self._named(what):
            if direct.is_direct(rows, self.group, self.transport):
                result, works = direct.start_all_to_all(rows, send, receive, self.group)
            else:
                result = rows.new_empty(sum(receive), *rows.shape[1:])
                sizes = list(receive), list(send)
                works = [dist.all_to_all_single(result, rows, *sizes, group=self.group, async_op=True)]
        self._last = _Transfer(self, what, works, result.device)
        return result, self._last

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            start = f"Expert rank {self.rank} of {self.size} (rank {dist.get_rank()}): the {what} failed"
            if told := told_error():
                raise CollectiveError(f"{start}.{told}") from None
            raise CollectiveError(
                f"{start}: {error}. A rank of the group has stopped, runs other layers, or was slower than `timeout`:"
                " the first error of the other ranks says which. All ranks must run every layer with experts, in every"
                " forward and backward, also without tokens."
            ) from None


class _Transfer:
    """An exchange that has been started.

    Args:
        ranks: Make it.
        what: Name of the call.
        works: Its parts.
        device: Of the rows.
    """

    def __init__(self, ranks: ExpertRanks, what: str, works: Sequence[dist.Work], device: torch.device) -> None:
        self._ranks = ranks
        self._what = what
        self._works: Sequence[dist.Work] | None = works  # None: waited for
        self._stream = WorkStream(device)  # that of the start: the memory of the rows is used in it

    def wait(self) -> None:
        """Wait: on a GPU the current stream does, and not the host. Collective calls are waited for once.

        Raises:
            CollectiveError: A rank of the group did not come in time, or has failed.
        """
        works, self._works = self._works, None
        if works is not None:
            self._stream.run(self._await, works)
        self._stream.enter()

    def _await(self, works: Sequence[dist.Work]) -> None:
        with self._ranks._named(self._what):
            for work in works:
                work.wait()
        self._ranks.traffic.end(self._what)


# -- Rows of a layer ---------------------------------------------------------------------------------------------------


class SentRows(Protocol):
    """Rows that have been sent to the ranks of their experts."""

    def compute(self, compute: Compute) -> Tensor:
        """Compute each row on the rank of its expert. Collective: all ranks of the engine.

        Args:
            compute: The experts of this rank, by rows (R, H) and offsets (E / ranks,).

        Returns:
            (M, H) in the order in which the rows were sent; rows that belong to no expert are zeros.

        Raises:
            CollectiveError: A rank has failed.
        """


def compute_on_ranks(
    rows: Tensor, offsets: Tensor, *, compute: Compute, ranks: ExpertRanks, layer: int, room: int | None = None
) -> Tensor:
    """Send rows, and compute each on the rank of its expert: see ``send_rows`` and ``SentRows``."""
    sent: SentRows = send_rows(rows, offsets, ranks=ranks, layer=layer, room=room)
    return sent.compute(compute)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def send_rows(rows: Tensor, offsets: Tensor, *, ranks: ExpertRanks, layer: int, room: int | None = None) -> SentRows:
    """Send each row to the rank of its expert. Collective: all ranks of the engine.

    Args:
        rows: (M, H), sorted by expert.
        offsets: (E,) int32: where the rows of each expert end.
        ranks: Have different experts, as many each, in order.
        layer: Number of the layer in its module.
        room: Rows that each rank sends to each expert, of which no one has more; None: as many as there are. See
            Note [Padded rows].

    Raises:
        CollectiveError: A rank has failed, or runs something else.
    """
    if isinstance(rows, FakeTensor):  # of another pipeline stage, whose shapes are asked for
        return _Unsent(rows, offsets[: len(offsets) // ranks.size])
    if is_pretended():
        offsets = _even(offsets, len(rows))
    mine = _message(rows, offsets, ranks=ranks, layer=layer, room=room)
    theirs = _exchange_numbers(mine, ranks)
    if room is not None:
        return _send_padded(rows, (mine, theirs), ranks=ranks, room=room)
    sent, received = torch.stack([mine, theirs]).tolist()  # the one wait of the host
    _compare([message[:_NUM_FACTS] for message in received], ranks)
    send, receive = ([sum(message[_NUM_FACTS:]) for message in messages] for messages in (sent, received))
    used = rows if len(rows) == sum(send) else rows[: sum(send)]
    route = _Route(ranks, send, receive)
    return _Sent(_send(used, route), route, _by_expert(theirs[:, _NUM_FACTS:], sum(receive)), _Tail(len(rows)))


def _send_padded(rows: Tensor, messages: tuple[Tensor, Tensor], *, ranks: ExpertRanks, room: int) -> _Sent:
    mine, theirs = messages
    facts = theirs[:, :_NUM_FACTS]
    if theirs.is_cpu:
        _compare(facts.tolist(), ranks)
    else:
        torch._assert_async(
            (facts == facts[0]).all(),
            "The ranks of `expert_parallel` that exchange tokens run different calls of layers with experts: another"
            " layer, precision, `pad_to_tokens`, mode (training, evaluation), or without gradients. Let all run the"
            " same layers in the same order, also without tokens.",
        )
    counts = mine[:, _NUM_FACTS:].reshape(-1)
    padding = _Padding.of(counts, counts.cumsum(0) - counts, room, len(rows))
    number = theirs.shape[1] - _NUM_FACTS
    route = _Route(ranks, [number * room] * ranks.size, [number * room] * ranks.size)
    arriving = _send(padding.put(rows), route)
    found = theirs[:, _NUM_FACTS:]
    by_expert = found.t().reshape(-1)
    starts = (by_expert.cumsum(0) - by_expert).view(number, -1).t()
    packing = _Padding.of(found.reshape(-1), starts.reshape(-1), room, len(arriving))
    ends = found.sum(0).cumsum(0).int()
    return _Sent(arriving, route, _Order(packing.rows, packing.slots, ends), padding)


@dataclass(frozen=True)
class _Order:
    """The order by expert of rows that have arrived by rank and expert.

    Args:
        order: (R,) the rows in the order of experts, in each by rank; -1 for none.
        places: (R,) the place of each row there; -1 for none.
        ends: (n,) int32 where the rows of each expert end.
    """

    order: Tensor
    places: Tensor
    ends: Tensor


@dataclass(frozen=True)
class _Tail:
    """Rows that belong to no expert, behind those that were sent.

    Args:
        num_rows: Of all.
    """

    num_rows: int

    def take(self, returned: Tensor) -> Tensor:
        """Return the results of all rows."""
        missing = self.num_rows - len(returned)
        return F.pad(returned, (0, 0, 0, missing)) if missing else returned


@dataclass(frozen=True)
class _Padding:
    """Places in groups of one size of rows that are one behind the other, and the reverse; -1 stands for none.

    Args:
        slots: (groups x room,) the row of each place.
        rows: (M,) the place of each row.
    """

    slots: Tensor
    rows: Tensor

    @classmethod
    def of(cls, counts: Tensor, starts: Tensor, room: int, num_rows: int) -> _Padding:
        """Return those of groups with numbers of rows, and where these start. Nobody waits for a device.

        Args:
            counts: (groups,) int64, at most ``room`` each.
            starts: (groups,) int64.
            room: Places of a group.
            num_rows: M, at least the sum of ``counts``.
        """
        places = torch.arange(room, device=counts.device)
        is_row = places < counts.unsqueeze(1)
        row = torch.where(is_row, starts.unsqueeze(1) + places, num_rows).view(-1)  # the last one is that of no row
        numbers = torch.arange(len(row), device=row.device)
        rows = torch.full((num_rows + 1,), -1, dtype=torch.int64, device=row.device).scatter_(0, row, numbers)
        return cls(torch.where(is_row.view(-1), row, -1), rows[:num_rows])

    def put(self, rows: Tensor) -> Tensor:
        """Return rows (M, H) at their places, zeros at others."""
        return permute_tokens(rows, self.slots, self.rows.unsqueeze(1))

    def take(self, returned: Tensor) -> Tensor:
        """Return the rows at the places, zeros for those without one."""
        return permute_tokens(returned, self.rows, self.slots.unsqueeze(1))


class _Sent:
    """Rows on their way; see Note [On their way].

    Args:
        arriving: (R, H) which nobody has waited for.
        route: Along which they are sent.
        order: Of rows that arrive.
        origin: Takes results that have come back.
    """

    def __init__(self, arriving: Tensor, route: _Route, order: _Order, origin: _Tail | _Padding) -> None:
        self._arriving = arriving
        self._route = route
        self._order = order
        self._origin = origin

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def compute(self, compute: Compute) -> Tensor:
        """See ``SentRows``."""
        order, places, ends = self._order.order, self._order.places, self._order.ends
        arrived = _receive(self._arriving, self._route)
        results = compute(permute_tokens(arrived, order, places.unsqueeze(1)), ends)
        back = self._route.mirrored()
        returned = _send(permute_tokens(results, places, order.unsqueeze(1)), back)
        return self._origin.take(_receive(returned, back))


class _Unsent:
    """Rows without values, which stay where they are.

    Args:
        rows: (M, H).
        offsets: Of as many experts as this rank has.
    """

    def __init__(self, rows: Tensor, offsets: Tensor) -> None:
        self._rows = rows
        self._offsets = offsets

    def compute(self, compute: Compute) -> Tensor:
        """Compute all rows here."""
        return compute(self._rows, self._offsets)


def _message(rows: Tensor, offsets: Tensor, *, ranks: ExpertRanks, layer: int, room: int | None) -> Tensor:
    """Return the messages to all ranks: (ranks, facts and E / ranks) int64, the call and the numbers of rows."""
    in_backward = torch._C._current_graph_task_id() != -1
    call = layer
    facts = (_DTYPES.index(rows.dtype), torch.is_grad_enabled(), rows.requires_grad, in_backward)
    for fact, base in zip(facts, _BASES, strict=True):
        call = call * base + int(fact)
    ends = offsets.long()
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).view(ranks.size, -1)
    # Numbers are filled in on the device: a copy of them from the host would wait for it.
    told = [counts.new_full((ranks.size, 1), number) for number in (call, -1 if room is None else room)]
    return torch.cat([*told, counts], 1)


def _exchange_numbers(mine: Tensor, ranks: ExpertRanks) -> Tensor:
    """Return the messages of all ranks for this one. Collective: all ranks of the engine."""
    each = [1] * ranks.size
    theirs = ranks.exchange(mine, each, each, "exchange of numbers of rows between experts")
    return mine[ranks.rank].expand_as(mine) if is_pretended() else theirs


def _even(offsets: Tensor, num_rows: int) -> Tensor:
    """Return offsets of as many experts, which have the same number of rows each, or one more."""
    ends = torch.arange(1, len(offsets) + 1, device=offsets.device) * num_rows // len(offsets)
    return ends.to(offsets.dtype)


def _call_in_words(call: int, room: int) -> str:
    facts = []
    for base in reversed(_BASES):
        call, fact = divmod(call, base)
        facts.append(fact)
    in_backward, has_graph, is_on, dtype = facts
    return (
        f"is at layer {call} with rows of {_DTYPES[dtype]}, gradients {'on' if is_on else 'off'},"
        f" rows {'with' if has_graph else 'without'} a graph{', in a backward' if in_backward else ''}"
        f"{'' if room < 0 else f', room for {room} rows of an expert'}"
    )


def _compare(facts: Sequence[Sequence[int]], ranks: ExpertRanks) -> None:
    """Refuse calls that differ; see Note [The same call].

    Raises:
        CollectiveError: The same on all ranks of the group.
    """
    if all(one == facts[0] for one in facts):
        return
    listed = "; ".join(f"expert rank {rank} {_call_in_words(*one)}" for rank, one in enumerate(facts))
    raise CollectiveError(
        f"The ranks that exchange tokens with rank {dist.get_rank()} run different calls of layers with experts:"
        f" {listed}. Let all ranks run the same layers in the same order, also without tokens, with the same precision"
        " and gradients."
    )


def _by_expert(counts: Tensor, num_rows: int) -> _Order:
    """Return the order by expert of rows that have arrived by rank and expert. Nobody waits for a device.

    Args:
        counts: (ranks, n) int64: rows from each rank for each expert.
        num_rows: R, their sum.
    """
    num_ranks, num_experts = counts.shape
    experts = torch.arange(num_experts, device=counts.device).repeat(num_ranks)
    order = experts.repeat_interleave(counts.reshape(-1), output_size=num_rows).argsort(stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(num_rows, device=order.device))
    return _Order(order, places, counts.sum(0).cumsum(0).int())


# -- In the graph ------------------------------------------------------------------------------------------------------


class _Route:
    """One exchange: numbers of rows, and its state between ``_Send`` and ``_Receive``.

    Args:
        ranks: Make it.
        send: How many rows go to each rank.
        receive: How many come from each.

    Attributes:
        returning: Gradients that have been sent in a backward, and their route.
    """

    def __init__(self, ranks: ExpertRanks, send: Sequence[int], receive: Sequence[int]) -> None:
        self.returning: tuple[Tensor, _Route] | None = None
        self._ranks = ranks
        self._send = send
        self._receive = receive
        self._transfer: _Transfer | None = None  # which nobody has waited for

    def mirrored(self) -> _Route:
        """Return the way back."""
        return _Route(self._ranks, self._receive, self._send)

    def start(self, rows: Tensor) -> Tensor:
        """Return the rows that will have arrived at ``finish``. Collective: all ranks of the engine."""
        result, self._transfer = self._ranks.start(rows, self._send, self._receive)
        return result

    def finish(self) -> None:
        """Wait for the rows."""
        transfer, self._transfer = self._transfer, None
        assert transfer is not None
        transfer.wait()


def _send(rows: Tensor, route: _Route) -> Tensor:
    result: Tensor = _Send.apply(rows, route)  # type: ignore[no-untyped-call]
    return result


def _receive(rows: Tensor, route: _Route) -> Tensor:
    result: Tensor = _Receive.apply(rows, route)  # type: ignore[no-untyped-call]
    return result


class _Send(torch.autograd.Function):
    """Rows on their way to the ranks; its backward waits for gradients on their way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: _Route) -> Tensor:
        ctx.route = route
        return route.start(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        returning, ctx.route.returning = ctx.route.returning, None
        return _receive(*returning), None


class _Receive(torch.autograd.Function):
    """Rows that have arrived; its backward sends their gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: _Route) -> Tensor:
        ctx.route = route
        route.finish()
        keep_for_stream(rows)
        return rows.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        back = ctx.route.mirrored()
        ctx.route.returning = _send(grads[0], back), back
        return grads[0].detach(), None  # which ``_Send`` does not look at
