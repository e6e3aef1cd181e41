"""Programs that ``tensor_parallel`` trained otherwise than one rank in silence, or refused without a reason.

Each program is a few lines of a user; losses and weights are compared with those of Lightning's plain strategy on one
rank, on the joined batches.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import threading
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ThroughputMonitor
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler

from lightning_zero.lightning.strategy import ZeroStrategy
from tests.contracts.test_tensor_parallel import BATCH, LENGTH, Logging, Program, Samples, loaders
from tests.contracts.test_tensor_parts import Transformed
from tests.lightning_programs import assert_equal, trainer, weights
from tests.parallel.tensor.families import HEADS, VOCAB, SeparateAttention
from tests.worlds import run

BOUND = 1e-6

Outcome = tuple[list[float], dict[str, Tensor]]


def fit(rank: int, world: int, make: Callable[[], Program], options: dict[str, Any] | None, steps: int = 4) -> Outcome:
    """Fit on the ranks of one tensor group; None: with Lightning's plain strategy on one rank."""
    module = make()
    strategy = "auto" if options is None else ZeroStrategy(tensor_parallel=world, **options)
    fitted = trainer(rank, world, strategy, max_steps=steps, max_epochs=10, limit_val_batches=0)
    fitted.fit(module, loaders("hand-separate", 1, 0)["train_dataloaders"])
    return module.losses, weights(fitted)


def compare(make: Callable[[], Program], options: dict[str, Any]) -> None:
    """Compare two tensor ranks with one rank."""
    expected = run(fit, 1, make, None)[0]
    for losses, values in run(fit, 2, make, options):
        assert losses == pytest.approx(expected[0], abs=BOUND)
        assert_equal(
            {name: one for name, one in values.items() if ".mean" not in name},
            {name: one for name, one in expected[1].items() if ".mean" not in name},
            BOUND,
        )


# -- Sizes of layers ---------------------------------------------------------------------------------------------------


class Sized(Program):
    """Reads sizes of layers: rates by fans, tokens that are drawn, a loss by its largest value."""

    def __init__(self) -> None:
        super().__init__("hand-separate")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        model: Any = self.model
        ids = batch["ids"]
        noise = torch.randint(model.emb.num_embeddings, ids.shape)
        loss = self._loss({"ids": torch.where(torch.rand(ids.shape) < 0.3, noise, ids)})
        loss = loss / math.log(model.head.out_features) * model.blocks[0].attn.n_heads / HEADS
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [one.weight], "lr": 0.05 * 64 / one.in_features}
            for one in self.model.modules()
            if isinstance(one, nn.Linear)
        ]
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


@pytest.mark.parametrize("options", [{"stage": 1}, {"stage": 3, "activation_checkpointing": True}], ids=str)
def test_sizes_of_layers_are_those_of_the_whole(options: dict[str, Any]) -> None:
    compare(Sized, options)


class Recomputed(SeparateAttention):
    """Computes a method of its own again in the backward, which reads the number of heads."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


def recomputed() -> Sized:
    module = Sized()
    for block in module.model.blocks:  # type: ignore[union-attr]
        block.attn.__class__ = Recomputed  # type: ignore[union-attr]
    return module


def test_methods_that_are_recomputed_read_divided_integers() -> None:
    compare(recomputed, {"stage": 2})


# -- Tokens ------------------------------------------------------------------------------------------------------------


class Unknown(Program):
    """Is given a token outside of the vocabulary in its second step."""

    def __init__(self) -> None:
        super().__init__("hand-separate")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        ids = batch["ids"].clone()
        ids[0, 0] = VOCAB if batch_idx == 1 else 3
        self.losses.append(float(loss := self._loss({"ids": ids})))
        return loss


def fails(rank: int, world: int, make: Callable[[], Program]) -> tuple[int, str]:
    """Return the number of losses before a fit fails, and its error."""
    module = make()
    fitted = trainer(rank, world, ZeroStrategy(tensor_parallel=world) if world > 1 else "auto", max_steps=4)
    try:
        fitted.fit(module, loaders("hand-separate", 1, 0)["train_dataloaders"])
    except Exception as error:
        return len(module.losses), f"{type(error).__name__}: {error}"
    return len(module.losses), ""


def test_tokens_outside_of_the_vocabulary_raise_as_on_one_rank() -> None:
    for world in (1, 2):
        for number, error in run(fails, world, Unknown):
            assert number == 1, error
            assert error.startswith("IndexError: index out of range in self")


# -- Workers of loaders ------------------------------------------------------------------------------------------------


def fit_seeded_workers(rank: int, world: int, options: dict[str, Any]) -> dict[str, Tensor]:
    with patch.dict(os.environ):
        seed_everything(5, workers=True, verbose=False)
        strategy = ZeroStrategy(stage=1, **options)
        fitted = trainer(rank, world, strategy, max_epochs=2, limit_train_batches=2, limit_val_batches=0)
        module = Logging("hand-separate")
        loader = DataLoader(
            Transformed("plain"), batch_size=BATCH, shuffle=True, num_workers=1, multiprocessing_context="fork"
        )
        with patch.dict(multiprocessing.current_process()._config, daemon=False):  # type: ignore[attr-defined]
            fitted.fit(module, loader)
    return {name: value for name, value in weights(fitted).items() if not name.startswith(("mean", "count"))}


@pytest.mark.parametrize("options", [{"tensor_parallel": 2}, {"pipeline": {"stages": 2, "microbatches": 2}}], ids=str)
def test_workers_of_ranks_with_the_same_data_are_seeded_alike(options: dict[str, Any]) -> None:
    """With ``seed_everything(workers=True)``, as ``LightningCLI`` calls it, Lightning seeds them by the global rank."""
    expected = run(fit_seeded_workers, 1, {})[0]
    for values in run(fit_seeded_workers, 2, options):
        assert_equal(values, expected, BOUND)


# -- Generators of a program -------------------------------------------------------------------------------------------


class Noisy(Program):
    """Makes inputs inside of the step, with a generator of its own that is seeded by the rank.

    The ranks have the same loss, because an embedding in parts adds the rows of both ranks' tokens.
    """

    def __init__(self, steps: int = 4) -> None:
        super().__init__("hand-separate")
        self.steps = steps

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 + self.global_rank)
        noise = torch.randint(VOCAB, batch["ids"].shape, generator=generator)
        self.losses.append(float(loss := self._loss({"ids": noise if batch_idx >= 4 - self.steps else batch["ids"]})))
        return loss


class NoisyByHand(Noisy):
    """Optimizes by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.example_input_array = torch.zeros(2, LENGTH, dtype=torch.long)

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids)  # type: ignore[no-any-return]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def noisy_at_the_end() -> Noisy:
    return Noisy(1)


class Weighted(Program):
    """Draws weights of samples."""

    def __init__(self) -> None:
        super().__init__("hand-separate")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 + self.global_rank)
        self.losses.append(float(loss := self._loss(batch) * torch.rand((), generator=generator)))
        return loss


@pytest.mark.parametrize(
    ("make", "number", "text"),
    [
        (Noisy, 1, "gave an embedding different indices"),
        (NoisyByHand, 1, "gave an embedding different indices"),
        (noisy_at_the_end, 4, "gave an embedding different indices"),
        (Weighted, 1, "had different losses or results (0."),
    ],
)
def test_ranks_of_a_tensor_group_that_draw_for_themselves_are_refused(
    make: Callable[[], Program], number: int, text: str
) -> None:
    for steps, error in run(fails, 2, make):
        assert steps == number, error
        assert error.startswith(
            f"ValueError: The ranks 0 to 1 are one tensor group, and in an earlier step they {text}"
        )
        assert "distributed_sampler_kwargs['rank']" in error


def fit_warned(rank: int, world: int) -> list[str]:
    options: Any = {"size": 2, "check": "warn"}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fitted = trainer(rank, world, ZeroStrategy(stage=1, tensor_parallel=options), max_steps=2, limit_val_batches=0)
        fitted.fit(Weighted(), loaders("hand-separate", 1, 0)["train_dataloaders"])
    return [str(one.message) for one in found if "in an earlier step they had different losses" in str(one.message)]


def test_different_losses_are_a_warning_where_plans_are() -> None:
    assert [len(found) for found in run(fit_warned, 2)] == [2, 2]


# -- Evaluation --------------------------------------------------------------------------------------------------------


class Fetching(Program):
    """Fetches its batches in the step, and has a whole embedding."""

    def __init__(self) -> None:
        super().__init__("hand-separate")
        self.example_input_array = torch.zeros(2, LENGTH, dtype=torch.long)

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids)  # type: ignore[no-any-return]

    def validation_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, *_ = next(dataloader_iter)
        return self._loss(batch)


def validate(rank: int, world: int) -> list[Any]:
    outcomes: list[Any] = []
    samples = Samples("plain")
    for ranks in (1, 2):
        monitor = ThroughputMonitor(batch_size_fn=len)
        options: Any = {"size": 2, "vocabulary": False}
        validated = trainer(
            rank, world, ZeroStrategy(stage=1, tensor_parallel=options), callbacks=[monitor], limit_val_batches=2
        )
        sampler = DistributedSampler(samples, ranks, rank % ranks, shuffle=False)
        try:
            validated.validate(Fetching(), DataLoader(samples, batch_size=2, sampler=sampler), verbose=False)
            outcomes.append([one.world_size for one in monitor._throughputs.values()])
        except ValueError as error:
            outcomes.append(str(error))
    return outcomes


def test_other_batches_in_an_evaluation_are_refused() -> None:
    for same, other in run(validate, 2):
        assert same == [1]
        assert "in an earlier step they had different losses or results (" in other
        assert "**trainer.strategy.distributed_sampler_kwargs" in other


class Writing(Program):
    """Puts its predictions into the batch, which differ by rank as those of a GPU may, and may draw noise."""

    def __init__(self, is_noisy: bool) -> None:
        super().__init__("hand-separate")
        self.is_noisy = is_noisy

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        batch["predictions"] = torch.tensor([self.global_rank])
        generator = torch.Generator().manual_seed(1000 + self.global_rank)
        return loss * torch.rand((), generator=generator) if self.is_noisy else loss


def validate_writing(rank: int, world: int) -> list[str]:
    outcomes = []
    for is_noisy in (False, True):
        validated = trainer(rank, world, ZeroStrategy(stage=1, tensor_parallel=2), limit_val_batches=2)
        try:
            validated.validate(Writing(is_noisy), loaders("hand-separate", 1, 0)["val_dataloaders"], verbose=False)
            outcomes.append("")
        except ValueError as error:
            outcomes.append(str(error))
    return outcomes


def test_results_of_an_evaluation_are_compared_and_writes_into_its_batches_are_not() -> None:
    """Results were compared only where batches have no tensors."""
    for same, other in run(validate_writing, 2):
        assert not same
        assert "in an earlier step they had different losses or results (" in other


# -- Regions that are left -------------------------------------------------------------------------------------------


class Breaking(nn.ReLU):
    """Stands between a column layer and its row layer, and fails when it is told to."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise OverflowError("too large")
        return super().forward(x)


class Catching(Program):
    """Catches an error of a block in its second step, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__("hand-separate")
        self.breaking = Breaking()
        self.drawn: list[float] = []
        for block in self.model.blocks:  # type: ignore[union-attr]
            block.mlp[1], block.mlp[3].p = self.breaking, 0.1  # type: ignore[index, union-attr]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.breaking.fails = batch_idx == 1
        try:
            loss = self._loss(batch)
        except OverflowError:
            self.breaking.fails = False
            self.drawn.append(float(torch.rand(())))
            loss = self._loss(batch)
        self.losses.append(float(loss))
        return loss


def fit_catching(rank: int, world: int) -> tuple[list[float], list[float]]:
    module = Catching()
    fitted = trainer(rank, world, ZeroStrategy(stage=1, tensor_parallel=2), max_steps=3, limit_val_batches=0)
    fitted.fit(module, loaders("hand-separate", 1, 0)["train_dataloaders"])
    return module.drawn, module.losses


def test_an_error_that_a_step_catches_leaves_the_generators_alike() -> None:
    first, second = run(fit_catching, 2)
    assert len(first[0]) == 1
    assert first == second


# -- Attributes that cannot be copied ----------------------------------------------------------------------------------


class Kept(Program):
    """Has a lock, and an iterator if it is told so."""

    def __init__(self, has_iterator: bool = False) -> None:
        super().__init__("hand-separate")
        self.lock = threading.Lock()
        if has_iterator:
            self.stream = (number for number in range(9))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        with self.lock:
            return super().training_step(batch, batch_idx)


def with_iterator() -> Kept:
    return Kept(has_iterator=True)


def test_modules_with_locks_are_trained() -> None:
    compare(Kept, {"stage": 1})


def test_iterators_of_a_module_are_refused_by_name() -> None:
    for _, error in run(fails, 2, with_iterator):
        assert error.startswith("ValueError: `self.stream` is a `generator`, which cannot be copied")
        assert "Make it in `on_fit_start`" in error
