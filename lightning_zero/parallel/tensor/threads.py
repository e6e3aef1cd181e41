"""Ranks that are threads of one process: a plan is verified with them, without process groups and devices.

Every thread runs its own forward and backward on the CPU, where a backward runs in the thread that calls it. So the
functions of ``collectives.py`` run as they do in training, and a rank that misses a collective is found.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["RanksDisagree", "ThreadRanks", "run_threads"]

T = TypeVar("T")


class RanksDisagree(RuntimeError):
    """Ranks called different collectives, or a rank called none where another waited."""


class _Left(RanksDisagree):
    """A rank waited for one that has ended, by an error of its own or because it was done."""


class _Meeting:
    """The place where the threads exchange tensors."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._changed = threading.Condition()
        self._slots: list[Any] = [None] * size
        self._results: list[Any] = []  # of the last exchange; the next one needs all threads
        self._arrived = 0
        self._round = 0
        self._has_left = False  # whether a thread has ended

    def exchange(self, rank: int, call: str, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks."""
        with self._changed:
            number = self._round
            self._slots[rank] = call, tensor.detach()
            self._arrived += 1
            if self._arrived == self._size:
                self._results, self._arrived, self._round = list(self._slots), 0, number + 1
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._round != number or self._has_left)
            if self._round == number:
                raise _Left(f"a rank waits in `{call}` for a rank that does not call it")
            results = self._results
        calls = {(call, tuple(tensor.shape), tensor.dtype) for call, tensor in results}
        if len(calls) > 1:
            shown = sorted(f"`{call}` of shape {shape}" for call, shape, _ in calls)
            raise RanksDisagree(f"ranks disagree on a collective: {', '.join(shown)}")
        return [tensor for _, tensor in results]

    def leave(self) -> None:
        """End a thread: nobody may wait for it."""
        with self._changed:
            self._has_left = True
            self._changed.notify_all()


class ThreadRanks:
    """One rank of ``run_threads``."""

    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        self.rank = rank
        self.size = size
        self.on_indices: Callable[[Tensor], None] | None = None
        self.end_region: Callable[[], None] | None = None
        self.runs_all_blocks = True
        self._meeting = meeting

    @classmethod
    def group(cls, size: int) -> list[ThreadRanks]:
        """Return the ranks of a new group, for one call of ``run_threads``."""
        meeting = _Meeting(size)
        return [cls(rank, size, meeting) for rank in range(size)]

    def __deepcopy__(self, memo: Any) -> ThreadRanks:
        return self

    def leave(self) -> None:
        """End the rank: the others may not wait for it."""
        self._meeting.leave()

    def all_reduce(self, tensor: Tensor, *, maximum: bool = False) -> Tensor:
        """Return the sum, or the maximum, over the ranks in a new tensor."""
        tensors = self._meeting.exchange(self.rank, "maximum" if maximum else "all_reduce", tensor)
        result = tensors[0].clone()
        for one in tensors[1:]:
            result = torch.maximum(result, one) if maximum else result + one
        return result

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, in rank order."""
        return self._meeting.exchange(self.rank, "all_gather", tensor)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's shard, along ``dim``, of the sum over the ranks."""
        tensors = self._meeting.exchange(self.rank, f"reduce_scatter along {dim}", tensor)
        total = tensors[0].clone()
        for one in tensors[1:]:
            total = total + one
        return total.chunk(self.size, dim)[self.rank].clone()


def run_threads(ranks: Sequence[ThreadRanks], function: Callable[[ThreadRanks], T]) -> list[T]:
    """Call ``function`` for every rank in a thread of its own, and return the results in rank order.

    Raises:
        RanksDisagree: A rank waited for a collective that another rank did not call.
        Exception: The error of the first rank that raised one.
    """
    results: list[Any] = [None] * len(ranks)
    errors: list[BaseException | None] = [None] * len(ranks)
    grad_enabled = torch.is_grad_enabled()  # a property of a thread

    def work(one: ThreadRanks) -> None:
        try:
            with torch.set_grad_enabled(grad_enabled):
                results[one.rank] = function(one)
        except BaseException as error:
            errors[one.rank] = error
        finally:
            one.leave()

    threads = [threading.Thread(target=work, args=(one,), daemon=True) for one in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [error for error in errors if error is not None]
    if found:
        raise next((error for error in found if not isinstance(error, _Left)), found[0])
    return results
