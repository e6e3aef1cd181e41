from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import numpy
import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import MixtralConfig, MixtralForCausalLM

from lightning_zero import LayerSpec, Offload, Pipeline, Sharding, ZeroStrategy
from lightning_zero.forecast.report import table
from lightning_zero.forecast.settings import MemoryForecast, Setting, SettingForecast
from lightning_zero.lightning import estimate
from lightning_zero.lightning.estimate import _OF_TRAINER, _SHARED, _VARIED, _base, estimate_memory
from lightning_zero.lightning.precision import ZeroMixedPrecision

WIDTH = 64


def _blocks(depth: int = 3) -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth)])


class Program(pl.LightningModule):
    def __init__(self, make: Callable[[], nn.Module] = _blocks) -> None:
        super().__init__()
        self.net = make()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


class Configured(Program):
    def __init__(self) -> None:
        super().__init__(nn.Identity)

    def configure_model(self) -> None:
        if isinstance(self.net, nn.Identity):
            self.net = _blocks()


class WithoutNumber(Program):
    def training_step(self, batch: Tensor) -> Any:  # type: ignore[override]
        return self.net(batch).square().mean()


class Ready(Program):
    """Builds a layer in ``setup``, and freezes one."""

    def __init__(self, needs: str = "estimated_stepping_batches") -> None:
        super().__init__()
        self.needs = needs

    def setup(self, stage: str) -> None:
        assert stage == "fit"
        getattr(self.trainer, self.needs)
        self.net[0].requires_grad_(False)  # type: ignore[index]
        self.net.append(nn.Linear(WIDTH, 2 * WIDTH))  # type: ignore[operator]


class Asks(Program):
    """Asks its Trainer in ``configure_optimizers``."""

    def __init__(self, name: str = "estimated_stepping_batches") -> None:
        super().__init__()
        self.name = name

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, getattr(self.trainer, self.name))]


BATCH = torch.ones(8, WIDTH)


def _own(module: Any, strategy: ZeroStrategy | None = None, **options: Any) -> SettingForecast:
    options = {"world_size": 2, "batch": BATCH, **options}
    return estimate_memory(module, strategy, side_by_side=False, **options).own


def test_settings_stand_side_by_side_and_the_module_stays() -> None:
    module = Program()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    strategy = ZeroStrategy(stage=2, units=["Linear"])
    found = estimate_memory(module, strategy, world_size=4, batch=BATCH, optimizer=torch.optim.AdamW)
    assert len(found.settings) == 16
    assert [one.setting.sharding.stage for one in found.settings if one.is_own] == [2]
    assert found.base == {"units": ["Linear"], "state_dict_type": "full"}
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    peaks = {str(one.setting): one.peak_bytes for one in found.settings}
    assert peaks["stage 3"] < peaks["stage 0"]
    assert peaks["stage 1, offload cpu"] < peaks["stage 1"]


def test_an_own_setting_that_is_no_row_is_another_one() -> None:
    found = estimate_memory(Program(), ZeroStrategy(stage=3, offload=Offload(params="cpu")), world_size=2, batch=BATCH)
    assert len(found.settings) == 17
    assert found.own.host["parameters"] > 0


def test_disks_are_pretended(tmp_path: Path) -> None:
    folder = tmp_path / "disks"
    offload = Offload(optimizer="nvme", params="nvme", path=[folder / "a", folder / "b"])
    found = estimate_memory(
        Program(), ZeroStrategy(stage=3, offload=offload), world_size=2, batch=BATCH, optimizer=torch.optim.AdamW
    )
    assert not folder.exists()
    own, kept = found.own, next(one for one in found.settings if str(one.setting) == "stage 3")
    assert own.device["parameters"] == own.device["optimizer"] == 0
    for kind in ("parameters", "gradients", "optimizer"):
        assert 0 <= kept.device[kind] - own.disk[kind] < 64 < own.disk[kind]  # counters stay in memory
    assert 0 < own.host["windows"] <= sum(own.disk.values()) + 3 * 5 * 4096  # whole pages
    assert found.fastest(own.peak_bytes) == own
    args = yaml.safe_load(found.yaml(own))["trainer"]["strategy"]["init_args"]
    assert ZeroStrategy(**args).offload == Offload(optimizer="nvme", params="nvme", path=[f"{folder}/a", f"{folder}/b"])


def test_settings_of_a_step_in_the_backward_leave_out_stage_0() -> None:
    strategy = ZeroStrategy(stage=3, step="backward")
    found = estimate_memory(Program(), strategy, world_size=2, batch=BATCH)
    assert {one.setting.sharding.stage for one in found.settings} == {1, 2, 3}
    assert found.own.setting.sharding.stage == 3
    alone = estimate_memory(Program(), strategy, world_size=1, batch=BATCH)
    assert {one.setting.sharding.stage for one in alone.settings} == {0, 1, 2, 3}


def test_the_yaml_of_a_setting_has_the_other_options_of_the_strategy() -> None:
    options: dict[str, Any] = {
        "timeout": 60.0, "state_dict_type": "full", "async_save": True, "weights_only": False,
        "process_group_backend": "gloo", "start_method": "spawn", "communication": {"prefetch": 2},
    }  # fmt: skip
    found = estimate_memory(Program(), ZeroStrategy(stage=3, **options), world_size=2, batch=BATCH, side_by_side=False)
    args = yaml.safe_load(found.yaml(found.own))["trainer"]["strategy"]["init_args"]
    assert args == {"stage": 3, **options}
    again = ZeroStrategy(**args)
    assert (again.timeout.total_seconds(), again.communication.prefetch) == (60.0, 2)


def test_modules_on_the_meta_device_and_functions_give_the_same() -> None:
    with torch.device("meta"):
        on_meta = Program()
    expected = _own(Program())
    assert _own(on_meta) == expected
    assert _own(Program, loss=lambda module, batch: module.net(batch).square().mean()) == expected
    assert _own(Configured()).device == expected.device
    layers = Program(lambda: nn.Sequential(*[LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(3)]))
    assert _own(layers).device["parameters"] == expected.device["parameters"]


def test_optimizers_of_the_module_or_the_call_are_used() -> None:
    assert _own(Program()).device["optimizer"] == 0
    assert _own(Program(), optimizer=torch.optim.AdamW).device["optimizer"] > 0
    assert _own(_blocks(), loss=lambda module, batch: module(batch).mean()).device["optimizer"] > 0


def test_setup_runs_before_the_forecast() -> None:
    found, plain = (_own(make, ZeroStrategy(stage=0), world_size=1) for make in (Ready, Program))
    layer = 4 * (WIDTH + 1) * WIDTH
    assert found.device["parameters"] == plain.device["parameters"] + 2 * layer
    assert found.device["gradients"] == plain.device["gradients"] + layer


def test_a_step_without_the_number_of_its_batch_is_forecast() -> None:
    assert _own(WithoutNumber()).peak_bytes == _own(Program()).peak_bytes


def test_a_model_may_ask_how_many_steps_there_are_where_it_is_built() -> None:
    class Asking(Configured):
        def configure_model(self) -> None:
            assert self.trainer.estimated_stepping_batches
            super().configure_model()

    assert _own(Asking()) == _own(Configured())

    class NeedsMore(Configured):
        def configure_model(self) -> None:
            super().configure_model()
            self.trainer.strategy.barrier()

    with pytest.raises(ValueError, match="runs `configure_model` without a Trainer, and it failed .*`simulate`"):
        _own(NeedsMore())


def test_hooks_may_ask_how_many_steps_there_are() -> None:
    module = Asks()
    assert _own(module).device["parameters"] == _own(Program()).device["parameters"]
    with pytest.raises(RuntimeError, match="not attached to a `Trainer`"):
        _ = module.trainer


def test_precisions_have_their_bytes() -> None:
    names = ("64-true", "32-true", "bf16-mixed", "bf16-true")
    double, whole, mixed, half = (_own(Program(), precision=one) for one in names)
    assert double.device == {kind: 2 * nbytes for kind, nbytes in whole.device.items()}
    assert whole.device["parameters"] > 1.9 * half.device["parameters"]
    assert whole.device["optimizer"] == 0
    assert half.device["optimizer"] == whole.device["parameters"]  # masters
    assert 0.95 * half.device["optimizer"] < mixed.device["optimizer"] < half.device["optimizer"]  # of matrices


def test_a_scaled_loss_has_the_bytes_of_its_precision() -> None:
    for scaled, other in (("16-mixed", "bf16-mixed"), ("16-true", "bf16-true")):
        assert _own(Program(), precision=scaled).device == _own(Program(), precision=other).device
    assert (
        estimate_memory(Program(), world_size=1, batch=BATCH, precision="16-mixed", accelerator="cpu").precision
        == "bf16-mixed"
    )  # as in Lightning


class WithoutOptimizer(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = _blocks()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()  # type: ignore[no-any-return]


DEEPSPEED: dict[str, Any] = {
    "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "gradient_accumulation_steps": 3,
    "train_micro_batch_size_per_gpu": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 1}},
}  # fmt: skip


def test_a_configuration_of_deepspeed_is_the_strategy_that_it_stands_for() -> None:
    strategy = ZeroStrategy.from_deepspeed(DEEPSPEED)
    found = estimate_memory(WithoutOptimizer(), strategy, world_size=2, batch=BATCH, side_by_side=False)
    expected = estimate_memory(
        WithoutOptimizer(), ZeroStrategy(strategy.sharding, communication=strategy.communication), world_size=2,
        batch=BATCH, precision=found.precision, optimizer=torch.optim.AdamW, accumulate_grad_batches=3, clips=True,
        side_by_side=False,
    )  # fmt: skip
    assert found.precision.startswith("bf16-")
    assert found.own == expected.own
    assert found.own.device["optimizer"] > 0
    assert strategy.imported is not None
    assert not strategy.imported._settled


def test_the_yaml_of_a_configuration_of_deepspeed_has_its_arguments_of_the_trainer() -> None:
    """It had neither clipping, nor accumulation, nor the rule of the loss scale."""
    config = {**DEEPSPEED, "bf16": {"enabled": False}, "fp16": {"enabled": True, "loss_scale_window": 50}}
    strategy = ZeroStrategy.from_deepspeed(config)
    found = estimate_memory(WithoutOptimizer(), strategy, world_size=2, batch=BATCH, side_by_side=False)
    text = found.yaml(found.own)
    assert "# Without the section `optimizer` of DeepSpeed's configuration: `python -m lightning_zero conv" in text
    trainer = yaml.safe_load(text)["trainer"]
    assert (trainer["precision"], trainer["gradient_clip_val"]) == ("16-mixed", 1.0)
    assert trainer["accumulate_grad_batches"] == 3
    same = ZeroStrategy(**trainer["strategy"]["init_args"])
    assert strategy.imported is not None
    assert same.loss_scale == strategy.imported.loss_scale(ZeroMixedPrecision("16-mixed", "cpu"))
    assert same.communication == strategy.communication
    plain = estimate_memory(Program(), world_size=1, batch=BATCH, side_by_side=False)
    assert plain.yaml(plain.own).startswith("trainer:\n  precision: 32-true\n  strategy:")


@pytest.mark.parametrize(
    ("said", "version", "clips", "expected"),
    [
        ({}, "0.19.6", True, None),
        ({}, "0.19.6", False, 1.0),
        ({"gradient_clipping": 0.5}, "0.19.6", True, 0.5),
        ({"gradient_clipping": "auto"}, "0.19.6", True, None),
        ({}, None, True, None),
    ],
)
def test_the_yaml_leaves_clipping_to_a_trainer_whose_number_counts(
    said: Any, version: Any, clips: bool, expected: float | None
) -> None:
    """It had DeepSpeed's default, to which the Trainer's number does not yield."""
    strategy = ZeroStrategy.from_deepspeed({"zero_optimization": {"stage": 1}, **said}, deepspeed_version=version)
    found = estimate_memory(Program(), strategy, world_size=1, batch=BATCH, side_by_side=False, clips=clips)
    text = found.yaml(found.own)
    assert yaml.safe_load(text)["trainer"].get("gradient_clip_val") == expected
    is_named = "# Without the Trainer's `gradient_clip_val`: add it, as in the run.\n" in text
    assert is_named == (expected is None)


def test_sections_of_deepspeed_that_the_run_does_not_use_are_not_named() -> None:
    """Users were sent to an optimizer that the run leaves out."""
    config = {**DEEPSPEED, "scheduler": {"type": "WarmupLR", "params": {}}}
    strategy = ZeroStrategy.from_deepspeed(config)

    def left_out(module: Any, **options: Any) -> Any:
        return estimate_memory(module, strategy, world_size=2, batch=BATCH, side_by_side=False, **options).left_out

    remedy = ": `python -m lightning_zero convert-config` writes it"
    both = [f"the section `{name}` of DeepSpeed's configuration" for name in ("optimizer", "scheduler")]
    assert left_out(WithoutOptimizer()) == [one + remedy for one in both]
    condition = f"{both[1]}, used if `configure_optimizers` returns no schedule{remedy}"
    assert left_out(Program) == [condition]
    assert left_out(WithoutOptimizer(), optimizer=torch.optim.SGD) == [condition]


def test_what_differs_from_a_configuration_of_deepspeed_is_refused() -> None:
    strategy = ZeroStrategy.from_deepspeed(DEEPSPEED)
    with pytest.raises(ValueError, match="accumulates 3 batches, and `accumulate_grad_batches=2` differs. Leave it"):
        _own(Program(), strategy, accumulate_grad_batches=2)
    with pytest.raises(ValueError, match="of DeepSpeed's configuration and .*'16-true'.* differ. Use"):
        _own(Program(), strategy, precision="16-true")


@pytest.mark.parametrize("own", [0, 2, 3])
@pytest.mark.parametrize("files", [None, "full", "sharded"])
def test_the_yaml_of_every_setting_keeps_the_kind_of_files(own: Any, files: Any) -> None:
    strategy = ZeroStrategy(own, state_dict_type=files)
    found = estimate_memory(Program(), strategy, world_size=1, batch=BATCH, side_by_side=False)
    for stage in (0, 1, 2, 3):
        row = replace(found.own, setting=Setting(sharding=Sharding.of(stage)))
        args = yaml.safe_load(found.yaml(row))["trainer"]["strategy"]["init_args"]
        assert ZeroStrategy(**args).state_dict_type == strategy.state_dict_type
        assert args.keys() <= {"stage", "state_dict_type"}


def test_the_yaml_has_every_option_of_the_strategy() -> None:
    options: dict[str, Any] = {
        "units": ["Linear"], "communication": {"prefetch": 2}, "masters": False, "lowered": ["Embedding"],
        "moments": "bf16", "loss_scale": {"init_scale": 8.0}, "state_dict_type": "full", "step": "backward",
        "async_save": True, "weights_only": False, "start_method": "spawn", "process_group_backend": "gloo",
        "timeout": 60.0, "tensor_parallel": {"size": 2}, "expert_parallel": 2, "pipeline": {"stages": 2},
    }  # fmt: skip
    assert options.keys() == set(_SHARED)
    assert set(_VARIED + _OF_TRAINER) <= signature(ZeroStrategy).parameters.keys()
    for name, value in options.items():
        base = _base(ZeroStrategy(3, **{name: value}))
        assert base == {"state_dict_type": "sharded", name: value}


@pytest.mark.parametrize("stage", [1, 3])
def test_each_micro_batch_sends_as_much_as_the_second(stage: Literal[1, 3]) -> None:
    one, two, five = (
        _own(Program(), ZeroStrategy(stage=stage), accumulate_grad_batches=number).sent_bytes for number in (1, 2, 5)
    )
    assert five == one + 4 * (two - one)
    assert (two > one) == (stage == 3)


def test_scopes_of_a_node_say_what_crosses_nodes() -> None:
    strategy = ZeroStrategy(stage=Sharding(params="node", grads="node"))
    found = _own(Program(), strategy, world_size=8, ranks_per_node=4)
    assert found.sent_across_nodes is not None
    assert 0 < found.sent_across_nodes < found.sent_bytes
    assert _own(Program(), world_size=8).sent_across_nodes is None


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (
            ZeroStrategy(pipeline=Pipeline(stages=2, partition="measured")),
            r"`Pipeline\(partition='measured'\)` is not forecast yet",
        ),
        (
            ZeroStrategy(offload=Offload(optimizer="nvme", path="/tmp", fraction="auto")),
            r"`Offload\(fraction='auto'\)` to disks, or on a CPU, is not forecast",
        ),
        (ZeroStrategy(offload=Offload(step_device="cuda")), r"`Offload\(step_device='cuda'\)` is not forecast yet"),
        (ZeroStrategy(stage=Sharding(params="node", grads="node")), "say how many ranks a node has"),
    ],
)
def test_options_that_are_not_forecast_are_refused_by_name(strategy: ZeroStrategy, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _own(Program(), strategy)


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (Program(), {"precision": "nf4"}, "`precision='nf4'` is not forecast yet. Use '32-true'"),
        (Program(), {"world_size": 0}, "`world_size=0` must be a number of ranks"),
        (Program(), {"accelerator": "tpu"}, "`accelerator='tpu'` is not known"),
        (Program(), {"memory": 0}, "`memory=0` must be a number of bytes above 0, such as"),
        (Program(), {"memory": 8e9}, "`memory=8000000000.0` must be a number of bytes"),
        (Program(), {"memory": "80GiB"}, "`memory='80GiB'` must be a number of bytes"),
        (Program(), {"batch": None}, "needs a batch of `Program`. Set its `example_input_array`, add `data`"),
        (Program(), {"batch": torch.ones(2, 3)}, "runs `training_step` without a Trainer, and it failed"),
        (Program(), {"optimizer": torch.optim.LBFGS}, "`LBFGS`, whose step needs a closure, is not forecast"),
        (_blocks(), {}, "The output of `Sequential` is a `Tensor` without a loss. Return one, or give `loss=lambda"),
        (Ready("datamodule"), {}, "runs `setup` without a Trainer, and it failed .* Use `simulate`, which runs one."),
        (Asks("strategy"), {}, "Use `simulate`, which runs one, add a section `optimizer` to the configuration, or"),
    ],
)
def test_bad_input_is_refused(module: nn.Module, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _own(module, **options)


def _mixtral() -> nn.Module:
    config = MixtralConfig(
        vocab_size=64, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return MixtralForCausalLM(config)


class Mixtral(Program):
    def __init__(self) -> None:
        super().__init__(_mixtral)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.net(batch, labels=batch).loss


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_grouped_products_of_experts_are_forecast(precision: str) -> None:
    """PyTorch's fake tensors take them in bf16 only."""
    batch = torch.zeros(2, 512, dtype=torch.long)
    found = _own(Mixtral, ZeroStrategy(stage=2), batch=batch, precision=precision)
    assert found.at_peak["activations"] > 0


class Recomputes(nn.Module):
    """Recomputes its blocks as modules of Hugging Face do: in training mode alone."""

    gradient_checkpointing = True

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *[nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.Tanh(), nn.Linear(8 * WIDTH, WIDTH)) for _ in range(4)]
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            recomputes = self.gradient_checkpointing and self.training
            x = checkpoint(block, x, use_reentrant=False) if recomputes else block(x)
        return x


def test_modes_stay_and_what_eval_mode_turns_off_is_said() -> None:
    def evaluating() -> nn.Module:
        module = Program(Recomputes)
        module.net.eval()
        return module

    options: dict[str, Any] = {"world_size": 1, "batch": BATCH.repeat(64, 1), "side_by_side": False}
    training, found = (estimate_memory(make, **options) for make in (lambda: Program(Recomputes), evaluating))
    assert found.own.at_peak["activations"] > 1.5 * training.own.at_peak["activations"]
    assert not training.notes
    assert found.notes == [
        "`net` has `gradient_checkpointing` and is in eval mode, in which it recomputes nothing. Call `train()` of it;"
        " `from_pretrained` ends with `eval()`."
    ]
    assert table(found).endswith(found.notes[0])
    assert found.as_dict()["notes"] == found.notes


@pytest.mark.parametrize("option", ["pipeline", "tensor_parallel"])
def test_modes_are_said_of_modules_that_are_fitted(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were said only beside other settings."""
    monkeypatch.setattr(estimate, "forecast_stages", lambda *args, **kwargs: [])
    module = Program(Recomputes)
    module.net.eval()
    strategy = ZeroStrategy(stage=1, **{option: 2})
    found = estimate_memory(module, strategy, world_size=2, batch=BATCH, accelerator="cpu", side_by_side=False)
    assert len(found.notes) == 1
    assert found.notes[0].startswith("`net` has `gradient_checkpointing` and is in eval mode")


class Drops(nn.Module):
    """Leaves layers out at random, and draws from all generators."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(8)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            draws = (torch.rand(()).item(), random.random(), numpy.random.rand())
            x = x + block(x).tanh() if min(draws) > 0.1 else x
        return x


def test_random_numbers_are_the_same_for_all_settings_and_go_on_as_before() -> None:
    def rows(seed: int) -> MemoryForecast:
        pl.seed_everything(seed, verbose=False)
        return estimate_memory(lambda: Program(Drops), ZeroStrategy(0), world_size=2, batch=BATCH.repeat(99, 1))

    before = [rows(1).as_dict(), torch.rand(1).item(), random.random(), numpy.random.rand()]
    pl.seed_everything(1, verbose=False)
    assert before[1:] == [torch.rand(1).item(), random.random(), numpy.random.rand()]
    found = rows(2)
    assert found.as_dict() == before[0]
    settings = [one for one in found.settings if one.setting.activation_checkpointing is None]
    plain = [one.at_peak["activations"] for one in settings if one.setting.offload is None]
    assert len(set(plain[:2])) == 1  # stages 0 and 1


def test_a_compiled_module_is_forecast_as_it_is() -> None:
    compiled: Any = torch.compile(Program(), backend="eager")
    for module in (compiled, lambda: torch.compile(Program(), backend="eager")):
        assert _own(module) == _own(Program())  # with its own optimizer
