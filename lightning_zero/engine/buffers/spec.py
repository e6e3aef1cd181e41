"""The facts of a flat buffer that never change, for its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lightning_zero.boxes import Part
from lightning_zero.comm.communicator import Communicator
from lightning_zero.engine.buffers.group import BufferGroup
from lightning_zero.engine.buffers.own_range import OwnRange
from lightning_zero.grid import ParamAxes
from lightning_zero.layout import FlatLayout
from lightning_zero.sharding import ShardedOver, ShardingScope
from lightning_zero.storage.store import DeviceStore

__all__ = ["BufferKind", "BufferSpec"]


@dataclass(frozen=True)
class BufferKind:
    """The dtypes and properties that all parameters of one flat buffer share.

    ``shared`` is the name of a parameter that several parts of the model hold; it has a buffer to itself, so that the
    buffer is the same in all of them. ``group`` is the name of a group of the grid; None: all ranks.
    """

    original: torch.dtype
    compute: torch.dtype
    master: torch.dtype
    reduce: torch.dtype
    trained: bool
    shared: str | None = None
    group: str | None = None

    @property
    def is_rounded(self) -> bool:
        """Whether parameters compute in fewer bits than their own."""
        return self.original.itemsize > self.compute.itemsize

    @property
    def shown(self) -> torch.dtype:
        """The dtype in which values are read, saved and exported: that of the master, if they have or may have one."""
        return self.master if self.trained or self.is_rounded else self.compute


@dataclass(frozen=True, eq=False)
class BufferSpec:
    """The facts of one flat buffer.

    Attributes:
        name: Of the unit, for errors.
        params: The parameters.
        kind: The dtypes.
        sharding: The scopes in which tensors are kept sharded.
        group: The ranks over which it is cut.
        axes: The parameters on the grid, by slot; those that are not named have the factor 1 and are whole.
        store: Memory of the device.
        layout: Slots, shards and segments.
        own_range: The range that this rank steps.
        shard_range: Elements ``[start, stop)`` of this rank's shard.
        node_range: Those of its range in a node with several nodes, which the shard is a piece of; else the shard's.
    """

    name: str
    params: list[nn.Parameter]
    kind: BufferKind
    sharding: ShardedOver
    group: BufferGroup
    axes: Mapping[int, ParamAxes]
    store: DeviceStore
    layout: FlatLayout
    own_range: OwnRange
    shard_range: slice
    node_range: slice

    @property
    def communicator(self) -> Communicator:
        """Moves shards."""
        return self.group.communicator

    def factor(self, index: int) -> float:
        """Return the factor of a parameter's gradients."""
        return self.axes[index].factor if index in self.axes else 1.0

    def part(self, index: int) -> Part | None:
        """Return the part of a parameter that this rank has; None: all of it."""
        return self.axes[index].part if index in self.axes else None

    @property
    def params_range(self) -> slice:
        """The elements of the compute shard that is kept between uses."""
        return self.node_range if self.sharding.params is ShardingScope.NODE else self.shard_range

    @property
    def has_parts(self) -> bool:
        """Whether other groups of ranks have other parts of the parameters."""
        return any(axes.part is not None for axes in self.axes.values())

    @staticmethod
    def of(
        name: str,
        params: Sequence[nn.Parameter],
        names: Sequence[str],
        *,
        kind: BufferKind,
        sharding: ShardedOver,
        group: BufferGroup,
        store: DeviceStore,
        axes: Mapping[str, ParamAxes] | None = None,
    ) -> BufferSpec:
        """Return the facts of the buffer with these parameters, whose fully qualified names are ``names``."""
        communicator = group.communicator
        known = {index: axes[key] for index, key in enumerate(names) if axes is not None and key in axes}
        shapes = [(key, tuple(param.shape)) for key, param in zip(names, params, strict=True)]
        layout = FlatLayout.build(shapes, communicator.world_size)
        own_range = OwnRange(layout, group.place, is_sharded=bool(sharding.optim))
        shard_range = slice(*layout.shard_range(group.place))
        return BufferSpec(
            name=name,
            params=list(params),
            kind=kind,
            sharding=sharding,
            group=group,
            axes=known,
            store=store,
            layout=layout,
            own_range=own_range,
            shard_range=shard_range,
            node_range=group.node_range(layout.padded_numel),
        )
