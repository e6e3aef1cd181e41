"""Attributes of modules with a place that code around the blocks changes, put back behind runs that do not count.

Note [Runs that do not count]
    The description of a step, and the survey before it on the last stage, run code around the blocks once more. Modules
    around the blocks are put back whole. A model has many more modules in its blocks, of which that code seldom changes
    anything: their values are compared by identity, which costs microseconds for each module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_zero.parallel.pipeline.stages.attributes import CONSTANT, MISSING, are_same, assign
from lightning_zero.parallel.pipeline.stages.split import Split

__all__ = ["PlacedAttributes"]


class PlacedAttributes:
    """Attributes of the modules with a place.

    Args:
        module: The root.
        split: The chunk of every module.
    """

    def __init__(self, module: nn.Module, split: Split) -> None:
        found = {id(child): child for place in split.places for child in module.get_submodule(place.name).modules()}
        self._spaces = [space for child in found.values() for space in (vars(child), child._buffers)]

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Run something that leaves no trace in these attributes."""
        before = [(space, list(space), list(space.values())) for space in self._spaces]
        try:
            yield
        finally:
            for space, names, values in before:
                if not are_same(space, names, values):
                    _rebind(space, dict(zip(names, values, strict=True)))


def _rebind(space: dict[str, Any], before: dict[str, Any]) -> None:
    """Bind values as they were, but for modules."""
    changed = [key for key in before.keys() | space.keys() if before.get(key, MISSING) is not space.get(key, MISSING)]
    for key in changed:
        old, new = before.get(key, MISSING), space.get(key, MISSING)
        if key not in CONSTANT and not any(isinstance(value, nn.Module) for value in (old, new)):
            assign(space, key, old)
