"""How the strategy is built: by hand, by name, from YAML, and what it refuses."""

from __future__ import annotations

import pickle
import re
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import StrategyRegistry

import lightning_zero
import lightning_zero.lightning.strategy as strategy_file
from lightning_zero import LayerSpec
from lightning_zero.config import ActivationCheckpointing, Communication, Offload, Pipeline
from lightning_zero.lightning.precision import LossScale, ZeroHalfPrecision, ZeroMixedPrecision
from lightning_zero.lightning.strategy import ZeroStrategy, register_strategies
from lightning_zero.lightning.tensor_training import TensorTraining
from lightning_zero.parallel.pipeline.stages.specs import SpecifiedLayers
from tests import lightning_programs, worlds

assert lightning_zero  # the import registers the names


@pytest.mark.parametrize("stage", [4, -1, "3", True])
def test_unknown_stage_is_refused(stage: Any) -> None:
    with pytest.raises(ValueError, match=rf"`stage={stage!r}` is not a ZeRO stage. Use 0, 1, 2 or 3."):
        ZeroStrategy(stage=stage)


def test_unknown_state_dict_type_is_refused() -> None:
    with pytest.raises(ValueError, match="`state_dict_type='half'` is not known. Use 'sharded', 'full' or None."):
        ZeroStrategy(state_dict_type="half")  # type: ignore[arg-type]


@pytest.mark.parametrize(("stage", "expected"), [(0, "full"), (1, "full"), (2, "full"), (3, "sharded")])
def test_checkpoints_are_one_file_below_stage_3(stage: Any, expected: str) -> None:
    assert ZeroStrategy(stage=stage).state_dict_type == expected
    assert ZeroStrategy(stage=stage, state_dict_type="full").state_dict_type == "full"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_strategy_is_known_by_name(stage: int) -> None:
    register_strategies()
    strategy = StrategyRegistry.get(f"zero_{stage}")
    assert isinstance(strategy, ZeroStrategy)
    assert strategy.stage == stage
    trainer = Trainer(strategy=f"zero_{stage}", accelerator="cpu", devices=2, logger=False)
    assert trainer.strategy.stage == stage


def test_options_may_be_given_as_dicts() -> None:
    strategy = ZeroStrategy(communication={"prefetch": 2}, loss_scale={"window": 5})
    assert strategy.communication == Communication(prefetch=2)
    assert strategy.loss_scale == LossScale(window=5)


@pytest.mark.parametrize("timeout", [90, 90.0, timedelta(seconds=90)])
def test_timeout_holds_for_the_default_group_and_the_engine(timeout: Any) -> None:
    strategy = ZeroStrategy(timeout=timeout)
    assert strategy.timeout == timedelta(seconds=90)
    assert strategy.communication.timeout_s == 90


@pytest.mark.parametrize(
    ("field", "value", "option"),
    [("timeout_s", 20.0, "timeout=20.0"), ("backend", "gloo", "process_group_backend='gloo'")],
)
def test_options_of_all_process_groups_have_one_name(field: str, value: Any, option: str) -> None:
    said = f"`communication.{field}={value!r}` is for `ZeroEngine`. Use `ZeroStrategy({option})`"
    with pytest.raises(ValueError, match=re.escape(said)):
        ZeroStrategy(communication=Communication(**{field: value}))
    with pytest.raises(ValueError, match=re.escape(said)):
        ZeroStrategy(communication={field: value}, timeout=90)


def test_strategy_pickles() -> None:
    strategy = ZeroStrategy(stage=2, units=["Block"], loss_scale=LossScale(window=7))
    Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False, precision="bf16-mixed")
    copy = pickle.loads(pickle.dumps(strategy))
    assert (copy.stage, copy.units, copy.loss_scale) == (2, ["Block"], LossScale(window=7))


@pytest.mark.parametrize(
    ("precision", "name"),
    [
        (None, "ZeroPrecision"),
        ("32-true", "ZeroPrecision"),
        ("bf16-mixed", "ZeroMixedPrecision"),
        ("bf16-true", "ZeroHalfPrecision"),
        ("16-true", "ZeroHalfPrecision"),
        ("64-true", "ZeroDoublePrecision"),
    ],
)
def test_trainer_shows_our_precision_plugin(precision: Any, name: str) -> None:
    trainer = Trainer(strategy=ZeroStrategy(), accelerator="cpu", devices=1, precision=precision, logger=False)
    assert type(trainer.precision_plugin).__name__ == name
    assert trainer.precision == (precision or "32-true")


def test_loss_scale_option_reaches_the_plugin() -> None:
    plugin = ZeroMixedPrecision("16-mixed", "cpu")
    strategy = ZeroStrategy(loss_scale=LossScale(init_scale=32.0), precision_plugin=plugin)
    assert strategy.precision_plugin is plugin
    assert plugin.get_scale() == 32.0
    half = ZeroHalfPrecision("16-true")
    ZeroStrategy(loss_scale=LossScale(init_scale=32.0), precision_plugin=half)
    assert half.get_scale() == 32.0


def test_engine_is_refused_before_setup() -> None:
    with pytest.raises(RuntimeError, match="not sharded before"):
        ZeroStrategy().engine  # noqa: B018


def test_loss_scale_without_fp16_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(**quick(ZeroStrategy(loss_scale=LossScale()), tmp_path))
    with pytest.raises(ValueError, match="`loss_scale` has no effect with precision='32-true'"):
        trainer.fit(BoringModel())


def quick(strategy: ZeroStrategy, folder: Path) -> dict[str, Any]:
    return {
        "strategy": strategy,
        "accelerator": "cpu",
        "devices": 1,
        "fast_dev_run": 1,
        "default_root_dir": folder,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }


YAML = """
trainer:
  accelerator: cpu
  devices: 1
  logger: false
  strategy:
    class_path: lightning_zero.ZeroStrategy
    init_args:
      stage: 2
      units: [Block, torch.nn.Linear]
      communication: {reduce_dtype: bf16, prefetch: 3}
      loss_scale: {window: 500}
      timeout: 0:10:00
      masters: false
      state_dict_type: sharded
"""


def cli(*args: str) -> LightningCLI:
    return LightningCLI(BoringModel, BoringDataModule, args=list(args), run=False, save_config_callback=None)


def test_strategy_is_built_from_yaml(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(YAML)
    strategy = cli(f"--config={tmp_path / 'c.yaml'}").trainer.strategy
    assert isinstance(strategy, ZeroStrategy)
    assert strategy.stage == 2
    assert strategy.units == ["Block", "torch.nn.Linear"]
    assert strategy.communication == Communication(reduce_dtype="bf16", prefetch=3, timeout_s=600.0)
    assert strategy.loss_scale == LossScale(window=500)
    assert strategy.timeout == timedelta(minutes=10)
    assert (strategy.masters, strategy.state_dict_type) == (False, "sharded")


def test_strategy_is_changed_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(YAML)
    strategy = cli(
        f"--config={tmp_path / 'c.yaml'}",
        "--trainer.strategy.stage=3",
        "--trainer.strategy.communication.prefetch=0",
        "--trainer.strategy.timeout=60",
    ).trainer.strategy
    assert isinstance(strategy, ZeroStrategy)
    assert (strategy.stage, strategy.communication.prefetch, strategy.timeout.total_seconds()) == (3, 0, 60)


def test_strategy_is_named_on_the_command_line() -> None:
    strategy = cli("--trainer.strategy=zero_1", "--trainer.accelerator=cpu", "--trainer.devices=1").trainer.strategy
    assert isinstance(strategy, ZeroStrategy)
    assert strategy.stage == 1


def test_wrong_yaml_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli("--trainer.strategy=lightning_zero.ZeroStrategy", "--trainer.strategy.stage=4")
    assert "stage" in capsys.readouterr().err


@pytest.mark.parametrize(
    "pipeline", [1, Pipeline(stages=1), {"stages": 1}, Pipeline(stages=1, reduce="microbatch")], ids=str
)
def test_a_pipeline_of_one_stage_is_none(pipeline: Any, tmp_path: Path) -> None:
    offload = {"optimizer": "nvme", "path": str(tmp_path)}
    assert ZeroStrategy(stage=2, pipeline=pipeline, offload=offload).pipeline is None
    fitted = Trainer(**quick(ZeroStrategy(stage=2, pipeline=pipeline, offload=offload), tmp_path))
    fitted.fit(BoringModel())
    assert fitted.distributed_sampler_kwargs == {"num_replicas": 1, "rank": 0}


INIT_ARGS: list[tuple[str, str, Any]] = [
    ("pipeline: 1", "pipeline", None),
    ("pipeline: 2", "pipeline", Pipeline(stages=2)),
    ("pipeline: {stages: 2, partition: [blocks.1]}", "pipeline", Pipeline(stages=2, partition=["blocks.1"])),
    ("offload: cpu", "offload", Offload()),
    ("offload: {optimizer: nvme, path: /data}", "offload", Offload(optimizer="nvme", path="/data")),
    ("offload: {optimizer: nvme, path: [/a, /b]}", "offload", Offload(optimizer="nvme", path=["/a", "/b"])),
    ("step: deferred", "step", "deferred"),
    ("units: [Block, torch.nn.Linear]", "units", ["Block", "torch.nn.Linear"]),
    ("units: Block", "units", "Block"),
    ("activation_checkpointing: true", "activation_checkpointing", ActivationCheckpointing()),
    ("activation_checkpointing: [Block]", "activation_checkpointing", ActivationCheckpointing(modules=["Block"])),
    (
        "activation_checkpointing: {policy: selective, every: 2}",
        "activation_checkpointing",
        ActivationCheckpointing(policy="selective", every=2),
    ),
    ("loss_scale: {static: 1024}", "loss_scale", LossScale(static=1024)),
    (
        "communication: {class_path: lightning_zero.Communication, init_args: {prefetch: 2}}",
        "communication",
        Communication(prefetch=2),
    ),
]


def _built(line: str, folder: Path) -> Any:
    (folder / "c.yaml").write_text(YAML.split("      stage:", maxsplit=1)[0] + f"      {line}\n")
    return cli(f"--config={folder / 'c.yaml'}").trainer.strategy


@pytest.mark.parametrize(("line", "name", "expected"), INIT_ARGS, ids=[line for line, _, _ in INIT_ARGS])
def test_every_kind_of_option_is_built_from_yaml(line: str, name: str, expected: Any, tmp_path: Path) -> None:
    assert getattr(_built(line, tmp_path), name) == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("stge: 3", "Option 'stge' is not accepted"),
        ("sharding_strategy: FULL_SHARD", "Option 'sharding_strategy' is not accepted"),
        (
            "communication: {prefetch_count: 2}",
            "`Communication` has no option `prefetch_count`. Did you mean `prefetch`?",
        ),
        ("communication: {prefetch: two}", "`Communication(prefetch='two')` is a `str`. Use a whole number."),
        ("offload: disk", "`offload='disk'` is not known. Use 'cpu', `Offload(...)`"),
        ("offload: {optimizer: disk}", "`Offload(optimizer='disk')` is not known. Use 'cpu', 'nvme' or None."),
        ("step: later", "Literal['auto', 'now', 'deferred', 'backward']"),
    ],
)
def test_wrong_options_in_yaml_are_named(
    line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((SystemExit, ValueError, TypeError)) as caught:
        _built(line, tmp_path)
    assert message in capsys.readouterr().err + str(caught.value)


# -- Callbacks and loggers that need whole models ----------------------------------------------------------------------


def test_pruning_is_refused_instead_of_leaving_parameters_untrained(tmp_path: Path) -> None:
    pruning = ModelPruning("l1_unstructured", amount=0.5, parameter_names=["weight"])
    trainer = Trainer(
        strategy=ZeroStrategy(stage=1),
        accelerator="cpu",
        devices=1,
        fast_dev_run=True,
        callbacks=pruning,
        default_root_dir=tmp_path,
    )
    with pytest.raises(ValueError, match="`ModelPruning` replaces the parameters"):
        trainer.fit(BoringModel())


def _log_graph(rank: int, world: int, stage: Any, folder: str) -> None:
    class Example(lightning_programs.Net):
        example_input_array = torch.zeros(2, 4)

    logger = TensorBoardLogger(folder, log_graph=True)
    fitted = lightning_programs.trainer(rank, world, stage, max_epochs=1, logger=logger)
    refused = pytest.raises(ValueError, match=r"`TensorBoardLogger\(log_graph=True\)` runs the model on rank 0 alone")
    with nullcontext() if stage == 2 else refused:
        fitted.fit(Example(), lightning_programs.loader(rank, world))


def _fast_dev_run(rank: int, world: int, folder: str) -> int:
    fitted = lightning_programs.trainer(rank, world, 3, fast_dev_run=True, logger=TensorBoardLogger(folder))
    fitted.fit(lightning_programs.Net(), lightning_programs.loader(rank, world))
    return int(fitted.global_step)


def test_a_fast_dev_run_with_a_logger_is_not_refused(tmp_path: Path) -> None:
    """Its logger has every attribute, and was taken for one that logs the graph."""
    assert worlds.run(_fast_dev_run, 2, str(tmp_path)) == [1, 1]


@pytest.mark.parametrize("stage", [2, 3, ZeroStrategy(stage=1, tensor_parallel=2), ZeroStrategy(stage=1, pipeline=2)])
def test_a_logged_graph_is_refused_where_a_forward_needs_all_ranks(stage: Any, tmp_path: Path) -> None:
    worlds.run(_log_graph, 2, stage, str(tmp_path))


def test_random_numbers_in_specified_layers_of_a_divided_sequence_are_refused(monkeypatch: Any) -> None:
    """Before the layers were outlined there was no rate of theirs."""
    strategy: Any = ZeroStrategy(pipeline=2, tensor_parallel={"size": 2, "sequence": True})
    strategy._tensor = object.__new__(TensorTraining)
    strategy._tensor.options = strategy.tensor_parallel
    strategy._mesh = SimpleNamespace(stage=0)
    for name in ("layer_costs", "split_module"):
        monkeypatch.setattr(strategy_file, name, lambda *_: None)
    monkeypatch.setattr(SpecifiedLayers, "build", lambda *_: None)
    monkeypatch.setattr(TensorTraining, "begin", lambda *_: None)
    monkeypatch.setattr(ZeroStrategy, "_recipe", lambda *_: {})
    monkeypatch.setattr(ZeroStrategy, "root_device", torch.device("cpu"))
    model = BoringModel()
    model.blocks = torch.nn.ModuleList([LayerSpec(torch.nn.TransformerEncoderLayer, 4, 2, dropout=0.1)])
    with pytest.raises(ValueError, match="does not work with dropout, jitter or random routers"):
        strategy._shard(model, is_fitting=True)


def test_the_plan_says_which_calls_are_not_counted() -> None:
    strategy = ZeroStrategy(pipeline=2)
    assert strategy._not_counted() == []
    strategy._mesh = Mock()
    assert strategy._not_counted() == ["not counted as sent: messages between pipeline stages"]
