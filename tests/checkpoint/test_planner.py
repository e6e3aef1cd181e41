from __future__ import annotations

import itertools
import random
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import Shard, init_device_mesh, zeros

from lightning_zero.checkpoint.planner import Segment, SegmentSavePlanner, SegmentWriter, boxes, covers
from lightning_zero.checkpoint.stored import StoredTensors
from tests import worlds
from tests.checkpoint.segments import SHAPES, expected, save, segments


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (1, 1, 5), (3, 1, 2), (4, 1, 2, 3), (0, 3)], ids=str)
def test_boxes_tile_every_range_in_flat_order(shape: tuple[int, ...]) -> None:
    whole = torch.arange(prod(shape)).view(shape)
    for start in range(whole.numel() + 1):
        for stop in range(start, whole.numel() + 1):
            cut = list(boxes(shape, start, stop))
            assert len(cut) <= max(1, 2 * len(shape) - 1)
            parts = [whole[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))].reshape(-1) for box in cut]
            assert torch.equal(torch.cat(parts) if parts else whole.view(-1)[:0], whole.view(-1)[start:stop])


@pytest.mark.parametrize("seed", range(20))
def test_boxes_cover_a_shape_if_every_element_is_in_one(seed: int) -> None:
    generator = random.Random(seed)
    shape = tuple(generator.randint(1, 4) for _ in range(generator.randint(0, 3)))
    cut = sorted({0, prod(shape), *(generator.randint(0, prod(shape)) for _ in range(3))})
    parts = [box for start, stop in itertools.pairwise(cut) for box in boxes(shape, start, stop)]
    assert covers(parts, shape)
    if parts:
        lost = parts.pop(generator.randrange(len(parts)))
        assert not covers([*parts, *parts], shape)
        assert covers([*parts, lost, lost], shape)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    worlds.run(save, 2, str(tmp_path / "saved"))
    return tmp_path / "saved"


def test_stock_tools_read_all_names_in_their_own_shape(saved: Path, tmp_path: Path) -> None:
    dcp_to_torch_save(saved, tmp_path / "whole.pt")
    model = torch.load(tmp_path / "whole.pt", weights_only=True)["model"]
    assert list(model) == [*SHAPES, "tied", "extra"]
    assert all(torch.equal(model[name], expected(name)) for name in SHAPES)
    assert torch.equal(model["tied"], model["w"])
    assert model["extra"] == {"of": "the last rank"}


def test_a_tied_tensor_is_written_once(saved: Path) -> None:
    places = StoredTensors(saved).metadata.storage_data
    ranges = {
        key: [(p.relative_path, p.offset) for i, p in places.items() if i.fqn == key]
        for key in ("model.w", "model.tied")
    }
    assert ranges["model.w"] == ranges["model.tied"] != []


def test_a_save_without_the_part_of_a_rank_is_refused(tmp_path: Path) -> None:
    first = {"w": segments(0, 2, filled=True)["model.w"]}
    writer = SegmentWriter(tmp_path / "saved", aliases={}, order=["w"], world_size=1)
    with pytest.raises(CheckpointException, match=r"No rank has all of `w`, which has the shape \(32, 64\)"):
        dcp.save(first, storage_writer=writer, planner=SegmentSavePlanner({"w": ("w",)}), no_dist=True)
    assert not (tmp_path / "saved" / ".metadata").exists()


def _read_dtensor(rank: int, world: int, path: str) -> None:
    tensor = zeros(32, 64, device_mesh=init_device_mesh("cpu", (world,)), placements=[Shard(0)])
    dcp.load({"model.w": tensor}, checkpoint_id=path)
    assert torch.equal(tensor.full_tensor(), expected("w"))


def test_a_dtensor_reader_reads_it(saved: Path) -> None:
    worlds.run(_read_dtensor, 2, str(saved))


def test_a_segment_refuses_to_be_taken_for_a_tensor() -> None:
    segment = Segment(torch.zeros(3), 2, torch.Size((4, 2)))
    assert segment.shape == (4, 2)
    assert segment.numel() == 8
    with pytest.raises(AttributeError, match="`half` needs the values of a tensor that is sharded"):
        segment.half()
    with pytest.raises(TypeError, match="`copy_` needs the values"):
        torch.zeros(4, 2).copy_(segment)  # type: ignore[arg-type]
