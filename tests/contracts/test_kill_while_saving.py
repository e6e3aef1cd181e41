"""A run that is killed while it saves goes on from the newest checkpoint that was whole."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_zero.checkpoint import directory
from lightning_zero.lightning.strategy import ZeroStrategy
from tests import worlds
from tests.lightning_programs import Net, assert_equal, loader, seeded, trainer, weights
from tests.sampling import sample

SAVES = 3  # how many checkpoints are whole before the one that is interrupted
WINDOW_S = 0.15  # a save takes about as long


class _KeepsWeights(Callback):
    """Keeps the weights at the start and after every step."""

    def __init__(self) -> None:
        self.at: dict[int, dict[str, Tensor]] = {}

    def on_train_start(self, trainer: Any, *args: Any) -> None:
        self.at[trainer.global_step] = weights(trainer)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.at[trainer.global_step] = weights(trainer)


def _trainer(rank: int, world: int, folder: str, strategy: ZeroStrategy, *callbacks: Callback, **options: Any) -> Any:
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_last=True)
    return trainer(rank, world, strategy, callbacks=[saving, *callbacks], enable_checkpointing=True, **options)


def _reference(rank: int, world: int, folder: str) -> dict[int, dict[str, Tensor]]:
    kept = _KeepsWeights()
    fitted = _trainer(rank, world, folder, ZeroStrategy(stage=1), kept, max_epochs=2)
    fitted.fit(seeded(Net), loader(rank, world))
    return kept.at


def _killed(
    rank: int, world: int, folder: str, options: dict[str, Any], victims: tuple[int, ...], delay: float
) -> None:
    """Fit; the victims kill themselves ``delay`` after a save began."""
    begun = threading.Event()
    prepare, saves = directory.prepare, 0

    def counted(*args: Any) -> Any:
        nonlocal saves
        saves += 1
        if saves == 2 * SAVES + 1:  # each time the best and the last
            begun.set()
        return prepare(*args)

    def kill() -> None:
        begun.wait()
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGKILL)

    if rank in victims:
        threading.Thread(target=kill, daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(directory, "prepare", counted)
        _trainer(rank, world, folder, ZeroStrategy(**options), max_epochs=2).fit(seeded(Net), loader(rank, world))
    time.sleep(60)  # the kill comes later


def _resumed(rank: int, world: int, folder: str, options: dict[str, Any]) -> tuple[int, dict[str, Tensor]]:
    kept = _KeepsWeights()
    fitted = _trainer(rank, world, folder, ZeroStrategy(**options), kept, max_epochs=2)
    fitted.fit(seeded(Net), loader(rank, world), ckpt_path="last")
    return min(kept.at), kept.at


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Tensor]]:
    """Weights after every step of an uninterrupted run."""
    return worlds.run(_reference, 2, str(tmp_path_factory.mktemp("reference")))[0]


OPTIONS = [
    {"stage": 3},
    {"stage": 1},
    {"stage": 3, "async_save": True},
    {"stage": 1, "state_dict_type": "sharded"},
    {"stage": 2, "async_save": True},
]
MOMENTS = [((number % 2,), number) for number in range(30)] + [((0, 1), number) for number in range(30)]


@pytest.mark.parametrize("moment", sample(MOMENTS, ((1,), 1), ((0, 1), 2)), ids=str)
def test_a_killed_run_goes_on_from_the_newest_whole_checkpoint(
    moment: tuple[tuple[int, ...], int], steps: dict[int, dict[str, Tensor]], tmp_path: Path
) -> None:
    victims, number = moment
    options = OPTIONS[number % len(OPTIONS)]
    delay = random.Random(str(moment)).uniform(0.0, WINDOW_S)
    with pytest.raises((worlds.RankError, RuntimeError)):
        worlds.run(_killed, 2, str(tmp_path), options, victims, delay)
    first, resumed = worlds.run(_resumed, 2, str(tmp_path), options)[0]
    assert first >= SAVES, "a checkpoint that was whole is not the one that was loaded"
    assert_equal(resumed[first], steps[first])
    assert max(resumed) == max(steps)  # it went on to the end
    whole = {path.name for path in tmp_path.iterdir() if ".tmp-" not in path.name}
    assert "last.ckpt" in whole
    for name in whole:
        assert directory.load(None, tmp_path / name)["global_step"] >= SAVES
