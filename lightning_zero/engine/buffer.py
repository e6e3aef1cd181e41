"""The parameters of one kind in one unit: a flat buffer, this rank's shard of it, its master and its gradients.

Memory of a buffer of n padded elements on N ranks (stage 3 keeps ``full`` only while the unit is whole):

============  =================  =========================================================================
``full``      n compute dtype    what the parameters are views of; storage given back at stage 3
``shard``     n/N compute dtype  this rank's part; a view of ``full`` below stage 3
``master``    own range          what the optimizer steps; the shard itself when the dtypes agree
``local``     n reduce dtype     sum of this rank's gradients; kept between steps at stages 0 and 1
``reduced``   own range          average over the ranks; this rank's place in ``local`` at stages 0 and 1
============  =================  =========================================================================

The own range is the shard where optimizer states are sharded, else the whole buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lightning_zero.comm.communicator import Communicator, Pending
from lightning_zero.config import Sharding
from lightning_zero.engine.deferred import Update
from lightning_zero.engine.gradient import ShardedGradient, sharded_gradient_class
from lightning_zero.engine.own_range import OwnRange
from lightning_zero.engine.parameter import (
    PendingParameter,
    ReducedParameter,
    ReleasedParameter,
    SleepingParameter,
    raw_grad,
    set_raw_grad,
)
from lightning_zero.engine.rounding import Rounding
from lightning_zero.engine.sleep import BufferSleep
from lightning_zero.layout import FlatLayout
from lightning_zero.storage.copies import Landing
from lightning_zero.storage.disk import DiskStore
from lightning_zero.storage.host import HostStore
from lightning_zero.storage.sleeping import is_asleep, ordinary
from lightning_zero.storage.store import DeviceStore, ShardStore

__all__ = ["BufferKind", "FlatBuffer"]


@dataclass(frozen=True)
class BufferKind:
    """What the parameters of one buffer have in common.

    ``shared`` is the name of a parameter that several parts of the model hold; it has a buffer to itself, so that the
    buffer is the same in all of them.
    """

    original: torch.dtype
    compute: torch.dtype
    master: torch.dtype
    reduce: torch.dtype
    trained: bool
    shared: str | None = None


class FlatBuffer:
    """One flat buffer of a unit.

    Args:
        name: Named in errors.
        params: The parameters, with their values on any device; they are bound to the buffer.
        names: Their fully qualified names.
        kind: The dtypes.
        sharding: What is kept sharded.
        communicator: Moves shards.
        store: Memory of the device.
        home: Where the master, the states of the optimizer and the reduced gradients sleep, if not on the device.
        params_home: Where the shard sleeps at stage 3, if not on the device.
    """

    def __init__(
        self,
        name: str,
        params: Sequence[nn.Parameter],
        names: Sequence[str],
        kind: BufferKind,
        sharding: Sharding,
        communicator: Communicator,
        store: DeviceStore,
        home: ShardStore | None = None,
        params_home: ShardStore | None = None,
    ) -> None:
        # - What lies where
        self.name = name
        self.params = list(params)
        self.kind = kind
        self.sharding = sharding
        self.communicator = communicator
        self.store = store
        self.is_offloaded = home is not None and kind.trained
        self.home = home if home is not None and kind.trained else store
        self.params_home = params_home or store
        self.sleep = BufferSleep(self, self.home) if isinstance(self.home, DiskStore) else None
        shapes = [(key, tuple(param.shape)) for key, param in zip(names, params, strict=True)]
        self.layout = FlatLayout.build(shapes, communicator.world_size)
        numel = self.layout.padded_numel
        self.own_range = OwnRange(self.layout, communicator.rank, is_sharded=sharding.optim)
        # - Values
        self.full = store.create("gathered" if sharding.params else "parameters", numel, kind.compute)
        self.views = [_view(self.full, slot.offset, slot.shape) for slot in self.layout.slots]
        self.shard, self.master = self._fill()
        self.is_whole = True
        self._versions = [0] * len(self.params)  # of the parameters when they were bound; a write moves them
        self._written = False  # the shard may differ from the rounded master
        self._placeholders = [_placeholder(view) for view in self.views] if sharding.params else []
        # - Gradients
        self.gradient_class = sharded_gradient_class(communicator)
        self.local: torch.Tensor | None = None
        self._reduced: torch.Tensor | None = None
        self._landing = Landing()  # of the reduced gradients at home
        self._lent: list[torch.Tensor] = []  # gradients at home that nobody needs but a step that may be running
        self.summed: set[int] = set()  # slots that hold a sum in ``local``
        self.used: set[int] = set()  # slots with a gradient on this rank since the ranks last agreed
        self.has_grad: set[int] = set()  # slots with a gradient on some rank, in ``reduced``
        self._retained: torch.Tensor | None = None  # an earlier ``reduced`` whose place ``local`` needs
        self._target: torch.Tensor | None = None  # where a running reduction writes
        # - A step that was asked for
        self._update: Update | None = None  # not made yet
        self.steps_on: torch.device | None = None  # where states are streamed to for a step; None: where they sleep
        self._rounding: Rounding | None = None  # of the last step, until its values are there
        self.is_stale = False  # whole parameters do not show a step that was asked for
        self.is_spent = False  # a step in the backward has taken the reduced gradients, which nobody has dropped yet
        self.is_ahead = False  # stepped in the backward, and `optimizer.step()` was not called yet
        self.factor: torch.Tensor | None = None  # () fp32; ``reduced`` is still to be multiplied by it
        self.wake: Callable[[], None] | None = None  # brings back what was put aside, which is not computed with
        # - The step window
        self._window_grad: torch.Tensor | None = None  # ``reduced`` in the master's dtype, while the window is open
        self._shown: dict[int, torch.Tensor] = {}  # the gradients that parameters show
        self._entered: set[int] = set()  # slots whose parameter shows what is stepped
        self._rounded: set[int] = set()  # slots whose stepped values the step has rounded into the own range
        if self.sleep is not None and self.master is not None:
            self.sleep.watch_master()
        if isinstance(self.params_home, DiskStore) and sharding.params:
            self.params_home.watch(self.shard, self.flush)
        self.bind()

    def _fill(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Copy the values in, take rank 0's, and return this rank's shard and master.

        Where something is offloaded, a master that has nothing the shard does not have is made when an optimizer is
        attached: a model that is only evaluated needs none.
        """
        kind, communicator = self.kind, self.communicator
        may_wait = kind.original.itemsize <= kind.compute.itemsize and (
            self.is_offloaded or self.params_home is not self.store
        )
        exact = kind.trained and kind.master != kind.compute and not may_wait
        values = torch.zeros_like(self.full, dtype=kind.master) if exact else self.full.zero_()
        for slot, param in zip(self.layout.slots, self.params, strict=True):
            values[slot.offset : slot.stop].copy_(param.detach().reshape(-1))
        communicator.broadcast(values, f"parameters of unit `{self.name}`")
        if exact:
            self.full.copy_(values)
        lo, hi = self.layout.shard_range(communicator.rank)
        shard = self.full[lo:hi]
        if self.sharding.params:
            shard = self.params_home.keep("parameters", self.full[lo:hi], f"parameters of unit `{self.name}`")
        if not exact:
            return shard, None
        return shard, self._keep_master(values[self.own_range.start : self.own_range.stop])

    def _keep_master(self, values: torch.Tensor) -> torch.Tensor:
        return self.home.keep("optimizer", values.to(self.kind.master), f"masters of unit `{self.name}`")

    # -- Values ----------------------------------------------------------------------------------------------------

    @property
    def computed(self) -> torch.Tensor:
        """The own range in the compute dtype: (own range,)."""
        self.flush()
        return self.raw_computed

    @property
    def raw_computed(self) -> torch.Tensor:
        """The same, whether or not a step is due."""
        return self.shard if self.sharding.optim else self.full

    @property
    def stepped(self) -> torch.Tensor:
        """What the optimizer steps: (own range,)."""
        self.flush()
        return self.raw_computed if self.master is None else self.master

    def defer(self, update: Update) -> None:
        """Take a step that is made later."""
        assert self._update is None
        self._update = update
        if self.sharding.params:
            return
        self.is_stale = True
        for param in self.params:
            param.__class__ = PendingParameter

    def flush(self) -> bool:
        """Make the step that was asked for, if one was; say whether one was.

        No collective: other ranks' parts of whole parameters stay as they are.
        """
        if self._update is None:
            return False
        update, self._update = self._update, None
        update.finish()
        self.give_back_lent()
        with torch.inference_mode(False), torch.no_grad():
            self._round()
        return True

    def make_master(self) -> None:
        """Make a master if one is needed and not there: an optimizer is going to step the buffer."""
        sleeps_at_home = self.sharding.params and self.params_home is self.home
        is_needed = self.kind.master != self.kind.compute or (
            not sleeps_at_home and (self.is_offloaded or is_asleep(self.shard))
        )
        if self.master is None and is_needed:
            self.master = self._keep_master(self.computed)
            if self.sleep is not None:
                self.sleep.watch_master()
        if isinstance(self.home, HostStore) and self.master is not None:
            self.home.need_staging(self.raw_computed.nbytes)

    def move_shard(self, home: ShardStore) -> None:
        """Let the shard sleep elsewhere (stage 3), before optimizers are attached."""
        if not self.sharding.params or self.params_home is home:
            return
        self.flush()
        with torch.inference_mode(False), torch.no_grad():
            shard = home.keep("parameters", self.shard, f"parameters of unit `{self.name}`")
        self.params_home.give_back("parameters", self.shard)
        self.shard, self.params_home = shard, home

    def gather(self) -> Pending:
        """Start making the buffer whole. Collective: all ranks. ``bind`` when the result has been waited for."""
        self._refuse_new_values()
        self.flush()
        if not self.sharding.params:
            pending = self.publish() if self.is_stale else None
            return Pending(self.communicator, self.name) if pending is None else pending
        with torch.inference_mode(False), torch.no_grad():
            self.full.untyped_storage().resize_(self.full.nbytes)
            self.store.adopt("gathered", self.full.nbytes)
            return self._gather_into(self.full)

    def _gather_into(self, full: torch.Tensor) -> Pending:
        """Start gathering; a shard in host memory comes up beside what the device computes."""
        what = f"unit `{self.name}`"
        if isinstance(self.params_home, DiskStore):
            lo, hi = self.layout.shard_range(self.communicator.rank)
            return self.communicator.all_gather_later(full, self.params_home.fetch(self.shard, full[lo:hi]), what)
        if self.shard.device == full.device:
            return self.communicator.all_gather(full, self.shard, what)
        with self.store.copies.lane() as landing:
            pending = self.communicator.all_gather(full, self.shard, what)
        return Pending(self.communicator, what, [pending, *landing], keep=[full])

    def serve(self) -> Pending:
        """Take part in a gather whose result is not needed here. Collective: all ranks."""
        self._refuse_new_values()
        self.flush()
        with torch.inference_mode(False), torch.no_grad():
            return self._gather_into(torch.empty_like(self.full))

    def bind(self) -> None:
        """Make the parameters views of the whole buffer."""
        for index, (param, view) in enumerate(zip(self.params, self.views, strict=True)):
            param.__class__ = nn.Parameter
            param.data = view
            self._versions[index] = param._version
        self.is_whole = True
        self.is_stale = False
        self._mark_reduced()

    def release(self) -> None:
        """Give the storage of the whole buffer back (stage 3)."""
        self.collect_writes()
        for param, placeholder in zip(self.params, self._placeholders, strict=True):
            param.__class__ = nn.Parameter
            param.data = placeholder
            param.__class__ = ReleasedParameter
        self.full.untyped_storage().resize_(0)
        self.store.release("gathered", self.full.nbytes)
        self.is_whole = False

    def is_written(self) -> bool:
        """Say whether somebody wrote into a parameter since it was bound."""
        return not self.is_stale and any(
            param._version != version or param.data_ptr() != address
            for param, version, address in zip(self.params, self._versions, self._addresses(), strict=True)
        )

    def _addresses(self) -> list[int]:
        base, size = self.full.data_ptr(), self.full.element_size()
        return [base + slot.offset * size if slot.numel else 0 for slot in self.layout.slots]

    def collect_writes(self) -> None:
        """Take over what was written into whole parameters from outside (clamping, weight swaps)."""
        if self.is_stale:  # a write would have made the step
            return
        written = False
        for index, (param, address) in enumerate(zip(self.params, self._addresses(), strict=True)):
            if param.data_ptr() != address:  # `.data` was pointed elsewhere
                with torch.no_grad():
                    self.views[index].copy_(param.detach())
                param.data = self.views[index]
                written = True
            if param._version != self._versions[index]:
                self._versions[index] = param._version
                written = True
        if written:
            self.accept_writes()

    def accept_writes(self) -> None:
        """Make the values of the whole buffer the shard's."""
        if self.sharding.params:
            lo, hi = self.layout.shard_range(self.communicator.rank)
            self._put_shard(self.full[lo:hi])
        self._written = True

    def _put_shard(self, values: torch.Tensor) -> None:
        with torch.inference_mode(False), torch.no_grad():
            if isinstance(self.params_home, DiskStore):
                self.params_home.put(self.shard, values)
            else:
                self.shard.copy_(values)

    def refresh_master(self) -> None:
        """Bring the master up to date where its rounded value is not what the parameters hold.

        Below stage 3 the values themselves are compared, because a write through ``.data`` leaves no other trace.

        Raises:
            RuntimeError: A step in the backward was made that nobody has asked for yet.
        """
        if self.is_ahead:
            raise RuntimeError(
                f"Unit `{self.name}` was stepped in the backward (`step_in_backward=True`), and its values cannot be"
                " read or saved before `optimizer.step()` is called."
            )
        if self.is_whole:
            self.collect_writes()
        if self.master is None or (self.sharding.params and not self._written):
            return
        self._written = False
        if self.sleep is not None:
            self.sleep.note_writes()
            return
        with torch.inference_mode(False), torch.no_grad():
            values = self.computed.to(self.master.device)
            rounded = self.master.to(values.dtype)
            if not torch.equal(rounded, values):
                self.master.copy_(torch.where(rounded == values, self.master, values.to(self.master.dtype)))

    def gather_stepped(self) -> Pending | None:
        """Start gathering every rank's shard of the masters where each holds all of them (stage 0).

        Collective there: all ranks.
        """
        if self.sharding.optim or self.communicator.world_size == 1:
            return None
        self._awake()
        lo, hi = self.layout.shard_range(self.communicator.rank)
        what = f"masters of unit `{self.name}`"
        with torch.inference_mode(False), torch.no_grad():
            if not is_asleep(self.stepped):
                return self.communicator.all_gather(self.stepped, self.stepped[lo:hi], what)
            whole = self.stepped.clone()
            self.communicator.all_gather(whole, whole[lo:hi], what).wait()
            self.stepped.copy_(whole)
        return None

    def publish(self) -> Pending | None:
        """Make stepped values the parameters': round them, and gather where parameters are whole.

        Collective at stages 1 and 2: all ranks.
        """
        is_rounded = self.flush()
        with torch.inference_mode(False), torch.no_grad():
            if not is_rounded:
                self._round()
            if self.sharding.optim and not self.sharding.params:
                return self.communicator.all_gather(self.full, self.shard, f"unit `{self.name}`")
        return None

    def begin_rounding(self) -> Rounding | None:
        """Return where a step rounds what it steps; None if nothing has to be rounded, or not by the step."""
        target = self.raw_computed
        if self.master is None or (is_asleep(target) and self.sleep is None):
            return None
        if self._rounding is None and self._is_rounded_in_place:
            self._rounding = Rounding(ordinary(target), self.store.copies, None)
        elif self._rounding is None and isinstance(self.home, HostStore):
            self.home.need_staging(target.nbytes)
            self._rounding = Rounding(target, self.store.copies, self.home.staging_slot())
        return self._rounding

    @property
    def _is_rounded_in_place(self) -> bool:
        """Whether a step can write the parameters."""
        return self.raw_computed.device == (self.steps_on or self.stepped.device)

    def _round(self) -> None:
        rounding, self._rounding = self._rounding, None
        if rounding is not None:
            rounding.land()
        if self.master is not None and not self._is_rounded():
            if self.sharding.params:
                self._put_shard(self.master)
            else:
                self.raw_computed.copy_(self.master)
        self._rounded.clear()

    def round_in_place(self) -> None:
        """Round what is stepped, in memory, where the step has not."""
        if self.master is not None and not self._is_rounded():
            ordinary(self.raw_computed).copy_(ordinary(self.master))
            self.note_rounded(range(len(self.params)))

    def note_rounded(self, indices: Iterable[int]) -> None:
        """Note that a step has rounded what it stepped, so that ``publish`` need not."""
        self._rounded.update(indices)

    def _is_rounded(self) -> bool:
        return self.own_range.are_all(self._rounded)

    def published(self) -> None:
        """Note that parameters and masters agree."""
        self._written = False
        for index, param in enumerate(self.params):
            self._versions[index] = param._version

    # -- Gradients -------------------------------------------------------------------------------------------------

    @property
    def reduced(self) -> torch.Tensor | None:
        """The average over the ranks, there for whoever reads it: (own range,)."""
        self._landing.finish()
        return self._reduced

    @reduced.setter
    def reduced(self, values: torch.Tensor | None) -> None:
        self._reduced = values

    def accumulate(self, index: int, grad: torch.Tensor) -> None:
        """Cast and copy, or add, a parameter's gradient into the local sum."""
        local = self._local_sums()
        slot = self.layout.slots[index]
        target = local[slot.offset : slot.stop].view(slot.shape)
        dense = grad.to_dense() if grad.is_sparse else grad
        if index in self.summed:
            target.add_(dense)
        else:
            target.copy_(dense)
            self.summed.add(index)
        self.used.add(index)

    def _awake(self) -> None:
        if self.wake is not None:
            self.wake()

    def _local_sums(self) -> torch.Tensor:
        self._awake()
        if not self.sharding.grads:
            self.flush()  # its gradient is there
        if self.reduced is not None and not self.sharding.grads:
            self.settle()
            lo, hi = self.layout.shard_range(self.communicator.rank)
            self._retained = (self.reduced if self.sharding.optim else self.reduced[lo:hi]).clone()
            self.reduced = None
        if self.local is None:
            numel, dtype = self.layout.padded_numel, self.kind.reduce
            with torch.inference_mode(False):
                self.local = torch.empty(numel, dtype=dtype, device=self.full.device)
            self.store.adopt("gradients", self.local.nbytes)
            for lo, hi in self.layout.gaps():
                self.local[lo:hi].zero_()
        return self.local

    def reduce(self) -> Pending:
        """Start averaging the local sums over the ranks; ``finish_reduce`` when the result has been waited for.

        Collective: all ranks, also those without a gradient here: what they miss counts as zero.
        ZeRO (arXiv:1910.02054) section 5.2.
        """
        with torch.inference_mode(False), torch.no_grad():
            local = self._local_sums()
            for index, slot in enumerate(self.layout.slots):
                if index not in self.summed:
                    local[slot.offset : slot.stop].zero_()
            lo, hi = self.layout.shard_range(self.communicator.rank)
            if self.sharding.grads and self.communicator.world_size > 1:
                self._target = self.store.create("gradients", hi - lo, self.kind.reduce)
            else:
                self._target = local[lo:hi]
            return self.communicator.reduce_scatter(self._target, local, f"gradients of unit `{self.name}`")

    def finish_reduce(self) -> None:
        """Add the average to what was reduced before. No collective; stage 0 still needs ``gather_reduced``."""
        target, local = self._target, self.local
        assert target is not None
        assert local is not None
        with torch.inference_mode(False), torch.no_grad():
            if self._retained is not None:
                target.add_(self._retained)
                self._retained = None
            elif self.sharding.grads and self.reduced is not None:
                self.settle()
                target.add_(self.reduced.to(target.device))
                self._give_back_reduced()
            if self.sharding.grads and self.is_offloaded:
                target = self._bring_home(target)
        is_own_range = self.sharding.optim or self.sharding.grads
        self.reduced, self._target = (target if is_own_range else local), None
        self.summed.clear()
        if self.sharding.grads:
            if self.communicator.world_size > 1:  # alone, what was summed here is the average
                self.store.release("gradients", local.nbytes)
            self.local = None

    def _bring_home(self, target: torch.Tensor) -> torch.Tensor:
        """Move reduced gradients to where they sleep."""
        if self.sleep is not None:
            at_home = self.sleep.keep_gradient(target)
        else:
            at_home = self.home.create("gradients", target.numel(), target.dtype)
            self._landing = self.store.copies.down(at_home, target)
        self.store.release("gradients", target.nbytes)
        return at_home

    def _give_back_reduced(self) -> None:
        """Give up the reduced gradients where they are sharded; a step that is running still reads them."""
        assert self.reduced is not None
        if not is_asleep(self.reduced):  # a record is kept for the next gradient
            self._lent.append(self.reduced)
        self.reduced = None
        if self._update is None:
            self.give_back_lent()

    def give_back_lent(self) -> None:
        """Give memory of gradients back that a step has read."""
        while self._lent:
            self.home.give_back("gradients", self._lent.pop())

    def reduced_or_zeros(self) -> torch.Tensor:
        """Return the average, made of zeros where no rank of this part has a gradient: (own range,)."""
        self._awake()
        self.settle()
        if self.reduced is None:
            with torch.inference_mode(False), torch.no_grad():
                if self.sharding.grads:
                    self.reduced = self.home.create("gradients", self.own_range.numel, self.kind.reduce)
                else:
                    self.reduced = self._local_sums()[self.own_range.start : self.own_range.stop]
                self.reduced.zero_()
        self.has_grad.update(range(len(self.params)))
        self._mark_reduced()
        return self.reduced

    def gather_reduced(self) -> Pending | None:
        """Start gathering the average where every rank steps everything (stage 0). Collective there: all ranks."""
        if self.sharding.optim or self.reduced is None or self.communicator.world_size == 1:
            return None
        lo, hi = self.layout.shard_range(self.communicator.rank)
        with torch.inference_mode(False), torch.no_grad():
            return self.communicator.all_gather(self.reduced, self.reduced[lo:hi], f"gradients of unit `{self.name}`")

    def forget(self, indices: Iterable[int]) -> None:
        """Drop the gradients of some parameters, reduced or not."""
        gone = set(indices)
        self.summed -= gone
        self.used -= gone
        dropped = self.has_grad & gone
        self.has_grad -= gone
        if self.is_spent:
            self.is_spent = self.is_ahead = bool(self.has_grad)
        elif self.has_grad:
            self.flush()  # another optimizer's step reads the same tensor
            self.settle()
            for index in dropped:  # what comes next is added to it
                for values in (self.reduced, self._window_grad):
                    if values is not None:
                        self.own_range.segment(index, values).zero_()
        elif self.reduced is not None or self._retained is not None:
            if self.sharding.grads and self.reduced is not None:
                self._give_back_reduced()
            self.reduced = self._retained = self.factor = self._window_grad = None
        for index in gone:
            if type(self.params[index]) is ReducedParameter:
                self.params[index].__class__ = nn.Parameter

    def _mark_reduced(self) -> None:
        for index in self.has_grad:
            if type(self.params[index]) is nn.Parameter:
                self.params[index].__class__ = ReducedParameter

    def mark_plain(self) -> None:
        """Make parameters with a reduced gradient plain for the time of a forward (compilers look at the class)."""
        for index in self.has_grad:
            if type(self.params[index]) is ReducedParameter:
                self.params[index].__class__ = nn.Parameter

    def mark_reduced(self) -> None:
        """Let reads of ``grad`` find the reduced gradients."""
        self._mark_reduced()

    # -- A step in the backward ------------------------------------------------------------------------------------

    def spend(self) -> None:
        """Give up the reduced gradients, which a step in the backward has taken. ``forget`` ends it."""
        assert self.reduced is not None
        if self.sharding.grads and not is_asleep(self.reduced):
            self._lent.append(self.reduced)
        self.reduced = None
        self.is_spent = self.is_ahead = True
        self._mark_reduced()
        if self.master is None and not self.sharding.params:  # whoever has saved the values for this backward must know
            torch.autograd.graph.increment_version(self.params)
            self._versions = [param._version for param in self.params]

    def _refuse_new_values(self) -> None:
        """Refuse to show stepped values before the step that asks for them."""
        if self.is_ahead and self.master is None:
            raise RuntimeError(
                f"Unit `{self.name}` is used between its step in the backward (`step_in_backward=True`) and"
                " `optimizer.step()`: behind its last gradient in the same backward, or in another forward. Use"
                " `step_in_backward=False`, or in the first case a precision with masters."
            )

    # -- Segments and the step window ------------------------------------------------------------------------------

    def segment(self, index: int) -> torch.Tensor:
        """Return a parameter's segment of what the optimizer steps: 1-D, or whole and in shape at stage 0."""
        return self.own_range.segment(index, self.stepped)

    def gradient(self) -> torch.Tensor | None:
        """Return the reduced gradients for reading, in either dtype: (own range,)."""
        self.settle()
        return self.reduced if self._window_grad is None else self._window_grad

    def unscaled_gradient(self) -> torch.Tensor:
        """Return the reduced gradients that ``factor``, if there is one, still multiplies, at home: (own range,)."""
        assert self.reduced is not None
        if self._window_grad is not None:
            return self._window_grad
        is_here = self.sleep is not None and self.reduced.device == self.stepped.device
        return self._home_copy(self.reduced.dtype) if self._is_away and not is_here else self.reduced

    def known_norm(self, order: float) -> torch.Tensor | None:
        """Return the norm of all reduced gradients, if it is known without reading them: () float64."""
        is_untouched = self.factor is None and self._window_grad is None and is_asleep(self.reduced)
        return self.sleep.norm(order) if is_untouched and self.sleep is not None else None

    @property
    def is_on_host(self) -> bool:
        """Whether what is stepped sleeps elsewhere than on the device, for a while or always."""
        return self.home is not self.store

    @property
    def _is_away(self) -> bool:
        """Whether the reduced gradients are on the device although they are stepped elsewhere (stages 0 and 1)."""
        return self.is_offloaded and not self.sharding.grads

    def _home_copy(self, dtype: torch.dtype) -> torch.Tensor:
        assert self.reduced is not None
        with torch.inference_mode(False), torch.no_grad():
            return self.reduced.to(self.stepped.device, dtype, copy=True)

    def window_grad(self) -> torch.Tensor | None:
        """Return the reduced gradients in the dtype in which they are stepped, for writing: (own range,)."""
        if self.reduced is None:
            return None
        if self.reduced.dtype == self.stepped.dtype and not self._is_away and self._window_grad is None:
            self.settle()
            return self.reduced
        if self._window_grad is None:
            self._window_grad = self._home_copy(self.stepped.dtype)
        self.settle()
        return self._window_grad

    def scale_later(self, indices: set[int], factor: torch.Tensor) -> bool:
        """Keep a factor of the reduced gradients for the step, if they are those of ``indices`` and nobody saw them.

        Returns:
            Whether it was kept; if not, the caller multiplies.
        """
        is_seen = bool(self._shown) or self._window_grad is not None or self.factor is not None
        if is_seen or not self.has_grad <= indices or self.stepped.dtype != torch.float32:
            return False
        self.factor = factor
        return True

    def settle(self) -> None:
        """Multiply the reduced gradients by the factor that was kept for the step."""
        if self.factor is None or self.reduced is None:
            return
        self.flush()  # a step that is due multiplies by itself
        factor, self.factor = self.factor, None
        with torch.inference_mode(False), torch.no_grad():
            if self._window_grad is not None:
                self._window_grad.mul_(factor.to(self._window_grad.device))
            elif self.reduced.dtype == self.stepped.dtype:
                self.reduced.mul_(factor.to(self.reduced.device))
            else:
                factor = factor.to(self.reduced.device)
                self.reduced.copy_(self.reduced.to(self.stepped.dtype).mul_(factor))
        self.clear_padding()

    def clear_padding(self) -> None:
        """Make the padding of the reduced gradients zero again: a factor that is not a number leaves its own there."""
        for values in (self.reduced, self._window_grad):
            if values is not None:
                for start, stop in self.own_range.gaps():
                    values[start:stop].zero_()

    def enter(self, index: int) -> None:
        """Show a parameter as the optimizer steps it: ``data`` is the master's segment; reading ``grad`` shows it."""
        self._awake()
        param = self.params[index]
        param.__class__ = nn.Parameter
        segment = ordinary(self.segment(index))
        same = (segment.data_ptr(), segment.shape, segment.dtype) == (param.data_ptr(), param.shape, param.dtype)
        if not same:
            param.data = segment
        set_raw_grad(param, None)
        self._entered.add(index)
        self._rounded.clear()
        if self.sleep is not None:
            param.__class__ = SleepingParameter
        elif index in self.has_grad and self.reduced is not None:
            param.__class__ = ReducedParameter

    def show(self, index: int) -> None:
        """Let an entered parameter's ``grad`` be its segment of the reduced gradient, if it has one."""
        values = self.window_grad() if index in self.has_grad else None
        if values is None or index not in self._entered or index in self._shown:
            return
        if is_asleep(values):
            values = self._window_grad = values.clone()
        param = self.params[index]
        param.__class__ = nn.Parameter if self.sleep is None else SleepingParameter
        grad = self.own_range.segment(index, values)
        if self.sharding.optim:
            grad.__class__ = self.gradient_class
        self._shown[index] = grad
        set_raw_grad(param, grad)

    def leave(self, index: int) -> None:
        """Show a parameter as its module computes with it, and take over what was done to its ``grad``."""
        param = self.params[index]
        self.take_gradient(index)
        set_raw_grad(param, None)
        self._shown.pop(index, None)
        self._entered.discard(index)
        param.__class__ = nn.Parameter
        if self.is_stale:
            param.data = self.views[index]
            param.__class__ = PendingParameter
        elif self.is_whole:
            param.data = self.views[index]
            self._versions[index] = param._version
            if index in self.has_grad:
                param.__class__ = ReducedParameter
        else:
            param.data = self._placeholders[index]
            param.__class__ = ReleasedParameter

    def take_gradient(self, index: int) -> bool:
        """Take over what was done to an entered parameter's ``grad``; say whether it has a reduced gradient now."""
        shown = self._shown.get(index)
        if shown is None:
            return index in self.has_grad and self.reduced is not None
        grad = raw_grad(self.params[index])
        if grad is None:
            del self._shown[index]
            self.forget([index])
            return False
        if grad is not shown:
            self._replace_gradient(index, grad)
        return True

    def _replace_gradient(self, index: int, grad: torch.Tensor | None) -> None:
        """Take over a tensor that was assigned to a parameter's ``grad``: this rank's segment, or the whole."""
        values = self.window_grad()
        assert values is not None
        assert grad is not None
        with torch.no_grad():
            own = self.own_range.segment(index, values)
            plain = grad.detach().as_subclass(torch.Tensor)
            start, stop = self.own_range.elements(index)
            own.copy_(plain if plain.shape == own.shape else plain.reshape(-1)[start:stop])

    def close_window(self) -> None:
        """Keep what was done to the gradients in the window, in the dtype in which they are kept."""
        if self._window_grad is not None and self.reduced is not None:
            with torch.no_grad():
                self.reduced.copy_(self._window_grad)
        if not self._shown:  # another optimizer's window may be open
            self._window_grad = None

    def strip(self, index: int) -> None:
        """Make a parameter's gradient a plain tensor: optimizers have fast paths for exact classes only."""
        grad = raw_grad(self.params[index])
        if isinstance(grad, ShardedGradient):
            grad.__class__ = torch.Tensor  # type: ignore[assignment]


def _view(full: torch.Tensor, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a view with a version counter of its own: refilling the buffer never trips autograd's version check."""
    with torch.inference_mode(False):
        stride = torch.empty(shape, device="meta").stride()
        return torch.empty(0, dtype=full.dtype, device=full.device).set_(full.untyped_storage(), offset, shape, stride)


def _placeholder(view: torch.Tensor) -> torch.Tensor:
    """Return one NaN element of the view's shape: nothing reads it in silence, and it needs no memory."""
    value = float("nan") if view.is_floating_point() or view.is_complex() else 0
    with torch.inference_mode(False):
        return torch.full((), value, dtype=view.dtype, device=view.device).expand(view.shape)
