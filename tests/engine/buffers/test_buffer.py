"""A flat buffer by itself: storage, writes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_zero.comm.communicator import Communicator
from lightning_zero.config import Communication
from lightning_zero.engine.buffers.buffer import FlatBuffer
from lightning_zero.engine.buffers.group import BufferGroup
from lightning_zero.engine.buffers.parameter import ReducedParameter, ReleasedParameter
from lightning_zero.engine.buffers.spec import BufferKind
from lightning_zero.sharding import ShardedOver
from lightning_zero.storage.store import DeviceStore
from tests import worlds
from tests.engine.flat_buffers import (
    CPU,
    SHAPES,
    make_whole,
    numbered_buffer,
    stages,
    values_of,
)

# -- Storage -----------------------------------------------------------------------------------------------------------


def _release(rank: int, world: int) -> None:
    buffer = numbered_buffer(3)
    store = buffer.store
    assert store.live("gathered") == buffer.whole.flat.nbytes
    buffer.release()
    assert buffer.whole.flat.untyped_storage().nbytes() == 0
    assert store.live("gathered") == 0
    assert store.live("parameters") == buffer.values.shard.values.nbytes == buffer.whole.flat.nbytes // world
    with torch._C.DisableTorchFunctionSubclass():
        assert all(param.untyped_storage().nbytes() == 4 for param in buffer.params)
    assert [type(param) for param in buffer.params] == [ReleasedParameter] * len(SHAPES)
    make_whole(buffer)
    for index, param in enumerate(buffer.params):
        assert type(param) is ReducedParameter
        assert param.untyped_storage()._cdata == buffer.whole.flat.untyped_storage()._cdata
        assert torch.equal(param, values_of(index, 0.25))
    assert torch.equal(
        torch.cat([buffer.whole.flat[lo:hi] for lo, hi in buffer.layout.gaps()]).unique(), torch.zeros(1)
    )


def test_release_frees_storage_and_a_gather_brings_the_values_back() -> None:
    worlds.run(_release, 2)
    worlds.run(_release, 3)


def _versions(rank: int, world: int) -> None:
    """Autograd's check of saved tensors must not see the buffer refilled."""
    buffer = numbered_buffer(3)
    param = buffer.params[0]
    loss = (param * param).sum()
    buffer.release()
    make_whole(buffer)
    loss.backward()
    assert torch.equal(param.grad, 2 * values_of(0, 0.25))


def test_a_buffer_that_was_refilled_does_not_trip_autograd() -> None:
    worlds.run(_versions, 2)


def _inference(rank: int, world: int) -> None:
    with torch.inference_mode():
        buffer = numbered_buffer(3)
        buffer.release()
        make_whole(buffer)
        buffer.release()
    make_whole(buffer)
    assert not any(
        tensor.is_inference()
        for tensor in [buffer.whole.flat, buffer.values.shard.values, *buffer.whole.views, *buffer.params]
    )
    (buffer.params[0] * 2).sum().backward()
    assert torch.equal(buffer.params[0].grad, torch.full((11, 6), 2.0))


def test_nothing_becomes_an_inference_tensor() -> None:
    worlds.run(_inference, 2)


def _fill(rank: int, world: int, stage: int) -> None:
    kind = BufferKind(
        original=torch.float32, compute=torch.float32, master=torch.float32, reduce=torch.float32, trained=True
    )
    param = nn.Parameter(torch.full((7,), float(rank)))
    communicator = Communicator(Communication(), CPU)
    buffer = FlatBuffer(
        "x",
        [param],
        ["p"],
        kind=kind,
        sharding=ShardedOver.from_stage(stage),
        group=BufferGroup.of_all(communicator),
        store=DeviceStore(CPU),
    )
    assert buffer.params[0] is param
    assert param.tolist() == [0.0] * 7
    assert buffer.values.master is None
    assert (
        buffer.values.stepped.untyped_storage().nbytes()
        == (buffer.whole.flat if stage < 3 else buffer.values.shard.values).nbytes
    )


@stages
def test_all_ranks_start_from_the_values_of_rank_zero_and_keep_no_second_copy(stage: int) -> None:
    worlds.run(_fill, 2, stage)


# -- Writes ------------------------------------------------------------------------------------------------------------


def _double(param: nn.Parameter) -> None:
    with torch.no_grad():
        param.mul_(2)


def _through_data(param: nn.Parameter) -> None:
    param.data.mul_(2)


def _new_data(param: nn.Parameter) -> None:
    param.data = param.detach() * 2


def _swap(param: nn.Parameter) -> None:
    with torch.no_grad():
        param.copy_(param.detach().clone() * 2)


WRITES: dict[str, Callable[[nn.Parameter], None]] = {
    "in-place": _double,
    "new-data": _new_data,
    "copy": _swap,
    "through-data": _through_data,
}


def _write(rank: int, world: int, name: str, stage: int, compute: torch.dtype) -> None:
    buffer = numbered_buffer(stage, compute)
    if stage == 3:
        buffer.release()
        make_whole(buffer)
    if buffer.values.master is not None:  # what the rounded value does not show
        buffer.values.master.add_(2.0**-20)
    address = buffer.whole.flat.data_ptr()
    WRITES[name](buffer.params[0])
    if stage == 3:
        buffer.release()
        make_whole(buffer)
    buffer.refresh_master()
    assert buffer.whole.flat.data_ptr() == address or stage == 3  # nobody keeps what was there
    expected = (2 * values_of(0, 0.25)).reshape(-1)
    start, stop = buffer.own_range.elements(0)
    assert torch.equal(buffer.values.segment(0).reshape(-1), expected[start:stop])
    assert torch.equal(buffer.params[0].float(), expected.view(11, 6))
    assert buffer.params[0].data_ptr() == buffer.whole.views[0].data_ptr()
    if buffer.values.master is not None:  # parameters that were not written keep their exact master
        start, stop = buffer.own_range.elements(1)
        assert torch.equal(buffer.values.segment(1).reshape(-1), values_of(1, 0.25)[start:stop] + 2.0**-20)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", WRITES)
@stages
def test_what_is_written_into_a_parameter_reaches_the_master(name: str, stage: int, compute: torch.dtype) -> None:
    worlds.run(_write, 2, name, stage, compute)


def _unwritten(rank: int, world: int) -> None:
    buffer = numbered_buffer(3)
    assert not buffer.is_written()
    buffer.params[0] * 2
    assert not buffer.is_written()
    _double(buffer.params[0])
    assert buffer.is_written()


def test_a_read_is_no_write() -> None:
    worlds.run(_unwritten, 2)


def _publish(rank: int, world: int, stage: int, compute: torch.dtype) -> None:
    buffer = numbered_buffer(stage, compute)
    if stage == 3:
        buffer.release()
    buffer.values.stepped.mul_(2)
    pending = buffer.publish()
    assert (pending is not None) == (stage in (1, 2))
    if pending is not None:
        pending.wait()
    buffer.published()
    make_whole(buffer)
    for index, param in enumerate(buffer.params):
        assert torch.equal(param, values_of(index, 0.5).to(compute))
    buffer.refresh_master()
    start, stop = buffer.own_range.elements(0)
    assert torch.equal(buffer.values.segment(0).reshape(-1), values_of(0, 0.5).reshape(-1)[start:stop])


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@stages
def test_stepped_values_are_published_to_every_rank(stage: int, compute: torch.dtype) -> None:
    worlds.run(_publish, 2, stage, compute)
