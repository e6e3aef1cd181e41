from __future__ import annotations

from typing import Any

import pytest
import torch
import yaml

from lightning_zero import Offload, Sharding, ZeroStrategy, estimate_memory
from lightning_zero.forecast.settings import MemoryForecast, SettingForecast
from tests.contracts.test_simulated_axes import AXES_MODELS, Fitted

GIVEN = {"size": 2, "plan": {"net.blocks.*.mlp.1": "column", "net.blocks.*.mlp.3": "row"}, "vocabulary": False}


def _forecast(strategy: ZeroStrategy, model: str = "gpt", module: Any = None, **options: Any) -> MemoryForecast:
    make = module or (lambda: Fitted(model))
    options = {"world_size": 4, "batch": AXES_MODELS[model][1](), "accelerator": "cpu", **options}
    return estimate_memory(make, strategy, **options)


def _own(strategy: ZeroStrategy, model: str = "gpt", **options: Any) -> SettingForecast:
    return _forecast(strategy, model, side_by_side=False, **options).own


def test_tensor_ranks_have_parts_of_parameters_and_send_activations() -> None:
    alone, cut = _own(ZeroStrategy(stage=1)), _own(ZeroStrategy(stage=1, tensor_parallel=GIVEN))
    matrices = 4 * 2 * 96 * 4 * 96 * 4  # bytes of those of the MLPs
    saved = alone.device["parameters"] - cut.device["parameters"]
    assert saved == pytest.approx(matrices / 2, rel=0.01)
    assert cut.sent_bytes != alone.sent_bytes
    assert cut.sent_across_nodes is None


def test_hooks_may_ask_how_many_steps_there_are() -> None:
    class Asks(Fitted):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, self.trainer.max_steps)]

    strategy = ZeroStrategy(stage=1, tensor_parallel=GIVEN)
    assert _own(strategy, module=lambda: Asks("gpt")).device["parameters"] == _own(strategy).device["parameters"]


def test_ranks_per_node_say_what_crosses_nodes() -> None:
    strategy = ZeroStrategy(stage=1, tensor_parallel=GIVEN)
    across = {node: _own(strategy, ranks_per_node=node) for node in (2, 4)}
    assert across[4].sent_across_nodes == 0
    sums = 2 * 4 * 4 * 48 * 96 * 4  # of a forward and a backward of the MLPs, in a tensor group
    assert across[2].sent_across_nodes is not None
    assert across[2].sent_bytes - across[2].sent_across_nodes == pytest.approx(sums, rel=0.01)


@pytest.mark.slow
def test_settings_beside_it_have_the_same_grid() -> None:
    found = _forecast(ZeroStrategy(stage=3, tensor_parallel=GIVEN))
    assert len(found.settings) == 16
    peaks = {str(one.setting): one.peak_bytes for one in found.settings}
    assert peaks["stage 3, checkpointing"] < peaks["stage 3"] < peaks["stage 0"]
    assert all(one.host["optimizer"] > 0 for one in found.settings if one.setting.offload is not None)
    args = yaml.safe_load(found.yaml(found.own))["trainer"]["strategy"]["init_args"]
    assert args == {"stage": 3, "tensor_parallel": GIVEN}
    assert ZeroStrategy(**args).tensor_parallel == ZeroStrategy(tensor_parallel=GIVEN).tensor_parallel


def test_a_configuration_of_deepspeed_on_tensor_ranks_is_the_strategy_that_it_stands_for() -> None:
    """Two copies of the model have two ranks each, so a batch of 24 samples is three batches of 4 on each copy."""
    config = {
        "zero_optimization": {"stage": 1}, "train_batch_size": 24, "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.5, "bf16": {"enabled": True},
    }  # fmt: skip
    strategy = ZeroStrategy.from_deepspeed(config, tensor_parallel=GIVEN)
    given = {"precision": "bf16-mixed", "accumulate_grad_batches": 3, "clips": True}
    assert _own(strategy) == _own(ZeroStrategy(stage=1, tensor_parallel=GIVEN), **given)
    assert strategy.imported is not None
    assert strategy.imported.plan.clipping == 0.5


class ByHand(Fitted):
    """Makes its steps itself, without clipping."""

    def __init__(self) -> None:
        super().__init__("gpt")
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def test_manual_optimization_is_not_clipped_by_a_default_of_deepspeed() -> None:
    """Lightning refused the clipping of the forecast."""
    config = {"zero_optimization": {"stage": 1}}
    strategy = ZeroStrategy.from_deepspeed(config, deepspeed_version="0.19.8", tensor_parallel=GIVEN)
    assert strategy.imported is not None
    assert strategy.imported.plan.clipping == 1.0
    found = _forecast(strategy, module=ByHand, side_by_side=False)
    assert found.own == _forecast(ZeroStrategy(1, tensor_parallel=GIVEN), module=ByHand, side_by_side=False).own
    assert "gradient_clip_val" not in found.yaml(found.own)


def test_divided_experts_are_a_part_and_tokens_are_even() -> None:
    whole, divided = (_own(ZeroStrategy(stage=1, expert_parallel=size), "moe") for size in (None, 4))
    experts = 2 * 4 * (2 * 48 * 4 * 48 + 5 * 48) * 4
    assert whole.device["parameters"] - divided.device["parameters"] == pytest.approx(experts * 3 / 4, rel=0.02)
    rows = 4 * 48 * 2  # tokens, two choices each
    exchanged = 2 * 4 * (rows * 3 // 4) * 48 * 4  # in two layers, there and back, forward and backward
    assert divided.sent_bytes > exchanged


def test_disks_have_the_states_of_the_parts() -> None:
    strategy = ZeroStrategy(stage=1, tensor_parallel=GIVEN)
    on_device = _own(strategy)
    on_disks = _own(ZeroStrategy(stage=1, tensor_parallel=GIVEN, offload=Offload(optimizer="nvme", path="/tmp")))
    assert on_disks.device["optimizer"] == 0
    with_masters = on_device.device["optimizer"] * 3 / 2
    assert on_disks.disk["optimizer"] == pytest.approx(with_masters, rel=0.01)
    assert on_disks.host["windows"] > 0


def test_the_yaml_names_divided_experts() -> None:
    found = _forecast(ZeroStrategy(stage=2, expert_parallel=2), "moe", side_by_side=False)
    assert found.base == {"expert_parallel": 2, "state_dict_type": "full"}


@pytest.mark.slow
def test_micro_batches_clipping_and_another_loss() -> None:
    strategy = ZeroStrategy(stage=2, tensor_parallel=GIVEN)
    one, two, five = (_own(strategy, accumulate_grad_batches=number).sent_bytes for number in (1, 2, 5))
    assert five - two == 3 * (two - one) > 0
    module = Fitted("gpt")
    clipped = _own(strategy, module=module, clips=True, loss=lambda module, batch: module.net(batch) * 2)
    assert clipped.sent_bytes > one
    assert "training_step" not in vars(module)


def test_bad_input_is_refused() -> None:
    strategy = ZeroStrategy(stage=1, tensor_parallel=GIVEN)
    with pytest.raises(ValueError, match="fits a `LightningModule`, and `GPT` is none. Put it into one"):
        _own(strategy, module=AXES_MODELS["gpt"][0]())
    with pytest.raises(ValueError, match="`tensor_parallel=2` does not divide the 3 ranks"):
        _own(strategy, world_size=3)
    with pytest.raises(ValueError, match="`expert_parallel=2` finds no experts in `Fitted`"):
        _own(ZeroStrategy(stage=1, expert_parallel=2))
    with pytest.raises(ValueError, match="say how many ranks a node has"):
        _own(ZeroStrategy(stage=Sharding(params="node", grads="node"), tensor_parallel=GIVEN))


def test_a_wrong_plan_is_refused_as_in_a_run() -> None:
    with pytest.raises(ValueError, match="block `net.blocks.0` computes something else"):
        _own(
            ZeroStrategy(
                stage=1,
                tensor_parallel={
                    "size": 2,
                    "plan": {"net.blocks.*.attention.qkv": "column_gather", "net.blocks.*.norm": "partial"},
                },
            )
        )


def test_a_module_on_the_meta_device() -> None:
    strategy = ZeroStrategy(stage=1, tensor_parallel=GIVEN)
    with torch.device("meta"):
        module = Fitted("gpt")
    assert _own(strategy, module=module).peak_bytes == _own(strategy).peak_bytes
    assert all(one.is_meta for one in module.parameters())
