"""The values of the parameters of one kind in one unit: a flat buffer, this rank's shard of it, its master.

Memory of a buffer of n padded elements on N ranks (stage 3 keeps ``full`` only while the unit is whole):

============  =================  =========================================================================
``full``      n compute dtype    parameters are views of it; storage freed at stage 3
``shard``     n/N compute dtype  this rank's part; a view of ``full`` below stage 3
``master``    own range          stepped by the optimizer; the shard itself when the dtypes agree. A frozen buffer
                                 has one if 16 bits do not hold its values
``original``  n own dtype        the masters of all ranks, while parameters are shown in their own dtype
``local``     n reduce dtype     sum of this rank's gradients; kept between steps at stages 0 and 1
``reduced``   own range          average over the ranks; this rank's place in ``local`` at stages 0 and 1
============  =================  =========================================================================

The own range is the shard where optimizer states are sharded, else the whole buffer. ``local`` and ``reduced`` are
those of ``FlatBuffer.gradients``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass

import torch
from torch import nn

from lightning_zero.comm.communicator import Communicator, Pending
from lightning_zero.config import Sharding
from lightning_zero.engine.buffers.aliases import Aliases
from lightning_zero.engine.buffers.deferred import Deferral, Update
from lightning_zero.engine.buffers.gradients import BufferGradients
from lightning_zero.engine.buffers.home import DeviceHome, HomeMaker, PlannedStep, Shard, Tenant
from lightning_zero.engine.buffers.labels import label
from lightning_zero.engine.buffers.original import Original, RoundedWrites, flat_views
from lightning_zero.engine.buffers.own_range import OwnRange
from lightning_zero.engine.buffers.parameter import (
    LoweredParameter,
    PendingParameter,
    ReducedParameter,
    ReleasedParameter,
    has_class,
    placeholder,
    restore_class,
    swap_class,
)
from lightning_zero.engine.buffers.rounding import Rounding
from lightning_zero.engine.buffers.window import BufferWindow
from lightning_zero.layout import FlatLayout
from lightning_zero.storage.references import num_tensors_in
from lightning_zero.storage.sleeping import is_asleep, ordinary
from lightning_zero.storage.store import DeviceStore, ShardStore

__all__ = ["BufferKind", "FlatBuffer"]


@dataclass(frozen=True)
class BufferKind:
    """The dtypes and properties that all parameters of one flat buffer share.

    ``shared`` is the name of a parameter that several parts of the model hold; it has a buffer to itself, so that the
    buffer is the same in all of them.
    """

    original: torch.dtype
    compute: torch.dtype
    master: torch.dtype
    reduce: torch.dtype
    trained: bool
    shared: str | None = None

    @property
    def is_rounded(self) -> bool:
        """Whether parameters compute in fewer bits than their own."""
        return self.original.itemsize > self.compute.itemsize

    @property
    def shown(self) -> torch.dtype:
        """The dtype in which values are read, saved and exported: that of the master, if they have or may have one."""
        return self.master if self.trained or self.is_rounded else self.compute


class FlatBuffer:
    """One flat buffer of a unit.

    Args:
        name: Named in errors.
        params: The parameters, with their values on any device; they are bound to the buffer.
        names: Their fully qualified names.
        kind: The dtypes.
        sharding: The tensors that are kept sharded.
        communicator: Moves shards.
        store: Memory of the device.
        home: Makes the home of the master, the optimizer states and the gradient shard, if not the device.
        params_home: Makes the home of the shard at stage 3, if not the device.
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
        home: HomeMaker | None = None,
        params_home: HomeMaker | None = None,
    ) -> None:
        # - Parameters, dtypes, stores
        self.name = name
        self.params = list(params)
        self.kind = kind
        self.sharding = sharding
        self.communicator = communicator
        self.store = store
        self._is_stepped = kind.trained  # an optimizer steps it, or has
        self._is_widened = False  # has a master for values that are going to be loaded
        shapes = [(key, tuple(param.shape)) for key, param in zip(names, params, strict=True)]
        self.layout = FlatLayout.build(shapes, communicator.world_size)
        numel = self.layout.padded_numel
        self.own_range = OwnRange(self.layout, communicator.rank, is_sharded=sharding.optim)
        tenant = Tenant(name, self.own_range, store, self.flush)
        away = home(tenant) if home is not None else None
        self.home = away if away is not None and kind.trained else DeviceHome(store, tenant)
        self._shard_home = params_home(tenant) if params_home is not None else self.home.on_device()
        frozen_home = away or (self._shard_home if self._shard_home.is_apart else self.home)
        self._master_home = self.home if kind.trained else frozen_home
        # - Values
        self.full = store.create("gathered" if sharding.params else "parameters", numel, kind.compute)
        self.views = flat_views(self.full, self.layout)
        self.shard, self.master = self._fill()
        self.original = Original(self, kind.original) if kind.original != kind.compute else None
        self.is_resting = False  # parameters show themselves in their own dtype whenever they are whole
        self.is_computing = False  # a forward may use the parameters as they compute
        self.is_whole = True
        self._versions = [0] * len(self.params)  # of the parameters when they were bound; a write moves them
        self._written = False  # the shard may differ from the rounded master
        self.on_rounded_write: RoundedWrites | None = None  # told of a parameter that was written in 16 bits
        self._all_placeholders: dict[torch.dtype, list[torch.Tensor]] = {}
        self._placeholders = self._placeholders_of(kind.compute) if sharding.params else []
        self.handles: list[None] = []  # one for each tensor in the whole buffer that autograd saved and can do without
        self.moved: Callable[[int, int], None] | None = None  # called with the old and the new address of its storage
        self._own_references: int | None = None  # to the storage, when the buffer is released
        # - A step that was asked for
        self._update: Update | None = None  # not made yet
        self._rounding: Rounding | None = None  # of the last step, until its values are there
        self.is_stale = False  # whole parameters are older than the master: a step is due, or is not gathered yet
        self._rounded: set[int] = set()  # slots whose stepped values the step has rounded into the own range
        self.aliases: dict[int, Aliases] = {}  # by slot; set when the buffer is made
        self.wake: Callable[[], None] | None = None  # brings back the states that ``offload_states`` has moved
        # - Gradients
        self.gradients = BufferGradients(self, kind.reduce)
        self.window = BufferWindow(self, self.gradients)
        self.bind()

    def _fill(self) -> tuple[Shard, torch.Tensor | None]:
        """Copy the values in, take rank 0's, and return this rank's shard and master.

        Where something is offloaded, a master that has nothing the shard does not have is made when an optimizer is
        attached: a model that is only evaluated needs none.
        """
        kind, communicator = self.kind, self.communicator
        may_wait = kind.original.itemsize <= kind.compute.itemsize and (self.home.is_apart or self._shard_home.is_apart)
        exact = (kind.trained or kind.is_rounded) and kind.master != kind.compute and not may_wait
        values = torch.zeros_like(self.full, dtype=kind.master) if exact else self.full.zero_()
        for slot, param in zip(self.layout.slots, self.params, strict=True):
            values[slot.offset : slot.stop].copy_(param.detach().reshape(-1))
        communicator.broadcast(values, f"parameters of unit `{self.name}`")
        if exact:
            self.full.copy_(values)
        lo, hi = self.layout.shard_range(communicator.rank)
        if self.sharding.params:
            shard = self._shard_home.keep_shard(self.full[lo:hi])
        else:
            shard = Shard(self.full[lo:hi], self.store, self.store)
        if not exact or not (kind.trained or kind.shared is not None or bool((self.full != values).any())):
            return shard, None
        return shard, self._keep_master(values[self.own_range.start : self.own_range.stop])

    def _keep_master(self, values: torch.Tensor) -> torch.Tensor:
        return self._master_home.keep_master(values.to(self.kind.master))

    # -- Values --------------------------------------------------------------------------------------------------------

    @property
    def computed(self) -> torch.Tensor:
        """The own range in the compute dtype: (own range,)."""
        self.flush()
        return self.raw_computed

    @property
    def raw_computed(self) -> torch.Tensor:
        """The same, whether or not a step is due."""
        return self.shard.values if self.sharding.optim else self.full

    @property
    def stepped(self) -> torch.Tensor:
        """The master, or this rank's range of the computed parameters if there is none: (own range,)."""
        self.flush()
        return self.raw_computed if self.master is None else self.master

    def segment(self, index: int) -> torch.Tensor:
        """Return a parameter's segment of ``stepped``: 1-D, or the whole parameter in its shape at stage 0."""
        return self.own_range.segment(index, self.stepped)

    @property
    def entered(self) -> Set[int]:
        """The slots whose parameters show their segment of ``stepped``: a step window is open there."""
        return self.window.entered

    # -- A step that was asked for -------------------------------------------------------------------------------------

    def defer(self, update: Update) -> None:
        """Take a step that is made later."""
        assert self._update is None
        self._update = update
        if not self.sharding.params:
            self._become_stale()

    def _become_stale(self) -> None:
        """Mark whole parameters as older than the master: touching one makes the step or the gather that is due."""
        self.is_stale = True
        for index, param in enumerate(self.params):
            if index not in self.entered:  # another optimizer's
                swap_class(param, PendingParameter)

    def flush(self) -> bool:
        """Make the step that was asked for, if one was; say whether one was.

        No collective: other ranks' parts of whole parameters stay as they are.
        """
        if self._update is None:
            return False
        update, self._update = self._update, None
        update.finish()
        self.home.give_back_lent()
        with torch.inference_mode(False), torch.no_grad():
            self._round()
        return True

    @property
    def is_due(self) -> bool:
        """Whether a step was asked for that is not made yet."""
        return self._update is not None

    # -- Stores of the values ------------------------------------------------------------------------------------------

    def make_master(self) -> None:
        """Make a master if one is needed and not there: an optimizer is going to step the buffer."""
        is_elsewhere = self._shard_home.store is not self.home.store if self.sharding.params else self.home.is_apart
        is_needed = is_elsewhere or self.kind.master != self.kind.compute
        self._is_stepped, self._is_widened = True, False
        if self._master_home is not self.home:
            self._bring_master()
        if self.master is None and is_needed:
            self.keep_master(self.computed)
        if self.master is not None:
            self.home.expect_rounding(self.raw_computed.nbytes)

    def keep_master(self, values: torch.Tensor) -> None:
        """Make a master of values over the own range."""
        self.master = self._keep_master(values)

    def _bring_master(self) -> None:
        """Let the master be where it is stepped from now on: it was frozen."""
        before, self._master_home = self._master_home, self.home
        if self.master is not None:
            master = self.master
            with torch.inference_mode(False), torch.no_grad():
                self.master = self._keep_master(master)
            before.give_back_master(master)

    @property
    def is_on_device(self) -> bool:
        """Whether masters and states are on the device now."""
        return self.home.where == "device"

    def move(self, store: ShardStore) -> None:
        """Let master and gradients of a home on the device be in another store from now on."""
        assert isinstance(self.home, DeviceHome)
        before = self.home.store
        master = self.home.move(self.master if self._master_home is self.home else None, store)
        self.master = self.master if master is None else master
        self.gradients.move(before, store)

    def widen(self) -> None:
        """Make a master of frozen values, so that any may be loaded; ``narrow`` when they are there."""
        if not self.kind.is_rounded or self._is_stepped:
            return
        if self.master is None:
            with torch.inference_mode(False), torch.no_grad():
                self.keep_master(self.computed)
        self._is_widened = True

    @property
    def is_widened(self) -> bool:
        """Whether values were loaded that may need no master; the same on all ranks."""
        return self._is_widened and self.kind.shared is None and not self.is_resting

    def needs_master(self) -> bool:
        """Say whether 16 bits do not hold this rank's part of the master, which is published."""
        return self.master is not None and bool((self.master != self.computed.to(self.master.device)).any())

    def narrow(self, *, needs_master: bool) -> None:
        """End ``widen``: drop the master unless some rank needs it."""
        self._is_widened = False
        if self.master is not None and not needs_master:
            self._master_home.give_back_master(self.master)
            self.master = None

    def bring_shard(self) -> None:
        """Keep the shard on the device from now on (stage 3), before optimizers are attached."""
        if not self.sharding.params or not self._shard_home.is_apart:
            return
        self.flush()
        self._shard_home = self.home.on_device()
        with torch.inference_mode(False), torch.no_grad():
            before, self.shard = self.shard, self._shard_home.keep_shard(self.shard.values)
        before.give_back()

    def take_back(self) -> None:
        """Bring shard, master and states back to the device if ``offload_states`` has moved them."""
        if self.wake is not None:
            self.wake()

    # -- Whole and released --------------------------------------------------------------------------------------------

    def gather(self, *, in_original: bool = False) -> Pending:
        """Start making the buffer whole. Collective: all ranks. ``bind`` when the result has been waited for.

        Args:
            in_original: In the parameters' own dtype, at stage 3.
        """
        self._refuse_new_values()
        self.flush()
        if not self.sharding.params:
            pending = self.publish() if self.is_stale else None
            return Pending(self.communicator, self.name) if pending is None else pending
        if self.original is not None and (in_original or self.is_resting):
            self.refresh_master()
            return self.original.gather()
        with torch.inference_mode(False), torch.no_grad():
            self.full.untyped_storage().resize_(self.full.nbytes)
            self.store.adopt("gathered", self.full.nbytes)
            return self._gather_into(self.full)

    def _gather_into(self, full: torch.Tensor) -> Pending:
        return self.shard.gather_into(full, self.communicator, f"unit `{self.name}`")

    def serve(self, *, in_original: bool = False) -> Pending:
        """Take part in a gather, with its ``in_original``, whose result is not needed here. Collective: all ranks."""
        self._refuse_new_values()
        self.flush()
        if self.original is not None and (in_original or self.is_resting):
            self.refresh_master()
            return self.original.serve()
        with torch.inference_mode(False), torch.no_grad():
            return self._gather_into(torch.empty_like(self.full))

    @property
    def shown(self) -> torch.Tensor:
        """The buffer whose views whole parameters are: (n,) in the compute dtype, or for a while in their own."""
        original = self.original.flat if self.original is not None else None
        return self.full if original is None else original

    @property
    def _shown_views(self) -> list[torch.Tensor]:
        return self.original.views if self.original is not None and self.original.flat is not None else self.views

    def bind(self) -> None:
        """Make the parameters views of the whole buffer."""
        entered = self.entered
        with torch._C.DisableTorchFunctionSubclass():
            for index, (param, view) in enumerate(zip(self.params, self._shown_views, strict=True)):
                if index in entered:
                    continue
                restore_class(param)
                param.data = view
                self._versions[index] = param._version
        for index, aliases in self.aliases.items():
            aliases.show(self.views[index])
        self.is_whole = True
        self.is_stale = False
        if self.is_lowered:
            self._mark_lowered()
        self.gradients.mark_reduced()

    def bind_one(self, index: int) -> None:
        """Show a parameter as its module computes with it, now: whole, stale or released."""
        param = self.params[index]
        is_present = self.is_stale or self.is_whole
        with torch._C.DisableTorchFunctionSubclass():
            restore_class(param)
            param.data = self._shown_views[index] if is_present else self._placeholders[index]
            if self.is_whole and not self.is_stale:
                self._versions[index] = param._version
        if not is_present:
            swap_class(param, ReleasedParameter)
        elif self.is_stale:
            swap_class(param, PendingParameter)
        elif self.is_lowered:
            swap_class(param, LoweredParameter)
        elif index in self.gradients.has_grad or index in self.gradients.given_out:
            swap_class(param, ReducedParameter)

    def release(self) -> None:
        """Give the storage of the whole buffer back (stage 3)."""
        self.collect_writes()
        entered = self.entered  # show the master's segments
        with torch._C.DisableTorchFunctionSubclass():
            for aliases in self.aliases.values():
                aliases.hide()
            self._placeholders = self._placeholders_of(self.shown.dtype)  # the same: graphs know a parameter by it
            for index, (param, value) in enumerate(zip(self.params, self._placeholders, strict=True)):
                if index not in entered:
                    param.data = value
                    swap_class(param, ReleasedParameter)
        if self.original is not None:
            self.original.drop()
        if self.full.untyped_storage().nbytes() or not self.full.nbytes:
            if self._is_seen_outside():
                self._leave_storage()
            self.full.untyped_storage().resize_(0)
            self.store.release("gathered", self.full.nbytes)
        self.is_whole = False

    def _is_seen_outside(self) -> bool:
        """Say whether a tensor of the program's, or a graph without our handles, still lies in the whole buffer."""
        count = torch._C._storage_Use_Count(self.full.untyped_storage()._cdata) - len(self.handles)
        if self._own_references is None:
            self._own_references = count
        return count > self._own_references

    def _leave_storage(self) -> None:
        """Leave the memory to whoever sees it, and take other memory for the next gather."""
        old = self.full.untyped_storage()._cdata
        with torch.inference_mode(False):
            self.full = torch.empty_like(self.full)
        self.views = flat_views(self.full, self.layout)
        if not self.sharding.params:
            self.shard.values = self.full[slice(*self.layout.shard_range(self.communicator.rank))]
        self.handles = []
        if self.moved is not None:
            self.moved(old, self.full.untyped_storage()._cdata)

    # -- In their own dtype --------------------------------------------------------------------------------------------

    def show_original(self) -> None:
        """Show whole parameters in their own dtype, if they compute in another. Collective at stages 1 to 3."""
        if self.original is None or self.original.flat is not None:
            return
        self.refresh_master()
        try:
            self.original.gather().wait()
        except BaseException:
            self.original.drop()  # the gathered values are not the masters'
            raise
        self.bind()

    def hide_original(self) -> None:
        """Show whole parameters in the compute dtype again, with writes to them taken over. No collective."""
        if self.original is None or self.original.flat is None:
            return
        self.collect_writes()
        if self.sharding.params and self.full.nbytes and not self.full.untyped_storage().nbytes():
            return  # it was gathered for a forward in this dtype
        self.original.restore_computed()
        changed = self.original.changed
        self.original.drop()
        self.bind()
        for index in changed - self.entered:  # the graph of a forward before lies in the memory of other values
            self.mark_stepped(index)

    def begin_computing(self, *, hides: bool = True) -> None:
        """Show whole parameters as they compute, for a forward or a backward. No collective.

        Args:
            hides: Also those that are shown in their own dtype.
        """
        if self.original is None or self.sharding.params or self.is_resting:
            return
        self.is_computing = True
        if self.original.flat is None:
            for param in self.params:
                if has_class(param, LoweredParameter):
                    restore_class(param)
            self.gradients.mark_reduced()
        elif hides:
            self.forget_original()

    def forget_original(self) -> None:
        """Copy writes into parameters in their own dtype into the master, and show them as they compute."""
        if self.original is not None and self.original.flat is not None and not self.is_resting:
            self.refresh_master()
            self.hide_original()

    def end_computing(self) -> None:
        """Show the master's values in their own dtype to the next use of a parameter. No collective."""
        self.is_computing = False
        if self.is_lowered:
            self._mark_lowered()

    def fill_computed(self) -> None:
        """Fill the buffer that computes, at stage 3, where only the one in the own dtype is whole: a graph needs it."""
        is_empty = self.full.nbytes > 0 and not self.full.untyped_storage().nbytes()
        if is_empty and self.original is not None and self.original.flat is not None and self.sharding.params:
            self.full.untyped_storage().resize_(self.full.nbytes)
            self.store.adopt("gathered", self.full.nbytes)
            self.original.round()

    @property
    def is_lowered(self) -> bool:
        """Whether whole parameters lie in another dtype than their own, and nobody computes with them."""
        is_apart = self.original is not None and self.original.flat is None
        return is_apart and self.is_whole and not (self.is_computing or self.is_stale or self.sharding.params)

    def _mark_lowered(self) -> None:
        for index, param in enumerate(self.params):
            if index not in self.entered:
                swap_class(param, LoweredParameter)

    def rest(self) -> None:
        """Show parameters in their own dtype from now on, whenever they are whole. No collective.

        Below stage 3, where they are whole always, ``show_original`` comes before.
        """
        if self.original is None or (not self.sharding.params and self.original.flat is None):
            return
        self.is_resting = True
        if not self.sharding.params:
            self.original.free_computed()

    def end_rest(self) -> None:
        """Show parameters as they compute. No collective; at stage 3 the unit is not whole."""
        if not self.is_resting:
            return
        self.is_resting = False
        if not self.sharding.params:
            self.forget_original()

    def _placeholders_of(self, dtype: torch.dtype) -> list[torch.Tensor]:
        if dtype not in self._all_placeholders:
            self._all_placeholders[dtype] = [placeholder(view, dtype=dtype) for view in self.views]
        return self._all_placeholders[dtype]

    # -- Writes from outside -------------------------------------------------------------------------------------------

    def is_written(self) -> bool:
        """Say whether somebody wrote into a parameter since it was bound."""
        with torch._C.DisableTorchFunctionSubclass():
            return not self.is_stale and any(
                param._version != version or param.data_ptr() != address
                for index, (param, version, address) in enumerate(
                    zip(self.params, self._versions, self._addresses(), strict=True)
                )
                if index not in self.entered
            )

    def _addresses(self) -> list[int]:
        base, size = self.shown.data_ptr(), self.shown.element_size()
        return [base + slot.offset * size if slot.numel else 0 for slot in self.layout.slots]

    def collect_writes(self) -> None:
        """Take over writes into whole parameters from outside (clamping, weight swaps)."""
        if self.is_stale:  # a write would have made the step
            return
        written: int | None = None
        pointed: list[int] = []  # `.data` was pointed elsewhere
        entered = self.entered
        with torch._C.DisableTorchFunctionSubclass():
            for index, (param, address) in enumerate(zip(self.params, self._addresses(), strict=True)):
                if index in entered:  # shows the master's segment
                    continue
                if param.data_ptr() != address:
                    pointed.append(index)
                    written = index
                if param._version != self._versions[index]:
                    self._versions[index] = param._version
                    written = index
            if pointed:
                self._take_back_data(pointed)
        if written is not None:
            if self._rounded_writes is not None:
                self._rounded_writes(self.layout.slots[written].name, is_seen_here=False)
            self.accept_writes()

    @property
    def _rounded_writes(self) -> RoundedWrites | None:
        """The recorder of writes, if parameters show fewer bits than they have."""
        return self.on_rounded_write if self.original is not None and self.original.flat is None else None

    def _take_back_data(self, indices: Sequence[int]) -> None:
        """Copy tensors that ``.data`` was pointed to into the flat buffer, unless the program keeps them.

        They may be pointed to each other's values.
        """
        found = []
        for index in indices:
            param, view = self.params[index], self._shown_views[index]
            is_cast = param.dtype.is_floating_point and view.dtype.is_floating_point  # layers cast their bias
            if param.shape != view.shape or not (is_cast or param.dtype == view.dtype):
                raise RuntimeError(
                    f"`.data` of parameter `{self.layout.slots[index].name}` is now a {param.dtype} tensor of shape"
                    f" {tuple(param.shape)}, and the engine holds it as {view.dtype} of shape {tuple(view.shape)}. Give"
                    " it values of its own shape and dtype, or make the change before `shard`."
                )
            found.append(_apart_from(self.shown, param.detach()))
            param.data = view
        self._leave_what_is_kept()
        with torch.no_grad():
            for index, values in zip(indices, found, strict=True):
                self._shown_views[index].copy_(values)

    def leave_stepped(self) -> None:
        """Leave the master's memory to the program's tensors that lie in it, and take other memory."""
        if self.master is None and not self.sharding.params:
            self._leave_what_is_kept()
        elif self.master is not None and not is_asleep(self.master) and self._is_kept(self.master, own=1):
            stepping, master = self._stepping(), self.master
            with torch.inference_mode(False), torch.no_grad():
                self.master = self._keep_master(master)
            self._master_home.forget_master(master)
            self._show_stepped(stepping)

    def _leave_what_is_kept(self) -> None:
        """Leave the shown flat buffer to the program's tensors that lie in it (``kept = p.data``)."""
        shown, stepping = self.shown, self._stepping()
        has_shard = shown is self.full and not self.sharding.params
        if not self._is_kept(shown, own=1 + len(self.views) + has_shard):
            return
        if self.original is not None and self.original.flat is not None:
            self.original.leave_storage()
        else:
            self._leave_storage()
        with torch.inference_mode(False), torch.no_grad():
            self.shown.copy_(shown)
        for index in set(range(len(self.params))) - self.entered:
            self.params[index].data = self._shown_views[index]
        for index, aliases in self.aliases.items():
            aliases.show(self.views[index])
        self._show_stepped(stepping)

    def _stepping(self) -> list[int]:
        """Return the slots whose parameters show their segments of ``stepped``."""
        return [one for one in self.entered if self.params[one].data_ptr() == ordinary(self.segment(one)).data_ptr()]

    def _show_stepped(self, indices: Iterable[int]) -> None:
        for index in indices:
            self.params[index].data = ordinary(self.segment(index))

    def _is_kept(self, flat: torch.Tensor, own: int) -> bool:
        """Say whether more tensors lie in the memory of one than ``own`` and parameters."""
        address = flat.untyped_storage()._cdata
        bound: int = sum(param.untyped_storage()._cdata == address for param in self.params)
        return num_tensors_in(flat) > own + bound

    def accept_writes(self) -> None:
        """Make the values of the whole buffer the shard's; those in their own dtype are the master's too."""
        if self.original is not None and self.original.flat is not None:
            self.original.accept()
            return
        if self.sharding.params:
            lo, hi = self.layout.shard_range(self.communicator.rank)
            self.put_shard(self.full[lo:hi])
        self._written = True

    def put_shard(self, values: torch.Tensor) -> None:
        """Write this rank's shard (stage 3)."""
        with torch.inference_mode(False), torch.no_grad():
            self.shard.put(values)

    def refresh_master(self, but_for: Set[int] = frozenset()) -> None:
        """Overwrite the master with the parameters' values wherever its rounded value differs from them.

        Below stage 3 the values themselves are compared, because a write through ``.data`` leaves no other trace.

        Args:
            but_for: Slots whose master counts, as for those in the step window.

        Raises:
            RuntimeError: A step in the backward was made that nobody has asked for yet.
        """
        if self.gradients.is_ahead:
            raise RuntimeError(
                f"Unit `{self.name}` was stepped in the backward (`step='backward'`), and its values cannot be"
                " read or saved before `optimizer.step()` is called."
            )
        if self.is_whole:
            self.collect_writes()
        if self.original is not None and self.original.flat is not None:
            if not self.entered and self.original.is_changed():
                self.original.accept()
            return
        if self.master is None or (self.sharding.params and not self._written):
            return
        self._written = False
        with torch.inference_mode(False), torch.no_grad():
            is_written = self.home.take_writes(self.master, lambda: self.computed, self.entered | but_for)
            if self._rounded_writes is not None and is_written is not None:
                self._rounded_writes.ask(f"{self.name}.*", is_written, self.store.copies)

    # -- Publishing ----------------------------------------------------------------------------------------------------

    def gather_stepped(self) -> Pending | None:
        """Start gathering every rank's shard of the masters where each holds all of them (stage 0).

        Collective there: all ranks.
        """
        if self.sharding.optim or self.communicator.world_size == 1:
            return None
        self.take_back()
        with torch.inference_mode(False), torch.no_grad():
            return self._master_home.gather_whole(self.stepped, self.communicator, f"masters of unit `{self.name}`")

    def publish(self) -> Pending | None:
        """Make stepped values the parameters': round them, and gather where parameters are whole.

        Collective at stages 1 and 2: all ranks.
        """
        is_rounded = self.flush()
        with torch.inference_mode(False), torch.no_grad(), label("publish", self.name):
            if not is_rounded and not (self.is_resting and not self.sharding.params):
                self._round()
            if self.original is not None and self.original.flat is not None and not self.sharding.params:
                return self.original.gather()  # they are rounded when they are shown as they compute
            if self.sharding.optim and not self.sharding.params:
                return self.communicator.all_gather(self.full, self.shard.values, f"unit `{self.name}`")
        return None

    def accept_stepped(self, written: Set[int]) -> bool:
        """Publish writes into segments of ``stepped`` that were made outside of a step.

        Args:
            written: The slots. Others may have been written as they compute, which comes first.

        Returns:
            Whether the other ranks' parts have to be gathered before a forward.

        Raises:
            RuntimeError: The parameters are sharded or computing in 16 bits, and whole just now.
        """
        is_original = self.original is not None and self.original.flat is not None
        if is_original or (self.sharding.params and self.is_whole):
            raise RuntimeError(
                f"A parameter of unit `{self.name}` was written between a read of `p.grad` and a step, while the unit"
                " is whole: inside `gathered`, `engine.scope` or `training_step`. Write it outside, or before `p.grad`"
                " is read."
            )
        self.flush()
        self.refresh_master(but_for=written)
        with torch.inference_mode(False), torch.no_grad():
            self._round()
        if self.sharding.params or not self.sharding.optim or self.communicator.world_size == 1:
            return False
        self._become_stale()
        return True

    def plan(
        self,
        deferral: Deferral,
        calls: Sequence[Callable[[], None]],
        *,
        states: Callable[[], Sequence[torch.Tensor]],
        rounds: bool,
    ) -> Update:
        """Return the update that makes a step.

        Args:
            deferral: Makes updates.
            calls: The calls that make the step.
            states: Returns the optimizer's states over the own range.
            rounds: Write the parameters in the dtype in which they compute too.
        """
        step = PlannedStep(
            calls,
            states,
            gradient=self.gradients.reduced,
            master=self.master,
            computed=self.raw_computed,
            round=self.round_in_place if rounds else None,
        )
        return self.home.update(deferral, step)

    def begin_rounding(self) -> Rounding | None:
        """Return the target into which a step casts the master; None if nothing is cast, or not by the step."""
        if self._rounding is None and self.master is not None:
            self._rounding = self.home.begin_rounding(self.master, self.raw_computed)
        return self._rounding

    def _round(self) -> None:
        rounding, self._rounding = self._rounding, None
        if rounding is not None:
            rounding.land()
        if self.master is not None and not self._is_rounded():
            if self.sharding.params:
                self.put_shard(self.master)
            else:
                self.raw_computed.copy_(self.master)
        self._rounded.clear()

    def round_in_place(self) -> None:
        """Cast the in-memory master into the compute shard unless the step already did."""
        if self.master is not None and not self._is_rounded():
            ordinary(self.raw_computed).copy_(ordinary(self.master))
            self.note_rounded(range(len(self.params)))

    def note_rounded(self, indices: Iterable[int]) -> None:
        """Note that a step has cast these slots of the master, so that ``publish`` need not."""
        self._rounded.update(indices)

    def forget_rounding(self) -> None:
        """Take note that stepped values may change again."""
        self._rounded.clear()

    def _is_rounded(self) -> bool:
        return self.own_range.are_all(self._rounded)

    def published(self) -> None:
        """Note that parameters and masters agree."""
        self._written = False
        with torch._C.DisableTorchFunctionSubclass():
            for index, param in enumerate(self.params):
                self._versions[index] = param._version

    def mark_stepped(self, index: int) -> None:
        """Let graphs know that a parameter has other values than those they saved; it is no write from outside."""
        param = self.params[index]
        with torch._C.DisableTorchFunctionSubclass():
            is_known = self._versions[index] == param._version
            torch.autograd.graph.increment_version(param)
            if is_known:
                self._versions[index] = param._version

    def spend_gradients(self) -> None:
        """Give up the reduced gradients to a step that was made in the backward."""
        self.gradients.spend()
        if self.master is None and not self.sharding.params:  # saved tensors of this backward must notice the write
            for index in range(len(self.params)):
                self.mark_stepped(index)

    def _refuse_new_values(self) -> None:
        """Refuse to show stepped values before the step that asks for them."""
        if self.gradients.is_ahead and self.master is None:
            raise RuntimeError(
                f"Unit `{self.name}` is used between its step in the backward (`step='backward'`) and"
                " `optimizer.step()`: behind its last gradient in the same backward, or in another forward. Use"
                " `step='auto'`, or in the first case a precision with masters."
            )


def _apart_from(flat: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return values, copied if they lie in the memory of ``flat``."""
    is_inside = values.untyped_storage()._cdata == flat.untyped_storage()._cdata
    return values.clone() if is_inside else values
