"""Ranks that leave out a step, end an epoch or validate by the clock do so together, or an error says who did not."""

from __future__ import annotations

import time
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_zero.lightning import decisions
from tests.lightning_programs import WORLD, Net, assert_equal, data, loader, seeded, trainer, weights
from tests.worlds import run


class Skips(Net):
    """Says at some batches that the epoch is over."""

    def __init__(self, is_over: bool) -> None:
        super().__init__()
        self.is_over = is_over
        self.seen: list[int] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if self.is_over and batch_idx == 2 else None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch_idx)
        return super().training_step(batch, batch_idx)


class NoneAt:
    """Collates batches, but for one."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, samples: list[Any]) -> Any:
        self.left -= 1
        return None if self.left == -1 else next(iter(DataLoader(samples, batch_size=len(samples))))


def _fit(rank: int, strategy: Any, *, ranks: tuple[int, ...], kind: str) -> tuple[Any, Skips]:
    skips = rank in ranks
    module = seeded(lambda: Skips(skips and kind == "over"))
    fitted = trainer(rank, WORLD, strategy, max_epochs=2)
    size = 0 if skips and kind == "empty" else 16
    module.allow_zero_length_dataloader_with_multiple_devices = True
    collate = NoneAt(1) if skips and kind == "none" else None
    fitted.fit(module, DataLoader(data(size), batch_size=4, collate_fn=collate))
    return fitted, module


def _all(rank: int, world: int, kind: str) -> None:
    fitted, module = _fit(rank, "ddp", ranks=(0, 1), kind=kind)
    expected, seen = weights(fitted), module.seen
    assert len(seen) == {"none": 7, "over": 4, "empty": 0}[kind]
    for stage in (1, 3):
        fitted, module = _fit(rank, stage, ranks=(0, 1), kind=kind)
        assert module.seen == seen
        assert_equal(weights(fitted), expected, what=stage)


@pytest.mark.parametrize("kind", ["none", "over", "empty"])
def test_steps_that_all_ranks_leave_out_are_left_out_as_under_ddp(kind: str) -> None:
    run(_all, WORLD, kind)


def _some(rank: int, world: int, kind: str) -> str:
    before, decisions._PATIENCE_S = decisions._PATIENCE_S, 0.5
    began = time.monotonic()
    try:
        with pytest.raises((ValueError, RuntimeError)) as caught:
            _fit(rank, 2, ranks=(1,), kind=kind)
    finally:
        decisions._PATIENCE_S = before
    assert time.monotonic() - began < 10
    return str(caught.value) + "".join(getattr(caught.value, "__notes__", []))


MESSAGES = {
    "none": "Rank 1 got None as a training batch",
    "over": "Rank 1 ended the epoch, by -1",
    "empty": r"Rank(s) [1] have no training batch",
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_step_that_some_ranks_leave_out_is_an_error(kind: str) -> None:
    """The others waited in the step until `timeout`."""
    for text in run(_some, WORLD, kind):
        assert MESSAGES[kind] in text


class Slow(Net):
    """Takes some time for a step; notes when it validates."""

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.06)
        return super().training_step(batch, batch_idx)

    def on_validation_start(self) -> None:
        self.validated.append(self.trainer.global_step)


def _by_the_clock(rank: int, world: int) -> list[int]:
    module = seeded(Slow)
    fitted = trainer(
        rank, world, 1, max_epochs=1, val_check_interval={"milliseconds": 100}, check_val_every_n_epoch=None
    )
    if rank:  # a clock that is behind
        fitted._val_check_time_interval = 1e9
    fitted.fit(module, loader(rank, world), loader(rank, world))
    return module.validated


def test_validations_by_time_follow_the_clock_of_rank_0() -> None:
    first, second = run(_by_the_clock, WORLD, timeout_s=30)
    assert first
    assert first == second
