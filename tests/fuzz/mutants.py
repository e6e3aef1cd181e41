"""Engines that are broken on purpose: the fuzzer must find each of them.

Each mutant is a context manager that patches the engine inside a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from lightning_zero.comm import communicator
from lightning_zero.engine import optimizer
from lightning_zero.engine.buffer import FlatBuffer
from lightning_zero.engine.deferred import Update
from lightning_zero.engine.gradients import BufferGradients
from lightning_zero.engine.module_buffers import ModuleBuffers
from lightning_zero.engine.own_range import OwnRange
from lightning_zero.engine.unit import Unit
from lightning_zero.engine.whole import Whole

__all__ = ["MUTANTS"]


@contextmanager
def gradients_are_summed() -> Iterator[None]:
    """The average is not divided by the number of ranks."""
    average = communicator._average_in_rank_order

    def summed(out: Any, chunks: Any) -> None:
        average(out, chunks)
        out.mul_(len(chunks))

    with mock.patch.object(communicator, "_average_in_rank_order", summed):
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

    def all_of_them(self: BufferGradients, indices: Any) -> None:
        agreed(self, list(indices) and range(len(self._buffer.params)))

    with mock.patch.object(BufferGradients, "agreed", all_of_them):
        yield


@contextmanager
def the_last_microbatch_counts() -> Iterator[None]:
    """Micro-batches are not added up."""
    accumulate = BufferGradients.accumulate

    def last_only(self: BufferGradients, index: int, grad: Any) -> None:
        self._summed.discard(index)
        accumulate(self, index, grad)

    with mock.patch.object(BufferGradients, "accumulate", last_only):
        yield


@contextmanager
def an_earlier_average_is_lost() -> Iterator[None]:
    """A backward replaces the gradients of the one before."""
    reduce = BufferGradients.reduce

    def anew(self: BufferGradients) -> Any:
        self._retained = None
        if self._buffer.sharding.grads:
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
    accept = Whole._accept
    with mock.patch.object(
        Whole, "_accept", lambda self, units, write: accept(self, units, "all" if write == "rank0" else write)
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
    norm = optimizer.norm_of_norms
    with mock.patch.object(optimizer, "norm_of_norms", lambda norms, order, _: norm(norms, order, None)):
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
    from lightning_zero.engine.reduction import Reducer

    settle = Reducer._settle

    def alone(self: Reducer) -> None:
        with mock.patch.object(communicator.Communicator, "agree", lambda _, values, *__, **___: values):
            settle(self)

    with mock.patch.object(Reducer, "_settle", alone):
        yield


MUTANTS: dict[str, Callable[[], Any]] = {
    mutant.__name__: mutant
    for mutant in (
        gradients_are_summed, a_dropped_gradient_stays, unused_counts_as_zero,
        the_last_microbatch_counts, an_earlier_average_is_lost, zero_grad_drops_always, module_buffers_stay,
        segments_are_one_off, writes_are_lost, every_rank_writes, steps_are_not_published, norms_are_local, units_stay,
        deferred_steps_are_lost, used_on_rank_0_only_counts,
    )
}  # fmt: skip
