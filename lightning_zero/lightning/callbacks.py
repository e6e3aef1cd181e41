"""Callbacks for the strategy."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.checkpoint.export import EXPORTED, DtypeName, Include, dtype_named, export_safetensors
from lightning_zero.checkpoint.paths import remove_path
from lightning_zero.checkpoint.safetensors import parse_size
from lightning_zero.lightning.monitor import Meter, Phases, samples_in, tokens_in
from lightning_zero.lightning.precision import ZeroStep
from lightning_zero.lightning.strategy import ZeroStrategy
from lightning_zero.option_checks import checked_arguments

__all__ = ["ExportSafetensors", "ZeroMonitor"]


class ZeroMonitor(Callback):
    """Log memory, traffic, time and throughput to every logger of the Trainer, each ``log_every_n_steps``.

    Scalars, with the units in their names: ``memory/{parameters,gradients,optimizer,gathered,gathered_peak,other}_GiB``
    on rank 0, on a GPU ``memory/peak_GiB``; ``traffic/<collective>_MiB`` that rank 0 sent per step; ``time/step_s``,
    and of it ``time/wait_s``, for which rank 0 waited for others, and ``time/{data,forward,backward,optimizer}_s``;
    ``throughput/{tokens,samples}_per_s`` over all ranks; ``grad_norm`` and ``loss_scale`` where there are any. In a
    pipeline ``pipeline/busy_s_<stage>`` in seconds per step and ``pipeline/bubble_share``, and no phases. With other
    strategies memory, traffic and waiting are left out.

    Args:
        tokens: Number of tokens in a batch. The default is the number of elements of the batch's first integer tensor
            with two or more dimensions.
        grad_norm: Log the norm of the gradients also where nothing is clipped (one more pass over the gradients).
    """

    @checked_arguments(use={"tokens": "Use a function that returns the number of tokens in a batch, or None."})
    def __init__(self, tokens: Callable[[Any], int] | None = None, grad_norm: bool = False) -> None:
        self.tokens = tokens or tokens_in
        self.grad_norm = grad_norm
        self._meter = Meter(None)
        self._phases: Phases | None = None  # where a batch has one forward, one backward and one step at most
        self._logged_step = 0  # step of the last row
        self._norm: float | None = None  # since the last row, if it was computed for it

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start counting."""
        if not trainer.loggers:
            rank_zero_warn(
                "`ZeroMonitor` has no logger to write to. Use `Trainer(logger=True)` or remove the callback."
            )
        strategy = trainer.strategy
        engine = strategy.engine if isinstance(strategy, ZeroStrategy) else None
        copies = trainer.world_size
        if isinstance(strategy, ZeroStrategy):
            copies = strategy.distributed_sampler_kwargs["num_replicas"]
        self._meter = Meter(engine, copies)
        self._meter.start()
        has_pipeline = isinstance(strategy, ZeroStrategy) and strategy.pipeline is not None
        self._phases = Phases(strategy.root_device) if pl_module.automatic_optimization and not has_pipeline else None
        self._begin("data")
        self._logged_step = trainer.global_step

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin the forward."""
        self._begin("forward")

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Begin the backward."""
        self._begin("backward")

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin the step of the optimizer."""
        self._begin("optimizer")

    def _begin(self, phase: str | None) -> None:
        if self._phases is not None:
            self._phases.begin(phase)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Compute the norm of the gradients that the next row shows. Collective: all ranks."""
        strategy = trainer.strategy
        is_next = trainer.global_step + 1 - self._logged_step >= self._interval(trainer)
        if self.grad_norm and is_next and isinstance(strategy, ZeroStrategy):
            self._norm = float(strategy.grad_norm())

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch, and write a row when one is due."""
        self._begin("data")
        self._meter.count(tokens=self.tokens(batch), samples=samples_in(batch))
        steps = trainer.global_step - self._logged_step
        if steps < self._interval(trainer):
            return
        row = {**self._meter.row(steps), **self._norm_and_scale(trainer)}
        if isinstance(trainer.strategy, ZeroStrategy):
            row |= trainer.strategy.pipeline_timings(steps)
        if self._phases is not None:
            row |= {f"time/{phase}_s": seconds / steps for phase, seconds in self._phases.take().items()}
        for logger in trainer.loggers:
            logger.log_metrics(row, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
            logger.save()
        self._logged_step = trainer.global_step

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock: validation is not training."""
        self._meter.pause()
        self._begin(None)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let the clock go on."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._meter.resume()
            self._begin("data")

    def _norm_and_scale(self, trainer: pl.Trainer) -> dict[str, float]:
        plugin = trainer.precision_plugin
        row: dict[str, float] = {}
        norm, self._norm = self._norm, None
        if isinstance(plugin, ZeroStep):
            if norm is None and plugin.grad_norm is not None:
                norm = float(plugin.grad_norm)
            if plugin.scaler is not None:
                row |= {"loss_scale": plugin.scaler.scale, "skipped_steps": float(plugin.scaler.skipped)}
        return row if norm is None else {**row, "grad_norm": norm}

    @staticmethod
    def _interval(trainer: pl.Trainer) -> int:
        return max(int(trainer.log_every_n_steps), 1)  # type: ignore[attr-defined]


class ExportSafetensors(Callback):
    """Write safetensors files beside every checkpoint, in the manner of Hugging Face; see ``export_safetensors``.

    The folder has the name of the checkpoint: beside ``epoch=3.ckpt`` it is ``epoch=3-safetensors``. It is removed with
    the checkpoint, so ``ModelCheckpoint`` decides which ones are made and kept. Files that others put into it stay.
    Every rank writes its own bytes.

    Args:
        dtype: In which floating-point weights are written; by default that of the values that are stepped.
        max_shard_size: Most bytes of a file.
        include: ``"trained"``, patterns of names, or a function of the name. The default is everything.
        prefix: Write only weights whose names start with it, without it: ``"model."`` for ``self.model`` in the
            ``LightningModule``.
    """

    @checked_arguments(use={"include": "Use 'trained', a list of patterns of names, a function of the name, or None."})
    def __init__(
        self,
        dtype: DtypeName | None = None,
        max_shard_size: str = "5GB",
        include: Include | None = None,
        prefix: str = "",
    ) -> None:
        dtype_named(dtype)
        parse_size(max_shard_size)
        self.dtype = dtype
        self.max_shard_size = max_shard_size
        self.include = include
        self.prefix = prefix

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Follow the strategy's checkpoints, also those that are saved after the run."""
        strategy = trainer.strategy
        if not isinstance(strategy, ZeroStrategy):
            raise ValueError(
                f"`ExportSafetensors` needs `ZeroStrategy`, and the strategy is `{type(strategy).__name__}`. Use"
                " `python -m lightning_zero consolidate` on its checkpoints."
            )
        if self not in strategy.followers:
            strategy.followers.append(self)

    def checkpoint_saved(self, module: nn.Module, filepath: _PATH) -> None:
        """Export the weights. Collective: all ranks."""
        export_safetensors(
            module,
            _folder_of(filepath),
            dtype=self.dtype,
            max_shard_size=self.max_shard_size,
            include=self.include,
            prefix=self.prefix,
            overwrite=True,
        )

    def checkpoint_removed(self, filepath: _PATH) -> None:
        """Remove the export."""
        if _folder_of(filepath).exists():
            remove_path(_folder_of(filepath), EXPORTED)


def _folder_of(filepath: _PATH) -> Path:
    return Path(os.fspath(filepath).removesuffix(".ckpt") + "-safetensors")
