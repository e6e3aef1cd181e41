"""Tensors that autograd saves: one that lies in a unit's buffer is gathered again when backward unpacks it.

Note [Backward that builds a graph outside of a scope]
    No hooks for saved tensors are on when such a backward begins. ``_unpack`` puts them on for the node that asked for
    a weight: each tensor that the node saves of it is gathered again, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_zero.engine.buffers.buffer import FlatBuffer
from lightning_zero.engine.runtime.call_stack import in_backward, may_keep_handles
from lightning_zero.engine.runtime.passes import Passes
from lightning_zero.engine.runtime.uses import UnitUses
from lightning_zero.engine.units.unit import Unit

__all__ = ["SavedTensors"]


class _Kept(NamedTuple):
    """A tensor that autograd saved, without its graph, which would hold itself through it; and its version then."""

    tensor: torch.Tensor
    version: int


class _KeptWeight:
    """One that lies in the buffer of a unit, whose storage may be given back under it."""

    __slots__ = ("_held", "buffer", "tensor", "unit", "version")

    def __init__(self, tensor: torch.Tensor, version: int, unit: Unit, buffer: FlatBuffer) -> None:
        self.tensor = tensor
        self.version = version
        self.unit = unit
        self.buffer = buffer
        self._held = buffer.whole.handles
        self._held.append(None)

    def __del__(self) -> None:
        self._held.pop()


class _Outer(NamedTuple):
    """A tensor that hooks around the scope packed."""

    packed: Any
    unpack: Callable[[Any], torch.Tensor]


class SavedTensors:
    """Hooks for the tensors that autograd saves.

    Args:
        units: All units.
        passes: Of the scope that is open.
        uses: Gathers units.
    """

    def __init__(self, units: Sequence[Unit], passes: Passes, uses: UnitUses) -> None:
        self._passes = passes
        self._uses = uses
        self._by_storage = {
            buffer.whole.flat.untyped_storage()._cdata: (unit, buffer)
            for unit in units
            if unit.is_sharded_between_uses
            for buffer in unit.buffers
        }
        for _, buffer in [*self._by_storage.values()]:
            buffer.whole.moved = functools.partial(_rename, self._by_storage)
        self._net: AbstractContextManager[Any] | None = None  # the hooks, while a scope is open
        self._outer_hooks: Any = None  # those around the scope, e.g. of a checkpoint

    def begin(self) -> None:
        """Put the hooks on for a scope, if saved tensors may have any."""
        if not may_keep_handles():
            return
        self._look_for_outer_hooks()
        self._net = saved_tensors_hooks(self._pack, self._unpack)
        self._net.__enter__()

    def end(self) -> None:
        """Take the hooks off."""
        if self._net is not None:
            self._net.__exit__(None, None, None)
            self._net = None

    @contextmanager
    def keeping_graphs(self) -> Iterator[None]:
        """Let graphs keep the values that parameters show now: their ``data`` is going to be another."""
        if not (torch.is_grad_enabled() and may_keep_handles()):
            yield
            return
        if not self._passes.in_scope:
            self._look_for_outer_hooks()
        with saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _look_for_outer_hooks(self) -> None:
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if outer is None or outer[0] != self._pack:
            self._outer_hooks = outer

    def _pack(self, tensor: torch.Tensor) -> Any:
        has_storage = tensor.layout is torch.strided and not is_functorch_wrapped_tensor(tensor)
        place = self._by_storage.get(tensor.untyped_storage()._cdata) if has_storage else None
        if place is not None:
            return _KeptWeight(tensor.detach(), tensor._version, *place)
        if self._outer_hooks is not None:
            pack, unpack = self._outer_hooks
            return _Outer(pack(tensor), unpack)
        return _Kept(tensor.detach(), tensor._version)

    def _unpack(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, _Outer):
            return saved.unpack(saved.packed)
        kept: _Kept | _KeptWeight = saved
        tensor = kept.tensor
        if isinstance(kept, _KeptWeight):
            if kept.unit.holds and kept.unit.is_whole:
                kept.unit.join()
            else:
                self._uses.make_whole_in_backward(kept.unit)
            kept.buffer.fill_computed()
        if torch.is_grad_enabled():
            self._keep_next_graph()
        if tensor._version != kept.version:  # autograd leaves the check to the hook that packs
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation:"
                f" [{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version"
                f" {kept.version} instead. Change a copy of it, or write to it before anything uses it; step an"
                " optimizer after the backward of every loss that its parameters are in. With"
                " `Trainer(detect_anomaly=True)` the error shows the operation that needed it."
            )
        return tensor

    def _keep_next_graph(self) -> None:
        """Let the graph that a backward outside of a scope builds keep handles; autograd ends it with the node."""
        if self._passes.in_scope or not in_backward():
            return
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
            self._outer_hooks = None
            torch._C._autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)


def _rename(places: dict[int, Any], old: int, new: int) -> None:
    places[new] = places.pop(old)
