"""Worlds of ranks for tests: reused worker processes, fresh process groups, counted and delayed collectives.

Note [Pools]
    A pool of ``world`` processes is forked once from a server that has the imports done and no threads, and serves
    every ``run`` of the session. A call gets a new default process group (gloo), new seeds, one thread per rank and
    poisoned memory. A pool in which a rank raised, died or did not answer in time is killed and built again, and so
    is one whose processes keep many threads between calls: each of a gloo group wakes a hundred times a second, and
    some hundred of them take half of the machine from the cases that follow.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import itertools
import multiprocessing
import os
import pickle
import random
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, ProcessGroup, Store

from lightning_zero.comm.groups import destroy_all

__all__ = [
    "Ledger",
    "RankError",
    "close",
    "count_collectives",
    "poisoned_memory",
    "run",
    "seed",
    "slow_collectives",
]

_ALL_DONE = b"all done"
KEPT_THREADS = 8  # at most between two calls; a fresh process has one, and those of gloo wake a hundred times a second
KEPT_S = 2.0  # a rank that is done keeps its connections at most; it may be the error that others wait for
GRACE_S = 3.0  # how long the other ranks may still answer after the first error


class RankError(AssertionError):
    """A rank raised, died or did not answer; carries the tracebacks of all ranks that did."""


def run(fn: Callable[..., Any], world: int, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Call ``fn(rank, world, *args)`` in ``world`` processes and return what each rank returned, in rank order.

    Args:
        fn: A module-level function. A gloo group over the ranks is the default process group.
        world: Number of ranks.
        args: Must pickle, like the returned values. Returned tensors are copies.
        timeout_s: Afterwards the ranks are killed, and the error shows where each of them was.

    Raises:
        Exception: What the first failing rank raised, with the tracebacks as a note.
        RankError: A rank died or did not answer in time, or its exception does not pickle.
    """
    return _pool(world).call(fn, args, timeout_s)


def seed(value: int = 0) -> None:
    """Start all random number generators anew."""
    random.seed(value)
    torch.manual_seed(value)


# -- The pool ----------------------------------------------------------------------------------------------------------

_pools: dict[int, _Pool] = {}


def _pool(world: int) -> _Pool:
    pool = _pools.get(world)
    if pool is None or not pool.is_alive() or pool.threads() > KEPT_THREADS:
        if pool is not None:
            pool.kill()
        pool = _pools[world] = _Pool(world)
    return pool


def close() -> None:
    """End all worker processes."""
    for pool in _pools.values():
        pool.kill()
    _pools.clear()


atexit.register(close)


class _Pool:
    """The processes of one world size."""

    def __init__(self, world: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", "torch._dynamo", "lightning_zero", "tests.worlds"])
        self._folder = tempfile.TemporaryDirectory(prefix="worlds-")
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(world):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, rank, world, self._folder.name), daemon=True)
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)

    def is_alive(self) -> bool:
        return bool(self._processes) and all(process.is_alive() for process in self._processes)

    def threads(self) -> int:
        """Return how many threads the process with most of them has; 0 where the system does not tell."""
        folders = (f"/proc/{process.pid}/task" for process in self._processes)
        return max((len(os.listdir(folder)) for folder in folders if os.path.isdir(folder)), default=0)

    def call(self, fn: Callable[..., Any], args: Sequence[Any], timeout_s: float) -> list[Any]:
        answers = self._ask(pickle.dumps((fn, args, timeout_s)), timeout_s)
        self._ask(_ALL_DONE, timeout_s)
        return answers

    def _ask(self, request: bytes, timeout_s: float) -> list[Any]:
        for connection in self._connections:
            connection.send_bytes(request)
        try:
            answers = self._answers(time.monotonic() + timeout_s, timeout_s)
        except BaseException:
            self.kill()
            raise
        errors = {rank: answer for rank, answer in answers.items() if isinstance(answer, _Failure)}
        if errors:
            stacks = self._stacks(set(range(len(self._processes))) - set(answers))
            self.kill()
            _raise(errors, stacks)
        return [answers[rank] for rank in range(len(self._processes))]

    def _answers(self, deadline: float, timeout_s: float) -> dict[int, Any]:
        """Collect one answer per rank; fewer when one of them failed and the others did not end soon after."""
        answers: dict[int, Any] = {}
        failed = False
        while len(answers) < len(self._connections):
            open_ranks = [rank for rank in range(len(self._connections)) if rank not in answers]
            ready = wait([self._connections[rank] for rank in open_ranks], max(deadline - time.monotonic(), 0.0))
            if not ready and failed:
                return answers
            if not ready:
                stacks = self._stacks(set(open_ranks))
                raise RankError(f"ranks {open_ranks} did not answer within {timeout_s:g} s\n{stacks}")
            for rank in open_ranks:
                if self._connections[rank] not in ready:
                    continue
                try:
                    answers[rank] = pickle.loads(self._connections[rank].recv_bytes())
                except EOFError:
                    self._processes[rank].join(1.0)
                    code = self._processes[rank].exitcode
                    answers[rank] = _Failure(None, f"rank {rank} died, exit code {code}\n{self._crash(rank)}")
                if isinstance(answers[rank], _Failure) and not failed:
                    failed, deadline = True, min(deadline, time.monotonic() + GRACE_S)
        return answers

    def _stacks(self, ranks: set[int]) -> str:
        """Return where the given ranks are."""
        for rank in ranks:
            if self._processes[rank].is_alive():
                os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)
        time.sleep(0.3 if ranks else 0.0)
        return "\n".join(f"rank {rank} is at\n{self._crash(rank)}" for rank in sorted(ranks))

    def _crash(self, rank: int) -> str:
        with open(_stack_file(self._folder.name, rank)) as file:
            return file.read()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        self._folder.cleanup()


@dataclass
class _Failure:
    error: bytes | None
    text: str
    time_s: float = float("-inf")  # of a clock that all processes share; a death leaves none, and comes first


def _raise(errors: dict[int, _Failure], stacks: str) -> None:
    text = "\n".join(f"--- rank {rank} ---\n{failure.text}" for rank, failure in sorted(errors.items())) + stacks
    first = min(errors.values(), key=lambda failure: failure.time_s)  # the others heard of it
    if first.error is None:
        raise RankError(text)
    error = pickle.loads(first.error)
    error.add_note(text)
    raise error


def _stack_file(folder: str, rank: int) -> str:
    return os.path.join(folder, f"rank{rank}")


def _serve(connection: Connection, rank: int, world: int, folder: str) -> None:
    """Answer calls until the other end closes."""
    torch.set_num_threads(1)
    stacks = open(_stack_file(folder, rank), "w")  # noqa: SIM115 (open as long as the process lives)
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks)
    gc.freeze()  # what the server has imported is never looked at again
    for number in itertools.count():
        try:
            fn, args, timeout_s = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        except Exception as error:
            connection.send_bytes(_answer(_failure(error)))
            continue
        store = FileStore(os.path.join(folder, f"store{number}"), world)
        value = _call(fn, args, rank, world, store, timeout_s)
        failure = value if isinstance(value, _Failure) else None
        if failure is None:
            connection.send_bytes(_answer(value))
            del value
            connection.poll(KEPT_S)  # until all ranks are done: others may still make the connections of a group
        destroy_all()  # groups of engines that the call left open: each wakes a hundred times a second
        dist.destroy_process_group()
        gc.collect()  # engines that the call left open, and groups that nobody could destroy
        if failure is None:
            try:
                connection.recv_bytes()
            except EOFError:
                return
        connection.send_bytes(_answer(failure))


def _call(fn: Callable[..., Any], args: Sequence[Any], rank: int, world: int, store: Store, timeout_s: float) -> Any:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s))
    dist.barrier()  # a rank that is done and closes the group would break the connections others still make
    seed()
    try:
        with poisoned_memory():
            return fn(rank, world, *args)
    except BaseException as error:
        return _failure(error)
    finally:
        torch.set_default_dtype(torch.float32)


def _failure(error: BaseException) -> _Failure:
    time_s = time.monotonic()
    text = "".join(traceback.format_exception(error))
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:
        return _Failure(None, text, time_s)
    return _Failure(pickled, text, time_s)


def _answer(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        error.add_note(f"The answer is of type {type(value)}.")
        return pickle.dumps(_failure(error))


# -- Memory that shows when it is read before it is written ------------------------------------------------------------


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill uninitialised tensors and regrown storages with NaN (integers: with their largest value)."""
    was = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    resize = torch.UntypedStorage.resize_

    def poisoned_resize(storage: torch.UntypedStorage, size: int) -> Any:
        old = storage.nbytes()
        result = resize(storage, size)
        if size > old and storage.device.type == "cpu":
            grown = torch.tensor([], dtype=torch.uint8, device="cpu").set_(storage)[old:]
            grown.fill_(0xFF)
        return result

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.UntypedStorage.resize_ = poisoned_resize  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
        torch.use_deterministic_algorithms(was[0], warn_only=was[1])


# -- Collectives, seen and disturbed -----------------------------------------------------------------------------------


@dataclass
class Ledger:
    """What this rank sent: bytes of the ring algorithms' payload by kind, number of calls, and the calls in order."""

    sent: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    entries: list[tuple[str, int]] = field(default_factory=list)

    @property
    def payload(self) -> int:
        """Bytes of gathers, reduce-scatters and point-to-point exchanges."""
        return sum(self.sent[kind] for kind in ("all_gather", "reduce_scatter", "all_to_all", "send"))

    @property
    def control(self) -> int:
        """Bytes of all-reduces and broadcasts."""
        return sum(self.sent[kind] for kind in ("all_reduce", "broadcast"))

    def clear(self) -> None:
        """Start anew."""
        self.sent.clear()
        self.calls.clear()
        self.entries.clear()


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(_nbytes(item) for item in value)


# method of ProcessGroup: kind, bytes sent by this rank (N = world size)
_METHODS: dict[str, tuple[str, Callable[[Sequence[Any], int], float]]] = {
    "_allgather_base": ("all_gather", lambda args, n: _nbytes(args[1]) * (n - 1)),
    "all_gather_single": ("all_gather", lambda args, n: _nbytes(args[1]) * (n - 1)),
    "allgather": ("all_gather", lambda args, n: _nbytes(args[1]) * (n - 1)),
    "_reduce_scatter_base": ("reduce_scatter", lambda args, n: _nbytes(args[0]) * (n - 1)),
    "reduce_scatter_single": ("reduce_scatter", lambda args, n: _nbytes(args[0]) * (n - 1)),
    "reduce_scatter": ("reduce_scatter", lambda args, n: _nbytes(args[0]) * (n - 1)),
    "alltoall_base": ("all_to_all", lambda args, n: _nbytes(args[1]) * (n - 1) / n),
    "all_to_all_single": ("all_to_all", lambda args, n: _nbytes(args[1]) * (n - 1) / n),
    "alltoall": ("all_to_all", lambda args, n: _nbytes(args[1]) * (n - 1) / n),
    "allreduce": ("all_reduce", lambda args, n: _nbytes(args[0])),
    "allreduce_coalesced": ("all_reduce", lambda args, n: _nbytes(args[0])),
    "broadcast": ("broadcast", lambda args, n: _nbytes(args[0])),
    "send": ("send", lambda args, n: _nbytes(args[0])),
    "barrier": ("barrier", lambda args, n: 0),
}


@contextlib.contextmanager
def _patched(before: Callable[[str, ProcessGroup, Sequence[Any]], None]) -> Iterator[None]:
    """Call ``before(method, group, args)`` ahead of every collective, whichever way it was reached."""
    methods = {name: vars(ProcessGroup)[name] for name in _METHODS if name in vars(ProcessGroup)}
    originals = {name: getattr(ProcessGroup, name) for name in methods}

    def wrap(name: str) -> Callable[..., Any]:
        def method(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            before(name, group, args)
            return originals[name](group, *args, **kwargs)

        return method

    for name in originals:
        setattr(ProcessGroup, name, wrap(name))
    try:
        yield
    finally:
        for name, method in methods.items():
            setattr(ProcessGroup, name, method)


@contextlib.contextmanager
def count_collectives(on_call: Callable[[], None] | None = None) -> Iterator[Ledger]:
    """Count what this rank sends inside the block; ``on_call`` runs at every collective."""
    ledger = Ledger()

    def before(name: str, group: ProcessGroup, args: Sequence[Any]) -> None:
        kind, sent = _METHODS[name]
        nbytes = round(sent(args, group.size()))
        ledger.sent[kind] += nbytes
        ledger.calls[kind] += 1
        ledger.entries.append((kind, nbytes))
        if on_call is not None:
            on_call()

    with _patched(before):
        yield ledger


@contextlib.contextmanager
def slow_collectives(max_delay_s: float = 0.02, before: str | None = None, seed: int = 0) -> Iterator[None]:
    """Delay this rank's collectives at random (those of kind ``before`` only, if given), so that hidden races show."""
    delays = random.Random(seed)

    def sleep(name: str, group: ProcessGroup, args: Sequence[Any]) -> None:
        if before in (None, _METHODS[name][0]):
            time.sleep(delays.random() * max_delay_s)

    with _patched(sleep):
        yield
