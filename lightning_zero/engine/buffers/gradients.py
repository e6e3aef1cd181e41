"""The gradients of one flat buffer: summed on this rank, averaged over the ranks, kept for the step.

Note [Two dtypes]
    The average is kept in the dtype of reductions. Whoever writes it before the step (unscaling, hooks, clipping) gets
    it in the dtype that is stepped, so that nothing is rounded twice; where these differ, or where the average is not
    where it is stepped, that is a second tensor, ``_written``, and lives as long as the step window is open.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_zero.comm.communicator import Pending
from lightning_zero.engine.buffers.assigned_gradients import AssignedSources
from lightning_zero.engine.buffers.local_sums import LocalSums
from lightning_zero.engine.buffers.loss_scales import LossScales
from lightning_zero.engine.buffers.node_sums import NodeSums
from lightning_zero.engine.buffers.own_range import OwnRange
from lightning_zero.engine.buffers.parameter import (
    ReducedParameter,
    end_writes,
    has_class,
    is_plain,
    raw_grad,
    restore_class,
    set_raw_grad,
    swap_class,
    user_class,
)
from lightning_zero.engine.buffers.spec import BufferSpec
from lightning_zero.engine.buffers.stepped import SteppedValues
from lightning_zero.sharding import ShardingScope
from lightning_zero.storage.references import num_tensors_in
from lightning_zero.storage.store import ShardStore

__all__ = ["BufferGradients"]


class BufferGradients:
    """The gradients of one buffer.

    Call protocol, with n padded elements on N ranks:

    1. ``accumulate``, any number of times: the local sums are n elements.
    2. ``reduce`` and wait; with nodes ``end_node_reduce``, and unless it is to wait in the node ``reduce_over_nodes``
       and wait; then ``finish_reduce``; at stage 0 ``gather_reduced`` and wait. ``reduced`` is the own range.
    3. ``agreed`` and ``mark_reduced``: the ranks know who had a gradient, and parameters say so.
    4. The step reads ``unscaled`` and ``factor``, or the result of ``for_writing``. 1 may come first: sums are kept.
    5. ``forget``.

    Args:
        spec: The facts of the buffer.
        values: Its stepped values.
    """

    def __init__(self, spec: BufferSpec, values: SteppedValues) -> None:
        self._spec = spec
        self._values = values
        self._home = values.home
        # - Sums of this rank
        self.sums = LocalSums(spec)
        self.used: set[int] = set()  # slots with a gradient on this rank since the ranks last agreed
        self.left: set[int] = set()  # slots whose gradient is still where autograd has put it
        self._target: torch.Tensor | None = None  # where a running reduction writes
        self.nodes = NodeSums(spec)
        # - The average over the ranks
        self.has_grad: set[int] = set()  # slots with a gradient on some rank, in ``reduced``
        self.given_out: set[int] = set()  # slots whose segment a program has read: it may be assigned again
        self.assigned = AssignedSources()
        self._before_backward: set[int] = set()  # slots that had an assigned gradient then, and other sums than ours
        self._reduced: torch.Tensor | None = None
        self._retained: torch.Tensor | None = None  # an earlier average whose place the sums need
        self.scales = LossScales()
        # - Gradients for the step
        self.factor: torch.Tensor | None = None  # () fp32; the average is still to be multiplied by it
        self._written: torch.Tensor | None = None  # see Note [Two dtypes]
        self._kept: torch.Tensor | None = None  # an earlier one that a program keeps; shows the next average, too
        # - A step in the backward
        self.is_spent = False  # one has taken the average, which nobody has dropped yet
        self.is_ahead = False  # and `optimizer.step()` was not called yet

    @property
    def reduced(self) -> torch.Tensor | None:
        """The average over the ranks, there for whoever reads it: (own range,)."""
        self._home.await_gradient()
        return self._reduced

    # -- Sums of this rank -----------------------------------------------------------------------------------------

    def accumulate(self, index: int, grad: torch.Tensor) -> None:
        """Cast and copy, or add, a parameter's gradient into the local sum.

        Raises:
            RuntimeError: The program has assigned one before the backward, which counts otherwise than the sums here.
        """
        if index in self._before_backward:
            self._require_of_this_rank(index, "be assigned before a backward")
        self._rescale()
        slot = self._spec.layout.slots[index]
        target = self._local_sums()[slot.offset : slot.stop].view(slot.shape)
        dense = grad.to_dense() if grad.is_sparse else grad
        if grad.is_sparse:
            self.sums.sparse.add(index)
        if index in self.sums.slots:
            target.add_(dense)
        else:
            target.copy_(dense)
            self.sums.slots.add(index)
        self.used.add(index)
        self.scales.note([index])
        if not grad.is_inference() and grad._version:  # autograd has added to an assigned gradient, and may keep
            self.assigned.brought[index] = weakref.ref(grad), grad._version

    def _rescale(self) -> None:
        """Bring earlier gradients to the loss scale of this backward, which adds to them or reduces them."""
        if not self.scales.is_begun:
            return
        params = self._spec.params
        there = self.sums.slots | {index for index in self.has_grad if params[index].requires_grad}
        for factor, indices in self.scales.changes(there).items():
            multiply = partial(torch.Tensor.mul_, other=factor)
            with torch.inference_mode(False), torch.no_grad():
                self._change(indices & self.has_grad, multiply)
                self._change_sums(indices, multiply)

    def note_assigned(self) -> None:
        """Find the gradients to which the backward that begins must not add; see ``accumulate``."""
        params = self._spec.params
        self._before_backward = {
            index
            for index in self._spec.axes
            if not self._is_of_this_rank(index) and index not in self.left and raw_grad(params[index]) is not None
        }

    def note_arrived(self, index: int) -> None:
        """Take note that the gradient of a slot which ``note_assigned`` has found was the backward's first."""
        self._before_backward.discard(index)

    def with_sum(self, index: int, grad: torch.Tensor) -> torch.Tensor | None:
        """Return a gradient plus the slot's local sum, in the gradient's dtype; None if there is no sum."""
        local = self.sums.of(index)
        return None if local is None else (local + (grad.to_dense() if grad.is_sparse else grad)).to(grad.dtype)

    def drop_sum(self, index: int) -> None:
        """Drop the local sum of a slot."""
        self.sums.slots.discard(index)
        self.used.discard(index)

    def _local_sums(self) -> torch.Tensor:
        spec = self._spec
        self._values.take_back()
        if not spec.sharding.grads:
            self._values.flush()  # its gradient is there
        if self._reduced is not None and not spec.sharding.grads:
            self.settle()
            self.accept_writes()
            if self._written is not None and num_tensors_in(self._written) > 1:
                self._kept = self._written
            self.end_writing()
            assert self.reduced is not None
            self._retained = (self.reduced if spec.sharding.optim else self.reduced[spec.shard_range]).clone()
            self._reduced = None
        elif self.sums.is_read and not self.sums.slots and self._reduced is None and self._retained is None:
            self.sums.is_read = False
            if self.sums.is_kept:
                self.sums.give_up()
        return self.sums.take() if self.sums.flat is None else self.sums.flat

    @property
    def is_summing(self) -> bool:
        """Whether gradients of micro-batches wait for their reduction where the average would be (stages 0 and 1)."""
        return not self._spec.sharding.grads and (bool(self.sums.slots) or self._retained is not None)

    @property
    def is_waiting(self) -> bool:
        """Whether gradients of micro-batches wait for the last one, on each rank or in each node."""
        return self.is_summing or self.nodes.are_waiting

    @property
    def waiting(self) -> set[int]:
        """The slots with such a gradient."""
        return self.sums.slots | (self.has_grad if self._retained is not None or self.nodes.are_waiting else set())

    def is_sum(self, index: int, grad: torch.Tensor) -> bool:
        """Say whether a tensor is the local sum that ``show_sum`` returns."""
        local = self.sums.of(index) if self.is_summing else None
        return local is not None and (grad.data_ptr(), grad.shape) == (local.data_ptr(), local.shape)

    def show_sum(self, index: int) -> torch.Tensor | None:
        """Return a view of a slot's local sum while it waits, or None: writes into it count.

        Raises:
            RuntimeError: An average of an earlier backward waits, too.
        """
        if self._retained is not None and index in self.has_grad:
            raise RuntimeError(
                f"The gradient of `{self._spec.layout.slots[index].name}` is an average to which micro-batches of"
                " this rank are still to be added, and cannot be read before the last of them. Read it after"
                " `microbatch(last=True)`, or call `zero_grad` before the first."
            )
        local = self.sums.of(index)
        if local is not None:
            self._require_of_this_rank(index, "be read before the last micro-batch")
        self.sums.is_read = self.sums.is_read or local is not None
        return local

    def _require_of_this_rank(self, index: int, use: str) -> None:
        """Refuse a gradient before its reduction that is no average over this rank's data.

        Raises:
            RuntimeError: It is a summand of that, or a sum over several ranks.
        """
        if not self._is_of_this_rank(index):
            name = self._spec.layout.slots[index].name
            raise RuntimeError(
                f"The gradient of `{name}` cannot {use}: on this rank it is a summand of its"
                " gradient (`tensor_parallel` with `sequence`, or the rule 'partial'), or the sum over the tokens of"
                " several ranks (`expert_parallel`). Use it behind the last micro-batch, in"
                " `on_before_optimizer_step`, where it is the average over all ranks."
            )

    def _is_of_this_rank(self, index: int) -> bool:
        spec = self._spec
        is_of_others = index in spec.axes and spec.axes[index].is_of_others
        is_average = math.isclose(spec.communicator.world_size * spec.factor(index), spec.group.divisor)
        return is_average and not is_of_others

    # -- The average over the ranks --------------------------------------------------------------------------------

    def reduce(self) -> Pending:
        """Start averaging the local sums over the ranks, with nodes over those of this one.

        ``finish_reduce`` when the result has been waited for, with nodes ``end_node_reduce``.
        Collective: all ranks, also those without a gradient: a missing gradient counts as zero.
        ZeRO (arXiv:1910.02054) section 5.2.
        """
        spec = self._spec
        self._rescale()
        with torch.inference_mode(False), torch.no_grad():
            local = self._local_sums()
            for index, slot in enumerate(spec.layout.slots):
                if index not in self.sums.slots and not self._sum_assigned(index):
                    local[slot.offset : slot.stop].zero_()
                elif spec.factor(index) != 1.0:  # in the dtype of reductions; local sums are those of the program
                    local[slot.offset : slot.stop].mul_(spec.factor(index))
            if spec.sharding.grads and spec.communicator.world_size > 1:
                numel = spec.node_range.stop - spec.node_range.start  # without nodes the shard's
                self._target = spec.store.create("gradients", numel, spec.kind.reduce)
            else:
                self._target = local[spec.node_range]
            if not self.has_nodes:
                self._fetch_earlier()
            return spec.group.reduce_scatter(self._target, local, f"gradients of unit `{spec.name}`")

    def _fetch_earlier(self) -> None:
        """Start bringing an average to the device, beside the reduction that is to be added to it."""
        if self._reduced is not None and self._spec.sharding.grads and self._is_as_reduced:
            self._home.fetch_gradient(self._reduced)

    def end_node_reduce(self) -> None:
        """Add a node's average to that of earlier micro-batches. No collective."""
        assert self._target is not None
        self.nodes.add(self._target)
        self._target = None
        self.sums.slots.clear()
        self.sums.give_up()

    def reduce_over_nodes(self) -> Pending:
        """Start averaging the nodes' sums; ``finish_reduce`` when the result has been waited for.

        Collective: the ranks with this one's place in their nodes.
        """
        spec = self._spec
        with torch.inference_mode(False), torch.no_grad():
            self._target = spec.store.create("gradients", spec.layout.shard_numel, spec.kind.reduce)
            self._fetch_earlier()
            what = f"gradients of unit `{spec.name}`"
            return spec.group.reduce_scatter_over_nodes(self._target, self.nodes.send(), what)

    @property
    def _is_as_reduced(self) -> bool:
        """Whether nobody has written the average, and no step that is due reads it."""
        return self.factor is None and self._written is None and not self._values.is_due

    def _sum_assigned(self, index: int) -> bool:
        """Add an assigned ``grad`` that this backward did not touch into the local sum; say whether there was one."""
        param = self._spec.params[index]
        grad = raw_grad(param) if param.requires_grad else None
        if grad is None:
            return False
        self._require_of_this_rank(index, "be assigned before a backward")
        self.accumulate(index, grad)
        if not grad.is_inference():  # a program that keeps it has a part of the average
            self.assigned.brought[index] = weakref.ref(grad), grad._version
        set_raw_grad(param, None)
        return True

    def finish_reduce(self) -> None:
        """Add the average to the gradient shard of before. No collective; stage 0 still needs ``gather_reduced``."""
        spec, target, local = self._spec, self._target, self.sums.flat
        assert target is not None
        self.nodes.end_sending()
        with torch.inference_mode(False), torch.no_grad():
            self._home.end_fetch(self._reduced if self._is_as_reduced else None)
            if self._retained is not None:
                target.add_(self._retained)
                self._retained = None
            elif spec.sharding.grads and self._reduced is not None:
                target = self._add_to_earlier(target, self._reduced)
            elif spec.sharding.grads:
                target = self._home.keep_gradient(target)
        is_own_range = spec.sharding.optim or spec.sharding.grads
        self._reduced, self._target = (target if is_own_range else local), None
        if self.has_nodes:  # the local sums were given up; those that are there are of a late gradient
            return
        self.sums.slots.clear()
        if spec.sharding.grads:
            if spec.communicator.world_size > 1:
                self.sums.give_up()
            self.sums.flat = None  # on one rank the local sum is the average

    def _add_to_earlier(self, target: torch.Tensor, earlier: torch.Tensor) -> torch.Tensor:
        """Add to the average that is there, in its memory, as PyTorch does: a program may keep it."""
        home = self._home
        self.settle()
        self.accept_writes()
        if home.adds_in_place and not self._values.is_due:
            total = home.add_gradient(target, earlier)
            self._refresh_written()
            return total
        home.await_gradient()
        target.add_(earlier.to(target.device))
        self.end_writing()
        self._give_back_reduced()
        return home.keep_gradient(target)

    def _refresh_written(self) -> None:
        """Show a new average in the second tensor, if a program keeps that; else give it up."""
        if self._written is None or num_tensors_in(self._written) == 1:
            self.end_writing()
            return
        assert self.reduced is not None
        self._written.copy_(self.reduced)

    def serve(self) -> Pending:
        """Take part in a reduction that is for nothing, with nodes in this one. Collective: all ranks of it."""
        spec = self._spec
        with torch.inference_mode(False), torch.no_grad():
            zeros = torch.zeros(spec.layout.padded_numel, dtype=spec.kind.reduce, device=spec.store.device)
            return spec.group.reduce_scatter(zeros[spec.node_range], zeros, f"gradients of unit `{spec.name}`")

    def serve_over_nodes(self) -> Pending:
        """Take part in its second half. Collective: the ranks with this one's place in their nodes."""
        spec = self._spec
        with torch.inference_mode(False), torch.no_grad():
            numel = spec.node_range.stop - spec.node_range.start
            zeros = torch.zeros(numel, dtype=spec.kind.reduce, device=spec.store.device)
            what = f"gradients of unit `{spec.name}`"
            return spec.group.reduce_scatter_over_nodes(zeros[: spec.layout.shard_numel], zeros, what)

    @property
    def has_nodes(self) -> bool:
        """Whether a reduction has two halves: in the nodes, and over them."""
        return self._spec.group.nodes is not None

    def gather_reduced(self) -> Pending | None:
        """Start gathering the average where every rank steps everything (stage 0). Collective there: all ranks."""
        spec = self._spec
        if spec.sharding.optim or self.reduced is None or spec.communicator.world_size == 1:
            return None
        with torch.inference_mode(False), torch.no_grad():
            what = f"gradients of unit `{spec.name}`"
            return spec.communicator.all_gather(self.reduced, self.reduced[spec.shard_range], what)

    def agreed(self, indices: Iterable[int], reach: ShardingScope = ShardingScope.WORLD) -> None:
        """Take note of slots that have a gradient on some rank: the ranks have agreed.

        Args:
            indices: The slots.
            reach: How far the reductions of the backward went.
        """
        agreed = set(indices)
        self.has_grad |= agreed
        self.scales.note(agreed)
        self.nodes.are_waiting = self.nodes.wait_for_last(reach) and bool(self.has_grad)
        self.assigned.agree(agreed)
        self.used.clear()

    def show_kept(self) -> None:
        """Copy the average into the earlier one that a program keeps. At stage 0 it is gathered before."""
        if self._kept is not None and self._reduced is not None:
            assert self.reduced is not None
            with torch.no_grad():
                self._written = self._kept.copy_(self.reduced)
            self._kept = None

    def reduced_or_zeros(self) -> torch.Tensor:
        """Return the average, made of zeros where no rank of this part has a gradient: (own range,)."""
        self.settle()
        reduced = self._average_or_zeros()
        self.has_grad.update(range(len(self._spec.params)))
        self.mark_reduced()
        return reduced

    def _average_or_zeros(self) -> torch.Tensor:
        spec, own = self._spec, self._spec.own_range
        self._values.take_back()
        if self._reduced is None:
            with torch.inference_mode(False), torch.no_grad():
                if not spec.sharding.grads:
                    self._reduced = self._local_sums()[own.start : own.stop].zero_()
                else:
                    self._reduced = self._home.zero_gradient(self._spec.kind.reduce)
        assert self.reduced is not None
        return self.reduced

    def assign(self, index: int, segment: torch.Tensor) -> None:
        """Let a segment take the place of a slot's average, or of its sums: somebody has assigned it to ``grad``.

        Args:
            index: The slot.
            segment: This rank's, in any shape and dtype.

        Raises:
            RuntimeError: A step in the backward has taken the buffer's gradients.
        """
        if self.is_spent:
            raise RuntimeError(
                f"A gradient was assigned to a parameter of unit `{self._spec.name}`, whose gradients were stepped in"
                " the backward (`step='backward'`). Call `optimizer.zero_grad()` before, or use `step='auto'`."
            )
        self.refuse_in_node(index)
        own = self._spec.own_range
        flat = segment.detach().as_subclass(torch.Tensor).reshape(-1)
        self.drop_sum(index)
        self.sums.sparse.discard(index)
        self.assigned.replace(index)
        with torch.inference_mode(False), torch.no_grad():
            if self.is_summing:  # the sums lie where the average would
                self._assign_retained(index, flat)
            else:
                self._average_or_zeros()
                values = self.for_writing()
                assert values is not None
                own.segment(index, values).reshape(-1).copy_(flat)
        self.has_grad.add(index)

    def refuse_in_node(self, index: int) -> None:
        """Refuse the use of a gradient that waits in the nodes.

        Raises:
            RuntimeError: It does.
        """
        if self.nodes.are_waiting and index in self.has_grad:
            raise RuntimeError(
                f"The gradient of `{self._spec.layout.slots[index].name}` is a sum of each node, and is averaged over"
                " the nodes in the last micro-batch (`Sharding(grads='node')`). Use it after `microbatch(last=True)`,"
                " in a LightningModule in `on_before_optimizer_step`, or use `Sharding(grads='world')`."
            )

    def _assign_retained(self, index: int, flat: torch.Tensor) -> None:
        shard = OwnRange(self._spec.layout, self._spec.group.place, is_sharded=True)
        if self._retained is None:
            self._retained = torch.zeros(shard.numel, dtype=self._spec.kind.reduce, device=self._spec.store.device)
        first = self._spec.own_range.elements(index)[0]
        start, stop = shard.elements(index)
        shard.segment(index, self._retained).copy_(flat[start - first : stop - first])

    def mark_reduced(self) -> None:
        """Let reads of ``grad`` find reduced gradients, and ``zero_grad`` those that wait for the last micro-batch."""
        is_due = self._spec.sharding.params or any([self.has_grad, self.given_out, self.sums.slots])
        for index, param in enumerate(self._spec.params if is_due else ()):
            if is_plain(param) and self.is_asked_for(index):
                swap_class(param, ReducedParameter)

    def mark_expected(self) -> None:
        """Let reads of ``grad`` find the gradients of a backward that has not ended, also those of other ranks."""
        for param in self._spec.params:
            if param.requires_grad and is_plain(param):
                swap_class(param, ReducedParameter)

    def mark_plain(self, *, for_compiler: bool) -> None:
        """Make marked parameters of users' classes plain for the time of a forward, which may look at the class.

        Args:
            for_compiler: All of them, because compilers do.
        """
        for param in self._spec.params:
            if has_class(param, ReducedParameter) and (for_compiler or user_class(param) is not nn.Parameter):
                restore_class(param)

    def is_asked_for(self, index: int) -> bool:
        """Say whether a parameter is a ``ReducedParameter`` while it is whole: its reads are watched."""
        if any([index in self.has_grad, index in self.given_out, index in self.sums.slots]):
            return True
        return bool(self._spec.sharding.params) and user_class(self._spec.params[index]) is nn.Parameter

    def forget_given_out(self) -> None:
        """Make parameters plain that are marked only because a program has read their segment."""
        given_out, self.given_out = self.given_out, set()
        self._unmark(given_out)

    def _unmark(self, indices: set[int]) -> None:
        """Make parameters plain of which nothing is of interest any more."""
        for index in indices:
            param = self._spec.params[index]
            if has_class(param, ReducedParameter) and not self.is_asked_for(index):
                end_writes(param)
                restore_class(param)

    # -- Giving up -------------------------------------------------------------------------------------------------

    def forget(self, indices: Iterable[int] | None = None) -> None:
        """Drop the gradients of some parameters, by default of all, reduced or not."""
        params = self._spec.params
        gone = set(range(len(params)) if indices is None else indices)
        self.sums.slots -= gone
        self.sums.sparse -= gone
        self.used -= gone
        self.assigned.forget(gone)
        self.scales.forget(gone)
        dropped = self.has_grad & gone
        self.has_grad -= gone
        for index in self.left & gone:
            set_raw_grad(params[index], None)
        self.left -= gone
        if self.is_spent:
            self.is_spent = bool(self.has_grad)
            self.is_ahead = self.is_ahead and self.is_spent
        elif self.has_grad:
            self._zero(dropped)  # the next gradient is added to it
        else:
            self._drop_average()
            self.nodes.drop()
        self._unmark(gone)

    def _drop_average(self) -> None:
        """Drop the average and everything that belongs to it: nothing of it may reach the next one."""
        if self._reduced is not None and self._spec.sharding.grads:
            self._give_back_reduced()
        self._reduced = self._retained = self.factor = self._written = self._kept = None

    def abandon(self, reach: ShardingScope = ShardingScope.WORLD) -> None:
        """Drop the sums of a backward that an error has ended; the average before it stays. No collective.

        Where an average was there before, a reduction that has ended leaves the sum of both, as in plain PyTorch. At
        stage 0 no rank has the average whole any more where a reduction has begun: it goes, too. So do sums of nodes
        whose reduction over the nodes may have begun, with the average that they were to be added to.

        Args:
            reach: How far the reductions of the backward went.
        """
        spec, target, self._target = self._spec, self._target, None
        self.nodes.end_sending()
        if not self.nodes.are_waiting:
            self.nodes.drop()
        elif not self.nodes.wait_for_last(reach):
            self.has_grad.clear()
        self._kept = None
        self.assigned.brought.clear()
        self._home.end_fetch(None)
        self.sums.slots.clear()
        self.sums.sparse &= self.has_grad
        self.used.clear()
        if target is not None and spec.sharding.grads and spec.communicator.world_size > 1:
            spec.store.release("gradients", target.nbytes)
        if spec.sharding.grads or self._reduced is None:
            self.sums.give_up()
        retained, self._retained = self._retained, None
        if retained is not None and spec.sharding.optim:
            with torch.no_grad():
                self._reduced = self._local_sums()[spec.own_range.start : spec.own_range.stop].copy_(retained)
        elif retained is not None:
            self.has_grad.clear()
        if self.is_spent:
            return
        if self.has_grad:
            self._zero(set(range(len(spec.params))) - self.has_grad)
        else:
            self.forget()

    def zero(self, indices: Iterable[int]) -> None:
        """Make the gradients of some parameters zero, reduced or not; they still have one."""
        zeroed = set(indices)
        self.assigned.change(zeroed, torch.Tensor.zero_)
        self._zero(self.has_grad & zeroed)
        self._change_sums(zeroed, torch.Tensor.zero_)

    def _zero(self, indices: set[int]) -> None:
        self._change(indices, torch.Tensor.zero_)
        self.scales.forget(indices)

    def _change_sums(self, indices: set[int], change: Callable[[torch.Tensor], Any]) -> None:
        """Change the local sums of some slots in place."""
        for index in self.sums.slots & indices:
            local = self.sums.of(index)
            assert local is not None
            change(local)

    def _change(self, indices: set[int], change: Callable[[torch.Tensor], Any]) -> None:
        """Change the averages of some slots in place, and those that wait for a reduction."""
        if not indices:
            return
        self.nodes.change(indices, change)
        self._values.flush()  # a step, maybe another optimizer's, reads the same tensor
        self.settle()
        for values in (self.reduced, self._written):
            if values is not None:
                for index in indices:
                    change(self._spec.own_range.segment(index, values))
        if self._retained is not None:
            shard = OwnRange(self._spec.layout, self._spec.group.place, is_sharded=True)
            for index in indices:
                change(shard.segment(index, self._retained))

    def spend(self) -> None:
        """Give up the average, which a step in the backward has taken. ``forget`` ends it."""
        assert self.reduced is not None
        if self._spec.sharding.grads:
            self._home.lend_gradient(self.reduced)
        self._reduced = self.factor = self._written = None
        self.is_spent = self.is_ahead = True
        self.mark_reduced()

    def _give_back_reduced(self) -> None:
        """Give up the average where it is sharded; a step that is running still reads it."""
        assert self.reduced is not None
        self._home.lend_gradient(self.reduced)
        self._reduced = None
        if not self._values.is_due:
            self._home.give_back_lent()

    def move(self, before: ShardStore, home: ShardStore) -> None:
        """Move gradient shard and local sums from one store to another."""
        if self.reduced is not None and self._spec.sharding.grads:
            reduced = home.create("gradients", self.reduced.numel(), self.reduced.dtype).copy_(self.reduced)
            before.give_back("gradients", self.reduced)
            self._reduced = reduced
        if self.sums.flat is not None:
            self._move_sums(self.sums.flat, before, home)

    def _move_sums(self, local: torch.Tensor, before: ShardStore, home: ShardStore) -> None:
        """Move local sums, which hold the average at stages 0 and 1; drop them if there is nothing in them."""
        holds_reduced = self._reduced is not None and not self._spec.sharding.grads
        self.sums.flat = None
        if holds_reduced or self.sums.slots:
            self.sums.flat = moved = home.create("gradients", local.numel(), local.dtype).copy_(local)
            if holds_reduced:
                self._reduced = moved[self._spec.own_range.start : self._spec.own_range.stop]
        before.give_back("gradients", local)

    # -- Gradients for the step ------------------------------------------------------------------------------------

    def for_reading(self) -> torch.Tensor | None:
        """Return the average in either dtype: (own range,)."""
        self.settle()
        return self.reduced if self._written is None else self._written

    def for_writing(self) -> torch.Tensor | None:
        """Return the average in the dtype in which it is stepped: (own range,)."""
        if self.reduced is None:
            return None
        if self.reduced.dtype == self._values.stepped.dtype and not self._is_away and self._written is None:
            self.settle()
            return self.reduced
        if self._written is None:
            self._written = self._home_copy(self._values.stepped.dtype)
        self.settle()
        return self._written

    def for_showing(self) -> torch.Tensor | None:
        """Return the same, in memory."""
        values = self.for_writing()
        if values is None:
            return None
        shown = self._home.in_memory(values)
        if shown is not values:
            self._written = shown
        return shown

    def unscaled(self) -> torch.Tensor:
        """Return the average, which ``factor``, if there is one, still multiplies, at home: (own range,)."""
        assert self.reduced is not None
        if self._written is not None:
            return self._written
        return self.reduced if self._spec.sharding.grads else self._home.bring_gradient(self.reduced)

    @property
    def _is_away(self) -> bool:
        """Whether the average is on the device although it is stepped elsewhere (stages 0 and 1)."""
        return self._home.is_apart and not self._spec.sharding.grads

    def _home_copy(self, dtype: torch.dtype) -> torch.Tensor:
        assert self.reduced is not None
        with torch.inference_mode(False), torch.no_grad():
            return self.reduced.to(self._values.stepped.device, dtype, copy=True)

    def known_norm(self, order: float) -> torch.Tensor | None:
        """Return the norm of the average, if it is known without reading it: () float64."""
        is_untouched = self.factor is None and self._written is None and self._reduced is not None
        return self._home.norm(order) if is_untouched else None

    def scale_later(self, indices: set[int], factor: torch.Tensor) -> bool:
        """Keep a factor of the average for the step, if it is that of ``indices`` and nobody has written it.

        Returns:
            Whether nothing is left to do; if not, the caller multiplies.
        """
        if self._reduced is None or not self.has_grad:
            return True  # a factor lives and dies with the average that it multiplies
        is_written = self._written is not None or self.factor is not None
        if is_written or not self.has_grad <= indices or self._values.stepped.dtype != torch.float32:
            return False
        self.factor = factor
        return True

    def settle(self) -> None:
        """Multiply the average by the factor that was kept for the step."""
        if self.factor is None or self.reduced is None:
            return
        self._values.flush()  # a step that is due multiplies by itself
        factor, self.factor = self.factor, None
        stepped = self._values.stepped.dtype
        with torch.inference_mode(False), torch.no_grad():
            if self._written is not None:
                self._written.mul_(factor.to(self._written.device))
            elif self.reduced.dtype == stepped:
                self.reduced.mul_(factor.to(self.reduced.device))
            else:
                self.reduced.copy_(self.reduced.to(stepped).mul_(factor.to(self.reduced.device)))
        self.clear_padding()

    def clear_padding(self) -> None:
        """Make the padding of the average zero again: a factor that is not a number leaves its own there."""
        for values in (self.reduced, self._written):
            if values is not None:
                for start, stop in self._spec.own_range.gaps():
                    values[start:stop].zero_()

    def accept_writes(self) -> None:
        """Copy the written gradients into the gradient shard, in the dtype in which that is kept."""
        if self._written is not None and self.reduced is not None:
            with torch.no_grad():
                self.reduced.copy_(self._written)

    def end_writing(self) -> None:
        """Give up the second tensor of Note [Two dtypes]."""
        self._written = None
