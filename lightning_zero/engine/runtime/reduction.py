"""Reductions: started unit by unit, finished behind the backward, and who had gradients at all.

After the reductions of a backward the ranks agree, in one small message, which parameters had a gradient anywhere: one
that is unused on some ranks counts as zero there; one that is unused on all keeps ``grad`` None, and the optimizer
leaves it alone. A gradient that arrives after its unit was reduced (reentrant checkpointing of a shared parameter, a
rank that was overtaken) is reduced once more, on all ranks.

Where ranks are in nodes a reduction has two halves: the sum of a node, and that over the nodes, which starts when the
next unit does and runs beside it. All ranks start both in one order.

Most backwards use the parameters that the last one of their kind has used. Where the ranks agree on the end of a
backward anyway (see the note in ``order``), each also says whether this is so; if it is on all ranks, the message is
not sent, because its result is known.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import torch

from lightning_zero.comm.communicator import Communicator, Pending
from lightning_zero.engine.buffers.buffer import FlatBuffer
from lightning_zero.engine.buffers.labels import label
from lightning_zero.engine.runtime.rank_facts import NUM_BITS, RankFacts
from lightning_zero.engine.units.unit import Unit
from lightning_zero.sharding import ShardingScope
from lightning_zero.storage.copies import WorkStream

__all__ = ["Reducer"]

_NUM_BYTES = NUM_BITS // 8


class Reducer:
    """Reduces units; the caller sees to the order.

    Args:
        units: All units.
        communicator: Over which ranks agree.
        in_flight: How many buffers may be reducing while backward goes on.
    """

    def __init__(self, units: Sequence[Unit], communicator: Communicator, in_flight: int) -> None:
        self._units = list(units)
        self._communicator = communicator
        self.facts = RankFacts(self._units, communicator)  # that travel with agreements
        self.stream = WorkStream(communicator.device)  # sums gradients and reduces them
        self._max_in_flight = in_flight
        self._in_flight: list[tuple[Unit, FlatBuffer, Pending]] = []
        self._over_nodes: list[tuple[Unit, FlatBuffer, Pending]] = []  # second halves that are running
        self._reach = ShardingScope.WORLD  # how far the reductions of this backward go
        self._owed: list[tuple[FlatBuffer, Pending]] = []  # first halves of an abandoned backward that go on
        self._owed_reach = ShardingScope.WORLD  # of that backward
        self._late: set[Unit] = set()  # got a gradient after their reduction had started
        self._last: dict[Hashable, tuple[bytes, bytes]] = {}  # flags of this rank, and of any, by kind of pass

    def begin(self, reach: ShardingScope = ShardingScope.WORLD) -> None:
        """Begin a backward.

        Where this rank has frozen parameters, and does not know whether the others have, it goes on to reduce their
        buffers, with zeros: a rank that has frozen them alone must come to the agreement that says so.

        Args:
            reach: How far gradients are reduced that may wait in their node for the last micro-batch.
        """
        self._reach = reach
        are_new = not self.facts.are_known()
        for unit in self._units:
            unit.begin_backward(reduces_as_before=are_new)

    def before_gradient(self, unit: Unit) -> None:
        """Make room for a gradient that comes after its unit's reduction has started.

        Second halves go on: other nodes may wait for this rank before they start theirs, and their sums are apart.
        """
        if unit.is_reduced:
            self._late.add(unit)
            self._drain_nodes(0)

    def start(self, unit: Unit) -> None:
        """Start reducing a unit's gradients, with zeros where it has none. Collective: all ranks."""
        if not unit.is_reduced:
            self.stream.run(self._start, unit)

    def _start(self, unit: Unit) -> None:
        unit.begin_reduce()
        self._announce(unit)
        for buffer in unit.reducing_buffers:
            self._drain_nodes(max(self._max_in_flight - 1, 0))
            self._drain_over_nodes(self._max_in_flight)
            with label("reduce", unit.name):
                self._in_flight.append((unit, buffer, buffer.gradients.reduce()))
            if self._max_in_flight == 0:
                self._drain(0)

    def is_as_before(self, kind: Hashable) -> bool:
        """Whether this rank has used the parameters that it used in the last backward of this kind."""
        return kind in self._last and self._last[kind][0] == self._flags()

    def finish(self, kind: Hashable = None, *, is_as_before: bool = False, has_more_backwards: bool = False) -> None:
        """Finish all reductions and agree on who had gradients. Collective: all ranks.

        Args:
            kind: The key of the agreement.
            is_as_before: ``is_as_before(kind)`` on all ranks; the same on every rank.
            has_more_backwards: Backwards of forwards that have run follow, and bring gradients again.
        """
        self._drain(0)
        self._settle(kind, is_as_before)
        for unit in self._units:
            unit.end_backward(has_more_backwards=has_more_backwards)

    def cancel(self) -> None:
        """End a backward that brought no gradients: the reductions in flight were sums of zeros. No collective."""
        self._drain(0)
        self._late.clear()
        for unit in self._units:
            if unit.is_reduced:
                unit.reopen()
                for buffer in unit.reducing_buffers:
                    if not buffer.gradients.has_grad:
                        buffer.gradients.forget()

    def abandon(self) -> None:
        """Drop the gradients of a backward that an error has ended. No collective; ``settle`` is to follow."""
        self._owed += [(one, pending) for _, one, pending in self._in_flight if one.gradients.has_nodes]
        self._owed_reach = self._reach
        self._in_flight.clear()
        self._late.clear()
        self._last.clear()
        self._over_nodes.clear()
        for unit in self._units:
            unit.abandon_backward(self._reach)

    def serve(self, unit: Unit) -> None:
        """Take part in a reduction of an abandoned backward. Collective: all ranks."""
        self._serve_owed()
        self._announce(unit)
        for buffer in unit.reducing_buffers:
            buffer.gradients.serve().wait()
            self._serve_over_nodes(buffer)

    def settle(self) -> None:
        """Finish the reductions and agreements of abandoned backwards. Collective: all ranks have come behind them."""
        self._serve_owed()

    def _serve_owed(self) -> None:
        """Take part in the second halves of reductions whose first half this rank has started."""
        while self._owed:
            buffer, pending = self._owed[0]
            pending.wait()
            self._serve_over_nodes(buffer)
            del self._owed[0]

    def _serve_over_nodes(self, buffer: FlatBuffer) -> None:
        gradients = buffer.gradients
        if gradients.has_nodes and not gradients.nodes.wait_for_last(self._owed_reach):
            gradients.serve_over_nodes().wait()

    # -- For subclasses that act in the backward -------------------------------------------------------------------

    def _announce(self, unit: Unit) -> None:
        """Prepare the reduction of a unit. All ranks, in order."""

    def _after_reduction(self, unit: Unit, buffer: FlatBuffer) -> None:
        """Use the average of a buffer while backward goes on."""

    def _check_late(self, units: Iterable[Unit]) -> None:
        """Refuse units, if need be, that got a gradient after their reduction. On all ranks alike."""

    # -- The reductions that run -----------------------------------------------------------------------------------

    def _drain(self, keep: int) -> None:
        self._drain_nodes(keep)
        self._drain_over_nodes(keep)

    def _drain_nodes(self, keep: int) -> None:
        """Finish reductions but for the last ones; with nodes their first halves, behind which the second begin."""
        while len(self._in_flight) > keep:
            unit, buffer, pending = self._in_flight[0]
            if buffer.gradients.has_nodes:
                self._start_second_half(unit, buffer, pending)
                continue
            with label("reduce", unit.name):
                pending.wait()
                del self._in_flight[0]
                buffer.gradients.finish_reduce()
            self._after_reduction(unit, buffer)

    def _start_second_half(self, unit: Unit, buffer: FlatBuffer, pending: Pending) -> None:
        """Finish the first half of the reduction that was started first, and go on unless it waits in the node."""
        gradients = buffer.gradients
        with label("reduce", unit.name):
            pending.wait()
            gradients.end_node_reduce()
            if not gradients.nodes.wait_for_last(self._reach):
                self._over_nodes.append((unit, buffer, gradients.reduce_over_nodes()))
        del self._in_flight[0]  # until here an error leaves the second half to `settle`

    def _drain_over_nodes(self, keep: int) -> None:
        while len(self._over_nodes) > keep:
            unit, buffer, pending = self._over_nodes[0]
            with label("reduce", unit.name):
                pending.wait()
                del self._over_nodes[0]
                buffer.gradients.finish_reduce()
            self._after_reduction(unit, buffer)

    @property
    def _buffers(self) -> list[FlatBuffer]:
        return [buffer for unit in self._units for buffer in unit.reducing_buffers]

    def _flags(self) -> bytes:
        """Return which units had gradients after their reduction, and which parameters had one at all.

        As many on every rank, also where some have frozen a parameter alone.
        """
        flags = [unit in self._late for unit in self._units]
        for unit in self._units:
            for buffer in unit.buffers:
                flags += [index in buffer.gradients.used for index in range(len(buffer.params))]
        return bytes(flags)

    def _agree_on_flags(self, kind: Hashable) -> bytes:
        own = self._flags()
        self._last.pop(kind, None)  # an error leaves nothing that other ranks may not have
        facts = b"".join(number.to_bytes(_NUM_BYTES) for number in self.facts.digest())
        message = torch.tensor(list(own + facts), dtype=torch.uint8, device="cpu")
        answer = bytes(self._communicator.agree_on_flags(message, "agreement on used parameters").tolist())
        agreed, facts = answer[: len(own)], answer[len(own) :]
        self.facts.compare((int.from_bytes(facts[:_NUM_BYTES]), int.from_bytes(facts[_NUM_BYTES:])))
        self._last[kind] = own, agreed
        return agreed

    def _settle(self, kind: Hashable, is_as_before: bool) -> None:
        buffers = self._buffers
        reducing = {id(buffer) for buffer in buffers}
        agreed = self._last[kind][1] if is_as_before else self._agree_on_flags(kind)
        late = [unit for unit, flag in zip(self._units, agreed[: len(self._units)], strict=True) if flag]
        self._check_late(late)
        position = len(self._units)
        for buffer in [buffer for unit in self._units for buffer in unit.buffers]:
            used = agreed[position : position + len(buffer.params)]
            position += len(buffer.params)
            if id(buffer) not in reducing:
                continue
            buffer.gradients.agreed((index for index, flag in enumerate(used) if flag), self._reach)
        for unit in late:
            unit.reopen()
            self.start(unit)
        self._drain(0)
        self._late.clear()
        for pending in [buffer.gradients.gather_reduced() for buffer in buffers]:
            if pending is not None:
                pending.wait()
        for buffer in buffers:
            if not buffer.gradients.has_grad:
                buffer.gradients.forget()
            buffer.gradients.show_kept()
            buffer.gradients.mark_reduced()
