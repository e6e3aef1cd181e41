"""Loaders that give the ranks different numbers of batches: evaluated as under DDP, refused in training.

Pipeline stages and ranks with divided experts compute every batch together: there they are refused in evaluation too.

Note [Who has no batch serves]
    At stage 3 a forward needs all ranks. So where the numbers of batches may differ, each rank tells the others before
    every batch that it has one. A rank that has come to the end of a loader takes part in the steps of the others, with
    empty steps of its own, until nobody has a batch. Then they reduce the logged values. All ranks end all loaders, one
    after the other: a rank for which a loader is empty ends it like the others, though Lightning shows it nothing of
    it. Loaders of one known length need none of this: lists, and loaders of PyTorch with its own samplers. Lightning
    skips an evaluation on a rank whose loaders are all of length 0; here it is skipped if they are so on every rank.

    A step that fetches its batches itself (`dataloader_iter`) may find none, behind having told that it has one: then
    it is an empty step.

Note [A last batch that steps]
    Lightning steps behind the last batch of a rank, also where micro-batches are missing, and the step would wait for
    ranks that go on accumulating. So the ranks agree on such a step: in front of the batch, or behind its backward
    where the others reduce in each of theirs. A rank that has more batches comes to the agreement on signals instead,
    and both are told at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import lightning.pytorch as pl
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.prediction_loop import _PredictionLoop
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_zero.comm.agreement import digest_of
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.errors import PipelineError

__all__ = ["EvenEvaluation", "ExpertEvaluation", "UnevenEvaluation", "agree_on_last_step", "skip_together"]

T = TypeVar("T")

_LARGEST = 2**32 - 1  # number in an agreement
_HAD_ONE, _HAD_NONE, _HAS_ONE = range(3)  # batches of a loader; the highest of all ranks counts


def agree_on_last_step(engine: ZeroEngine, trainer: pl.Trainer) -> None:
    """Require all ranks to step behind this training batch, if it is the last and micro-batches are missing.

    Collective then: all ranks.

    Raises:
        CollectiveError: Another rank has more batches.
    """
    batches = trainer.fit_loop.epoch_loop
    if not batches._accumulated_batches_reached() and batches._num_ready_batches_reached():
        number = batches.batch_progress.current.ready
        engine.internals.world_communicator.any_is(
            False, f"agreement on a step of fewer micro-batches (batch {number} is the last)"
        )


class _SkipsTogether:
    """Says of a loop that it is skipped if it is skipped on every rank."""

    is_skipped_everywhere = True  # since its data was set up

    @property
    def skip(self) -> bool:
        """Whether no rank has a batch."""
        return self.is_skipped_everywhere


class _TogetherEvaluated(_SkipsTogether, _EvaluationLoop):
    """A loop of Lightning's that all ranks skip or none."""


class _TogetherPredicted(_SkipsTogether, _PredictionLoop):
    """A loop of Lightning's that all ranks skip or none."""


_TOGETHER: dict[type, type] = {_EvaluationLoop: _TogetherEvaluated, _PredictionLoop: _TogetherPredicted}


def skip_together(engine: ZeroEngine, trainer: pl.Trainer) -> None:
    """Let the loop that evaluates in this run be skipped only if no rank has a batch. No collective."""
    loop = _loop_of(trainer)
    loop.__class__ = _TOGETHER.get(type(loop), type(loop))
    if isinstance(loop, _SkipsTogether):
        vars(loop)["setup_data"] = partial(_set_up_data, loop, engine)


def _set_up_data(loop: Any, engine: ZeroEngine) -> None:
    """Set up the loaders of a loop and ask whether some rank has a batch. Collective: all ranks."""
    type(loop).setup_data(loop)
    loop.is_skipped_everywhere = not engine.internals.world_communicator.any_is(
        sum(loop.max_batches) > 0, "agreement on empty loaders"
    )


def _loop_of(trainer: pl.Trainer) -> Any:
    return trainer.predict_loop if trainer.state.fn == TrainerFn.PREDICTING else trainer._evaluation_loop


class EvenEvaluation:
    """Evaluation in a pipeline, whose stages need each other in every batch: all ranks have as many batches.

    Args:
        engine: Whose ranks.
        trainer: That evaluates.
        step: Name of the method of the module that evaluates a batch.
    """

    _error: type[Exception] = PipelineError
    _remedy = (
        "The stages of a pipeline compute every batch together: give all ranks as many batches, and the stages of a"
        " copy of the model the same ones."
    )

    def __init__(self, engine: ZeroEngine, trainer: pl.Trainer, step: str) -> None:
        self._everyone = engine.internals.world_communicator
        self._step = step
        self._loop = _loop_of(trainer)
        self._is_unknown = _is_unknown(self._loop)  # on this rank, then on any

    def begin(self) -> None:
        """Compare the lengths of the loaders. Collective: all ranks.

        Raises:
            PipelineError, ValueError: They differ.
        """
        lengths = list(self._loop.max_batches)
        own = [self._is_unknown, digest_of({"batches": str(lengths)}) & _LARGEST]
        is_unknown, most = self._everyone.agree_on(own, f"comparison of lengths in `{self._step}`")
        self._is_unknown = bool(is_unknown)
        if not self._is_unknown and self._everyone.any_is(own[1] != most, "comparison of lengths"):
            found = self._everyone.gather_objects(lengths, "lengths of loaders")
            listed = ", ".join(f"rank {rank} has {one}" for rank, one in enumerate(found))
            raise self._error(
                f"The loaders of `{self._step}` have different numbers of batches: {listed}. {self._remedy}"
            )
        vars(self._loop).pop("on_run_end", None)  # of an evaluation that an error has ended
        if self._is_unknown:
            go_on = partial(type(self._loop).on_run_end, self._loop)  # an evaluation with an error has left its own
            vars(self._loop)["on_run_end"] = partial(self._around_end, go_on)

    def announce(self) -> None:
        """Tell that this rank has a batch. Collective: all ranks, if a length is not known."""
        if self._is_unknown:
            self._everyone.any_is(True, f"agreement on a batch of `{self._step}`, which a rank has")

    def _around_end(self, go_on: Callable[[], T]) -> T:
        vars(self._loop).pop("on_run_end", None)
        self._everyone.any_is(True, f"agreement on the end of the batches of `{self._step}`")
        return go_on()


class ExpertEvaluation(EvenEvaluation):
    """Evaluation with divided experts, which get tokens of all ranks in every batch."""

    _error = ValueError
    _remedy = (
        "With `expert_parallel` all ranks compute every batch together, because they exchange tokens: give all ranks as"
        " many batches."
    )


def _is_unknown(loop: Any) -> bool:
    """Say whether the number of batches of a loop that starts may be found at its end only."""
    return any(map(math.isinf, loop.max_batches)) or not all(map(_has_exact_length, loop._combined_loader.flattened))


def _has_exact_length(loader: Any) -> bool:
    """Say whether the length of a loader is its number of batches: own samplers may give an estimate."""
    if type(loader) in (list, tuple):
        return True
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
        return False
    batches = getattr(loader.batch_sampler, "_batch_sampler", loader.batch_sampler)  # Lightning's, in a prediction
    if batches is not None and type(batches) is not BatchSampler:
        return False
    sampler = loader.sampler if batches is None else batches.sampler
    return type(sampler).__module__.startswith(("torch.utils.data.", "lightning."))


class UnevenEvaluation:
    """Evaluation with different numbers of batches per rank: ranks without a batch serve the parameters of the others.

    Args:
        engine: Whose ranks.
        trainer: That evaluates.
        step: Name of the method of the module that evaluates a batch.
    """

    def __init__(self, engine: ZeroEngine, trainer: pl.Trainer, step: str) -> None:
        self._engine = engine
        self._everyone = engine.internals.world_communicator
        self._step = step
        self._loop = _loop_of(trainer)
        self._may_differ = False
        self._used: set[int] = set()  # loaders of which this rank had a batch
        self._last = 0  # loader of its last batch
        self._num_ended = 0  # loaders of which no rank has a batch any more

    def begin(self) -> None:
        """Ask whether ranks may have different numbers of batches in the loop that starts. Collective: all ranks."""
        loop = self._loop
        for name, around in (
            ("_evaluation_step", self._around_batch),
            ("_predict_step", self._around_batch),
            ("_store_dataloader_outputs", self._around_store),
            ("on_run_end", self._around_end),
        ):
            if hasattr(loop, name):
                vars(loop)[name] = partial(around, partial(getattr(type(loop), name), loop))
        digest = digest_of({"batches": str(loop.max_batches)}) & _LARGEST
        numbers = [_LARGEST, _LARGEST] if _is_unknown(loop) else [digest, _LARGEST - digest]
        most, rest = self._everyone.agree_on(numbers, "comparison of lengths")
        self._may_differ = most != _LARGEST - rest

    def announce(self) -> None:
        """Tell that this rank has a batch. Collective: all ranks."""
        if self._may_differ:
            self._everyone.agree_on([_HAS_ONE, 0], "agreement on batches")

    # -- Around the methods of the loop ----------------------------------------------------------------------------

    def _around_batch(self, go_on: Callable[..., None], batch: Any, batch_idx: int, loader: int, *args: Any) -> None:
        self._end_loaders(loader)
        self._used.add(loader)
        self._last = loader
        go_on(batch, batch_idx, loader, *args)

    def _around_store(self, go_on: Callable[[], None]) -> None:
        self._end_loaders(1 + self._last)
        go_on()

    def _around_end(self, go_on: Callable[[], T]) -> T:
        self._end_loaders(self._loop.num_dataloaders)
        return go_on()

    # -- The end of a loader ---------------------------------------------------------------------------------------

    def _end_loaders(self, count: int) -> None:
        """Serve the others until nobody has a batch of the first ``count`` loaders. Collective: all ranks."""
        while self._may_differ and self._num_ended < count:
            self._end_loader(self._num_ended)
            self._num_ended += 1

    def _end_loader(self, loader: int) -> None:
        logged = self._reduced_values() if loader in self._used else []
        own = [_HAD_ONE if loader in self._used else _HAD_NONE, bool(logged)]
        while True:
            most, logs = self._everyone.agree_on(own, "agreement on batches (at the end of a loader)")
            if most != _HAS_ONE:
                break
            with self._engine.scope(self._step):
                pass
        if most == _HAD_NONE and logs:
            self._refuse(loader, logged)

    def _reduced_values(self) -> list[str]:
        """Return the names of values logged for the last loader that are reduced over the ranks behind it."""
        results: Any = getattr(self._loop, "_results", None)  # a prediction has none
        return [metric.meta.name for _, metric in results.valid_items() if _is_reduced(metric)] if results else []

    def _refuse(self, loader: int, logged: list[str]) -> None:
        names = self._everyone.gather_objects(logged, f"names of values that are logged for loader {loader}")
        missing = [rank for rank, of_rank in enumerate(names) if not of_rank]
        some = ", ".join(f"`{name}`" for name in sorted({name for of_rank in names for name in of_rank}))
        raise ValueError(
            f"{some} cannot be reduced over the ranks: ranks {missing} have no batch of loader {loader} of"
            f" `{self._step}`, and so no value. Give every rank a batch of every loader, or log without"
            " `sync_dist=True` (a metric with `sync_on_compute=False`)."
        )


def _is_reduced(metric: Any) -> bool:
    """Whether a logged value takes part in a collective at the end of its loader."""
    if not metric.meta.on_epoch:
        return False
    if metric.is_tensor:
        return bool(metric.meta.sync.should and not metric.meta.sync.rank_zero_only)
    return bool(getattr(metric.value, "sync_on_compute", True))
