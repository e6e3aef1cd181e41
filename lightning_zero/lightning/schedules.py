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

__all__ = ["fill_schedules", "prepare_schedules"]


def prepare_schedules(configs: list[LRSchedulerConfig], trainer: pl.Trainer) -> None:
    """Have schedules of this package stepped at every step, and fill ``total_num_steps="auto"`` for a new training.

    Raises:
        ValueError: The training has no end, so that there is nothing to fill, or the program steps schedules itself; or
            a schedule would not be stepped at every step: it is inside of another scheduler that is stepped once an
            epoch, or has a `frequency`.
    """
    if not trainer.lightning_module.automatic_optimization:
        _leave_to_program(configs)
        return
    for config in configs:
        if isinstance(config.scheduler, Schedule) and config.interval == "epoch":
            config.interval = "step"
            rank_zero_info(
                f"`{type(config.scheduler).__name__}` counts steps of the optimizer, and is stepped with it"
                " (`interval='step'`)."
            )
        _refuse_other_steps(config)
    _fill(configs, trainer)


def _leave_to_program(configs: list[LRSchedulerConfig]) -> None:
    """Say who steps schedules in manual optimization.

    Raises:
        ValueError: Nobody knows how often a schedule with ``total_num_steps="auto"`` is stepped.
    """
    for one, *_ in (found for config in configs for found in _schedules(config.scheduler)):
        name = type(one).__name__
        if getattr(one, "is_auto", False):
            raise ValueError(
                f"`total_num_steps='auto'` of `{name}` is the number of steps that the Trainer makes, and with"
                " `automatic_optimization=False` the program steps its optimizers and schedules. Say the number: how"
                " often `training_step` steps the schedule."
            )
        if isinstance(one, Schedule):
            rank_zero_info(
                f"`{name}` counts steps of the optimizer. With `automatic_optimization=False` nobody steps it but the"
                " program: call `self.lr_schedulers().step()` after each step of the optimizer."
            )


def fill_schedules(configs: list[LRSchedulerConfig], trainer: pl.Trainer) -> None:
    """Fill ``total_num_steps="auto"`` again at the first batch of a fit, which may go on from a checkpoint, and say so.

    Only then is it known which batch of which epoch that is.
    """
    done = trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1
    for schedule, steps, begin in _fill(configs, trainer, done=done):
        name = type(schedule).__name__
        if begin and steps <= begin:
            rank_zero_warn(
                f"`{name}` is not reached: its milestone in `SequentialLR` is step {begin}, and the training has"
                f" {steps:.0f} steps. Use a lower milestone, or train longer."
            )
        elif not trainer.fast_dev_run:  # type: ignore[attr-defined]
            schedule.warn_of_long_warmup()
        rank_zero_info(f"`total_num_steps` of `{name}`: {schedule.total_num_steps}")


def _fill(
    configs: list[LRSchedulerConfig], trainer: pl.Trainer, *, done: int | None = None
) -> list[tuple[WarmupDecayLR | WarmupCosineLR, float, int]]:
    """Fill ends that are ``"auto"``, and return the schedules with the steps of all the training, and before each.

    In a ``SequentialLR`` a part ends at the next milestone. ``done`` is as in ``_steps_left``.
    """
    filled = []
    for config in configs:
        for schedule, begin, end in _schedules(config.scheduler):
            if isinstance(schedule, (WarmupDecayLR, WarmupCosineLR)) and schedule.is_auto:
                steps = _place_of(config.scheduler) + _steps_left(trainer, done)
                schedule.fill_total_num_steps(max(1, min(steps, end) - begin))
                schedule.is_auto = True  # a checkpoint may change the number
                filled.append((schedule, steps, begin))
    return filled


def _place_of(scheduler: Any) -> int:
    """Return how often a scheduler was stepped; a ``ChainedScheduler`` as often as each in it."""
    place = getattr(scheduler, "last_epoch", None)
    return _place_of(scheduler._schedulers[0]) if place is None else int(place)


def _steps_left(trainer: pl.Trainer, done: int | None) -> float:
    """Return the steps from here to the end of the training; infinity if nobody knows it.

    As ``trainer.estimated_stepping_batches``, but without the steps that were made before, maybe with other loaders,
    and with the accumulation of every epoch where a callback changes it.

    Args:
        trainer: The Trainer.
        done: Batches of this epoch before the one that begins; None: no epoch has begun.
    """
    limit = math.inf if trainer.max_steps == -1 else max(0, trainer.max_steps - trainer.global_step)
    epochs = trainer.max_epochs
    if epochs == -1:
        return limit
    if trainer.train_dataloader is None:
        trainer.fit_loop.setup_data()
    batches = trainer.num_training_batches
    if math.isinf(batches):
        return limit
    progress: Any = trainer.fit_loop.epoch_progress.current
    left = range(progress.processed, epochs or 1)
    steps: float = 0
    if done is not None:
        left = left[1:]
        every = trainer.accumulate_grad_batches  # a callback sets it when an epoch begins, which a resumed one does not
        last = max(batches - 1, done)  # if no batch were left, Lightning would train on one
        steps = last // every - done // every + 1
    steps += sum(math.ceil(batches / _accumulated(trainer, epoch)) for epoch in left)
    return min(steps, limit)


def _accumulated(trainer: pl.Trainer, epoch: int) -> int:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    plans = [one for one in callbacks if isinstance(one, GradientAccumulationScheduler)]
    return plans[-1].get_accumulate_grad_batches(epoch) if plans else trainer.accumulate_grad_batches


def _refuse_other_steps(config: LRSchedulerConfig) -> None:
    """Refuse to step a schedule of this package less often than its optimizer.

    Raises:
        ValueError: It is in a scheduler whose interval is an epoch, or it is stepped at every few batches only.
    """
    inner = next((one for one, *_ in _schedules(config.scheduler) if isinstance(one, Schedule)), None)
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


def _schedules(scheduler: Any, begin: int = 0, end: float = math.inf) -> Iterator[tuple[Any, int, float]]:
    """Yield a scheduler and those in it, with the steps before each begins and ends, as in ``SequentialLR``."""
    yield scheduler, begin, end
    parts = getattr(scheduler, "_schedulers", ())
    if isinstance(scheduler, SequentialLR):
        milestones = [begin, *(begin + one for one in scheduler._milestones), end]
        for part, first, last in zip(parts, milestones[:-1], milestones[1:], strict=True):
            yield from _schedules(part, int(first), min(last, end))
        return
    for part in parts:
        yield from _schedules(part, begin, end)
