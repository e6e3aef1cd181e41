"""DeepSpeed's schedules of learning rates, as schedulers of PyTorch.

Note [Two counts]
    ``last_batch_iteration``, DeepSpeed's count, is -1 before the first ``step`` of a schedule and 0 after it. PyTorch's
    ``last_epoch`` is one more: the number of steps that the optimizer has made. ``LRRangeTest`` and ``OneCycle`` go by
    the number of steps, so the second step has the second value. The warm-ups go by ``last_batch_iteration``: the
    second step has the lowest rate, and the first one too, or under ``WarmupCosineLR`` the rate 0. Both are as in
    DeepSpeed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor
from torch import distributed as dist
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_zero.option_checks import checked_arguments

__all__ = ["LRRangeTest", "OneCycle", "Schedule", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]

PerGroup = float | Sequence[float]
WarmupType = Literal["log", "linear"]
TotalSteps = int | Literal["auto"]
CycleMomentum = bool | Literal["deepspeed"]

_USE = {
    "total_num_steps": "Use the number of steps of the training, or 'auto', which a Trainer fills.",
    "warmup_type": "Use 'log' or 'linear'.",
}


class Schedule(LRScheduler):
    """A schedule that is stepped once after each step of the optimizer.

    Args:
        optimizer: The optimizer whose learning rates are set.
        last_batch_iteration: See Note [Two counts]; a number from 0 continues in the middle.
    """

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int) -> None:
        if last_batch_iteration < -1:
            raise ValueError(
                f"`last_batch_iteration={last_batch_iteration!r}` must be -1, which starts the schedule, or the number"
                " of the last batch, 0 or more."
            )
        super().__init__(optimizer, last_batch_iteration)

    @property
    def last_batch_iteration(self) -> int:
        """The number of the last batch, -1 before the first."""
        return self.last_epoch - 1

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rate of each parameter group for the next step of the optimizer."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the schedule. The options are not in it: those of a resumed run hold."""
        return {
            "last_batch_iteration": self.last_batch_iteration,
            "last_epoch": self.last_epoch,
            "_step_count": self._step_count,
            "_last_lr": [_number(rate) for rate in self._last_lr],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the place of ``state_dict`` of this class, or of DeepSpeed's.

        Load the optimizer before: its learning rates are set if they are those that this schedule has set last, so that
        options may be others now. In a ``SequentialLR`` or ``ChainedScheduler`` they may be those of another part.

        Raises:
            ValueError: The dictionary says no place.
        """
        place = state_dict.get("last_batch_iteration")
        if type(place) is not int:
            raise ValueError(
                f"The state of `{type(self).__name__}` has `last_batch_iteration={place!r}`; it must be a whole number."
                " It is the state of another scheduler: leave it out."
            )
        self.last_epoch = place + 1
        self._step_count = int(state_dict.get("_step_count", place + 2))
        self._last_lr = list(state_dict.get("_last_lr", self._rates()))  # DeepSpeed's have none
        self._renew_rates()

    def _rates(self) -> list[float]:
        return [_number(group["lr"]) for group in self.optimizer.param_groups]

    def _renew_rates(self) -> None:
        """Set the learning rates of the present place if the optimizer has those that this schedule has set last."""
        has_begun = self.last_epoch >= 0  # else its part of a sequence comes later
        if has_begun and self._last_lr == self._rates():
            self._set_rates()

    def _set_rates(self) -> None:
        """Set the learning rates of the present place, as ``step`` does of the next."""
        self._last_lr = []
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
            self._last_lr.append(_number(rate))


class LRRangeTest(Schedule):
    """Raise the learning rate until the model diverges, to find the highest that trains it (arXiv:1803.09820).

    The rate is ``min_lr * (1 + step_rate * steps / step_size)``; with ``staircase`` the quotient is rounded down.

    Args:
        optimizer: The optimizer whose learning rates are set.
        lr_range_test_min_lr: First learning rate; a list has one for each parameter group.
        lr_range_test_step_size: Steps after which ``step_rate`` times the first rate has been added.
        lr_range_test_step_rate: Growth within ``step_size`` steps, in first rates.
        lr_range_test_staircase: Change the rate every ``step_size`` steps, not at every step.
        last_batch_iteration: Continue behind this batch; -1 starts.
    """

    @checked_arguments()
    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.min_lrs = _per_group(optimizer, "lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size = _positive("lr_range_test_step_size", lr_range_test_step_size)
        self.step_rate = _rate("lr_range_test_step_rate", lr_range_test_step_rate)
        self.staircase = lr_range_test_staircase
        _give_initial_rates(optimizer, last_batch_iteration)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rate of each parameter group for the next step of the optimizer."""
        intervals = self.last_epoch // self.step_size if self.staircase else self.last_epoch / self.step_size
        return [rate * (1 + self.step_rate * intervals) for rate in self.min_lrs]


class OneCycle(Schedule):
    """Raise the learning rate, lower it again, then let it decay; momentum goes the other way (arXiv:1803.09820).

    In the decay the rate is ``cycle_min_lr / (1 + decay_lr_rate * steps / decay_step_size)``, and the momentum
    ``cycle_max_mom * (1 + decay_mom_rate * steps / decay_step_size)``.

    Args:
        optimizer: The optimizer whose learning rates are set, and its ``betas[0]`` or ``momentum``.
        cycle_min_lr: Learning rate at both ends of the cycle; a list has one for each parameter group.
        cycle_max_lr: Learning rate at the top; a list has one for each parameter group.
        decay_lr_rate: Decay of the learning rate within ``decay_step_size`` steps.
        cycle_first_step_size: Steps to the top.
        cycle_second_step_size: Steps back; None: as many as to the top.
        cycle_first_stair_count: Stairs to the top; 0: a slope.
        cycle_second_stair_count: Stairs back; None: as many as to the top.
        decay_step_size: Unit of the decay, in steps; 0: no decay.
        cycle_momentum: Cycle the momentum too. ``"deepspeed"``: as DeepSpeed does. It cycles ``betas`` only, sets
            ``betas[1]`` to 0.99, and makes the first step with ``cycle_min_mom``.
        cycle_min_mom: Momentum at the top; a list has one for each parameter group.
        cycle_max_mom: Momentum at both ends; a list has one for each parameter group.
        decay_mom_rate: Growth of the momentum within ``decay_step_size`` steps.
        last_batch_iteration: Continue behind this batch; -1 starts.
    """

    @checked_arguments()
    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: CycleMomentum = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        self.min_lrs = _per_group(optimizer, "cycle_min_lr", cycle_min_lr)
        self.max_lrs = _per_group(optimizer, "cycle_max_lr", cycle_max_lr)
        self.first_steps = _positive("cycle_first_step_size", cycle_first_step_size)
        self.second_steps = _count("cycle_second_step_size", cycle_second_step_size, self.first_steps)
        self.first_stairs = _count("cycle_first_stair_count", cycle_first_stair_count, 0)
        self.second_stairs = _count("cycle_second_stair_count", cycle_second_stair_count, self.first_stairs)
        self.decay_steps = _count("decay_step_size", decay_step_size, 0)
        self.decay_lr_rate = _rate("decay_lr_rate", decay_lr_rate)
        self.decay_mom_rate = _rate("decay_mom_rate", decay_mom_rate)
        self.cycle_momentum = _momentum_of(optimizer, cycle_momentum)
        self.min_moms = _momenta(optimizer, "cycle_min_mom", cycle_min_mom)
        self.max_moms = _momenta(optimizer, "cycle_max_mom", cycle_max_mom)
        _give_initial_rates(optimizer, last_batch_iteration)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rate of each parameter group for the next step of the optimizer."""
        height = self._height()
        if height is None:
            return [rate / (1 + self.decay_lr_rate * self._decay_intervals) for rate in self.min_lrs]
        return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _update_lr(self, epoch: int | None = None) -> None:
        super()._update_lr(epoch)  # of `step`, and of a `SequentialLR` at a milestone
        self._set_momenta()

    def _set_rates(self) -> None:
        super()._set_rates()
        self._set_momenta()

    def _set_momenta(self) -> None:
        if not self.cycle_momentum:
            return
        for group, momentum in zip(self.optimizer.param_groups, self.get_mom(), strict=True):
            if self.cycle_momentum == "deepspeed":
                group["betas"] = (momentum, 0.99)
            elif "betas" in group:
                group["betas"] = (momentum, *group["betas"][1:])
            else:
                group["momentum"] = momentum

    def get_mom(self) -> list[float]:
        """Return the momentum of each parameter group for the next step of the optimizer.

        Raises:
            ValueError: The decay has raised it to 1.
        """
        if self.cycle_momentum == "deepspeed" and self.last_epoch == 0:
            return self.min_moms
        height = self._height()
        if height is not None:
            return [high - (high - low) * height for low, high in zip(self.min_moms, self.max_moms, strict=True)]
        momenta = [high * (1 + self.decay_mom_rate * self._decay_intervals) for high in self.max_moms]
        if max(momenta) >= 1:
            raise ValueError(
                f"`decay_mom_rate={self.decay_mom_rate!r}` has raised a momentum to {max(momenta)} after"
                f" {self.last_epoch} steps; it must stay below 1. Use a lower rate, or a longer `decay_step_size`."
            )
        return momenta

    def _height(self) -> float | None:
        """Return the place between the lowest (0) and the highest learning rate (1), or None in the decay."""
        steps_back = self.last_epoch - self.first_steps
        if steps_back <= 0:
            return _on_stairs(self.last_epoch, self.first_steps, self.first_stairs)
        if steps_back < self.second_steps:
            return _on_stairs(self.second_steps - steps_back, self.second_steps, self.second_stairs)
        return None

    @property
    def _decay_intervals(self) -> float:
        """Units of the decay since the end of the cycle."""
        steps = self.last_epoch - self.first_steps - self.second_steps
        return steps / self.decay_steps if self.decay_steps else 0.0


class WarmupLR(Schedule):
    """Raise the learning rate from ``warmup_min_lr`` to ``warmup_max_lr``, and leave it there.

    Of the way up, ``log(n + 1) / log(warmup_num_steps)`` is done at ``last_batch_iteration`` n, or with
    ``"linear"`` ``n / warmup_num_steps``.

    Args:
        optimizer: The optimizer whose learning rates are set.
        warmup_min_lr: First learning rate; a list has one for each parameter group.
        warmup_max_lr: Last learning rate; a list has one for each parameter group; None: the optimizer's own.
        warmup_num_steps: Steps of the warm-up; 1 counts as 2.
        warmup_type: ``"log"`` or ``"linear"``.
        last_batch_iteration: Continue behind this batch; -1 starts.
    """

    @checked_arguments(use=_USE)
    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: WarmupType = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.min_lrs = _per_group(optimizer, "warmup_min_lr", warmup_min_lr)
        self.max_lrs: list[float] | None = None  # None: the optimizer's own
        if warmup_max_lr is not None:
            self.max_lrs = _per_group(optimizer, "warmup_max_lr", warmup_max_lr)
            _give_initial_rates(optimizer, last_batch_iteration)
        self.warmup_num_steps = _warmup_steps(warmup_num_steps)
        self.warmup_type = warmup_type
        _require_initial_rates(optimizer, last_batch_iteration)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rate of each parameter group for the next step of the optimizer."""
        highest = self.base_lrs if self.max_lrs is None else self.max_lrs
        height = self._height()
        return [low + (high - low) * height for low, high in zip(self.min_lrs, highest, strict=True)]

    def _height(self) -> float:
        """Return the place between the lowest (0) and the highest learning rate (1)."""
        return _warmed_up(self.last_batch_iteration, self.warmup_num_steps, self.warmup_type)


class _WithTotal(Schedule):
    """The end of a schedule: a number of steps, which a Trainer may give later."""

    def __init__(self, total_num_steps: TotalSteps, warmup_num_steps: int, last_batch_iteration: int) -> None:
        if total_num_steps != "auto":
            total_num_steps = _positive("total_num_steps", total_num_steps)
        elif last_batch_iteration > -1:
            raise _unknown_total(self)
        self.is_auto = total_num_steps == "auto"  # to be filled; a Trainer does so again where it goes on
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = _warmup_steps(warmup_num_steps)
        self._given_warmup = warmup_num_steps
        self.warn_of_long_warmup(stacklevel=5)

    def fill_total_num_steps(self, steps: float) -> None:
        """Give a schedule with ``total_num_steps="auto"`` the steps of the training.

        Raises:
            ValueError: The training has no end, or -1 steps, as a Trainer says of loaders without a length.
        """
        if not self.is_auto:
            return
        if not math.isfinite(steps) or steps < 0:
            raise ValueError(
                f"`total_num_steps='auto'` of `{type(self).__name__}` is the number of steps of the training, which has"
                " no end that is known before it. Use `Trainer(max_steps=...)`, or `Trainer(max_epochs=...)` and a"
                " training loader that has a length, or say the number."
            )
        self.total_num_steps = max(1, int(steps))
        self.is_auto = False
        self._renew_rates()

    def warn_of_long_warmup(self, *, stacklevel: int = 3) -> None:
        """Warn, on rank 0, that the learning rate does not fall before the end."""
        total, warmup = self.total_num_steps, self._given_warmup
        is_first = not (dist.is_available() and dist.is_initialized() and dist.get_rank())
        if is_first and isinstance(total, int) and total <= self.warmup_num_steps:
            counts = "" if warmup == self.warmup_num_steps else f", which counts as {self.warmup_num_steps}"
            warnings.warn(
                f"The warm-up of `{type(self).__name__}` lasts until the end: `warmup_num_steps={warmup}`{counts}, and"
                f" `total_num_steps={total}`. Lower `warmup_num_steps`, or train longer.",
                stacklevel=stacklevel,
            )

    def _total(self) -> int:
        if self.total_num_steps == "auto":
            raise _unknown_total(self)
        assert isinstance(self.total_num_steps, int)
        return self.total_num_steps


class WarmupDecayLR(_WithTotal, WarmupLR):
    """Raise the learning rate as ``WarmupLR`` does, then lower it linearly to ``warmup_min_lr`` until the end.

    Args:
        optimizer: The optimizer whose learning rates are set.
        total_num_steps: Steps of the training, warm-up included. ``"auto"``: those of the Trainer, under
            ``ZeroStrategy``.
        warmup_min_lr: First and last learning rate; a list has one for each parameter group.
        warmup_max_lr: Highest learning rate; a list has one for each parameter group; None: the optimizer's own.
        warmup_num_steps: Steps of the warm-up; 1 counts as 2.
        warmup_type: ``"log"`` or ``"linear"``.
        last_batch_iteration: Continue behind this batch; -1 starts.
    """

    @checked_arguments(use=_USE)
    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: TotalSteps,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: WarmupType = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        _WithTotal.__init__(self, total_num_steps, warmup_num_steps, last_batch_iteration)
        WarmupLR.__init__(
            self, optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration
        )

    def _height(self) -> float:
        place = self.last_batch_iteration
        if place < 0:
            return 0.0
        total = self._total()
        if place < self.warmup_num_steps:
            return super()._height()
        return max(0.0, (total - place) / max(1, total - self.warmup_num_steps))


class WarmupCosineLR(_WithTotal, Schedule):
    """Raise each group's learning rate to its own, then lower it along half a cosine.

    Args:
        optimizer: The optimizer whose learning rates are multiplied.
        total_num_steps: Steps of the training, warm-up included. ``"auto"``: those of the Trainer, under
            ``ZeroStrategy``.
        warmup_min_ratio: Factor of the learning rates at which the warm-up begins, in the second step; that of the
            first step is 0, as in DeepSpeed.
        warmup_num_steps: Steps of the warm-up; 1 counts as 2.
        cos_min_ratio: Last factor of the learning rates.
        warmup_type: ``"log"`` or ``"linear"``.
        last_batch_iteration: Continue behind this batch; -1 starts.
    """

    @checked_arguments(use=_USE)
    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: TotalSteps,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 1e-4,
        warmup_type: WarmupType = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        _WithTotal.__init__(self, total_num_steps, warmup_num_steps, last_batch_iteration)
        self.warmup_min_ratio = _ratio("warmup_min_ratio", warmup_min_ratio)
        self.cos_min_ratio = _ratio("cos_min_ratio", cos_min_ratio)
        self.warmup_type = warmup_type
        _require_initial_rates(optimizer, last_batch_iteration)
        Schedule.__init__(self, optimizer, last_batch_iteration)

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rate of each parameter group for the next step of the optimizer."""
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.base_lrs]

    def get_lr_ratio(self) -> float:
        """Return the factor of the learning rates."""
        place = self.last_batch_iteration
        if place < 0:
            return 0.0
        total = self._total()
        if place < self.warmup_num_steps:
            height = _warmed_up(place, self.warmup_num_steps, self.warmup_type)
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * height
        done = (place - self.warmup_num_steps + 1) / max(1, total - self.warmup_num_steps)
        return self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * min(1.0, done))) / 2


def _warmed_up(place: int, steps: int, kind: WarmupType) -> float:
    """Return the part of the warm-up, from 0 to 1, that is done at a place."""
    if place <= 0:
        return 0.0
    if place >= steps:
        return 1.0
    return math.log(place + 1) / math.log(steps) if kind == "log" else place / steps


def _on_stairs(steps: int, all_steps: int, stairs: int) -> float:
    """Return ``steps / all_steps``, rounded down to a stair; 0 stairs are a slope."""
    return steps * stairs // all_steps / stairs if stairs else steps / all_steps


def _per_group(optimizer: Optimizer, name: str, value: PerGroup) -> list[float]:
    """Return one number for each parameter group."""
    groups = len(optimizer.param_groups)
    values = [value] * groups if isinstance(value, (int, float)) else list(value)
    if len(values) != groups:
        raise ValueError(
            f"`{name}={value!r}` has {len(values)} values, and the optimizer has {groups} parameter group(s). Use one"
            " number for all groups, or a list with one for each."
        )
    for one in values:
        _rate(name, one)
    return [float(one) for one in values]


def _momenta(optimizer: Optimizer, name: str, value: PerGroup) -> list[float]:
    values = _per_group(optimizer, name, value)
    if max(values) >= 1:
        raise ValueError(f"`{name}={value!r}` must be a number from 0 to 1, and below 1.")
    return values


def _momentum_of(optimizer: Optimizer, kind: CycleMomentum) -> CycleMomentum:
    """Return which momentum of the optimizer is cycled.

    Raises:
        ValueError: It has none.
    """
    name = type(optimizer).__name__
    if kind == "deepspeed" and "betas" not in optimizer.defaults:
        warnings.warn(
            f"`cycle_momentum='deepspeed'` cycles `betas`, which `{name}` does not have: its momentum stays as it is.",
            stacklevel=4,
        )
        return False
    if kind is True and any("betas" not in group and "momentum" not in group for group in optimizer.param_groups):
        raise ValueError(
            f"`cycle_momentum=True` cycles `betas[0]` or `momentum`, and `{name}` has neither. Use"
            " `cycle_momentum=False`."
        )
    return kind


def _give_initial_rates(optimizer: Optimizer, last_batch_iteration: int) -> None:
    """Let a schedule that does not read the optimizer's own rates start in the middle: PyTorch asks for them."""
    if last_batch_iteration > -1:
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])


def _require_initial_rates(optimizer: Optimizer, last_batch_iteration: int) -> None:
    if last_batch_iteration > -1 and any("initial_lr" not in group for group in optimizer.param_groups):
        raise ValueError(
            f"`last_batch_iteration={last_batch_iteration}` continues a schedule whose highest rate is the optimizer's"
            " own, and `initial_lr`, which keeps it, is missing in a parameter group. Load the state of the optimizer"
            " first, or set `initial_lr` in its groups."
        )


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"`{name}={value!r}` must be a whole number of steps, 1 or more.")
    return value


def _warmup_steps(value: int) -> int:
    """Return the steps of a warm-up, at least two: the logarithm of one is zero."""
    return max(2, _positive("warmup_num_steps", value))


def _count(name: str, value: int | None, default: int) -> int:
    if value is not None and value < 0:
        raise ValueError(f"`{name}={value!r}` must be a whole number, 0 or more.")
    return default if value is None else value


def _rate(name: str, value: float) -> float:
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"`{name}={value!r}` must be a finite number, 0 or more.")
    return float(value)


def _ratio(name: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise ValueError(f"`{name}={value!r}` must be a number from 0 to 1.")
    return float(value)


def _number(rate: float | Tensor) -> float:
    return float(rate)


def _unknown_total(schedule: object) -> ValueError:
    return ValueError(
        f"`total_num_steps='auto'` of `{type(schedule).__name__}` has not been filled: `ZeroStrategy` does so when a"
        " Trainer fits. Elsewhere say the number, for example `trainer.estimated_stepping_batches`."
    )
