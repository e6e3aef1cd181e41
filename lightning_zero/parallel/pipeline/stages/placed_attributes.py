"""Attributes of modules with a place that code around the blocks changes, put back behind runs that do not count.

Note [Runs that do not count]
    The description of a step, and the survey before it on the last stage, run code around the blocks once more. Modules
    around the blocks are put back whole. A model has many more modules in its blocks, of which that code seldom changes
    anything: a description looks at all of them, and a survey at those that a description has put back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_zero.parallel.pipeline.stages.attributes import OF_MODULES
from lightning_zero.parallel.pipeline.stages.split import Split

__all__ = ["PlacedAttributes"]

_CONSTANT = OF_MODULES - {"training"}  # attributes of every module, which hold its parts
_MISSING = object()


class PlacedAttributes:
    """Attributes of the modules with a place.

    Args:
        module: The root.
        split: The chunk of every module.
    """

    def __init__(self, module: nn.Module, split: Split) -> None:
        found = {id(child): child for place in split.places for child in module.get_submodule(place.name).modules()}
        self._modules = list(found.values())
        self._written: dict[int, nn.Module] = {}  # of which something was put back

    @contextmanager
    def put_back(self, *, looks_at_all: bool) -> Iterator[None]:
        """Run something that leaves no trace in these attributes.

        Args:
            looks_at_all: False looks at the modules of which something was put back before.
        """
        modules = self._modules if looks_at_all else list(self._written.values())
        before = [(child, space, dict(space)) for child in modules for space in (vars(child), child._buffers)]
        try:
            yield
        finally:
            for child, space, values in before:
                if _rebind(space, values):
                    self._written[id(child)] = child


def _rebind(space: dict[str, Any], before: dict[str, Any]) -> bool:
    """Bind values as they were, but for modules; say whether one was another."""
    changed = [key for key in before.keys() | space.keys() if before.get(key, _MISSING) is not space.get(key, _MISSING)]
    found = False
    for key in changed:
        old, new = before.get(key, _MISSING), space.get(key, _MISSING)
        if key in _CONSTANT or any(isinstance(value, nn.Module) for value in (old, new)):
            continue
        found = True
        if old is _MISSING:
            del space[key]
        else:
            space[key] = old
    return found
