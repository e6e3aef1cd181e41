"""Process groups that engines use one after the other.

Note [Groups are lent]
    A group has threads and connections on every rank, and a process that makes engines again and again would run out of
    both. So the groups of a communicator are a set, which the next communicator over the same ranks takes over when
    this one is closed or collected. Garbage is collected at different times on different ranks: at every set-up the
    ranks tell one another, through the store of the default group, which sets they could take, and take the first that
    is free everywhere. More than four sets over the same ranks are not made: further communicators that are alive at
    the same time share the one that was lent longest ago. Exchanges between pairs of ranks carry the number of the
    loan, so calls that an earlier user left behind do not meet a later one; other calls are ordered within a set, as
    the program orders them. A set on which a call has failed is not lent again, nor is one whose user was interrupted,
    before that user has finished its calls in flight. The groups of a pipeline's mesh are lent in the same way.

Note [Names of groups]
    ``new_group`` names a group of some of the ranks by these and by the number of groups on this rank, and ranks that
    count differently wait for one another. So gloo's groups of a part get a name of ours: that of the pool, the number
    of the set, and the use. A rank may then give them back on its own, because no later group has their names.
"""

from __future__ import annotations

import atexit
import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from lightning_zero.comm.peers import Peers, PeersError, is_pretended
from lightning_zero.errors import CollectiveError

__all__ = ["GroupSet", "Lent", "borrow", "destroy_all", "lend"]

_MOST_SETS = 4  # over the same ranks
_FREE, _USED, _USED_AND_BROKEN, _BROKEN = range(4)  # on a rank; the highest of all ranks counts


class Lent:
    """Groups that one user has at a time. Subclasses make them."""

    def __init__(self) -> None:
        self.is_broken = False  # on this rank
        self.num_interrupted = 0  # users that calls of an interrupted step may be in flight of
        self.loan = 0  # number of the last one
        self._users: WeakSet[Any] = WeakSet()

    @property
    def state(self) -> int:
        """Whether this rank could lend it."""
        is_broken = self.is_broken or self.num_interrupted > 0
        if len(self._users):
            return _USED_AND_BROKEN if is_broken else _USED
        return _BROKEN if is_broken else _FREE

    def lend(self, user: Any, loan: int) -> None:
        """Let ``user`` have it until it leaves, or is collected."""
        self._users.add(user)
        self.loan = loan

    def leave(self, user: Any) -> None:
        """End a loan. No collective."""
        self._users.discard(user)

    def destroy(self) -> None:
        """Do not lend it again; subclasses free the resources that a rank may free on its own."""
        self.is_broken = True


_Set = TypeVar("_Set", bound=Lent)


class GroupSet(Lent):
    """The groups of one communicator at a time.

    Args:
        device_group: Makes a group for tensors of the device, given its use.
        host_group: Makes one for values in host memory.
        is_local: Whether a rank may give the groups back on its own.
    """

    def __init__(self, device_group: Callable[[str], Any], host_group: Callable[[str], Any], *, is_local: bool) -> None:
        super().__init__()
        self.gather = device_group("gather")
        self.reduce = device_group("reduce")
        self.control = host_group("control")
        self.flags = host_group("flags")
        self.objects = host_group("objects")
        self.tags: Counter[int] = Counter()  # of a group: tells apart its point-to-point exchanges in flight
        self._host_group = host_group
        self._background: Any = None  # from its first use
        self._promises: Any = None  # from its first use
        self._is_local = is_local

    @property
    def background(self) -> Any:
        """The group for a thread that saves. Collective at its first use."""
        if self._background is None:
            self._background = self._host_group("background")
        return self._background

    @property
    def promises(self) -> Any:
        """The group for agreements that run beside others. Collective at its first use."""
        if self._promises is None:
            self._promises = self._host_group("promises")
        return self._promises

    def destroy(self) -> None:
        """Give the groups back to the system where a rank may do so on its own. No collective."""
        super().destroy()
        groups = [
            self.gather, self.reduce, self.control, self.flags, self.objects, self._background, self._promises
        ]  # fmt: skip
        self.gather = self.reduce = self.control = self.flags = self.objects = None
        self._background = self._promises = None
        if self._is_local and dist.is_initialized():
            for group in groups:
                if group is not None and group in dist.distributed_c10d._world.pg_map:
                    dist.destroy_process_group(group)


class _Pool:
    """The sets over the same ranks. All ranks have the same sets in the same order."""

    def __init__(self, name: str, ranks: Sequence[int], make: Callable[[], Lent]) -> None:
        self._name = name
        self._ranks = list(ranks)
        self._make = make
        self._num_loans = 0
        self._num_rounds = 0
        self.sets: list[Lent] = []

    def lend(self, user: Any) -> Lent:
        """Lend a set. Collective: all ranks of the pool."""
        states = self._agree()
        if states and _FREE not in states:
            gc.collect()  # engines are in reference cycles
            states = self._agree()
        for place, state in enumerate(states):
            if state == _BROKEN:
                self.sets[place].destroy()
        chosen = self._choose(states)
        self.sets = [one for one, state in zip(self.sets, states, strict=True) if state != _BROKEN]
        if chosen is None:
            chosen = self._make()
            self.sets.append(chosen)
        self._num_loans += 1
        chosen.lend(user, self._num_loans)
        return chosen

    def _choose(self, states: Sequence[int]) -> Lent | None:
        """Return a set that is free everywhere, or else one to share; None if there is to be another one."""
        if _FREE in states:
            return self.sets[list(states).index(_FREE)]
        shared = [one for one, state in zip(self.sets, states, strict=True) if state == _USED]
        return min(shared, key=lambda one: one.loan) if len(shared) >= _MOST_SETS else None

    def _agree(self) -> list[int]:
        """Return the worst state of each set over the ranks. Collective: all ranks of the pool."""
        if not self.sets:
            return []
        self._num_rounds += 1
        mine = bytes(one.state for one in self.sets)
        if is_pretended():
            return list(mine)
        store = PrefixStore(
            f"lightning_zero/{self._name}/{self._num_rounds}", dist.distributed_c10d._get_default_store()
        )
        rank = dist.get_rank()
        if rank != self._ranks[0]:
            store.set(str(rank), mine.decode())
            return list(_await(store, "all"))
        states = [_await(store, str(one)) for one in self._ranks[1:]]
        worst = [max(found) for found in zip(mine, *states, strict=True)]
        store.set("all", bytes(worst).decode())
        return worst


def _await(store: Any, key: str) -> bytes:
    try:
        return Peers.of_world().await_value(store, key, "Choosing the process groups of a model")
    except PeersError as error:
        raise CollectiveError(str(error)) from error


_POOLS: WeakKeyDictionary[Any, dict[str, _Pool]] = WeakKeyDictionary()  # by default group


def borrow(user: Any, ranks: Sequence[int], backend: str, timeout_s: float) -> GroupSet:
    """Return a set of groups over some ranks of the default group for ``user``. Collective: these ranks."""
    is_part = len(ranks) < dist.get_world_size()
    timeout = timedelta(seconds=timeout_s)
    name = f"{'-'.join(map(str, ranks)) if is_part else 'all'}/{backend}/{timeout_s}"
    numbers = count()  # of the sets of a pool, which keeps the first `make`

    def make() -> GroupSet:
        number, on_host = next(numbers), backend if is_pretended() else "gloo"

        def group(kind: str, use: str) -> Any:
            if is_part and kind == "gloo":
                return _named_group(f"lightning_zero/{name}/{number}/{use}", ranks, timeout)
            with _unsplit() if is_part else nullcontext():
                return dist.new_group(ranks, timeout, kind, use_local_synchronization=is_part)

        return GroupSet(partial(group, backend), partial(group, on_host), is_local=backend == "gloo")

    return lend(user, name, ranks, make)


@contextmanager
def _unsplit() -> Iterator[None]:
    """Make groups of their own: a split of the default group's communicator waits for all its ranks (NCCL)."""
    default: Any = dist.group.WORLD
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        yield
    finally:
        default.bound_device_id = bound


def _named_group(name: str, ranks: Sequence[int], timeout: timedelta) -> Any:
    """Return a new gloo group; see Note [Names of groups]. Collective: ``ranks``."""
    ordered = sorted(ranks)
    c10d: Any = dist.distributed_c10d
    store = c10d._get_default_store()
    place = ordered.index(dist.get_rank())
    group, _ = c10d._new_process_group_helper(
        len(ordered), place, ordered, dist.Backend("gloo"), store, name, timeout=timeout
    )
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ordered)}
    return group


def lend(user: Any, name: str, ranks: Sequence[int], make: Callable[[], _Set]) -> _Set:
    """Return one of the sets of this name for ``user``. Collective: ``ranks``, each with the same name.

    Args:
        user: Has the set until it leaves, or is collected.
        name: Of sets that can stand for one another.
        ranks: In ascending order.
        make: Makes a further set. Must not hold ``user``, which would never be collected.
    """
    pools = _POOLS.setdefault(dist.group.WORLD, {})
    if name not in pools:
        pools[name] = _Pool(name, ranks, make)
    return cast(_Set, pools[name].lend(user))


@atexit.register
def destroy_all() -> None:
    """Give all groups back, also those in use: their threads must not outlive the interpreter they call into."""
    for pools in list(_POOLS.values()):
        for pool in pools.values():
            for one in pool.sets:
                one.destroy()
