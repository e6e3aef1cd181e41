"""Tensors between stages: in order per pair of ranks, and an error that names the stage."""

from __future__ import annotations

import time

import pytest
import torch

from lightning_zero.comm.mesh import Mesh
from lightning_zero.comm.p2p import P2P
from lightning_zero.errors import CollectiveError
from tests.worlds import run

CPU = torch.device("cpu")


def _in_order(rank: int, world: int) -> list[float]:
    p2p = P2P(Mesh(2, 30.0), CPU)
    if rank == 0:
        for number in range(3):
            p2p.send(1, torch.full((2, 2), float(number)), f"tensor {number}")
        p2p.flush()
        return [p2p.sent_bytes]
    coming = [p2p.receive(0, (2, 2), torch.float32, f"tensor {number}") for number in range(3)]
    return [float(one.wait().sum()) for one in reversed(coming)][::-1]


def test_tensors_arrive_as_they_were_sent_whichever_is_waited_for_first() -> None:
    assert run(_in_order, 2) == [[48.0], [0.0, 4.0, 8.0]]


def _copied(rank: int, world: int) -> float:
    p2p = P2P(Mesh(2, 30.0), CPU)
    if rank == 0:
        strided = torch.arange(6.0).view(2, 3).t().requires_grad_()
        p2p.send(1, strided, "a view")
        p2p.flush()
        return 0.0
    received = p2p.receive(0, (3, 2), torch.float32, "a view").wait()
    assert not received.requires_grad
    return float(received[2, 1])


def test_views_are_sent_by_their_values() -> None:
    assert run(_copied, 2) == [0.0, 5.0]


def _late(rank: int, world: int) -> float:
    p2p = P2P(Mesh(2, 30.0), CPU)
    if rank == 0:
        time.sleep(0.3)
        p2p.send(1, torch.ones(1), "a late one")
        p2p.flush()
        return 0.0
    p2p.receive(0, (1,), torch.float32, "a late one").wait()
    return p2p.wait_s


def test_waiting_is_measured() -> None:
    assert run(_late, 2)[1] > 0.2


def _absent(rank: int, world: int) -> str:
    p2p = P2P(Mesh(2, 1.0), CPU)
    if rank == 0:
        time.sleep(2.0)
        return ""
    with pytest.raises(CollectiveError) as raised:
        p2p.receive(0, (1,), torch.float32, "the input of micro-batch 3").wait()
    return str(raised.value)


def test_a_tensor_that_does_not_come_is_named_with_its_stage_and_rank() -> None:
    text = run(_absent, 2)[1]
    assert text.startswith("pipeline stage 1 of 2: the input of micro-batch 3 failed: stage 0 (rank 0) has stopped")
