"""Errors and positions of ranks, exchanged through the store of the default process group.

Note [Without collectives]
    After an error nobody knows which rank waits in which collective, and a collective cannot be left. The store of the
    default group needs no other rank: a rank that fails writes its error there, a thread of every rank looks for it,
    and a meeting waits for keys, so it ends in time on every rank. Whether a meeting took place is decided by one key
    that is written once; who comes later reads that it is over. Meetings and errors are numbered by run, because an
    error may leave the ranks with different numbers of meetings.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from lightning_zero.errors import CollectiveError

__all__ = ["Peers", "PeersError", "Told", "failure_named", "is_pretended", "told_error"]

_LOOK_S = 0.25  # between two looks of the thread at the store
_HEARING_S = 3.0  # how long a rank that fails waits until the others have read its error
_PULSE_S = 5.0  # between two signs of life
_NO_PULSE = b"over"  # of a rank whose run has ended
_SILENCE_S = 60.0  # without a sign of life a rank counts as ended, if its process is known to be gone
_LONG_SILENCE_S = (
    600.0  # if it may be at work: code that holds the interpreter's lock stops the thread that gives signs
)
_STUCK_S = 20.0  # after another rank's error: how long a rank may stay in a call
_MOST_TEXT = 4000  # characters of an error

Facts = Mapping[str, str]


class PeersError(RuntimeError):
    """Not all ranks came to a meeting."""


@dataclass(frozen=True)
class Told:
    """The first error of a run, as a rank has told it."""

    rank: int
    text: str

    def __str__(self) -> str:
        return f"the first error was on rank {self.rank}: {self.text}"


class Watched(Protocol):
    """Something that may fail while the main thread is in a call that does not return."""

    def failure(self) -> object | None:
        """Return the error, if there is one, as a text; asked from another thread."""


class Peers:
    """The ranks of the default group, reached through its store.

    Args:
        store: Of the default group; None in a world of one rank.
        rank: This rank.
        world_size: Number of ranks.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.has_told = False  # of an error of this rank, in this run
        self.first: Told | None = None  # the first error of the run, as far as this rank knows
        self._default_store = store
        self._store = None if store is None else PrefixStore("lightning_zero/peers", store)
        self._num_runs = 0
        self._run = 0  # number of the current one, or of the last
        self._num_meetings = 0
        self._num_places = 0  # to which all ranks came, in this run
        self._last_place = ""  # key of this rank at the last of them
        self._owner: object = None  # of the current run
        self._watcher: _Watcher | None = None  # of the current run
        self._outer: list[_Outer] = []  # runs around the current one, the outermost first
        self._watched: list[ref[Watched]] = []

    @classmethod
    def of_world(cls) -> Peers:
        """Return the peers of the default group, always the same object; none where other ranks are pretended."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1 or is_pretended():
            return cls(None, 0, 1)
        group = dist.group.WORLD
        if group not in _PEERS:
            store = dist.distributed_c10d._get_default_store()
            _PEERS[group] = cls(store, dist.get_rank(), dist.get_world_size())
        return _PEERS[group]

    # -- A run -----------------------------------------------------------------------------------------------------

    def begin_run(self, owner: object = None, may_stay: Callable[[], bool] = lambda: False) -> None:
        """Forget errors of earlier runs, and watch for new ones. Every rank calls it; no collective.

        Args:
            owner: That ends the run. A run of another owner goes on when this one has ended.
            may_stay: Whether a rank in a call that cannot end has something else to finish.
        """
        if self._store is None:
            return
        self.end_run(owner)
        if self._watcher is not None and self.has_told:  # an error has ended it without notice
            self.end_run(self._owner)
        if self._watcher is not None:
            counts = self._num_meetings, self._num_places
            self._outer.append(_Outer(self._owner, self._run, counts, self.first, self.has_told, self._watcher))
        self._num_runs += 1
        self._run, self._owner, self._num_meetings, self._num_places = self._num_runs, owner, 0, 0
        self._last_place = ""
        self.first, self.has_told = None, False
        self._store.set(self.key(f"process/{self.rank}"), json.dumps(_this_process()))
        self._store.set(self.key(f"pulse/{self.rank}"), "0")
        self._watcher = _Watcher(self, may_stay)
        self._watcher.start()

    def end_run(self, owner: object = None) -> None:
        """Stop watching for a run, and for those that were begun inside of it."""
        while self._watcher is not None and owner in (self._owner, *(outer.owner for outer in self._outer)):
            is_last = self._owner == owner
            self._end_current()
            if is_last:
                return

    def _end_current(self) -> None:
        assert self._watcher is not None
        assert self._store is not None
        self._watcher.stop()
        with contextlib.suppress(Exception):  # the store ends with rank 0
            self._store.set(self.key(f"pulse/{self.rank}"), _NO_PULSE.decode())
        self._watcher, self._owner = None, None
        if self._outer:
            outer = self._outer.pop()
            self._owner, self._run, (self._num_meetings, self._num_places) = outer.owner, outer.run, outer.counts
            self._last_place = ""
            self.first, self.has_told, self._watcher = outer.first, outer.has_told, outer.watcher

    def key(self, name: str) -> str:
        """Return the name of a value of this run."""
        return f"{self._run}/{name}"

    # -- Errors ----------------------------------------------------------------------------------------------------

    def tell(self, error: BaseException) -> None:
        """Let all ranks know of an error of this one. Does nothing when this rank has told one in this run."""
        if self._store is None or self.has_told:
            return
        self.has_told = True
        with contextlib.suppress(Exception):  # the store ends with rank 0
            self._write_first(self._store, _describe(error))

    def wait_until_heard(self) -> None:
        """Return when all ranks have read the first error, or when they had time to."""
        if self._store is None or not self.has_told or self._watcher is None:
            return
        heard = [self.key(f"heard/{rank}") for rank in range(self.world_size)]
        deadline = time.monotonic() + _HEARING_S
        with contextlib.suppress(Exception):
            while not self._store.check(heard) and time.monotonic() < deadline:
                time.sleep(_LOOK_S / 5)

    def error_elsewhere(self) -> Told | None:
        """Return the first error of the run if it is another rank's."""
        if self._store is not None and self.first is None:
            with contextlib.suppress(Exception):
                self.look(self._store)
        return None if self.first is None or self.first.rank == self.rank else self.first

    def look(self, store: Any) -> None:
        """Read the first error, if somebody has told one, and tell that it was read."""
        if self.first is None and store.check([self.key("first")]):
            self._take_first(store.get(self.key("first")))
            store.set(self.key(f"heard/{self.rank}"), "1")

    def watch(self, one: Watched) -> None:
        """Look during runs whether ``one`` has failed, and tell the others; as long as somebody else holds it."""
        self._watched = [*(other for other in self._watched if other() is not None), ref(one)]

    def look_at_watched(self, store: Any) -> None:
        """Tell of a failure that the main thread may not come to know of."""
        if self.first is None:
            failures = (one.failure() for one in (other() for other in self._watched) if one is not None)
            failure = next((failure for failure in failures if failure is not None), None)
            if failure is not None:
                self._write_first(store, str(failure))

    def _write_first(self, store: Any, text: str) -> None:
        """Let an error be the first, if there is none."""
        told = json.dumps([self.rank, text[:_MOST_TEXT]])
        self._take_first(store.compare_set(self.key("first"), "", told))
        store.set(self.key(f"heard/{self.rank}"), "1")

    def _take_first(self, text: bytes) -> None:
        self.first = Told(*json.loads(text))

    def await_value(self, store: Any, key: str, what: str) -> bytes:
        """Return a value that another rank is about to write.

        Raises:
            PeersError: Another rank has told of an error, or the value did not come within the store's timeout.
        """
        deadline, pause_s = time.monotonic() + store.timeout.total_seconds(), 1e-4
        while not store.check([key]):
            told = self.error_elsewhere() if self._watcher is not None else None
            if told is not None:
                raise PeersError(f"{what} was given up on rank {self.rank}: {told}")
            if time.monotonic() > deadline:
                raise PeersError(f"{what} needs all ranks, and not all came to rank {self.rank} in time.")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
        return bytes(store.get(key))

    def await_all(self, place: str, timeout_s: float) -> list[int]:
        """Return the ranks that have not come to a place of the program within a time. For places off the usual way.

        Args:
            place: Its name. Ranks may come to one again after all have come.
            timeout_s: Seconds to wait.

        Raises:
            PeersError: Another rank has told of an error.
        """
        if self._store is None:
            return []
        keys = [self.key(f"place/{self._num_places}/{place}/{rank}") for rank in range(self.world_size)]
        self._store.set(keys[self.rank], "")
        began, pause_s, warned_at = time.monotonic(), 1e-4, _SILENCE_S
        while not self._store.check(keys) and (waited := time.monotonic() - began) < timeout_s:
            told = self.error_elsewhere()
            if told is not None:
                raise PeersError(f"The wait of rank {self.rank} was given up: {told}")
            if waited > warned_at:
                warned_at *= 4
                self._say_waiting(f"place `{place}` of the program", keys, waited, timeout_s)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
        missing = self._missing(keys)
        if not missing:
            if self._last_place:  # all ranks have left it
                self._store.delete_key(self._last_place)
            self._num_places, self._last_place = self._num_places + 1, keys[self.rank]
        return missing

    # -- Meetings --------------------------------------------------------------------------------------------------

    def meet(
        self,
        what: str,
        facts: Facts,
        judge: Callable[[Mapping[int, Facts]], str],
        *,
        timeout_s: float,
        ends_with_errors: bool = True,
    ) -> str:
        """Wait for all ranks and return rank 0's verdict on their facts. Collective: all ranks.

        Args:
            what: Name of the meeting, for the error.
            facts: Of this rank.
            judge: Called on rank 0 with the facts of all ranks.
            timeout_s: Seconds to wait.
            ends_with_errors: End as soon as another rank has told of an error.

        Raises:
            PeersError: A rank did not come, has failed or has ended; on every rank that comes.
        """
        if self._store is None:
            return judge({0: facts})
        try:
            return self._meet(what, facts, judge=judge, timeout_s=timeout_s, ends_with_errors=ends_with_errors)
        except dist.DistError as error:
            raise PeersError(
                f"{what} needs the store of the process group, which rank {self.rank} does not reach: {error}"
            ) from error

    def _meet(
        self,
        what: str,
        facts: Facts,
        *,
        judge: Callable[[Mapping[int, Facts]], str],
        timeout_s: float,
        ends_with_errors: bool,
    ) -> str:
        assert self._store is not None
        self._num_meetings += 1
        meeting = self.key(f"meeting/{self._num_meetings}")
        end = f"{meeting}/end"
        self._store.set(f"{meeting}/{self.rank}", json.dumps({**facts}))
        try:
            self._await_end(meeting, what, judge=judge, timeout_s=timeout_s, ends_with_errors=ends_with_errors)
        except BaseException as error:
            text = str(error) if isinstance(error, PeersError) else f"{what}: rank {self.rank}: {_describe(error)}"
            with contextlib.suppress(Exception):
                self._store.compare_set(end, "", json.dumps([False, text]))
            if not isinstance(error, PeersError):
                raise
        has_met, text = json.loads(self._store.get(end))
        self._store.delete_key(f"{meeting}/{self.rank}")
        if not has_met:
            raise PeersError(text)
        if self.rank == 0:  # all ranks have left the meeting before
            self._store.delete_key(self.key(f"meeting/{self._num_meetings - 1}/end"))
        return str(text)

    def _await_end(
        self,
        meeting: str,
        what: str,
        *,
        judge: Callable[[Mapping[int, Facts]], str],
        timeout_s: float,
        ends_with_errors: bool,
    ) -> None:
        """Return when it is decided whether the meeting took place; rank 0 decides that it did."""
        assert self._store is not None
        store, end = self._store, f"{meeting}/end"
        keys = [f"{meeting}/{rank}" for rank in range(self.world_size)]
        began, pause_s, silence, warned_at = time.monotonic(), 1e-3, _Silence(self, timeout_s), _SILENCE_S
        while not store.check([end]):
            waited = time.monotonic() - began
            if self.rank == 0 and store.check(keys):
                facts = {rank: json.loads(value) for rank, value in enumerate(store.multi_get(keys))}
                store.compare_set(end, "", json.dumps([True, judge(facts)]))
                return
            told = self.error_elsewhere() if ends_with_errors else None
            if told is not None:
                raise PeersError(f"{what} was given up on rank {self.rank}: {told}")
            silent = silence.ranks(self._missing(keys)) if waited > 1 else []
            if silent:
                raise PeersError(
                    f"{what} was given up on rank {self.rank}: {_names(silent)} gave no sign of life for"
                    f" {waited:.0f} s: the process was ended from outside (killed, out of memory), or hangs."
                )
            if waited > warned_at:
                warned_at *= 4
                self._say_waiting(what, keys, waited, timeout_s)
            if waited > timeout_s:
                missing = self._missing(keys)
                raise PeersError(
                    f"{what} needs all ranks, and {_names(missing)} did not come to rank {self.rank} within"
                    f" {timeout_s:g} s."
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.01 if waited < 1 else 0.1)

    def _say_waiting(self, what: str, keys: Sequence[str], waited: float, timeout_s: float) -> None:
        print(
            f"rank {self.rank} of {self.world_size} has waited {waited:.0f} s for"
            f" {_names(self._missing(keys) or [0])}: {what}. It gives up after {timeout_s:g} s.",
            file=sys.stderr,
            flush=True,
        )

    def _missing(self, keys: Sequence[str]) -> list[int]:
        assert self._store is not None
        return [rank for rank, key in enumerate(keys) if not self._store.check([key])]


@dataclass(frozen=True)
class _Outer:
    """The state of a run while another one goes on inside of it."""

    owner: object
    run: int
    counts: tuple[int, int]  # of meetings and places
    first: Told | None
    has_told: bool
    watcher: _Watcher


class _Silence:
    """Tells which ranks give no sign of life, as seen from here.

    Args:
        peers: The ranks.
        timeout_s: Of the wait for them.
    """

    def __init__(self, peers: Peers, timeout_s: float) -> None:
        self._peers = peers
        self._patience_s = max(_SILENCE_S, min(timeout_s, _LONG_SILENCE_S))
        self._last: dict[int, tuple[bytes, float]] = {}  # sign of life, and when it was first seen
        self._next_look = 0.0

    def ranks(self, missing: Sequence[int]) -> list[int]:
        """Return those of the missing ranks that were silent for long."""
        now = time.monotonic()
        store = self._peers._store
        if store is None or now < self._next_look:
            return []
        self._next_look = now + _PULSE_S / 5
        for rank in missing:
            key = self._peers.key(f"pulse/{rank}")
            sign = store.get(key) if store.check([key]) else b""
            if self._last.get(rank, (None, 0.0))[0] != sign:
                self._last[rank] = (sign, now)
        return [rank for rank in missing if self._is_silent(rank, now)]

    def _is_silent(self, rank: int, now: float) -> bool:
        sign, since = self._last[rank]
        if sign in (b"", _NO_PULSE) or now - since <= _SILENCE_S:
            return False
        return now - since > self._patience_s or self._is_gone(rank)

    def _is_gone(self, rank: int) -> bool:
        """Say whether the process of a rank is known to have ended, which is seen on the same machine only."""
        store, key = self._peers._store, self._peers.key(f"process/{rank}")
        assert store is not None
        if not store.check([key]):
            return False
        *place, pid = json.loads(store.get(key))
        return place == _this_process()[:-1] and not _is_alive(pid)


class _Watcher(threading.Thread):
    """Looks for errors of all ranks while this one may be in a call that does not return.

    Args:
        peers: Whose first error it reads.
        may_stay: See ``Peers.begin_run``.
    """

    def __init__(self, peers: Peers, may_stay: Callable[[], bool]) -> None:
        super().__init__(name="lightning_zero-peers", daemon=True)
        self._peers = peers
        self._run = peers._run
        self._pulse = peers.key(f"pulse/{peers.rank}")
        self._may_stay = may_stay
        self._is_over = threading.Event()
        # Calls of a store's client wait for one another, and the main thread's may wait long.
        self._store = PrefixStore("lightning_zero/peers", peers._default_store.clone())

    def run(self) -> None:
        """Look until the run is over, or the store is gone."""
        peers, heard_at, pulse_at, num_pulses = self._peers, 0.0, 0.0, 0
        while not self._is_over.wait(_LOOK_S):
            now = time.monotonic()
            try:
                if now >= pulse_at:
                    pulse_at, num_pulses = now + _PULSE_S, num_pulses + 1
                    self._store.set(self._pulse, str(num_pulses))
                if self._run != peers._run:  # another run goes on inside of this one
                    continue
                peers.look(self._store)
                peers.look_at_watched(self._store)
            except Exception:
                return
            if peers.first is None or peers.has_told:
                continue
            if not heard_at or self._may_stay():
                heard_at = now
            if now - heard_at > _STUCK_S:
                self._end_process()

    def stop(self) -> None:
        """End the thread."""
        self._is_over.set()
        if self is not threading.current_thread():
            self.join()

    def _end_process(self) -> None:
        """End this process: its main thread waits for a rank that will not come."""
        peers = self._peers
        print(
            f"rank {peers.rank} of {peers.world_size} ends, because it still waits {_STUCK_S:g} s after an error:"
            f" {peers.first}",
            file=sys.stderr,
            flush=True,
        )
        sys.stdout.flush()
        os._exit(1)


_PEERS: WeakKeyDictionary[Any, Peers] = WeakKeyDictionary()  # by default group


def _this_process() -> list[Any]:
    """Return the machine as it has been started, the process numbers it counts, and this process's."""
    start = numbers = ""
    with contextlib.suppress(OSError):  # every Linux has the same first numbering
        start, numbers = Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")
    return [socket.gethostname(), start, numbers, os.getpid()]


def _is_alive(pid: int) -> bool:
    """Say whether a process of this machine runs; one that has ended may still have a number."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def is_pretended() -> bool:
    """Say whether this process is all there is of the default group: its calls send nothing."""
    return bool(dist.get_backend() == "fake")


@contextlib.contextmanager
def failure_named(what: str) -> Iterator[None]:
    """Name a call that failed, and the first error of any rank.

    Raises:
        CollectiveError: The call failed.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, CollectiveError):
            raise
        raise CollectiveError(
            f"rank {dist.get_rank()} of {dist.get_world_size()}: the {what} failed: {error}.{told_error()}"
        ) from error


def told_error() -> str:
    """Return the first error of another rank as a sentence, or an empty string."""
    told = Peers.of_world().error_elsewhere()
    return "" if told is None else f" {str(told)[0].upper()}{str(told)[1:]}"


def _describe(error: BaseException) -> str:
    """Return an error as another rank shows it."""
    return f"{type(error).__name__}: {error}"


def _names(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
