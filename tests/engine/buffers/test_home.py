"""The homes of a flat buffer: what is kept there comes back, in every kind of store."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from lightning_zero.comm.communicator import Communicator
from lightning_zero.config import Communication, Offload
from lightning_zero.engine.buffers.disk_home import DiskHome
from lightning_zero.engine.buffers.group import BufferGroup
from lightning_zero.engine.buffers.home import DeviceHome, Home, HostHome
from lightning_zero.engine.buffers.spec import BufferKind, BufferSpec
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.sharding import ShardedOver
from lightning_zero.storage.disk import DiskStore
from lightning_zero.storage.host import HostStore
from lightning_zero.storage.nvme import NvmeStore
from lightning_zero.storage.store import DeviceStore
from tests import worlds
from tests.engine.flat_buffers import CPU
from tests.references import TinyGPT
from tests.sampling import sample
from tests.simulated_device import SimulatedDevice
from tests.simulated_transport import BACKEND

PLACES = ("device", "host", "disk")


def _check(rank: int, world: int, place: str, folder: str, check: Callable[[Home, BufferSpec], None]) -> None:
    kind = BufferKind(torch.float32, torch.float32, torch.float32, torch.float32, trained=True)
    spec = BufferSpec.of(
        "block",
        [torch.nn.Parameter(torch.zeros(40))],
        ["p"],
        kind=kind,
        sharding=ShardedOver.from_stage(2),
        group=BufferGroup.of_all(Communicator(Communication(), CPU)),
        store=DeviceStore(CPU),
    )
    disk = DiskStore(NvmeStore([Path(folder)], block_bytes=4096, threads=1, direct=False))
    makers = {
        "device": partial(DeviceHome, spec.store),
        "host": partial(HostHome, HostStore(pinned=False)),
        "disk": partial(DiskHome, disk),
    }
    home = makers[place](spec, lambda: False)
    assert home.where == place
    check(home, spec)
    disk.close()


def _run(check: Callable[[Home, BufferSpec], None], place: str, folder: Path) -> None:
    worlds.run(_check, 1, place, str(folder), check)


def _average(spec: BufferSpec, value: float) -> torch.Tensor:
    return spec.store.create("gradients", spec.own_range.numel, torch.float32).fill_(value)


def _adds(home: Home, spec: BufferSpec) -> None:
    gradient = home.keep_gradient(_average(spec, 1.0))
    home.await_gradient()
    assert torch.equal(gradient.clone(), torch.ones(spec.own_range.numel))
    home.fetch_gradient(gradient)
    home.end_fetch(gradient)
    if home.adds_in_place:
        total = home.add_gradient(_average(spec, 2.0), gradient)
    else:
        total = home.keep_gradient(_average(spec, 2.0).add_(gradient))
    home.await_gradient()
    assert torch.equal(total.clone(), torch.full((spec.own_range.numel,), 3.0))
    home.lend_gradient(total)
    home.give_back_lent()
    assert spec.store.live("gradients") == 0


def _writes(home: Home, spec: BufferSpec) -> None:
    master = home.keep_master(torch.ones(spec.own_range.numel))
    written = torch.ones(spec.own_range.numel)
    written[3] = 2.0
    home.take_writes(master, lambda: written, frozenset())
    assert torch.equal(master.clone(), written)


def _keeps_a_changed_gradient(home: Home, spec: BufferSpec) -> None:
    gradient = home.keep_gradient(_average(spec, 1.0))
    home.await_gradient()
    home.fetch_gradient(gradient)
    gradient.mul_(5.0)
    home.end_fetch(gradient)
    assert torch.equal(home.add_gradient(_average(spec, 2.0), gradient), torch.full((spec.own_range.numel,), 7.0))


def _zeros(home: Home, spec: BufferSpec) -> None:
    for values in (home.zeros(torch.float32), home.zero_gradient(torch.float32)):
        assert values.shape == (spec.own_range.numel,)
        assert not values.clone().any()


@pytest.mark.parametrize("place", PLACES)
def test_averages_are_added_and_given_back(place: str, tmp_path: Path) -> None:
    _run(_adds, place, tmp_path)


@pytest.mark.parametrize("place", PLACES)
def test_a_write_into_the_compute_shard_reaches_the_master(place: str, tmp_path: Path) -> None:
    _run(_writes, place, tmp_path)


@pytest.mark.parametrize("place", PLACES)
def test_states_and_gradients_begin_with_zeros(place: str, tmp_path: Path) -> None:
    _run(_zeros, place, tmp_path)


def test_a_gradient_that_was_written_while_it_was_fetched_counts_as_written(tmp_path: Path) -> None:
    _run(_keeps_a_changed_gradient, "host", tmp_path)


def _lent_by_steps(rank: int, world: int, stage: int, case: str) -> list[tuple[int, int]]:
    """Return after each step the bytes of gradients in host memory, and the most averages that one buffer copies."""
    step = "now" if case == "now" else "auto"
    engine = ZeroEngine(stage, units=["Block"], offload=Offload(step_device="cpu"), step=step)
    module = engine.shard(TinyGPT())
    params = list(module.parameters())
    optimizer = engine.attach(torch.optim.AdamW([{"params": params[::2]}, {"params": params[1::2], "lr": 0.1}]))
    if case == "hook":
        optimizer.register_step_post_hook(lambda *_: None)
    found, bring = [], HostHome.bring_gradient
    for _ in range(3):
        brought: list[int] = []

        def count(home: HostHome, average: torch.Tensor, brought: list[int] = brought) -> torch.Tensor:
            brought.append(id(home))
            return bring(home, average)

        module(torch.ones(2, 5, dtype=torch.int64)).square().mean().backward()
        with patch.object(HostHome, "bring_gradient", count):
            optimizer.step()
        engine.flush()
        optimizer.zero_grad()
        found.append((engine.stats().host["gradients"], max(map(brought.count, brought))))
    engine.close()
    return found


@pytest.mark.parametrize("case", ["deferred", "now", "hook"])
@pytest.mark.parametrize("stage", [0, 1])
def test_copies_of_averages_end_with_their_step(stage: int, case: str) -> None:
    """Steps that were not deferred kept theirs; one of two groups made two copies."""
    for found in worlds.run(_lent_by_steps, 2, stage, case):
        assert found == [(0, 1 if case == "deferred" else 2)] * 3


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


def _offloaded(stage: int, **options: Any) -> tuple[ZeroEngine, torch.nn.Module]:
    engine = ZeroEngine(
        stage,
        units=["Block"],
        device=torch.device("cuda"),
        communication=Communication(backend=BACKEND),
        offload=Offload(step_device="cpu", **options),
    )
    return engine, engine.shard(TinyGPT().to("cuda"))


def _step(engine: ZeroEngine, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with engine.scope("training_step"):
        loss = module(torch.ones(2, 5, dtype=torch.int64).to("cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _locked_by_steps(rank: int, world: int, stage: int) -> list[int]:
    with SimulatedDevice() as device:
        engine, module = _offloaded(stage)
        optimizer = engine.attach(_Rebinds(module.parameters()))
        sizes = []
        for _ in range(4):
            _step(engine, module, optimizer)
            sizes.append(sum(device.driver.locked.values()))
        engine.close()
        return sizes


@pytest.mark.parametrize("stage", sample([2, 3], 3))
def test_steps_that_give_parameters_new_tensors_lock_no_more_memory(stage: int) -> None:
    (sizes,) = worlds.run(_locked_by_steps, 1, stage)
    assert sizes[0] > 0
    assert sizes == sizes[:1] * 4


def _locked_by_attaches(rank: int, world: int) -> list[int]:
    with SimulatedDevice() as device:
        engine, module = _offloaded(2)
        sizes = []
        for _ in range(4):
            optimizer = engine.attach(torch.optim.AdamW(module.parameters()))
            gc.collect()  # the engine had the one before
            _step(engine, module, optimizer)
            engine.flush()
            sizes.append(sum(device.driver.locked.values()))
        engine.close()
        assert not device.driver.locked
        return sizes


def test_moments_of_optimizers_that_are_gone_are_not_locked() -> None:
    (sizes,) = worlds.run(_locked_by_attaches, 1)
    assert sizes == sizes[:1] * 4


# -- Masters that ranks have loaded ------------------------------------------------------------------------------------


def _gathered(rank: int, world: int, options: dict[str, Any]) -> tuple[set[str], bool]:
    """Let each rank write its part of the masters; return where they were gathered, and whether all are there."""
    with SimulatedDevice(), patch.object(Communicator, "all_gather", autospec=True, side_effect=_all_gather) as called:
        engine, module = _offloaded(0, **options)
        engine.attach(torch.optim.AdamW(module.parameters()))
        checkpoints = engine.internals.checkpoints
        checkpoints.prepare_load()
        called.reset_mock()
        records = checkpoints.records()
        for record in records:
            start, stop = record.save_range
            record.master()[start:stop] = rank + 1.0
        checkpoints.complete_masters()
        devices = {tensor.device.type for call in called.call_args_list for tensor in call.args[1:3]}
        found = {float(value) for record in records for value in record.master().clone()}
        engine.close()
        return devices, found == {1.0, 2.0}


_all_gather = Communicator.all_gather


@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_masters_that_are_offloaded_are_gathered_on_the_device(place: str, tmp_path: Path) -> None:
    options = {"optimizer": place, **({"path": str(tmp_path), "direct": False} if place == "nvme" else {})}
    assert worlds.run(_gathered, 2, options) == [({"cuda"}, True)] * 2
