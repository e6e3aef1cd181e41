"""A small flat buffer, for tests of its parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.comm.communicator import Communicator
from lightning_zero.config import Communication
from lightning_zero.engine.buffers.buffer import FlatBuffer
from lightning_zero.engine.buffers.group import BufferGroup
from lightning_zero.engine.buffers.home import HomeMaker
from lightning_zero.engine.buffers.spec import BufferKind
from lightning_zero.sharding import ShardedOver
from lightning_zero.storage.store import DeviceStore

CPU = torch.device("cpu")
SHAPES = [(11, 6), (6,), (), (0, 3), (5, 7)]
STAGES = (0, 1, 2, 3)

stages = pytest.mark.parametrize("stage", STAGES)


def numbered_buffer(
    stage: int,
    compute: torch.dtype = torch.float32,
    reduce: torch.dtype = torch.float32,
    home: HomeMaker | None = None,
) -> FlatBuffer:
    """Return a buffer as in a step, whose parameters are numbered element by element. Collective."""
    kind = BufferKind(original=torch.float32, compute=compute, master=torch.float32, reduce=reduce, trained=True)
    with torch.inference_mode(False):
        params = [nn.Parameter(values_of(index, 0.25)) for index in range(len(SHAPES))]
    names = [f"p{index}" for index in range(len(SHAPES))]
    sharding, communicator = ShardedOver.from_stage(stage), Communicator(Communication(), CPU)
    buffer = FlatBuffer(
        "block",
        params,
        names,
        kind=kind,
        sharding=sharding,
        group=BufferGroup.of_all(communicator),
        store=DeviceStore(CPU),
        home=home,
    )
    buffer.begin_computing()
    return buffer


def values_of(index: int, factor: float = 1.0) -> Tensor:
    shape = SHAPES[index]
    count = torch.Size(shape).numel()
    return (torch.arange(count) + 100 * index + 1).mul(factor).view(shape)


def make_whole(buffer: FlatBuffer) -> None:
    if not buffer.is_whole:
        buffer.gather().wait()
        buffer.bind()


def reduce_fully(buffer: FlatBuffer) -> None:
    """Average what the ranks have, as the reducer does. Collective."""
    buffer.gradients.reduce().wait()
    buffer.gradients.finish_reduce()
    pending = buffer.gradients.gather_reduced()
    if pending is not None:
        pending.wait()
    buffer.gradients.has_grad |= {0, 1}


def found_gradient(buffer: FlatBuffer, index: int) -> list[float]:
    assert buffer.gradients.reduced is not None
    found: list[float] = buffer.own_range.segment(index, buffer.gradients.reduced).reshape(-1).tolist()
    return found


def expected_gradient(buffer: FlatBuffer, index: int, value: float) -> list[float]:
    start, stop = buffer.own_range.elements(index)
    return [value] * (stop - start)
