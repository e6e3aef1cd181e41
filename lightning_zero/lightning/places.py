"""The places of modules and parameters in a module: an engine is kept for the next run if they are those it sharded.

Many programs make a loss with weights anew in every `setup`: modules that have buffers only do not count.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torchmetrics import Metric

from lightning_zero.engine.buffers.parameter import ReleasedParameter, has_class, owner_of

__all__ = ["Places", "buffer_places_of", "convert_buffers", "modules_of", "places_of", "refuse_orphans"]

Places = list[tuple[str, int]]


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
        RuntimeError: The Trainer of an earlier run, which had it, was dropped.
    """
    for name, param in module.named_parameters():
        if has_class(param, ReleasedParameter) and owner_of(param) is None:
            raise RuntimeError(
                f"`{name}` was sharded by the strategy of an earlier Trainer, which the program has dropped with the"
                " values of other ranks. Keep that Trainer (`first = Trainer(...)`) until the next run of the module"
                " has begun, or load a checkpoint into a new module."
            )


def _has_params(module: nn.Module) -> bool:
    return any(param is not None for child in modules_of(module).values() for param in child._parameters.values())


def _has_buffers(module: nn.Module) -> bool:
    return any(buffer is not None for child in modules_of(module).values() for buffer in child._buffers.values())
