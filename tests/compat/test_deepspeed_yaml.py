from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.core import LightningModule
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

from lightning_zero import WarmupDecayLR, ZeroStrategy
from lightning_zero.__main__ import main
from lightning_zero.compat.deepspeed_config import plan_of
from lightning_zero.compat.deepspeed_yaml import yaml_of
from tests.compat.blocks import LOADED

CONFIG: dict[str, Any] = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "betas": [0.8, 0.9]}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 2}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "csv_monitor": {"enabled": True, "output_path": "logs", "job_name": "run"},
    "wall_clock_breakdown": True,
}


class Plain(BoringModel):
    configure_optimizers = LightningModule.configure_optimizers


def test_the_yaml_says_what_the_configuration_says() -> None:
    text = yaml_of(plan_of(CONFIG), ranks=4)
    assert yaml.safe_load(text) == {
        "optimizer": {
            "class_path": "torch.optim.AdamW",
            "init_args": {"lr": 0.001, "betas": [0.8, 0.9], "weight_decay": 0.0},
        },
        "lr_scheduler": {
            "class_path": "lightning_zero.WarmupDecayLR",
            "init_args": {"total_num_steps": "auto", "warmup_num_steps": 2, "warmup_max_lr": 0.001},
        },
        "trainer": {
            "precision": "bf16-mixed",
            "gradient_clip_val": 0.5,
            "accumulate_grad_batches": 2,
            "logger": [
                {
                    "class_path": "lightning.pytorch.loggers.CSVLogger",
                    "init_args": {"save_dir": "logs", "name": "run"},
                }
            ],
            "callbacks": [{"class_path": "lightning_zero.ZeroMonitor"}],
            "strategy": {
                "class_path": "lightning_zero.ZeroStrategy",
                "init_args": {
                    "stage": 2,
                    "offload": {"optimizer": "cpu", "params": None, "pin_memory": True},
                },
            },
        },
    }
    assert "#   zero_optimization.stage " in text
    assert "leave them out" in text


def test_a_run_from_the_yaml_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds_config.json").write_text(json.dumps(CONFIG))
    for ranks in (0, -8):
        assert main(["convert-config", "ds_config.json", f"--ranks={ranks}"]) == 1
        assert f"`--ranks={ranks}` must be a number of processes, 1 or more." in capsys.readouterr().err
    assert main(["convert-config", "ds_config.json", "--ranks=4"]) == 0
    Path("run.yaml").write_text(capsys.readouterr().out)
    quiet = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.max_steps=3"]
    quiet += ["--trainer.limit_val_batches=0", "--trainer.enable_progress_bar=false"]
    cli = LightningCLI(Plain, BoringDataModule, args=["fit", "--config=run.yaml", *quiet], save_config_callback=None)
    strategy = cli.trainer.strategy
    assert isinstance(strategy, ZeroStrategy)
    assert (strategy.stage, cli.trainer.precision, cli.trainer.global_step) == (2, "bf16-mixed", 3)
    assert type(cli.trainer.optimizers[0]) is torch.optim.AdamW or isinstance(
        cli.trainer.optimizers[0], torch.optim.AdamW
    )
    schedule = cli.trainer.lr_scheduler_configs[0].scheduler
    assert isinstance(schedule, WarmupDecayLR)
    assert schedule.total_num_steps == 3


@pytest.mark.parametrize("name", list(LOADED))
def test_every_configuration_has_a_yaml(name: str) -> None:
    content = yaml.safe_load(yaml_of(plan_of(LOADED[name])))
    ZeroStrategy(**content["trainer"]["strategy"]["init_args"])


def test_values_that_are_open_are_said() -> None:
    text = yaml_of(plan_of(LOADED["hugging-face"]))
    content = yaml.safe_load(text)
    assert content["optimizer"]["init_args"]["lr"] is None
    assert content["lr_scheduler"]["init_args"]["warmup_num_steps"] is None
    assert "# Say `optimizer.init_args.lr`: the configuration leaves it open.\n" in text
    assert "gradient_clip_val" not in content["trainer"]
    text = yaml_of(plan_of({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}))
    assert "give `--ranks`" in text
    text = yaml_of(plan_of(LOADED["muon"]))
    assert "# `optimizer.type='Muon'` does not exist here yet. Make it in `configure_optimizers`.\n" in text
    text = yaml_of(plan_of({"scheduler": {"type": "StepLR", "params": {"step_size": 2}}}))
    assert "`LightningCLI` would step `torch.optim.lr_scheduler.StepLR` once an epoch" in text


def test_clipping_is_written_only_for_a_configuration_or_a_version_that_clips() -> None:
    text = yaml_of(plan_of({}))
    assert "gradient_clip_val" not in yaml.safe_load(text)["trainer"]
    assert "#   (gradient_clipping) " in text
    told = yaml.safe_load(yaml_of(plan_of({}, deepspeed_version="0.19.6")))["trainer"]
    assert told["gradient_clip_val"] == 1.0
    assert told["strategy"]["init_args"]["timeout"] == 600.0


def test_fp16_has_its_loss_scale() -> None:
    content = yaml.safe_load(yaml_of(plan_of({"fp16": {"enabled": True, "initial_scale_power": 8}})))
    assert content["trainer"]["strategy"]["init_args"]["loss_scale"] == {"init_scale": 256.0}


def test_a_loss_scale_waits_for_a_precision_that_is_open() -> None:
    text = yaml_of(plan_of({"fp16": {"enabled": "auto", "loss_scale": 128, "hysteresis": 3}}))
    assert "translated  `LossScale(static=128.0)`, with precision='16-mixed' or '16-true'\n" in text
    assert "# The configuration leaves the precision open: with `precision: 16-mixed` or `16-true`, take\n" in text
    assert "loss_scale" not in yaml.safe_load(text)["trainer"]["strategy"]["init_args"]
    content = yaml.safe_load(text.replace("      # loss_scale", "      loss_scale"))
    assert content["trainer"]["strategy"]["init_args"]["loss_scale"] == {"hysteresis": 3, "static": 128.0}
    assert "loss_scale" not in yaml_of(plan_of({"fp16": {"enabled": "auto"}}))


def test_batch_sizes_are_those_of_the_loader() -> None:
    text = yaml_of(plan_of({"train_micro_batch_size_per_gpu": 4, "train_batch_size": 32}))
    assert "the `batch_size` of the loader: set it in `data`\n" in text
    assert "compared" not in text


@pytest.mark.parametrize(
    ("content", "args", "message"),
    [
        (
            '{"zero_optimization": {"stge": 3}}',
            [],
            "`zero_optimization.stge` is no key of DeepSpeed's configuration. Did",
        ),
        ("{", [], "is no JSON: line 1, column 2"),
        ('{"sequence_parallel_size": 2}', [], "would change the training, and is not there yet"),
        ("{}", ["--deepspeed_version=new"], "`deepspeed_version='new'` must be a version"),
    ],
)
def test_a_bad_file_ends_with_status_1_and_one_line(
    content: str, args: Any, message: str, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "ds.json").write_text(content)
    assert main(["convert-config", str(tmp_path / "ds.json"), *args]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert message in shown.err
    assert shown.err.count("\n") == 1


def test_strict_false_leaves_out_unknown_keys(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "ds.json").write_text('{"stge": 3, "sequence_parallel_size": 2}')
    assert main(["convert-config", str(tmp_path / "ds.json"), "--strict=false"]) == 0
    shown = capsys.readouterr().out
    assert "#   stge " in shown
    assert "unknown" in shown
    assert "not yet" in shown
