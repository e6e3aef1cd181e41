"""The place of a rank in a run, which must be the same on all ranks when they save; how far its next step has come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl

from lightning_zero.comm.agreement import first_difference
from lightning_zero.comm.peers import Facts
from lightning_zero.engine.engine import ZeroEngine

__all__ = ["open_microbatches", "place_of", "why_not_to_save"]

_HALFWAY = "inside a step"


def place_of(trainer: pl.Trainer | None, engine: ZeroEngine) -> Facts:
    """Return the counters of loops and optimizers, and the hook: equal on ranks at the same place of a run."""
    steps = engine.internals.checkpoints.progress
    return steps if trainer is None else {**_place_in_loops(trainer), **steps}


def _place_in_loops(trainer: pl.Trainer) -> Facts:
    fit = trainer.fit_loop
    module, stage = trainer.lightning_module, trainer.state.stage
    hook = "" if module is None else module._current_fx_name or ""
    place = {
        "epoch": _counts(fit.epoch_progress.current),
        "batch": _counts(fit.epoch_loop.batch_progress.total),
        "global step": str(trainer.global_step),
        "stage": "none" if stage is None else stage.value,
        "hook": hook or "none",
    }
    # Ranks may have different numbers of batches to evaluate, and meet behind the last.
    if stage is not None and stage.evaluating and ("batch" in hook or "step" in hook):
        place["batch of the evaluation"] = str(fit.epoch_loop.val_loop.batch_progress.current.ready)
    return place


def _counts(tracker: Any) -> str:
    return f"{tracker.ready} ({tracker.started} started, {tracker.processed} processed, {tracker.completed} completed)"


def open_microbatches(trainer: pl.Trainer) -> int:
    """Return how many micro-batches have added to the gradients of a step that is not made yet.

    The last batch of an epoch always makes one.
    """
    batches = trainer.fit_loop.epoch_loop
    count: Any = batches.batch_progress.current
    is_at_end = count.processed == count.ready and batches._num_ready_batches_reached()
    return 0 if is_at_end else count.processed % trainer.accumulate_grad_batches


def why_not_to_save(places: Mapping[int, Facts]) -> str:
    """Say why ranks at these places cannot save one state, or return an empty string."""
    halfway = [rank for rank, place in places.items() if _HALFWAY in place.values()]
    difference = first_difference(places)
    if difference != "none":
        each = "; ".join(f"rank {rank}: {_in_words(place)}" for rank, place in _some(places).items())
        return f"the ranks are at different places: {difference}. {each}"
    if halfway:
        return f"a step of an optimizer was interrupted, or has not ended: {_in_words(places[halfway[0]])}"
    return ""


def _in_words(place: Facts) -> str:
    return ", ".join(f"{name} {value}" for name, value in place.items())


def _some(places: Mapping[int, Facts]) -> dict[int, Facts]:
    """Return one rank of every place, at most four."""
    found = {_in_words(places[rank]): rank for rank in sorted(places, reverse=True)}
    return {rank: places[rank] for rank in sorted(found.values())[:4]}
