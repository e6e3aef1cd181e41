"""``ZeroStrategy.from_deepspeed`` in runs: equal to the options typed by hand, never silently different."""

from __future__ import annotations

import copy
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_zero import LossScale, Offload, OneCycle, WarmupDecayLR, ZeroStrategy
from tests.lightning_programs import WORLD, Net, assert_equal, data, loader, seeded, trainer, weights
from tests.worlds import run

CONFIG: dict[str, Any] = {
    "train_batch_size": "auto",
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.1,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu"},
        "stage3_prefetch_bucket_size": 0,
        "overlap_comm": True,
        "reduce_bucket_size": 5e8,
    },
    "communication_data_type": "bf16",
    "activation_checkpointing": {"partition_activations": True},
    "optimizer": {"type": "Adam", "params": {"lr": 0.02, "betas": [0.8, 0.95], "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": "auto", "warmup_num_steps": 2, "warmup_max_lr": 0.02, "warmup_type": "linear"},
    },
}


class Plain(Net):
    """A module that makes no optimizer."""

    configure_optimizers = LightningModule.configure_optimizers


class ByHand(Net):
    """The optimizer and the schedule of ``CONFIG``."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, betas=(0.8, 0.95), weight_decay=0.1)
        schedule = WarmupDecayLR(optimizer, "auto", warmup_num_steps=2, warmup_type="linear")
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def fit_equals(rank: int, world: int) -> None:
    theirs = trainer(rank, world, ZeroStrategy.from_deepspeed(CONFIG))
    theirs.fit(seeded(Plain), train_dataloaders=loader(rank, world))
    strategy = ZeroStrategy(
        stage=2,
        offload=Offload(optimizer="cpu"),
        communication={"prefetch": 0, "reduce_dtype": "bf16"},
        activation_checkpointing={"policy": "full"},
    )
    ours = trainer(rank, world, strategy, precision="bf16-mixed", gradient_clip_val=0.1, accumulate_grad_batches=2)
    ours.fit(seeded(ByHand), train_dataloaders=loader(rank, world))
    assert theirs.global_step == ours.global_step == 4
    assert theirs.precision == ours.precision == "bf16-mixed"
    assert_equal(weights(theirs), weights(ours))
    recipes = [{**one.strategy._recipe(), "process_group": None} for one in (theirs, ours)]
    assert recipes[0] == recipes[1]


def test_a_fit_equals_the_options_typed_by_hand_to_the_bit() -> None:
    run(fit_equals, WORLD)


# -- One rank ----------------------------------------------------------------------------------------------------------


def made(config: Any, *, explicit: dict[str, Any] | None = None, **options: Any) -> Trainer:
    quiet = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(strategy=ZeroStrategy.from_deepspeed(config, **(explicit or {})), **{**quiet, **options})


def fitted(config: Any, module: Any = None, *, explicit: Any = None, batch: int = 4, **options: Any) -> Trainer:
    trainer = made(config, explicit=explicit, **options)
    trainer.fit(module or Net(), DataLoader(data(), batch_size=batch))
    return trainer


def table(caplog: pytest.LogCaptureFixture) -> dict[str, str]:
    (text,) = [message for message in caplog.messages if message.startswith("Configuration of DeepSpeed")]
    return {line.split()[0]: line for line in text.splitlines()[1:]}


def test_the_table_is_printed_once_and_says_what_the_trainer_made_of_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        trainer = fitted(CONFIG, Plain())
        trainer.fit_loop.max_epochs = 2
        trainer.fit(trainer.lightning_module, DataLoader(data(), batch_size=4))
        trainer.validate(trainer.lightning_module, DataLoader(data(), batch_size=4))
    rows = table(caplog)
    assert "`Trainer(gradient_clip_val=0.1)` is set" in rows["gradient_clipping"]
    assert "`Trainer(accumulate_grad_batches=2)`" in rows["gradient_accumulation_steps"]
    assert "`Trainer(precision='bf16-mixed')` is set, in place of its default" in rows["bf16.enabled"]
    assert "torch.optim.AdamW" in rows["optimizer.type"]
    assert "half an hour, as with Lightning's" in rows["(timeout)"]


def test_auto_is_filled_from_the_trainer(caplog: pytest.LogCaptureFixture) -> None:
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "initial_scale_power": 4},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": "auto", "warmup_num_steps": "auto", "warmup_max_lr": "auto"},
        },
    }
    module = Plain()
    module.lr, module.warmup_steps = 0.25, 3
    with caplog.at_level("INFO"):
        trainer = fitted(
            config, module, precision="16-true", gradient_clip_val=0.7, accumulate_grad_batches=2, max_epochs=2
        )
    schedule = trainer.lr_scheduler_configs[0].scheduler
    assert (schedule.total_num_steps, schedule.warmup_num_steps, schedule.base_lrs) == (8, 3, [0.25])
    assert trainer.strategy.loss_scale == LossScale(init_scale=16.0)
    assert (trainer.gradient_clip_val, trainer.accumulate_grad_batches, trainer.precision) == (0.7, 2, "16-true")
    rows = table(caplog)
    assert "the Trainer's `gradient_clip_val=0.7`" in rows["gradient_clipping"]
    assert "`Trainer(accumulate_grad_batches=2)`" in rows["gradient_accumulation_steps"]
    assert "`Trainer(precision='16-true')`" in rows["fp16.enabled"]


def test_auto_that_nothing_says_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"^`optimizer.params.lr='auto'`: the Trainer does not know it"):
        fitted({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, Plain())


# -- Precision ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "given", "expected"),
    [
        ({}, None, "32-true"),
        ({}, "bf16-true", "bf16-true"),
        ({"bf16": {"enabled": True}}, None, "bf16-mixed"),
        ({"bf16": {"enabled": True}}, "bf16-true", "bf16-true"),
        ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, None, "16-true"),
        ({"fp16": {"enabled": True}}, "16-true", "16-true"),
        ({"fp16": {"enabled": False}}, "bf16-mixed", "bf16-mixed"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, None, "bf16-true"),
    ],
)
def test_precision_is_that_of_the_configuration(config: Any, given: Any, expected: str) -> None:
    options = {} if given is None else {"precision": given}
    trainer = fitted(config, **options)
    assert trainer.precision == trainer.strategy.precision_plugin.precision == expected


@pytest.mark.filterwarnings("ignore")
def test_fp16_under_autocast_is_bf16_on_a_cpu() -> None:
    for options in ({}, {"precision": "16-mixed"}):
        trainer = fitted({"fp16": {"enabled": True, "initial_scale_power": 4}}, **options)
        assert trainer.precision == "bf16-mixed"
        assert trainer.strategy.loss_scale is None


@pytest.mark.parametrize(
    ("config", "given", "message"),
    [
        (
            {"bf16": {"enabled": True}},
            "16-true",
            "`bf16.enabled=true` of DeepSpeed's configuration and `Trainer(precision='16-true')` differ. Use"
            " `Trainer(precision='bf16-mixed')` or `Trainer(precision='bf16-true')`, or say \"auto\"",
        ),
        (
            {"fp16": {"enabled": True}},
            "bf16-true",
            "`fp16.enabled=true` of DeepSpeed's configuration and `Trainer(precisi",
        ),
        ({"bf16": {"enabled": False}}, "bf16-mixed", "`bf16.enabled=false` of DeepSpeed's configuration and `Trainer("),
        ({"torch_autocast": {"enabled": True}}, "bf16-true", "`torch_autocast.dtype='bfloat16'` of DeepSpeed's conf"),
    ],
)
def test_another_precision_is_an_error_that_names_the_argument(config: Any, given: Any, message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        made(config, precision=given)


def test_the_loss_scale_of_an_argument_wins() -> None:
    config = {"fp16": {"enabled": True, "initial_scale_power": 4}}
    trainer = fitted(config, explicit={"loss_scale": LossScale(init_scale=8.0)}, precision="16-true")
    assert trainer.strategy.loss_scale == LossScale(init_scale=8.0)
    assert fitted(config, precision="16-true").strategy.loss_scale == LossScale(init_scale=16.0)


# -- Clipping and accumulation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "version", "given", "expected"),
    [
        ({}, None, None, None),
        ({}, "0.19.6", None, 1.0),
        ({}, "0.19.6", 0.3, 0.3),
        ({}, "0.19.2", None, None),
        ({}, None, 0.3, 0.3),
        ({}, None, 0.0, 0.0),
        ({"gradient_clipping": 0.3}, None, None, 0.3),
        ({"gradient_clipping": 0.3}, None, 0.3, 0.3),
        ({"gradient_clipping": 0.0}, None, None, None),
        ({"gradient_clipping": "auto"}, None, None, None),
    ],
)
def test_clipping_is_that_of_the_configuration_or_of_the_trainer(
    config: Any, version: Any, given: Any, expected: Any
) -> None:
    trainer = fitted(config, explicit={"deepspeed_version": version}, gradient_clip_val=given)
    assert trainer.gradient_clip_val == expected


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (
            {"gradient_clipping": 0.3},
            {"gradient_clip_val": 1.0},
            "`gradient_clipping=0.3` of DeepSpeed's configuration, which is a norm, and"
            ' `Trainer(gradient_clip_val=1.0)` differ. Use `Trainer(gradient_clip_val=0.3)`, or say "auto"',
        ),
        (
            {"gradient_clipping": 0.3},
            {"gradient_clip_val": 0.3, "gradient_clip_algorithm": "value"},
            "`gradient_clipping=0.3` of DeepSpeed's configuration, which is a norm, and"
            " `Trainer(gradient_clip_val=0.3, gradient_clip_algorithm='value')` differ.",
        ),
        (
            {"gradient_accumulation_steps": 4},
            {"accumulate_grad_batches": 2},
            "The configuration of DeepSpeed accumulates 4 batches, and `Trainer(accumulate_grad_batches=2)` differs."
            ' Use `Trainer(accumulate_grad_batches=4)`, or say "auto"',
        ),
        (
            {"gradient_accumulation_steps": 4},
            {"callbacks": [GradientAccumulationScheduler({0: 2})]},
            "The configuration of DeepSpeed accumulates 4 batches, and the callback `GradientAccumulationSch",
        ),
        (
            {"train_batch_size": 9, "train_micro_batch_size_per_gpu": 4},
            {},
            "`train_batch_size=9` cannot be divided by `train_micro_batch_size_per_gpu=4` times 1 rank(s).",
        ),
    ],
)
def test_a_trainer_that_says_something_else_is_an_error(config: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        fitted(config, **options)


def test_accumulation_follows_from_batch_sizes() -> None:
    trainer = fitted({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4})
    assert (trainer.accumulate_grad_batches, trainer.global_step) == (4, 2)


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


def test_a_program_that_steps_by_itself_is_told_what_is_not_done(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        trainer = fitted({}, Manual(), explicit={"deepspeed_version": "0.19.6"})
    assert trainer.gradient_clip_val is None
    assert "with manual optimization the program clips" in table(caplog)["(gradient_clipping)"]
    with pytest.raises(ValueError, match=r"^`gradient_clipping=0.5` .* `self.clip_gradients\(optimizer, 0.5\)`"):
        fitted({"gradient_clipping": 0.5}, Manual())
    with pytest.raises(ValueError, match=r"accumulates 2 batches, and `automatic_optimization=False`, with which the"):
        fitted({"gradient_accumulation_steps": 2}, Manual())
    with pytest.raises(
        ValueError, match=r"^The section `scheduler` .* `automatic_optimization=False`. Make the schedule"
    ):
        fitted({"scheduler": {"type": "WarmupLR", "params": {}}}, Manual())


def test_another_batch_size_of_the_loader_is_a_warning() -> None:
    with pytest.warns(
        UserWarning, match=r"^The batches of the training loader have 4 sample\(s\), and those of DeepS.* 8 "
    ):
        fitted({"train_micro_batch_size_per_gpu": 8})
    with pytest.warns(UserWarning, match=r"those of DeepSpeed's configuration 2 "):
        fitted({"train_batch_size": 2})


# -- Optimizer and schedule --------------------------------------------------------------------------------------------


def test_the_optimizer_of_the_module_is_used_where_it_makes_one(caplog: pytest.LogCaptureFixture) -> None:
    config = {"optimizer": {"type": "Lamb", "params": {"lr": 1.0}}}
    message = "^DeepSpeed's configuration and the module both have the optimizer: .* Take `optimizer` out of the con"
    with caplog.at_level("INFO"), pytest.warns(UserWarning, match=message):
        trainer = fitted(config, Net())
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.02
    assert "`configure_optimizers` is used instead" in table(caplog)["optimizer.type"]


def test_the_schedule_is_made_where_the_module_makes_none(caplog: pytest.LogCaptureFixture) -> None:
    config = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}}
    trainer = fitted(config, Net())
    (made,) = trainer.lr_scheduler_configs
    assert (made.interval, made.scheduler.last_batch_iteration, made.scheduler.base_lrs) == ("step", 7, [0.02])
    caplog.clear()
    message = "^DeepSpeed's configuration and the module both have the scheduler: the schedule of `configure_opt"
    with caplog.at_level("INFO"), pytest.warns(UserWarning, match=message):
        trainer = fitted(
            {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 1}}}, ByHand()
        )
    assert type(trainer.lr_scheduler_configs[0].scheduler) is WarmupDecayLR
    assert "the schedule of `configure_optimizers` is used instead" in table(caplog)["scheduler.type"]


@pytest.mark.parametrize("has_optimizer", [False, True])
def test_a_lost_schedule_is_said_to_differ_from_deepspeed_strategy_only_beside_an_optimizer(
    has_optimizer: bool,
) -> None:
    """Without a section `optimizer` Lightning's `DeepSpeedStrategy` passes the module's schedule on to DeepSpeed."""
    config: dict[str, Any] = {"scheduler": {"type": "WarmupLR", "params": {}}}
    if has_optimizer:
        config["optimizer"] = {"type": "AdamW", "params": {}}
    with pytest.warns(UserWarning, match="both have the scheduler") as found:
        fitted(config, ByHand())
    (said,) = [str(one.message) for one in found if "both have the scheduler" in str(one.message)]
    assert ("DeepSpeedStrategy" in said) == has_optimizer


def test_a_schedule_of_pytorch_is_stepped_at_every_step() -> None:
    trainer = fitted({"scheduler": {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}}}, Net())
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.02 * 0.5**8


@pytest.mark.parametrize(("kind", "name", "values"), [("AdamW", "betas", (0.9, 0.99)), ("SGD", "momentum", (0,))])
@pytest.mark.filterwarnings("ignore:.*which `SGD` does not have")
def test_momentum_of_a_cycle_is_as_in_deepspeed(kind: str, name: str, values: Any) -> None:
    config = {
        "optimizer": {"type": kind, "params": {"lr": 0.1}},
        "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}},
    }
    trainer = fitted(config, Plain())
    assert isinstance(trainer.lr_scheduler_configs[0].scheduler, OneCycle)
    found = trainer.optimizers[0].param_groups[0][name]
    assert (found if name == "betas" else (found,)) == pytest.approx(values, abs=1e-3)


def test_the_module_is_left_as_it_was() -> None:
    module = Plain()
    fitted(CONFIG, module)
    assert "configure_optimizers" not in vars(module)
    pickle.dumps(module.state_dict())
    with pytest.raises(MisconfigurationException, match="No `configure_optimizers"):
        Trainer(accelerator="cpu", logger=False, enable_checkpointing=False).fit(Plain(), DataLoader(data()))


def test_frozen_parameters_are_not_in_the_optimizer() -> None:
    module = Plain()
    module.first.requires_grad_(False)
    trainer = fitted({"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}, module)
    assert len(trainer.optimizers[0].param_groups[0]["params"]) == len(list(module.parameters())) - 2


def test_a_checkpoint_resumes(tmp_path: Path) -> None:
    config = copy.deepcopy(CONFIG)
    config["scheduler"]["params"]["total_num_steps"] = 8
    whole = fitted(config, seeded(Plain), max_epochs=2)
    first = fitted(config, seeded(Plain))
    first.save_checkpoint(tmp_path / "last.ckpt")
    second = made(CONFIG, max_epochs=2)
    second.fit(Plain(), DataLoader(data(), batch_size=4), ckpt_path=tmp_path / "last.ckpt")
    assert second.global_step == whole.global_step == 8
    assert_equal(weights(second), weights(whole))


# -- The call ----------------------------------------------------------------------------------------------------------


def test_explicit_options_win(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    with caplog.at_level("INFO"):
        trainer = fitted(tmp_path / "ds.json", Plain(), explicit={"stage": 1, "offload": None, "communication": None})
    strategy = trainer.strategy
    assert (strategy.stage, strategy.offload, strategy.communication.prefetch) == (1, None, 1)
    rows = table(caplog)
    assert "the argument `stage` is used instead" in rows["zero_optimization.stage"]
    assert "the argument `offload` is used instead" in rows["zero_optimization.offload_optimizer.device"]
    assert "the argument `communication` is used instead" in rows["communication_data_type"]


def test_arguments_of_the_trainer_are_no_options() -> None:
    with pytest.raises(
        TypeError, match=r"`ZeroStrategy` has no option `gradient_clip_val`. Use `Trainer\(gradient_clip_"
    ):
        ZeroStrategy.from_deepspeed({}, gradient_clip_val=1.0)
    with pytest.raises(ValueError, match="^`zero_optimization.stge` is no key of DeepSpeed's configuration."):
        ZeroStrategy.from_deepspeed({"zero_optimization": {"stge": 3}})
    strategy = ZeroStrategy.from_deepspeed({"zero_optimization": {"stge": 3}}, strict=False)
    assert strategy.stage == 0


def test_a_subclass_is_made() -> None:
    class Mine(ZeroStrategy):
        pass

    assert type(Mine.from_deepspeed({})) is Mine


def test_the_strategy_is_copied_with_its_plan() -> None:
    strategy = ZeroStrategy.from_deepspeed(CONFIG)
    again = pickle.loads(pickle.dumps(strategy))
    assert again.imported.plan.options == strategy.imported.plan.options


def test_evaluation_needs_no_batch_sizes() -> None:
    trainer = made({"train_batch_size": 9, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4})
    trainer.validate(Net(), DataLoader(data(), batch_size=4), verbose=False)


def test_the_program_of_the_document_runs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "deepspeed.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    program = program.replace("max_epochs=1", "max_epochs=1, logger=False, enable_checkpointing=False")
    names = {"module": Net(), "loader": DataLoader(data(), batch_size=4)}
    exec(compile(program, "deepspeed.md", "exec"), names)
    assert names["trainer"].strategy.stage == 2  # type: ignore[attr-defined]
