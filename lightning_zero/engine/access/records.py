"""Parameters as checkpoints see them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zero.boxes import Part
from lightning_zero.engine.access.param_index import ParamIndex
from lightning_zero.engine.buffers.buffer import FlatBuffer
from lightning_zero.engine.buffers.sharded_gradient import ShardedGradient
from lightning_zero.engine.optim.flat_step import BufferSlot
from lightning_zero.engine.optim.moments import MomentFormat
from lightning_zero.engine.units.pipeline_peers import PipelinePeers
from lightning_zero.engine.units.remote_params import RemoteParams

__all__ = ["ParameterRecord", "records_of"]


@dataclass(frozen=True)
class ParameterRecord:
    """One parameter as checkpoints see it.

    Attributes:
        name: First fully qualified name.
        aliases: All names of a tied parameter, ``name`` first.
        shape: Shape of the whole parameter.
        part: The part of it that this rank and others of its group have, on a grid; None: all of it. The ranges count
            elements of the flattened part.
        parameter: The user's object.
        trained: Whether an optimizer steps it.
        dtype: The dtype in which the user gave it; it may compute and be stepped in others.
        save_range: Elements of the flattened parameter that this rank should write. The ranges of all ranks tile the
            parameter exactly once, at every stage and on every grid.
        own_range: Elements whose master and optimizer state this rank holds; all of them at stage 0. Both ranges are
            empty where another part of the model holds the parameter.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    parameter: nn.Parameter
    trained: bool
    dtype: torch.dtype
    save_range: tuple[int, int]
    own_range: tuple[int, int]
    _buffer: FlatBuffer | torch.Tensor = field(repr=False)  # of a remote parameter: an empty master
    _index: int = field(repr=False)
    _moments: MomentFormat = field(repr=False)
    part: Part | None = None

    @property
    def shape_here(self) -> tuple[int, ...]:
        """Shape of the part that this rank has."""
        return self.shape if self.part is None else tuple(self.parameter.shape)

    @property
    def is_sharded(self) -> bool:
        """Whether states are 1-D segments, also where this rank holds everything; at stage 0 they are whole."""
        return isinstance(self._buffer, torch.Tensor) or self._buffer.own_range.is_shard

    @property
    def keeps_whole_states(self) -> bool:
        """Whether states may have any shape: at stage 0, and where another part of the model holds the parameter."""
        return isinstance(self._buffer, torch.Tensor) or not self.is_sharded

    def master(self) -> torch.Tensor:
        """Return the values that are stepped: 1-D over ``own_range``, live. ``publish`` after writing into it."""
        if isinstance(self._buffer, torch.Tensor):
            return self._buffer
        return self._buffer.values.segment(self._index).reshape(-1)

    @property
    def shown_dtype(self) -> torch.dtype:
        """The dtype in which values are saved; frozen ones whose 16 bits say everything have no master in it."""
        if isinstance(self._buffer, torch.Tensor) or self._buffer.values.master is not None:
            return self.master().dtype
        return self._buffer.kind.shown

    def rounds(self, dtype: torch.dtype) -> bool:
        """Say whether values of a dtype are rounded by a load: the master in which they are kept is not there."""
        here = self.master().dtype.itemsize
        return dtype.itemsize > here < self.shown_dtype.itemsize

    def state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer state: 1-D segments over ``own_range`` (whole tensors at stage 0).

        Live, except for moments that are kept in other dtypes than the master's: those are copies in its dtype.
        """
        state = optimizer.state.get(self.parameter, {})
        if any(isinstance(one, ShardedGradient) for one in state.values()):  # made of the step window's segments
            state = {key: _plain(one) for key, one in state.items()}
        return self._moments.widened(state, self.master().dtype)


def _plain(value: Any) -> Any:
    return value.as_subclass(torch.Tensor) if isinstance(value, ShardedGradient) else value


def records_of(
    module: nn.Module,
    param_index: ParamIndex,
    trained: Collection[int],
    *,
    parts: PipelinePeers | None,
    moments: MomentFormat,
) -> list[ParameterRecord]:
    """Return one record per parameter, in the order of ``named_parameters``.

    Args:
        module: The sharded module.
        param_index: Where its parameters lie.
        trained: The parameters that an optimizer steps, by ``id``.
        parts: The other parts of the model, if it is cut; a parameter that several of them hold is saved by one.
        moments: The format of the moments of AdamW and Adam.
    """
    records = []
    for param in module.parameters():
        if param_index.remote_params is not None and param in param_index.remote_params:
            records.append(_remote_record(param, param_index.names[id(param)], param_index.remote_params, moments))
            continue
        is_saved = parts is None or parts.is_counted_here(param)
        names, place = param_index.names[id(param)], param_index.of(param)
        records.append(_record_here(place, names, trained=id(param) in trained, is_saved=is_saved, moments=moments))
    return records


def _record_here(
    place: BufferSlot, names: tuple[str, ...], *, trained: bool, is_saved: bool, moments: MomentFormat
) -> ParameterRecord:
    """Return the record of a parameter that lies here; without ``is_saved`` another part saves it."""
    buffer, index = place
    segment = buffer.layout.segment(index, buffer.place) if is_saved else None
    shape, part = buffer.layout.slots[index].shape, buffer.part(index)
    return ParameterRecord(
        name=names[0],
        aliases=names,
        shape=shape if part is None else part.whole,
        parameter=buffer.params[index],
        trained=trained,
        dtype=buffer.kind.original,
        save_range=(0, 0) if segment is None else (segment.start, segment.stop),
        own_range=buffer.own_range.elements(index),
        _buffer=buffer,
        _index=index,
        _moments=moments,
        part=part,
    )


def _remote_record(
    param: nn.Parameter, names: tuple[str, ...], remote_params: RemoteParams, moments: MomentFormat
) -> ParameterRecord:
    """Return the record of a parameter that another part of the model holds, with an empty master."""
    return ParameterRecord(
        name=names[0],
        aliases=names,
        shape=remote_params.whole_shape(param),
        parameter=param,
        trained=False,
        dtype=param.dtype,
        save_range=(0, 0),
        own_range=(0, 0),
        _buffer=remote_params.master(param),
        _index=0,
        _moments=moments,
    )
