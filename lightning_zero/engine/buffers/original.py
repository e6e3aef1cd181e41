"""The parameters of one flat buffer in their own dtype, with the values of the master, for a while (ADR 0038)."""

from __future__ import annotations

import warnings

import torch

from lightning_zero.comm.communicator import Pending
from lightning_zero.engine.buffers.spec import BufferSpec
from lightning_zero.engine.buffers.stepped import SteppedValues
from lightning_zero.engine.buffers.whole import WholeBuffer, flat_views
from lightning_zero.storage.copies import Copies, Landing
from lightning_zero.storage.store import Kind

__all__ = ["Original", "RoundedWrites"]


class Original:
    """The second face of a buffer whose parameters compute in another dtype than their own.

    Call protocol:

    1. ``gather`` and wait: ``flat`` is whole, and parameters may be bound to ``views``.
    2. ``accept`` takes over writes into ``flat``, exactly.
    3. ``drop``. Graphs and copies of views that the user has kept keep the memory.

    Args:
        spec: The facts of the buffer.
        whole: The whole buffer that computes.
        values: The stepped values.
    """

    def __init__(self, spec: BufferSpec, whole: WholeBuffer, values: SteppedValues) -> None:
        self._spec = spec
        self._whole = whole
        self._values = values
        self._dtype = spec.kind.original
        self.is_resting = False  # parameters show themselves in their own dtype whenever they are whole
        self.is_computing = False  # a forward may use the parameters as they compute
        self.flat: torch.Tensor | None = None
        self.views: list[torch.Tensor] = []
        self.changed: set[int] = set()  # slots whose rounded values have become others
        self._kind: Kind = "gathered" if spec.sharding.params else "parameters"

    @property
    def needs_others(self) -> bool:
        """Whether ``gather`` is a collective."""
        return bool(self._spec.sharding.optim) and self._spec.communicator.world_size > 1

    def gather(self) -> Pending:
        """Start gathering the masters. Collective unless every rank has all of them: all ranks."""
        if self.flat is None:
            self.flat = self._spec.store.create(self._kind, self._spec.layout.padded_numel, self._dtype)
            self.views = flat_views(self.flat, self._spec.layout)
        return self._gather_into(self.flat)

    def serve(self) -> Pending:
        """Take part in a gather whose result is not needed here. Collective: all ranks."""
        with torch.inference_mode(False):
            flat = torch.empty(self._spec.layout.padded_numel, dtype=self._dtype, device=self._spec.store.device)
        return self._gather_into(flat)

    def _gather_into(self, flat: torch.Tensor) -> Pending:
        spec = self._spec
        what = f"unit `{spec.name}` in its own dtype"
        with torch.inference_mode(False), torch.no_grad():
            own = flat[spec.own_range.start : spec.own_range.stop]
            own.copy_(self._values.stepped)
            if not self.needs_others:
                return Pending(spec.communicator, what)
            return spec.group.all_gather(flat, own, what)

    def is_changed(self) -> bool:
        """Say whether the own range differs from the master: a write through ``.data`` leaves no other trace."""
        own, master = self._own(), self._values.master
        if master is None:
            computed = self._values.raw_computed
            return self._needs_master() or not torch.equal(own, computed.to(own.device, own.dtype))
        return not torch.equal(own.to(master.device), master)

    def _own(self) -> torch.Tensor:
        """Return the own range of ``flat``."""
        assert self.flat is not None
        return self.flat[self._spec.own_range.start : self._spec.own_range.stop]

    def accept(self) -> None:
        """Copy ``flat`` into the master, and round it into the compute dtype. No collective."""
        assert self.flat is not None
        values = self._values
        with torch.inference_mode(False), torch.no_grad():
            if values.master is not None:
                values.stepped.copy_(self._own())
            elif self._needs_master():
                values.keep_master(self._own())
            if self._spec.sharding.params:
                values.put_params(self.flat[self._spec.params_range].to(self._spec.kind.compute))
            self.round()

    def _needs_master(self) -> bool:
        """Say whether a frozen buffer was given values that 16 bits do not hold; the same on every rank."""
        assert self.flat is not None
        return not torch.equal(self.flat.to(self._spec.kind.compute).to(self._dtype), self.flat)

    def round(self) -> None:
        """Round ``flat`` into the whole buffer that computes, if that has memory."""
        full = self._whole.flat
        if self.flat is not None and full.untyped_storage().nbytes():
            with torch.inference_mode(False), torch.no_grad():
                self._note_changes(self.flat.to(full.dtype), full)
                full.copy_(self.flat)

    def _note_changes(self, rounded: torch.Tensor, full: torch.Tensor) -> None:
        if torch.equal(rounded, full):
            return
        for index, slot in enumerate(self._spec.layout.slots):
            if not torch.equal(rounded[slot.offset : slot.stop], full[slot.offset : slot.stop]):
                self.changed.add(index)

    def free_computed(self) -> None:
        """Give the memory of the whole buffer back that computes, below stage 3, where a master has its values."""
        has_master = self._values.master is not None
        if not self._spec.sharding.params and has_master and self._whole.flat.untyped_storage().nbytes():
            self._whole.free()

    def restore_computed(self) -> None:
        """Restore the flat buffer in the compute dtype that ``free_computed`` freed, rounded anew. No collective."""
        if not self._spec.sharding.params and not self._whole.flat.untyped_storage().nbytes():
            self._whole.allocate()
        self.round()

    def leave_storage(self) -> None:
        """Leave the memory of ``flat`` to whoever sees it, and take other memory of any content."""
        assert self.flat is not None
        with torch.inference_mode(False):
            self.flat = torch.empty_like(self.flat)
        self.views = flat_views(self.flat, self._spec.layout)

    def drop(self) -> None:
        """Forget ``flat``."""
        if self.flat is not None:
            self._spec.store.give_back(self._kind, self.flat)
        self.flat, self.views, self.changed = None, [], set()


class RoundedWrites:
    """Warns once of a write in 16 bits into a parameter that has a dtype of more.

    Args:
        rank: This rank.
    """

    def __init__(self, rank: int) -> None:
        self._is_first = rank == 0
        self._is_told = False
        self._asked: dict[str, torch.Tensor] = {}  # answers on the device, by name, until the next ``send``
        self._sent: list[tuple[list[str], torch.Tensor, Landing]] = []  # those on their way to the host

    def ask(self, name: str, is_written: torch.Tensor) -> None:
        """Note whether values were written: on a device behind ``send``, when it is known here without waiting.

        Args:
            name: As below.
            is_written: () bool.
        """
        self._note_landed()
        if is_written.device.type == "cpu":
            self._note(name, bool(is_written))
        elif not self._is_told:
            self._asked[name] = self._asked[name] | is_written if name in self._asked else is_written

    def send(self, copies: Copies) -> None:
        """Start copying the answers that are on a device to the host, together.

        Args:
            copies: Of the device.
        """
        self._note_landed()
        names, answers = list(self._asked), list(self._asked.values())
        self._asked.clear()
        if answers and not self._is_told:
            host = torch.empty(len(answers), dtype=torch.bool, pin_memory=True, device="cpu")
            self._sent.append((names, host, copies.down(host, torch.stack(answers))))

    def _note_landed(self) -> None:
        while self._sent and self._sent[0][-1].is_done:
            names, answers, _ = self._sent.pop(0)
            for name, is_written in zip(names, answers.tolist(), strict=True):
                self._note(name, is_written)

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
