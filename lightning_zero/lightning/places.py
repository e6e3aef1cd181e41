"""The places of modules and parameters in a module: an engine is kept for the next run if they are those it sharded."""

from __future__ import annotations

from torch import nn
from torchmetrics import Metric

__all__ = ["Places", "places_of"]

Places = list[tuple[str, int]]


def places_of(module: nn.Module) -> Places:
    """Return the names and identities of parameters, and of modules that have parameters or buffers; aliases too.

    Metrics count by their parameters alone: many programs make them anew in `setup`, and the strategy moves them. The
    engine keeps the modules that it has sharded, so no other one gets the identity of one of them.
    """
    children = module.named_modules(remove_duplicate=False)
    return [(name, id(child)) for name, child in children if not isinstance(child, Metric) and _has_tensors(child)] + [
        (name, id(param)) for name, param in module.named_parameters(remove_duplicate=False)
    ]


def _has_tensors(module: nn.Module) -> bool:
    own = [child for child in module.modules() if not isinstance(child, Metric)]
    tables = [table for child in own for table in (child._parameters, child._buffers)]
    return any(value is not None for table in tables for value in table.values())
