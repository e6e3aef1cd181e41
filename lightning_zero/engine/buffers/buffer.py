"""The parameters of one kind in one unit: a flat buffer with its values, its gradients and its step window.

Memory of a buffer of n padded elements on N ranks (stage 3 keeps the whole buffer only while the unit is whole):

============  =================  =========================================================================
``whole``     n compute dtype    parameters are views of it; storage freed at stage 3
``shard``     n/N compute dtype  this rank's part; a view of the whole buffer below stage 3
``master``    own range          stepped by the optimizer; the shard itself when the dtypes agree. A frozen buffer
                                 has one if 16 bits do not hold its values
``original``  n own dtype        the masters of all ranks, while parameters are shown in their own dtype
``sums``      n reduce dtype     sum of this rank's gradients; kept between steps at stages 0 and 1
``reduced``   own range          average over the ranks; its place in ``sums`` at stages 0 and 1
============  =================  =========================================================================

The own range is the shard where optimizer states are sharded, else the whole buffer. ``shard`` and ``master`` are
those of ``FlatBuffer.values``, ``sums`` and ``reduced`` those of ``FlatBuffer.gradients``. References go one way: the
buffer has its parts, which are given a ``BufferSpec`` and each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

import torch
from torch import nn

from lightning_zero.boxes import Part
from lightning_zero.comm.communicator import Communicator, Pending
from lightning_zero.engine.buffers.aliases import Aliases
from lightning_zero.engine.buffers.gradients import BufferGradients
from lightning_zero.engine.buffers.group import BufferGroup, NodeLevels
from lightning_zero.engine.buffers.home import Home, HomeMaker
from lightning_zero.engine.buffers.labels import label
from lightning_zero.engine.buffers.original import Original, RoundedWrites
from lightning_zero.engine.buffers.own_range import same_values
from lightning_zero.engine.buffers.parameter import (
    LoweredParameter,
    PendingParameter,
    ReducedParameter,
    ReleasedParameter,
    are_handed_out,
    end_writes,
    handed_out,
    has_class,
    is_data_kept,
    is_written,
    num_writes,
    renew_writes,
    restore_class,
    swap_class,
)
from lightning_zero.engine.buffers.spec import BufferKind, BufferSpec
from lightning_zero.engine.buffers.stepped import SteppedValues
from lightning_zero.engine.buffers.update import Update
from lightning_zero.engine.buffers.whole import WholeBuffer
from lightning_zero.engine.buffers.window import BufferWindow
from lightning_zero.grid import ParamAxes
from lightning_zero.layout import FlatLayout
from lightning_zero.sharding import ShardedOver
from lightning_zero.storage.references import num_tensors_in
from lightning_zero.storage.residence import ordinary
from lightning_zero.storage.store import DeviceStore, ShardStore

__all__ = ["FlatBuffer", "with_digits"]


class FlatBuffer:
    """One flat buffer of a unit.

    Args:
        name: Named in errors.
        params: The parameters, with their values on any device; they are bound to the buffer.
        names: Their fully qualified names.
        kind: The dtypes.
        sharding: The scopes in which tensors are kept sharded.
        group: The ranks over which it is cut.
        axes: The parameters on the grid, by name.
        store: Memory of the device.
        home: Makes the home of the master, the optimizer states and the gradient shard, if not the device.
        params_home: Makes the home of the shard at stage 3, if not the device.
    """

    def __init__(
        self,
        name: str,
        params: Sequence[nn.Parameter],
        names: Sequence[str],
        *,
        kind: BufferKind,
        sharding: ShardedOver,
        group: BufferGroup,
        store: DeviceStore,
        axes: Mapping[str, ParamAxes] | None = None,
        home: HomeMaker | None = None,
        params_home: HomeMaker | None = None,
    ) -> None:
        spec = BufferSpec.of(name, params, names, kind=kind, sharding=sharding, group=group, store=store, axes=axes)
        self.name = name
        self.params = spec.params
        self.kind = kind
        self.sharding = sharding
        self._spec = spec
        self.store = store
        self.own_range = spec.own_range
        # - Values
        self.whole = WholeBuffer(spec)
        may_wait = (home is not None and kind.trained) or params_home is not None
        exact = self.whole.fill(may_wait=may_wait)
        self.values = SteppedValues(spec, self.whole.flat, exact=exact, home=home, params_home=params_home)
        self.original = Original(spec, self.whole, self.values) if kind.original != kind.compute else None
        self.is_whole = True
        self.is_stale = False  # whole parameters are older than the master: a step is due, or is not gathered yet
        self.aliases: dict[int, Aliases] = {}  # by slot; set when the buffer is made
        self._versions = [0] * len(self.params)  # of the parameters when they were bound; a write moves them
        self._num_collected = [0] * len(self.params)  # writes that were taken over
        self._written = False  # the shard may differ from the rounded master
        self._is_between_runs = False  # parameters keep a dtype that the program gives them
        self.on_rounded_write: RoundedWrites | None = None  # told of a parameter that was written in 16 bits
        # - Gradients
        self.gradients = BufferGradients(spec, self.values)
        self.window = BufferWindow(spec, self.values, self.gradients, leave_stepped=self.leave_stepped)
        self.bind()

    @property
    def layout(self) -> FlatLayout:
        """Where every parameter lies."""
        return self._spec.layout

    @property
    def home(self) -> Home:
        """The home of the master, the optimizer states and the gradient shard."""
        return self.values.home

    @property
    def communicator(self) -> Communicator:
        """Moves shards: of the ranks over which the buffer is cut."""
        return self._spec.communicator

    @property
    def place(self) -> int:
        """The shard of this rank among those of the buffer."""
        return self._spec.group.place

    @property
    def nodes(self) -> NodeLevels | None:
        """The ranks over which the buffer is cut in two levels; None: in one."""
        return self._spec.group.nodes

    def part(self, index: int) -> Part | None:
        """Return the part of a slot's parameter that this rank has; None: all of it."""
        return self._spec.part(index)

    @property
    def has_parts(self) -> bool:
        """Whether other groups of ranks have other parts of the parameters."""
        return self._spec.has_parts

    @property
    def entered(self) -> Set[int]:
        """The slots whose parameters show their segment of the stepped values: a step window is open there."""
        return self.window.entered

    # -- A step that was asked for -------------------------------------------------------------------------------------

    def defer(self, update: Update) -> None:
        """Take a step that is made later."""
        self.values.defer(update)
        self.values.mark_node_stale()
        if not self.sharding.params:
            self._become_stale()

    def _become_stale(self) -> None:
        """Mark whole parameters as older than the master: touching one makes the step or the gather that is due."""
        self.is_stale = True
        for index, param in enumerate(self.params):
            if index not in self.entered:  # another optimizer's
                swap_class(param, PendingParameter)

    @property
    def is_widened(self) -> bool:
        """Whether values were loaded that may need no master; the same on all ranks."""
        return self.values.is_widened and self.kind.shared is None and not self.is_resting

    def move(self, store: ShardStore) -> None:
        """Let master and gradients of a home on the device be in another store from now on."""
        before = self.home.store
        self.values.move(store)
        self.gradients.move(before, store)

    # -- Whole and released --------------------------------------------------------------------------------------------

    def gather(self, *, in_original: bool = False) -> Pending:
        """Start making the buffer whole. Collective: all ranks. ``bind`` when the result has been waited for.

        Args:
            in_original: In the parameters' own dtype, at stage 3.
        """
        self._refuse_new_values()
        self.values.flush()
        if not self.sharding.params:
            pending = self.publish() if self.is_stale else None
            return Pending(self.communicator, self.name) if pending is None else pending
        if self.original is not None and (in_original or self.is_resting):
            self.refresh_master()
            return self.original.gather()
        with torch.inference_mode(False), torch.no_grad():
            self.whole.allocate()
            return self.values.gather_into(self.whole.flat)

    def serve(self, *, in_original: bool = False) -> Pending:
        """Take part in a gather, with its ``in_original``, whose result is not needed here. Collective: all ranks."""
        self._refuse_new_values()
        self.values.flush()
        if self.original is not None and (in_original or self.is_resting):
            self.refresh_master()
            return self.original.serve()
        with torch.inference_mode(False), torch.no_grad():
            full = torch.empty_like(self.whole.flat)
            return self.values.gather_into(full)

    @property
    def shown(self) -> torch.Tensor:
        """The buffer whose views whole parameters are: (n,) in the compute dtype, or for a while in their own."""
        original = self.original.flat if self.original is not None else None
        return self.whole.flat if original is None else original

    @property
    def _shown_views(self) -> list[torch.Tensor]:
        return self.original.views if self.original is not None and self.original.flat is not None else self.whole.views

    def bind(self) -> None:
        """Make the parameters views of the whole buffer."""
        entered = self.entered
        with torch._C.DisableTorchFunctionSubclass():
            for index, (param, view) in enumerate(zip(self.params, self._shown_views, strict=True)):
                if index in entered:
                    continue
                restore_class(param)
                param.data = view
                self._versions[index] = renew_writes(param)
        for index, aliases in self.aliases.items():
            aliases.show(self.whole.views[index])
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
            param.data = self._shown_views[index] if is_present else self.whole.placeholders[index]
            if self.is_whole and not self.is_stale:
                self._versions[index] = renew_writes(param)
        if not is_present:
            swap_class(param, ReleasedParameter)
        elif self.is_stale:
            swap_class(param, PendingParameter)
        elif self.is_lowered:
            swap_class(param, LoweredParameter)
        elif self.gradients.is_asked_for(index):
            swap_class(param, ReducedParameter)

    def leave_window(self, index: int) -> None:
        """Show a parameter as its module computes with it, and take over changes to its ``grad`` and values."""
        self.window.leave(index)
        self.bind_one(index)

    def close_window(self) -> bool:
        """Publish changes made in the step window; say whether other ranks' parts are to be gathered before a use."""
        written = self.window.close()
        return bool(written) and self.accept_stepped(written)

    def release(self) -> None:
        """Give the storage of the whole buffer back (stage 3)."""
        self.collect_writes()
        entered = self.entered  # show the master's segments
        with torch._C.DisableTorchFunctionSubclass():
            for aliases in self.aliases.values():
                aliases.hide()
            self.whole.choose_placeholders(self.shown.dtype)
            for index, (param, value) in enumerate(zip(self.params, self.whole.placeholders, strict=True)):
                if index not in entered:
                    end_writes(param)
                    param.data = value
                    swap_class(param, ReleasedParameter)
        if self.original is not None:
            self.original.drop()
        if self.whole.has_memory:
            if self.whole.is_seen_outside:
                self._leave_storage()
            self.whole.free()
        self.is_whole = False

    def _leave_storage(self) -> None:
        self.whole.leave_storage()
        self.values.lie_in(self.whole.flat)

    # -- In their own dtype --------------------------------------------------------------------------------------------

    def show_original(self) -> None:
        """Show whole parameters in their own dtype, if they compute in another. Collective at stages 1 to 3."""
        if self.original is None or self.original.flat is not None:
            return
        given, lowered = self._kept_dtypes(), self.shown.dtype
        self.refresh_master()
        try:
            self.original.gather().wait()
        except BaseException:
            self.original.drop()  # the gathered values are not the masters'
            raise
        self.bind()
        for index, values in given.items():
            self.params[index].data = with_digits(values, self._shown_views[index], lowered)

    def hide_original(self) -> None:
        """Show whole parameters in the compute dtype again, with writes to them taken over. No collective."""
        if self.original is None or self.original.flat is None:
            return
        self.collect_writes()
        if self.sharding.params and not self.whole.has_memory:
            return  # it was gathered for a forward in this dtype
        given = self._kept_dtypes()
        self.original.restore_computed()
        changed = self.original.changed
        self.original.drop()
        self.bind()
        for index, values in given.items():
            self.params[index].data = values
        for index in changed - self.entered:  # the graph of a forward before lies in the memory of other values
            self.mark_stepped(index)

    def begin_computing(self, *, hides: bool = True) -> None:
        """Show whole parameters as they compute, for a forward or a backward. No collective.

        Args:
            hides: Also those that are shown in their own dtype.
        """
        if self.original is None or self.sharding.params or self.original.is_resting:
            return
        self.original.is_computing = True
        if self.original.flat is None:
            for param in self.params:
                if has_class(param, LoweredParameter):
                    restore_class(param)
            self.gradients.mark_reduced()
        elif hides:
            self.forget_original()

    def forget_original(self) -> None:
        """Copy writes into parameters in their own dtype into the master, and show them as they compute."""
        if self.original is not None and self.original.flat is not None and not self.original.is_resting:
            self.refresh_master()
            self.hide_original()

    def end_computing(self) -> None:
        """Show the master's values in their own dtype to the next use of a parameter. No collective."""
        if self.original is not None:
            self.original.is_computing = False
        if self.is_lowered:
            self._mark_lowered()

    def fill_computed(self) -> None:
        """Fill the buffer that computes, at stage 3, where only the one in the own dtype is whole: a graph needs it."""
        is_original = self.original is not None and self.original.flat is not None
        if self.original is not None and is_original and self.sharding.params and not self.whole.has_memory:
            self.whole.allocate()
            self.original.round()

    @property
    def is_lowered(self) -> bool:
        """Whether whole parameters lie in another dtype than their own, and nobody computes with them."""
        if self.original is None or self.original.flat is not None or self.original.is_computing:
            return False
        return self.is_whole and not (self.is_stale or self.sharding.params)

    def _mark_lowered(self) -> None:
        for index, param in enumerate(self.params):
            if index not in self.entered:
                swap_class(param, LoweredParameter)

    def rest(self) -> None:
        """Show parameters in their own dtype from now on, whenever they are whole. No collective.

        Below stage 3, where they are whole always, ``show_original`` comes before.
        """
        self._is_between_runs = True
        if self.original is None or (not self.sharding.params and self.original.flat is None):
            return
        self.original.is_resting = True
        if not self.sharding.params:
            self.original.free_computed()

    def end_rest(self) -> None:
        """Show parameters as they compute. No collective; at stage 3 the unit is not whole."""
        self._is_between_runs = False
        if self.original is None or not self.original.is_resting:
            return
        self.original.is_resting = False
        if not self.sharding.params:
            self.forget_original()

    @property
    def is_resting(self) -> bool:
        """Whether parameters show themselves in their own dtype whenever they are whole."""
        return self.original is not None and self.original.is_resting

    # -- Writes from outside -------------------------------------------------------------------------------------------

    def is_written(self) -> bool:
        """Say whether somebody wrote into a parameter since it was bound."""
        with torch._C.DisableTorchFunctionSubclass():
            return not self.is_stale and any(
                is_written(param, version) or (param.data_ptr() != address and self._is_pointed(index))
                for index, (param, version, address) in enumerate(
                    zip(self.params, self._versions, self._addresses(), strict=True)
                )
                if index not in self.entered
            )

    def num_writes(self) -> dict[str, int]:
        """Return how often each parameter was written from outside, by name, as far as writes show."""
        pending = [0] * len(self.params)
        if self.is_whole and not self.is_stale:
            with torch._C.DisableTorchFunctionSubclass():
                found = enumerate(zip(self.params, self._versions, self._addresses(), strict=True))
                for index, (param, version, address) in found:
                    if index not in self.entered:
                        is_pointed = param.data_ptr() != address and self._is_pointed(index)
                        pending[index] = num_writes(param, version) + is_pointed
        names = (slot.name for slot in self.layout.slots)
        return {name: sum(both) for name, *both in zip(names, self._num_collected, pending, strict=True)}

    def converted(self) -> dict[nn.Parameter, torch.Tensor]:
        """Return the tensors of a dtype of the program's that ``.data`` of whole parameters was pointed to."""
        if not self.is_whole or self.is_stale:
            return {}
        with torch._C.DisableTorchFunctionSubclass():
            indices = [index for index in range(len(self.params)) if self._is_converted(index)]
            return {self.params[index]: self.params[index].detach() for index in indices if index not in self.entered}

    def _is_converted(self, index: int) -> bool:
        """Say whether the program has given a whole parameter a dtype that the engine does not give it."""
        param, view = self.params[index], self._shown_views[index]
        is_cast = param.dtype != view.dtype and param.is_complex() == view.is_complex()
        return is_cast and (param.is_floating_point() or param.is_complex()) and param.shape == view.shape

    def _kept_dtypes(self) -> dict[int, torch.Tensor]:
        """Return the values of whole parameters that keep a dtype of the program's, by slot."""
        if not self._is_between_runs:
            return {}
        converted = self.converted()
        return {index: converted[param] for index, param in enumerate(self.params) if param in converted}

    def _keeps_dtype(self, index: int) -> bool:
        """Say whether a parameter keeps the dtype that the program has given it, for the next run."""
        return self._is_between_runs and self._is_converted(index)

    def _is_pointed(self, index: int) -> bool:
        """Say whether ``.data``, which lies elsewhere, was pointed to other values than the flat buffer's."""
        if not self._keeps_dtype(index):
            return True
        view = self._shown_views[index]
        values = self.params[index].detach().to(view)
        return not bool(same_values(values, view).all())

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
                if param.data_ptr() != address and self._is_pointed(index):
                    pointed.append(index)
                    written = index
                found = num_writes(param, self._versions[index])
                if found:
                    self._num_collected[index] += found
                    self._versions[index] = renew_writes(param)
                    written = index
            if are_handed_out():
                self._forget_handed_out()
            if pointed:
                for index in pointed:
                    self._num_collected[index] += 1
                self._take_back_data(pointed)
        if written is not None:
            if self._rounded_writes is not None:
                self._rounded_writes(self.layout.slots[written].name, is_seen_here=False)
            self.accept_writes()

    def _forget_handed_out(self) -> None:
        """Let go of results of ``data`` that no program keeps."""
        entered = self.entered
        free = [param for index, param in enumerate(self.params) if index not in entered]
        address = self.shown.untyped_storage()._cdata
        are_inside = [one.untyped_storage()._cdata == address for param in free for one in handed_out(param)]
        if not are_inside or any(is_data_kept(param) for param in free):
            return
        if not self._is_kept(self.shown, own=self._num_own + sum(are_inside)):
            for param in free:
                end_writes(param)

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
            if not self._keeps_dtype(index):
                param.data = view
        for index in set(range(len(self.params))) - self.entered:
            end_writes(self.params[index])
        self._leave_what_is_kept()
        with torch.no_grad():
            for index, values in zip(indices, found, strict=True):
                self._shown_views[index].copy_(values)

    def leave_stepped(self) -> None:
        """Leave the master's memory to the program's tensors that lie in it, and take other memory."""
        values = self.values
        if values.master is None and not self.sharding.params:
            self._leave_what_is_kept()
        elif values.master is not None and values.may_be_seen and self._is_kept(values.master, own=1):
            stepping = self._stepping()
            values.leave_master()
            self._show_stepped(stepping)

    def _leave_what_is_kept(self) -> None:
        """Leave the shown flat buffer to the program's tensors that lie in it (``kept = p.data``)."""
        shown, stepping = self.shown, self._stepping()
        if not self._is_kept(shown, own=self._num_own):
            return
        if self.original is not None and self.original.flat is not None:
            self.original.leave_storage()
        else:
            self._leave_storage()
        with torch.inference_mode(False), torch.no_grad():
            self.shown.copy_(shown)
        for index in set(range(len(self.params))) - self.entered:
            if not self._keeps_dtype(index):
                self.params[index].data = self._shown_views[index]
        for index, aliases in self.aliases.items():
            aliases.show(self.whole.views[index])
        self._show_stepped(stepping)

    def _stepping(self) -> list[int]:
        """Return the slots whose parameters show their segments of ``stepped``."""
        return [
            one for one in self.entered if self.params[one].data_ptr() == ordinary(self.values.segment(one)).data_ptr()
        ]

    def _show_stepped(self, indices: Iterable[int]) -> None:
        for index in indices:
            self.params[index].data = ordinary(self.values.segment(index))

    @property
    def _num_own(self) -> int:
        """The number of tensors in the memory of ``shown`` that are this buffer's, without parameters."""
        return 1 + len(self.whole.views) + (self.shown is self.whole.flat and not self.sharding.params)

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
            self.values.put_params(self.whole.flat[self._spec.params_range])
        self._written = True

    def take_from_first_rank(self) -> None:
        """Take the whole parameters that the first rank shows where others are shown here. Collective: all ranks."""
        if self.communicator.world_size == 1:
            return
        with torch.inference_mode(False), torch.no_grad():
            values = self.shown.clone()
            self.communicator.broadcast(values, f"parameters of unit `{self.name}`")
            if not torch.equal(values, self.shown):
                self.shown.copy_(values)
                self.accept_writes()

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
        if self.values.master is None or (self.sharding.params and not self._written):
            return
        self._written = False
        with torch.inference_mode(False), torch.no_grad():
            is_written = self.values.take_writes(self.entered | but_for)
            if self._rounded_writes is not None and is_written is not None:
                self._rounded_writes.ask(f"{self.name}.*", is_written)

    # -- Publishing ----------------------------------------------------------------------------------------------------

    def gather_stepped(self) -> Pending | None:
        """Start gathering every rank's shard of the masters where each holds all of them (stage 0).

        Collective there: all ranks.
        """
        if self.sharding.optim or self.communicator.world_size == 1:
            return None
        return self.values.gather_whole()

    def publish(self) -> Pending | None:
        """Make stepped values the parameters': round them, and gather where parameters are whole.

        Collective at stages 1 and 2: all ranks.
        """
        is_rounded = self.values.flush()
        self.values.mark_node_stale()
        with torch.inference_mode(False), torch.no_grad(), label("publish", self.name):
            if not is_rounded and not (self.is_resting and not self.sharding.params):
                self.values.round()
            if self.original is not None and self.original.flat is not None and not self.sharding.params:
                return self.original.gather()  # they are rounded when they are shown as they compute
            if self.sharding.optim and not self.sharding.params:
                return self._spec.group.all_gather(self.whole.flat, self.values.shard.values, f"unit `{self.name}`")
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
        self.values.flush()
        self.refresh_master(but_for=written)
        with torch.inference_mode(False), torch.no_grad():
            self.values.round()
        self.values.mark_node_stale()
        if self.sharding.params or not self.sharding.optim or self.communicator.world_size == 1:
            return False
        self._become_stale()
        return True

    def published(self) -> None:
        """Note that parameters and masters agree."""
        self._written = False
        with torch._C.DisableTorchFunctionSubclass():
            for index, param in enumerate(self.params):
                self._versions[index] = param._version if index in self.entered else renew_writes(param)

    def mark_stepped(self, index: int) -> None:
        """Let graphs know that a parameter has other values than those they saved; it is no write from outside."""
        param = self.params[index]
        with torch._C.DisableTorchFunctionSubclass():
            is_known = self._versions[index] == param._version
            torch.autograd.graph.increment_version(param)
            if is_known:
                self._versions[index] = param._version

    @property
    def can_show_alone(self) -> bool:
        """Whether this rank has all masters, and none was stepped before ``optimizer.step()``."""
        return self.original is None or not (self.original.needs_others or self.gradients.is_ahead)

    def _refuse_new_values(self) -> None:
        """Refuse to show stepped values before the step that asks for them."""
        if self.gradients.is_ahead and self.values.master is None:
            raise RuntimeError(
                f"Unit `{self.name}` is used between its step in the backward (`step='backward'`) and"
                " `optimizer.step()`: behind its last gradient in the same backward, or in another forward. Use"
                " `step='auto'`, or in the first case a precision with masters."
            )


def with_digits(given: torch.Tensor, masters: torch.Tensor, shown: torch.dtype) -> torch.Tensor:
    """Return values that the program has converted, with the digits of the masters where they are as converted.

    Args:
        given: The program's, in its dtype.
        masters: Those that are stepped, with the program's writes.
        shown: The dtype from which it has converted them.
    """
    return torch.where(given == given.to(shown).to(given.dtype), masters.to(given), given)


def _apart_from(flat: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return values, copied if they lie in the memory of ``flat``."""
    is_inside = values.untyped_storage()._cdata == flat.untyped_storage()._cdata
    return values.clone() if is_inside else values
