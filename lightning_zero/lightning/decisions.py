"""Decisions that each rank takes by itself in the loops of a fit, and that all must take alike.

Note [Steps that a rank leaves out]
    Lightning makes no step of a batch that is None, nor where `on_train_batch_start` returns -1, which ends the epoch.
    If all ranks do so, nobody waits; if some do, the others wait for them in the step. To ask before every batch would
    cost every fit an agreement, so a rank that leaves one out waits in the store of the default group, where it needs
    nobody, until all have come.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl

from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.peers import Peers, PeersError
from lightning_zero.errors import CollectiveError

__all__ = ["decide_together", "require_all_without_batch"]

_PATIENCE_S = 60.0  # with ranks that may leave out the same step a little later


def decide_together(everyone: Communicator, trainer: Any) -> None:
    """Bind the loops of a fit so that all ranks decide alike. No collective.

    Args:
        everyone: Over all ranks.
        trainer: About to fit.
    """
    fit, batches = trainer.fit_loop, trainer.fit_loop.epoch_loop
    vars(fit)["setup_data"] = partial(_set_up_data, fit, everyone)
    vars(batches)["advance"] = partial(_advance, batches)
    vars(batches).pop("_should_check_val_fx", None)
    if trainer._val_check_time_interval is not None:
        vars(batches)["_should_check_val_fx"] = partial(_should_validate, batches, everyone)


def require_all_without_batch(trainer: pl.Trainer) -> None:
    """Return when all ranks have got None for this training batch.

    Raises:
        ValueError: Some have not.
        CollectiveError: Another rank has failed.
    """
    number = trainer.fit_loop.epoch_loop.batch_progress.total.ready
    _require_all(
        f"none/{number}",
        "got None as a training batch, of which Lightning makes no step,",
        "Return a smaller batch from `collate_fn` instead of None, or None from `training_step`, whose rank takes part"
        " in the step and adds nothing.",
    )


def _advance(batches: Any, data_fetcher: Any) -> None:
    started = batches.batch_progress.total.started
    ready = batches.batch_progress.total.ready
    try:
        type(batches).advance(batches, data_fetcher)
    except StopIteration:
        progress = batches.batch_progress.total
        if progress.ready > ready and progress.started == started:  # there was a batch
            _require_all(
                f"end/{progress.ready}",
                "ended the epoch, by -1 from `on_train_batch_start`,",
                "Decide on all ranks alike, for example by"
                " `self.trainer.strategy.reduce_boolean_decision(is_over, all=False)`.",
            )
        raise


def _require_all(place: str, deed: str, remedy: str) -> None:
    peers = Peers.of_world()
    try:
        missing = peers.await_all(place, _PATIENCE_S)
    except PeersError as error:
        raise CollectiveError(str(error)) from error
    if missing:
        raise ValueError(
            f"Rank {peers.rank} {deed} and within {_PATIENCE_S:g} s rank(s) {missing} did not: they would wait in the"
            f" step for this rank. {remedy}"
        )


def _set_up_data(fit: Any, everyone: Communicator) -> None:
    """Set up the training data. Collective where a loader is made: all ranks.

    Raises:
        ValueError: Some ranks have no batch.
    """
    before = fit._combined_loader
    type(fit).setup_data(fit)
    if fit._combined_loader is before:
        return
    is_empty = fit.max_batches == 0
    some, others = everyone.agree_on([is_empty, not is_empty], "agreement on empty training loaders")
    if some and others:
        lengths = everyone.gather_objects(fit.max_batches, "lengths of training loaders")
        empty = [rank for rank, length in enumerate(lengths) if length == 0]
        raise ValueError(
            f"Rank(s) {empty} have no training batch, and the others would wait for them in the first step. Give every"
            " rank as many batches, for example by a `DistributedSampler`."
        )


def _should_validate(batches: Any, everyone: Communicator, data_fetcher: Any) -> bool:
    """Say whether a validation follows, as rank 0 does: clocks differ. Collective: all ranks."""
    is_due = type(batches)._should_check_val_fx(batches, data_fetcher)
    return everyone.any_is(is_due and everyone.rank == 0, "agreement on a validation that is due by time")
