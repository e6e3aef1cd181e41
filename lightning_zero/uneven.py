"""Evaluation with loaders that give the ranks different numbers of batches, as under DDP.

Note [Who has no batch serves]
    At stage 3 a forward needs all ranks. So where the numbers of batches may differ, each rank tells the others before
    every batch that it has one. A rank that has come to the end of a loader takes part in the steps of the others, with
    empty steps of its own, until nobody has a batch. Then they reduce what was logged. Loaders of one known length need
    none of this.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import IterableDataset

from lightning_zero.engine.agreement import digest_of
from lightning_zero.engine.engine import ZeroEngine

__all__ = ["UnevenEvaluation"]


class UnevenEvaluation:
    """Evaluation with different numbers of batches per rank: ranks without a batch serve the parameters of the others.

    Args:
        engine: Whose ranks.
    """

    def __init__(self, engine: ZeroEngine) -> None:
        self._engine = engine
        self._step: str | None = None  # of the running loop, if the ranks may have different numbers of batches

    def begin(self, trainer: pl.Trainer, step: str) -> None:
        """Ask whether the ranks may have different numbers of batches in the loop that starts. Collective: all ranks.

        Args:
            trainer: That evaluates.
            step: Name of the method of the module that evaluates a batch.
        """
        predicts = trainer.state.fn == TrainerFn.PREDICTING
        loop: Any = trainer.predict_loop if predicts else trainer._evaluation_loop
        last = "on_run_end" if predicts else "_store_dataloader_outputs"  # called behind the batches of a loader
        vars(loop)[last] = partial(self._end_loader, partial(getattr(type(loop), last), loop))
        self._step = step if self._may_differ(loop) else None

    def _may_differ(self, loop: Any) -> bool:
        is_unknown = any(map(math.isinf, loop.max_batches)) or any(
            isinstance(getattr(loader, "dataset", None), IterableDataset) for loader in loop._combined_loader.flattened
        )
        digest = digest_of({"batches": str(loop.max_batches)})
        most, least, unknown = self._agree([digest, ~digest, is_unknown], "comparison of lengths")
        return bool(unknown) or most != ~least

    def announce(self) -> None:
        """Tell that this rank has a batch. Collective: all ranks."""
        if self._step is not None:
            self._agree([1], "agreement on batches")

    def _end_loader(self, go_on: Callable[[], Any]) -> Any:
        while self._step is not None and self._agree([0], "agreement on batches (this rank has none left)")[0]:
            with self._engine.scope(self._step):
                pass
        return go_on()

    def _agree(self, values: list[int], what: str) -> list[int]:
        with torch.inference_mode(False):
            agreed: list[int] = self._engine.everyone.agree(torch.tensor(values, dtype=torch.int64), what).tolist()
        return agreed
