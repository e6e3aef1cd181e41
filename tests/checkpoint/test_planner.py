from __future__ import annotations

import itertools
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import Shard, init_device_mesh, zeros

from lightning_zero.boxes import Box, Part
from lightning_zero.checkpoint.planner import Segment, SegmentSavePlanner, SegmentWriter
from lightning_zero.checkpoint.stored import StoredTensors
from tests import worlds
from tests.checkpoint.segments import SHAPES, expected, save, segments


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


PACKED = [
    Part.along((12, 5), 0, (2, 2), (6, 2), (10, 2)),
    Part.along((5, 12), 1, (2, 2), (6, 2), (10, 2)),
    Part.along((3, 12, 2), 1, (10, 2), (0, 3)),
    Part((4, 6, 2), (Box((2, 0, 0), (2, 1, 2)), Box((2, 3, 0), (2, 2, 2))), 1),
]


@pytest.mark.parametrize("part", PACKED, ids=str)
def test_a_segment_of_a_part_is_read_and_written_in_boxes_and_in_runs(part: Part) -> None:
    whole = torch.arange(float(prod(part.whole))).view(part.whole)
    flat = part.read(whole).reshape(-1)
    for start, stop in itertools.combinations(range(flat.numel() + 1), 2):
        segment = Segment(flat[start:stop].clone(), start, whole.shape, part=part)
        for box, view in segment.views():
            assert torch.equal(view, whole[box.slices])
        assert sum(run.local.numel() for run in segment.runs()) == stop - start
        for run in segment.runs():
            assert torch.equal(run.local, whole.view(-1)[run.start : run.stop])
            run.local.neg_()
        assert torch.equal(segment.local, -flat[start:stop])
