"""Refuse options and callbacks that would not live up to their names, before the first step."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_zero.config import ActivationCheckpointing, Pipeline, StepTime
from lightning_zero.lightning.pipelined_steps import refuse_program
from lightning_zero.lightning.precision import LossScale
from lightning_zero.lightning.step_in_backward import refuse_with_early_steps
from lightning_zero.parallel.pipeline.stages.specs import LayerSpec
from lightning_zero.parallel.tensor.plan import TensorParallel

__all__ = ["refuse_options", "refuse_without_budget"]


class _Options(Protocol):
    """The parts of ``ZeroStrategy`` that are read here."""

    stage: int
    state_dict_type: Literal["sharded", "full"]
    async_save: bool
    pipeline: Pipeline | None
    tensor_parallel: TensorParallel | None
    expert_parallel: int | None
    _layer_sync: Any
    activation_checkpointing: ActivationCheckpointing | None
    loss_scale: LossScale | None
    step: StepTime

    @property
    def world_size(self) -> int: ...

    @property
    def root_device(self) -> torch.device: ...

    @property
    def has_plain_checkpoint_io(self) -> bool: ...

    @property
    def checkpoint_io(self) -> Any: ...

    @property
    def precision_plugin(self) -> Any: ...


def refuse_options(strategy: _Options, trainer: pl.Trainer) -> None:
    """Refuse options that would not live up to their names.

    Raises:
        ValueError: Names the option, and the remedy.
    """
    if strategy.state_dict_type == "sharded" and not strategy.has_plain_checkpoint_io:
        raise ValueError(
            f"`{type(strategy.checkpoint_io).__name__}` writes single files, and `state_dict_type='sharded'` writes a"
            " directory from all ranks. Use `ZeroStrategy(state_dict_type='full')`, or leave the plugin out."
        )
    _refuse_what_needs_whole_models(strategy, trainer)
    refuse_without_budget(strategy.activation_checkpointing, strategy.root_device)
    _refuse_async(strategy, trainer)
    _refuse_pipeline(strategy, trainer)
    if trainer.state.fn == TrainerFn.FITTING:
        _refuse_batch_norms_of_all_ranks(strategy, trainer.lightning_module)
    refuse_with_early_steps(strategy, trainer)
    if strategy.loss_scale is not None and strategy.precision_plugin.scaler is None:
        raise ValueError(
            f"`loss_scale` has no effect with precision={strategy.precision_plugin.precision!r}."
            " Use precision='16-mixed' (on a GPU) or '16-true', or leave `loss_scale` out."
        )


def _refuse_what_needs_whole_models(strategy: _Options, trainer: pl.Trainer) -> None:
    if any(isinstance(callback, ModelPruning) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        raise ValueError(
            "`ModelPruning` replaces the parameters of modules while they are trained, and the engine holds the values"
            " of those that it has sharded. Prune the trained model, or use `strategy='ddp'`."
        )
    for logger in trainer.loggers:
        has_every_name = isinstance(logger, DummyLogger)  # of `fast_dev_run`
        logs_graph = not has_every_name and getattr(logger, "_log_graph", False)
        options = {name: getattr(strategy, name) for name in ("tensor_parallel", "expert_parallel", "pipeline")}
        needing = ["stage=3"] * (strategy.stage == 3) + [name for name, value in options.items() if value is not None]
        if needing and strategy.world_size > 1 and logs_graph:
            raise ValueError(
                f"`{type(logger).__name__}(log_graph=True)` runs the model on rank 0 alone, and with `{needing[0]}` a"
                " forward needs all ranks. Leave `log_graph` out, or log the graph of a model on one rank."
            )
    has_parts = strategy.tensor_parallel is not None or strategy.expert_parallel is not None
    if not has_parts or trainer.state.fn != TrainerFn.FITTING:
        return
    if any(isinstance(callback, BackboneFinetuning) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        option = "expert_parallel" if strategy.tensor_parallel is None else "tensor_parallel"
        raise ValueError(
            f"`BackboneFinetuning` compares whole parameters, and with `{option}` a rank has parts of some. Freeze and"
            " thaw by `requires_grad_` in `on_train_epoch_start`, with all parameters in the optimizer from the start."
        )


def _refuse_pipeline(strategy: _Options, trainer: pl.Trainer) -> None:
    if strategy.pipeline is None:
        return
    fitting = trainer.state.fn == TrainerFn.FITTING
    refuse_program(trainer.lightning_module, strategy.pipeline.num_microbatches if fitting else 1)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging, BaseFinetuning)):
            raise ValueError(
                f"`{type(callback).__name__}` reads all parameters on every rank, and a pipeline stage has a part"
                " of them. Remove the callback, or `pipeline`."
            )


def _refuse_batch_norms_of_all_ranks(strategy: _Options, module: pl.LightningModule) -> None:
    if strategy.tensor_parallel is None and strategy.pipeline is None:
        return
    reason = (
        "with `tensor_parallel` several have the same samples, which would count several times"
        if strategy.pipeline is None
        else "with `pipeline` those of other stages do not run the layer"
    )
    for name, child in module.named_modules():
        if isinstance(child, nn.SyncBatchNorm) and child.process_group is None:
            cause = f"`nn.SyncBatchNorm` averages `{name}`"
        elif strategy._layer_sync is not None and isinstance(child, (nn.modules.batchnorm._BatchNorm, LayerSpec)):
            layer = "the batch norms of " if isinstance(child, LayerSpec) else ""
            cause = f"`sync_batchnorm=True` averages {layer}`{name}`"
        else:
            continue
        raise ValueError(
            f"{cause} over all ranks, and {reason}. Use a batch norm of one rank, group or layer normalisation, or"
            " leave one of the two out."
        )


def refuse_without_budget(options: ActivationCheckpointing | None, device: torch.device) -> None:
    """Refuse a choice of the checkpointing policy by the free memory of a device that does not say it.

    Raises:
        ValueError: That is so.
    """
    if options is None or options.policy != "auto" or options.budget_bytes is not None:
        return
    if device.type != "cuda":
        raise ValueError(
            f"`policy='auto'` of `activation_checkpointing` needs `budget_bytes` on `{device}`: free"
            " memory there is shared by all ranks. Say how many bytes the checkpointed modules may keep."
        )


def _refuse_async(strategy: _Options, trainer: pl.Trainer) -> None:
    if not strategy.async_save:
        return
    if not strategy.has_plain_checkpoint_io:
        raise ValueError(
            f"`async_save=True` writes checkpoints itself, and `{type(strategy.checkpoint_io).__name__}` would not be"
            " asked. Leave one of the two out."
        )
    for callback in trainer.checkpoint_callbacks:
        if getattr(callback, "save_last", None) == "link":
            raise ValueError(
                "`save_last='link'` links to a checkpoint that `async_save=True` is still writing: after a crash"
                " the link would lead nowhere. Use `ModelCheckpoint(save_last=True)`."
            )
