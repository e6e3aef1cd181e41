"""This package's schedules in a Trainer: stepped with the optimizer, over the steps of the training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.types import LRSchedulerConfig
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_zero.schedules import Schedule, WarmupCosineLR, WarmupDecayLR

__all__ = ["prepare_schedules"]


def prepare_schedules(configs: list[LRSchedulerConfig], trainer: pl.Trainer) -> None:
    """Have schedules of this package stepped at every step, and fill ``total_num_steps="auto"`` from the Trainer.

    Raises:
        ValueError: The training has no end, so that there is nothing to fill; or a schedule inside of another scheduler
            would be stepped once an epoch.
    """
    for config in configs:
        if isinstance(config.scheduler, Schedule) and config.interval == "epoch":
            config.interval = "step"
            rank_zero_info(
                f"`{type(config.scheduler).__name__}` counts steps of the optimizer, and is stepped with it"
                " (`interval='step'`)."
            )
        if trainer.lightning_module.automatic_optimization:
            _refuse_epochs(config)
        for schedule in _schedules(config.scheduler):
            if isinstance(schedule, (WarmupDecayLR, WarmupCosineLR)) and schedule.total_num_steps == "auto":
                schedule.fill_total_num_steps(trainer.estimated_stepping_batches)
                rank_zero_info(f"`total_num_steps` of `{type(schedule).__name__}`: {schedule.total_num_steps}")


def _refuse_epochs(config: LRSchedulerConfig) -> None:
    """Refuse to step a schedule of this package once an epoch, because of the scheduler around it.

    Raises:
        ValueError: It is in a scheduler whose interval is an epoch.
    """
    inner = next((one for one in _schedules(config.scheduler) if isinstance(one, Schedule)), None)
    if inner is not None and config.interval == "epoch":
        outer = type(config.scheduler).__name__
        raise ValueError(
            f"`{type(inner).__name__}` counts steps of the optimizer, and the `{outer}` around it is stepped once an"
            f' epoch. Return `{{"scheduler": ..., "interval": "step"}}` from `configure_optimizers`, and give `{outer}`'
            " its own numbers, such as milestones, in steps."
        )


def _schedules(scheduler: Any) -> Iterator[Any]:
    """Yield a scheduler and those in it, such as the parts of ``SequentialLR``."""
    yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _schedules(part)
