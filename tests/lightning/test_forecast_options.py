from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero import Offload, Pipeline, ZeroStrategy
from lightning_zero.lightning.forecast_options import (
    accumulation_of,
    on_cpu,
    precision_of,
    refuse_unforecast,
    without_meta,
)


def test_short_names_of_precisions_are_known() -> None:
    assert [precision_of(one, ZeroStrategy(), "gpu") for one in ("32", "64", "bf16", "bf16-true", None)] == [
        "32-true", "64-true", "bf16-mixed", "bf16-true", "32-true",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="`precision='nf4'` is not forecast yet. Use '32-true', '64-true', "):
        precision_of("nf4", ZeroStrategy(), "gpu")


def test_a_batch_of_deepspeed_is_divided_among_copies_of_the_model() -> None:
    config = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}
    axes: list[dict[str, Any]] = [{}, {"pipeline": 2}, {"tensor_parallel": 4}, {"expert_parallel": 2}]
    strategies = (ZeroStrategy.from_deepspeed(config, **one) for one in axes)
    assert [accumulation_of(1, one, 8) for one in strategies] == [2, 4, 8, 2]


def test_options_are_refused_in_the_words_of_the_caller() -> None:
    strategy = ZeroStrategy(pipeline=Pipeline(stages=2, partition="measured"))
    message = r"`Pipeline\(partition='measured'\)` is not simulated yet."
    with pytest.raises(ValueError, match=message):
        refuse_unforecast(strategy, world_size=2, accelerator="cpu", verb="simulated", noun="simulation")
    allowed = ZeroStrategy(tensor_parallel=2, expert_parallel=2, pipeline=2)
    refuse_unforecast(allowed, world_size=8, accelerator="cpu")


def test_tensors_without_values_become_ordinary_ones() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    module[0].bias = module[1].bias  # type: ignore[assignment]
    without_meta(module)
    assert {one.device.type for one in (*module.parameters(), *module.buffers())} == {"cpu"}
    assert module[0].bias is module[1].bias
    assert torch.equal(on_cpu(torch.ones(2, device="meta")), torch.zeros(2))


@pytest.mark.parametrize(("option", "expected"), [({}, 1), ({"pipeline": 2}, 2), ({"tensor_parallel": 2}, 2)])
def test_accumulation_follows_from_the_copies_of_the_model(option: dict[str, Any], expected: int) -> None:
    """All ranks counted, and the simulation of a fit was refused: its Trainer had another number."""
    config = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}
    assert accumulation_of(1, ZeroStrategy.from_deepspeed(config, **option), 4) == expected


def test_a_batch_of_deepspeed_that_no_run_can_divide_is_refused() -> None:
    """The forecast took it, and the run refused it after its set-up."""
    strategy = ZeroStrategy.from_deepspeed({"train_batch_size": 10})
    assert accumulation_of(1, strategy, 2) == 1
    for given, ranks in ((1, 4), (2, 2)):
        message = rf"`train_batch_size=10` cannot be divided by `accumulate_grad_batches={given}` times {ranks} rank"
        with pytest.raises(ValueError, match=message):
            accumulation_of(given, strategy, ranks)


def test_the_free_memory_of_a_host_is_not_guessed() -> None:
    strategy = ZeroStrategy(offload=Offload(fraction="auto"))
    refuse_unforecast(strategy, world_size=2, accelerator="gpu")
    with pytest.raises(ValueError, match=r"`Offload\(fraction='auto'\)` to disks, or on a CPU, is not forecast yet."):
        refuse_unforecast(strategy, world_size=2, accelerator="cpu")
