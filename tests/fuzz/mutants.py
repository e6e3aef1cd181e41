"""Engines that are broken on purpose: the fuzzer must find each of them.

Each mutant is a context manager that patches the engine inside a rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from lightning_zero.checkpoint import state
from lightning_zero.comm import communicator
from lightning_zero.engine.access.gathered import GatheredParams
from lightning_zero.engine.buffers import sharded_gradient
from lightning_zero.engine.buffers.buffer import FlatBuffer
from lightning_zero.engine.buffers.gradients import BufferGradients
from lightning_zero.engine.buffers.own_range import OwnRange
from lightning_zero.engine.buffers.update import Update
from lightning_zero.engine.buffers.window import BufferWindow
from lightning_zero.engine.optim import whole_gradients
from lightning_zero.engine.optim.attached import Attached
from lightning_zero.engine.optim.optimizer import ShardedOptimizer
from lightning_zero.engine.runtime.order import PassOrder
from lightning_zero.engine.runtime.reduction import Reducer
from lightning_zero.engine.runtime.scopes import Scopes
from lightning_zero.engine.units.module_buffers import ModuleBuffers
from lightning_zero.engine.units.unit import Unit

__all__ = ["MUTANTS"]


@contextmanager
def gradients_are_summed() -> Iterator[None]:
    """The average is not divided by the number of ranks."""
    divided = communicator._divided_sum_in_rank_order

    def summed(out: Any, chunks: Any, divisor: int) -> None:
        divided(out, chunks, 1)

    with mock.patch.object(communicator, "_divided_sum_in_rank_order", summed):
        yield


@contextmanager
def a_dropped_gradient_stays() -> Iterator[None]:
    """A gradient that is dropped while its neighbours stay is not set to zero."""
    with mock.patch.object(BufferGradients, "_zero", return_value=None):
        yield


@contextmanager
def unused_counts_as_zero() -> Iterator[None]:
    """A parameter that no rank used has a gradient of zeros."""
    agreed = BufferGradients.agreed

    def all_of_them(self: BufferGradients, indices: Any, *reach: Any) -> None:
        agreed(self, list(indices) and range(len(self._spec.params)), *reach)

    with mock.patch.object(BufferGradients, "agreed", all_of_them):
        yield


@contextmanager
def the_last_microbatch_counts() -> Iterator[None]:
    """Micro-batches are not added up."""
    accumulate = BufferGradients.accumulate

    def last_only(self: BufferGradients, index: int, grad: Any) -> None:
        self.sums.slots.discard(index)
        accumulate(self, index, grad)

    with mock.patch.object(BufferGradients, "accumulate", last_only):
        yield


@contextmanager
def an_earlier_average_is_lost() -> Iterator[None]:
    """A backward replaces the gradients of the one before."""
    reduce = BufferGradients.reduce

    def anew(self: BufferGradients) -> Any:
        self._retained = None
        if self._spec.sharding.grads:
            self._reduced = None
        return reduce(self)

    with mock.patch.object(BufferGradients, "reduce", anew):
        yield


@contextmanager
def zero_grad_drops_always() -> Iterator[None]:
    """``zero_grad(set_to_none=False)`` leaves no gradient."""
    with mock.patch.object(BufferGradients, "zero", lambda self, indices: self.forget(indices)):
        yield


@contextmanager
def module_buffers_stay() -> Iterator[None]:
    """Module buffers are not sent."""
    with mock.patch.object(ModuleBuffers, "broadcast", return_value=None):
        yield


@contextmanager
def segments_are_one_off() -> Iterator[None]:
    """A segment starts one element too early."""
    segment = OwnRange.segment

    def shifted(self: OwnRange, index: int, values: Any) -> Any:
        piece = segment(self, index, values)
        if not self._is_sharded or not piece.numel() or piece.data_ptr() == values.data_ptr():
            return piece
        offset = (piece.data_ptr() - values.data_ptr()) // values.element_size()
        return values[offset - 1 : offset - 1 + piece.numel()]

    with mock.patch.object(OwnRange, "segment", shifted):
        yield


@contextmanager
def writes_are_lost() -> Iterator[None]:
    """What is written into parameters does not reach the masters."""
    with mock.patch.object(FlatBuffer, "accept_writes", return_value=None):
        yield


@contextmanager
def every_rank_writes() -> Iterator[None]:
    """``gathered(write="rank0")`` does not send rank 0's values."""
    accept = GatheredParams._accept
    with mock.patch.object(
        GatheredParams, "_accept", lambda self, units, write: accept(self, units, "all" if write == "rank0" else write)
    ):
        yield


@contextmanager
def steps_are_not_published() -> Iterator[None]:
    """Stepped values are not gathered where parameters are whole."""

    def forget(self: FlatBuffer) -> None:
        self.flush()

    with mock.patch.object(FlatBuffer, "publish", forget):
        yield


@contextmanager
def norms_are_local() -> Iterator[None]:
    """The norm is that of this rank's segments."""
    norm = whole_gradients.norm_of_norms
    with mock.patch.object(whole_gradients, "norm_of_norms", lambda norms, order, _: norm(norms, order, None)):
        yield


@contextmanager
def units_stay() -> Iterator[None]:
    """Units are not given back, so that a forward behind a step computes with old values."""
    with mock.patch.object(Unit, "reshard", lambda self: self.wait()):
        yield


@contextmanager
def deferred_steps_are_lost() -> Iterator[None]:
    """A deferred step is not made."""
    with mock.patch.object(Update, "_run", return_value=None):
        yield


@contextmanager
def used_on_rank_0_only_counts() -> Iterator[None]:
    """Ranks do not agree on who has a gradient."""
    settle = Reducer._settle

    def alone(self: Reducer) -> None:
        with mock.patch.object(communicator.Communicator, "agree_on_flags", lambda _, flags, __: flags):
            settle(self)

    with mock.patch.object(Reducer, "_settle", alone):
        yield


@contextmanager
def a_factor_outlives_its_gradients() -> Iterator[None]:
    """The factor of a clipping is not dropped with the gradients that it multiplies."""
    drop = BufferGradients._drop_average

    def keeps(self: BufferGradients) -> None:
        factor = self.factor
        drop(self)
        self.factor = factor

    with mock.patch.object(BufferGradients, "_drop_average", keeps):
        yield


@contextmanager
def a_factor_of_no_gradients_stays() -> Iterator[None]:
    """Clipping leaves its factor with buffers that have no gradient."""
    scale_later, end = BufferGradients.scale_later, BufferGradients.finish_reduce
    left: dict[int, Any] = {}

    def leaves(self: BufferGradients, indices: set[int], factor: Any) -> bool:
        if self.reduced is None or not self.has_grad:
            left[id(self)] = factor
        return scale_later(self, indices, factor)

    def takes(self: BufferGradients) -> None:
        end(self)
        self.factor = left.pop(id(self), self.factor)

    with mock.patch.multiple(BufferGradients, scale_later=leaves, finish_reduce=takes):
        yield


@contextmanager
def reductions_are_not_waited_for() -> Iterator[None]:
    """What a reduction writes is read before it is there."""
    wait = communicator.Pending.wait

    def late(self: communicator.Pending) -> None:
        if "gradients of unit" not in self._what or "reduce" not in self._what:
            wait(self)

    with mock.patch.object(communicator.Pending, "wait", late):
        yield


@contextmanager
def pointed_values_are_lost() -> Iterator[None]:
    """What ``p.data = ...`` points to in the step window is not copied into the master."""

    def resets(self: BufferWindow, index: int) -> bool:
        self._spec.params[index].data = self._values.segment(index)
        return False

    with mock.patch.object(BufferWindow, "take_values", resets):
        yield


@contextmanager
def forwards_leave_windows_open() -> Iterator[None]:
    """The forward of a module that is no unit computes with what the window shows."""
    with mock.patch.object(Attached, "_watch_forwards", return_value=None):
        yield


@contextmanager
def lists_are_not_joined() -> Iterator[None]:
    """A rank does not take part in the reductions of a pass that it has no need of."""
    join = PassOrder._join

    def skips(self: PassOrder, entry: int, current: Any) -> None:
        if entry >= len(self._units):
            join(self, entry, current)

    with mock.patch.object(PassOrder, "_join", skips):
        yield


@contextmanager
def errors_are_not_put_aside() -> Iterator[None]:
    """What an error has ended in a backward without notice is taken for a part of the next step."""
    with mock.patch.object(Scopes, "recover", return_value=None):
        yield


@contextmanager
def states_are_not_loaded() -> Iterator[None]:
    """A checkpoint gives optimizers no states."""
    with mock.patch.object(state, "load_optimizer_state", return_value=[]):
        yield


@contextmanager
def added_groups_are_not_stepped() -> Iterator[None]:
    """``add_param_group`` takes no parameters in."""
    attach = ShardedOptimizer._attach_params

    def unless_added(self: ShardedOptimizer, params: Any) -> None:
        if sys._getframe(1).f_code.co_name != "add_param_group":
            attach(self, params)

    with mock.patch.object(ShardedOptimizer, "_attach_params", unless_added):
        yield


@contextmanager
def sleeping_values_are_not_woken() -> Iterator[None]:
    """A gradient reads parameters that are on a disk without waking them."""

    def asleep(func: Any, args: Any, kwargs: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    with mock.patch.object(sharded_gradient, "call_in_memory", asleep):
        yield


MUTANTS: dict[str, Callable[[], Any]] = {
    mutant.__name__: mutant
    for mutant in (
        gradients_are_summed, a_dropped_gradient_stays, unused_counts_as_zero,
        the_last_microbatch_counts, an_earlier_average_is_lost, zero_grad_drops_always, module_buffers_stay,
        segments_are_one_off, writes_are_lost, every_rank_writes, steps_are_not_published, norms_are_local, units_stay,
        deferred_steps_are_lost, used_on_rank_0_only_counts, a_factor_outlives_its_gradients,
        a_factor_of_no_gradients_stays, reductions_are_not_waited_for, pointed_values_are_lost,
        forwards_leave_windows_open, lists_are_not_joined, errors_are_not_put_aside,
        states_are_not_loaded, added_groups_are_not_stepped, sleeping_values_are_not_woken,
    )
}  # fmt: skip
