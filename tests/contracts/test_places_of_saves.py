"""A checkpoint is of one step: ranks that save from different places of a run are refused, and nothing is published."""

from __future__ import annotations

import os
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor

from lightning_zero.checkpoint import directory
from lightning_zero.checkpoint.ranks import CheckpointError
from lightning_zero.engine.buffers.buffer import FlatBuffer
from lightning_zero.engine.buffers.update import Update
from lightning_zero.errors import CollectiveError
from tests import worlds
from tests.lightning_programs import Net, ZeroStrategy, loader, seeded, trainer

Place = tuple[str, int]  # hook, batch

_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)
_PLACES: list[Place] = [*product(_HOOKS, (1,)), (_HOOKS[0], 2), (_HOOKS[4], 2)]


class _Saves(Callback):
    """Saves at one place."""

    def __init__(self, place: Place, path: str) -> None:
        self._place = place
        self._path = path

    def visit(self, hook: str, trainer: Any) -> None:
        if (hook, trainer.fit_loop.epoch_loop.batch_progress.total.ready - 1) == self._place:
            trainer.save_checkpoint(self._path)


for _hook in _HOOKS:
    setattr(_Saves, _hook, lambda self, trainer, *args, hook=_hook: self.visit(hook, trainer))


class _Steps(Callback):
    """Keeps the weights of every step."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
        self.weights.append({name: trainer.strategy.full_param(p).clone() for name, p in module.named_parameters()})


def _weights(rank: int, world: int) -> list[dict[str, Tensor]]:
    steps = _Steps()
    trainer(rank, world, 3, max_epochs=1, callbacks=[steps]).fit(seeded(Net), loader(rank, world))
    return steps.weights


def _save_at(rank: int, world: int, stage: int, step: str, places: tuple[Place, Place], path: str) -> str:
    strategy = ZeroStrategy(
        stage=stage,  # type: ignore[arg-type]
        step=step,  # type: ignore[arg-type]
        state_dict_type="sharded",
        timeout=8,
    )
    fitted = trainer(rank, world, strategy, max_epochs=1, callbacks=[_Saves(places[rank], path)])
    try:
        fitted.fit(seeded(Net), loader(rank, world))
    except (CheckpointError, CollectiveError) as error:
        return str(error)
    return ""


def _check(path: Path, weights: list[dict[str, Tensor]]) -> bool:
    """Whether there is a checkpoint; it has the weights of the step that it names."""
    assert not [name for name in os.listdir(path.parent) if name != path.name]
    if not path.exists():
        return False
    content = directory.load(None, path)
    for name, value in weights[content["global_step"]].items():
        assert torch.equal(content["state_dict"][name][:], value), name
    return True


_PAIRS = list(product(_PLACES, _PLACES))
_FEW = [
    (("on_before_optimizer_step", 1), ("on_train_batch_end", 1)),
    (("on_train_batch_start", 2), ("on_before_optimizer_step", 1)),
    (("on_train_batch_end", 1), ("on_train_batch_end", 1)),
]


@pytest.mark.parametrize(
    "places", [*_FEW, *(pytest.param(pair, marks=pytest.mark.slow) for pair in _PAIRS if pair not in _FEW)], ids=str
)
def test_ranks_that_save_at_different_places_are_refused_instead_of_mixed(
    places: tuple[Place, Place], tmp_path: Path
) -> None:
    weights = worlds.run(_weights, 2)[0]
    said = worlds.run(_save_at, 2, 3, "now", places, str(tmp_path / "saved.ckpt"))
    is_there = _check(tmp_path / "saved.ckpt", weights)
    if places[0] == places[1]:
        assert is_there
        assert said == ["", ""]
    else:
        assert not is_there
        assert all(said), said


# -- Inside a step -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", ["on_before_optimizer_step", "on_train_batch_end"])
def test_no_save_between_the_steps_of_a_backward_and_their_end(hook: str, tmp_path: Path) -> None:
    place = (hook, 1)
    said = worlds.run(_save_at, 2, 2, "backward", (place, place), str(tmp_path / "saved.ckpt"))
    if hook == "on_train_batch_end":
        assert said == ["", ""]
        assert _check(tmp_path / "saved.ckpt", worlds.run(_weights, 2)[0])
    else:
        assert not os.listdir(tmp_path)
        assert all("a step of an optimizer was interrupted, or has not ended" in text for text in said)


class _Fault(Exception):
    pass


def _fail_in_a_step(rank: int, world: int, folder: str) -> list[str]:
    publish, calls = FlatBuffer.publish, 0

    def fails(buffer: FlatBuffer) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise _Fault
        return publish(buffer)

    class Arms(Callback):
        def on_before_optimizer_step(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 1:
                FlatBuffer.publish = fails  # type: ignore[method-assign]

    callbacks = [Arms(), OnExceptionCheckpoint(folder)]
    fitted = trainer(rank, world, 2, max_epochs=1, enable_checkpointing=True, callbacks=callbacks)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(_Fault):
            fitted.fit(seeded(Net), loader(rank, world))
    return [str(warning.message) for warning in caught]


def test_an_error_inside_a_step_leaves_no_checkpoint_of_half_a_step(tmp_path: Path) -> None:
    said = worlds.run(_fail_in_a_step, 2, str(tmp_path))
    assert not os.listdir(tmp_path)
    assert all(any("a step of an optimizer was interrupted" in text for text in texts) for texts in said)


def _fail_in_a_deferred_step(rank: int, world: int, folder: str) -> list[str]:
    run, calls = Update._run, 0

    def fails(update: Update) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MemoryError
        run(update)

    callbacks = [OnExceptionCheckpoint(folder)]
    strategy = ZeroStrategy(stage=2, step="deferred")
    fitted = trainer(rank, world, strategy, max_epochs=1, enable_checkpointing=True, callbacks=callbacks)
    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        patch.setattr(Update, "_run", fails)
        with pytest.raises(RuntimeError, match="The deferred step of unit `.*` failed: MemoryError"):
            fitted.fit(seeded(Net), loader(rank, world))
        fitted.save_checkpoint(os.path.join(folder, "rescue.ckpt"))
    with pytest.warns(UserWarning, match="Load the last checkpoint before"):
        fitted.fit(fitted.lightning_module, loader(rank, world))
    return [str(warning.message) for warning in caught]


def test_an_error_in_a_deferred_step_leaves_no_checkpoint_of_half_a_step(tmp_path: Path) -> None:
    said = worlds.run(_fail_in_a_deferred_step, 2, str(tmp_path))
    assert not os.listdir(tmp_path)
    assert all(any("a step of an optimizer was interrupted" in text for text in texts) for texts in said), said
