"""An error on one rank, anywhere in a run, ends every rank soon, with the text and the rank of that error.

The ranks are processes that end with their error, as those of a program do.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import nn

from tests.lightning_programs import WORLD, Net, ZeroStrategy, loader, trainer

BOUND_S = 30.0

_HOOKS = (
    "setup",
    "configure_model",
    "configure_optimizers",
    "on_fit_start",
    "train_dataloader",
    "validation_step",
    "on_validation_epoch_end",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "training_step",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_save_checkpoint",
    "on_train_epoch_end",
    "on_train_end",
)
_CALLBACKS: dict[str, Callable[[str], Any]] = {
    "none": lambda folder: [],
    "on-exception": lambda folder: [OnExceptionCheckpoint(folder)],
    "model-checkpoint": lambda folder: [ModelCheckpoint(folder, save_on_exception=True, every_n_train_steps=3)],
    "several": lambda folder: [
        OnExceptionCheckpoint(folder),
        ModelCheckpoint(f"{folder}/other", save_on_exception=True, save_last=True, every_n_epochs=9),
    ],
}


class _Fails(Net):
    """Raises in one hook of one rank; in those of batches at the second call."""

    def __init__(self, hook: str, rank: int, folder: str) -> None:
        super().__init__()
        self.extra: nn.Module | None = None
        if hook == "configure_model":
            vars(self)["configure_model"] = self._configured
        call, calls = getattr(self, hook), 0

        def fails(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if rank == 1 and calls == (2 if "batch" in hook or "_step" in hook or "_grad" in hook else 1):
                Path(folder, "raised").write_text(str(time.time()))
                raise ValueError("the error of the user's")
            return call(*args, **kwargs)

        vars(self)[hook] = fails
        self._rank = rank

    def _configured(self) -> None:
        self.extra = self.extra or nn.Linear(2, 2)

    def train_dataloader(self) -> Any:
        return loader(self._rank, WORLD)

    def val_dataloader(self) -> Any:
        return loader(self._rank, WORLD)


def _run(rank: int, hook: str, callbacks: str, stage: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=120))
    made = _CALLBACKS[callbacks](f"{folder}/saved")
    fitted = trainer(
        rank,
        WORLD,
        ZeroStrategy(stage=stage, timeout=120),  # type: ignore[arg-type]
        callbacks=made,
        enable_checkpointing=bool(made),
        num_sanity_val_steps=1,
    )
    try:
        fitted.fit(_Fails(hook, rank, folder))
        text = "no error"
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
    Path(folder, f"end{rank}").write_text(text)
    os._exit(1)


def _ends(hook: str, callbacks: str, stage: int, folder: Path) -> tuple[list[str], float]:
    """Return what the ranks ended with, and how long after the error the last did."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "lightning_zero", "tests.worlds"])
    args = (hook, callbacks, stage, str(folder))
    processes = [context.Process(target=_run, args=(rank, *args)) for rank in range(WORLD)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(90)
    lasted = time.time() - float((folder / "raised").read_text())
    for process in processes:
        process.kill()
    return [path.read_text() if path.exists() else "" for path in (folder / "end0", folder / "end1")], lasted


_CASES = [
    (hook, callbacks, 3)
    for hook in _HOOKS
    for callbacks in _CALLBACKS
    if hook != "on_save_checkpoint" or "model-checkpoint" in callbacks  # the others save after an error alone
]
_FEW = [("configure_model", "none", 3)]


@pytest.mark.parametrize(
    ("hook", "callbacks", "stage"),
    [*_FEW, *(pytest.param(*case, marks=pytest.mark.slow) for case in _CASES if case not in _FEW)],
)
def test_an_error_on_one_rank_ends_all_with_its_text_and_rank(
    hook: str, callbacks: str, stage: int, tmp_path: Path
) -> None:
    ends, lasted = _ends(hook, callbacks, stage, tmp_path)
    assert lasted < BOUND_S
    assert "ValueError: the error of the user's" in ends[1]
    has_ended = hook == "on_train_end" and ends[0] == "no error"  # nothing is left to do with rank 1
    assert has_ended or re.search("(?i)the first error was on rank 1: ValueError: the error of the user's", ends[0])
    left = [path.name for path in tmp_path.rglob("*") if "exception" in path.name or ".tmp-" in path.name]
    assert not left
