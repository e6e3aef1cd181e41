"""The homes of a flat buffer: where its master, optimizer states, gradient shard and shard are between uses.

One class per kind of store: device and host memory here, others in files beside this one. Whoever has a home
calls its verbs and does not ask for its kind; ``Placement`` chooses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any, ClassVar, NamedTuple

import torch

from lightning_zero.comm.communicator import Communicator, Pending
from lightning_zero.engine.buffers.own_range import merge_written
from lightning_zero.engine.buffers.rounding import Rounding
from lightning_zero.engine.buffers.spec import BufferSpec
from lightning_zero.engine.buffers.update import StepThread, Update
from lightning_zero.storage.copies import Landing
from lightning_zero.storage.host import HostStore
from lightning_zero.storage.references import num_tensors_in
from lightning_zero.storage.residence import is_in_memory, ordinary
from lightning_zero.storage.store import DeviceStore, ShardStore

__all__ = ["DeviceHome", "Home", "HomeMaker", "HostHome", "PlannedStep", "Shard"]

HomeMaker = Callable[[BufferSpec, Callable[[], object]], "Home"]
"""Makes the home of one buffer: takes the arguments of ``Home`` behind the first."""


class PlannedStep(NamedTuple):
    """The step of one buffer.

    Attributes:
        calls: They make it, in order, on ordinary tensors over the memory of those that are read when they are used.
        states: Returns the optimizer's states over the own range.
        gradient: The gradient shard.
        master: (own range,) or None.
        computed: The compute shard: (own range,).
        round: Casts the master in memory into the compute shard, if that is done behind the calls.
    """

    calls: Sequence[Callable[[], None]]
    states: Callable[[], Sequence[torch.Tensor]]
    gradient: torch.Tensor | None
    master: torch.Tensor | None
    computed: torch.Tensor
    round: Callable[[], None] | None


class Home:
    """The home of one buffer's master, optimizer states and gradient shard, or of its shard at stage 3.

    Call protocol:

    1. ``keep_master`` and ``keep_shard`` copy values there; ``zeros`` makes a state of an optimizer.
    2. ``keep_gradient`` takes an average. Beside the next reduction ``fetch_gradient`` may bring it back, behind it
       ``end_fetch`` and ``add_gradient`` add to it. ``lend_gradient`` and ``give_back_lent`` end it.
    3. ``begin_rounding`` and ``update`` for a step.

    Args:
        store: The store.
        spec: The facts of the buffer.
        flush: Makes its step that is due, if one is.
    """

    where: str  # the kind of store, by which statistics count
    is_apart: ClassVar[bool] = True  # tensors of the device are copied to be stepped, in a thread beside the model
    adds_in_place: ClassVar[bool] = True  # a gradient shard takes the next average where it is
    flat_for: ClassVar[str | None] = None  # the option for which states lie flat, and only runs are stepped
    entered_class: ClassVar[type[Any] | None] = None  # of parameters in the step window, if it is a class of its own

    def __init__(self, store: ShardStore, spec: BufferSpec, flush: Callable[[], object]) -> None:
        self.store = store
        self.steps_on: torch.device | None = None  # states are streamed to it for a step; None: they are not
        self._spec = spec
        self._name = spec.name
        self._own_range = spec.own_range
        self._device = spec.store
        self._flush = flush
        self._lent: list[torch.Tensor] = []  # gradients that nobody needs but a step that may be running

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return self.store.device

    def on_device(self) -> DeviceHome:
        """Return another home of the buffer, on the device."""
        return DeviceHome(self._device, self._spec, self._flush)

    # -- Master, shard, states -------------------------------------------------------------------------------------

    def keep_master(self, values: torch.Tensor) -> torch.Tensor:
        """Return a copy of values as the master: (own range,)."""
        return self.store.keep("optimizer", values, f"masters of unit `{self._name}`")

    def give_back_master(self, master: torch.Tensor) -> None:
        """Take a master back that nobody reads any more."""
        self.store.give_back("optimizer", master)

    def forget_master(self, master: torch.Tensor) -> None:
        """Leave the memory of a master to the program's tensors that lie in it."""
        self.store.release("optimizer", master.nbytes)

    def keep_shard(self, values: torch.Tensor) -> Shard:
        """Return a copy of values as the shard of stage 3: (n / ranks,)."""
        kept = self.store.keep("parameters", values, f"parameters of unit `{self._name}`")
        return Shard(kept, self._device, self.store)

    def take_writes(
        self, master: torch.Tensor, computed: Callable[[], torch.Tensor], but_for: Set[int]
    ) -> torch.Tensor | None:
        """Take values over into the master that are not the rounded master's.

        Args:
            master: The master.
            computed: Returns the compute shard behind the step that is due: (own range,).
            but_for: Slots whose master counts.

        Returns:
            Whether there were any: () bool; None where that is found out when the master is read.
        """
        return merge_written(master, computed().to(master.device), self._own_range, but_for)

    def gather_whole(self, values: torch.Tensor, communicator: Communicator, what: str) -> Pending | None:
        """Gather every rank's shard into masters of whole buffers; start that if they are on the device.

        Others are gathered there and copied back, because NCCL sends nothing from host memory. Collective: all ranks.
        """
        is_here = is_in_memory(values) and values.device == self._device.device
        whole = values if is_here else values.to(self._device.device, copy=True)
        numel = whole.numel() // communicator.world_size
        lo = communicator.rank * numel
        pending = communicator.all_gather(whole, whole[lo : lo + numel], what)
        if is_here:
            return pending
        pending.wait()
        values.copy_(whole)
        return None

    def zeros(self, dtype: torch.dtype) -> torch.Tensor:
        """Return a state of an optimizer: (own range,)."""
        raise NotImplementedError

    def is_zero(self, state: torch.Tensor) -> bool:
        """Say whether a state is known to be zero."""
        return False

    def give_back_state(self, state: torch.Tensor) -> None:
        """Give the room of a state back."""

    # -- Gradients -------------------------------------------------------------------------------------------------

    def keep_gradient(self, average: torch.Tensor) -> torch.Tensor:
        """Return an average, which was made on the device, as the gradient shard: (own range,)."""
        raise NotImplementedError

    def zero_gradient(self, dtype: torch.dtype) -> torch.Tensor:
        """Return a gradient shard of zeros: (own range,)."""
        return self.store.create("gradients", self._own_range.numel, dtype).zero_()

    def await_gradient(self) -> None:
        """Return when the gradient shard has come."""

    def fetch_gradient(self, gradient: torch.Tensor) -> None:
        """Start bringing a gradient shard to the device, beside a reduction that is to be added to it."""

    def end_fetch(self, gradient: torch.Tensor | None) -> None:
        """Forget the values that were brought, unless they are those of this gradient shard."""

    def add_gradient(self, average: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Add an average on the device to a gradient shard, in its memory; return that."""
        raise NotImplementedError

    def bring_gradient(self, average: torch.Tensor) -> torch.Tensor:
        """Return an average that is not kept here (stages 0 and 1) for a step; ``await_brought`` before it is used."""
        return average

    def await_brought(self) -> None:
        """Return when the averages of ``bring_gradient`` have come."""

    def lend_gradient(self, gradient: torch.Tensor) -> None:
        """Take a gradient shard back when the step that may be running has read it."""
        self._lent.append(gradient)

    def give_back_lent(self) -> None:
        """Give memory of gradients back that a step has read."""
        while self._lent:
            self.store.give_back("gradients", self._lent.pop())

    def in_memory(self, values: torch.Tensor) -> torch.Tensor:
        """Return gradients whose values are in memory."""
        return values

    def norm(self, order: float) -> torch.Tensor | None:
        """Return the norm of the gradient shard as it was kept, if it is known: () float64."""
        return None

    # -- Steps -----------------------------------------------------------------------------------------------------

    def expect_rounding(self, nbytes: int) -> None:
        """Take note of the bytes that a step of the buffer rounds."""

    def begin_rounding(self, master: torch.Tensor, computed: torch.Tensor) -> Rounding | None:
        """Return the target into which a step casts the master; None if the step does not cast."""
        if not is_in_memory(computed) or not self._can_round_in_place(master, computed):
            return None
        return Rounding(ordinary(computed), self._device.copies, None)

    def _can_round_in_place(self, master: torch.Tensor, computed: torch.Tensor) -> bool:
        return computed.device == (self.steps_on or master.device)

    def update(self, thread: StepThread, step: PlannedStep) -> Update:
        """Return the update that makes a step, in the thread if the buffer is offloaded."""
        return Update(self._name, step.calls, thread=thread.executor() if self.is_apart else None)


class DeviceHome(Home):
    """A home in device memory, which may be moved to host memory for a while."""

    where = "device"
    is_apart = False

    def move(self, master: torch.Tensor | None, store: ShardStore) -> torch.Tensor | None:
        """Be in another store from now on; return the master there, if there is one."""
        before, self.store = self.store, store
        self.where = "device" if store is self._device else "host"
        if master is None:
            return None
        moved = self.keep_master(master)
        before.give_back("optimizer", master)
        return moved

    def zeros(self, dtype: torch.dtype) -> torch.Tensor:
        """Return a state of an optimizer: (own range,)."""
        return torch.zeros(self._own_range.numel, dtype=dtype, device=self.device)

    def keep_gradient(self, average: torch.Tensor) -> torch.Tensor:
        """Return the average itself."""
        return average

    def add_gradient(self, average: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Add an average to a gradient shard, in its memory; return that."""
        gradient.add_(average)
        self._device.release("gradients", average.nbytes)
        return gradient


class _Fetched(NamedTuple):
    """A gradient shard on its way to the device.

    Attributes:
        values: Where it comes.
        landing: When it is there.
        version: Of the gradient shard when this was started.
    """

    values: torch.Tensor
    landing: Landing
    version: int


class HostHome(Home):
    """A home in host memory."""

    where = "host"

    def __init__(self, store: HostStore, spec: BufferSpec, flush: Callable[[], object]) -> None:
        super().__init__(store, spec, flush)
        self._host = store
        self._landing = Landing()  # of the gradient shard
        self._brought = Landing()  # of averages for a step
        self._num_tensors = 0  # in its memory when it was sent there
        self._fetched: _Fetched | None = None

    def zeros(self, dtype: torch.dtype) -> torch.Tensor:
        """Return a state of an optimizer, locked, so that it can be streamed: (own range,)."""
        return self._host.allocate(self._own_range.numel, dtype).zero_()  # statistics count states themselves

    def keep_gradient(self, average: torch.Tensor) -> torch.Tensor:
        """Start copying an average here; ``await_gradient`` before the copy is used."""
        return self._send(average, self._host.create("gradients", average.numel(), average.dtype))

    def _send(self, average: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        self._landing = self._device.copies.down(gradient, average)
        self._num_tensors = num_tensors_in(gradient)
        self._device.release("gradients", average.nbytes)
        return gradient

    def await_gradient(self) -> None:
        """Return when the gradient shard has come."""
        self._landing.finish()

    def fetch_gradient(self, gradient: torch.Tensor) -> None:
        """Start bringing a gradient shard to the device, if nobody else has it."""
        if num_tensors_in(gradient) != self._num_tensors:
            return
        copies = self._device.copies
        values = self._device.create("gradients", gradient.numel(), gradient.dtype)
        landing = copies.up(values, gradient, copies.mark(), self._landing)
        self._fetched = _Fetched(values, landing, gradient._version)

    def end_fetch(self, gradient: torch.Tensor | None) -> None:
        """Forget the values that were brought, unless they are those of this gradient shard and nobody else has it."""
        fetched = self._fetched
        if fetched is None:
            return
        self._device.release("gradients", fetched.values.nbytes)
        is_same = gradient is not None and gradient._version == fetched.version
        if not is_same or gradient is None or num_tensors_in(gradient) != self._num_tensors:
            self._fetched = None

    def add_gradient(self, average: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Add an average to a gradient shard on the device, and start copying the sum to its memory; return that."""
        fetched, self._fetched = self._fetched, None
        if fetched is None:
            self.await_gradient()
            average.add_(gradient.to(average.device))
        else:
            fetched.landing.wait()
            average.add_(fetched.values)
        return self._send(average, gradient)

    def bring_gradient(self, average: torch.Tensor) -> torch.Tensor:
        """Start copying an average here, and lend the copy to the step; one on the device takes the average itself."""
        if self.steps_on is not None:
            return average
        copy = self._host.create("gradients", average.numel(), average.dtype)
        self._brought = self._device.copies.down(copy, average)  # behind earlier ones, in one stream
        self.lend_gradient(copy)
        return copy

    def await_brought(self) -> None:
        """Return when the averages of ``bring_gradient`` have come."""
        self._brought.finish()

    def give_back_lent(self) -> None:
        """Give memory of gradients back that a step has read, or that a rank without elements has not."""
        self.await_brought()
        super().give_back_lent()

    def expect_rounding(self, nbytes: int) -> None:
        """Make staging slots that hold the rounded values."""
        self._host.need_staging(nbytes)

    def _can_round_in_place(self, master: torch.Tensor, computed: torch.Tensor) -> bool:
        return computed.device in (self.steps_on, master.device)  # a step on the device copies to offloaded ones

    def begin_rounding(self, master: torch.Tensor, computed: torch.Tensor) -> Rounding | None:
        """Return the target into which a step casts the master: the parameters, or memory on the way to them."""
        rounding = super().begin_rounding(master, computed)
        if rounding is not None or not is_in_memory(computed):
            return rounding
        self._host.need_staging(computed.nbytes)
        return Rounding(computed, self._device.copies, self._host.staging_slot())


class Shard:
    """This rank's shard of a flat buffer in the compute dtype: at stage 3 in a store, else a view of the whole buffer.

    Args:
        values: (n / ranks,).
        device: The store on the device.
        store: Its own.
    """

    def __init__(self, values: torch.Tensor, device: DeviceStore, store: ShardStore) -> None:
        self.values = values
        self._device = device
        self._store = store
        self._uploads: Sequence[Landing] = ()  # of the last gather, from host memory

    def put(self, values: torch.Tensor) -> None:
        """Overwrite it."""
        self.await_uploads()
        self.values.copy_(values)

    def gather_into(self, full: torch.Tensor, communicator: Communicator, what: str) -> Pending:
        """Start gathering all ranks' shards; one in host memory is uploaded while the device computes.

        Collective: all ranks.
        """
        if self.values.device == full.device:
            return communicator.all_gather(full, self.values, what)
        with self._device.copies.lane() as landing:
            pending = communicator.all_gather(full, self.values, what)
        self._uploads = landing  # one stream: those before come first
        return Pending(communicator, what, [pending, *landing], keep=[full])

    def await_uploads(self) -> None:
        """Return when it may be written: no copy to the device reads it."""
        for landing in self._uploads:
            landing.finish()
        self._uploads = ()

    def give_back(self) -> None:
        """Give its memory back."""
        self._store.give_back("parameters", self.values)
