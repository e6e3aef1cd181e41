"""Facts that must agree on all ranks before they communicate: models, units and optimizers, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_zero.engine.units.partition import Territory

__all__ = ["model_facts", "optimizer_facts", "unit_facts"]


def model_facts(module: nn.Module, holders: Mapping[str, tuple[int, ...]] | None = None) -> dict[str, str]:
    """Return the facts that decide the flat buffers: every name of every parameter, in the order of the module."""
    first: dict[int, str] = {}
    facts = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        is_tied = first.setdefault(id(param), name) != name
        facts[f"parameter `{name}`"] = f"tied to `{first[id(param)]}`" if is_tied else _describe(param)
    if holders is not None:
        facts.update({f"the parts that hold `{name}`": str(parts) for name, parts in holders.items()})
    return facts


def _describe(param: nn.Parameter) -> str:
    shape = "lazy" if is_lazy(param) else str(tuple(param.shape))
    kind = "" if type(param) is nn.Parameter else f" {type(param).__name__}"
    return f"{shape} {str(param.dtype).removeprefix('torch.')}{kind} {'trained' if param.requires_grad else 'frozen'}"


def unit_facts(territories: Sequence[Territory]) -> dict[str, str]:
    """Return which parameters each unit holds."""
    return {
        f"unit `{one.name}` ({type(one.module).__name__})": ", ".join(names[0] for names in one.names) or "empty"
        for one in territories
    }


def optimizer_facts(optimizers: Iterable[Optimizer], name_of: Callable[[torch.Tensor], str]) -> dict[str, str]:
    """Return the classes of optimizers, their parameters in order, and their options that are no tensors."""
    facts = {}
    for number, optimizer in enumerate(optimizers):
        label = f"optimizer {number}"
        facts[label] = type(optimizer).__name__
        for place, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key == "params":
                    value = ", ".join(name_of(param) for param in value)
                if isinstance(value, (bool, int, float, str, tuple, type(None))):
                    facts[f"`{key}` of group {place} of {label}"] = str(value)
    return facts
