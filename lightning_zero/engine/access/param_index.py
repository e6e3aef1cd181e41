"""Each parameter's flat buffer and slot, its unit and its names."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from lightning_zero.boxes import Part
from lightning_zero.engine.buffers.buffer import FlatBuffer
from lightning_zero.engine.optim.flat_step import BufferSlot
from lightning_zero.engine.units.partition import Territory
from lightning_zero.engine.units.remote_params import RemoteParams
from lightning_zero.engine.units.unit import Unit

__all__ = ["ParamIndex"]


class ParamIndex:
    """Knows every parameter of one module, by identity.

    Attributes:
        by_id: Where each parameter that lies here does, by ``id``, in the order of the units.
        names: All fully qualified names of every parameter, the first one first, by ``id``.
        units: The units, the root's first.
        remote_params: The parameters of other parts of the model; None if it is whole.
    """

    def __init__(self) -> None:
        self.by_id: dict[int, BufferSlot] = {}
        self.names: dict[int, tuple[str, ...]] = {}
        self.units: list[Unit] = []
        self.remote_params: RemoteParams | None = None
        self._unit_of: dict[int, Unit] = {}  # by buffer

    def add(self, unit: Unit, territory: Territory) -> None:
        """Take note of a unit that was made of a territory."""
        self.units.append(unit)
        aliases = {id(param): tuple(names) for param, names in zip(territory.params, territory.names, strict=True)}
        for buffer in unit.buffers:
            self._unit_of[id(buffer)] = unit
            for index, param in enumerate(buffer.params):
                self.by_id[id(param)] = buffer, index
                self.names[id(param)] = aliases[id(param)]

    @property
    def buffers(self) -> list[FlatBuffer]:
        """The buffers of all units."""
        return [buffer for unit in self.units for buffer in unit.buffers]

    def of(self, param: torch.Tensor) -> BufferSlot:
        """Return where a parameter lies.

        Raises:
            ValueError: It is not here.
        """
        place = self.by_id.get(id(param))
        if place is None:
            raise ValueError(f"A tensor of shape {tuple(param.shape)} is not a parameter of the sharded module.")
        return place

    def name(self, param: nn.Parameter) -> str:
        """Return the first fully qualified name of a parameter."""
        return self.names[id(param)][0]

    def is_remote(self, param: torch.Tensor) -> bool:
        """Say whether another part of the model holds a parameter."""
        return self.remote_params is not None and param in self.remote_params

    def part(self, param: nn.Parameter) -> Part | None:
        """Return the part of a parameter that this rank has, or would have where it is held; None: all of it."""
        if self.remote_params is not None and param in self.remote_params:
            return self.remote_params.part(param)
        buffer, index = self.of(param)
        return buffer.part(index)

    def __contains__(self, param: torch.Tensor) -> bool:
        return id(param) in self.by_id or self.is_remote(param)

    def unit_of(self, buffer: FlatBuffer) -> Unit:
        """Return the unit of a buffer."""
        return self._unit_of[id(buffer)]

    def units_of(self, params: Iterable[torch.Tensor]) -> list[Unit]:
        """Return the units that hold one of some tensors, in their order."""
        holders = {id(self.by_id[id(param)][0]) for param in params if id(param) in self.by_id}
        return [unit for unit in self.units if any(id(buffer) in holders for buffer in unit.buffers)]
