"""A flat buffer by itself: storage, writes, gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.comm.communicator import Communicator
from lightning_zero.config import Communication, Sharding
from lightning_zero.engine.buffer import BufferKind, FlatBuffer
from lightning_zero.engine.parameter import ReducedParameter, ReleasedParameter, raw_grad
from lightning_zero.errors import ShardedGradientError
from lightning_zero.storage.store import DeviceStore
from tests import worlds

CPU = torch.device("cpu")
SHAPES = [(11, 6), (6,), (), (0, 3), (5, 7)]
STAGES = (0, 1, 2, 3)

stages = pytest.mark.parametrize("stage", STAGES)


def _buffer(stage: int, compute: torch.dtype = torch.float32, reduce: torch.dtype = torch.float32) -> FlatBuffer:
    """Return a buffer whose parameters are numbered element by element. Collective."""
    kind = BufferKind(original=torch.float32, compute=compute, master=torch.float32, reduce=reduce, trained=True)
    with torch.inference_mode(False):
        params = [nn.Parameter(_values(index, 0.25)) for index in range(len(SHAPES))]
    names = [f"p{index}" for index in range(len(SHAPES))]
    return FlatBuffer(
        "block", params, names, kind, Sharding.from_stage(stage), Communicator(Communication(), CPU), DeviceStore(CPU)
    )


def _values(index: int, factor: float = 1.0) -> Tensor:
    shape = SHAPES[index]
    count = torch.Size(shape).numel()
    return (torch.arange(count) + 100 * index + 1).mul(factor).view(shape)


def _whole(buffer: FlatBuffer) -> None:
    if not buffer.is_whole:
        buffer.gather().wait()
        buffer.bind()


# -- Storage -----------------------------------------------------------------------------------------------------------


def _release(rank: int, world: int) -> None:
    buffer = _buffer(3)
    store = buffer.store
    assert store.live("gathered") == buffer.full.nbytes
    buffer.release()
    assert buffer.full.untyped_storage().nbytes() == 0
    assert store.live("gathered") == 0
    assert store.live("parameters") == buffer.shard.nbytes == buffer.full.nbytes // world
    with torch._C.DisableTorchFunctionSubclass():
        assert all(param.untyped_storage().nbytes() == 4 for param in buffer.params)
    assert [type(param) for param in buffer.params] == [ReleasedParameter] * len(SHAPES)
    _whole(buffer)
    for index, param in enumerate(buffer.params):
        assert type(param) is nn.Parameter
        assert param.untyped_storage()._cdata == buffer.full.untyped_storage()._cdata
        assert torch.equal(param, _values(index, 0.25))
    assert torch.equal(torch.cat([buffer.full[lo:hi] for lo, hi in buffer.layout.gaps()]).unique(), torch.zeros(1))


def test_release_frees_storage_and_a_gather_brings_the_values_back() -> None:
    worlds.run(_release, 2)
    worlds.run(_release, 3)


def _versions(rank: int, world: int) -> None:
    """Autograd's check of saved tensors must not see the buffer refilled."""
    buffer = _buffer(3)
    param = buffer.params[0]
    loss = (param * param).sum()
    buffer.release()
    _whole(buffer)
    loss.backward()
    assert torch.equal(param.grad, 2 * _values(0, 0.25))


def test_a_buffer_that_was_refilled_does_not_trip_autograd() -> None:
    worlds.run(_versions, 2)


def _inference(rank: int, world: int) -> None:
    with torch.inference_mode():
        buffer = _buffer(3)
        buffer.release()
        _whole(buffer)
        buffer.release()
    _whole(buffer)
    assert not any(tensor.is_inference() for tensor in [buffer.full, buffer.shard, *buffer.views, *buffer.params])
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
    buffer = FlatBuffer("x", [param], ["p"], kind, Sharding.from_stage(stage), communicator, DeviceStore(CPU))
    assert buffer.params[0] is param
    assert param.tolist() == [0.0] * 7
    assert buffer.master is None
    assert buffer.stepped.untyped_storage().nbytes() == (buffer.full if stage < 3 else buffer.shard).nbytes


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
    buffer = _buffer(stage, compute)
    if stage == 3:
        buffer.release()
        _whole(buffer)
    if buffer.master is not None:  # what the rounded value does not show
        buffer.master.add_(2.0**-20)
    WRITES[name](buffer.params[0])
    if stage == 3:
        buffer.release()
        _whole(buffer)
    buffer.refresh_master()
    expected = (2 * _values(0, 0.25)).reshape(-1)
    start, stop = buffer.own_range.elements(0)
    assert torch.equal(buffer.segment(0).reshape(-1), expected[start:stop])
    assert torch.equal(buffer.params[0].float(), expected.view(11, 6))
    assert buffer.params[0].data_ptr() == buffer.views[0].data_ptr()
    if buffer.master is not None:  # parameters that were not written keep their exact master
        start, stop = buffer.own_range.elements(1)
        assert torch.equal(buffer.segment(1).reshape(-1), _values(1, 0.25)[start:stop] + 2.0**-20)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("name", "stage"), [(name, stage) for name in WRITES for stage in STAGES if (name, stage) != ("through-data", 3)]
)
def test_what_is_written_into_a_parameter_reaches_the_master(name: str, stage: int, compute: torch.dtype) -> None:
    worlds.run(_write, 2, name, stage, compute)


def _unwritten(rank: int, world: int) -> None:
    buffer = _buffer(3)
    assert not buffer.is_written()
    buffer.params[0] * 2
    assert not buffer.is_written()
    _double(buffer.params[0])
    assert buffer.is_written()


def test_a_read_is_no_write() -> None:
    worlds.run(_unwritten, 2)


def _publish(rank: int, world: int, stage: int, compute: torch.dtype) -> None:
    buffer = _buffer(stage, compute)
    if stage == 3:
        buffer.release()
    buffer.stepped.mul_(2)
    pending = buffer.publish()
    assert (pending is not None) == (stage in (1, 2))
    if pending is not None:
        pending.wait()
    buffer.published()
    _whole(buffer)
    for index, param in enumerate(buffer.params):
        assert torch.equal(param, _values(index, 0.5).to(compute))
    buffer.refresh_master()
    assert torch.equal(buffer.segment(0).reshape(-1), _values(0, 0.5).reshape(-1)[slice(*buffer.own_range.elements(0))])


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@stages
def test_stepped_values_are_published_to_every_rank(stage: int, compute: torch.dtype) -> None:
    worlds.run(_publish, 2, stage, compute)


# -- Gradients ---------------------------------------------------------------------------------------------------------


def _reduce(buffer: FlatBuffer) -> None:
    """Average what the ranks have, as the reducer does. Collective."""
    buffer.reduce().wait()
    buffer.finish_reduce()
    pending = buffer.gather_reduced()
    if pending is not None:
        pending.wait()
    buffer.has_grad |= {0, 1}


def _found(buffer: FlatBuffer, index: int) -> list[float]:
    assert buffer.reduced is not None
    found: list[float] = buffer.own_range.segment(index, buffer.reduced).reshape(-1).tolist()
    return found


def _expected(buffer: FlatBuffer, index: int, value: float) -> list[float]:
    start, stop = buffer.own_range.elements(index)
    return [value] * (stop - start)


def _retain(rank: int, world: int, stage: int) -> None:
    buffer = _buffer(stage)
    mean = (world - 1) / 2
    for step in range(1, 4):
        buffer.accumulate(0, torch.full((11, 6), float(rank)))
        buffer.accumulate(0, torch.full((11, 6), 1.0))
        if rank == 0:
            buffer.accumulate(1, torch.full((6,), float(world)))
        _reduce(buffer)
        assert _found(buffer, 0) == _expected(buffer, 0, step * (mean + 1))
        assert _found(buffer, 1) == _expected(buffer, 1, step * 1.0)
        assert _found(buffer, 4) == _expected(buffer, 4, 0.0)
    buffer.forget([0])
    assert _found(buffer, 0) == _expected(buffer, 0, 0.0)
    assert _found(buffer, 1) == _expected(buffer, 1, 3.0)
    buffer.forget([1])
    assert buffer.reduced is None
    buffer.accumulate(0, torch.full((11, 6), 1.0))
    _reduce(buffer)
    assert _found(buffer, 0) == _expected(buffer, 0, 1.0)


@pytest.mark.parametrize("world", [1, 2, 3])
@stages
def test_gradients_are_kept_over_steps_until_they_are_forgotten(stage: int, world: int) -> None:
    worlds.run(_retain, world, stage if world > 1 else 0)


def _gradient_bytes(rank: int, world: int) -> list[list[float]]:
    """The bytes of gradients while they are summed, when they are reduced and when they are forgotten, in buffers."""
    found = []
    for stage in STAGES:
        buffer = _buffer(stage)
        live = []
        buffer.accumulate(0, torch.ones(11, 6))
        live.append(buffer.store.live("gradients") / buffer.full.nbytes)
        _reduce(buffer)
        live.append(buffer.store.live("gradients") / buffer.full.nbytes)
        buffer.forget(range(len(SHAPES)))
        live.append(buffer.store.live("gradients") / buffer.full.nbytes)
        found.append(live)
    return found


def test_whole_gradients_go_when_they_are_reduced_at_stages_2_and_3() -> None:
    for found in worlds.run(_gradient_bytes, 2):
        assert found == [[1, 1, 1], [1, 1, 1], [1, 0.5, 0], [1, 0.5, 0]]


def _padding(rank: int, world: int, stage: int) -> None:
    buffer = _buffer(stage, reduce=torch.bfloat16)
    for index, shape in enumerate(SHAPES):
        buffer.accumulate(index, torch.full(shape, 3.0))
    _reduce(buffer)
    assert buffer.reduced is not None
    assert buffer.reduced.dtype == torch.bfloat16
    total = buffer.reduced.float().square().sum()
    if stage:
        buffer.communicator.all_reduce(total, "x")
    assert total.item() == 9 * buffer.layout.numel


@stages
def test_padding_of_gradients_is_zero(stage: int) -> None:
    worlds.run(_padding, 2, stage)


def _sparse(rank: int, world: int) -> None:
    buffer = _buffer(1)
    indices = torch.tensor([[0, 0, 3]])
    buffer.accumulate(0, torch.sparse_coo_tensor(indices, torch.ones(3, 6), (11, 6)))
    assert buffer.local is not None
    assert buffer.local[: 11 * 6].view(11, 6).sum(1).tolist() == [12, 0, 0, 6, 0, 0, 0, 0, 0, 0, 0]


def test_sparse_gradients_become_dense() -> None:
    worlds.run(_sparse, 2)


# -- The step window ---------------------------------------------------------------------------------------------------


def _window(rank: int, world: int, stage: int) -> None:
    buffer = _buffer(stage, torch.bfloat16, torch.bfloat16)
    if stage == 3:
        buffer.release()
    for index in (0, 1):
        buffer.accumulate(index, torch.full(SHAPES[index], float(rank)))
    _reduce(buffer)
    for index, param in enumerate(buffer.params):
        buffer.enter(index)
        buffer.show(index)
        start, stop = buffer.own_range.elements(index)
        assert (type(param), param.dtype) == (nn.Parameter, torch.float32)
        assert param.shape == ((stop - start,) if stage else SHAPES[index])
        assert torch.equal(param.reshape(-1), _values(index, 0.25).reshape(-1)[start:stop])
        grad = param.grad
        assert (grad is not None) == (index in (0, 1))
        if grad is not None:
            assert (grad.shape, grad.dtype) == (param.shape, torch.float32)
            grad.mul_(3)
            buffer.strip(index)
            assert type(grad) is Tensor
            with torch.no_grad():
                param.sub_(grad)
    for index, param in enumerate(buffer.params):
        buffer.leave(index)
        assert param.shape == SHAPES[index]
        assert raw_grad(param) is None
        assert type(param) is (ReleasedParameter if stage == 3 else ReducedParameter if index < 2 else nn.Parameter)
    buffer.close_window()
    assert _found(buffer, 0) == _expected(buffer, 0, 3 * (world - 1) / 2)
    start, stop = buffer.own_range.elements(0)
    expected = (_values(0, 0.25) - 3 * (world - 1) / 2).reshape(-1)[start:stop]
    assert torch.equal(buffer.segment(0).reshape(-1), expected)


@stages
def test_the_window_shows_segments_and_keeps_what_was_done_to_gradients(stage: int) -> None:
    worlds.run(_window, 2, stage)


def _replaced(rank: int, world: int, stage: int) -> None:
    buffer = _buffer(stage)
    for index in (0, 1):
        buffer.accumulate(index, torch.ones(SHAPES[index]))
    _reduce(buffer)

    def through_window(index: int, change: Callable[[nn.Parameter], Any]) -> None:
        buffer.enter(index)
        buffer.show(index)
        change(buffer.params[index])
        buffer.leave(index)

    through_window(0, lambda param: setattr(param, "grad", torch.full_like(param, 5.0)))
    assert _found(buffer, 0) == _expected(buffer, 0, 5.0)
    through_window(1, lambda param: setattr(param, "grad", None))
    assert buffer.has_grad == {0}
    assert _found(buffer, 1) == _expected(buffer, 1, 0.0)
    if stage:
        buffer.enter(0)
        buffer.show(0)
        with pytest.raises(ShardedGradientError):
            buffer.params[0].grad.mean()
        buffer.leave(0)


@stages
def test_a_gradient_that_is_assigned_or_dropped_in_the_window_counts(stage: int) -> None:
    worlds.run(_replaced, 2, stage)
