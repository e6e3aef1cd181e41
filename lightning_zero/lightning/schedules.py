"""This package's schedules in a Trainer: stepped with the optimizer, over the steps of the training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.types import LRSchedulerConfig
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim.lr_scheduler import SequentialLR

from lightning_zero.schedules import Schedule, WarmupCosineLR, WarmupDecayLR

__all__ = ["prepare_schedules"]


def prepare_schedules(configs: list[LRSchedulerConfig], trainer: pl.Trainer) -> None:
    """Have schedules of this package stepped at every step, and fill ``total_num_steps="auto"`` from the Trainer.

    In a later part of a ``SequentialLR`` these are the steps that are left at its milestone.

    Raises:
        ValueError: The training has no end, so that there is nothing to fill; or a schedule would not be stepped at
            every step: it is inside of another scheduler that is stepped once an epoch, or has a `frequency`.
    """
    for config in configs:
        if isinstance(config.scheduler, Schedule) and config.interval == "epoch":
            config.interval = "step"
            rank_zero_info(
                f"`{type(config.scheduler).__name__}` counts steps of the optimizer, and is stepped with it"
                " (`interval='step'`)."
            )
        if trainer.lightning_module.automatic_optimization:
            _refuse_other_steps(config)
        for schedule, begin in _schedules(config.scheduler):
            if isinstance(schedule, (WarmupDecayLR, WarmupCosineLR)) and schedule.total_num_steps == "auto":
                _fill(schedule, _steps_of(trainer), begin)


def _fill(schedule: WarmupDecayLR | WarmupCosineLR, steps: float, begin: int) -> None:
    name = type(schedule).__name__
    if begin and 0 <= steps <= begin:
        rank_zero_warn(
            f"`{name}` is not reached: its milestone in `SequentialLR` is step {begin}, and the training has {steps}"
            " steps. Use a lower milestone, or train longer."
        )
        steps = begin + 1
    schedule.fill_total_num_steps(steps - begin)
    rank_zero_info(f"`total_num_steps` of `{name}`: {schedule.total_num_steps}")


def _steps_of(trainer: pl.Trainer) -> float:
    """Return the steps of the training, also with a callback that changes accumulation; -1 if loaders have no length.

    Lightning estimates them with the accumulation before the first epoch, which such a callback has not set yet.
    """
    steps = trainer.estimated_stepping_batches  # makes the loaders
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    plans = [one for one in callbacks if isinstance(one, GradientAccumulationScheduler)]
    batches, epochs = trainer.num_training_batches, trainer.max_epochs or 1
    if not plans or epochs == -1 or math.isinf(batches):
        return steps
    accumulated = (plans[-1].get_accumulate_grad_batches(epoch) for epoch in range(epochs))
    planned = sum(math.ceil(batches / count) for count in accumulated)
    return planned if trainer.max_steps == -1 else min(planned, trainer.max_steps)


def _refuse_other_steps(config: LRSchedulerConfig) -> None:
    """Refuse to step a schedule of this package less often than its optimizer.

    Raises:
        ValueError: It is in a scheduler whose interval is an epoch, or it is stepped at every few batches only.
    """
    inner = next((one for one, _ in _schedules(config.scheduler) if isinstance(one, Schedule)), None)
    if inner is None:
        return
    name = type(inner).__name__
    if config.interval == "epoch":
        outer = type(config.scheduler).__name__
        raise ValueError(
            f"`{name}` counts steps of the optimizer, and the `{outer}` around it is stepped once an"
            f' epoch. Return `{{"scheduler": ..., "interval": "step"}}` from `configure_optimizers`, and give `{outer}`'
            " its own numbers, such as milestones, in steps."
        )
    if config.frequency != 1:
        raise ValueError(
            f"`{name}` counts steps of the optimizer, and `frequency={config.frequency}` of `configure_optimizers`"
            " would step it at every few batches only. Leave `frequency` out, and give the schedule its numbers in"
            " steps."
        )


def _schedules(scheduler: Any, begin: int = 0) -> Iterator[tuple[Any, int]]:
    """Yield a scheduler and those in it, such as the parts of ``SequentialLR``, with the steps before each begins."""
    yield scheduler, begin
    parts = getattr(scheduler, "_schedulers", ())
    milestones = [0, *scheduler._milestones] if isinstance(scheduler, SequentialLR) else [0] * len(parts)
    for part, milestone in zip(parts, milestones, strict=True):
        yield from _schedules(part, begin + milestone)
