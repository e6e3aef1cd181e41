"""Rules by which PyTorch's plain optimizers are stepped over flat ranges, by class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_zero_ops import adamw, sgd

__all__ = ["ADAM", "RULES", "StepRule", "adam_options"]


@dataclass(frozen=True, kw_only=True)
class StepRule:
    """The step of one class of optimizers over a flat range.

    Args:
        moments: The keys of its state that the op takes, for a group.
        step: Calls the op: group, number of the step; by keyword parameter, moments and scales, gradient and the op's
            own options.
        counts: The optimizer's state counts the steps.
        launch: Calls Triton's kernel in the same way, if there is one that the engine uses.
        scales: The keys of its state that the op takes behind the moments, of tensors that are shorter.
        make_state: Makes the moments of one parameter, given its state and its segment; None: they lie flat.
    """

    moments: Callable[[Mapping[str, Any]], tuple[str, ...]]
    step: Callable[..., None]
    counts: bool
    launch: Callable[..., None] | None = None
    scales: tuple[str, ...] = ()
    make_state: Callable[[dict[str, Any], Tensor], None] | None = None


def adam_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group of AdamW or Adam under the names of the ops."""
    beta1, beta2 = group["betas"]
    decay, is_decoupled = group["weight_decay"], group["decoupled_weight_decay"]
    return {
        **{"lr": group["lr"], "beta1": beta1, "beta2": beta2, "eps": group["eps"]},
        **{"weight_decay": decay if is_decoupled else 0.0, "l2": 0.0 if is_decoupled else decay},
    }


def _step_adam(
    group: Mapping[str, Any], number: int, *, param: Tensor, moments: list[Tensor], grad: Tensor, **options: Any
) -> None:
    exp_avg, exp_avg_sq = moments
    adamw.pytorch_step_(param, exp_avg, exp_avg_sq, grad=grad, step=number, **adam_options(group), **options)


def _launch_adam(
    group: Mapping[str, Any], number: int, *, param: Tensor, moments: list[Tensor], grad: Tensor, **options: Any
) -> None:
    exp_avg, exp_avg_sq = moments
    adamw.kernel_step_(param, exp_avg, exp_avg_sq, grad=grad, step=number, **adam_options(group), **options)


def _step_sgd(
    group: Mapping[str, Any], number: int, *, param: Tensor, moments: list[Tensor], grad: Tensor, **options: Any
) -> None:
    sgd.pytorch_step_(
        param, moments[0] if moments else None, grad=grad, step=number, lr=group["lr"], momentum=group["momentum"],
        dampening=group["dampening"], weight_decay=group["weight_decay"], nesterov=group["nesterov"], **options,
    )  # fmt: skip


ADAM = StepRule(moments=lambda group: ("exp_avg", "exp_avg_sq"), step=_step_adam, counts=True, launch=_launch_adam)
RULES: dict[type[Optimizer], StepRule] = {
    Adam: ADAM,
    AdamW: ADAM,
    SGD: StepRule(
        moments=lambda group: ("momentum_buffer",) if group["momentum"] else (), step=_step_sgd, counts=False
    ),
}
