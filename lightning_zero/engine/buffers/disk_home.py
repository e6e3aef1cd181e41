"""A flat buffer's home on disks: its master, its optimizer states, its gradient shard, its shard (ADR 0025).

Note [Reading each tensor once a step]
    A gradient goes down when it is reduced, and its norm is taken on the way, so that clipping reads nothing. A step
    reads master, states and gradient of one buffer while those of the buffer before are stepped, and writes masters
    and states while those of the next one are. Writes into parameters from outside are taken over in the same
    visit. Everybody else who uses one of these tensors wakes it, after the step that is due.
"""

from __future__ import annotations

from collections.abc import Callable, Set

import torch

from lightning_zero.comm.communicator import Communicator, Pending
from lightning_zero.engine.buffers.disk_parameter import DiskParameter
from lightning_zero.engine.buffers.home import Home, PlannedStep, Shard
from lightning_zero.engine.buffers.own_range import merge_written
from lightning_zero.engine.buffers.rounding import Rounding
from lightning_zero.engine.buffers.sharded_gradient import norm_in_double
from lightning_zero.engine.buffers.spec import BufferSpec
from lightning_zero.engine.buffers.update import StepThread, Update
from lightning_zero.storage.disk import DiskStore, Visit
from lightning_zero.storage.residence import is_in_memory, ordinary
from lightning_zero.storage.store import DeviceStore

__all__ = ["DiskHome"]


class DiskHome(Home):
    """A home on disks. Its tensors are disk tensors, which anybody may use."""

    where = "disk"
    adds_in_place = False  # records are kept, and a step that is due still reads them
    flat_for = "`Offload(optimizer='nvme')`"
    entered_class = DiskParameter

    def __init__(self, store: DiskStore, spec: BufferSpec, flush: Callable[[], object]) -> None:
        super().__init__(store, spec, flush)
        self._disk = store
        self._master: torch.Tensor | None = None
        self._gradient: torch.Tensor | None = None  # from the first one
        self._norm: tuple[int, torch.Tensor] | None = None  # of the gradient, with its version
        self._to_merge: set[int] = set()  # slots whose parameters may have been written from outside
        self._computed: Callable[[], torch.Tensor] | None = None  # with these writes

    # -- Master, shard, states -------------------------------------------------------------------------------------

    def keep_master(self, values: torch.Tensor) -> torch.Tensor:
        """Return the master, which anybody may use: the step that is due comes first, then writes from outside."""
        self._master = super().keep_master(values)
        self._disk.watch(self._master, self._flush, self._merge_if_due)
        return self._master

    def keep_shard(self, values: torch.Tensor) -> Shard:
        """Return a copy of values as the shard of stage 3: (n / ranks,)."""
        kept = self._disk.keep("parameters", values, f"parameters of unit `{self._name}`")
        self._disk.watch(kept, self._flush)
        return _DiskShard(kept, self._device, self._disk)

    def take_writes(
        self, master: torch.Tensor, computed: Callable[[], torch.Tensor], but_for: Set[int]
    ) -> torch.Tensor | None:
        """Note that parameters may have been written from outside; the master takes that over when it is read.

        By then a step window may be open, in which they show the master itself.
        """
        self._to_merge |= self._own_range.slots - but_for
        self._computed = computed
        return None

    def _merge_if_due(self) -> bool:
        slots, self._to_merge = self._to_merge, set()
        if not slots or self._computed is None:
            return False
        try:
            return self._merge(self._computed().clone(), slots)
        except BaseException:  # the read of the parameters; the next use of the master tries again
            self._to_merge |= slots
            raise

    def _merge(self, values: torch.Tensor, slots: Set[int]) -> bool:
        """Take over values of some slots that are not the rounded master's; say whether there were any."""
        assert self._master is not None
        master = ordinary(self._master)
        others = self._own_range.slots - slots
        return bool(merge_written(master, values.to(master.device), self._own_range, others))

    def zeros(self, dtype: torch.dtype) -> torch.Tensor:
        """Return a state of an optimizer: (own range,)."""
        name = f"optimizer states of unit `{self._name}`"
        state = self._disk.create("optimizer", self._own_range.numel, dtype, name)
        self._disk.watch(state, self._flush)
        return state

    def is_zero(self, state: torch.Tensor) -> bool:
        """Say whether a state is zero because nobody has written it."""
        return self._disk.is_blank(state)

    def give_back_state(self, state: torch.Tensor) -> None:
        """Give the room of a state back; using it is an error from here on."""
        self._disk.give_back("optimizer", state)

    # -- Gradients -------------------------------------------------------------------------------------------------

    def keep_gradient(self, average: torch.Tensor) -> torch.Tensor:
        """Write an average over earlier ones on disk, keep its norm, and return the tensor on disk."""
        gradient = self._put_gradient(average)
        self._device.release("gradients", average.nbytes)
        return gradient

    def zero_gradient(self, dtype: torch.dtype) -> torch.Tensor:
        """Return a gradient shard of zeros: (own range,)."""
        return self._put_gradient(torch.zeros(self._own_range.numel, dtype=dtype, device=self._device.device))

    def _put_gradient(self, values: torch.Tensor) -> torch.Tensor:
        if self._gradient is None:
            name = f"gradients of unit `{self._name}`"
            self._gradient = self._disk.create("gradients", values.numel(), values.dtype, name)
            self._disk.watch(self._gradient, self._flush)
        self._flush()  # it reads the gradient before
        norm = norm_in_double(values)
        self._disk.put(self._gradient, values)
        self._norm = self._disk.version(self._gradient), norm
        return self._gradient

    def bring_gradient(self, average: torch.Tensor) -> torch.Tensor:
        """Return an average that is not kept here (stages 0 and 1) in host memory."""
        with torch.inference_mode(False), torch.no_grad():
            return average.to(self.device)

    def lend_gradient(self, gradient: torch.Tensor) -> None:
        """Keep the record for the next gradient."""

    def in_memory(self, values: torch.Tensor) -> torch.Tensor:
        """Return gradients whose values are in memory."""
        return values.clone() if not is_in_memory(values) else values

    def norm(self, order: float) -> torch.Tensor | None:
        """Return the norm of the gradient on disk, if nobody has written that: () float64."""
        if order != 2.0 or self._norm is None or self._gradient is None:
            return None
        version, norm = self._norm
        return norm if version == self._disk.version(self._gradient) else None

    # -- Steps -----------------------------------------------------------------------------------------------------

    def begin_rounding(self, master: torch.Tensor, computed: torch.Tensor) -> Rounding | None:
        """Return the target into which a step casts the master: the parameters, which may be on disks too."""
        in_place = self._can_round_in_place(master, computed)
        return Rounding(ordinary(computed), self._device.copies, None) if in_place else None

    def update(self, thread: StepThread, step: PlannedStep) -> Update:
        """Return the update that brings a step's tensors into memory and makes it there."""
        master = [step.master] if step.master is not None else []
        merged, self._to_merge = self._to_merge if master else set(), set()
        shards = [step.computed] if not is_in_memory(step.computed) else []
        is_overwritten = bool(master) and step.round is not None and not merged
        visit = Visit(
            self._disk,
            read=[step.gradient] if not is_in_memory(step.gradient) and step.gradient is not None else [],
            changed=[*master, *step.states(), *([] if is_overwritten else shards)],
            overwritten=shards if is_overwritten else [],
        )
        calls = list(step.calls)
        if merged:
            calls.insert(0, lambda: _ignore(self._merge(ordinary(step.computed), merged)))
        if master and step.round is not None:
            calls.append(step.round)
        self._disk.upcoming.append(visit)
        during = self._disk.next_visit
        return Update(self._name, calls, thread=thread.executor(), during=during, announcing=visit.announcing)


class _DiskShard(Shard):
    """A shard on disks."""

    def __init__(self, values: torch.Tensor, device: DeviceStore, store: DiskStore) -> None:
        super().__init__(values, device, store)
        self._disk = store

    def put(self, values: torch.Tensor) -> None:
        """Overwrite it; it is written while the caller goes on."""
        self._disk.put(self.values, values)

    def gather_into(self, full: torch.Tensor, communicator: Communicator, what: str) -> Pending:
        """Start reading it into its place and gathering all ranks' shards. Collective: all ranks."""
        lo = communicator.rank * self.values.numel()
        place = full[lo : lo + self.values.numel()]
        return communicator.all_gather_later(full, self._disk.fetch(self.values, place), what)


def _ignore(value: object) -> None:
    del value
