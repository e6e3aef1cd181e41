"""Signals: noted where they arrive, and acted on by all ranks together, between two batches and at the end of a fit.

Note [Between two batches]
    A handler runs wherever its rank happens to be, in the middle of a step too. A save there needs ranks that are in
    other places, or wait for this one. So a handler takes a note and returns. Lightning asks in front of every training
    batch whether rank 0 has seen SIGTERM; in this place the ranks agree on the signals that any of them has noted. If
    micro-batches have added to the gradients of the next step, which a checkpoint does not keep, the signals wait for
    it. No batch follows the last one, its validation and `on_train_end`, so they agree in front of `on_train_end` and
    behind it as well. A rank that has noted SIGTERM still later sends it to itself again when it has given the handlers
    back. The message has room for a digest of frozen parameters and options of optimizers, so a rank that has changed
    one alone gets an error before the batch, in which it would reduce other gradients than the other ranks (ADR 0064).
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_zero.engine.runtime.rank_facts import RankFacts
from lightning_zero.lightning.progress import open_microbatches

__all__ = ["Signals"]

log = logging.getLogger(__name__)

_FRONT = "before a training batch"

_FACT_BITS = 25  # of a number in an agreement; a signal has the seven above

Agree = Callable[[Sequence[int], str], list[int]]


class Signals:
    """The signals of SLURM that this rank has received, handled by all ranks together.

    Args:
        trainer: Whose handlers take notes.
        agree: Returns the largest numbers of all ranks. Collective.
        saves_wait: Returns a context in which saves return when they are on the disk.
        facts: Travel in the same message; None where not all ranks that agree have the same parameters.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        agree: Agree,
        saves_wait: Callable[[], AbstractContextManager[None]],
        facts: RankFacts | None = None,
    ) -> None:
        self._trainer = trainer
        self._agree = agree
        self._saves_wait = saves_wait
        self._facts = facts
        self._requeue_signal = 0  # number of the one that SLURM has sent
        self._terminate_signal = 0
        self._is_requeued = False  # srun signals every rank, and some may notice a batch later

    def bind(self) -> None:
        """Take the place of the Trainer's handlers, before it registers them, and of its question."""
        connector: Any = self._trainer._signal_connector
        connector._slurm_sigusr_handler_fn = self._note_requeue
        connector._sigterm_notifier_fn = self._note_terminate
        vars(connector)["teardown"] = partial(self._give_back, connector)
        fit: Any = self._trainer.fit_loop
        vars(fit)["on_run_end"] = partial(self._end_fit, fit)
        batches = fit.epoch_loop
        if self._trainer.world_size > 1:
            batches._broadcast_sigterm_tensor = partial(self._act, _FRONT)
        else:  # it is not asked
            vars(batches)["advance"] = partial(self._advance, batches)

    def _note_requeue(self, signum: int, _: FrameType | None) -> None:
        self._requeue_signal = signum

    def _note_terminate(self, signum: int, _: FrameType | None) -> None:
        launcher = self._trainer.strategy.launcher
        if launcher is not None and not self._terminate_signal:
            launcher.kill(signum)  # the processes that this one has started
        self._terminate_signal = signum
        if self._trainer.state.fn != TrainerFn.FITTING:  # nothing is saved, so every rank may end on its own
            self._trainer._signal_connector.received_sigterm = True

    def _advance(self, batches: Any, data_fetcher: Any) -> None:
        self._act(_FRONT)
        type(batches).advance(batches, data_fetcher)

    def _end_fit(self, fit: Any) -> None:
        self._act("after the last training batch")
        type(fit).on_run_end(fit)
        self._act("at the end of the fit", compares_facts=False)  # nothing is trained any more

    def _give_back(self, connector: Any) -> None:
        type(connector).teardown(connector)
        is_on_its_way = self._terminate_signal and sys.exception() is None  # else the run ends with the exception
        if is_on_its_way and signal.getsignal(self._terminate_signal) is signal.SIG_DFL:  # another one has seen it
            signal.raise_signal(self._terminate_signal)

    def _act(self, where: str, *, compares_facts: bool = True) -> None:
        """Handle the signals that some rank has received: save, requeue, stop. Collective: all ranks.

        Args:
            where: In the program.
            compares_facts: Also compares the facts of the ranks.

        Raises:
            SIGTERMException: Some rank has got SIGTERM.
            RuntimeError: The ranks have other parameters frozen, or other options of optimizers.
        """
        requeue, terminate = self._agree_on_signals(where, compares_facts=compares_facts)
        if where == _FRONT and open_microbatches(self._trainer):
            return
        connector = self._trainer._signal_connector
        if requeue and not self._is_requeued:
            self._is_requeued = True
            with self._saves_wait():  # SLURM may end the job as soon as it is requeued
                type(connector)._slurm_sigusr_handler_fn(connector, requeue, None)  # type: ignore[arg-type]
        if terminate:
            log.info("All ranks end, because one has got %s.", signal.Signals(terminate).name)
            connector.received_sigterm = True
            raise SIGTERMException

    def _agree_on_signals(self, where: str, *, compares_facts: bool) -> list[int]:
        """Return the signals that some rank has noted; compare the facts of the ranks if there are none."""
        noted = [0 if self._is_requeued else self._requeue_signal, self._terminate_signal]
        compared = self._facts if compares_facts else None
        facts = (0, 0) if compared is None else compared.digest(_FACT_BITS)
        message = [number << _FACT_BITS | fact for number, fact in zip(noted, facts, strict=True)]
        agreed = self._agree(message, f"agreement on signals {where}")
        signals, mask = [number >> _FACT_BITS for number in agreed], (1 << _FACT_BITS) - 1
        if compared is not None and not any(signals):  # the facts of ranks with a smaller number do not arrive
            compared.compare((agreed[0] & mask, agreed[1] & mask), _FACT_BITS)
        return signals
