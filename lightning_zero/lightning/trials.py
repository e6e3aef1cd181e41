"""Trials of a strategy before it trains, in a simulation: of plans and of experts, with values.

Note [Values]
    Operations of a simulation compute nothing, and a trial compares results: of a block whole and in parts, of experts
    together and alone. So trials run outside of the simulation, with random values of one block, or of two experts, at
    a time, as on rank 0 of a run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn

from lightning_zero.forecast.dry_run import DryRun
from lightning_zero.forecast.live_bytes import replaced
from lightning_zero.lightning.tensor_training import TensorTraining
from lightning_zero.moe.routed import RoutedExperts

__all__ = ["trials_with_values"]


@contextmanager
def trials_with_values(counter: DryRun, plans: list[Any]) -> Iterator[None]:
    """Let plans of tensor parallelism be found, and experts be tried, with values, and count nothing of it.

    Args:
        counter: Of the simulation.
        plans: The plan of earlier simulations of the module, which is used again; an empty list gets the one found.
    """
    plan, verify = TensorTraining._agreed_plan, RoutedExperts.verify

    def planned(training: TensorTraining, module: pl.LightningModule, whole: Collection[str]) -> Any:
        if not plans:
            with counter.suspended():
                counter.write(_tensors_of(module))
                plans.append(plan(training, module, whole))
        return plans[0]

    def verified(experts: RoutedExperts, name: str) -> None:
        with counter.suspended():
            verify(experts, name)

    with replaced(TensorTraining, "_agreed_plan", planned), replaced(RoutedExperts, "verify", verified):
        yield


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors of a module that are no parameters, and so have their own values in a trial."""
    yield from module.buffers()
    for child in module.modules():
        yield from (value for value in vars(child).values() if isinstance(value, Tensor))
