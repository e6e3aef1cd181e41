"""Loads of experts in the logs of a fit: scalars of each layer, and for TensorBoard a histogram and a layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from lightning_zero.moe.loads import ExpertLoads, LayerLoad

__all__ = ["ExpertScalars"]

_NAMES = ("load_max_over_mean", "dropped", "router_entropy", "aux_loss")


class ExpertScalars:
    """Counts the choices of mixtures in training batches.

    Collective in a pipeline: all ranks make one.

    Args:
        trainer: Of the fit.
        module: Its module.
        has_stages: Ranks may have different layers.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule, *, has_stages: bool) -> None:
        self._trainer = trainer
        self._loads = ExpertLoads(module, _gather if has_stages and _has_group() else _alone)
        self._has_layout = False

    def count(self, is_on: bool) -> None:
        """Count forwards from here, or leave them out."""
        self._loads.is_counting = is_on

    def row(self, step: int) -> dict[str, float]:
        """Return the scalars since the last row, and write histograms. Collective: all ranks.

        Args:
            step: Of the histograms.
        """
        found = self._loads.read(self._add, self._trainer.strategy.root_device)
        for logger in self._trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and found and self._trainer.is_global_zero:
                self._write(logger.experiment, found, step)
        return {f"moe/{name}/{key}": value for name, load in found.items() for key, value in _scalars(load).items()}

    def stop(self) -> None:
        """Count nothing any more."""
        self._loads.remove()

    def _add(self, tensor: Tensor) -> Tensor:
        """Return the sum over all ranks, also those of other pipeline stages."""
        group = dist.group.WORLD if _has_group() else None
        total: Tensor = self._trainer.strategy.reduce(tensor, group, reduce_op="sum")
        return total

    def _write(self, writer: Any, found: dict[str, LayerLoad], step: int) -> None:
        if not self._has_layout:
            writer.add_custom_scalars({"moe": {key: ["Multiline", [rf"moe/.*/{key}$"]] for key in _NAMES}})
            self._has_layout = True
        for name, one in found.items():
            _add_histogram(writer, f"moe/{name}/load", one.load, step)


def _scalars(load: LayerLoad) -> dict[str, float]:
    values = (load.max_over_mean, load.dropped, load.router_entropy, load.aux_loss)
    return {key: value for key, value in zip(_NAMES, values, strict=True) if value is not None}


def _add_histogram(writer: Any, tag: str, load: Sequence[float], step: int) -> None:
    """Write a histogram over the numbers of experts, each as high as its load."""
    numbers = range(len(load))
    writer.add_histogram_raw(
        tag,
        min=-0.5,
        max=len(load) - 0.5,
        num=sum(load),
        sum=sum(number * one for number, one in zip(numbers, load, strict=True)),
        sum_squares=sum(number**2 * one for number, one in zip(numbers, load, strict=True)),
        bucket_limits=[number + 0.5 for number in numbers],
        bucket_counts=list(load),
        global_step=step,
    )


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _alone(value: Any) -> list[Any]:
    """Return the value of this rank, which has the layers of all."""
    return [value]


def _gather(value: Any) -> list[Any]:
    """Return the values of all ranks. Collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
