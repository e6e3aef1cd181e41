"""A module that has run in pipeline stages runs again: with modules that `setup` has made anew, in other stages."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_zero.config import Pipeline
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.lightning.places import let_engines_go
from lightning_zero.lightning.strategy import ZeroStrategy
from tests.lightning_programs import Net, assert_equal, loader, seeded, trainer, weights
from tests.sampling import sample
from tests.worlds import run


class Warm(nn.Module):
    """A loss whose weight grows with the number of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return min(0.25 * self.calls, 4.0) * F.mse_loss(output, target)


class MakesLoss(Net):
    """Makes its loss, which has neither parameters nor buffers, in every `setup`."""

    def setup(self, stage: str) -> None:
        self.criterion = Warm()

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        loss: Tensor = self.criterion(self(x), y)
        return loss

    def on_train_end(self) -> None:
        self.calls = self.criterion.calls


def _fit_again(rank: int, world: int, options: dict[str, Any], first: str) -> tuple[dict[str, Tensor], int]:
    strategy = ZeroStrategy(stage=1, **options)
    module, batches = seeded(MakesLoss), loader(0, 1)
    one = trainer(rank, world, strategy, precision="64-true", max_epochs=1)
    getattr(one, first)(module, batches)
    if first == "fit":
        one.fit_loop.max_epochs = 2
    one.fit(module, batches)
    return weights(one), module.calls


@pytest.mark.parametrize("first", sample(["validate", "fit"], "validate"))
def test_a_second_run_knows_modules_that_setup_has_made_anew(first: str) -> None:
    """The survey counted as a call, and the first stage had no counter of its own."""
    expected, calls = run(_fit_again, 1, {}, first)[0]
    options = {"pipeline": Pipeline(stages=2, microbatches=1, schedule="gpipe")}
    for values, number in run(_fit_again, 2, options, first):
        assert number == calls
        assert_equal(values, expected, atol=1e-12)


def _fit_in_turn(rank: int, world: int, options: dict[str, Any]) -> dict[str, Tensor]:
    strategy = ZeroStrategy(stage=1, **options)
    fitted = trainer(rank, world, strategy, precision="64-true", max_epochs=0)
    module = seeded(Net)
    for one in (module, seeded(Net), module):
        fitted.fit_loop.max_epochs += 1
        fitted.fit(one, loader(0, 1))
    return weights(fitted)


def test_a_strategy_runs_a_module_again_after_another_one() -> None:
    """The steps of the other one ran instead of it."""
    expected = run(_fit_in_turn, 1, {})[0]
    for values in run(_fit_in_turn, 2, {"pipeline": Pipeline(stages=2, microbatches=1, schedule="gpipe")}):
        assert_equal(values, expected, atol=1e-12)


class Normed(Net):
    """Has batch norms in its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(4))


def _evaluate_elsewhere(rank: int, world: int, options: list[dict[str, Any]]) -> tuple[dict[str, Tensor], float]:
    module, batches = seeded(Normed), loader(0, 1)
    first, second = (
        trainer(rank, world, ZeroStrategy(stage=1, **one), precision="64-true", max_epochs=1) for one in options
    )
    first.fit(module, batches)
    second.test(module, batches, verbose=False)
    return weights(second), second.callback_metrics["test_loss"].item()


def _cut(*partition: int) -> dict[str, Any]:
    return {"pipeline": Pipeline(stages=2, microbatches=1, schedule="gpipe", partition=list(partition))}


@pytest.mark.parametrize("second", [_cut(3), {}], ids=["other-cut", "no-pipeline"])
def test_buffers_of_blocks_go_with_the_module_to_another_strategy(second: dict[str, Any]) -> None:
    """Statistics were overwritten by those of a rank that had never run the block, or could not be read."""
    expected, loss = run(_evaluate_elsewhere, 1, [{}, {}])[0]
    for values, found in run(_evaluate_elsewhere, 2, [_cut(1), second]):
        assert_equal(values, expected, atol=1e-12)
        assert found == pytest.approx(loss)


def _evaluate_alone(rank: int, world: int, drops: bool) -> dict[str, float]:
    module = seeded(Net)
    first = trainer(rank, world, ZeroStrategy(stage=1, **_cut(1)), max_epochs=1)
    first.fit(module, loader(0, 1))
    if drops:
        del first
        module._trainer = None
        gc.collect()
    second = trainer(rank, world, ZeroStrategy(stage=1, **_cut(1)))
    second.test(module, loader(0, 1), verbose=False)
    return {name: float(value) for name, value in second.callback_metrics.items()}


def test_a_module_keeps_its_engine_when_the_trainer_is_gone() -> None:
    """Whether a second Trainer found the values of all stages was decided by the garbage collector of each rank."""
    kept, dropped = (run(_evaluate_alone, 2, drops) for drops in (False, True))
    assert dropped == kept


def _fit_refused(rank: int, world: int, fails: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    module = seeded(Net)
    first = trainer(rank, world, ZeroStrategy(stage=1, **_cut(1)), max_epochs=1)
    first.fit(module, loader(0, 1))
    before = weights(first)
    del first
    module._trainer = None
    second = trainer(rank, world, ZeroStrategy(stage=1, **_cut(1)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ZeroEngine, fails, lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            second.test(module, loader(0, 1), verbose=False)
    del second
    module._trainer = None
    gc.collect()
    third = trainer(rank, world, ZeroStrategy(stage=1, **_cut(1)))
    third.test(module, loader(0, 1), verbose=False)
    return before, weights(third)


@pytest.mark.parametrize("fails", ["unshard", "shard"])
def test_a_module_keeps_its_values_where_a_run_is_refused(fails: str) -> None:
    """The engine, which alone had them, was let go before the error, so that the next run said that they are gone."""
    for before, after in run(_fit_refused, 2, fails):
        assert_equal(after, before)


def _evaluate_orphan(rank: int, world: int) -> str:
    module = seeded(Net)
    trainer(rank, world, ZeroStrategy(stage=1, **_cut(1)), max_epochs=1).fit(module, loader(0, 1))
    let_engines_go(module)
    module._trainer = None
    gc.collect()
    with pytest.raises(RuntimeError) as caught:
        trainer(rank, world, ZeroStrategy(stage=1, **_cut(1))).test(module, loader(0, 1))
    return str(caught.value)


def test_a_module_whose_engine_is_gone_is_refused() -> None:
    """The error was of a parameter without a name."""
    for text in run(_evaluate_orphan, 2):
        assert "Load a checkpoint into a new module" in text


class Converts(Net):
    """Runs its first layer in the dtype that it has."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.to(self.first.weight.dtype)).to(self.last.weight.dtype)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def _fit_converted(rank: int, world: int, options: dict[str, Any]) -> tuple[dict[str, Tensor], set[torch.dtype]]:
    module = seeded(Converts)
    first, second = (trainer(rank, world, ZeroStrategy(stage=1, **options), max_epochs=1) for _ in range(2))
    first.fit(module, loader(0, 1))
    if rank == 0:  # the stage of the layer
        module.first.double()
    second.fit(module, loader(0, 1))
    return weights(second), {param.dtype for param in module.first.parameters()}


def test_a_layer_that_is_converted_between_two_runs_trains_in_its_new_dtype_on_all_stages() -> None:
    """The stage that holds it copied the values back into the former dtype, in silence."""
    expected, _ = run(_fit_converted, 1, {})[0]
    for values, dtypes in run(_fit_converted, 2, _cut(1)):
        assert dtypes == {torch.float64}
        assert_equal(values, expected, atol=1e-6)
