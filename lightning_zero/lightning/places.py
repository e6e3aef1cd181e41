"""The engine that a module keeps between runs, and the places of its parts by which it is the right one.

Many programs make a loss with weights anew in every `setup`: modules that have buffers only do not count.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torchmetrics import Metric

from lightning_zero.engine.buffers.parameter import ReleasedParameter, has_class, owner_of
from lightning_zero.engine.engine import ZeroEngine

__all__ = [
    "Places",
    "buffer_places_of",
    "convert_buffers",
    "keep_engine",
    "let_engines_go",
    "modules_of",
    "places_of",
    "refuse_orphans",
]

Places = list[tuple[str, int]]

_KEY = "_zero_engine"


class _KeptEngine:
    """An engine that a module keeps; copies and files of the module have None."""

    __slots__ = ("engine",)

    def __init__(self, engine: ZeroEngine) -> None:
        self.engine = engine

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def keep_engine(module: nn.Module, engine: ZeroEngine) -> None:
    """Let a module keep its engine until its next run or ``close``, also where the Trainer is gone by then."""
    vars(module)[_KEY] = _KeptEngine(engine)
    engine.internals.fits.when_closed(partial(vars(module).pop, _KEY, None))


def let_engines_go(module: nn.Module) -> None:
    """Let a module, and the modules in it, keep no engine: that of the run that begins is the Trainer's."""
    kept = [child for child in module.modules() if vars(child).pop(_KEY, None) is not None]
    if any(child is not module for child in kept):
        gc.collect()  # engines are in reference cycles, and hold device memory until then


def places_of(module: nn.Module) -> Places:
    """Return the names and identities of parameters, and of modules that have parameters; aliases too.

    Metrics count by their parameters alone: many programs make them anew in `setup`, and the strategy moves them. The
    engine keeps the modules that it has sharded, so no other one gets the identity of one of them.
    """
    return [(name, id(child)) for name, child in modules_of(module).items() if _has_params(child)] + [
        (name, id(param)) for name, param in module.named_parameters(remove_duplicate=False)
    ]


def buffer_places_of(module: nn.Module) -> Places:
    """Return the names and identities of the modules that have buffers and no parameters; aliases too."""
    children = modules_of(module).items()
    return [(name, id(child)) for name, child in children if _has_buffers(child) and not _has_params(child)]


def convert_buffers(module: nn.Module, convert: Callable[[nn.Module], object]) -> None:
    """Convert a module's buffers as the precision plugin does, and leave its parameters alone; metrics left out.

    Args:
        module: The module.
        convert: Converts the tensors of a module in place.
    """
    for child in modules_of(module).values():
        holder = nn.Module()
        holder._buffers.update(child._buffers)
        convert(holder)
        child._buffers.update(holder._buffers)


def modules_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules by name, aliases too; metrics left out."""
    children = module.named_modules(remove_duplicate=False)
    return {name: child for name, child in children if not isinstance(child, Metric)}


def refuse_orphans(module: nn.Module) -> None:
    """Refuse a module with parameters of an engine that is gone.

    Raises:
        RuntimeError: A parameter has no values any more.
    """
    for name, param in module.named_parameters():
        if has_class(param, ReleasedParameter) and owner_of(param) is None:
            raise RuntimeError(
                f"`{name}` was sharded by the strategy of an earlier Trainer, and its values are gone with the engine,"
                " which the module had kept. Load a checkpoint into a new module."
            )


def _has_params(module: nn.Module) -> bool:
    return any(param is not None for child in modules_of(module).values() for param in child._parameters.values())


def _has_buffers(module: nn.Module) -> bool:
    return any(buffer is not None for child in modules_of(module).values() for buffer in child._buffers.values())
