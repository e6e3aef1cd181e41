"""Tensors between stages: in order per pair of ranks, and an error that names the stage."""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

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


DTYPES = (torch.int16, torch.uint16, torch.bool, torch.int8, torch.complex64, torch.float8_e4m3fn, torch.float32)


def _of_every_dtype(rank: int, world: int) -> None:
    p2p = P2P(Mesh(2, 30.0), CPU)
    for dtype in DTYPES:
        value = torch.tensor([[0, 1], [3, 1]]).to(dtype)
        if rank == 0:
            p2p.send(1, value, "a tensor")
            p2p.send(1, value[0, 1], "a number")
            continue
        received = p2p.receive(0, (2, 2), dtype, "a tensor").wait()
        assert received.dtype is dtype
        assert torch.equal(received.to(torch.complex64), value.to(torch.complex64))
        assert p2p.receive(0, (), dtype, "a number").wait().to(torch.float32) == 1
    p2p.flush()


def _dtypes_of_messages(rank: int, world: int) -> list[Any]:
    """Return the dtypes that the transport is given; NCCL knows few."""
    with (
        patch.object(dist, "isend", wraps=dist.isend) as isend,
        patch.object(dist, "irecv", wraps=dist.irecv) as irecv,
    ):
        _of_every_dtype(rank, world)
    return [call.args[0].dtype for call in [*isend.mock_calls, *irecv.mock_calls]]


def test_tensors_of_dtypes_that_nccl_does_not_know_are_sent_as_bytes() -> None:
    for seen in run(_dtypes_of_messages, 2):
        assert set(seen) == {torch.uint8, torch.float32}


def _conjugated(rank: int, world: int) -> None:
    p2p = P2P(Mesh(2, 30.0), CPU)
    value = torch.tensor([1 + 2j, 3 - 4j])
    if rank == 0:
        p2p.send(1, value.conj(), "a view")
        p2p.send(1, value.conj().imag, "a negated view")
        p2p.flush()
        return
    assert torch.equal(p2p.receive(0, (2,), torch.complex64, "a view").wait(), value.conj().resolve_conj())
    assert p2p.receive(0, (2,), torch.float32, "a negated view").wait().tolist() == [-2.0, 4.0]


def test_conjugated_views_are_sent_by_their_values() -> None:
    run(_conjugated, 2)


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
