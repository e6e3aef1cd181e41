from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning import LightningDataModule
from torch import Tensor, nn, ones
from torch.utils.data import DataLoader

from lightning_zero.__main__ import main
from lightning_zero.lightning.run_config import RunConfig
from tests.lightning.test_estimate import WIDTH, Program

HERE = __name__
GPT = Path(__file__).parents[2] / "examples" / "gpt"


class Described(Program):
    example_input_array = ones(4, WIDTH)


class Data(LightningDataModule):
    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(ones(8, WIDTH), batch_size=2)  # type: ignore[arg-type]


class Talks(Described):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        print("a step")
        return super().training_step(batch, batch_idx)


def not_a_module() -> int:
    return 3


def _config(folder: Path, strategy: str = "zero_2", model: str = "Described", more: str = "") -> str:
    path = folder / "run.yaml"
    path.write_text(
        f"trainer: {{devices: 1, precision: bf16-mixed, strategy: {strategy}}}\n"
        f"model: {{class_path: {HERE}.{model}}}\n{more}"
    )
    return f"--config={path}"


def test_the_table_names_the_fastest_setting_and_its_yaml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", _config(tmp_path), "--world=8", "--memory=1GiB"]) == 0
    shown = capsys.readouterr().out
    assert "on 8 rank(s), precision bf16-mixed" in shown
    assert "\n>  stage 2 " in shown
    head, text = shown.split("The fastest setting that fits into 1GiB: stage 0\n\n")
    options = yaml.safe_load(text)["trainer"]["strategy"]
    assert options == {"class_path": "lightning_zero.ZeroStrategy", "init_args": {"stage": 0}}
    assert head.count("yes") == 16


def test_nothing_that_fits_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", _config(tmp_path), "--memory=1KiB", "--only=true"]) == 0
    assert "No setting fits into 1KiB: use more ranks" in capsys.readouterr().out


def test_json_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    strategy = "{class_path: lightning_zero.ZeroStrategy, init_args: {stage: 1, offload: cpu}}"
    picture = tmp_path / "bars.png"
    data = f"data: {{class_path: {HERE}.Data}}\noptimizer: {{class_path: torch.optim.AdamW, init_args: {{lr: 1e-1}}}}"
    given = _config(tmp_path, strategy, "Program", data)
    assert main(["estimate", given, "--world=2", "--only=true", "--json=true", f"--plot={picture}"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["settings"]
    assert row["setting"] == {"stage": 1, "offload": "cpu"}
    assert row["host"]["optimizer"] > 0
    assert picture.exists()


@pytest.mark.parametrize("command", ["estimate", "simulate"])
def test_json_is_alone_whatever_the_program_prints(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, _config(tmp_path, model="Talks"), "--json=true"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["precision"] == "bf16-mixed"
    assert "a step" in shown.err


def test_a_log_stands_beside_the_forecast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.csv").write_text("step,memory/parameters_GiB,memory/peak_GiB\n0,1.0,2.0\n")
    assert main(["estimate", _config(tmp_path), "--only=true", f"--compare={tmp_path}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-4].split() == ["MiB", "forecast", "measured", "measured", "is"]
    assert lines[-1].split()[::2][:2] == ["peak", "2048.0000"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "`estimate` needs a model: give `--config=run.yaml` or `--module=package.module:name`"),
        ([f"--module={HERE}:Described", "--compare=x", "--json=true"], "Leave one of the two out"),
        ([f"--module={HERE}:Described", "--compare=missing"], "`--compare=missing` has no log of a run"),
        ([f"--module={HERE}:Described", "--plot=missing/a.png"], "the folder `missing` does not exist"),
        ([f"--module={HERE}:Missing"], "Missing` cannot be imported"),
        ([f"--module={HERE}:not_a_module"], "gives a `int`. Name one that gives an `nn.Module`"),
        ([f"--module={HERE}:Program"], "needs a batch of `Program`"),
        ([f"--module={HERE}:Described", "--memory=much"], "`--memory=much` is not a size"),
        ([f"--module={HERE}:Described", "--world=0"], "`world_size=0` must be a number of ranks"),
        ([f"--module={HERE}:Described", "--precision=nf4"], "`precision='nf4'` is not forecast yet"),
    ],
)
def test_errors_end_with_status_1_and_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", *arguments]) == 1
    shown = capsys.readouterr().err
    assert message in shown
    assert len(shown.splitlines()) == 1


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("ddp", "`strategy: ddp` is not forecast. Use `lightning_zero.ZeroStrategy`"),
        (
            "{class_path: lightning_zero.ZeroStrategy, init_args: {pipeline: {partition: measured}}}",
            "`Pipeline(partition='measured')` is not forecast yet",
        ),
    ],
)
def test_strategies_that_are_not_forecast_are_refused(
    strategy: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", _config(tmp_path, strategy)]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("more", ["data: null", "optimizer: null"])
def test_sections_that_are_null_are_none(more: str, tmp_path: Path) -> None:
    assert main(["estimate", _config(tmp_path, "null", more=more), "--only=true"]) == 0
    path = tmp_path / "run.yaml"
    path.write_text(f"trainer: {{devices: 1}}\nmodel: {{class_path: {HERE}.Described, init_args: null}}\n{more}")
    assert main(["estimate", f"--config={path}", "--only=true"]) == 0


@pytest.mark.parametrize(
    ("trainer", "given", "world", "node"),
    [
        ("{devices: 4, num_nodes: 3}", (None, None), 12, 4),
        ("{devices: [0, 1]}", (None, None), 2, 2),
        ("{devices: 4}", (None, 2), 4, 2),
        ("{devices: 4}", (6, None), 6, None),
        ("{devices: auto}", (6, 3), 6, 3),
    ],
)
def test_ranks_are_by_default_those_of_the_trainer(
    trainer: str, given: tuple[int | None, int | None], world: int, node: int | None, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"trainer: {trainer}\nmodel: {{class_path: {HERE}.Described}}")
    assert RunConfig.read("estimate", path, module=None, data=None).world(*given) == (world, node)


@pytest.mark.parametrize("command", ["estimate", "simulate"])
@pytest.mark.parametrize("trainer", ["null", "{devices: auto, num_nodes: 2}", "{devices: -1}"])
def test_a_world_that_nobody_says_is_asked_for(
    command: str, trainer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"trainer: {trainer}\nmodel: {{class_path: {HERE}.Described}}")
    assert main([command, f"--config={path}"]) == 1
    assert "is no number of ranks. Add `--world=8`, or another." in capsys.readouterr().err


def test_the_example_is_forecast_with_the_classes_of_its_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [str(GPT), *sys.path])
    before = set(sys.modules)
    try:
        classes = ["--module=language_model:LanguageModel", "--data=data:ByteText"]
        assert main(["estimate", f"--config={GPT / 'cpu.yaml'}", *classes, "--world=2", "--only=true"]) == 0
    finally:
        for name in set(sys.modules) - before:
            if str(GPT) in str(getattr(sys.modules[name], "__file__", None)):
                del sys.modules[name]
    shown = capsys.readouterr().out
    assert "on 2 rank(s), precision 32-true" in shown
    assert "\n>  stage 3 " in shown


class Picky(Program):
    def __init__(self, width: int = 0) -> None:
        super().__init__()
        {}["width"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"model: {{class_path: {HERE}.Described}}\ndata: {{batch_size: 4}}", "has no `class_path`. Add that of the"),
        (
            f"model: {{class_path: {HERE}.Described}}\ndata: {{class_path: {HERE}.plain}}",
            "is a `Linear`. Name a `Light",
        ),
        ("model: {class_path: 1\nseed: [", "run.yaml` is no YAML: line 2, column 5: "),
        ("model: \xff", "run.yaml` is no YAML: "),
        (
            f"trainer: {{devices: 1}}\nmodel: {{class_path: {HERE}.Picky, init_args: {{width: 3}}}}",
            f"`{HERE}.Picky` cannot be made: KeyError: 'width'. Its arguments are `width`.",
        ),
    ],
    ids=["no-class", "no-data", "no-yaml", "no-text", "constructor"],
)
@pytest.mark.parametrize("command", ["estimate", "tensor-plan"])
def test_a_wrong_configuration_is_an_error_of_one_line(
    command: str, text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="latin-1")
    assert main([command, f"--config={path}"]) == 1
    shown = capsys.readouterr().err
    assert message in shown
    assert len(shown.splitlines()) == 1


def test_help_reads_well(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["estimate", "--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert "Forecast the memory of a training step per rank" in shown
    assert all(option in shown for option in ("--world", "--memory", "--plot", "--json", "--only"))


def plain() -> nn.Module:
    return nn.Linear(2, 2)
