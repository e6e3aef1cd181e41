from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import Shard, init_device_mesh, zeros

from lightning_zero.checkpoint.planner import (
    Segment,
    SegmentSavePlanner,
    SegmentWriter,
    StoredTensor,
    StoredTensors,
    boxes,
    fill,
)
from lightning_zero.layout import FlatLayout
from tests import worlds

SHAPES = {"embedding": (17, 59), "conv": (5, 3, 3, 7), "bias": (3,), "w": (32, 64), "scale": (), "nothing": (0, 4)}


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (1, 1, 5), (3, 1, 2), (4, 1, 2, 3), (0, 3)], ids=str)
def test_boxes_tile_every_range_in_flat_order(shape: tuple[int, ...]) -> None:
    whole = torch.arange(prod(shape)).view(shape)
    for start in range(whole.numel() + 1):
        for stop in range(start, whole.numel() + 1):
            cut = list(boxes(shape, start, stop))
            assert len(cut) <= max(1, 2 * len(shape) - 1)
            parts = [whole[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))].reshape(-1) for box in cut]
            assert torch.equal(torch.cat(parts) if parts else whole.view(-1)[:0], whole.view(-1)[start:stop])


def _segments(rank: int, world: int, *, filled: bool) -> dict[str, Segment]:
    layout = FlatLayout.build(list(SHAPES.items()), world)
    segments = {}
    for slot, segment in zip(layout.slots, layout.segments(rank), strict=True):
        values = torch.arange(segment.start, segment.stop, dtype=torch.float32)
        local = values if filled else torch.full_like(values, -1.0)
        segments[f"model.{slot.name}"] = Segment(local, segment.start, torch.Size(slot.shape))
    return segments


def _save(rank: int, world: int, path: str) -> None:
    paths: Any = {f"model.{name}": ("model", name) for name in [*SHAPES, "tied"]} | {"model.extra": ("model", "extra")}
    values: dict[str, Any] = dict(_segments(rank, world, filled=True))
    if rank == world - 1:
        values["model.extra"] = {"of": "the last rank"}
    dcp.save(
        values,
        storage_writer=SegmentWriter(Path(path), aliases={"model.tied": "model.w"}, order=list(paths)),
        planner=SegmentSavePlanner(paths),
        no_dist=world == 1,
    )


def _expected(name: str) -> torch.Tensor:
    return torch.arange(prod(SHAPES[name]), dtype=torch.float32).view(SHAPES[name])


def _read(rank: int, world: int, path: str) -> None:
    stored = StoredTensors(Path(path))
    targets = _segments(rank, world, filled=False)
    stored.read(list(targets.items()))
    for key, expected in _segments(rank, world, filled=True).items():
        assert torch.equal(targets[key].local, expected.local), key


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    worlds.run(_save, 2, str(tmp_path / "saved"))
    return tmp_path / "saved"


@pytest.mark.world(3)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_segments_of_two_ranks_are_read_by(world: int, saved: Path) -> None:
    worlds.run(_read, world, str(saved))


def test_stock_tools_read_all_names_in_their_own_shape(saved: Path, tmp_path: Path) -> None:
    dcp_to_torch_save(saved, tmp_path / "whole.pt")
    model = torch.load(tmp_path / "whole.pt", weights_only=True)["model"]
    assert list(model) == [*SHAPES, "tied", "extra"]
    assert all(torch.equal(model[name], _expected(name)) for name in SHAPES)
    assert torch.equal(model["tied"], model["w"])
    assert model["extra"] == {"of": "the last rank"}


def test_a_tied_tensor_is_written_once(saved: Path) -> None:
    places = StoredTensors(saved).metadata.storage_data
    ranges = {
        key: [(p.relative_path, p.offset) for i, p in places.items() if i.fqn == key]
        for key in ("model.w", "model.tied")
    }
    assert ranges["model.w"] == ranges["model.tied"] != []


def _read_dtensor(rank: int, world: int, path: str) -> None:
    tensor = zeros(32, 64, device_mesh=init_device_mesh("cpu", (world,)), placements=[Shard(0)])
    dcp.load({"model.w": tensor}, checkpoint_id=path)
    assert torch.equal(tensor.full_tensor(), _expected("w"))


def test_a_dtensor_reader_reads_it(saved: Path) -> None:
    worlds.run(_read_dtensor, 2, str(saved))


def _save_dtensor(rank: int, world: int, path: str) -> None:
    tensor = zeros(32, 64, device_mesh=init_device_mesh("cpu", (world,)), placements=[Shard(0)])
    tensor.to_local().copy_(_expected("w").chunk(world)[rank])
    dcp.save({"model": {"w": tensor}}, checkpoint_id=path)
    dist.barrier()


@pytest.mark.world(3)
def test_what_a_dtensor_program_wrote_is_read(tmp_path: Path) -> None:
    worlds.run(_save_dtensor, 3, str(tmp_path / "saved"))
    stored = StoredTensors(tmp_path / "saved")
    assert torch.equal(stored.open("model.w", weights_only=True).read(), _expected("w"))


def test_a_stored_tensor_tells_its_shape_without_reading(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = StoredTensors(saved).open("model.w", weights_only=True)
    monkeypatch.setattr(StoredTensors, "read", lambda *args: pytest.fail("read"))
    assert tensor.shape == (32, 64)
    assert tensor.dtype == torch.float32
    assert (tensor.ndim, tensor.numel(), len(tensor), tensor.device.type) == (2, 2048, 32, "cpu")


def test_a_stored_tensor_works_in_any_operation(saved: Path) -> None:
    tensor = StoredTensors(saved).open("model.w", weights_only=True)
    assert torch.equal(tensor + 1, _expected("w") + 1)
    assert torch.equal(tensor[3:5].t(), _expected("w")[3:5].t())
    assert type(torch.cat([tensor, tensor])) is torch.Tensor
    target = torch.zeros(32, 64, dtype=torch.float64)
    target.copy_(tensor)
    assert torch.equal(target, _expected("w").double())
    assert "2.0470e+03" in repr(tensor)


def test_a_stored_tensor_refuses_to_be_written_into(saved: Path) -> None:
    tensor = StoredTensors(saved).open("model.w", weights_only=True)
    with pytest.raises(RuntimeError, match="`add_` would write into a tensor of a checkpoint"):
        tensor += 1
    with pytest.raises(RuntimeError, match="`__setitem__` would write"):
        tensor[0] = 1.0
    with pytest.raises(RuntimeError, match="`_foreach_mul_` would write"):
        torch._foreach_mul_([tensor], 2.0)


def test_a_0_dim_tensor_is_read_at_once(saved: Path) -> None:
    assert type(StoredTensors(saved).open("model.scale", weights_only=True)) is torch.Tensor


def test_fill_reads_each_chunk_once_for_all_targets(saved: Path) -> None:
    stored = StoredTensors(saved)
    tensor = stored.open("model.w", weights_only=True)
    assert isinstance(tensor, StoredTensor)
    targets = [Segment(torch.zeros(100, dtype=torch.bfloat16), start, tensor.shape) for start in (0, 40, 1000)]
    reads = []
    read = stored.reader.read
    stored.reader.read = lambda *args: (reads.append(args), read(*args))[1]  # type: ignore[method-assign]
    fill([(tensor, target) for target in targets])
    assert len(reads) == len(set(reads))
    for target in targets:
        assert torch.equal(target.local, _expected("w").view(-1)[target.start : target.stop].bfloat16())


def test_a_segment_refuses_to_be_taken_for_a_tensor() -> None:
    segment = Segment(torch.zeros(3), 2, torch.Size((4, 2)))
    assert segment.shape == (4, 2)
    assert segment.numel() == 8
    with pytest.raises(AttributeError, match="`half` needs the values of a tensor that is sharded"):
        segment.half()
    with pytest.raises(TypeError, match="`copy_` needs the values"):
        torch.zeros(4, 2).copy_(segment)  # type: ignore[arg-type]
