"""Collectives on flat tensors for the engine, with the bytes and seconds that they cost.

Note [One order of sums]
    On gloo a reduction is an exchange of chunks between every pair of ranks, after which each owner adds the chunks in
    rank order. So a sum does not depend on how parameters are cut into units, and the wire carries the ring's
    ``(N - 1) / N`` of the bytes (gloo's own reduce-scatter puts a whole all-reduce on it). NCCL reduces by itself.

Note [Groups along axes]
    Where ranks are a grid, a buffer is cut over a part of them, and the engine agrees with all of them. ``along`` makes
    a communicator of the part, whose calls, bytes and calls in flight count as the engine's, and which ends with it.

Note [Own groups]
    The engine never communicates on the default group: Lightning broadcasts on it in every batch. Gathers and
    reductions have a group each, so their order relative to one another is free; host-side agreements travel over gloo.

Note [Agreements name their topic]
    Ranks that run different code meet in agreements on different things, and gloo ends the process where one rank sends
    more than another one receives. So on the control group there is one message for everything: two int64, whose upper
    halves name the topic of the agreement, and whose lower halves are a number each. In the largest of all ranks the
    upper half of the first is another rank's for the ranks with a smaller one, and that of the second for those with a
    larger one: all see that they differ, and tell one another their topics. The flags of a backward, one per parameter,
    have a group to themselves. An exchange of tensors has a tag made of its name, its size and its number, so different
    ones never meet: they wait for the timeout.
"""

from __future__ import annotations

import time
import warnings
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from lightning_zero.comm.direct import backend_for
from lightning_zero.comm.groups import GroupSet, borrow
from lightning_zero.comm.peers import is_pretended, told_error
from lightning_zero.comm.traffic import Traffic
from lightning_zero.comm.waits import Call, Waits, lets_device_wait
from lightning_zero.config import Communication
from lightning_zero.errors import CollectiveError

__all__ = ["Communicator", "Pending", "as_bytes"]

_all_gather_flat: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_LARGEST = 2**32 - 1  # number in an agreement
_LARGEST_ADDRESS = 2**31 - 1
_HOW_RANKS_DIFFER = (
    "Ranks with different numbers of training batches meet like this, and ranks of which only some run a forward"
    " between two steps"
)
_PATIENCE_S = 10.0  # before a rank says that it waits
_SENT_AS_THEY_ARE = frozenset(
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int32, torch.int64]
)


class Pending:
    """A collective that may still be running.

    ``wait`` is the only way to finish it. Until then it keeps the tensors alive that the transport reads and writes,
    and the communicator keeps it: a transport whose call is dropped pairs the calls behind it wrongly.
    """

    def __init__(
        self,
        communicator: Communicator,
        what: str,
        works: Sequence[Any] = (),
        *,
        keep: Sequence[torch.Tensor] = (),
        finish: Callable[[], None] | None = None,
        call: Call | None = None,
    ) -> None:
        self._communicator = communicator
        self._what = what
        self._call = call  # that is measured; None: nothing was sent, or another object's
        self._works = list(works)
        self._keep = list(keep)
        self._finish = finish
        if self._works:
            communicator.running[self] = None

    def wait(self) -> None:
        """Return when the result may be used; calling it again does nothing.

        Raises:
            CollectiveError: A peer failed or did not join in time. Names the rank, the operation and the unit.
        """
        try:
            if self._call is None:
                self._await_works()
            else:
                with self._communicator._wait(self._call):
                    self._await_works()
        except (RuntimeError, ValueError) as error:
            self._end()
            raise self._communicator.failure(self._what, error) from None
        finish = self._finish
        self._end()
        if finish is not None:
            finish()
        self._keep.clear()

    def _await_works(self) -> None:
        while self._works:
            self._works[0].wait()
            del self._works[0]

    def _end(self) -> None:
        self._works.clear()
        self._call = None
        self._finish = None
        self._communicator.running.pop(self, None)


class _LateGather(Pending):
    """A gather whose shard is still being read."""

    def __init__(self, communicator: Communicator, full: torch.Tensor, fetch: Callable[[], None], what: str) -> None:
        super().__init__(communicator, what, keep=[full])
        self._full = full
        self._fetch = fetch
        self._gather: Pending | None = None

    @property
    def is_started(self) -> bool:
        """Whether the other ranks can go on."""
        return self._gather is not None

    def start(self) -> None:
        """Wait for the shard and start gathering."""
        self._fetch()
        numel = self._full.numel() // self._communicator.world_size
        own = self._full[self._communicator.rank * numel :][:numel]
        self._gather = self._communicator._gather_now(self._full, own, self._what)

    def wait(self) -> None:
        """Return when the result may be used; calling it again does nothing."""
        self._communicator._start_late(self)
        assert self._gather is not None
        self._gather.wait()


class Communicator:
    """The collectives of one sharding group.

    Call protocol (all ranks of the group, in the same order for each of the two groups):

    1. ``all_gather`` on the gather group, ``reduce_scatter`` on the reduce group; each returns a ``Pending``.
    2. ``broadcast``, ``all_reduce`` (blocking): set-up, buffers, norms; ``send`` and ``receive`` between two ranks.
    3. ``agree_on``, ``any_is``, ``agree_on_flags`` (blocking, host values, gloo): order of gathers, overflow, used
       parameters.

    Args:
        config: Backend and timeout.
        process_group: The ranks that share a model; the default group when None. Without an initialised process group
            the world is one rank and nothing is sent.
        device: Device of the tensors.
        ranks: Some of them, in ascending order; by default all.
    """

    def __init__(
        self,
        config: Communication,
        device: torch.device,
        process_group: dist.ProcessGroup | None = None,
        *,
        ranks: Sequence[int] | None = None,
    ) -> None:
        # - Who takes part
        self.world_size = 1
        self.rank = 0
        self.device = device
        self._groups: GroupSet | None = None  # None in a world of one rank, and when it is closed
        self.timeout_s = config.timeout_s
        self._backend = ""
        self._abandoned_for: str | None = None  # an error on this rank
        self._is_interrupted = False  # see `interrupt`
        self.running: dict[Pending, None] = {}  # nobody has waited for them, in the order in which they were started
        self._late: deque[_LateGather] = deque()  # in the order in which all ranks start them
        self._loan = 0  # of the groups
        self._config = config
        self._process_group = process_group
        self._own_ranks = [0]  # of the default group
        self._along: list[Communicator] = []  # over parts of the ranks
        # - Cost since the last reset
        self.traffic = Traffic()  # that of parts too
        self._is_across = False  # all peers are on other nodes
        self.waits = Waits(device)
        if dist.is_available() and dist.is_initialized():
            own = dist.get_process_group_ranks(process_group or dist.group.WORLD)
            self._borrow_groups(own if ranks is None else ranks)

    def among(self, ranks: Sequence[int], *, is_across: bool) -> Communicator:
        """Return a communicator over some of the ranks; otherwise as ``along``. Collective: these ranks.

        Args:
            ranks: In ascending order.
            is_across: Each is on another node.
        """
        part = self._adopt(Communicator(self._config, self.device, self._process_group, ranks=ranks))
        part._is_across = is_across
        return part

    def along(self, process_group: dist.ProcessGroup) -> Communicator:
        """Return a communicator over a part of the ranks. Collective: the ranks of ``process_group``.

        It ends with this one, and its calls are counted as this one's.
        """
        return self._adopt(Communicator(self._config, self.device, process_group))

    def _adopt(self, part: Communicator) -> Communicator:
        part.traffic, part.running = self.traffic, self.running
        self._along.append(part)
        return part

    @property
    def sent_bytes(self) -> Counter[str]:
        """Bytes that this rank has sent since the last reset, by kind; those of parts too."""
        return self.traffic.sent_bytes

    @property
    def across_nodes(self) -> Counter[str]:
        """Those of ``sent_bytes`` that went to other nodes, as far as that is known."""
        return self.traffic.across_nodes

    @property
    def calls(self) -> Counter[str]:
        """Calls since the last reset, by kind."""
        return self.traffic.calls

    @property
    def ranks(self) -> list[int]:
        """The ranks of the default group that take part, in the order of their ranks here."""
        return list(self._own_ranks)

    def _borrow_groups(self, ranks: Sequence[int]) -> None:
        self._own_ranks = list(ranks)
        self.world_size = len(ranks)
        self.rank = self._own_ranks.index(dist.get_rank())
        if self.world_size == 1:
            return
        transport = backend_for(self._process_group, self.device)
        self._backend = self._config.backend or transport
        kind = transport if is_pretended() else self._backend
        self._groups = borrow(self, self._own_ranks, kind, self.timeout_s)
        self._loan = self._groups.loan
        if lets_device_wait(self.device, self._backend):
            self.waits = Waits(self.device, [self._groups.gather, self._groups.reduce])

    @property
    def _has_no_peers(self) -> bool:
        """Whether the other ranks are pretended."""
        return bool(dist.get_backend(self.object_group) == "fake")

    @property
    def _gather_group(self) -> Any:
        return None if self._groups is None else self._groups.gather

    @property
    def _reduce_group(self) -> Any:
        return None if self._groups is None else self._groups.reduce

    @property
    def _flags_group(self) -> Any:
        return None if self._groups is None else self._groups.flags

    # -- Flat tensors ----------------------------------------------------------------------------------------------

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, what: str) -> Pending:
        """Fill ``full`` with the shards of all ranks.

        Collective: all ranks. No copy when ``shard`` already is its place in ``full``.

        Args:
            full: (numel,) contiguous.
            shard: (numel / world,) of the same dtype.
            what: Name of the call, for errors.
        """
        self._start_late()
        return self._gather_now(full, shard, what)

    def _gather_now(self, full: torch.Tensor, shard: torch.Tensor, what: str) -> Pending:
        lo = self.rank * shard.numel()
        own = full[lo : lo + shard.numel()]
        is_in_place = own.data_ptr() == shard.data_ptr()
        if self.world_size > 1:
            self._count("all_gather", shard.nbytes * (self.world_size - 1), f"all-gather of {what}")
        if self.world_size > 1 and self._backend == "gloo":
            sent = dict.fromkeys(self._peers(), shard)
            received = dict(zip(self._ranks(), full.chunk(self.world_size), strict=True))
            pending = self._exchange(sent, received, group=self._gather_group, what=f"all-gather of {what}")
            if not is_in_place:
                own.copy_(shard)  # while the exchange runs
            return pending
        if not is_in_place:
            own.copy_(shard, non_blocking=True)  # from page-locked memory; the stream orders it
        if self.world_size == 1:
            return Pending(self, what)
        work = _all_gather_flat(full, own, group=self._gather_group, async_op=True)
        call = self.waits.start(f"all-gather of {what}", self._gather_group)
        return Pending(self, call.what, [work], keep=[full], call=call)

    def all_gather_later(self, full: torch.Tensor, fetch: Callable[[], None], what: str) -> Pending:
        """Fill ``full`` with the shards of all ranks, of which this rank's is still being read.

        Collective: all ranks, in the order of the calls, whenever each rank is ready: at the next gather, or when the
        result is waited for.

        Args:
            full: (numel,) contiguous.
            fetch: Returns when this rank's place in ``full`` is filled.
            what: Name of the call, for errors.
        """
        if self.world_size == 1:
            return Pending(self, what, finish=fetch)
        late = _LateGather(self, full, fetch, what)
        self._late.append(late)
        return late

    def _start_late(self, last: _LateGather | None = None) -> None:
        """Start the gathers that wait for a read, in their order, up to ``last``."""
        while self._late and (last is None or not last.is_started):
            self._late.popleft().start()

    def reduce_scatter(
        self, shard: torch.Tensor, full: torch.Tensor, what: str, *, divisor: float | None = None
    ) -> Pending:
        """Add ``full`` over the ranks, divide, and write this rank's part into ``shard``.

        Collective: all ranks. 16-bit values are added in fp32 and rounded once (on gloo).

        Args:
            shard: (numel / world,); may be this rank's place in ``full``.
            full: (numel,) of the same dtype; its content is used up.
            what: Name of the call, for errors.
            divisor: Of the sums; by default the number of ranks, for their average.
        """
        own = full.chunk(self.world_size)[self.rank]
        divisor = self.world_size if divisor is None else divisor
        if self.world_size == 1:
            if own.data_ptr() != shard.data_ptr():
                shard.copy_(own)
            if divisor != 1:
                shard.div_(divisor)
            return Pending(self, what)
        self._count("reduce_scatter", own.nbytes * (self.world_size - 1), f"reduce-scatter of {what}")
        if self._backend == "gloo":
            received = {peer: torch.empty_like(own) for peer in self._peers()}
            chunks = dict(zip(self._ranks(), full.chunk(self.world_size), strict=True))
            sent = {peer: chunks[peer] for peer in self._peers()}
            return self._exchange(
                sent,
                received,
                group=self._reduce_group,
                what=f"reduce-scatter of {what}",
                then=lambda: _divided_sum_in_rank_order(shard, {**received, self.rank: own}, divisor),
            )
        if full.is_complex():  # no dtype of NCCL
            shard, full = torch.view_as_real(shard).view(-1), torch.view_as_real(full).view(-1)
        work = _reduce_scatter_flat(
            shard, full, op=_divided_sum(full, self.world_size, divisor), group=self._reduce_group, async_op=True
        )
        call = self.waits.start(f"reduce-scatter of {what}", self._reduce_group)
        return Pending(self, call.what, [work], keep=[full, shard], call=call)

    def _exchange(
        self,
        sent: dict[int, torch.Tensor],
        received: dict[int, torch.Tensor],
        *,
        group: Any,
        what: str,
        then: Callable[[], None] | None = None,
    ) -> Pending:
        """Send a tensor to every peer and receive one from each (gloo)."""
        assert self._groups is not None
        self._groups.tags[id(group)] += 1  # ranks agree on the order within a group only
        nbytes = next(iter(sent.values())).nbytes
        tag = zlib.crc32(f"{self._loan} {self._groups.tags[id(group)]} {nbytes} {what}".encode()) & _LARGEST_ADDRESS
        staged = self.device.type != "cpu"  # gloo's point-to-point calls take host memory only
        outgoing = {tensor.data_ptr(): tensor.cpu() for tensor in sent.values()} if staged else {}
        incoming = {
            peer: torch.empty(received[peer].shape, dtype=received[peer].dtype, device="cpu") for peer in sent if staged
        }
        works = []
        try:
            for peer, tensor in sent.items():
                host = outgoing.get(tensor.data_ptr(), tensor)
                works.append(dist.isend(host, group=group, tag=tag, group_dst=peer))
                works.append(dist.irecv(incoming.get(peer, received[peer]), group=group, tag=tag, group_src=peer))
        except (RuntimeError, ValueError) as error:
            raise self.failure(what, error) from None

        def finish() -> None:
            for peer, host in incoming.items():
                received[peer].copy_(host)
            if then is not None:
                then()

        keep = [*sent.values(), *received.values(), *outgoing.values(), *incoming.values()]
        return Pending(self, what, works, keep=keep, finish=finish, call=self.waits.start(what, group))

    # -- Set-up, buffers, norms ------------------------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, what: str, source: int = 0) -> None:
        """Overwrite ``tensor`` with the values of rank ``source``. Collective: all ranks; returns when it is done."""
        if self.world_size == 1:
            return
        self._count("broadcast", tensor.nbytes, f"broadcast of {what}")
        with self._waiting(f"broadcast of {what}", self._reduce_group):
            dist.broadcast(as_bytes(tensor), group=self._reduce_group, group_src=source)

    def all_reduce(
        self, tensor: torch.Tensor, what: str, op: Any = dist.ReduceOp.SUM, kind: str = "control"
    ) -> torch.Tensor:
        """Reduce ``tensor`` in place and return it; its bytes count as ``kind``. Collective: all ranks."""
        if self.world_size == 1:
            return tensor
        self._count(kind, tensor.nbytes, f"all-reduce of {what}")
        with self._waiting(f"all-reduce of {what}", self._reduce_group):
            dist.all_reduce(tensor, op=op, group=self._reduce_group)
        return tensor

    def send(self, tensor: torch.Tensor, peer: int, what: str) -> None:
        """Send ``tensor`` to one rank; returns when it may be overwritten."""
        self._count("send", tensor.nbytes, f"sending of {what}")
        staged = tensor.cpu() if self._backend == "gloo" else tensor
        with self._waiting(f"sending of {what}", self._reduce_group):
            dist.send(staged, group=self._reduce_group, group_dst=peer)

    def receive(self, tensor: torch.Tensor, peer: int, what: str) -> None:
        """Overwrite ``tensor`` with one from another rank; returns when it is there."""
        staged = tensor.cpu() if self._backend == "gloo" else tensor
        self.traffic.expect(f"receiving of {what}", ranks=[self._own_ranks[peer], self._own_ranks[self.rank]])
        with self._waiting(f"receiving of {what}", self._reduce_group):
            dist.recv(staged, group=self._reduce_group, group_src=peer)
        if staged is not tensor:
            tensor.copy_(staged)

    def agree_on(self, numbers: Sequence[int], what: str) -> list[int]:
        """Return the largest numbers of all ranks. Collective: all ranks, over gloo whatever the backend.

        Args:
            numbers: From 0 to 2**32 - 1, as many on every rank; two at a time are sent in one message.
            what: Name of the call, for errors; the same on every rank up to an end in brackets.

        Raises:
            CollectiveError: A peer did not come in time, or came for another call.
        """
        if self.world_size == 1:
            return list(numbers)
        agreed: list[int] = []
        for place in range(0, len(numbers), 2):
            agreed += self._agree_on_pair(numbers[place], *numbers[place + 1 : place + 2], what=what)
        return agreed[: len(numbers)]

    def any_is(self, flag: bool, what: str) -> bool:
        """Say whether a flag is set on some rank; see ``agree_on``. Collective: all ranks."""
        return bool(self.agree_on([flag], what)[0])

    def _agree_on_pair(self, first: int, second: int = 0, *, what: str) -> tuple[int, int]:
        address = zlib.crc32(_topic(what).encode(), self._loan) & _LARGEST_ADDRESS
        opposite = _LARGEST_ADDRESS - address
        with torch.inference_mode(False):
            message = torch.tensor([address << 32 | first, opposite << 32 | second], dtype=torch.int64, device="cpu")
        self._count("control", message.nbytes, what)
        with self._waiting(what, self.control_group):
            dist.all_reduce(message, op=dist.ReduceOp.MAX, group=self.control_group)
        first, second = message.tolist()
        if (first >> 32, second >> 32) != (address, opposite):
            self._refuse_others(what)
        return first & _LARGEST, second & _LARGEST

    def _refuse_others(self, what: str) -> None:
        """Raise an error that names the agreements the other ranks came for. Collective: all ranks."""
        self.gather_objects(None, what)
        raise self.failure(what, "another rank came for something else")

    def agree_on_flags(self, flags: torch.Tensor, what: str) -> torch.Tensor:
        """Set each flag that is set on some rank, in place. Collective: all ranks, over gloo whatever the backend.

        For one agreement only, because other flags on the same group could be more: see the note.

        Args:
            flags: (num_flags,) uint8, as many on every rank.
            what: Name of the call, for errors.
        """
        if self.world_size == 1:
            return flags
        self._count("control", flags.nbytes, what)
        with self._waiting(what, self._flags_group):
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._flags_group)
        return flags

    def agree_later(self, values: torch.Tensor, what: str, op: Any = dist.ReduceOp.MAX) -> Pending:
        """Start reducing host values over the ranks, in place. Collective: all ranks, in one order of these calls."""
        if self.world_size == 1:
            return Pending(self, what)
        self._count("control", values.nbytes, what)
        try:
            work = dist.all_reduce(values, op=op, group=self.promise_group, async_op=True)
        except (RuntimeError, ValueError) as error:
            raise self.failure(what, error) from None
        return Pending(self, what, [work], keep=[values], call=self.waits.start(what, self.promise_group))

    def meet(self, number: int, what: str) -> None:
        """Return when all ranks have come for the same thing. Collective: all ranks, over gloo whatever the backend.

        Nobody else's call fits into it, so a rank that comes alone does no harm, and says so while it waits.

        Raises:
            CollectiveError: A peer did not come in time, or came for something else.
        """
        if self.world_size == 1:
            return
        values = torch.tensor([number, -number], device="cpu")
        self._count("control", values.nbytes, what)
        with self._waiting(what, self.object_group):
            work = dist.all_reduce(values, op=dist.ReduceOp.MIN, group=self.object_group, async_op=True)
            self._await_peers(work, what)
            work.wait()
        if values[0] != -values[1]:
            raise self.failure(what, "another rank reads something else")

    def _await_peers(self, work: Any, what: str) -> None:
        """Return when a call is done; tell after a while that the other ranks have not come."""
        started, pause_s, is_told = time.perf_counter(), 1e-4, False
        while not work.is_completed():
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
            if not is_told and time.perf_counter() - started > _PATIENCE_S:
                is_told = True
                warnings.warn(
                    f"rank {self.rank} of {self.world_size} has waited {_PATIENCE_S:.0f} s for the other ranks: the"
                    f" {what} outside a step gathers values of all ranks. Every rank must read it. Code for one rank"
                    " belongs inside `with lightning_zero.gathered(module):`, which every rank enters.",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def gather_objects(self, value: Any, what: str, group: Any = None) -> list[Any]:
        """Return the objects of all ranks, in rank order. Collective: all ranks, over gloo whatever the backend.

        Args:
            value: Of this rank.
            what: Name of the call, for errors; the same on every rank up to an end in brackets.
            group: By default the one for objects.

        Raises:
            CollectiveError: A peer did not come in time, or came for another call.
        """
        if self.world_size == 1 or self._has_no_peers:
            return [value] * self.world_size
        found: list[Any] = [None] * self.world_size
        # Over a group that is given, a thread saves: nothing of the step waits for it.
        with self._waiting(what, self.object_group) if group is None else self._named(what):
            dist.all_gather_object(found, (what, value), group=self.object_group if group is None else group)
        others = {rank: other for rank, (other, _) in enumerate(found) if _topic(other) != _topic(what)}
        if others:
            came = ", ".join(f"rank {rank} came for the {other}" for rank, other in others.items())
            raise self.failure(what, f"{came}. {_HOW_RANKS_DIFFER}")
        return [other for _, other in found]

    # -- Bookkeeping -----------------------------------------------------------------------------------------------

    @contextmanager
    def _waiting(self, what: str, group: Any) -> Iterator[None]:
        """Measure a call that returns when it is done, and name it in errors."""
        with self._named(what), self._wait(self.waits.start(what, group)):
            yield

    @contextmanager
    def _wait(self, call: Call) -> Iterator[None]:
        """Measure the wait for a call."""
        with self.waits.wait(call):
            yield
        self.traffic.end(call.what)

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Name a call in errors."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise self.failure(what, error) from None

    @property
    def wait_s(self) -> float:
        """Seconds that this rank has waited for collectives: the host, and over NCCL the device."""
        return sum(one.waits.seconds for one in (self, *self._along))

    def failure(self, what: str, reason: Exception | str) -> CollectiveError:
        """Return the error to raise when a collective failed; its groups are not used again.

        Args:
            what: Name of the call.
            reason: The cause, or the transport's error, which is left out where another rank has told the cause.
        """
        self.distrust()
        start = f"rank {self.rank} of {self.world_size}: the {what} failed"
        if isinstance(reason, Exception) and (told := told_error()):
            return CollectiveError(f"{start}.{told}")
        return CollectiveError(
            f"{start}: {reason}. A peer has stopped, runs"
            " other code, or was slower than `timeout`: the first error of the other ranks says which. Every rank must"
            " make the same calls; code that only some ranks run belongs inside `lightning_zero.gathered(module)`. A"
            " collective of your own (`dist.all_reduce`) inside a step needs ranks that have used the same modules"
            " before it; call it after the step, or that of the strategy (`strategy.reduce`, `self.all_gather`)."
        )

    @property
    def control_group(self) -> Any:
        """The gloo group for values in host memory; None in a world of one rank."""
        return None if self._groups is None else self._groups.control

    @property
    def background_group(self) -> Any:
        """The gloo group for a thread that saves while the others' calls go on; None in a world of one rank.

        Collective at its first use: all ranks.
        """
        return None if self._groups is None else self._groups.background

    @property
    def promise_group(self) -> Any:
        """The gloo group for agreements that run beside others; None in a world of one rank.

        Collective at its first use: all ranks.
        """
        return None if self._groups is None else self._groups.promises

    @property
    def object_group(self) -> Any:
        """The gloo group for objects and for calls of the user; None in a world of one rank.

        A rank that makes such a call alone must not meet another rank's agreement on the control group.
        """
        return None if self._groups is None else self._groups.objects

    def reset_stats(self) -> None:
        """Start counting anew."""
        self.traffic.reset()
        for one in (self, *self._along):
            one.waits.reset()

    def abandon(self, cause: str) -> None:
        """End all calls that peers wait in with an error there: this rank is about to raise one.

        No collective. Over NCCL the calls on device memory end with this rank's process.

        Args:
            cause: The error, in words.
        """
        for part in self._along:
            part.abandon(cause)
        if self._groups is not None:
            self._groups.destroy()
        self.close()
        self._abandoned_for = cause

    def distrust(self) -> None:
        """Mark the groups as broken, so that they are not lent again: a call on them has failed."""
        if self._groups is not None:
            self._groups.is_broken = True

    def interrupt(self) -> None:
        """Keep the groups from being lent until ``settle``: calls of an interrupted step may be in flight."""
        for part in self._along:
            part.interrupt()
        if self._groups is not None and not self._is_interrupted:
            self._is_interrupted = True
            self._groups.num_interrupted += 1

    def settle(self) -> None:
        """Wait for the calls of interrupted steps. Collective: all ranks have come behind them."""
        for pending in list(self.running):
            pending.wait()
        for part in self._along:
            part.settle()
        if self._groups is not None and self._is_interrupted:
            self._is_interrupted = False
            self._groups.num_interrupted -= 1

    def close(self) -> None:
        """Let other communicators use the groups. No collective."""
        for part in self._along:
            part.close()
        self._along.clear()
        if self._groups is not None:
            self._groups.leave(self)
            self._groups = None
            self.waits.close()

    def _count(self, kind: str, sent_bytes: int, what: str) -> None:
        """Count a call that is about to be made, unless the groups are of no use any more."""
        if self._abandoned_for is not None:
            raise CollectiveError(f"rank {self.rank} of {self.world_size} has left after {self._abandoned_for}.")
        failure = self.waits.failure()
        if failure is not None:
            raise self.failure(failure.what, RuntimeError(failure.reason))
        self.traffic.add(kind, what, sent_bytes, ranks=self._own_ranks, is_across=self._is_across)

    def _ranks(self) -> range:
        return range(self.world_size)

    def _peers(self) -> list[int]:
        return [(self.rank + step) % self.world_size for step in range(1, self.world_size)]


def _topic(what: str) -> str:
    """Return the topic of an agreement, without this rank's own details."""
    return what.partition(" (")[0]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view that every transport takes: few dtypes are known to all of them."""
    return tensor if tensor.dtype in _SENT_AS_THEY_ARE else tensor.view(-1).view(torch.uint8)


def _divided_sum(full: torch.Tensor, world_size: int, divisor: float) -> Any:
    if full.dtype == torch.float16 or divisor != world_size:  # in 16 bits the sum may overflow before it is divided
        return dist._make_nccl_premul_sum(1.0 / divisor)  # type: ignore[attr-defined]
    return dist.ReduceOp.AVG


def _divided_sum_in_rank_order(out: torch.Tensor, chunks: dict[int, torch.Tensor], divisor: float) -> None:
    """Write ``(chunks[0] + chunks[1] + …) / divisor`` into ``out``, which may be one of the chunks.

    The chunks of the ranks before ``out``'s own serve as the accumulator, so nothing is overwritten before it is read.
    """
    world_size = len(chunks)
    if out.dtype.itemsize < 4:
        total = chunks[0].float()
        for rank in range(1, world_size):
            total += chunks[rank]
        out.copy_(total.div_(divisor))
        return
    aliased = next((rank for rank, chunk in chunks.items() if chunk.data_ptr() == out.data_ptr()), 0)
    accumulator = chunks[0] if aliased > 0 else out
    if aliased == 0 and out.data_ptr() != chunks[0].data_ptr():
        torch.add(chunks[0], chunks[1], out=out)
        first = 2
    else:
        first = 1
    for rank in range(first, world_size):
        target = out if rank >= aliased else accumulator
        torch.add(accumulator, chunks[rank], out=target)
        accumulator = target
    out.div_(divisor)
