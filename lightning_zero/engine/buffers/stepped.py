"""The values of a flat buffer that this rank steps: its compute shard, its master, and the step that is due."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set

import torch

from lightning_zero.comm.communicator import Pending
from lightning_zero.engine.buffers.home import DeviceHome, HomeMaker, PlannedStep, Shard
from lightning_zero.engine.buffers.rounding import Rounding
from lightning_zero.engine.buffers.spec import BufferSpec
from lightning_zero.engine.buffers.update import StepThread, Update
from lightning_zero.sharding import ShardingScope
from lightning_zero.storage.copies import is_capturing
from lightning_zero.storage.residence import is_in_memory, ordinary
from lightning_zero.storage.store import ShardStore

__all__ = ["SteppedValues"]


class SteppedValues:
    """The stepped values of one buffer, the homes in which they are kept, and the step that is due.

    Args:
        spec: The facts of the buffer.
        full: The whole buffer, with its values.
        exact: The same in the dtype of the master, if a master has something that ``full`` does not have.
        home: Makes the home of the master, the optimizer states and the gradient shard, if not the device.
        params_home: Makes the home of the shard at stage 3, if not the device.
    """

    def __init__(
        self,
        spec: BufferSpec,
        full: torch.Tensor,
        *,
        exact: torch.Tensor | None,
        home: HomeMaker | None,
        params_home: HomeMaker | None,
    ) -> None:
        self._spec = spec
        away = home(spec, self.flush) if home is not None else None
        is_away = away is not None and spec.kind.trained
        self.home = away if away is not None and is_away else DeviceHome(spec.store, spec, self.flush)
        self._shard_home = params_home(spec, self.flush) if params_home is not None else self.home.on_device()
        frozen_home = away or (self._shard_home if self._shard_home.is_apart else self.home)
        self._master_home = self.home if spec.kind.trained else frozen_home
        # - Values
        own = full[spec.params_range]
        is_kept = spec.sharding.params
        self.shard = self._shard_home.keep_shard(own) if is_kept else Shard(own, spec.store, spec.store)
        self.raw_computed = self._own_part() if spec.sharding.optim else full  # whether or not a step is due
        self._is_node_stale = False  # the shard holds a node's range, and other nodes have stepped pieces of it
        self.master: torch.Tensor | None = None
        if exact is not None:
            self.keep_master(exact[spec.own_range.start : spec.own_range.stop])
        self._is_stepped = spec.kind.trained  # an optimizer steps them, or has
        self.is_widened = False  # there is a master for values that are going to be loaded, which may need none
        # - A step that was asked for
        self._update: Update | None = None  # not made yet
        self.are_torn = False  # some are those from before a step that was given up
        self._rounding: Rounding | None = None  # of the last step, until its values are there
        self._rounded: set[int] = set()  # slots whose stepped values the step has rounded into the own range
        self.wake: Callable[[], None] | None = None  # brings back the states that ``offload_states`` has moved

    @property
    def computed(self) -> torch.Tensor:
        """The own range in the compute dtype: (own range,)."""
        self.flush()
        return self.raw_computed

    @property
    def stepped(self) -> torch.Tensor:
        """The master, or this rank's range of the computed parameters if there is none: (own range,)."""
        self.flush()
        return self.raw_computed if self.master is None else self.master

    def segment(self, index: int) -> torch.Tensor:
        """Return a parameter's segment of ``stepped``: 1-D, or the whole parameter in its shape at stage 0."""
        return self._spec.own_range.segment(index, self.stepped)

    def lie_in(self, full: torch.Tensor) -> None:
        """Take note of other memory of the whole buffer, in which the compute shard lies below stage 3."""
        if not self._spec.sharding.params:
            self.shard.values = full[self._spec.shard_range]
            self.raw_computed = self.shard.values if self._spec.sharding.optim else full

    def put_params(self, values: torch.Tensor) -> None:
        """Overwrite the shard that is kept between uses (stage 3)."""
        with torch.inference_mode(False), torch.no_grad():
            self.shard.put(values)

    def _own_part(self) -> torch.Tensor:
        """Return the own range in the shard, which holds that of a node if parameters are sharded over one.

        Else it is the shard, one tensor and not a second view: those in the memory of parameters are counted.
        """
        spec = self._spec
        if spec.sharding.params is not ShardingScope.NODE:
            return self.shard.values
        first = spec.own_range.start - spec.params_range.start
        return self.shard.values[first : first + spec.own_range.numel]

    # -- The range of a node ---------------------------------------------------------------------------------------

    def mark_node_stale(self) -> None:
        """Note that every rank steps its piece, or has: the next gather brings those of the other nodes.

        All ranks at the same place of the program, because a gather of one range takes all nodes.
        """
        self._is_node_stale = self._spec.sharding.params is ShardingScope.NODE

    def gather_into(self, full: torch.Tensor) -> Pending:
        """Start gathering the shards that are kept between uses (stage 3) into ``full``: (n,). Collective: all ranks.

        Where a shard is a node's range, the ranks of the node have all of them; behind a step the pieces of the other
        nodes come first, once, and the shard keeps them.
        """
        spec, what = self._spec, f"unit `{self._spec.name}`"
        if spec.sharding.params is not ShardingScope.NODE:
            return self.shard.gather_into(full, spec.communicator, what)
        assert spec.group.nodes is not None
        if not self._is_node_stale:
            return self.shard.gather_into(full, spec.group.nodes.inner, what)
        self._is_node_stale = False
        node = full[spec.node_range]
        own = self.raw_computed if is_in_memory(self.raw_computed) else self.raw_computed.clone()
        over_nodes = spec.group.nodes.outer.all_gather(node, own, what)

        def keep() -> None:
            over_nodes.wait()
            self.put_params(node)

        return spec.group.nodes.inner.all_gather_later(full, keep, what)

    def take_writes(self, but_for: Set[int]) -> torch.Tensor | None:
        """Take over writes into the compute shard into the master; see ``Home.take_writes``."""
        assert self.master is not None
        return self.home.take_writes(self.master, lambda: self.computed, but_for)

    # -- Masters ---------------------------------------------------------------------------------------------------

    def make_master(self) -> None:
        """Make a master if one is needed and not there: an optimizer is going to step the buffer."""
        home, kind = self.home, self._spec.kind
        is_elsewhere = self._shard_home.store is not home.store if self._spec.sharding.params else home.is_apart
        self._is_stepped, self.is_widened = True, False
        if self._master_home is not home:  # it was frozen
            before, self._master_home = self._master_home, home
            if self.master is not None:
                before.give_back_master(self._replace_master(self.master))
        if self.master is None and (is_elsewhere or kind.master != kind.compute):
            self.keep_master(self.computed)
        if self.master is not None:
            home.expect_rounding(self.raw_computed.nbytes)

    def keep_master(self, values: torch.Tensor) -> None:
        """Make a master of values over the own range."""
        self.master = self._master_home.keep_master(values.to(self._spec.kind.master))

    def leave_master(self) -> None:
        """Leave the memory of the master to the program's tensors that lie in it, and take other memory."""
        if self.master is not None:
            self._master_home.forget_master(self._replace_master(self.master))

    def _replace_master(self, master: torch.Tensor) -> torch.Tensor:
        """Copy the master to where it is kept now; return the one before."""
        with torch.inference_mode(False), torch.no_grad():
            self.keep_master(master)
        return master

    @property
    def may_be_seen(self) -> bool:
        """Whether there is a master in memory, in which tensors of the program may lie."""
        return self.master is not None and is_in_memory(self.master)

    def widen(self, *, is_stepped_later: bool) -> None:
        """Make a master that is missing, so that any values may be loaded; ``narrow`` when they are there.

        Frozen values have none, nor have offloaded ones before an optimizer is attached.

        Args:
            is_stepped_later: An optimizer may be attached.
        """
        kind = self._spec.kind
        is_awaited = is_stepped_later and self.master is None and kind.trained and kind.master != kind.compute
        if not is_awaited and (self._is_stepped or not kind.is_rounded):
            return
        if self.master is None:
            with torch.inference_mode(False), torch.no_grad():
                self.keep_master(self.computed)
        self.is_widened = True

    def needs_master(self) -> bool:
        """Say whether 16 bits do not hold this rank's part of the master, which is published."""
        return self.master is not None and bool((self.master != self.computed.to(self.master.device)).any())

    def narrow(self, *, needs_master: bool) -> None:
        """End ``widen``: drop the master unless some rank needs it."""
        self.is_widened = False
        if self.master is not None and not needs_master:
            self._master_home.give_back_master(self.master)
            self.master = None

    def gather_whole(self) -> Pending | None:
        """Start gathering every rank's shard of the stepped values of all of the buffer. Collective: all ranks."""
        self.take_back()
        with torch.inference_mode(False), torch.no_grad():
            what = f"masters of unit `{self._spec.name}`"
            return self._master_home.gather_whole(self.stepped, self._spec.communicator, what)

    # -- Other homes -----------------------------------------------------------------------------------------------

    @property
    def is_on_device(self) -> bool:
        """Whether master and states are on the device now."""
        return self.home.where == "device"

    def move(self, store: ShardStore) -> None:
        """Let the master of a home on the device be in another store from now on."""
        assert isinstance(self.home, DeviceHome)
        is_here = self._master_home is self.home
        with torch.inference_mode(False), torch.no_grad():
            master = self.home.move(self.master if is_here else None, store)
        if is_here:
            self.master = master

    def bring_shard(self) -> None:
        """Keep the shard on the device from now on (stage 3), before optimizers are attached."""
        if not self._spec.sharding.params or not self._shard_home.is_apart:
            return
        self.flush()
        self._shard_home = self.home.on_device()
        with torch.inference_mode(False), torch.no_grad():
            before, self.shard = self.shard, self._shard_home.keep_shard(self.shard.values)
        self.raw_computed = self._own_part()
        before.give_back()

    def take_back(self) -> None:
        """Bring shard, master and states back to the device if ``offload_states`` has moved them."""
        if self.wake is not None:
            self.wake()

    # -- A step that was asked for ---------------------------------------------------------------------------------

    def plan(
        self,
        thread: StepThread,
        calls: Sequence[Callable[[], None]],
        *,
        states: Callable[[], Sequence[torch.Tensor]],
        gradient: torch.Tensor | None,
        rounds: bool,
    ) -> Update:
        """Return the update that makes a step.

        Args:
            thread: Makes the step of an offloaded buffer.
            calls: The calls that make the step.
            states: Returns the optimizer's states over the own range.
            gradient: The gradient shard.
            rounds: Write the parameters in the dtype in which they compute too.
        """
        round_behind = self.round_in_place if rounds else None
        step = PlannedStep(calls, states, gradient, self.master, computed=self.raw_computed, round=round_behind)
        return self.home.update(thread, step)

    def defer(self, update: Update) -> None:
        """Take a step that is made later."""
        assert self._update is None
        self._update = update

    @property
    def is_due(self) -> bool:
        """Whether a step was asked for that is not made yet."""
        return self._update is not None

    @property
    def has_failed(self) -> bool:
        """Whether the step that was asked for has failed, and some values are those from before it."""
        return self.are_torn or (self._update is not None and self._update.has_failed)

    def give_up(self) -> None:
        """Make the step that is due, or forget it if it fails: that of another buffer has, and its error was raised.

        The values are torn then, until others are loaded.
        """
        try:
            self.flush()
        except Exception:
            self.are_torn = True
            self._update = self._rounding = None
            self._rounded.clear()

    def flush(self) -> bool:
        """Make the step that was asked for, if one was; say whether one was.

        No collective: other ranks' parts of whole parameters stay as they are. After an error the step is due still:
        the next call waits again, or says again that it has failed.
        """
        if self._update is None:
            return False
        if is_capturing():
            raise RuntimeError(
                f"The step of unit `{self._spec.name}` is deferred, and a CUDA graph is being captured now: each replay"
                " would make that step again. Call `engine.flush()` before the capture, or use `step='now'`."
            )
        update, self._update = self._update, None
        try:
            update.finish()
            self.home.give_back_lent()
            with torch.inference_mode(False), torch.no_grad():
                self.round()
        except BaseException:
            self._update = update
            raise
        return True

    # -- Rounding --------------------------------------------------------------------------------------------------

    def begin_rounding(self) -> Rounding | None:
        """Return the target into which a step casts the master; None if nothing is cast, or not by the step."""
        if self._rounding is None and self.master is not None:
            self._rounding = self.home.begin_rounding(self.master, self.raw_computed)
        return self._rounding

    def round(self) -> None:
        """Cast the master into the compute shard unless the step already did."""
        if self._rounding is not None:
            self._rounding.land()
            self._rounding = None
        if self.master is not None and not self._is_rounded():
            if self._spec.sharding.params is ShardingScope.WORLD:
                self.put_params(self.master)
            else:
                self.shard.await_uploads()
                self.raw_computed.copy_(self.master)
        self._rounded.clear()

    def round_in_place(self) -> None:
        """Cast the in-memory master into the compute shard unless the step already did."""
        if self.master is not None and not self._is_rounded():
            ordinary(self.raw_computed).copy_(ordinary(self.master))
            self.note_rounded(self._spec.own_range.slots)

    def note_rounded(self, indices: Iterable[int]) -> None:
        """Note that a step has cast these slots of the master, so that ``round`` need not."""
        self._rounded.update(indices)

    def forget_rounding(self) -> None:
        """Take note that stepped values may change again."""
        self._rounded.clear()

    def _is_rounded(self) -> bool:
        return self._spec.own_range.are_all(self._rounded)
