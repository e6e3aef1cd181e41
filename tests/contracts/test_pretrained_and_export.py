"""Weights come into and go out of runs of Lightning by one line, wherever it stands."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_zero import ExportSafetensors, ZeroStrategy, export_safetensors, load_pretrained
from tests.lightning_programs import Block, Net, loader, trainer, weights
from tests.sampling import sample
from tests.worlds import run

WORLD = 2


def _trunk(width: int = 6) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, width), Block(width), Block(width), nn.Linear(width, 3))


class Pretrained(Net):
    """Makes its trunk at one moment and loads it at another."""

    made_on = "meta"

    def __init__(self, path: str, moment: str) -> None:
        super().__init__()
        del self.first, self.blocks, self.last
        self.trunk: nn.Module | None = None
        self.path = path
        self.moment = moment
        self.seen: dict[str, Tensor] = {}
        if moment == "__init__":
            self.trunk = _trunk()
            load_pretrained(self.trunk, path)

    def forward(self, x: Tensor) -> Tensor:
        assert self.trunk is not None
        return self.trunk(x)

    def configure_model(self) -> None:
        if self.trunk is not None:
            return
        with torch.device(self.made_on):
            self.trunk = _trunk()
        if self.moment == "configure_model":
            load_pretrained(self, self.path, rename={"": "trunk."})

    def configure_optimizers(self) -> Any:
        if self.moment == "configure_optimizers":
            load_pretrained(self.trunk, self.path)
        return super().configure_optimizers()

    def on_fit_start(self) -> None:
        if self.moment == "on_fit_start":
            load_pretrained(self.trunk, self.path)

    def on_train_start(self) -> None:
        self.seen = weights(self.trainer)


def _fit(rank: int, world: int, path: str, moment: str, stage: int) -> dict[str, Tensor]:
    module = Pretrained(path, moment)
    fitted = trainer(rank, world, stage, max_epochs=1)
    fitted.fit(module, loader(rank, world))
    return module.seen


MOMENTS = ("__init__", "configure_model", "configure_optimizers", "on_fit_start")
CASES = [(moment, stage) for moment in MOMENTS for stage in (0, 1, 2, 3)]


@pytest.mark.parametrize(
    "case",
    sample(CASES, ("__init__", 1), ("configure_model", 3), ("configure_optimizers", 0), ("on_fit_start", 3)),
    ids=lambda case: f"{case[0]}-stage{case[1]}",
)
def test_training_starts_from_pretrained_weights_wherever_they_are_loaded(
    case: tuple[str, int], tmp_path: Path
) -> None:
    torch.manual_seed(3)
    values = {name: torch.randn(value.shape) for name, value in _trunk().state_dict().items()}
    safetensors.torch.save_file(values, tmp_path / "model.safetensors")
    moment, stage = case
    for seen in run(_fit, WORLD, str(tmp_path), moment, stage):
        assert seen.keys() == {f"trunk.{name}" for name in values}
        assert all(torch.equal(seen[f"trunk.{name}"], value) for name, value in values.items())


def _pipelined(rank: int, world: int, path: str, moment: str) -> dict[str, Tensor]:
    module = Pretrained(path, moment)
    module.made_on = "cpu"
    strategy = ZeroStrategy(stage=1, pipeline=2)
    fitted = trainer(rank, world, strategy, max_epochs=1, callbacks=ExportSafetensors(prefix="trunk."))
    fitted.fit(module, loader(0, 1))
    fitted.save_checkpoint(f"{path}/saved.ckpt")
    return module.seen


@pytest.mark.parametrize("moment", ["configure_model", "on_fit_start"])
def test_stages_of_a_pipeline_load_and_export_their_parts(moment: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    values = {name: torch.randn(value.shape) for name, value in _trunk().state_dict().items()}
    safetensors.torch.save_file(values, tmp_path / "model.safetensors")
    for seen in run(_pipelined, WORLD, str(tmp_path), moment):
        assert all(torch.equal(seen[f"trunk.{name}"], value) for name, value in values.items())
    exported = safetensors.torch.load_file(tmp_path / "saved-safetensors" / "model.safetensors")
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)["state_dict"]
    assert exported.keys() == values.keys()
    assert all(torch.equal(saved[f"trunk.{name}"], value) for name, value in exported.items())


class _Counts(Block):
    """Counts its batches in a module buffer."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return super().forward(x)


class _Counting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Counts(6) for _ in self.blocks)


def _export_by_hand(rank: int, world: int, path: str) -> None:
    module = _Counting()
    fitted = trainer(rank, world, ZeroStrategy(stage=1, pipeline=2), max_epochs=1)
    fitted.fit(module, loader(0, 1))
    export_safetensors(module, f"{path}/exported")
    fitted.save_checkpoint(f"{path}/saved.ckpt")


def test_an_export_by_hand_has_the_module_buffers_of_all_stages(tmp_path: Path) -> None:
    run(_export_by_hand, WORLD, str(tmp_path))
    exported = safetensors.torch.load_file(tmp_path / "exported" / "model.safetensors")
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)["state_dict"]
    counts = [name for name in saved if name.endswith("count")]
    assert counts
    assert all(torch.equal(exported[name], saved[name]) and saved[name] > 0 for name in counts)


def _export(rank: int, world: int, path: str, options: dict[str, Any], save: dict[str, Any]) -> dict[str, Tensor]:
    callbacks = [ModelCheckpoint(path, filename="{epoch}", **save), ExportSafetensors(**options)]
    strategy = ZeroStrategy(stage=3, **({"async_save": True} if save.get("save_top_k") == 2 else {}))
    fitted = trainer(rank, world, strategy, max_epochs=3, callbacks=callbacks, enable_checkpointing=True)
    fitted.fit(Net(), loader(rank, world))
    return weights(fitted)


@pytest.mark.parametrize("top", [1, 2])
def test_exports_come_and_go_with_the_checkpoints_beside_them(top: int, tmp_path: Path) -> None:
    save = {"save_top_k": top, "monitor": "epoch", "mode": "max"} if top == 2 else {"save_top_k": 1}
    values = run(_export, WORLD, str(tmp_path), {}, save)[0]
    kept = [f"epoch={number}" for number in range(3 - top, 3)]
    assert sorted(os.listdir(tmp_path)) == sorted(f"{name}{end}" for name in kept for end in (".ckpt", "-safetensors"))
    loaded = safetensors.torch.load_file(tmp_path / "epoch=2-safetensors" / "model.safetensors")
    assert loaded.keys() == values.keys()
    assert all(torch.equal(loaded[name], value) for name, value in values.items())


def test_what_is_exported_is_chosen(tmp_path: Path) -> None:
    options = {"dtype": "bf16", "include": ["blocks.*"], "prefix": "blocks."}
    values = run(_export, WORLD, str(tmp_path), options, {"save_weights_only": True})[0]
    loaded = safetensors.torch.load_file(tmp_path / "epoch=2-safetensors" / "model.safetensors")
    assert loaded.keys() == {name.removeprefix("blocks.") for name in values if name.startswith("blocks.")}
    assert all(torch.equal(loaded[name], values[f"blocks.{name}"].bfloat16()) for name in loaded)


def _other_strategy(rank: int, world: int) -> None:
    fitted = trainer(rank, world, "ddp", max_epochs=1, callbacks=ExportSafetensors())
    with pytest.raises(ValueError, match="`ExportSafetensors` needs `ZeroStrategy`, and the strategy is `DDPStrategy`"):
        fitted.fit(Net(), loader(rank, world))


def test_other_strategies_are_refused() -> None:
    run(_other_strategy, WORLD)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "`dtype='int8'` is not known. Use 'fp64', 'fp32', 'bf16', 'fp16' or None"),
        ({"max_shard_size": "much"}, "`max_shard_size='much'` is not a size"),
    ],
)
def test_options_that_are_not_known_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExportSafetensors(**options)
