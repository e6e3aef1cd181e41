from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from lightning_zero import ZeroStrategy
from lightning_zero.compat.deepspeed_config import Batch, DeepSpeedPlan, Row, plan_of, report
from tests.compat.blocks import LOADED, REFUSED


def paths(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in config.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from paths(value, f"{prefix}{key}.")


def row(plan: DeepSpeedPlan, key: str) -> Row:
    (found,) = [row for row in plan.rows if row.key == key]
    return found


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


# -- Every key ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*LOADED, *REFUSED])
def test_the_table_says_what_became_of_every_key(name: str) -> None:
    config = {**LOADED, **REFUSED}[name]
    plan = plan_of(config, strict=name in LOADED)
    told = {row.key for row in plan.rows}
    for path in paths(config):
        inside = [key for key in told if key == path or key.startswith(f"{path}.") or path.startswith(f"{key}.")]
        assert inside, path
    assert all(row.becomes and row.becomes != "it has no effect" for row in plan.rows)
    assert {row.status for row in plan.rows} <= {"honoured", "translated", "ignored", "not yet", "default"}
    shown = report(plan)
    assert all(row.key in shown for row in plan.rows)
    ZeroStrategy(**plan.options)
    assert "not yet" in {row.status for row in plan.rows} or name in LOADED


@pytest.mark.parametrize("name", list(REFUSED))
def test_features_that_do_not_exist_are_errors_that_name_the_key(name: str) -> None:
    key = list(paths(REFUSED[name]))[-1].split(".")[0]
    with pytest.raises(
        ValueError, match=rf"^`{key}[\w.]*=.*` would change the training, and is not there yet: .*strict"
    ):
        plan_of(REFUSED[name])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"train_batchsize": 4},
            "`train_batchsize` is no key of DeepSpeed's configuration. Did you mean `train_batch_si",
        ),
        (
            zero(overlap_com=True),
            "`zero_optimization.overlap_com` is no key of DeepSpeed's configuration. Did you mean `o",
        ),
        (
            {"zero_optimisation": {"stage": 3}},
            "`zero_optimisation` is no key of DeepSpeed's configuration. Did you mean",
        ),
        ({"fp16": {"enable": True}}, "`fp16.enable` is no key of DeepSpeed's configuration. Did you mean `enabled`"),
        (
            zero(offload_optimizer={"device": "cpu", "pin_memry": True}),
            "`zero_optimization.offload_optimizer.pin_memry` is no key of DeepSpeed's configuration. Did you mean `pin",
        ),
        ({"moe": {"k": 1}}, "`moe.k` is no key of DeepSpeed's configuration."),
    ],
)
def test_an_unknown_key_is_an_error_with_the_nearest_name(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        plan_of(config)
    plan = plan_of(config, strict=False)
    (unknown,) = [row for row in plan.rows if row.status == "unknown"]
    assert f"`{unknown.key}`" in message
    assert unknown.becomes == "left out: DeepSpeed's documentation does not know it"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (zero(stage=4), "`zero_optimization.stage=4` is not allowed. Use 0, 1, 2 or 3."),
        (zero(stage="auto"), "`zero_optimization.stage='auto'` is not allowed. Use 0, 1, 2 or 3."),
        (zero(stage=True), "`zero_optimization.stage=True` is not allowed. Use a number"),
        ({"zero_optimization": 3}, "`zero_optimization=3` must be an object with keys"),
        ({"fp16": {"enabled": "yes"}}, "`fp16.enabled='yes'` is not allowed. Use true, false or \"auto\"."),
        ({"bf16": True}, "`bf16=True` must be an object with keys"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "`bf16.enabled=True` and `fp16.enabled=True` exclude"),
        ({"gradient_clipping": -1}, '`gradient_clipping=-1` is not allowed. Use a number, 0 or more, or "auto".'),
        ({"gradient_accumulation_steps": 0}, "`gradient_accumulation_steps=0` is not allowed. Use a number, 1 or more"),
        ({"train_batch_size": 4.5}, "`train_batch_size=4.5` is not allowed. Use a whole number, 1 or more"),
        ({"communication_data_type": "int8"}, "`communication_data_type='int8'` is not allowed. Use \"fp32\""),
        (
            {"communication_data_type": "fp16", "data_types": {"grad_accum_dtype": "fp32"}},
            "`data_types.grad_accum_dtype='fp32'` and `communication_data_type='fp16'` differ",
        ),
        (
            zero(stage=3, offload_param={"device": "disk"}),
            "`zero_optimization.offload_param.device='disk'` is not allow",
        ),
        (
            zero(stage=3, offload_optimizer={"device": "nvme"}),
            "`zero_optimization.offload_optimizer.device='nvme'` needs `zero_optimization.offload_optimizer.nvme_path`",
        ),
        (
            zero(offload_optimizer={"device": "cpu", "ratio": 1.5}),
            "`zero_optimization.offload_optimizer.ratio=1.5` is not allowed. Use a number from 0 to 1.",
        ),
        (
            {"aio": {"thread_count": 1, "intra_op_parallelism": 2}},
            "`aio.intra_op_parallelism=2` and `aio.thread_count=1`",
        ),
        ({"pipeline": {"stages": 2, "partition": "by_hand"}}, "`pipeline.partition='by_hand'` is not allowed. Use"),
        ({"torch_autocast": {"enabled": True, "dtype": "int8"}}, "`torch_autocast.dtype='int8'` is not allowed. Use"),
        (
            {"bf16": {"enabled": True, "bf16_optimizer_states": True}},
            "`bf16.bf16_optimizer_states=True` needs `bf16.bf16_m",
        ),
        ({"optimizer": {"params": {"lr": 1}}}, "`optimizer.params` needs `optimizer.type`, the name of a class."),
    ],
)
def test_a_wrong_value_is_an_error_that_names_the_key(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        plan_of(config)


# -- Options -----------------------------------------------------------------------------------------------------------

OLD = "0.16.0"


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({}, {"stage": 0}),
        ({"zero_optimization": True}, {"stage": 1}),
        (zero(stage=2, overlap_comm=False), {"stage": 2}),
        (zero(stage=3, stage3_prefetch_bucket_size=0), {"stage": 3, "communication": {"prefetch": 0}}),
        (zero(stage=3, prefetch_bucket_size=5e7), {"stage": 3}),
        ({"communication_data_type": "bfp16"}, {"stage": 0, "communication": {"reduce_dtype": "bf16"}}),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, {"stage": 0, "communication": {"reduce_dtype": "bf16"}}),
        (
            zero(stage=1, offload_optimizer={"device": "cpu"}),
            {"stage": 1, "offload": {"optimizer": "cpu", "params": None, "pin_memory": False}},
        ),
        (zero(stage=1, offload_optimizer={"device": "none"}), {"stage": 1}),
        (
            zero(stage=2, cpu_offload=True, cpu_offload_use_pin_memory=True),
            {"stage": 2, "offload": {"optimizer": "cpu", "params": None, "pin_memory": True}},
        ),
        (
            {
                **zero(
                    stage=3,
                    offload_optimizer={"device": "nvme", "nvme_path": "/a", "ratio": 0.5},
                    offload_param={"device": "nvme", "nvme_path": "/b"},
                ),
                "aio": {"block_size": 1000000, "queue_depth": 4, "thread_count": 3},
            },
            {
                "stage": 3,
                "offload": {
                    "optimizer": "nvme",
                    "params": "nvme",
                    "path": ["/a", "/b"],
                    "buffer_bytes": 1003520,
                    "io_threads": 12,
                    "pin_memory": False,
                    "fraction": 0.5,
                },
            },
        ),
        (
            {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
            {"stage": 0, "masters": False},
        ),
        (
            {"torch_autocast": {"enabled": True, "lower_precision_safe_modules": ["torch.nn.Linear", "mine.Experts"]}},
            {"stage": 0, "lowered": ["Experts"]},
        ),
        (
            {"activation_checkpointing": {"cpu_checkpointing": True}},
            {"stage": 0, "activation_checkpointing": {"policy": "offload"}},
        ),
        ({"gradient_checkpointing": True}, {"stage": 0, "activation_checkpointing": {"policy": "full"}}),
        (
            {"pipeline": {"stages": 4, "partition_method": "type:Block"}},
            {"stage": 0, "pipeline": {"stages": 4, "partition": "type:Block"}},
        ),
        ({"pipeline": {"enabled": False, "stages": 4}}, {"stage": 0}),
    ],
)
def test_options_of_a_configuration(config: Any, options: dict[str, Any]) -> None:
    plan = plan_of(config, deepspeed_version=OLD)
    assert plan.options == {"timeout": 1800.0, **options}
    ZeroStrategy(**plan.options)


@pytest.mark.parametrize(
    ("config", "fills", "accepts", "loss_scale"),
    [
        ({}, None, "32-true 64-true bf16-mixed bf16-true 16-mixed 16-true", {}),
        ({"bf16": {"enabled": True}}, "bf16-mixed", "bf16-mixed bf16-true", None),
        ({"bfloat16": {"enabled": True}}, "bf16-mixed", "bf16-mixed bf16-true", None),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, "16-mixed", "16-mixed 16-true", {"static": 128.0}),
        (
            {"fp16": {"enabled": "auto", "initial_scale_power": 8, "min_loss_scale": 1e-8}},
            None,
            "32-true 64-true bf16-mixed bf16-true 16-mixed 16-true",
            {"init_scale": 256.0, "min_scale": 1e-8},
        ),
        ({"fp16": {"enabled": False}}, None, "32-true 64-true bf16-mixed bf16-true", None),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "bf16-true", "bf16-true", None),
        ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, "16-true", "16-true", {}),
        ({"torch_autocast": {"enabled": True}}, "bf16-mixed", "bf16-mixed", None),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "16-mixed", "16-mixed", {}),
    ],
)
def test_precisions_that_a_configuration_allows(config: Any, fills: Any, accepts: str, loss_scale: Any) -> None:
    rule = plan_of(config).precision
    assert (rule.fills, list(rule.accepts)) == (fills, accepts.split())
    assert (rule.loss_scale or {}) == (loss_scale or {})


def test_explicit_arguments_win() -> None:
    config = zero(stage=3, offload_optimizer={"device": "nvme"})  # an error by itself
    plan = plan_of(config, explicit={"stage": 2, "offload": "cpu", "timeout": 60})
    assert plan.options == {}
    assert row(plan, "zero_optimization.stage").becomes == "the argument `stage` is used instead"
    assert row(plan, "zero_optimization.offload_optimizer.device").status == "ignored"
    assert row(plan, "(timeout)").becomes == "the argument `timeout` is used instead"


# -- Versions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "clipping", "pins", "timeout", "highest"),
    [
        ("0.19.6", 1.0, True, 600.0, None),
        ("0.19.5", 1.0, True, 1800.0, None),
        ("0.19.3+abc", 1.0, False, 1800.0, None),
        ("0.19.2", 0.0, False, 1800.0, None),
        ("0.17.2", 0.0, False, 1800.0, None),
        ("0.17.1", 0.0, False, 1800.0, 0.001),
        ("0.9", 0.0, False, 1800.0, 0.001),
    ],
)
def test_defaults_are_those_of_the_version(
    version: Any, clipping: float, pins: bool, timeout: float, highest: Any
) -> None:
    config = {
        **zero(stage=1, offload_optimizer={"device": "cpu"}),
        "bf16": {"enabled": True},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    }
    plan = plan_of(config, deepspeed_version=version)
    assert plan.clipping == clipping
    assert plan.clipping_is_default
    assert plan.options["offload"]["pin_memory"] is pins
    assert plan.options["timeout"] == timeout
    assert plan.schedule is not None
    assert plan.schedule.args.get("warmup_max_lr") == highest
    checks = [row for row in plan.rows if row.key == "(bf16.check_grad_overflow)"]
    assert len(checks) == (clipping == 1.0)


@pytest.mark.parametrize(
    ("kind", "version", "params", "name", "value", "becomes"),
    [
        ("WarmupLR", None, {}, "warmup_max_lr", None, "the optimizer's rate"),
        ("WarmupLR", "0.17.1", {}, "warmup_max_lr", 0.001, "`warmup_max_lr=0.001`"),
        ("WarmupDecayLR", None, {"total_num_steps": 9}, "warmup_max_lr", 0.001, "`warmup_max_lr=0.001`"),
        ("OneCycle", None, {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}, "cycle_momentum", True, "`cycle_momentum='deep"),
    ],
)
def test_defaults_of_a_schedule_are_deepspeeds(
    kind: str, version: Any, params: Any, name: str, value: Any, becomes: str
) -> None:
    plan = plan_of({"scheduler": {"type": kind, "params": params}}, deepspeed_version=version)
    found = row(plan, f"(scheduler.params.{name})")
    assert (found.value, found.status) == (value, "default")
    assert found.becomes.startswith(becomes)
    told = plan_of({"scheduler": {"type": kind, "params": {**params, name: value}}}, deepspeed_version=version)
    assert told.schedule is not None
    assert plan.schedule is not None
    assert told.schedule.args == plan.schedule.args
    assert row(told, f"scheduler.params.{name}").becomes.startswith(becomes)


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
def test_a_section_whose_type_is_null_makes_nothing(section: str) -> None:
    plan = plan_of({section: {"type": None, "params": {"lr": 1}}})
    assert (plan.optimizer, plan.schedule) == (None, None)
    for key in ("type", "params.lr"):
        found = row(plan, f"{section}.{key}")
        assert (found.status, found.becomes) == ("ignored", "no class is named")


def test_a_switch_inside_of_a_section_that_is_off_is_on_as_in_deepspeed() -> None:
    inside = {"enabled": False, "data_routing": {"enabled": False, "random_ltd": {"enabled": True}}}
    with pytest.raises(ValueError, match=r"^`data_efficiency=.*` would change the training"):
        plan_of({"data_efficiency": inside})


def test_without_a_version_clipping_and_timeout_are_those_of_lightnings_strategy() -> None:
    plan = plan_of(zero(stage=1))
    assert (plan.clipping, plan.clipping_is_default) == (None, True)
    assert "timeout" not in plan.options
    theirs = "as with Lightning's `DeepSpeedStrategy`; DeepSpeed's own default needs `deepspeed_version='0.19.6'`"
    clipping, timeout = row(plan, "(gradient_clipping)"), row(plan, "(timeout)")
    assert (clipping.value, clipping.becomes) == (1.0, f"as `Trainer(gradient_clip_val=...)` says, {theirs}")
    assert (timeout.value, timeout.becomes) == ("10 min", f"half an hour, {theirs}")


@pytest.mark.parametrize("version", ["newest", "1", 0.19])
def test_a_wrong_version_is_an_error(version: Any) -> None:
    with pytest.raises(ValueError, match=r"^`deepspeed_version=.*` must be a version such as '0.17.2'"):
        plan_of({}, deepspeed_version=version)


# -- Batch sizes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "ranks", "accumulation", "micro"),
    [
        (Batch(), 2, None, None),
        (Batch(32, 4, 2), 4, 2, 4),
        (Batch(32, 4), 2, 4, 4),
        (Batch(32, None, 2), 4, 2, 4),
        (Batch(None, 4, 2), 4, 2, 4),
        (Batch(32), 4, None, 8),
        (Batch(None, 4), 2, None, 4),
        (Batch(None, None, 3), 2, 3, None),
    ],
)
def test_two_batch_sizes_give_the_third(batch: Batch, ranks: int, accumulation: Any, micro: Any) -> None:
    assert batch.accumulation_on(ranks) == accumulation
    assert batch.micro_on(ranks, accumulation or 1) == micro


def test_batch_sizes_that_do_not_fit_are_errors() -> None:
    with pytest.raises(ValueError, match="^`train_batch_size=32` is not `train_micro_batch_size_per_gpu=4` times"):
        Batch(32, 4, 4).accumulation_on(4)
    with pytest.raises(
        ValueError, match=r"^`train_batch_size=30` cannot be divided by `train_micro_batch.*=4` times 2"
    ):
        Batch(30, 4).accumulation_on(2)
    with pytest.raises(ValueError, match=r"^`train_batch_size=30` cannot be divided by `accumulate_grad_batches=1`"):
        Batch(30).micro_on(4, 1)


# -- Files -------------------------------------------------------------------------------------------------------------


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(LOADED["hugging-face"]))
    plan = plan_of(path)
    assert plan.options == plan_of(LOADED["hugging-face"]).options
    assert plan == plan_of(str(path))
    assert report(plan).startswith(f"Configuration of DeepSpeed ({path}), with the defaults of 0.19.6:\n  fp16.enabled")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"stage": 3,}', r"is no JSON: line 1, column 1\d: "),
        (b"", "is no JSON: line 1, column 1"),
        (b"[1]", "is no configuration: it holds a `list`, not an object"),
        (b"\xff\xfe", "is no configuration: "),
        (b'{"fp16": {"enabled": true, "enabled": false}}', "is no configuration: the key `enabled` is there twice"),
    ],
)
def test_a_file_that_is_no_configuration_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^`{path}` {message}"):
        plan_of(path)


def test_no_file_and_no_dict_are_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"missing.json` does not exist. Give the path"):
        plan_of(tmp_path / "missing.json")
    with pytest.raises(TypeError, match=r"^`config=3` is a `int`. Use a dict, or the path of a JSON file."):
        plan_of(3)  # type: ignore[arg-type]


def test_options_that_a_row_names_are_those_of_the_strategy() -> None:
    known = set(inspect.signature(ZeroStrategy).parameters)
    plans = [plan_of(config, strict=False) for config in (*LOADED.values(), *REFUSED.values())]
    assert {row.option for plan in plans for row in plan.rows} - {None} <= known
    assert {name for plan in plans for name in plan.options} <= known
