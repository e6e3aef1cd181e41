"""Options mean what they say, and what they cannot mean is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from lightning_zero.config import Communication, MixedPrecision
from lightning_zero.errors import nearest
from lightning_zero.sharding import ShardedOver, Sharding, ShardingScope

fp64, fp32, bf16, fp16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("stage", "params", "grads", "optim"),
    [(0, False, False, False), (1, False, False, True), (2, False, True, True), (3, True, True, True)],
)
def test_a_stage_is_three_answers(stage: int, params: bool, grads: bool, optim: bool) -> None:
    sharding = ShardedOver.from_stage(stage)
    assert (bool(sharding.params), bool(sharding.grads), bool(sharding.optim)) == (params, grads, optim)
    assert Sharding.of(stage).over(ShardingScope.NODE) == sharding
    assert Sharding.of(stage).stage == stage


def test_a_node_of_one_rank_or_of_all_is_no_node() -> None:
    hybrid = Sharding(params="node", grads="node")
    assert hybrid.over(ShardingScope.NODE) == ShardedOver(ShardingScope.NODE, ShardingScope.NODE, ShardingScope.WORLD)
    assert hybrid.over(ShardingScope.NONE) == ShardedOver.from_stage(1)
    assert hybrid.over(ShardingScope.WORLD) == ShardedOver.from_stage(3)
    assert hybrid.stage == 3


@pytest.mark.parametrize("stage", [4, -1, "2", None, True, 1.5])
def test_other_stages_are_refused(stage: Any) -> None:
    with pytest.raises(ValueError, match="is not a ZeRO stage. Use 0, 1, 2 or 3"):
        Sharding.of(stage)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduce_dtype": "fp8"}, "`Communication.reduce_dtype='fp8'.` is not known"),
        ({"prefetch": -1}, "`Communication.prefetch=-1.` must be a number of units"),
        ({"timeout_s": 0}, "`Communication.timeout_s=0.` must be a positive number"),
        ({"timeout_s": float("nan")}, "`Communication.timeout_s=nan.` is not a finite number"),
    ],
)
def test_communication_that_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Communication(**options)


@pytest.mark.parametrize(
    ("option", "compute", "expected"),
    [
        (None, fp32, fp32), (None, bf16, fp32), (None, fp16, fp32), (None, fp64, fp64),
        ("bf16", fp32, bf16), ("bf16", fp64, bf16), ("fp16", bf16, fp16), ("fp32", fp64, fp32),
    ],
)  # fmt: skip
def test_gradients_are_reduced_in_the_dtype_that_was_asked_for(option: Any, compute: Any, expected: Any) -> None:
    assert Communication(reduce_dtype=option).gradient_dtype(compute) == expected


@pytest.mark.parametrize(
    ("masters", "original", "compute", "expected"),
    [
        (True, fp32, fp32, fp32), (True, fp32, bf16, fp32), (True, bf16, bf16, fp32), (True, fp64, fp64, fp64),
        (False, fp32, bf16, fp32), (False, bf16, bf16, bf16), (False, fp16, fp16, fp16), (False, fp32, fp32, fp32),
    ],
)  # fmt: skip
def test_a_master_is_never_less_precise_than_the_parameter_was(
    masters: bool, original: Any, compute: Any, expected: Any
) -> None:
    assert MixedPrecision(masters=masters).master_dtype(original, compute) == expected


@pytest.mark.parametrize("dtype", [fp32, fp64, torch.int8])
def test_a_compute_dtype_that_is_not_of_16_bits_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"compute_dtype={dtype}.` must be torch.bfloat16, torch.float16 or None"):
        MixedPrecision(compute_dtype=dtype)


@pytest.mark.parametrize("options", [Communication(), MixedPrecision(), Sharding.of(3)])
def test_options_do_not_change(options: Any) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(options, dataclasses.fields(options)[0].name, None)


@pytest.mark.parametrize(
    ("name", "expected"), [("Blok", " Did you mean `Block`?"), ("Xyz", ""), ("blokk", " Did you mean `Block`?")]
)
def test_the_nearest_name_is_suggested(name: str, expected: str) -> None:
    assert nearest(name, ["Block", "Head"]) == expected
