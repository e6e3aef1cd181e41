from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero.__main__ import main
from tests.parallel.tensor.families import VOCAB, HandWritten, PackedAttention, make

HERE = __name__
CONFIG = """
trainer:
  strategy:
    class_path: lightning_zero.ZeroStrategy
    init_args: {{tensor_parallel: {options}}}
model:
  class_path: {here}.{model}
{more}
"""


class Wrapped(LightningModule):
    """Trains a hand-written model."""

    example_input_array: Any = torch.ones(2, 12, dtype=torch.long)

    def __init__(self) -> None:
        super().__init__()
        self.net = HandWritten(PackedAttention)

    def forward(self, ids: Tensor) -> Tensor:
        return self.net(ids)  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self(batch[0]).float().square().mean()
        self.log("loss", loss)
        return loss


class Fed(Wrapped):
    """Has no example of its own."""

    example_input_array = None


class Built(Wrapped):
    """Is built in hooks, and its step takes no number of the batch."""

    example_input_array = None

    def __init__(self) -> None:
        LightningModule.__init__(self)

    def setup(self, stage: str) -> None:
        assert self.trainer.estimated_stepping_batches
        self.stage = stage

    def configure_model(self) -> None:
        assert self.stage == "fit"
        self.net = HandWritten(PackedAttention)

    def training_step(self, batch: Any) -> Tensor:  # type: ignore[override]
        return super().training_step(batch, 0)


class NeedsTrainer(Wrapped):
    def setup(self, stage: str) -> None:
        self.trainer.strategy.barrier()


class Data(LightningDataModule):
    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randint(0, VOCAB, (4, 12))), batch_size=self.batch_size)


def llama() -> nn.Module:
    return make("llama")[0]


def vit() -> nn.Module:
    return make("vit")[0]


def _config(folder: Path, options: str = "2", model: str = "Wrapped", more: str = "") -> str:
    path = folder / "run.yaml"
    path.write_text(CONFIG.format(options=options, here=HERE, model=model, more=more))
    return f"--config={path}"


def test_the_plan_of_a_configuration_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tensor-plan", _config(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("tensor parallelism over 2 ranks: 99.0% of")
    assert "  net.blocks.*.attn.qkv   Packed(sections=3)" in shown
    assert "  net.blocks.*.attn       divides n_heads" in shown
    assert "net.blocks.0 and 1 more: 98.7% cut, largest error" in shown


@pytest.mark.filterwarnings("ignore:You are trying to `self.log")
def test_a_batch_of_the_data_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = f"data: {{class_path: {HERE}.Data}}"
    assert main(["tensor-plan", _config(tmp_path, "4", "Fed", data)]) == 0
    assert "over 4 ranks: 99.0%" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:You are trying to `self.log")
def test_a_model_that_is_built_in_hooks_has_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = f"data: {{class_path: {HERE}.Data}}"
    assert main(["tensor-plan", _config(tmp_path, "4", "Built", data)]) == 0
    assert "over 4 ranks: 99.0%" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["llama", "vit"])
def test_models_of_transformers_describe_their_inputs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tensor-plan", f"--module={HERE}:{name}", "--size=4"]) == 0
    assert "over 4 ranks" in capsys.readouterr().out


def test_options_of_the_command_line_override(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tensor-plan", _config(tmp_path, "{size: 2, plan: model}"), "--size=8", "--plan=auto"]) == 0
    assert "over 8 ranks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"options": "{size: 2, plan: {net.blocks.*.mlp.0: row}}"},
            "error: With this plan of tensor parallelism over 2",
        ),
        ({"options": "{size: 2, plan: model}"}, "needs a model that brings a plan, and `Wrapped` has none"),
        ({"options": "{degree: 2}"}, "`TensorParallel` has no option `degree`"),
        ({"model": "NeedsTrainer"}, "`tensor-plan` runs `setup` without a Trainer, and it failed (AttributeError: "),
        ({"model": "Missing"}, "Missing` cannot be imported"),
        ({"model": "Fed"}, "does not know how `Fed` is called. Set its `example_input_array`, or add `data`"),
        ({"model": "Data"}, "Data` gives a `Data`. Name one that gives an `nn.Module`"),
        ({"model": "Fed", "more": f"data: {{class_path: {HERE}.Data, init_args: {{batch_size: 1}}}}"}, "two samples"),
    ],
)
def test_errors_end_with_status_1(
    arguments: dict[str, str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tensor-plan", _config(tmp_path, **arguments)]) == 1
    assert message in capsys.readouterr().err


def test_sections_that_are_null_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for trainer in ("null", "{strategy: {class_path: lightning_zero.ZeroStrategy, init_args: null}}"):
        path = tmp_path / "run.yaml"
        path.write_text(f"trainer: {trainer}\nmodel: {{class_path: {HERE}.Wrapped}}\ndata: null")
        assert main(["tensor-plan", f"--config={path}", "--size=2"]) == 0
        assert "over 2 ranks: 99.0%" in capsys.readouterr().out


def test_a_model_is_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tensor-plan"]) == 1
    assert "give `--config=run.yaml` or `--module=package.module:name`" in capsys.readouterr().err
    (tmp_path / "run.yaml").write_text("trainer: {}")
    assert main(["tensor-plan", f"--config={tmp_path / 'run.yaml'}"]) == 1
    assert "has no `model` with a `class_path`" in capsys.readouterr().err
