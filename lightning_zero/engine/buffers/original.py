"""The parameters of one flat buffer in their own dtype, with the values of the master, for a while (ADR 0038)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Protocol

import torch

from lightning_zero.comm.communicator import Communicator, Pending
from lightning_zero.config import Sharding
from lightning_zero.engine.buffers.own_range import OwnRange
from lightning_zero.layout import FlatLayout
from lightning_zero.storage.copies import Copies, Landing
from lightning_zero.storage.store import DeviceStore, Kind

__all__ = ["Original", "RoundedWrites", "flat_views"]


class Lowered(Protocol):
    """The parts of a flat buffer that its original parameters use; see ``lightning_zero/engine/buffers/buffer.py``."""

    name: str
    full: torch.Tensor
    master: torch.Tensor | None
    sharding: Sharding
    communicator: Communicator
    layout: FlatLayout
    own_range: OwnRange
    store: DeviceStore

    @property
    def stepped(self) -> torch.Tensor:
        """The master, or this rank's range of the computed parameters if there is none: (own range,)."""
        ...

    @property
    def raw_computed(self) -> torch.Tensor:
        """The own range in the compute dtype, whether or not a step is due."""
        ...

    def keep_master(self, values: torch.Tensor) -> None:
        """Make a master of values over the own range."""
        ...

    def put_shard(self, values: torch.Tensor) -> None:
        """Write this rank's shard in the compute dtype."""
        ...


class Original:
    """The second face of a buffer whose parameters compute in another dtype than their own.

    Call protocol:

    1. ``gather`` and wait: ``flat`` is whole, and parameters may be bound to ``views``.
    2. ``accept`` takes over writes into ``flat``, exactly.
    3. ``drop``. Graphs and copies of views that the user has kept keep the memory.

    Args:
        buffer: The buffer.
        dtype: The parameters' own.
    """

    def __init__(self, buffer: Lowered, dtype: torch.dtype) -> None:
        self._buffer = buffer
        self._dtype = dtype
        self.flat: torch.Tensor | None = None
        self.views: list[torch.Tensor] = []
        self.changed: set[int] = set()  # slots whose rounded values have become others
        self._kind: Kind = "gathered" if buffer.sharding.params else "parameters"

    @property
    def needs_others(self) -> bool:
        """Whether ``gather`` is a collective."""
        return self._buffer.sharding.optim and self._buffer.communicator.world_size > 1

    def gather(self) -> Pending:
        """Start gathering the masters. Collective unless every rank has all of them: all ranks."""
        if self.flat is None:
            buffer = self._buffer
            self.flat = buffer.store.create(self._kind, buffer.layout.padded_numel, self._dtype)
            self.views = flat_views(self.flat, buffer.layout)
        return self._gather_into(self.flat)

    def serve(self) -> Pending:
        """Take part in a gather whose result is not needed here. Collective: all ranks."""
        with torch.inference_mode(False):
            flat = torch.empty(self._buffer.layout.padded_numel, dtype=self._dtype, device=self._buffer.store.device)
        return self._gather_into(flat)

    def _gather_into(self, flat: torch.Tensor) -> Pending:
        buffer = self._buffer
        what = f"unit `{buffer.name}` in its own dtype"
        with torch.inference_mode(False), torch.no_grad():
            own = flat[buffer.own_range.start : buffer.own_range.stop]
            own.copy_(buffer.stepped)
            if not self.needs_others:
                return Pending(buffer.communicator, what)
            return buffer.communicator.all_gather(flat, own, what)

    def is_changed(self) -> bool:
        """Say whether the own range differs from the master: a write through ``.data`` leaves no other trace."""
        buffer = self._buffer
        assert self.flat is not None
        own = self.flat[buffer.own_range.start : buffer.own_range.stop]
        if buffer.master is None:
            return self._needs_master() or not torch.equal(own, buffer.raw_computed.to(own.device, own.dtype))
        return not torch.equal(own.to(buffer.master.device), buffer.master)

    def accept(self) -> None:
        """Copy ``flat`` into the master, and round it into the compute dtype. No collective."""
        buffer = self._buffer
        assert self.flat is not None
        with torch.inference_mode(False), torch.no_grad():
            own = self.flat[buffer.own_range.start : buffer.own_range.stop]
            if buffer.master is not None:
                buffer.stepped.copy_(own)
            elif self._needs_master():
                buffer.keep_master(own)
            if buffer.sharding.params:
                lo, hi = buffer.layout.shard_range(buffer.communicator.rank)
                buffer.put_shard(self.flat[lo:hi].to(buffer.full.dtype))
            self.round()

    def _needs_master(self) -> bool:
        """Say whether a frozen buffer was given values that 16 bits do not hold; the same on every rank."""
        assert self.flat is not None
        return not torch.equal(self.flat.to(self._buffer.full.dtype).to(self._dtype), self.flat)

    def round(self) -> None:
        """Round ``flat`` into the whole buffer that computes, if that has memory."""
        full = self._buffer.full
        if self.flat is not None and full.untyped_storage().nbytes():
            with torch.inference_mode(False), torch.no_grad():
                self._note_changes(self.flat.to(full.dtype), full)
                full.copy_(self.flat)

    def _note_changes(self, rounded: torch.Tensor, full: torch.Tensor) -> None:
        if torch.equal(rounded, full):
            return
        for index, slot in enumerate(self._buffer.layout.slots):
            if not torch.equal(rounded[slot.offset : slot.stop], full[slot.offset : slot.stop]):
                self.changed.add(index)

    def free_computed(self) -> None:
        """Give the memory of the whole buffer back that computes, below stage 3, where a master has its values."""
        buffer = self._buffer
        if not buffer.sharding.params and buffer.master is not None and buffer.full.untyped_storage().nbytes():
            buffer.full.untyped_storage().resize_(0)
            buffer.store.release("parameters", buffer.full.nbytes)

    def restore_computed(self) -> None:
        """Restore the flat buffer in the compute dtype that ``free_computed`` freed, rounded anew. No collective."""
        full = self._buffer.full
        if not self._buffer.sharding.params and not full.untyped_storage().nbytes():
            full.untyped_storage().resize_(full.nbytes)
            self._buffer.store.adopt("parameters", full.nbytes)
        self.round()

    def leave_storage(self) -> None:
        """Leave the memory of ``flat`` to whoever sees it, and take other memory of any content."""
        assert self.flat is not None
        with torch.inference_mode(False):
            self.flat = torch.empty_like(self.flat)
        self.views = flat_views(self.flat, self._buffer.layout)

    def drop(self) -> None:
        """Forget ``flat``."""
        if self.flat is not None:
            self._buffer.store.give_back(self._kind, self.flat)
        self.flat, self.views, self.changed = None, [], set()


class RoundedWrites:
    """Warns once of a write in 16 bits into a parameter that has a dtype of more.

    Args:
        rank: This rank.
    """

    def __init__(self, rank: int) -> None:
        self._is_first = rank == 0
        self._is_told = False
        self._asked: dict[str, tuple[torch.Tensor, Landing]] = {}  # answers on their way from the device, by name

    def ask(self, name: str, is_written: torch.Tensor, copies: Copies) -> None:
        """Note whether values were written: on a device at a later call, when it is known here without waiting.

        Args:
            name: As below.
            is_written: () bool.
            copies: Of its device.
        """
        for asked, (answer, landing) in list(self._asked.items()):
            if landing.is_done:
                del self._asked[asked]
                self._note(asked, bool(answer))
        if is_written.device.type == "cpu":
            self._note(name, bool(is_written))
        elif not self._is_told and name not in self._asked:
            answer = torch.empty((), dtype=torch.bool, pin_memory=True)
            self._asked[name] = answer, copies.down(answer, is_written)

    def _note(self, name: str, is_written: bool) -> None:
        if is_written:
            self(name, is_seen_here=True)

    def __call__(self, name: str, *, is_seen_here: bool) -> None:
        """Take note of a write into a parameter, or into one of ``unit.*``.

        Args:
            name: The parameter.
            is_seen_here: Only ranks see it whose values have changed. Else all do, and rank 0 warns.
        """
        was_told, self._is_told = self._is_told, True
        if was_told or not (is_seen_here or self._is_first):
            return
        warnings.warn(
            f"Parameter `{name}` computes in 16 bits and was written inside a step: the write was rounded, and small"
            " updates, such as those of an average, vanish. Write between two steps (in a hook of the Trainer), or"
            " inside `gathered(module, write='all')`, on every rank: there parameters have their own dtype.",
            RuntimeWarning,
            stacklevel=2,
        )


def flat_views(flat: torch.Tensor, layout: FlatLayout) -> list[torch.Tensor]:
    """Return one view per slot, each with a version counter of its own.

    So refilling the buffer never trips autograd's version check.
    """
    return [_view(flat, slot.offset, slot.shape) for slot in layout.slots]


def _view(flat: torch.Tensor, offset: int, shape: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode(False):
        stride = torch.empty(tuple(shape), device="meta").stride()
        return torch.empty(0, dtype=flat.dtype, device=flat.device).set_(
            flat.untyped_storage(), offset, tuple(shape), stride
        )
