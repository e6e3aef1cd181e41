from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor

import lightning_zero
from lightning_zero.lightning.strategy import ZeroStrategy
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


class Data(LightningDataModule):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.size, self.place = size, 7

    def train_dataloader(self) -> Any:
        return loader(self.trainer.global_rank, self.trainer.world_size)

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place + 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.place = state_dict["place"]


def _save(rank: int, world: int, folder: str) -> dict[str, Tensor]:
    fitted = trainer(rank, world, ZeroStrategy(stage=3), max_epochs=1)
    fitted.fit(seeded(_make), datamodule=Data(3))
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


def test_every_argument_counts_with_a_directory_as_with_a_file_or_is_refused(tmp_path: Path) -> None:
    worlds.run(_save, 2, str(tmp_path))
    load = lightning_zero.load_from_checkpoint
    (tmp_path / "parameters.yaml").write_text("width: 5\nname: third\n")
    (tmp_path / "parameters.csv").write_text("key,value\nwidth,5\nname,third\n")
    for path in (tmp_path / "directory.ckpt", tmp_path / "file.ckpt"):
        for file in ("parameters.yaml", "parameters.csv"):
            assert load(Wide, path, hparams_file=tmp_path / file).hparams["name"] == "third"
        assert load(Wide, path, hparams_file=tmp_path / file, name="fourth").hparams["name"] == "fourth"
        data = load(Data, path)
        assert (data.size, data.place) == (3, 8)
        assert load(Data, path, size=4).size == 4
        for wrong in ("Wide", Wide(), dict):
            with pytest.raises(TypeError, match="is not a class of a `LightningModule` or `LightningDataModule`"):
                load(wrong, path)
    for location in ({"cpu": "cpu"}, lambda storage, _: storage):
        with pytest.raises(TypeError, match="`map_location=.* is not a device"):
            load(Wide, tmp_path / "directory.ckpt", map_location=location)
        assert load(Wide, tmp_path / "file.ckpt", map_location=location).hparams["width"] == 5
    with pytest.raises(ValueError, match="parameters.json'` is neither a `.yaml` nor a `.csv` file"):
        load(Wide, tmp_path / "directory.ckpt", hparams_file=tmp_path / "parameters.json")


class Keeps(Wide):
    """Keeps state of its own by a hook and an override, and something that it reads in `on_load_checkpoint`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.anchor, self.scale, self.seen = torch.ones(3), torch.ones(3), torch.ones(3)
        self.register_load_state_dict_pre_hook(self._take_scale)

    def _take_scale(self, module: Any, state_dict: Any, prefix: str, *args: Any) -> None:
        self.scale = state_dict.pop(f"{prefix}scale")

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {**super().state_dict(*args, **options), "anchor": self.anchor, "scale": self.scale}

    def load_state_dict(self, state_dict: Any, *args: Any, **options: Any) -> Any:
        self.anchor = state_dict.pop("anchor")
        return super().load_state_dict(state_dict, *args, **options)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["state_dict"]["first.bias"]


def _save_kept(rank: int, world: int, path: str) -> None:
    fitted = trainer(rank, world, ZeroStrategy(stage=3), max_epochs=1)
    fitted.fit(seeded(Keeps), loader(rank, world))
    fitted.save_checkpoint(path)


def test_what_a_module_keeps_of_a_directory_outlives_it(tmp_path: Path) -> None:
    worlds.run(_save_kept, 2, str(tmp_path / "saved"))
    module = lightning_zero.load_from_checkpoint(Keeps, tmp_path / "saved")
    shutil.rmtree(tmp_path / "saved")
    assert torch.equal(module.anchor.mul_(2), torch.full((3,), 2.0))
    assert torch.equal(module.scale.mul_(2), torch.full((3,), 2.0))
    assert torch.equal(module.seen, module.first.bias)


def test_the_classmethod_of_lightning_says_who_reads_a_directory(tmp_path: Path) -> None:
    (tmp_path / "epoch=3.ckpt").mkdir()
    with pytest.raises(IsADirectoryError, match="epoch=3.ckpt` is a directory.*`lightning_zero.load_from_checkpoint"):
        Wide.load_from_checkpoint(tmp_path / "epoch=3.ckpt")
    lightning_zero.lightning.checkpoint_io.name_the_reader_of_directories()  # once is enough
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
