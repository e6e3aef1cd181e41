"""Bytes that are sent, counted at the process groups and compared with the formulas (arXiv:1910.02054, section 7)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_zero.config import Communication, MixedPrecision
from lightning_zero.grid import Grid
from lightning_zero.parallel.tensor.collectives import ProcessGroupRanks
from lightning_zero.parallel.tensor.grid import grid_of
from lightning_zero.parallel.tensor.plan import TensorPlan
from lightning_zero.parallel.tensor.transform import cut_module
from tests import worlds

WIDTH = 96  # WIDTH * WIDTH is a multiple of 8 * world for 2, 3 and 4 ranks: no padding
DEPTH = 4
NUMEL = DEPTH * WIDTH * WIDTH


class Net(nn.Module):
    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)])
        self.register_buffer("statistics", torch.zeros(16))
        if frozen:
            self.layers[1].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _step(
    rank: int, world: int, stage: int, compute: Any, reduce_dtype: Any, prefetch: int, micro_batches: int, frozen: bool
) -> dict[str, Any]:
    """Return what the third training step sent."""
    from lightning_zero.engine.engine import ZeroEngine

    engine = ZeroEngine(
        stage,
        units=("Linear",),
        communication=Communication(reduce_dtype=reduce_dtype, prefetch=prefetch),
        precision=MixedPrecision(compute_dtype=compute),
    )
    module = engine.shard(Net(frozen))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    engine.attach(optimizer)

    def step() -> None:
        for index in range(micro_batches):
            with engine.microbatch(last=index == micro_batches - 1):
                with engine.scope("training_step"), torch.autocast("cpu", torch.bfloat16, enabled=compute is not None):
                    loss = module(torch.ones(2, WIDTH)).float().square().mean()
                with engine.backward_scope():
                    loss.backward()
        engine.clip_grad_norm(optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    before = dict(engine.stats().traffic)
    with worlds.count_collectives() as ledger:
        step()
    after = engine.stats().traffic
    answer = {
        "payload": ledger.payload,
        "control": ledger.control,
        "traffic": {key: after[key] - before.get(key, 0) for key in after},
        "units": engine.stats().num_units,
    }
    engine.close()
    return answer


def _expected(stage: int, world: int, compute: Any, reduce_dtype: Any, micro_batches: int, frozen: bool) -> int:
    trained = NUMEL - (WIDTH * WIDTH if frozen else 0)
    gradient = trained * (2 if reduce_dtype else 4)
    itemsize = 2 if compute is not None else 4
    gathers = 2 * NUMEL * itemsize * micro_batches if stage == 3 else trained * itemsize
    if stage == 3 and frozen:
        gathers = 2 * NUMEL * itemsize * micro_batches
    reductions = gradient * (micro_batches if stage >= 2 else 1)
    return (gathers + reductions) * (world - 1) // world


@pytest.mark.parametrize(
    ("compute", "reduce_dtype"),
    [(None, None), (torch.bfloat16, None), (torch.bfloat16, "bf16")],
    ids=["fp32", "bf16", "bf16-reduced"],
)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [2, 3])
def test_bytes_per_step_follow_the_formula(world: int, stage: int, compute: Any, reduce_dtype: Any) -> None:
    _check(world, stage, compute, reduce_dtype, 1, 1, False)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_look_ahead_sends_nothing_more(prefetch: int) -> None:
    _check(2, 3, torch.bfloat16, None, prefetch, 1, False)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_micro_batches_reduce_when_gradients_are_sharded(stage: int) -> None:
    _check(2, stage, None, None, 1, 3, False)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_frozen_units_are_not_reduced(stage: int) -> None:
    _check(2, stage, None, None, 1, 1, True)


def test_one_rank_sends_nothing() -> None:
    (answer,) = worlds.run(_step, 1, 3, None, None, 1, 1, False)
    assert (answer["payload"], answer["control"]) == (0, 0)


def _check(
    world: int, stage: int, compute: Any, reduce_dtype: Any, prefetch: int, micro_batches: int, frozen: bool
) -> None:
    answers = worlds.run(_step, world, stage, compute, reduce_dtype, prefetch, micro_batches, frozen)
    expected = _expected(stage, world, compute, reduce_dtype, micro_batches, frozen)
    for answer in answers:
        traffic = answer["traffic"]
        assert answer["payload"] == expected
        assert traffic["all_gather"] + traffic["reduce_scatter"] == expected
        assert traffic["broadcast"] + traffic["control"] == answer["control"] <= 1024 * answer["units"] * micro_batches


# -- On a grid ---------------------------------------------------------------------------------------------------------

CUT_DEPTH, ROWS = 2, 2  # the first layers are a column and a row layer, the others are whole


def _cut(module: nn.Module, tensor_ranks: int) -> Grid:
    world, rank = dist.get_world_size(), dist.get_rank()
    tensor_groups = [
        dist.new_group(list(range(first, first + tensor_ranks))) for first in range(0, world, tensor_ranks)
    ]
    data_groups = [dist.new_group(list(range(place, world, tensor_ranks))) for place in range(tensor_ranks)]
    tensor_group, data_group = tensor_groups[rank // tensor_ranks], data_groups[rank % tensor_ranks]
    plan = TensorPlan({"layers.0": "column", "layers.1": "row"})
    records = cut_module(module, plan, ProcessGroupRanks(tensor_group))
    return grid_of(records, tensor_group=tensor_group, data_group=data_group, data_ranks=world // tensor_ranks)


def _step_on_grid(rank: int, world: int, tensor_ranks: int, stage: int, micro_batches: int) -> dict[str, Any]:
    """Return what the third step sent: all calls, and the engine's count."""
    from lightning_zero.engine.engine import ZeroEngine

    engine = ZeroEngine(stage, units=("Linear",))
    module = Net(False)
    module = engine.shard(module, grid=_cut(module, tensor_ranks))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    engine.attach(optimizer)

    def step() -> None:
        for index in range(micro_batches):
            with engine.microbatch(last=index == micro_batches - 1):
                with engine.scope("training_step"):
                    loss = module(torch.ones(ROWS, WIDTH, requires_grad=True)).square().mean()
                with engine.backward_scope():
                    loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    before = dict(engine.stats().traffic)
    with worlds.count_collectives() as ledger:
        step()
    after = engine.stats().traffic
    engine.close()
    return {"payload": ledger.payload, "traffic": {key: after[key] - before.get(key, 0) for key in after}}


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(("data_ranks", "tensor_ranks"), [(1, 2), (2, 2), (1, 4)], ids=["1x2", "2x2", "1x4"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_on_a_grid_follow_the_formula(stage: int, data_ranks: int, tensor_ranks: int, micro_batches: int) -> None:
    world = data_ranks * tensor_ranks
    cut = CUT_DEPTH * WIDTH * WIDTH
    expected = 0
    for numel, ranks in ((cut // tensor_ranks, data_ranks), (NUMEL - cut, world)):
        reductions = micro_batches if stage >= 2 else 1
        gathers = 2 * micro_batches if stage == 3 else 1
        expected += 4 * numel * (reductions + gathers) * (ranks - 1) // ranks
    activations = ROWS * WIDTH * 4
    sums = 2 * micro_batches * 2 * activations * (tensor_ranks - 1) // tensor_ranks  # one in forward, one in backward
    for answer in worlds.run(_step_on_grid, world, tensor_ranks, stage, micro_batches):
        assert answer["payload"] == expected + sums
        assert answer["traffic"]["all_gather"] + answer["traffic"]["reduce_scatter"] == expected
