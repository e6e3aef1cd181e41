"""Checkpoints as the Trainer handles them: kept, removed, written when something goes wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO

from lightning_zero.checkpoint import directory
from lightning_zero.lightning.strategy import ZeroStrategy
from tests.lightning_programs import WORLD, Net, assert_equal, loader, seeded, trainer, weights
from tests.sampling import sample
from tests.worlds import run


def checkpoints(rank: int, world: int, folder: str, save_last: Any) -> None:
    for stage in (2, 3):
        path = Path(folder) / f"{stage}-{save_last}"
        callback = ModelCheckpoint(
            path, monitor="val_loss", save_top_k=2, save_last=save_last, filename="{epoch}", every_n_epochs=1
        )
        fitted = trainer(rank, world, stage, callbacks=callback, enable_checkpointing=True, max_epochs=4)
        fitted.fit(seeded(Net), loader(rank, world), loader(rank, world, size=8))
        fitted.strategy.barrier()
        names = sorted(entry.name for entry in path.iterdir())
        assert names == ["epoch=2.ckpt", "epoch=3.ckpt", "last.ckpt"], names
        assert (path / "last.ckpt").is_symlink() == (save_last == "link")
        expected = weights(fitted)
        resumed = trainer(rank, world, stage, max_epochs=4)
        resumed.fit(seeded(Net), loader(rank, world), ckpt_path=str(path / "last.ckpt"))
        assert_equal(weights(resumed), expected, what=f"stage {stage}")


@pytest.mark.parametrize("save_last", sample([True, "link"], "link"))
def test_model_checkpoint_keeps_and_removes_what_it_should(save_last: Any, tmp_path: Path) -> None:
    run(checkpoints, WORLD, str(tmp_path), save_last)


class Failing(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2 and self.current_epoch == 0 and self.trainer.ckpt_path is None:
            raise ValueError("on all ranks")
        return super().training_step(batch, batch_idx)


def save_on_exception(rank: int, world: int, folder: str) -> None:
    for stage in (1, 3):
        path = str(Path(folder) / str(stage))
        callback = OnExceptionCheckpoint(path, "crash")
        failing = trainer(rank, world, stage, callbacks=callback, enable_checkpointing=True)
        with pytest.raises(ValueError, match="on all ranks"):
            failing.fit(seeded(Failing), loader(rank, world))
        resumed = trainer(rank, world, stage, max_epochs=1)
        resumed.fit(seeded(Failing), loader(rank, world), ckpt_path=f"{path}/crash.ckpt")
        whole = trainer(rank, world, stage, max_epochs=1)
        whole.fit(seeded(Net), loader(rank, world))
        assert resumed.global_step == whole.global_step
        again = trainer(rank, world, stage, max_epochs=1)
        with pytest.raises(ValueError, match="on all ranks"):
            again.fit(failing.lightning_module, loader(rank, world))


def test_error_on_all_ranks_leaves_a_checkpoint_and_a_usable_module(tmp_path: Path) -> None:
    run(save_on_exception, WORLD, str(tmp_path))


def checkpoint_plugins(rank: int, world: int, folder: str) -> None:
    for stage in (1, 3):
        path = str(Path(folder) / f"{stage}.ckpt")
        strategy = ZeroStrategy(stage=stage, state_dict_type="full")  # type: ignore[arg-type]
        first = trainer(rank, world, strategy, max_epochs=1, plugins=[AsyncCheckpointIO()])
        first.fit(seeded(Net), loader(rank, world))
        first.save_checkpoint(path)
        first.strategy.checkpoint_io.teardown()
        first.strategy.barrier()
        assert Path(path).is_file()
        plain = trainer(rank, world, "ddp", max_epochs=1)
        plain.fit(seeded(Net), loader(rank, world), ckpt_path=path)
        assert_equal(weights(plain), weights(first), what=f"stage {stage}")
        fitted = trainer(rank, world, 3, max_epochs=1)
        fitted.fit(seeded(Net), loader(rank, world))
        with pytest.raises(ValueError, match="state_dict_type='full'"):
            fitted.save_checkpoint(path, storage_options={"a": 1})
        with pytest.raises(ValueError, match="`AsyncCheckpointIO` writes single files"):
            trainer(rank, world, 3, plugins=[AsyncCheckpointIO()]).fit(seeded(Net), loader(rank, world))


def test_checkpoint_plugins_write_single_files_and_are_refused_for_directories(tmp_path: Path) -> None:
    run(checkpoint_plugins, WORLD, str(tmp_path))


class Other(ZeroStrategy):
    """Its files are dictionaries at the place of those that it has read before, with no names of parameters."""

    read: dict[str, Any] | None = None

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        found = super().load_checkpoint(*args, **kwargs)
        self.num_known, self.read = len(self._stored), found
        return found


def read_twice(rank: int, world: int, folder: str) -> None:
    path = str(Path(folder) / "saved.ckpt")
    strategy = Other(stage=1)
    validated = trainer(rank, world, strategy, max_epochs=1)
    validated.fit(seeded(Net), loader(rank, world))
    validated.save_checkpoint(path)
    validated.validate(seeded(Net), loader(rank, world), ckpt_path=path, verbose=False)
    assert (strategy.num_known, strategy._stored) == (1, {})
    assert strategy.read is not None
    strategy._stored[id(strategy.read)] = {}
    known, others = strategy.read, {"state_dict": {}, "pytorch-lightning_version": "2.5", "optimizer_states": []}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(directory, "load", lambda *args, **kwargs: known.clear() or known.update(others) or known)
        assert strategy.load_checkpoint(path) is known
    assert not strategy._stored


def test_names_of_a_checkpoint_are_not_taken_for_those_of_another(tmp_path: Path) -> None:
    """An evaluation left them, and a later dictionary at the same place in memory had them."""
    run(read_twice, 1, str(tmp_path))


class Grouped(Net):
    """Matrices decay, vectors do not; each group has a learning rate that a scheduler moves."""

    def __init__(self, *, vectors_first: bool = False, lr: float = 0.02) -> None:
        super().__init__()
        self.vectors_first, self.lr = vectors_first, lr

    def configure_optimizers(self) -> Any:
        matrices = {"params": [p for p in self.parameters() if p.ndim >= 2], "lr": 0.02, "weight_decay": 0.3}
        vectors = {"params": [p for p in self.parameters() if p.ndim < 2], "lr": self.lr, "weight_decay": 0.0}
        groups = [vectors, matrices] if self.vectors_first else [matrices, vectors]
        optimizer = torch.optim.AdamW(groups)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def groups_in_another_order(rank: int, world: int, folder: str) -> None:
    for stage in (1, 3):
        for lr in (0.02, 0.01):
            path = f"{folder}/{stage}-{lr}.ckpt"
            fitted = trainer(rank, world, stage, max_epochs=1)
            fitted.fit(seeded(lambda: Grouped(lr=lr)), loader(rank, world))  # noqa: B023
            fitted.save_checkpoint(path)
            whole = trainer(rank, world, stage, max_epochs=2)
            whole.fit(seeded(lambda: Grouped(lr=lr)), loader(rank, world), ckpt_path=path)  # noqa: B023
            resumed = trainer(rank, world, stage, max_epochs=2)
            module = seeded(lambda: Grouped(vectors_first=True, lr=lr))  # noqa: B023
            if lr == 0.01:
                with pytest.raises(ValueError, match=r"another order, and `base_lrs` of `StepLR` has a value for each"):
                    resumed.fit(module, loader(rank, world), ckpt_path=path)
                continue
            resumed.fit(module, loader(rank, world), ckpt_path=path)
            assert [group["weight_decay"] for group in resumed.optimizers[0].param_groups] == [0.0, 0.3]
            assert_equal(weights(resumed), weights(whole))


def test_groups_in_another_order_resume_exactly_or_are_refused(tmp_path: Path) -> None:
    run(groups_in_another_order, WORLD, str(tmp_path))
