"""The places of modules and parameters in a module: an engine is kept for the next run if they are those it sharded.

Many programs make a loss with weights anew in every `setup`: modules that have buffers only do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn
from torchmetrics import Metric

__all__ = ["Places", "buffer_places_of", "convert_buffers", "places_of"]

Places = list[tuple[str, int]]


def places_of(module: nn.Module) -> Places:
    """Return the names and identities of parameters, and of modules that have parameters; aliases too.

    Metrics count by their parameters alone: many programs make them anew in `setup`, and the strategy moves them. The
    engine keeps the modules that it has sharded, so no other one gets the identity of one of them.
    """
    return [(name, id(child)) for name, child in _modules_of(module) if _has_params(child)] + [
        (name, id(param)) for name, param in module.named_parameters(remove_duplicate=False)
    ]


def buffer_places_of(module: nn.Module) -> Places:
    """Return the names and identities of the modules that have buffers and no parameters; aliases too."""
    return [(name, id(child)) for name, child in _modules_of(module) if _has_buffers(child) and not _has_params(child)]


def convert_buffers(module: nn.Module, convert: Callable[[nn.Module], object]) -> None:
    """Convert a module's buffers as the precision plugin does, and leave its parameters alone; metrics left out.

    Args:
        module: The module.
        convert: Converts the tensors of a module in place.
    """
    for _, child in _modules_of(module):
        holder = nn.Module()
        holder._buffers.update(child._buffers)
        convert(holder)
        child._buffers.update(holder._buffers)


def _modules_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    children = module.named_modules(remove_duplicate=False)
    return ((name, child) for name, child in children if not isinstance(child, Metric))


def _has_params(module: nn.Module) -> bool:
    return any(param is not None for _, child in _modules_of(module) for param in child._parameters.values())


def _has_buffers(module: nn.Module) -> bool:
    return any(buffer is not None for _, child in _modules_of(module) for buffer in child._buffers.values())
