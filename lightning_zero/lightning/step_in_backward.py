"""Options of a Trainer that steps in the backward exclude (ADR 0027)."""

from __future__ import annotations

from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_zero.config import Pipeline, StepTime

__all__ = ["refuse_with_early_steps"]


class _Options(Protocol):
    """The parts of ``ZeroStrategy`` that are read here."""

    pipeline: Pipeline | None
    step: StepTime

    @property
    def precision_plugin(self) -> Any: ...


def refuse_with_early_steps(strategy: _Options, trainer: pl.Trainer) -> None:
    """Refuse options and hooks that need all gradients before a step, where units are stepped in the backward.

    Raises:
        ValueError: Names the option.
    """
    if strategy.step != "backward" or trainer.state.fn != TrainerFn.FITTING:
        return
    module, callbacks = trainer.lightning_module, trainer.callbacks  # type: ignore[attr-defined]
    hooks = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
    overridden = [name for name in hooks if is_overridden(name, module)]
    found = {
        f"`pipeline={strategy.pipeline!r}`": strategy.pipeline is not None,
        f"`gradient_clip_val={trainer.gradient_clip_val!r}`": bool(trainer.gradient_clip_val),
        f"`accumulate_grad_batches={trainer.accumulate_grad_batches!r}`": trainer.accumulate_grad_batches != 1,
        "`GradientAccumulationScheduler`": any(
            isinstance(one, GradientAccumulationScheduler) and one.going_to_accumulate_grad_batches()
            for one in callbacks
        ),
        "`StochasticWeightAveraging` of a module with batch norms, which accumulates over an epoch without backwards": (
            trainer.max_epochs != -1
            and any(
                isinstance(one, StochasticWeightAveraging) and one.pl_module_contains_batch_norm(module)
                for one in callbacks
            )
        ),
        f"precision={strategy.precision_plugin.precision!r}": strategy.precision_plugin.scaler is not None,
        f"an overridden `{', '.join(overridden)}`": bool(overridden),
    }
    for option, is_there in found.items():
        if is_there:
            raise ValueError(
                f"`step='backward'` does not work with {option}: a unit's gradients are stepped and freed in the"
                " backward. Leave one of the two out."
            )
