"""A flat buffer's tensors on disks: its master, its optimizer states, its reduced gradients (ADR 0025).

Note [Reading each tensor once a step]
    A gradient goes down when it is reduced, and its norm is taken on the way, so that clipping reads nothing. A step
    reads master, states and gradient of one buffer while those of the buffer before are stepped, and writes masters
    and states while those of the next one are. Writes into parameters from outside are taken over in the same
    visit. Everybody else who uses one of these tensors wakes it, after the step that is due.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Protocol

import torch
from torch import nn

from lightning_zero.engine.buffers.own_range import OwnRange, merge_written
from lightning_zero.engine.buffers.sharded_gradient import norm_in_double
from lightning_zero.storage.disk import DiskStore, Visit
from lightning_zero.storage.sleeping import is_asleep, ordinary

__all__ = ["BufferSleep", "Sleeping"]


class Sleeping(Protocol):
    """The parts of a flat buffer that its state on disks uses; see ``lightning_zero/engine/buffers/buffer.py``."""

    name: str
    params: list[nn.Parameter]
    own_range: OwnRange
    master: torch.Tensor | None

    @property
    def entered(self) -> Set[int]:
        """The slots whose parameters show the master."""
        ...

    @property
    def raw_computed(self) -> torch.Tensor:
        """The own range in the compute dtype, whether or not a step is due."""
        ...

    def flush(self) -> bool:
        """Make the step that was asked for."""
        ...

    def round_in_place(self) -> None:
        """Cast the in-memory master into the compute shard unless the step already did."""
        ...


class BufferSleep:
    """The tensors of one buffer on disks.

    Args:
        buffer: The buffer, whose values are filled in.
        store: Their store on disks.
    """

    def __init__(self, buffer: Sleeping, store: DiskStore) -> None:
        self._buffer = buffer
        self._store = store
        self._gradient: torch.Tensor | None = None  # from the first one
        self._norm: tuple[int, torch.Tensor] | None = None  # of the gradient, with its version
        self._to_merge: set[int] = set()  # slots whose parameters may have been written from outside

    def watch_master(self) -> None:
        """Let anybody use the master: the step that is due comes first, then writes from outside."""
        assert self._buffer.master is not None
        self._store.watch(self._buffer.master, self._buffer.flush, self._merge_if_due)

    def zeros(self, dtype: torch.dtype) -> torch.Tensor:
        """Return a state of the optimizer over the own range: (own range,)."""
        buffer = self._buffer
        numel = buffer.own_range.numel
        face = self._store.create("optimizer", numel, dtype, f"optimizer states of unit `{buffer.name}`")
        self._store.watch(face, buffer.flush)
        return face

    def give_back(self, state: torch.Tensor) -> None:
        """Give the room of a state back."""
        self._store.give_back("optimizer", state)

    def is_zero(self, state: torch.Tensor) -> bool:
        """Say whether a state is zero because nobody has written it."""
        return self._store.is_blank(state)

    # -- Gradients -------------------------------------------------------------------------------------------------

    def keep_gradient(self, values: torch.Tensor) -> torch.Tensor:
        """Write reduced gradients over earlier ones on disk, keep their norm, and return the tensor on disk."""
        buffer = self._buffer
        if self._gradient is None:
            name = f"gradients of unit `{buffer.name}`"
            self._gradient = self._store.create("gradients", values.numel(), values.dtype, name)
            self._store.watch(self._gradient, buffer.flush)
        buffer.flush()  # it reads the gradient before
        norm = norm_in_double(values)
        self._store.put(self._gradient, values)
        self._norm = self._store.version(self._gradient), norm
        return self._gradient

    def norm(self, order: float) -> torch.Tensor | None:
        """Return the norm of the gradient on disk, if it is known: () float64."""
        if order != 2.0 or self._norm is None or self._gradient is None:
            return None
        version, norm = self._norm
        return norm if version == self._store.version(self._gradient) else None

    # -- Steps -----------------------------------------------------------------------------------------------------

    def note_writes(self, but_for: Set[int] = frozenset()) -> None:
        """Note that parameters may have been written from outside; the master takes that over when it is read.

        By then a step window may be open, in which they show the master itself.
        """
        self._to_merge.update(set(range(len(self._buffer.params))) - self._buffer.entered - but_for)

    def _merge_if_due(self) -> bool:
        slots, self._to_merge = self._to_merge, set()
        return bool(slots) and self._merge(self._buffer.raw_computed.clone(), slots)

    def _merge(self, values: torch.Tensor, slots: Set[int]) -> bool:
        """Take over values of some slots that are not the rounded master's; say whether there were any."""
        buffer = self._buffer
        assert buffer.master is not None
        master = ordinary(buffer.master)
        others = set(range(len(buffer.params))) - slots
        return bool(merge_written(master, values.to(master.device), buffer.own_range, others))

    def plan_step(
        self,
        calls: Sequence[Callable[[], None]],
        states: Sequence[torch.Tensor],
        gradient: torch.Tensor | None,
        *,
        rounds: bool,
    ) -> tuple[Visit, list[Callable[[], None]]]:
        """Return the visit that brings a step's tensors into memory, and the calls to make when they are there.

        Args:
            calls: The calls that make the step, on ordinary tensors over the memory of the sleeping ones.
            states: The optimizer's, over the own range.
            gradient: The reduced gradient, asleep or not.
            rounds: Write the parameters in the dtype in which they compute too.
        """
        buffer = self._buffer
        computed = buffer.raw_computed
        stepped = [buffer.master] if buffer.master is not None else []
        merged, self._to_merge = self._to_merge if stepped else set(), set()
        shards = [computed] if is_asleep(computed) else []
        is_overwritten = bool(stepped) and rounds and not merged
        visit = Visit(
            self._store,
            read=[gradient] if gradient is not None and is_asleep(gradient) else [],
            changed=[*stepped, *states, *([] if is_overwritten else shards)],
            overwritten=shards if is_overwritten else [],
        )
        planned = list(calls)
        if merged:
            planned.insert(0, lambda: _ignore(self._merge(ordinary(computed), merged)))
        if rounds and stepped:
            planned.append(buffer.round_in_place)
        return visit, planned


def _ignore(value: object) -> None:
    del value
