"""Forecasts for strategies with tensor or expert parallelism: each setting is a simulated fit.

The strategy knows how a module is cut and which calls the ranks of a group make, and the Trainer calls it. So their
bytes are those of ``simulate_step``, of rank 0.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any, Protocol

import lightning.pytorch as pl
from torch import Tensor, nn

from lightning_zero.comm.traffic import CollectiveCall
from lightning_zero.forecast.live_bytes import Moment
from lightning_zero.forecast.rehearsal import Rehearsed
from lightning_zero.forecast.settings import Setting
from lightning_zero.lightning.forecast_options import Optimizers, copied_module
from lightning_zero.lightning.simulate import simulate_step
from lightning_zero.lightning.strategy import ZeroStrategy

__all__ = ["rehearse_fit"]


class Program(Protocol):
    """The module of a program, and how it is trained; see ``estimate_memory``."""

    @property
    def module(self) -> nn.Module | Callable[[], nn.Module]: ...
    @property
    def batch(self) -> Any: ...
    @property
    def optimizer(self) -> Optimizers | None: ...
    @property
    def loss(self) -> Callable[[nn.Module, Any], Tensor] | None: ...
    @property
    def microbatches(self) -> int: ...
    @property
    def clips(self) -> bool: ...


def rehearse_fit(
    setting: Setting,
    program: Program,
    *,
    strategy: ZeroStrategy,
    world_size: int,
    precision: str,
    accelerator: str,
    ranks_per_node: int | None,
) -> Rehearsed:
    """Return the bytes of rank 0 in a fit with one setting. Other arguments are those of ``estimate_memory``.

    Raises:
        ValueError: A scope is a node, and nobody has said how many ranks it has; the module is no ``LightningModule``,
            or its fit fails.
    """
    if setting.sharding.uses_launcher and ranks_per_node is None:
        raise ValueError(f"`{setting.sharding}`: say how many ranks a node has, with `ranks_per_node=8`.")
    found = simulate_step(
        partial(_made, program.module, program.loss),
        _with_setting(strategy, setting),
        world_size=world_size,
        batch=program.batch,
        optimizer=program.optimizer,
        precision=precision,
        accelerator=accelerator,
        ranks_per_node=ranks_per_node,
        accumulate_grad_batches=program.microbatches,
        gradient_clip_val=1.0 if program.clips else None,
    )
    calls = [one.call for one in found.calls]
    return Rehearsed(
        device=dict(found.device),
        host=dict(found.host),
        disk=dict.fromkeys(found.host, 0),
        windows=0,
        peak=Moment(found.peak_bytes, found.phase, found.module, "", ()),
        at_peak=dict(found.at_peak),
        sent=sum(one.sent_bytes for one in calls),
        sent_across=0 if ranks_per_node is None else _across(calls, ranks_per_node),
    )


def _with_setting(strategy: ZeroStrategy, setting: Setting) -> ZeroStrategy:
    found = copy.copy(strategy)
    found.sharding, found.stage = setting.sharding, setting.sharding.stage
    found.offload, found.activation_checkpointing = setting.offload, setting.activation_checkpointing
    return found


def _made(
    module: nn.Module | Callable[[], nn.Module], loss: Callable[[nn.Module, Any], Tensor] | None
) -> pl.LightningModule:
    """Return a module that may be changed, with another loss if there is one."""
    made = copied_module(module) if isinstance(module, nn.Module) else module()
    made = getattr(made, "_orig_mod", made)  # of `torch.compile`
    if not isinstance(made, pl.LightningModule):
        raise ValueError(
            f"A forecast with `tensor_parallel` or `expert_parallel` fits a `LightningModule`, and"
            f" `{type(made).__name__}` is none. Put it into one."
        )
    if loss is not None:

        def training_step(self: pl.LightningModule, batch: Any, batch_idx: int = 0) -> Tensor:
            return loss(self, batch)

        vars(made)["training_step"] = MethodType(training_step, made)  # a copy's is bound to the copy
    return made


def _across(calls: Sequence[CollectiveCall], ranks_per_node: int) -> int:
    """Return the bytes of calls between ranks of several nodes."""
    return sum(one.sent_bytes for one in calls if len({rank // ranks_per_node for rank in one.ranks}) > 1)
