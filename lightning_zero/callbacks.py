"""Callbacks for the strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_zero.monitor import Meter, samples_in, tokens_in
from lightning_zero.precision import ZeroStep
from lightning_zero.strategy import ZeroStrategy

__all__ = ["ZeroMonitor"]


class ZeroMonitor(Callback):
    """Log what a run costs to every logger of the Trainer, each ``log_every_n_steps``.

    Scalars: ``memory/{parameters,gradients,optimizer,gathered,gathered_peak,other}`` in bytes on rank 0,
    ``traffic/<collective>`` in bytes that rank 0 sent per step, ``time/wait_s`` in seconds per step that it waited,
    ``throughput/{tokens,samples}_per_s`` over all ranks, and ``grad_norm`` and ``loss_scale`` where there are any. With
    other strategies only the throughput is logged.

    Args:
        tokens: Number of tokens in a batch. The default is the number of elements of the batch's first integer tensor
            with two or more dimensions.
        grad_norm: Log the norm of the gradients also where nothing is clipped (one more pass over the gradients).
    """

    def __init__(self, tokens: Callable[[Any], int] | None = None, grad_norm: bool = False) -> None:
        self.tokens = tokens or tokens_in
        self.grad_norm = grad_norm
        self._meter = Meter(None)
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
        self._meter = Meter(engine, trainer.world_size)
        self._meter.start()
        self._logged_step = trainer.global_step

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
        self._meter.count(tokens=self.tokens(batch), samples=samples_in(batch))
        steps = trainer.global_step - self._logged_step
        if steps < self._interval(trainer):
            return
        row = {**self._meter.row(steps), **self._norm_and_scale(trainer)}
        for logger in trainer.loggers:
            logger.log_metrics(row, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
            logger.save()
        self._logged_step = trainer.global_step

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock: validation is not training."""
        self._meter.pause()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let the clock go on."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._meter.resume()

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
