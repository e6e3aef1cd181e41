"""Modules that are no unit but have parameters below them: their forwards may be called on their own.

Such a forward uses parameters of the unit around the module, and calls the forwards of the units below it. Called
outside of a step it opens a scope, as a unit's forward does; inside a step its hooks return at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_zero.blocks import hookable_modules
from lightning_zero.engine.units.unit import Unit

__all__ = ["Submodule", "submodules_of", "units_below"]


@dataclass(frozen=True, eq=False)
class Submodule:
    """A module that is no unit.

    Args:
        name: Fully qualified.
        units: Those that hold a parameter below the module.
        around: Those of them whose module is not below it, so that no forward below it gathers them.
    """

    name: str
    units: tuple[Unit, ...]
    around: tuple[Unit, ...]


def submodules_of(root: nn.Module, units: Sequence[Unit]) -> Iterator[tuple[nn.Module, Submodule]]:
    """Yield the modules that are no unit and have parameters below them."""
    holders = _holders(units)
    seen = {id(root), *(id(unit.module) for unit in units)}
    for name, module in hookable_modules(root):
        if id(module) in seen:
            continue
        seen.add(id(module))
        below = {id(child) for child in module.modules()}
        found = _units_of(module, holders)
        if found:
            around = tuple(unit for unit in found if id(unit.module) not in below)
            yield module, Submodule(name, found, around)


def units_below(units: Sequence[Unit]) -> dict[int, tuple[Unit, ...]]:
    """Return, by index of a unit, the units that hold a parameter below its module."""
    holders = _holders(units)
    return {unit.index: _units_of(unit.module, holders) for unit in units}


def _holders(units: Sequence[Unit]) -> dict[int, Unit]:
    return {id(param): unit for unit in units for buffer in unit.buffers for param in buffer.params}


def _units_of(module: nn.Module, holders: dict[int, Unit]) -> tuple[Unit, ...]:
    found = {unit.index: unit for param in module.parameters() if (unit := holders.get(id(param))) is not None}
    return tuple(found[index] for index in sorted(found))
