"""Callbacks of Lightning that count or write the samples of every rank, where several ranks have the same ones."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BasePredictionWriter, ThroughputMonitor
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn

__all__ = ["count_samples_once"]


def count_samples_once(trainer: pl.Trainer) -> None:
    """Let throughputs be those of the data ranks; warn of predictions that several ranks write. No collective.

    Args:
        trainer: Whose callbacks are set up.
    """
    strategy: Any = trainer.strategy
    ranks = strategy.distributed_sampler_kwargs["num_replicas"]
    same = trainer.world_size // ranks  # ranks with the same samples, which compute their operations together
    if same == 1:
        return
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ThroughputMonitor):
            for throughput in callback._throughputs.values():
                throughput.world_size = ranks
                throughput.available_flops = callback.available_flops and callback.available_flops * same
        elif isinstance(callback, BasePredictionWriter) and trainer.state.fn == TrainerFn.PREDICTING:
            size = 1 if strategy.tensor_parallel is None else strategy.tensor_parallel.size
            rank_zero_warn(
                f"`{type(callback).__name__}` writes on all {trainer.world_size} ranks, and with `tensor_parallel` or"
                f" `pipeline` {same} of them have the same predictions each, so every sample is written {same} times."
                " Name files by `trainer.strategy.distributed_sampler_kwargs['rank']`, and write them on the first of"
                " such ranks: if `trainer.global_rank =="
                f" {size} * trainer.strategy.distributed_sampler_kwargs['rank']`."
            )
