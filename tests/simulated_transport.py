"""Collectives between simulated devices: they run in a stream of their group, as late as anybody lets them.

Note [How]
    As with NCCL, a collective is put into the stream of its group behind what was asked of the current stream, and
    ``wait`` lets the current stream wait for it; the host goes on. Those of a group run in their order. One runs when a
    rank needs what it gives. That rank tells the others, whose listening threads run the streams of their group so far;
    a real device would run them by itself. Until ``wait`` a collective keeps its tensors alive, as PyTorch does.

    One whose peer fails, or does not come within the group's timeout, stands in its stream for ever. Nobody raises an
    error; the group has an error state, as the watchdog of NCCL's groups sets it.

    A group of the backend ``"simulated"`` is a pair of gloo groups: one for values, one for telling.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ErrorType

__all__ = ["BACKEND", "Stuck", "Transports"]

BACKEND = "simulated"
_END = -1  # nobody will need anything any more


class Stuck(Exception):
    """Somebody waits for what never ends."""


class _Work:
    """A collective that was asked for."""

    def __init__(self, simulation: Any, event: Any, tensors: Sequence[Tensor]) -> None:
        self._simulation = simulation
        self._event = event
        self._tensors = list(tensors)

    def wait(self, timeout: Any = None) -> bool:
        if self._simulation.is_heard("wait of a collective"):
            self._simulation.current().push(self._event.run)
        self._tensors.clear()
        return True

    def is_completed(self) -> bool:
        return bool(self._event.is_done)

    def result(self) -> list[Tensor]:
        return self._tensors


class _Transport:
    """The stream of a group on this rank, and the threads that listen to the others."""

    def __init__(self, simulation: Any, group: _Group, tag: int, peers: Sequence[int]) -> None:
        self.group = group
        self.tag = tag
        self.stream = simulation.new_stream()
        self._simulation = simulation
        self._telling = group.telling
        self._peers = list(peers)
        self._told: list[Any] = []  # messages that may be on their way
        self._places: list[int] = []  # of the collectives in the stream
        self._is_asked = threading.Condition()
        self._is_closed = False  # this rank does not join the calls that it has not joined
        self._threads = [threading.Thread(target=self._listen, args=(peer,), daemon=True) for peer in self._peers]
        for thread in self._threads:
            thread.start()

    def ask(self, tensors: Sequence[Tensor], call: Callable[[list[Tensor]], None]) -> _Work:
        """Put a collective into the stream."""
        number = len(self._places)

        def run(aliases: list[Tensor]) -> None:
            if self.group.error != ErrorType.SUCCESS:
                raise Stuck
            self._tell(number)
            try:
                call(aliases)
            except RuntimeError as error:
                self.group.error = ErrorType.TIMEOUT if "imed out" in str(error) else ErrorType.COMM_ERROR
                raise Stuck from error

        self.stream.push(self._simulation.current().record_event().run)
        with self._simulation.in_stream(self.stream):
            self._simulation.push(tensors, run)
        with self._is_asked:
            self._places.append(self.stream.num_asked)
            self._is_asked.notify_all()
        return _Work(self._simulation, self.stream.record_event(), tensors)

    def _tell(self, number: int) -> None:
        for peer in self._peers:
            message = torch.tensor([number])
            self._told.append((message, self._telling.send([message], peer, self.tag)))

    def _listen(self, peer: int) -> None:
        message = torch.zeros(1, dtype=torch.int64)
        with self._simulation.bare():
            while True:
                self._telling.recv([message], peer, self.tag).wait()
                number = int(message)
                if number == _END:
                    return
                with self._is_asked:
                    self._is_asked.wait_for(lambda number=number: len(self._places) > number or self._is_closed)
                if number < len(self._places):
                    with contextlib.suppress(Stuck):
                        self.stream.run_to(self._places[number])

    def close(self) -> None:
        with self._is_asked:
            self._is_closed = True
            self._is_asked.notify_all()
        with self._simulation.bare():
            with contextlib.suppress(Stuck):
                self.stream.run_to(self.stream.num_asked)
            self._tell(_END)
            for thread in self._threads:
                thread.join()
            for _, work in self._told:
                work.wait()


class Transports:
    """Those of one simulation, each made when it is first used."""

    current: Transports | None = None

    def __init__(self, simulation: Any) -> None:
        self._simulation = simulation
        self._by_name: dict[tuple[str, int], _Transport] = {}

    def of(self, group: _Group, peer: int | None = None) -> _Transport:
        """Return that of a group, or that of a pair of its ranks."""
        key = (group.name, -1 if peer is None else peer)
        if key not in self._by_name:
            others = [rank for rank in range(group.size()) if rank != group.rank()]
            tag = 0 if peer is None else 1 + min(peer, group.rank()) * group.size() + max(peer, group.rank())
            peers = others if peer is None else [peer]
            self._by_name[key] = _Transport(self._simulation, group, tag, peers)
        return self._by_name[key]

    def close(self) -> None:
        """Run everything, and let the listeners end. Collective: all ranks."""
        for transport in list(self._by_name.values()):
            transport.close()


class _Group(dist.ProcessGroup):
    """A group of ranks with simulated devices."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self.name = str(id(self))
        self.values = dist.ProcessGroupGloo(dist.PrefixStore("values", store), rank, size, timeout)
        self.telling = dist.ProcessGroupGloo(dist.PrefixStore("telling", store), rank, size, timedelta(hours=1))
        self.error = ErrorType.SUCCESS

    def _get_backend(self, device: Any) -> _Group:
        return self

    def get_error(self) -> ErrorType:
        return self.error

    def getBackendName(self) -> str:
        return BACKEND

    def _ask(self, tensors: Sequence[Tensor], call: Callable[[list[Tensor]], None], peer: int | None = None) -> _Work:
        assert Transports.current is not None, "a collective of simulated devices outside of a simulation"
        return Transports.current.of(self, peer).ask(tensors, call)

    def _all(self, values: Tensor) -> list[Tensor]:
        """Return the values of all ranks, in rank order."""
        mine = _bytes(values)
        found = [torch.empty_like(mine) for _ in range(self.size())]
        self.values.allgather([found], [mine]).wait()
        return [one.view(values.dtype).view(values.shape) for one in found]

    # -- As of ``ProcessGroup`` --------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        def run(aliases: list[Tensor]) -> None:
            aliases[0].copy_(_reduced(self._all(aliases[0]), opts.reduceOp))

        return self._ask(tensors, run)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        return self._ask(tensors, lambda aliases: _set(aliases[0], self._all(aliases[0])[opts.rootRank]))

    def all_gather_single(self, output: Any, mine: Any, opts: Any = None) -> Any:
        def run(aliases: list[Tensor]) -> None:
            aliases[0].copy_(torch.cat([one.view(-1) for one in self._all(aliases[1])]).view_as(aliases[0]))

        return self._ask([output, mine], run)

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: Any, full: Any, opts: Any = None) -> Any:
        def run(aliases: list[Tensor]) -> None:
            out, values = aliases
            parts = [one.view(-1).chunk(self.size())[self.rank()] for one in self._all(values)]
            out.copy_(_reduced(parts, opts.reduceOp).view_as(out))

        return self._ask([output, full], run)

    _reduce_scatter_base = reduce_scatter_single

    def all_to_all_single(
        self, output: Any, mine: Any, output_sizes: Any = (), input_sizes: Any = (), opts: Any = None
    ) -> Any:
        number = self.size()

        def run(aliases: list[Tensor]) -> None:
            out, values = aliases
            sent = torch.split(values, list(input_sizes) or [len(values) // number] * number)
            found = torch.split(out, list(output_sizes) or [len(out) // number] * number)
            found[self.rank()].copy_(sent[self.rank()])
            works, landed = [], {}
            for peer in range(number):
                if peer == self.rank():
                    continue
                if sent[peer].numel():
                    works.append(self.values.send([_bytes(sent[peer])], peer, 0))
                if found[peer].numel():
                    landed[peer] = torch.empty_like(_bytes(found[peer]))
                    works.append(self.values.recv([landed[peer]], peer, 0))
            for work in works:
                work.wait()
            for peer, one in landed.items():
                found[peer].copy_(one.view(out.dtype).view_as(found[peer]))

        return self._ask([output, mine], run)

    alltoall_base = all_to_all_single

    def send(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        transport = self._transport(peer)
        return self._ask(
            tensors, lambda aliases: _ignore(self.values.send([_bytes(aliases[0])], peer, transport.tag).wait()), peer
        )

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        transport = self._transport(peer)

        def run(aliases: list[Tensor]) -> None:
            found = torch.empty_like(_bytes(aliases[0]))
            self.values.recv([found], peer, transport.tag).wait()
            aliases[0].copy_(found.view(aliases[0].dtype).view_as(aliases[0]))

        return self._ask(tensors, run, peer)

    def _transport(self, peer: int) -> _Transport:
        assert Transports.current is not None
        return Transports.current.of(self, peer)


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(-1).view(torch.uint8)


def _reduced(values: Sequence[Tensor], op: Any) -> Tensor:
    """Return what the ranks' values are together, added in rank order, in fp32 where they are 16-bit."""
    if op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        return torch.stack(list(values)).amax(0) if op == dist.ReduceOp.MAX else torch.stack(list(values)).amin(0)
    first, *others = values
    is_short = first.is_floating_point() and first.dtype.itemsize < 4
    total = first.float() if is_short else first.clone()
    for other in others:
        total += other
    if op == dist.ReduceOp.AVG:
        total /= len(values)
    else:
        assert op == dist.ReduceOp.SUM, op
    return total.to(first.dtype)


def _set(target: Tensor, values: Tensor) -> None:
    target.copy_(values)


def _ignore(value: object) -> None:
    del value


dist.Backend.register_backend(
    BACKEND, lambda store, rank, size, timeout: _Group(store, rank, size, timeout), devices=["cpu", "cuda"]
)
