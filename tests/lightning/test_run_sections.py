from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse.typing import Path_fr
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn, ones
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_zero.__main__ import main
from lightning_zero.lightning.run_config import RunConfig
from lightning_zero.lightning.run_sections import RunSections

HERE = __name__


class Kind(enum.Enum):
    LARGE = 8
    SMALL = 2


@dataclass
class Size:
    width: int = 4
    kind: Kind = Kind.SMALL


class Model(LightningModule):
    def __init__(
        self,
        optimizer: Callable[[Iterable[Any]], Optimizer],
        size: Size = Size(),  # noqa: B008  (as in programs for `LightningCLI`)
        file: Path_fr | None = None,
        inner: nn.Module | None = None,
        timeout: timedelta = timedelta(1),
        **options: Any,
    ) -> None:
        super().__init__()
        self.given = [size, None if file is None else Path(file()).name, str(inner), timeout, options]
        self.make_optimizer = optimizer
        self.layer = nn.Linear(size.width, size.kind.value)
        self.example_input_array = ones(4, size.width)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).sum()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Optimizer:
        return self.make_optimizer(self.parameters())


class Data(LightningDataModule):
    def __init__(self, count: int = 8, fault: str | None = None) -> None:
        super().__init__()
        self.count, self.fault = count, fault

    def setup(self, stage: str) -> None:
        if self.fault is not None:
            {"trainer": lambda: self.trainer.world_size, "key": lambda: {}["text"]}[self.fault]()  # type: ignore[union-attr]

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(ones(self.count, 4), batch_size=2)  # type: ignore[arg-type]


ARGUMENTS = """
  optimizer: {class_path: torch.optim.SGD, init_args: {lr: 1e-2}}
  size: {width: 16, kind: LARGE}
  file: run.yaml
  inner: {class_path: torch.nn.Linear, init_args: {in_features: 3, out_features: 5}}
  timeout: 0:10:00
"""


def _written(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def _read(path: Path, module: str | None = None, data: str | None = None) -> RunSections:
    return RunSections.read("estimate", path, module=module, data=data)


def _seen(model: Any) -> list[Any]:
    (group,) = model.configure_optimizers().param_groups
    return [*model.given, model.layer.weight.shape, group["lr"]]


@pytest.mark.filterwarnings("ignore")
def test_plain_sections_mean_the_same_under_lightning_cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _written(tmp_path, f"model:{ARGUMENTS}data: {{count: 6}}")
    found = _read(path, f"{HERE}:Model", f"{HERE}:Data")
    monkeypatch.chdir(tmp_path.parent)
    monkeypatch.setattr("sys.argv", ["program"])
    cli = LightningCLI(Model, Data, args=["--config", str(path)], run=False, save_config_callback=None)
    assert _seen(found.model()()) == _seen(cli.model)
    assert torch.equal(found.batch(), ones(2, 4))


@pytest.mark.filterwarnings("ignore")
def test_classes_in_the_file_mean_the_same_under_lightning_cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ARGUMENTS.replace("\n ", "\n   ").replace("\n    ", "\n     ")
    path = _written(
        tmp_path,
        f"model:\n  class_path: {HERE}.Model\n  init_args:{arguments}  dict_kwargs: {{extra: 3}}\ndata: {HERE}.Data",
    )
    monkeypatch.setattr("sys.argv", ["program"])
    cli = LightningCLI(args=["--config", str(path)], run=False, save_config_callback=None)
    found = _read(path)
    assert _seen(found.model()()) == _seen(cli.model)
    assert found.model()().given[-1] == {"extra": 3}
    assert torch.equal(found.batch(), ones(2, 4))


def test_a_section_may_be_a_file_beside_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "data.yaml").write_text("count: 1")
    found = _read(_written(tmp_path, "data: data.yaml"), "torch.nn:Identity", f"{HERE}:Data")
    assert torch.equal(found.batch(), ones(1, 4))


class Shuffled(LightningDataModule):
    def setup(self, stage: str) -> None:
        self.rows = torch.rand(100, 4)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.rows, batch_size=2, shuffle=True)  # type: ignore[arg-type]


def test_the_batch_is_the_same_every_time(tmp_path: Path) -> None:
    """Two calls of a command had batches of other lengths, and other peaks."""
    found = _read(_written(tmp_path, "model: {}"), "torch.nn:Identity", f"{HERE}:Shuffled")
    before = torch.get_rng_state()
    assert torch.equal(found.batch(), found.batch())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("command", ["estimate", "tensor-plan"])
def test_the_trainer_may_be_a_file_and_no_other_word(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _written(tmp_path, "trainer: trainer.yaml")
    given = [command, f"--config={path}", "--module=torch.nn:Identity"]
    assert main(given) == 1
    assert "`trainer: trainer.yaml` of" in capsys.readouterr().err
    (tmp_path / "trainer.yaml").write_text("devices: 3\nstrategy: zero_1\nprecision: bf16-mixed")
    found = RunConfig.read(command, path, module="torch.nn:Identity", data=None)
    assert (found.devices, found.strategy.stage, found.precision) == (3, 1, "bf16-mixed")


@pytest.mark.parametrize(
    "plugin",
    [
        "lightning.pytorch.plugins.environments.LightningEnvironment",
        "SLURMEnvironment",
        "{class_path: lightning.pytorch.plugins.TorchCheckpointIO}",
        "[]",
    ],
)
def test_plugins_that_a_step_does_not_see_are_passed_over(plugin: str, tmp_path: Path) -> None:
    path = _written(tmp_path, f"trainer: {{plugins: {plugin}}}")
    assert RunConfig.read("estimate", path, module="torch.nn:Identity", data=None).precision is None


@pytest.mark.parametrize("plugin", ["HalfPrecision", "[{class_path: lightning.pytorch.plugins.TorchSyncBatchNorm}]"])
def test_other_plugins_are_refused(plugin: str, tmp_path: Path) -> None:
    path = _written(tmp_path, f"trainer: {{plugins: {plugin}}}")
    with pytest.raises(ValueError, match=r"`estimate` does not read `plugins: .*`trainer.precision`"):
        RunConfig.read("estimate", path, module="torch.nn:Identity", data=None)


@pytest.mark.parametrize("command", ["estimate", "simulate", "tensor-plan"])
def test_a_second_configuration_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--config", "a.yaml", "--config=b.yaml"]) == 1
    assert f"`{command}` reads one `--config`. Let the program merge" in capsys.readouterr().err


def test_every_model_is_a_new_one(tmp_path: Path) -> None:
    make = _read(_written(tmp_path, f"model:{ARGUMENTS}"), f"{HERE}:Model").model()
    assert make().layer.weight is not make().layer.weight  # type: ignore[union-attr]


def test_options_of_the_strategy_and_arguments_of_the_optimizer_are_converted(tmp_path: Path) -> None:
    strategy = "{class_path: lightning_zero.ZeroStrategy, init_args: {stage: 2, timeout: 0:10:00}}"
    path = _written(
        tmp_path,
        f"trainer: {{strategy: {strategy}}}\noptimizer: {{class_path: AdamW, init_args: {{lr: 1, betas: [0.5, 0.9]}}}}",
    )
    config = RunConfig.read("estimate", path, module="torch.nn:Identity", data=None)
    assert config.strategy.communication.timeout_s == 600
    assert config.optimizer is not None
    (group,) = config.optimizer([nn.Parameter(ones(2))]).param_groups
    assert (group["lr"], group["betas"]) == (1.0, (0.5, 0.9))


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("model: {lr: 1}", [], "has no `model` with a `class_path`. Add one, or name the class that the program gives"),
        ("model: {width: 1}", ["--module={here}:Model"], "`{here}:Model` does not take these arguments: "),
        ("model: {size: {width: wide}}", ["--module={here}:Model"], "Got value: wide"),
        ("model: {class_path: {here}.Model, width: 1}", [], "`model` has `width` beside `class_path`. Put it into its"),
        ("model: {class_path: {here}.Model}", [], "`{here}.Model` cannot be made: TypeError: Model.__init__() missing"),
        ("model: {class_path: {here}.Model}", ["--module={here}:Model"], "has a `class_path` already. Leave `--module"),
        (
            "model: {class_path: torch.nn.Linear, dict_kwargs: {many: 2}}",
            [],
            "got an unexpected keyword argument 'many'. Its arguments are `many`.",
        ),
        ("data: {count: 4}", ["--module=torch.nn:Identity"], "name its class with `--data=package.module:name`"),
        ("data: {count: 0}", ["--module=torch.nn:Identity", "--data={here}:Data"], "the training data has no batch"),
        (
            "data: {fault: trainer}",
            ["--module=torch.nn:Identity", "--data={here}:Data"],
            "`Data` gives no batch without a Trainer (AttributeError: 'NoneType' object has no attribute 'world_size')",
        ),
        ("data: {fault: key}", ["--module=torch.nn:Identity", "--data={here}:Data"], "(KeyError: 'text')"),
    ],
    ids=lambda value: value.replace("{here}", "").strip() if isinstance(value, str) and "`" not in value else "",
)
@pytest.mark.parametrize("command", ["estimate", "tensor-plan"])
def test_wrong_sections_are_an_error_of_one_line(
    command: str, text: str, options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _written(tmp_path, "trainer: {devices: 1}\n" + text.replace("{here}", HERE))
    more = [option.replace("{here}", HERE) for option in options]
    assert main([command, f"--config={path}", *more]) == 1
    shown = capsys.readouterr().err
    assert message.replace("{here}", HERE) in shown
    assert shown.count("\n") == 1
