"""A signal, on one rank or on all, anywhere in a fit, is one save on all ranks, between two batches or at its end."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.trainer.connectors import signal_connector
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_zero.checkpoint import directory
from tests import worlds
from tests.contracts.test_places_of_saves import _weights
from tests.lightning_programs import Net, Ranks, ZeroStrategy, loader, seeded
from tests.lightning_programs import trainer as make_trainer

_SENT = signal.SIGUSR2  # the workers of the tests use the other one

Place = tuple[str, int]


class _Slurm(Ranks, SLURMEnvironment):
    """A job of SLURM, on the processes that the test already runs in."""

    def __init__(self, rank: int, world: int) -> None:
        Ranks.__init__(self, rank, world)
        self.auto_requeue = True
        self.requeue_signal = _SENT

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        pass


class _Sends(Callback):
    """Sends this process a signal at a place."""

    def __init__(self, place: Place | None, number: int) -> None:
        self._place = place
        self._number = number

    def visit(self, hook: str, trainer: Any) -> None:
        if (hook, trainer.fit_loop.epoch_loop.batch_progress.total.ready - 1) == self._place:
            os.kill(os.getpid(), self._number)


_HOOKS = (
    "on_train_batch_start",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_train_epoch_end",
    "on_train_end",
)
for _hook in _HOOKS:
    setattr(_Sends, _hook, lambda self, trainer, *args, hook=_hook: self.visit(hook, trainer))


def _fit(
    rank: int,
    world: int,
    number: int,
    places: tuple[Place | None, ...],
    folder: str,
    async_save: bool = False,
    accumulate: int = 1,
) -> list[Any]:
    """Return the commands that were called, each with the checkpoints that were there."""
    calls: list[Any] = []

    def call(command: list[str]) -> int:
        calls.append((command, _checkpoints(folder)))
        return 0

    signal_connector.call = call  # type: ignore[attr-defined]
    os.environ["SLURM_JOB_ID"] = "17"
    callbacks = [_Sends(places[rank], number), OnExceptionCheckpoint(folder)]
    fitted = make_trainer(
        rank,
        world,
        ZeroStrategy(stage=3, timeout=60, async_save=async_save),
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        environment=_Slurm(rank, world),
        callbacks=callbacks,
        enable_checkpointing=True,
        default_root_dir=folder,
    )
    if number == signal.SIGTERM:
        with pytest.raises(SIGTERMException):
            fitted.fit(seeded(Net), loader(rank, world), loader(rank, world, size=8))
    else:
        fitted.fit(seeded(Net), loader(rank, world), loader(rank, world, size=8))
        assert fitted.global_step == 8 // world // accumulate
    return calls


def _checkpoints(folder: str | Path) -> list[str]:
    return sorted(entry for entry in os.listdir(folder) if entry.endswith(".ckpt"))


def _called(name: str) -> list[Any]:
    return [[(["scontrol", "requeue", "17"], [name])], []]


_AT: Any = [
    (None, ("on_after_backward", 1)),
    (("on_train_batch_end", 1), ("on_before_optimizer_step", 1)),
    (("on_train_batch_start", 1), None),
]


@pytest.mark.parametrize("places", _AT, ids=str)
@pytest.mark.parametrize("number", [_SENT, signal.SIGTERM])
def test_a_signal_is_one_save_on_all_ranks(number: int, places: tuple[Place | None, ...], tmp_path: Path) -> None:
    calls = worlds.run(_fit, 2, number, places, str(tmp_path))
    name = "hpc_ckpt_1.ckpt" if number == _SENT else "on_exception.ckpt"
    assert _checkpoints(tmp_path) == [name]
    content = directory.load(None, tmp_path / name)
    assert content["global_step"] == 2
    for key, value in worlds.run(_weights, 2)[0][2].items():
        assert torch.equal(content["state_dict"][key][:], value), key
    assert calls == (_called(name) if number == _SENT else [[], []])


@pytest.mark.parametrize("number", [_SENT, signal.SIGTERM])
def test_a_signal_between_two_micro_batches_waits_for_the_step(number: int, tmp_path: Path) -> None:
    """The gradients of the first micro-batch were lost, and the resumed run stepped on the second alone."""
    worlds.run(_fit, 2, number, (None, ("on_train_batch_end", 0)), str(tmp_path), False, 2)
    name = "hpc_ckpt_1.ckpt" if number == _SENT else "on_exception.ckpt"
    content = directory.load(None, tmp_path / name)
    assert content["global_step"] == 1
    assert "open_microbatches" not in content


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_start", "on_train_epoch_end", "on_train_end"])
@pytest.mark.parametrize("number", [_SENT, signal.SIGTERM])
def test_a_signal_behind_the_last_batch_is_not_lost(number: int, hook: str, tmp_path: Path) -> None:
    calls = worlds.run(_fit, 2, number, (None, (hook, 3)), str(tmp_path))
    name = "hpc_ckpt_1.ckpt" if number == _SENT else "on_exception.ckpt"
    assert _checkpoints(tmp_path) == [name]
    assert directory.load(None, tmp_path / name)["global_step"] == 4
    assert calls == (_called(name) if number == _SENT else [[], []])


def _fit_and_write_slowly(rank: int, world: int, *args: Any) -> list[Any]:
    write = directory.write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(directory, "write", lambda *args, **options: time.sleep(0.5) or write(*args, **options))
        return _fit(rank, world, *args)


def test_a_job_is_requeued_when_its_asynchronous_checkpoint_is_on_the_disk(tmp_path: Path) -> None:
    place = ("on_train_batch_end", 1)
    calls = worlds.run(_fit_and_write_slowly, 2, _SENT, (place, place), str(tmp_path), True)
    assert calls == _called("hpc_ckpt_1.ckpt")


def test_a_signal_that_reaches_ranks_on_two_sides_of_a_batch_requeues_once(tmp_path: Path) -> None:
    places = (("on_train_batch_end", 1), ("on_train_batch_end", 2))
    assert worlds.run(_fit, 2, _SENT, places, str(tmp_path)) == _called("hpc_ckpt_1.ckpt")


@pytest.mark.parametrize("number", [_SENT, signal.SIGTERM])
def test_a_signal_inside_a_step_of_the_only_rank_is_a_save_behind_it(number: int, tmp_path: Path) -> None:
    calls = worlds.run(_fit, 1, number, (("on_before_optimizer_step", 1),), str(tmp_path), True)
    name = "hpc_ckpt_1.ckpt" if number == _SENT else "on_exception.ckpt"
    assert _checkpoints(tmp_path) == [name]
    assert directory.load(None, tmp_path / name)["global_step"] == 2
    assert calls == (_called(name)[:1] if number == _SENT else [[]])


class _IsTerminatedAtTheEnd(ZeroStrategy):
    def teardown(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        super().teardown()


def _fit_and_end(rank: int, world: int) -> list[int]:
    sent: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a test before may have left a handler in this process
        patch.setattr(signal, "raise_signal", sent.append)
        make_trainer(rank, world, _IsTerminatedAtTheEnd(stage=2), max_epochs=1).fit(seeded(Net), loader(rank, world))
    return sent


def test_sigterm_while_the_last_save_is_waited_for_ends_the_process_behind_it() -> None:
    assert worlds.run(_fit_and_end, 2) == [[signal.SIGTERM]] * 2
