"""Bytes that live, counted from storages and compared with the formulas of the stages (arXiv:1910.02054, section 5)."""

from __future__ import annotations

import gc
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_zero.config import Communication, MixedPrecision
from lightning_zero.grid import Grid
from lightning_zero.parallel.tensor.collectives import ProcessGroupRanks
from lightning_zero.parallel.tensor.grid import grid_of
from lightning_zero.parallel.tensor.plan import TensorPlan
from lightning_zero.parallel.tensor.transform import cut_module
from tests import worlds
from tests.sampling import sample

WIDTH = 256
DEPTH = 8
NUMEL = DEPTH * WIDTH * WIDTH
CUT_DEPTH = 6  # layers that are cut over tensor ranks on a grid
ALIGN = 8  # elements of a shard; a unit's buffer is padded to world * ALIGN


def _build() -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)])


def _live_bytes() -> int:
    """Return the bytes of all storages that a tensor in Python refers to; those of a compiler's caches are not real."""
    with torch._C.DisableTorchFunctionSubclass():
        tensors = [i for i in gc.get_objects() if issubclass(type(i), Tensor) and not issubclass(type(i), FakeTensor)]
        storages = {}
        for tensor in tensors:
            if tensor.device.type == "cpu" and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def _formula(stage: int, world: int, gradient: int) -> float:
    """Bytes per parameter: 16-bit parameters, gradients, and 12 bytes of fp32 master and two moments."""
    optimizer = 12
    return {
        1: 2 + gradient + optimizer / world,
        2: 2 + (gradient + optimizer) / world,
        3: (2 + gradient + optimizer) / world,
    }[stage]


@contextmanager
def _fake_world(world: int) -> Iterator[None]:
    """Be rank 0 of a world whose other ranks are pretended."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    yield


def _engine(
    stage: int, reduce_dtype: Any = None, prefetch: int = 1, tensor_ranks: int = 0
) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    from lightning_zero.engine.engine import ZeroEngine

    engine = ZeroEngine(
        stage,
        units=("Linear",),
        communication=Communication(reduce_dtype=reduce_dtype, prefetch=prefetch),
        precision=MixedPrecision(compute_dtype=torch.bfloat16),
    )
    module = _build()
    grid = _cut(module, tensor_ranks) if tensor_ranks else None
    module = engine.shard(module, grid=grid)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    engine.attach(optimizer)
    return engine, module, optimizer


def _cut(module: nn.Module, tensor_ranks: int) -> Grid:
    """Cut layers 0 to ``CUT_DEPTH - 1`` over neighbouring ranks; the others are whole. Collective: all ranks."""
    world, rank = dist.get_world_size(), dist.get_rank()
    tensor_groups = [
        dist.new_group(list(range(first, first + tensor_ranks))) for first in range(0, world, tensor_ranks)
    ]
    data_groups = [dist.new_group(list(range(place, world, tensor_ranks))) for place in range(tensor_ranks)]
    tensor_group, data_group = tensor_groups[rank // tensor_ranks], data_groups[rank % tensor_ranks]
    plan = TensorPlan({str(layer): "row" if layer % 2 else "column" for layer in range(CUT_DEPTH)})
    records = cut_module(module, plan, ProcessGroupRanks(tensor_group))
    return grid_of(records, tensor_group=tensor_group, data_group=data_group, data_ranks=world // tensor_ranks)


def _forward_backward(engine: Any, module: nn.Module) -> None:
    with engine.scope("training_step"), torch.autocast("cpu", torch.bfloat16):
        loss = module(torch.ones(1, WIDTH)).float().square().mean()
    with engine.backward_scope():
        loss.backward()


def _persistent(rank: int, world: int, stage: int, reduce_dtype: Any, pretended: int | None) -> tuple[int, int]:
    """Return the bytes at the end of the second backward, counted here and by the engine."""
    if pretended is not None:
        with _fake_world(pretended):
            return _measure(stage, reduce_dtype)
    return _measure(stage, reduce_dtype)


def _measure(stage: int, reduce_dtype: Any, tensor_ranks: int = 0) -> tuple[int, int]:
    gc.collect()
    before = _live_bytes()
    engine, module, optimizer = _engine(stage, reduce_dtype, tensor_ranks=tensor_ranks)
    _forward_backward(engine, module)
    optimizer.step()
    optimizer.zero_grad()
    _forward_backward(engine, module)
    gc.collect()
    memory = engine.stats().memory
    counted = _live_bytes() - before
    optimizer.step()
    engine.close()
    return counted, sum(memory[key] for key in ("parameters", "gradients", "optimizer"))


@pytest.mark.parametrize("reduce_dtype", [None, "bf16"], ids=["fp32-gradients", "bf16-gradients"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", sample([1, 2, 4, 64, 1024], 1, 2, 64, 1024))
def test_bytes_at_the_end_of_backward_follow_the_formula(world: int, stage: int, reduce_dtype: Any) -> None:
    pretended = world if world > 4 else None
    answers = worlds.run(_persistent, 1 if pretended else world, stage, reduce_dtype, pretended)
    expected = _formula(stage, world, 2 if reduce_dtype else 4) * NUMEL
    padding = DEPTH * 18 * ALIGN + 1024  # one more shard alignment per unit, step counters and other scalars
    for counted, reported in answers:
        assert counted <= 1.005 * expected + padding
        assert counted >= 0.995 * expected - padding
        assert abs(reported - counted) <= 0.005 * expected + padding


def _persistent_on_grid(rank: int, world: int, tensor_ranks: int) -> list[tuple[int, int]]:
    """Return the bytes of stages 0 to 3, counted here and by the engine."""
    return [_measure(stage, None, tensor_ranks) for stage in (0, 1, 2, 3)]


@pytest.mark.parametrize(("data_ranks", "tensor_ranks"), [(1, 2), (2, 2), (1, 4)], ids=["1x2", "2x2", "1x4"])
def test_bytes_on_a_grid_follow_the_formula(data_ranks: int, tensor_ranks: int) -> None:
    world = data_ranks * tensor_ranks
    cut = CUT_DEPTH * WIDTH * WIDTH
    padding = DEPTH * 18 * ALIGN + 1024
    for answers in worlds.run(_persistent_on_grid, world, tensor_ranks):
        for stage, (counted, reported) in enumerate(answers):
            of = max(stage, 1)  # on a grid optimizer states are sharded at stage 0 too
            expected = cut / tensor_ranks * _formula(of, data_ranks, 4) + (NUMEL - cut) * _formula(of, world, 4)
            assert abs(counted - expected) <= 0.005 * expected + padding, stage
            assert abs(reported - counted) <= 0.005 * expected + padding, stage


def _transient(rank: int, world: int, prefetch: int) -> tuple[int, int]:
    """Return the highest bytes above rest during a step, counted at every collective and module call, and reported."""
    engine, module, optimizer = _engine(3, prefetch=prefetch)
    for _ in range(2):
        _forward_backward(engine, module)
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    gc.disable()
    rest, peak = _live_bytes(), 0

    def sample(*_: Any) -> None:
        nonlocal peak
        peak = max(peak, _live_bytes() - rest)

    for layer in module:
        layer.register_forward_hook(sample)
        layer.weight.register_post_accumulate_grad_hook(sample)
    with worlds.count_collectives(sample):
        _forward_backward(engine, module)
    gc.enable()
    gradients = NUMEL * 4 // world  # kept by design until the step
    reported = engine.stats().peak_gathered
    engine.close()
    return peak - gradients, reported


@pytest.mark.parametrize("prefetch", sample([0, 1], 1))
def test_stage_3_gathers_at_most_two_units_or_three_with_prefetch(prefetch: int) -> None:
    units = 2 + prefetch
    unit = WIDTH * WIDTH * (2 + 4)  # parameters and gradients
    for counted, reported in worlds.run(_transient, 2, prefetch):
        assert 0 < counted <= 1.01 * units * unit
        assert 0 < reported <= 1.01 * units * unit


def _at_rest(rank: int, world: int) -> list[int]:
    """Return the bytes between steps after each of five steps."""
    engine, module, optimizer = _engine(3)
    found = []
    for _ in range(5):
        _forward_backward(engine, module)
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        found.append(_live_bytes())
    engine.close()
    return found


def test_nothing_piles_up_over_steps() -> None:
    for found in worlds.run(_at_rest, 2):
        assert found[1:] == [found[1]] * 4


def _after_close(rank: int, world: int, stage: int) -> int:
    gc.collect()
    before = _live_bytes()
    engine, module, optimizer = _engine(stage)
    _forward_backward(engine, module)
    optimizer.step()
    engine.close()
    if stage < 3:
        assert all(bool(parameter.isfinite().all()) for parameter in module.parameters())
    holders = types.SimpleNamespace(engine=engine, module=module, optimizer=optimizer)
    del engine, module, optimizer, holders
    gc.collect()
    return _live_bytes() - before


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_closed_engine_leaves_nothing_behind(stage: int) -> None:
    assert max(worlds.run(_after_close, 2, stage)) <= 4096
