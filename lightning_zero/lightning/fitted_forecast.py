"""Forecasts for strategies with tensor or expert parallelism: each setting is a simulated fit.

The strategy knows how a module is cut and which calls the ranks of a group make, and the Trainer calls it. So their
bytes are those of a simulation of rank 0.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, Protocol

import lightning.pytorch as pl
from torch import Tensor, nn

from lightning_zero.forecast.live_bytes import Moment
from lightning_zero.forecast.rehearsal import Rehearsed
from lightning_zero.forecast.settings import Setting
from lightning_zero.forecast.simulation import Simulation
from lightning_zero.lightning.forecast_options import Optimizers, new_module
from lightning_zero.lightning.simulate import simulate_copy
from lightning_zero.lightning.strategy import ZeroStrategy

__all__ = ["rehearse_fit", "require_node", "sent_bytes", "with_setting"]


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
    memory: int | None,
    plans: list[Any],
) -> Rehearsed:
    """Return the bytes of rank 0 in a fit with one setting.

    ``plans`` are those of ``simulate_copy``, other arguments those of ``estimate_memory``.

    Raises:
        ValueError: A scope is a node, and nobody has said how many ranks it has; the module is no ``LightningModule``,
            or its fit fails.
    """
    require_node(setting, ranks_per_node)
    (found,) = simulate_copy(
        partial(_made, program.module, program.loss),
        with_setting(strategy, setting),
        world_size=world_size,
        batch=program.batch,
        optimizer=program.optimizer,
        precision=precision,
        accelerator=accelerator,
        ranks_per_node=ranks_per_node,
        accumulate_grad_batches=program.microbatches,
        gradient_clip_val=1.0 if program.clips else None,
        device_memory=memory,
        plans=plans,
    ).values()
    sent, across = sent_bytes(found, ranks_per_node)
    return Rehearsed(
        device=dict(found.device),
        host=dict(found.host),
        disk=dict(found.disk),
        windows=found.host["windows"],
        host_activations=found.host["activations"],
        peak=Moment(found.peak_bytes, found.phase, found.module, "", ()),
        at_peak=dict(found.at_peak),
        sent=sent,
        sent_across=across,
    )


def require_node(setting: Setting, ranks_per_node: int | None) -> None:
    """Refuse a scope of a node if nobody has said how many ranks a node has.

    Raises:
        ValueError: That is so.
    """
    if setting.sharding.uses_launcher and ranks_per_node is None:
        raise ValueError(f"`{setting.sharding}`: say how many ranks a node has, with `ranks_per_node=8`.")


def with_setting(strategy: ZeroStrategy, setting: Setting) -> ZeroStrategy:
    """Return a strategy with the sharding, offloading and checkpointing of a setting, and its other options.

    Accumulation is that of the forecast, not of a configuration of DeepSpeed.
    """
    found = copy.copy(strategy)
    found.sharding, found.stage = setting.sharding, setting.sharding.stage
    found.offload, found.activation_checkpointing = setting.offload, setting.activation_checkpointing
    if found.imported is not None:
        found.imported = found.imported.without_batch()
    return found


def _made(
    module: nn.Module | Callable[[], nn.Module], loss: Callable[[nn.Module, Any], Tensor] | None
) -> pl.LightningModule:
    """Return a module that may be changed, with another loss if there is one."""
    made = new_module(module)
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


def sent_bytes(simulation: Simulation, ranks_per_node: int | None) -> tuple[int, int]:
    """Return the bytes that a rank sends in a step, and those of them in calls between nodes, if these are known."""
    calls = [one.call for one in simulation.calls]
    node = ranks_per_node or simulation.world_size
    across = (one for one in calls if len({rank // node for rank in one.ranks}) > 1)
    return sum(one.sent_bytes for one in calls), sum(one.sent_bytes for one in across)
