"""Over a transport whose waits do not block the host, as NCCL's: seconds are the device's, errors name their call."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from lightning_zero.comm import peers as peers_module
from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.mesh import Mesh
from lightning_zero.comm.p2p import P2P
from lightning_zero.comm.peers import Peers
from lightning_zero.comm.traffic import Traffic
from lightning_zero.comm.waits import Waits
from lightning_zero.config import Communication
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.errors import CollectiveError
from tests import worlds
from tests.references import TinyGPT
from tests.simulated_device import SimulatedDevice
from tests.simulated_transport import BACKEND, Stuck

CUDA = torch.device("cuda")
LATE_S = 0.4


def _communicator(timeout_s: float = 60.0) -> Communicator:
    return Communicator(Communication(backend=BACKEND, timeout_s=timeout_s), CUDA)


def _gather(communicator: Communicator, unit: str) -> torch.Tensor:
    full = torch.empty(4 * communicator.world_size, device="cuda")
    communicator.all_gather(full, torch.ones(4, device="cuda"), f"unit `{unit}`").wait()
    return full


# -- Seconds -----------------------------------------------------------------------------------------------------------


def _wait_for_rank_1(rank: int, world: int) -> list[float]:
    """Return the seconds of waits: when the host has asked for one, when the device has passed it, after a reset."""
    with SimulatedDevice() as device:
        communicator = _communicator()
        _gather(communicator, "blocks.0").sum().item()
        communicator.reset_stats()
        device.waits.clear()
        if rank == 1:
            time.sleep(LATE_S)
        full = _gather(communicator, "blocks.1")
        seen = [communicator.wait_s]
        assert not device.waits
        full.sum().item()
        seen.append(communicator.wait_s)
        full = _gather(communicator, "blocks.2")
        communicator.reset_stats()
        full.sum().item()
        seen.append(communicator.wait_s)
        communicator.close()
    return seen


def test_a_wait_of_the_device_is_measured_without_one_of_the_host() -> None:
    waited, came = worlds.run(_wait_for_rank_1, 2)
    assert waited[0] == 0.0
    assert waited[1] > LATE_S / 2
    assert came[1] < LATE_S / 2
    assert waited[2] == came[2] == 0.0


def _blocking_calls(rank: int, world: int, device: str) -> float:
    with SimulatedDevice():
        communicator = Communicator(Communication(backend=BACKEND if device == "cuda" else None), torch.device(device))
        value = torch.ones(3, device=device)
        communicator.all_reduce(value, "norm")
        if rank == 1:
            time.sleep(LATE_S)
        communicator.all_reduce(value, "norm")
        communicator.any_is(bool(value.sum().item() == 0.0), "agreement on overflow")
        seconds = communicator.wait_s
        communicator.close()
    return seconds


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_waits_for_norms_and_agreements_are_measured(device: str) -> None:
    waited, _ = worlds.run(_blocking_calls, 2, device)
    assert waited > LATE_S / 2


# -- Errors ------------------------------------------------------------------------------------------------------------


def _come_alone(rank: int, world: int) -> list[str]:
    """Gather what the other rank does not, and go on; return the errors of what was asked for next."""
    with SimulatedDevice():
        communicator = _communicator(timeout_s=1.0)
        _gather(communicator, "blocks.0").sum().item()
        dist.barrier()
        if rank == 1:
            time.sleep(2.0)
        full = _gather(communicator, "blocks.1")
        with contextlib.suppress(CollectiveError):  # rank 1 may have heard by now
            _gather(communicator, "blocks.2")
        with pytest.raises(Stuck):
            full.sum().item()
        calls: list[Any] = [
            lambda: _gather(communicator, "blocks.3"),
            lambda: communicator.all_reduce(torch.ones(1, device="cuda"), "norm"),
            lambda: communicator.any_is(True, "agreement on overflow"),
        ]
        said = []
        for call in calls:
            with pytest.raises(CollectiveError) as raised:
                call()
            said.append(str(raised.value))
        communicator.close()
    return said


def test_a_call_that_a_peer_does_not_join_is_named_on_every_rank() -> None:
    for rank, said in enumerate(worlds.run(_come_alone, 2, timeout_s=30)):
        for text in said:
            assert f"rank {rank} of 2: the all-gather of unit `blocks.1` failed: " in text
            assert ("it did not end within `timeout` on the device", "the connection to a peer")[rank] in text


def _wait_for_the_second(rank: int, world: int) -> str:
    """Let the first of two gathers fail, and wait for the second one only, which stands behind it."""
    with SimulatedDevice():
        communicator = _communicator(timeout_s=1.0)
        _gather(communicator, "blocks.0").sum().item()
        dist.barrier()
        if rank == 1:
            time.sleep(2.0)
        ahead = torch.empty(8, device="cuda")
        first = communicator.all_gather(ahead, torch.ones(4, device="cuda"), "unit `blocks.1`")
        with pytest.raises((Stuck, CollectiveError)):  # rank 1 may have heard by now
            _gather(communicator, "blocks.2").sum().item()
        with pytest.raises(CollectiveError) as raised:
            _gather(communicator, "blocks.3")
        first.wait()
        communicator.close()
    return str(raised.value)


def test_the_call_that_was_started_first_is_named() -> None:
    for text in worlds.run(_wait_for_the_second, 2, timeout_s=30):
        assert "the all-gather of unit `blocks.1` failed" in text


def _receive_what_nobody_sends(rank: int, world: int) -> str:
    with SimulatedDevice():
        group = dist.new_group(backend=BACKEND, timeout=timedelta(seconds=1.0))
        mesh = SimpleNamespace(message_group=group, loan=1, stage=rank, stages=world, distrust=lambda: None)
        mesh.traffic, mesh.copies, mesh.copy = Traffic(), 1, 0
        mesh.ranks_of = partial(Mesh.ranks_of, cast(Mesh, mesh))
        mesh.failure = partial(Mesh.failure, cast(Mesh, mesh))
        p2p = P2P(cast(Mesh, mesh), CUDA)
        if rank == 0:
            p2p.send(1, torch.ones(4, device="cuda"), "output 0")
            p2p.flush()
            dist.barrier()
            return ""
        assert p2p.receive(0, (4,), torch.float32, "output 0").wait().sum().item() == 4.0
        with pytest.raises(Stuck):
            p2p.receive(0, (4,), torch.float32, "output 1").wait().sum().item()
        with pytest.raises(CollectiveError) as raised:
            p2p.receive(0, (4,), torch.float32, "output 2")
        dist.barrier()
    return str(raised.value)


def test_a_message_that_does_not_come_is_named() -> None:
    said = worlds.run(_receive_what_nobody_sends, 2, timeout_s=30)
    assert "pipeline stage 1 of 2: output 1 failed: it did not end within `timeout` on the device" in said[1]


def _train_until_a_failure(rank: int, world: int) -> tuple[float, str]:
    """Return the seconds that an engine has waited, and its error when the state of a group is one."""
    with SimulatedDevice() as device:
        communication = Communication(backend=BACKEND)
        engine = ZeroEngine(3, units=["Block"], device=CUDA, communication=communication)
        module = engine.shard(TinyGPT(depth=2).to("cuda"))
        optimizer = engine.attach(torch.optim.AdamW(module.parameters()))
        for step in range(3):
            if step == 2:
                device.synchronize()
                engine.internals.communicator._gather_group.error = (
                    ErrorType.TIMEOUT if rank else ErrorType.REMOTE_ERROR
                )
                seconds = engine.stats().wait_s
                with pytest.raises(CollectiveError) as raised:
                    module(torch.ones(1, 3, dtype=torch.int64).to("cuda"))
                continue
            device.waits.clear()
            module(torch.ones(1, 3, dtype=torch.int64).to("cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert step == 0 or all(place.endswith("program") for place in device.waits)
        dist.barrier()
    return seconds, str(raised.value)


def test_an_engine_raises_the_error_of_a_group_on_every_rank() -> None:
    reasons = ("another rank reports that it has failed there", "it did not end within `timeout`")
    for rank, (seconds, said) in enumerate(worlds.run(_train_until_a_failure, 2, timeout_s=30)):
        assert seconds > 0.0
        assert f"rank {rank} of 2: the " in said
        assert reasons[rank] in said


class _WithoutStates:
    """A group of a transport that keeps no error state."""

    def __init__(self, *, has_backend: bool) -> None:
        self._has_backend = has_backend

    def _get_backend(self, device: torch.device) -> object:
        if self._has_backend:
            return object()
        raise RuntimeError("No backend type associated with device type cuda")


@pytest.mark.parametrize("has_backend", [True, False])
def test_a_transport_without_error_states_has_none(has_backend: bool) -> None:
    assert Waits(CUDA, [_WithoutStates(has_backend=has_backend)]).failure() is None


class _Failing:
    """Has failed since it was made; nobody raises that."""

    def failure(self) -> str:
        return "the all-gather of unit `blocks.1` failed: it did not end."


def _stay_in_a_call(rank: int, world: int) -> tuple[str, str]:
    """Return what is known of the first error, and what a rank says that ends because it stays in a call."""
    peers, said, failing = Peers.of_world(), io.StringIO(), _Failing()
    if rank == 0:
        peers.watch(failing)
    with (
        mock.patch.object(peers_module, "_STUCK_S", 0.5),
        mock.patch.object(os, "_exit", lambda code: sys.exit(code)),  # ends the thread alone
        contextlib.redirect_stderr(said),
    ):
        peers.begin_run()
        assert peers._watcher is not None
        peers._watcher.join(10.0)
        first = str(peers.first)
        peers._watcher = None
    dist.barrier()
    return first, said.getvalue()


def test_a_failure_is_told_while_the_main_thread_is_in_a_call_that_does_not_return() -> None:
    for rank, (first, said) in enumerate(worlds.run(_stay_in_a_call, 2, timeout_s=30)):
        assert first == "the first error was on rank 0: the all-gather of unit `blocks.1` failed: it did not end."
        assert f"rank {rank} of 2 ends, because it still waits 0.5 s after an error: {first}" in said
