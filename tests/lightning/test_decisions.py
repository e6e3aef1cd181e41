"""Ranks that leave out a step, end an epoch or validate by the clock do so together, or an error says who did not."""

from __future__ import annotations

import time
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_zero.lightning import decisions
from lightning_zero.lightning.strategy import ZeroStrategy
from tests.lightning_programs import WORLD, Block, Grown, Net, assert_equal, data, loader, seeded, trainer, weights
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


class Hooked(Net):
    """Makes None of a batch, or a batch of None, behind the loader."""

    def __init__(self, where: str, number: int) -> None:
        super().__init__()
        self.where = where
        self.left = number

    def _changed(self, where: str, batch: Any) -> Any:
        if where != self.where or not self.trainer.training:
            return batch
        self.left -= 1
        return None if self.left == -1 else batch

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        if batch is None and self.where == "fill":
            return data(4)[:]
        return self._changed("transfer", super().transfer_batch_to_device(batch, device, dataloader_idx))

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self._changed("after", batch)


def _fit_hooked(rank: int, strategy: Any, where: str, *, is_everywhere: bool, **options: Any) -> Any:
    number = 1 if rank or is_everywhere else 99
    fitted = trainer(rank, WORLD, strategy, max_epochs=1, **options)
    collate = NoneAt(number) if where == "fill" else None
    fitted.fit(seeded(lambda: Hooked(where, number)), DataLoader(data(16), batch_size=4, collate_fn=collate))
    return fitted


def _hooks(rank: int, world: int, where: str) -> str:
    is_filled = where == "fill"
    expected = weights(_fit_hooked(rank, "ddp", where, is_everywhere=not is_filled))
    assert_equal(weights(_fit_hooked(rank, 2, where, is_everywhere=not is_filled)), expected)
    if is_filled:
        return MESSAGES["none"]
    before, decisions._PATIENCE_S = decisions._PATIENCE_S, 0.5
    try:
        with pytest.raises((ValueError, RuntimeError)) as caught:
            _fit_hooked(rank, 2, where, is_everywhere=False)
    finally:
        decisions._PATIENCE_S = before
    return str(caught.value) + "".join(getattr(caught.value, "__notes__", []))


@pytest.mark.parametrize("where", ["transfer", "after", "fill"])
def test_a_batch_that_hooks_make_none_counts_as_none_and_no_other(where: str) -> None:
    """The batch was looked at before the hooks that move it."""
    for text in run(_hooks, WORLD, where):
        assert MESSAGES["none"] in text


def _accumulated(rank: int, world: int) -> None:
    def fit(strategy: Any) -> dict[str, Any]:
        return weights(_fit_hooked(rank, strategy, "after", is_everywhere=False, accumulate_grad_batches=3))

    expected = fit("ddp")
    for stage in (0, 1):
        assert_equal(fit(stage), expected, what=f"stage {stage}")


def test_a_rank_may_leave_out_a_micro_batch_in_which_nobody_waits_as_under_ddp() -> None:
    """At stages 0 and 1 gradients wait for the last micro-batch; it was an error."""
    run(_accumulated, WORLD)


class Sometimes(Hooked):
    """Uses a block in the second micro-batch of a step alone."""

    def __init__(self, number: int) -> None:
        super().__init__("after", number)
        self.extra = Block(6)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + self.extra(self.first(batch[0])).square().mean() if batch_idx % 3 == 1 else loss


def _unused(rank: int, world: int) -> str:
    strategy = ZeroStrategy(stage=1, step="deferred")
    fitted = trainer(rank, WORLD, strategy, max_epochs=1, accumulate_grad_batches=3)
    before, decisions._PATIENCE_S = decisions._PATIENCE_S, 0.5
    try:
        with pytest.raises((ValueError, RuntimeError)) as caught:
            fitted.fit(seeded(lambda: Sometimes(4 if rank else 99)), DataLoader(data(28), batch_size=4))
    finally:
        decisions._PATIENCE_S = before
    return str(caught.value) + "".join(getattr(caught.value, "__notes__", []))


def test_a_micro_batch_in_which_a_deferred_step_is_made_is_left_out_by_all_ranks() -> None:
    """The others waited in it for the parameters of a block that the first micro-batch had not used."""
    for text in run(_unused, WORLD):
        assert MESSAGES["none"] in text


class Estimates(Net):
    """Reads the number of steps before the fit begins."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.allow_zero_length_dataloader_with_multiple_devices = True

    def setup(self, stage: str) -> None:
        if self.where == "setup":
            assert self.trainer.estimated_stepping_batches >= 0

    def configure_optimizers(self) -> Any:
        if self.where == "optimizers":
            assert self.trainer.estimated_stepping_batches >= 0
        return super().configure_optimizers()


def _estimates(rank: int, world: int, where: str) -> str:
    fitted = trainer(rank, world, 2, max_epochs=1)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        fitted.fit(seeded(lambda: Estimates(where)), DataLoader(data(0 if rank else 16), batch_size=4))
    return str(caught.value) + "".join(getattr(caught.value, "__notes__", []))


@pytest.mark.parametrize("where", ["setup", "optimizers"])
def test_an_empty_loader_is_noticed_if_the_number_of_steps_was_read_before(where: str) -> None:
    for text in run(_estimates, WORLD, where, timeout_s=30):
        assert MESSAGES["empty"] in text


class Reloaded(Grown):
    """Reads the number of steps in every fit."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()


def _again(rank: int, world: int) -> None:
    fitted = trainer(rank, world, 1, max_epochs=1, reload_dataloaders_every_n_epochs=1)
    module = seeded(Reloaded)
    fitted.fit(module, loader(rank, world))
    kept = fitted.strategy._engine
    everyone = kept.internals.world_communicator
    agree_on = everyone.agree_on

    def agree(*args: Any) -> Any:
        assert everyone.control_group is not None  # it is open: over NCCL there is no other group for host values
        return agree_on(*args)

    everyone.agree_on = agree
    module.grow()
    fitted.fit_loop.max_epochs = 2
    fitted.fit(module, loader(rank, world))
    assert fitted.strategy._engine is not kept
    assert fitted.state.finished


def test_a_second_fit_of_a_module_that_is_sharded_anew_asks_its_own_engine() -> None:
    """The question about empty loaders went over the groups of the engine of the first fit, which was closed."""
    run(_again, WORLD, timeout_s=30)


def _other_module(rank: int, world: int) -> None:
    fitted = trainer(rank, world, 1, max_epochs=1)
    fitted.fit(seeded(Net), loader(rank, world))
    fitted.fit_loop.max_epochs = 2
    fitted.fit(seeded(lambda: Estimates("setup")), loader(rank, world))
    assert fitted.state.finished


def test_the_setup_of_a_second_fit_reads_the_number_of_steps() -> None:
    run(_other_module, WORLD, timeout_s=30)


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
