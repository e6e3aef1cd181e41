"""Shards on disks: each tensor has a record, and memory only while somebody uses its values.

Call protocol of ``DiskStore`` (each rank has its own; no collectives):

1. ``create`` and ``keep`` return a ``DiskTensor``, which may be used like any tensor: using it reads it.
2. ``put`` gives one new values; they are written while the caller goes on.
3. A ``Visit`` is the fast way for callers that know their tensors: ``begin`` starts reading, ``ready`` waits, ``end``
   starts writing the changed tensors. A visit that was announced begins ahead of its use, when there is room.
4. ``close`` gives everything back.

Note [Room]
    Visits and writes hold at most three times the largest visit in memory: one that is read, one that is used,
    one that is written. A fetch waits for no room, because the thread that would wait is the one that ends the fetches
    before. Tensors that are read by a use outside of visits stay up to the size of one visit; the oldest goes first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from lightning_zero.storage.disk_tensor import DiskTensor, record_owner_of, register, unregister
from lightning_zero.storage.downloads import Downloads
from lightning_zero.storage.nvme import NvmeStore, StorageError, Transfer
from lightning_zero.storage.pages import Pages
from lightning_zero.storage.store import Accounts, Kind

__all__ = ["DiskStore", "Visit"]

_VISITS = 3
_IDLE_BYTES = 2**22  # at least this much may stay in memory


class _DiskRecord:
    """One tensor: its record, and its memory while it has any. All state is guarded by the store's lock."""

    def __init__(self, store: DiskStore, name: str, numel: int, dtype: torch.dtype) -> None:
        self.store = store
        self.name = name
        self.nbytes = numel * dtype.itemsize
        self.record = store.disks.reserve(name, self.nbytes)
        try:
            self.pages = Pages(self.nbytes)
        except OSError as error:
            raise StorageError(f"There is no address space for `{name}`, {self.nbytes} bytes: {error}.") from error
        self.plain = self.pages.content[: self.nbytes].view(dtype)
        self.face = register(self.plain, self)
        # - Values in memory
        self.holds = 0  # who uses the memory
        self.uses = 0  # of them, those outside of visits, which may be inside of each other
        self.has_values = False  # in memory; the read may still be running
        self.is_blank = True  # nothing was written yet: zeros
        self.is_changed = False  # since it was read or written
        self.version = 0  # moves with every change
        self.reading: Transfer | None = None
        self.writing: Transfer | None = None
        # - Called when somebody outside of visits uses it: before it is read, and after, with the values in memory
        self.before_use: Callable[[], object] = lambda: None
        self.after_read: Callable[[], bool] = lambda: False  # whether it changed the values

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that the values take while they are loaded."""
        return self.pages.content.nbytes

    @contextmanager
    def in_memory(self, others: Sequence[_DiskRecord], written: Sequence[_DiskRecord]) -> Iterator[None]:
        """Have the values of ``others``, this one among them, in memory for a while."""
        for one in others:
            one.before_use()
        with self.store.using(others):
            try:
                yield
            finally:
                self.store.note_changes(written)


class DiskStore(Accounts):
    """Shards in records on disks, as ``DiskTensor``.

    Args:
        disks: Where the records are; closed with the store.
        downloads: Brings the values of a device, so that nobody waits for them; None: ``put`` waits.
    """

    def __init__(self, disks: NvmeStore, downloads: Downloads | None = None) -> None:
        super().__init__()
        self.device = torch.device("cpu")
        self.disks = disks
        self._downloads = downloads
        self._entries: list[_DiskRecord] = []
        self._lock = threading.Condition(threading.RLock())
        self._used_bytes = 0  # by visits and writes
        self._largest_visit = 0
        self._waiting: deque[Visit] = deque()  # for room
        self.upcoming: deque[Visit] = deque()  # of steps in their thread, in order
        self._idle: OrderedDict[int, _DiskRecord] = OrderedDict()  # in memory because somebody used them, oldest first
        self._use_lock = threading.RLock()  # of idle values
        self.on_failure: Callable[[], None] = lambda: None  # called before an error of the disks is raised

    # -- Tensors ---------------------------------------------------------------------------------------------------

    def create(self, kind: Kind, numel: int, dtype: torch.dtype, name: str = "") -> DiskTensor:
        """Return a (numel,) tensor of zeros whose room is taken.

        Raises:
            StorageError: The disks are full.
        """
        with self.announcing():
            entry = _DiskRecord(self, name or kind, numel, dtype)
        self._entries.append(entry)
        self.adopt(kind, entry.nbytes)
        return entry.face

    def keep(self, kind: Kind, values: torch.Tensor, name: str = "") -> DiskTensor:
        """Return a tensor with the values of ``values``, which are written while the caller goes on."""
        face = self.create(kind, values.numel(), values.dtype, name)
        self.put(face, values)
        return face

    def put(self, face: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrite a whole disk tensor; it is written while the caller goes on."""
        entry = record_owner_of(face)
        visit = Visit(self, overwritten=[face])
        visit.begin()
        arrival = None
        try:
            visit.ready()
            if self._downloads is None or values.is_cpu:
                with torch.inference_mode(False), torch.no_grad():
                    entry.plain.copy_(values)
            else:
                arrival = self.disks.run(self._downloads.start(values, entry.plain), entry.plain)
                with self._lock:
                    entry.reading = arrival
        except BaseException:
            visit.end(changes=False)
            raise
        visit.end(behind=arrival)

    def fetch(self, face: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
        """Start reading an offloaded tensor; return a function to call before ``out``, (numel,), is used.

        It is read straight into host memory, and through memory of its own for other devices.
        """
        entry = record_owner_of(face)
        with self._lock:
            if out.is_cpu and not entry.has_values and not entry.is_blank:
                transfer = self.disks.read(entry.record, out)
                return lambda: self._await(transfer)
        self.begin_hold(entry, reads=True)

        def finish() -> None:
            try:
                with self.announcing():
                    self.await_hold(entry)
                with torch.inference_mode(False), torch.no_grad():
                    out.copy_(entry.plain)
            finally:
                self.end_hold(entry, changes=False)

        return finish

    def _await(self, transfer: Transfer) -> None:
        with self.announcing():
            transfer.wait()

    @contextmanager
    def announcing(self) -> Iterator[None]:
        """Let others know of an error of the disks before it is raised."""
        try:
            yield
        except StorageError:
            self._keep_unwritten()
            self.on_failure()
            raise

    def _keep_unwritten(self) -> None:
        """Let values in memory that could not be written be used, and written again, now that an error says so."""
        with self._lock:
            for entry in self._entries:
                if entry.writing is not None and entry.writing.has_failed:
                    entry.writing, entry.is_changed = None, True

    def give_back(self, kind: Kind, face: torch.Tensor) -> None:
        """Give memory and room of a disk tensor back, which nobody uses any more."""
        entry = record_owner_of(face)
        with self._use_lock:
            if self._idle.pop(id(entry), None) is not None:
                self.end_hold(entry, changes=False)
        if entry.writing is not None:
            entry.writing.settle()
        self._entries.remove(entry)
        unregister(face)
        self.disks.give_back(entry.record)
        self.release(kind, entry.nbytes)

    def version(self, face: torch.Tensor) -> int:
        """Return a number that moves whenever the values of a disk tensor change."""
        return int(record_owner_of(face).version)

    def is_blank(self, face: torch.Tensor) -> bool:
        """Say whether a disk tensor is zero because nobody has written it."""
        return bool(record_owner_of(face).is_blank)

    def watch(
        self, face: torch.Tensor, before_use: Callable[[], object], after_read: Callable[[], bool] = lambda: False
    ) -> None:
        """Have something called when a disk tensor is used outside of visits.

        Args:
            face: The tensor.
            before_use: Called first.
            after_read: Called when the values are in memory; says whether it has changed them.
        """
        entry = record_owner_of(face)
        entry.before_use, entry.after_read = before_use, after_read

    def drain(self) -> None:
        """Return when nothing is being written.

        Raises:
            StorageError: Something could not be.
        """
        for entry in self._entries:
            writing = entry.writing
            if writing is not None:
                self._await(writing)

    @property
    def awake_bytes(self) -> int:
        """Bytes of memory that hold values now."""
        with self._lock:
            return sum(entry.held_bytes for entry in self._entries if entry.has_values)

    @property
    def most_awake_bytes(self) -> int:
        """Most bytes of memory that hold values at once in steps; see Note [Room]."""
        with self._lock:
            idle = max(self._largest_visit, _IDLE_BYTES)
            return min(_VISITS * self._largest_visit + idle, sum(entry.held_bytes for entry in self._entries))

    def close(self) -> None:
        """Wait for running writes, and give memory and room back."""
        with self._use_lock, self._lock:
            self._idle.clear()
        self.disks.close()
        if self._downloads is not None:
            self._downloads.close()
        for entry in self._entries:
            unregister(entry.face)
            entry.pages.drop()
        self._entries.clear()
        super().close()

    # -- Memory ----------------------------------------------------------------------------------------------------

    def begin_hold(self, entry: _DiskRecord, *, reads: bool) -> None:
        """Start having a entry's values in memory; without ``reads`` the caller overwrites all of them."""
        with self._lock:
            entry.holds += 1
            if entry.has_values:
                return
            entry.has_values = True
            if reads and not entry.is_blank:
                entry.reading = self.disks.read(entry.record, entry.pages.content)

    def await_hold(self, entry: _DiskRecord) -> None:
        """Return when the values may be used and changed.

        Raises:
            StorageError: They could not be read, or were not written.
        """
        for transfer in (entry.reading, entry.writing):
            if transfer is not None:
                transfer.wait()
        entry.reading = None

    def await_overwrite(self, entry: _DiskRecord) -> None:
        """Return when all values may be overwritten; those that could not be read or written are no error then."""
        for transfer in (entry.reading, entry.writing):
            if transfer is not None:
                transfer.settle()
        with self._lock:
            if entry.writing is not None and entry.writing.has_failed:
                entry.is_changed = True  # those in memory are the only ones until all are overwritten
            entry.reading = entry.writing = None

    def end_hold(self, entry: _DiskRecord, *, changes: bool, behind: Transfer | None = None) -> Transfer | None:
        """Stop using a entry's values; return the write that follows, if one does, behind the arrival of new ones."""
        if entry.reading is not None and behind is None:  # nobody waited for it
            entry.reading.settle()
        with self._lock:
            if changes:
                self.note_changes([entry])
            entry.holds -= 1
            if entry.holds:
                return None
            if not entry.is_changed:
                self._drop_unless_written(entry)
                return None
            entry.is_changed = False
            entry.writing = transfer = self.disks.write(entry.record, entry.pages.content, behind)
        transfer.then(lambda: self._written(entry, transfer))
        return transfer

    def note_changes(self, entries: Sequence[_DiskRecord]) -> None:
        """Note that values in memory are not those of the record."""
        with self._lock:
            for entry in entries:
                entry.is_changed, entry.is_blank = True, False
                entry.version += 1

    def _written(self, entry: _DiskRecord, transfer: Transfer) -> None:
        with self._lock:
            if entry.writing is transfer and transfer.has_succeeded:
                entry.writing = None  # else the next use raises its error
            if not entry.holds and not entry.is_changed:
                self._drop_unless_written(entry)

    def _drop_unless_written(self, entry: _DiskRecord) -> None:
        """Give the memory back, unless a write reads it, which gives it back, or has failed."""
        if entry.writing is None:
            entry.has_values = False
            entry.pages.drop()

    # -- Uses outside of visits ------------------------------------------------------------------------------------

    @contextmanager
    def using(self, entries: Sequence[_DiskRecord]) -> Iterator[None]:
        """Have the values of entries in memory for a while; some stay for the next use."""
        with self._use_lock:
            fresh = [entry for entry in entries if id(entry) not in self._idle]
            for entry in fresh:
                self.begin_hold(entry, reads=True)
                self._idle[id(entry)] = entry
            for entry in entries:
                entry.uses += 1
            try:
                for entry in entries:
                    with self.announcing():
                        self.await_hold(entry)
                    self._idle.move_to_end(id(entry))
                for entry in entries:
                    if entry.after_read():
                        self.note_changes([entry])
                yield
                self._rest()
            except StorageError:  # what could not be read is read again by the next use
                for entry in fresh:
                    if self._idle.pop(id(entry), None) is not None:
                        self.end_hold(entry, changes=False)
                raise
            finally:
                for entry in entries:
                    entry.uses -= 1

    def _rest(self) -> None:
        """Drop the values of tensors that have been idle for longest, above the bytes that may stay."""
        limit = max(self._largest_visit, _IDLE_BYTES)
        for key, entry in list(self._idle.items()):
            if sum(one.held_bytes for one in self._idle.values()) <= limit:
                return
            if entry.uses:
                continue
            transfer = self.end_hold(self._idle.pop(key), changes=False)
            if transfer is not None:
                self._await(transfer)

    # -- Room ------------------------------------------------------------------------------------------------------

    @contextmanager
    def next_visit(self) -> Iterator[None]:
        """Make the first upcoming visit, and let the one behind it begin as soon as there is room."""
        visit = self.upcoming.popleft()
        visit.begin()
        if self.upcoming:
            self.upcoming[0].announce()
        try:
            visit.ready()
            yield
        except BaseException:
            visit.end(changes=False)
            raise
        visit.end()

    def begin_visit(self, visit: Visit) -> None:
        """Begin a visit as soon as there is room, behind those that wait already; see Note [Room]."""
        with self._lock:
            self._largest_visit = max(self._largest_visit, visit.nbytes)
            self._waiting.append(visit)
            self._begin_waiting()

    def await_room(self, visit: Visit) -> None:
        """Return when a visit has begun."""
        with self._lock:
            while not visit.has_begun:
                self._lock.wait()

    def give_room(self, nbytes: int) -> None:
        """Give room back; the next visit begins."""
        with self._lock:
            self._used_bytes -= nbytes
            self._begin_waiting()

    def _begin_waiting(self) -> None:
        while self._waiting:
            nbytes = self._waiting[0].nbytes
            if self._used_bytes and self._used_bytes + nbytes > _VISITS * self._largest_visit:
                return
            self._used_bytes += nbytes
            self._waiting.popleft().read()
            self._lock.notify_all()


class Visit:
    """Tensors whose values are in memory from ``begin`` to ``end``. One thread at a time.

    Args:
        store: Of the tensors.
        read: Used and not changed.
        changed: Used and changed.
        overwritten: Not read; all of their values are written.
    """

    def __init__(
        self,
        store: DiskStore,
        *,
        read: Sequence[torch.Tensor] = (),
        changed: Sequence[torch.Tensor] = (),
        overwritten: Sequence[torch.Tensor] = (),
    ) -> None:
        self._store = store
        self._read = [record_owner_of(face) for face in read]
        self._changed = [record_owner_of(face) for face in changed]
        self._overwritten = [record_owner_of(face) for face in overwritten]
        self.announcing = store.announcing
        self.nbytes = sum(entry.held_bytes for entry in self._all)
        self._is_announced = False
        self.has_begun = False  # there was room

    @property
    def _all(self) -> list[_DiskRecord]:
        return [*self._read, *self._changed, *self._overwritten]

    def announce(self) -> None:
        """Let reading begin as soon as there is room; others that need room come later."""
        if not self._is_announced:
            self._is_announced = True
            self._store.begin_visit(self)

    def begin(self) -> None:
        """Start reading, and return when there was room."""
        self.announce()
        self._store.await_room(self)

    def read(self) -> None:
        """Start reading; there is room."""
        self.has_begun = True
        for entry in self._all:
            self._store.begin_hold(entry, reads=entry not in self._overwritten)

    def ready(self) -> None:
        """Return when the values are in memory.

        Raises:
            StorageError: They could not be read, or those before were not written, unless they are overwritten.
        """
        for entry in [*self._read, *self._changed]:
            self._store.await_hold(entry)
        for entry in self._overwritten:
            self._store.await_overwrite(entry)

    def end(self, *, changes: bool = True, behind: Transfer | None = None) -> None:
        """Start writing the changed tensors, and give memory back when they are written.

        Args:
            changes: False after an error: nothing is written.
            behind: The copy that brings the new values.
        """
        transfers = [
            self._store.end_hold(entry, changes=changes and entry not in self._read, behind=behind)
            for entry in self._all
        ]
        writes = [transfer for transfer in transfers if transfer is not None]
        left = [len(writes)]

        def done() -> None:
            with self._store._lock:
                left[0] -= 1
                if left[0] <= 0:
                    self._store.give_room(self.nbytes)

        for transfer in writes:
            transfer.then(done)
        if not writes:
            done()
