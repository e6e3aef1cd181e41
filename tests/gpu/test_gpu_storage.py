"""Host memory and disks beside a GPU: offloaded tensors are where the device, the host and NCCL can use them.

Two ranks share one device and talk over gloo; one rank has NCCL.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.config import MixedPrecision, Offload
from lightning_zero.engine.engine import ZeroEngine
from tests import worlds
from tests.engine.optimizers import Momentum

TIMEOUT_S = 120.0  # the first use of a device by a process takes seconds

pytestmark = pytest.mark.gpu


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)).to("cuda")


# -- Random numbers ----------------------------------------------------------------------------------------------------


def _attach(rank: int, world: int, offloads: bool) -> tuple[bool, int]:
    """Attach an optimizer that is tried; return whether the device's generator is as before, and its seed."""
    module = _net()
    engine = ZeroEngine(2, offload=Offload(step_device="cpu") if offloads else None)
    module = engine.shard(module)
    torch.cuda.manual_seed(100 + rank)
    torch.rand(3, device="cuda")
    before = torch.cuda.get_rng_state()
    engine.attach(Momentum(module.parameters()))
    is_as_before = torch.equal(torch.cuda.get_rng_state(), before)
    seed = torch.cuda.initial_seed()
    engine.close()
    return is_as_before, seed


@pytest.mark.parametrize("offloads", [True, False], ids=["offloaded", "on-device"])
def test_the_trial_of_an_optimizer_leaves_the_generator_of_the_device_alone(offloads: bool) -> None:
    assert worlds.run(_attach, 2, offloads, timeout_s=TIMEOUT_S) == [(True, 100), (True, 101)]


# -- Steps -------------------------------------------------------------------------------------------------------------


def _train(engine: ZeroEngine, module: nn.Module, optimizer: Any, steps: int = 3) -> None:
    for step in range(steps):
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to("cuda")
        with engine.scope("training_step"), torch.autocast("cuda", torch.bfloat16):
            loss = module(batch).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.flush()


def _weights(rank: int, world: int, offload: Offload | None) -> list[Tensor]:
    module = _net()
    engine = ZeroEngine(3, units=[nn.Linear], precision=MixedPrecision(compute_dtype=torch.bfloat16), offload=offload)
    module = engine.shard(module)
    _train(engine, module, engine.attach(torch.optim.AdamW(module.parameters(), lr=0.01)))
    found = [engine.full_param(param) for param in module.parameters()]
    assert {one.device.type for one in found} == {"cuda"}
    engine.close()
    return [one.cpu() for one in found]


@pytest.mark.parametrize("pin_memory", [True, False], ids=["locked", "pageable"])
def test_steps_on_the_device_round_for_parameters_that_are_offloaded(pin_memory: bool) -> None:
    offload = Offload(optimizer="cpu", params="cpu", step_device="cuda", pin_memory=pin_memory)
    expected = worlds.run(_weights, 2, None, timeout_s=TIMEOUT_S)[0]
    for found in worlds.run(_weights, 2, offload, timeout_s=TIMEOUT_S):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)  # another kernel may round the last bit


# -- Reads -------------------------------------------------------------------------------------------------------------


def _read(rank: int, world: int, stage: int, options: dict[str, Any]) -> set[str]:
    module = _net()
    engine = ZeroEngine(stage, offload=Offload(step_device="cpu", **options))
    module = engine.shard(module)
    engine.attach(torch.optim.AdamW(module.parameters()))
    with engine.scope("training_step"):
        loss = module(torch.ones(4, 8, device="cuda")).square().mean()
    loss.backward()
    params = list(module.parameters())
    found = [*map(engine.full_param, params), *map(engine.full_grad, params)]
    engine.close()
    return {one.device.type for one in found if one is not None}


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_offloaded_values_are_read_on_the_device(stage: int, place: str, tmp_path: Path) -> None:
    options = {"optimizer": place, **({"path": str(tmp_path), "direct": False} if place == "nvme" else {})}
    assert worlds.run(_read, 2, stage, options, timeout_s=TIMEOUT_S) == [{"cuda"}] * 2


# -- Locked memory -----------------------------------------------------------------------------------------------------


class _Rebinds(torch.optim.Optimizer):
    """SGD that gives parameters new tensors."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data = param.data - group["lr"] * param.grad


def _num_locked(rank: int, world: int) -> list[int]:
    """Return how many pieces are locked behind steps that rebind parameters, and behind several optimizers."""
    module = _net()
    engine = ZeroEngine(2, offload=Offload(step_device="cpu"))
    module = engine.shard(module)
    locked: set[int] = engine._state.sharded.placement.host._locked
    sizes = []
    optimizer = engine.attach(_Rebinds(module.parameters()))
    for _ in range(3):
        _train(engine, module, optimizer, steps=1)
        sizes.append(len(locked))
    assert sizes[0] > 0
    assert sizes == sizes[:1] * 3
    sizes.clear()
    for _ in range(3):
        optimizer = engine.attach(torch.optim.AdamW(module.parameters()))
        gc.collect()  # the engine had the one before
        _train(engine, module, optimizer, steps=2)
        sizes.append(len(locked))
    kept = next(iter(optimizer.state.values()))["exp_avg"]
    engine.close()
    assert not locked
    assert bool(kept.as_subclass(torch.Tensor).isfinite().all())  # memory outlives its store
    return sizes


def test_locked_memory_does_not_grow() -> None:
    for sizes in worlds.run(_num_locked, 2, timeout_s=TIMEOUT_S):
        assert sizes == sizes[:1] * 3
