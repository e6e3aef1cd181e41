"""States of torchmetrics in checkpoints: every rank has its own, and a count is counted once afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum

__all__ = ["METRIC_STATES", "metric_states", "with_own_metric_states"]

METRIC_STATES = "metric_states"  # key of a checkpoint dictionary: by rank, by name in the ``state_dict``


def metric_states(module: nn.Module) -> dict[str, Any]:
    """Return copies of this rank's persistent states of metrics, by their names in the ``state_dict``."""
    return {name: _map(_copy, getattr(metric, key)) for name, metric, key in _persistent(module)}


def with_own_metric_states(
    module: nn.Module, state_dict: Mapping[str, Any], *, saved: Sequence[Mapping[str, Any]], rank: int, world_size: int
) -> tuple[Mapping[str, Any], list[str]]:
    """Return a ``state_dict`` with the metric states that this rank goes on with, and names that could not be divided.

    On the same number of ranks those are the rank's own. On another one a sum or a list is taken by rank 0, and the
    others begin anew; all ranks take a maximum, a minimum or a mean.

    Args:
        module: Has the metrics, on their device.
        state_dict: As saved; the metric states in it are rank 0's.
        saved: Results of ``metric_states`` on every rank, or nothing, if the checkpoint is of another strategy.
        rank: This rank.
        world_size: Number of ranks now.
    """
    values: Any = copy.copy(state_dict)
    undivided = []
    for name, metric, key in _states(module):
        if name not in values:
            continue
        if saved and all(name in states for states in saved):
            of_ranks = [states[name] for states in saved]
            reduction: Any = metric._reductions[key]
            if len(saved) == world_size:
                values[name] = of_ranks[rank]
            elif reduction in _ALL_TAKE or reduction in _FIRST_TAKES:
                merged = _merge(reduction, of_ranks)
                values[name] = merged if rank == 0 or reduction in _ALL_TAKE else metric._defaults[key]
            else:
                undivided.append(name)
        # The metric keeps its arguments: so no tensors that are read later, and tensors on its own device.
        values[name] = _map(partial(_copy, device=metric.device), values[name])
    return values, undivided


_ALL_TAKE: tuple[Any, ...] = (dim_zero_max, dim_zero_min, dim_zero_mean)
_FIRST_TAKES: tuple[Any, ...] = (dim_zero_sum, dim_zero_cat)


def _merge(reduction: Callable[[Any], Any], of_ranks: Sequence[Any]) -> Any:
    if isinstance(of_ranks[0], list):
        return [value for values in of_ranks for value in values]
    if reduction is dim_zero_cat:
        return dim_zero_cat([value for value in of_ranks if value.numel()] or [of_ranks[0]])
    return reduction(torch.stack([torch.as_tensor(value) for value in of_ranks]))


def _states(module: nn.Module) -> Iterator[tuple[str, Metric, str]]:
    """Yield every state of every metric: its name in a ``state_dict``, the metric, the attribute."""
    for prefix, metric in module.named_modules():
        if isinstance(metric, Metric):
            for key in metric._defaults:
                yield f"{prefix}.{key}" if prefix else key, metric, key


def _persistent(module: nn.Module) -> Iterator[tuple[str, Metric, str]]:
    for name, metric, key in _states(module):
        if metric._persistent[key]:
            yield name, metric, key


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    return [function(item) for item in value] if isinstance(value, list) else function(value)


def _copy(value: Any, device: torch.device | str = "cpu") -> Any:
    return value.detach().clone().to(device) if isinstance(value, Tensor) else value
