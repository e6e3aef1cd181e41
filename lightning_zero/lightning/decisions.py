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
from lightning_zero.lightning.tensor_training import TensorTraining

__all__ = ["decide_alone", "decide_together", "require_all_without_batch"]

_PATIENCE_S = 600.0  # with ranks that may leave out the same step later; a shorter `timeout` of the strategy counts


def decide_together(trainer: Any, tensor: TensorTraining | None) -> None:
    """Bind the loops of a fit so that all ranks decide alike. No collective.

    Args:
        trainer: About to fit, and to make the optimizers, which may ask for the number of steps.
        tensor: The tensor parallelism of its strategy.
    """
    fit, batches = trainer.fit_loop, trainer.fit_loop.epoch_loop
    vars(fit)["setup_data"] = partial(_set_up_data, fit, None, tensor)
    vars(batches)["advance"] = partial(_advance, batches)
    if trainer._val_check_time_interval is not None:
        vars(batches)["_should_check_val_fx"] = partial(_should_validate, batches)


def decide_alone(trainer: Any) -> None:
    """Take the bindings back at the end of a run: `setup` of the next one may set up data. No collective."""
    fit, batches = trainer.fit_loop, trainer.fit_loop.epoch_loop
    vars(fit).pop("setup_data", None)
    for name in ("advance", "_should_check_val_fx"):
        vars(batches).pop(name, None)


def require_all_without_batch(trainer: pl.Trainer, *, waits_within_step: bool) -> None:
    """Return when all ranks have got None for this training batch, or if nobody waits for a rank without it.

    Args:
        trainer: That trains.
        waits_within_step: Whether ranks wait for one another in each micro-batch; else when a step begins (rank 0's
            module buffers) and when it ends.

    Raises:
        ValueError: Some have not.
        CollectiveError: Another rank has failed.
    """
    progress, every = trainer.fit_loop.epoch_loop.batch_progress, trainer.accumulate_grad_batches
    number = progress.current.ready  # of the batches before, in this epoch
    is_within_step = number % every > 0 and (number + 1) % every > 0
    is_last = progress.is_last_batch or number + 1 >= trainer.num_training_batches
    if is_within_step and not is_last and not waits_within_step:
        return
    _require_all(
        trainer,
        f"none/{progress.total.ready}",
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
                batches.trainer,
                f"end/{progress.ready}",
                "ended the epoch, by -1 from `on_train_batch_start`,",
                "Decide on all ranks alike, for example by"
                " `self.trainer.strategy.reduce_boolean_decision(is_over, all=False)`.",
            )
        raise


def _require_all(trainer: Any, place: str, deed: str, remedy: str) -> None:
    peers = Peers.of_world()
    patience_s = min(_PATIENCE_S, trainer.strategy.timeout.total_seconds())
    try:
        missing = peers.await_all(place, patience_s)
    except PeersError as error:
        raise CollectiveError(str(error)) from error
    if missing:
        raise ValueError(
            f"Rank {peers.rank} {deed} and within {patience_s:g} s rank(s) {missing} did not: they would wait in the"
            f" step for this rank. {remedy}"
        )


def _set_up_data(fit: Any, known: Any, tensor: TensorTraining | None) -> None:
    """Set up the training data. Collective where the loader is another one than ``known``: all ranks.

    A fit that reloads its loaders has another fetcher for each of them.

    Raises:
        ValueError: Some ranks have no batch.
    """
    if tensor is not None and (known is None or fit._should_reload_train_dl):
        tensor.agree_on_random_numbers()  # the program may draw where it makes its loader
    type(fit).setup_data(fit)
    if fit._combined_loader is known:
        return
    vars(fit)["setup_data"] = partial(_set_up_data, fit, fit._combined_loader, tensor)
    if tensor is not None:
        tensor.agree_before_batches(fit)
    everyone, is_empty = _everyone(fit), fit.max_batches == 0
    some, others = everyone.agree_on([is_empty, not is_empty], "agreement on empty training loaders")
    if some and others:
        lengths = everyone.gather_objects(fit.max_batches, "lengths of training loaders")
        empty = [rank for rank, length in enumerate(lengths) if length == 0]
        raise ValueError(
            f"Rank(s) {empty} have no training batch, and the others would wait for them in the first step. Give every"
            " rank as many batches, for example by a `DistributedSampler`."
        )


def _should_validate(batches: Any, data_fetcher: Any) -> bool:
    """Say whether a validation follows, as rank 0 does: clocks differ. Collective: all ranks."""
    everyone, is_due = _everyone(batches), type(batches)._should_check_val_fx(batches, data_fetcher)
    return everyone.any_is(is_due and everyone.rank == 0, "agreement on a validation that is due by time")


def _everyone(loop: Any) -> Communicator:
    """Return the communicator over all ranks of the engine that trains now: the next fit may have another one."""
    everyone: Communicator = loop.trainer.strategy.engine.internals.world_communicator
    return everyone
