"""Models of all shapes train under the strategy as under ``strategy="ddp"``."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_summary import ModelSummary
from torch import Tensor, nn

from tests.lightning_programs import (
    STAGES,
    WORLD,
    Net,
    assert_equal,
    assert_moved,
    loader,
    parity,
    seeded,
    trainer,
    weights,
)
from tests.worlds import run


class Shapes(Net):
    """A bare parameter, a weight used in another module and functionally, a method other than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.blocks[0].linear.weight

    def extra(self, x: Tensor) -> Tensor:
        return self.blocks[1].linear(x) * self.scale

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        x = self.blocks[0](self.first(x))
        x = self.tied(x) + self.extra(x) + F.linear(x, self.blocks[1].linear.weight)
        return F.mse_loss(self.last(x), y)


class Unused(Net):
    """Other blocks are skipped in other steps and on other ranks; one parameter is frozen, one thawed late."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(3, 3)
        self.first.weight.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.first.weight.requires_grad_(True)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            if (index + self.global_rank + self._step) % 3:
                x = block(x)
        return F.mse_loss(self.last(x), y)

    _step = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._step = batch_idx


class Unfrozen(Net):
    """Frozen at first; DDP, which never reduces what was frozen when it wrapped, is no reference for it."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.first.requires_grad_(self.current_epoch > 0)


class DecayGroups(Net):
    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [p for p in self.parameters() if p.ndim >= 2], "weight_decay": 0.3},
            {"params": [p for p in self.parameters() if p.ndim < 2], "weight_decay": 0.0, "lr": 0.05},
        ]
        return torch.optim.AdamW(groups, lr=0.02, fused=True)


class BatchNormed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.blocks[0](self.first(x))))


class CompiledBlock(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].compile(backend="aot_eager")


PROGRAMS: dict[str, tuple[Callable[[], LightningModule], dict[str, Any]]] = {
    "shapes": (Shapes, {}),
    "decay-groups": (DecayGroups, {}),
    "batch-norm": (BatchNormed, {}),
    "compiled-block": (CompiledBlock, {}),
}


def program(rank: int, world: int, name: str) -> None:
    make, options = PROGRAMS[name]
    reference = "ddp_find_unused_parameters_true" if name in ("shapes", "batch-norm") else "ddp"
    parity(rank, world, make, reference=reference, **options)


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_equals_ddp(name: str) -> None:
    run(program, WORLD, name, timeout_s=90)


def unused(rank: int, world: int, thaw: bool) -> None:
    """The frozen part is thawed in a module of its own fit: every stage must agree with stage 0 to the bit."""
    make = Unfrozen if thaw else Unused

    def fit(strategy: Any) -> dict[str, Tensor]:
        fitted = trainer(rank, world, strategy, accumulate_grad_batches=1)
        fitted.fit(seeded(make), loader(rank, world))
        return weights(fitted)

    expected = fit(0)
    assert_moved(expected, make)
    for stage in (1, 2, 3):
        assert_equal(fit(stage), expected, what=f"stage {stage}")
    assert not torch.equal(expected["first.weight"], dict(seeded(make).named_parameters())["first.weight"].detach())


@pytest.mark.parametrize("thaw", [False, True], ids=["skipped-blocks", "thawed"])
def test_unused_and_frozen_parameters_do_not_hang_and_stages_agree(thaw: bool) -> None:
    run(unused, WORLD, thaw)


def sync_batch_norm(rank: int, world: int) -> None:
    for stage in (1, 3):
        module = seeded(BatchNormed)
        for is_synced in (False, True, True, False):  # with a new Trainer each
            fitted = trainer(rank, world, stage, sync_batchnorm=is_synced, max_steps=0)
            fitted.validate(module, loader(rank, world), verbose=False)
            fitted.fit(module, loader(rank, world))
            assert isinstance(module.norm, nn.SyncBatchNorm) == is_synced
            fitted.validate(module, loader(rank, world), verbose=False)
            assert isinstance(module.norm, nn.SyncBatchNorm) == is_synced
            assert torch.equal(weights(fitted)["norm.weight"], torch.ones(6))


def test_sync_batchnorm_is_that_of_the_trainer_that_fits() -> None:
    run(sync_batch_norm, WORLD)


def summary(rank: int, world: int) -> None:
    expected = ModelSummary(seeded(Net)).total_parameters
    for stage in STAGES:
        fitted = trainer(rank, world, stage, max_epochs=1, limit_train_batches=1)
        module = seeded(Net)
        fitted.fit(module, loader(rank, world))
        assert ModelSummary(module).total_parameters == expected
        assert ModelSummary(module).trainable_parameters == expected


def test_model_summary_shows_true_sizes() -> None:
    run(summary, WORLD)


def compiled(rank: int, world: int) -> None:
    plain = trainer(rank, world, "ddp", max_epochs=1)
    plain.fit(seeded(Net), loader(rank, world))
    expected = weights(plain)
    for stage in STAGES:
        torch._dynamo.reset()
        fitted = trainer(rank, world, stage, max_epochs=1)
        fitted.fit(torch.compile(seeded(Net), backend="aot_eager"), loader(rank, world))  # type: ignore[arg-type]
        assert_equal(weights(fitted), expected, atol=1e-6, what=f"stage {stage}")


def test_compiled_lightning_module_is_accepted() -> None:
    run(compiled, WORLD, timeout_s=90)


class Configured(LightningModule):
    """Builds its network in `configure_model`."""

    def __init__(self) -> None:
        super().__init__()
        self.net: Net | None = None

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(5)
            self.net = Net()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.net is not None
        return self.net.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert self.net is not None
        self.log("val_loss", self.net.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02, fused=True)


def configured(rank: int, world: int, folder: str) -> None:
    def fit(strategy: Any) -> dict[str, Tensor]:
        fitted = trainer(rank, world, strategy, max_epochs=1)
        module = Configured()
        fitted.fit(module, loader(rank, world))
        fitted.validate(module, loader(rank, world), verbose=False)
        return weights(fitted)

    expected = fit("ddp")
    for stage in STAGES:
        assert_equal(fit(stage), expected, what=f"stage {stage}")


def test_module_built_in_configure_model_equals_ddp(tmp_path: Path) -> None:
    run(configured, WORLD, str(tmp_path))


def meta(rank: int, world: int, folder: str) -> None:
    for stage in (1, 3):
        path = str(Path(folder) / f"{stage}.ckpt")
        first = trainer(rank, world, stage, max_epochs=1)
        first.fit(seeded(Net), loader(rank, world))
        first.save_checkpoint(path)
        second = trainer(rank, world, stage, max_epochs=1)
        with second.init_module(empty_init=True):
            module = Net()
        assert module.first.weight.is_meta
        second.test(module, loader(rank, world), ckpt_path=path, verbose=False)
        assert_equal(weights(second), weights(first), what=f"stage {stage}")


def test_module_on_the_meta_device_is_filled_from_a_checkpoint(tmp_path: Path) -> None:
    run(meta, WORLD, str(tmp_path))


def one_rank(rank: int, world: int) -> None:
    parity(rank, world, reference="auto", plugins=lambda: [])


def test_one_rank_equals_the_single_device_strategy() -> None:
    run(one_rank, 1)


def collected(rank: int, world: int) -> None:
    for stage in (1, 3):
        fitted = trainer(rank, world, stage, max_epochs=1)
        module = seeded(Net)
        fitted.fit(module, loader(rank, world))
        alive = weakref.ref(module)
        del fitted, module
        gc.collect()
        assert alive() is None, f"stage {stage}"


def test_module_is_collected_with_its_trainer() -> None:
    run(collected, WORLD)
