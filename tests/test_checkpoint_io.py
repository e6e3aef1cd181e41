from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_zero
from lightning_zero.strategy import ZeroStrategy
from tests import worlds
from tests.lightning_programs import Net, assert_equal, loader, seeded, trainer, weights


class Wide(Net):
    """Has hyper-parameters, and something of its own in the checkpoint."""

    def __init__(self, width: int = 6, name: str = "first") -> None:
        super().__init__(width)
        self.save_hyperparameters()
        self.loaded = ""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = "kept"

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint["mine"]


def _make() -> Wide:
    return Wide(width=5)


def _save(rank: int, world: int, folder: str) -> dict[str, Tensor]:
    fitted = trainer(rank, world, ZeroStrategy(stage=3), max_epochs=1)
    fitted.fit(seeded(_make), loader(rank, world))
    fitted.save_checkpoint(f"{folder}/directory.ckpt")
    assert isinstance(fitted.strategy, ZeroStrategy)
    fitted.strategy.state_dict_type = "full"
    fitted.save_checkpoint(f"{folder}/file.ckpt")
    return weights(fitted)


def test_a_module_is_made_from_a_directory_as_from_a_file(tmp_path: Path) -> None:
    expected = worlds.run(_save, 2, str(tmp_path))[0]
    for name in ("directory.ckpt", "file.ckpt"):
        module = lightning_zero.load_from_checkpoint(Wide, tmp_path / name, name="second", map_location="cpu")
        assert isinstance(module, Wide)
        assert_equal(dict(module.named_parameters()), expected)
        assert (module.hparams["width"], module.hparams["name"], module.loaded) == (5, "second", "kept")
        with pytest.raises(RuntimeError, match="size mismatch for first.weight"):
            lightning_zero.load_from_checkpoint(Wide, tmp_path / name, width=6)
    with pytest.raises(FileNotFoundError):
        lightning_zero.load_from_checkpoint(Wide, tmp_path / "nothing")


def test_the_classmethod_of_lightning_says_who_reads_a_directory(tmp_path: Path) -> None:
    (tmp_path / "epoch=3.ckpt").mkdir()
    with pytest.raises(IsADirectoryError, match="epoch=3.ckpt` is a directory.*`lightning_zero.load_from_checkpoint"):
        Wide.load_from_checkpoint(tmp_path / "epoch=3.ckpt")
    lightning_zero.checkpoint_io.name_the_reader_of_directories()  # once is enough
    with pytest.raises(FileNotFoundError):
        Wide.load_from_checkpoint(tmp_path / "nothing.ckpt")


class Half(Wide):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        del self.last
        self.strict_loading = False


def test_names_that_differ_are_left_out_on_request(tmp_path: Path) -> None:
    expected = worlds.run(_save, 2, str(tmp_path))[0]
    module = lightning_zero.load_from_checkpoint(Half, tmp_path / "directory.ckpt")
    assert torch.equal(module.first.weight, expected["first.weight"])
    with pytest.raises(ValueError, match="in conflict with"):
        lightning_zero.load_from_checkpoint(Half, tmp_path / "directory.ckpt", strict=True)
