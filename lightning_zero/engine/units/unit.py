"""A unit: parameters that are gathered and reduced together, usually one transformer block."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch
from torch import nn

from lightning_zero.comm.communicator import Pending
from lightning_zero.engine.buffers.buffer import FlatBuffer
from lightning_zero.engine.buffers.labels import label
from lightning_zero.sharding import ShardingScope
from lightning_zero.storage.copies import WorkStream, finish_stream, keep_for_stream

__all__ = ["Unit", "UnitState"]


class UnitState(Enum):
    """Which tensors of a unit are in memory.

    SHARDED:    the shards. Parameters are placeholders. At stage 3 only.
    STALE:      shards and whole buffers, which are older than the masters because a step is due or not gathered yet.
                Below stage 3 only.
    UNSHARDING: shards and whole buffers; the all-gathers may still be running. ``wait`` before use.
    UNSHARDED:  shards and whole buffers. Parameters are views of them.
    """

    SHARDED = 0
    STALE = 1
    UNSHARDING = 2
    UNSHARDED = 3


class Unit:
    """The buffers of one unit and who is using them. Others read its attributes; only its verbs write them.

    It knows nothing of other units, of order, of optimizers.

    Args:
        name: Fully qualified name of the unit's module; ``(root)`` for the parameters that no other unit holds.
        index: Position among the units; the same on every rank.
        module: The module whose forward needs the unit.
        buffers: One per kind of parameter.
        watched: Modules whose backward may use a parameter that autograd has not saved, as custom functions do.
    """

    def __init__(
        self,
        name: str,
        index: int,
        *,
        module: nn.Module,
        buffers: list[FlatBuffer],
        watched: Sequence[nn.Module] = (),
    ) -> None:
        # - Module and buffers
        self.name = name
        self.index = index
        self.module = module
        self.buffers = buffers
        self.watched = list({id(one): one for one in watched if one is not module}.values())
        self.is_sharded_between_uses = any(buffer.sharding.params for buffer in buffers)
        # - Who needs it whole
        self.state = UnitState.UNSHARDED
        self.uses = 0  # forwards that are running
        self.holds = 0  # `gathered` contexts
        self.is_touched = False  # used outside its module: stays until the scope ends
        self._pending: list[Pending] = []
        device = buffers[0].store.device if buffers else torch.device("cpu")
        self._stream = WorkStream(device)  # in which its values were waited for
        # - The backward that is running
        self.expected: set[tuple[int, int]] = set()  # (buffer, slot) that may get a gradient
        self.arrived: set[tuple[int, int]] = set()
        self._reducing: set[int] = set()  # places of buffers that are reduced
        self._calls = 0  # forwards whose inputs still wait for their gradient
        self._awaited: set[object] = set()  # those of them through which the backward that is running has come
        self.ran_forward = False  # with gradients, since the last backward
        self.is_reduced = False  # its reduction of this backward was started

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(buffer.layout.numel for buffer in self.buffers)

    # -- Who needs it whole ----------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether a use of the unit keeps it gathered."""
        return self.uses > 0 or self.holds > 0 or self.is_touched

    def enter(self) -> None:
        """Note that a forward begins which uses it."""
        self.uses += 1

    def leave(self) -> None:
        """Note that such a forward has ended; the record of one may be gone after an error."""
        self.uses = max(self.uses - 1, 0)

    def end_uses(self, *, above: int = 0) -> bool:
        """Forget forwards that an error has ended without notice, but for the first ones; say whether there are any."""
        has_ended, self.uses = self.uses > above, min(self.uses, above)
        return has_ended

    def hold(self) -> None:
        """Note that a ``gathered`` context begins."""
        self.holds += 1

    def unhold(self) -> None:
        """Note that such a context has ended."""
        self.holds -= 1

    def touch(self) -> None:
        """Note that a parameter is used outside of the unit's module."""
        self.is_touched = True

    def end_touch(self) -> bool:
        """Note that the code which used one has ended; say whether there was a use."""
        was_touched, self.is_touched = self.is_touched, False
        return was_touched

    def abandon_uses(self) -> None:
        """Forget all uses but ``gathered``, after an error."""
        self.uses = 0
        self.is_touched = False
        self.forget_inputs()

    # -- Values ----------------------------------------------------------------------------------------------------

    @property
    def is_whole(self) -> bool:
        """Whether parameters have their present values."""
        return self.state is UnitState.UNSHARDED

    @property
    def needs_gather(self) -> bool:
        """Whether a use must gather it first."""
        return self.state is UnitState.SHARDED or self.state is UnitState.STALE

    def mark_stale(self) -> None:
        """Note that the masters were stepped; at stage 3 the next gather brings their values anyhow."""
        if not self.is_sharded_between_uses:
            self.state = UnitState.STALE

    def unshard(self, *, in_original: bool = False) -> None:
        """Start gathering. Collective: all ranks. ``wait`` before use.

        Args:
            in_original: In the parameters' own dtype, at stage 3.
        """
        assert self.needs_gather
        self._stream.move_here()
        with label("gather", self.name):
            self._pending = [buffer.gather(in_original=in_original) for buffer in self.buffers]
        self.state = UnitState.UNSHARDING

    def wait(self) -> None:
        """Return when the parameters are whole."""
        if self.state is not UnitState.UNSHARDING:
            return
        with label("wait for", self.name):
            for pending in self._pending:
                pending.wait()
            self._pending = []
            for buffer in self.buffers:
                buffer.bind()
        self.state = UnitState.UNSHARDED
        if not self._stream.is_current:
            self._keep_memory()
        self._stream.move_here()

    def join(self) -> None:
        """Let the current stream use the parameters, which another one may have waited for, and have freed."""
        if self._stream.enter():
            self._keep_memory()

    def finish(self) -> None:
        """Return when the current stream, which has waited for the values, has them."""
        finish_stream(self.buffers[0].store.device)

    def _keep_memory(self) -> None:
        for buffer in self.buffers:
            keep_for_stream(buffer.shown)

    @property
    def computes_lower(self) -> bool:
        """Whether some parameters compute in another dtype than their own."""
        return any(buffer.original is not None for buffer in self.buffers)

    @property
    def is_lowered(self) -> bool:
        """Whether whole parameters lie in another dtype than their own, and nobody computes with them."""
        return any(buffer.is_lowered for buffer in self.buffers)

    def begin_computing(self) -> None:
        """Show whole parameters as they compute, unless ``gathered`` shows them in their own dtype."""
        for buffer in self.buffers:
            buffer.begin_computing(hides=not self.holds)

    def end_computing(self) -> None:
        """Show the master's values in their own dtype to the next use of a whole parameter."""
        for buffer in self.buffers:
            buffer.end_computing()

    def accept_originals(self) -> None:
        """Copy writes into parameters that are shown in their own dtype into the masters. No collective."""
        for buffer in self.buffers:
            if buffer.original is not None and buffer.original.flat is not None:
                buffer.refresh_master()

    def show_original(self) -> None:
        """Show parameters that compute in another dtype in their own. Collective at stages 1 to 3: all ranks."""
        for buffer in self.buffers:
            buffer.show_original()

    def hide_original(self) -> None:
        """Show parameters as they compute, unless the engine is paused. No collective."""
        for buffer in self.buffers:
            if not buffer.is_resting:
                buffer.hide_original()

    def reshard(self) -> None:
        """Give the whole buffers back. No collective; below stage 3 they stay."""
        if self.needs_gather:
            return
        self.wait()
        if not self.is_sharded_between_uses:
            return
        for buffer in self.buffers:
            if buffer.sharding.params:  # on a grid the group of a buffer may be one rank
                buffer.release()
        self.state = UnitState.SHARDED

    def give_back(self) -> None:
        """Reshard unless somebody needs it."""
        if not self.is_busy:
            self.reshard()

    def give_back_idle(self) -> None:
        """Reshard unless somebody needs it, or prefetches it."""
        if self.is_whole:
            self.give_back()

    def serve(self, *, in_original: bool = False) -> None:
        """Take part in a gather of this unit that only other ranks need. Collective: all ranks."""
        if not self.is_sharded_between_uses:
            if self.state is UnitState.STALE:
                self.unshard()
                self.wait()
            return
        sharded = [buffer for buffer in self.buffers if buffer.sharding.params]
        for pending in [buffer.serve(in_original=in_original) for buffer in sharded]:
            pending.wait()

    # -- Gradients -------------------------------------------------------------------------------------------------

    def note_forward(self, *, builds_graph: bool) -> None:
        """Note a forward, or a use of a parameter, whose backward may bring gradients."""
        self.ran_forward = self.ran_forward or builds_graph

    def expect_inputs(self) -> None:
        """Note a forward whose inputs will get gradients: it is needed up to then."""
        self._calls += 1

    def await_inputs(self, call: object) -> None:
        """Note that a backward has come to the outputs of a forward."""
        self._awaited.add(call)

    def pass_inputs(self, call: object, *, was_expected: bool) -> None:
        """Note that the inputs of a forward have their gradients."""
        self._calls = max(self._calls - was_expected, 0)
        self._awaited.discard(call)

    def forget_inputs(self) -> None:
        """Note that a backward has ended: nothing is waited for."""
        self._calls = 0
        self._awaited.clear()

    def begin_backward(self, *, reduces_as_before: bool = False) -> None:
        """Forget the last backward and find out which gradients this one may bring.

        Args:
            reduces_as_before: Also reduce the buffers of the last backward, whose parameters may be frozen now.
        """
        self.arrived.clear()
        self.is_reduced = False
        self.expected = {
            (place, index)
            for place, buffer in enumerate(self.buffers)
            for index, param in enumerate(buffer.params)
            if param.requires_grad
        }
        places = {place for place, _ in self.expected}
        self._reducing = places | self._reducing if reduces_as_before else places

    @property
    def is_complete(self) -> bool:
        """Whether every gradient of this backward has arrived."""
        return len(self.arrived) == len(self.expected)

    @property
    def is_passed(self) -> bool:
        """Whether every gradient of this backward has arrived, also those of its inputs that it is needed for."""
        return self.is_complete and not self._calls and not self._awaited

    @property
    def reducing_buffers(self) -> list[FlatBuffer]:
        """The buffers that are reduced: those with a parameter that requires a gradient, mostly."""
        return [self.buffers[place] for place in sorted(self._reducing)]

    def accumulate(self, place: int, index: int, grad: torch.Tensor) -> None:
        """Take over the gradient of one parameter."""
        self.buffers[place].gradients.accumulate(index, grad)
        self.arrived.add((place, index))

    def begin_reduce(self) -> None:
        """Note that its reduction is started."""
        self.is_reduced = True

    def reopen(self) -> None:
        """Let another reduction follow: a gradient came late, or the one that was started was of zeros."""
        self.is_reduced = False

    def end_backward(self, *, has_more_backwards: bool) -> None:
        """Note that its reduction is finished.

        Args:
            has_more_backwards: Backwards of forwards that have run follow.
        """
        self.is_reduced = False
        self.ran_forward = self.ran_forward and has_more_backwards

    def abandon_backward(self, reach: ShardingScope) -> None:
        """Drop the gradients of a backward that an error has ended, whose reductions went as far as ``reach``."""
        self.arrived.clear()
        self.is_reduced = False
        for buffer in self.buffers:
            buffer.gradients.abandon(reach)
