from __future__ import annotations

import copy
import operator
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.tensor import Shard, init_device_mesh, zeros
from torch.testing._internal.two_tensor import TwoTensor

from lightning_zero.checkpoint import stored as stored_module
from lightning_zero.checkpoint.planner import Segment
from lightning_zero.checkpoint.stored import StoredTensor, StoredTensors, fill
from tests import worlds
from tests.checkpoint.segments import expected, save, segments


def _read(rank: int, world: int, path: str) -> None:
    stored = StoredTensors(Path(path))
    targets = segments(rank, world, filled=False)
    stored.read(list(targets.items()))
    for key, filled in segments(rank, world, filled=True).items():
        assert torch.equal(targets[key].local, filled.local), key


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    worlds.run(save, 2, str(tmp_path / "saved"))
    return tmp_path / "saved"


@pytest.mark.world(3)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_segments_of_two_ranks_are_read_by(world: int, saved: Path) -> None:
    worlds.run(_read, world, str(saved))


def _without_a_chunk(directory: Path, *, twice: bool) -> str:
    """Take a chunk of the second rank out of an index; say another one twice."""
    path = directory / ".metadata"
    index = pickle.loads(path.read_bytes())
    chunks = index.state_dict_metadata["model.w"].chunks
    chunks[-1:] = chunks[:1] if twice else []
    path.write_bytes(pickle.dumps(index))
    return rf"`{directory}` is not whole: its chunks do not cover `model.w`, which has the shape \(32, 64\)"


@pytest.mark.parametrize("twice", [False, True], ids=["missing", "another twice"])
def test_a_tensor_that_the_chunks_do_not_cover_is_refused(twice: bool, saved: Path) -> None:
    said = _without_a_chunk(saved, twice=twice)
    stored = StoredTensors(saved)
    with pytest.raises(ValueError, match=said):
        stored.open("model.w", weights_only=True).read()
    held = segments(1, 2, filled=False)["model.w"]
    with pytest.raises(ValueError, match=said):
        stored.read([("model.w", held)])
    first = segments(0, 2, filled=False)["model.w"]
    stored.read([("model.w", first)])  # what is there can be read
    assert torch.equal(first.local, segments(0, 2, filled=True)["model.w"].local)


def _save_dtensor(rank: int, world: int, path: str) -> None:
    tensor = zeros(32, 64, device_mesh=init_device_mesh("cpu", (world,)), placements=[Shard(0)])
    tensor.to_local().copy_(expected("w").chunk(world)[rank])
    dcp.save({"model": {"w": tensor}}, checkpoint_id=path)
    dist.barrier()


@pytest.mark.world(3)
def test_what_a_dtensor_program_wrote_is_read(tmp_path: Path) -> None:
    worlds.run(_save_dtensor, 3, str(tmp_path / "saved"))
    stored = StoredTensors(tmp_path / "saved")
    assert torch.equal(stored.open("model.w", weights_only=True).read(), expected("w"))


def test_a_stored_tensor_tells_its_shape_without_reading(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = StoredTensors(saved).open("model.w", weights_only=True)
    monkeypatch.setattr(StoredTensors, "read", lambda *args: pytest.fail("read"))
    assert tensor.shape == (32, 64)
    assert tensor.dtype == torch.float32
    assert (tensor.ndim, tensor.numel(), len(tensor), tensor.device.type) == (2, 2048, 32, "cpu")


def test_a_stored_tensor_works_in_any_operation(saved: Path) -> None:
    tensor = StoredTensors(saved).open("model.w", weights_only=True)
    assert torch.equal(tensor + 1, expected("w") + 1)
    assert torch.equal(tensor[3:5].t(), expected("w")[3:5].t())
    assert type(torch.cat([tensor, tensor])) is torch.Tensor
    target = torch.zeros(32, 64, dtype=torch.float64)
    target.copy_(tensor)
    assert torch.equal(target, expected("w").double())
    assert "2.0470e+03" in repr(tensor)


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "add_": lambda tensor: operator.iadd(tensor, 1),
    "item": lambda tensor: operator.setitem(tensor, 0, 1.0),
    "row": lambda tensor: tensor[0].zero_(),
    "rows": lambda tensor: [row.mul_(2) for row in tensor],
    "data": lambda tensor: tensor.data.mul_(2),
    "assigned data": lambda tensor: setattr(tensor, "data", torch.ones(3)),
    "detached": lambda tensor: tensor.detach().float().cpu().mul_(2),
    "numpy": lambda tensor: operator.setitem(tensor.numpy(), 0, 7),
    "out": lambda tensor: torch.add(tensor, 1, out=tensor),
    "inplace": lambda tensor: nn.functional.threshold(tensor, 5.0, 1.0, True),
    "init": nn.init.zeros_,
    "foreach": lambda tensor: torch._foreach_mul_([tensor], 2.0),
    "parameter": lambda tensor: nn.Parameter(tensor).data.mul_(2),
}


def test_what_is_written_into_a_stored_tensor_or_a_view_of_it_is_kept(saved: Path) -> None:
    stored = StoredTensors(saved)
    for name, write in WRITES.items():
        tensor, written = stored.open("model.w", weights_only=True), expected("w")
        write(tensor)
        write(written)
        assert torch.equal(tensor, written), name
        assert type(tensor) is torch.Tensor, name
    assert torch.equal(stored.open("model.w", weights_only=True), expected("w"))


def test_reading_leaves_a_stored_tensor_in_its_file(saved: Path) -> None:
    tensor = StoredTensors(saved).open("model.w", weights_only=True)
    for values in (tensor.clone(), tensor * 2, tensor.sum(), torch.cat([tensor, tensor]), tensor.tolist(), str(tensor)):
        assert values is not None
    assert isinstance(tensor, StoredTensor)


def test_stored_tensors_load_into_subclasses_and_make_sparse_tensors(saved: Path) -> None:
    tensor = StoredTensors(saved).open("model.w", weights_only=True)
    pair = TwoTensor(torch.zeros(32, 64), torch.ones(32, 64))
    pair.add_(tensor)
    assert torch.equal(pair.a, expected("w"))
    assert torch.equal(pair.b, expected("w") + 1)
    linear = nn.Linear(64, 32, bias=False)
    linear.weight = nn.Parameter(TwoTensor(torch.zeros(32, 64), torch.zeros(32, 64)))
    linear.load_state_dict({"weight": tensor})
    assert torch.equal(linear.weight.a, expected("w"))
    assert torch.equal(tensor.to_sparse().to_dense(), expected("w"))
    assert isinstance(tensor, StoredTensor)
    assert torch.equal((pair.detach() * 0 + tensor).b, expected("w"))


def test_running_out_of_memory_is_not_taken_for_damage(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = StoredTensors(saved).open("model.w", weights_only=True)

    def refuse(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "copy_", refuse)
        with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory\.$"):
            tensor.read()
    assert torch.equal(tensor, expected("w"))


def test_a_deep_copy_reads_every_stored_tensor_once(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, reads = StoredTensors(saved), []
    tensors = {name: stored.open("model.w", weights_only=True) for name in "abcd"}
    read = StoredTensor.read
    monkeypatch.setattr(StoredTensor, "read", lambda self: (reads.append(self), read(self))[1])
    copies = copy.deepcopy({**tensors, "again": tensors["a"]})
    assert len(reads) == 4
    assert copies["again"] is copies["a"]
    assert all(type(one) is torch.Tensor and torch.equal(one, expected("w")) for one in copies.values())
    assert len({one.data_ptr() for one in copies.values()}) == 4


def test_what_kernels_would_write_into_a_stored_tensor_is_refused(saved: Path) -> None:
    tensor = StoredTensors(saved).open("model.w", weights_only=True)
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(RuntimeError, match="would write into a tensor of"):
        tensor.add_(1)


def test_a_0_dim_tensor_is_read_at_once(saved: Path) -> None:
    assert type(StoredTensors(saved).open("model.scale", weights_only=True)) is torch.Tensor


@pytest.mark.parametrize("piece", [64, 8 << 20])
def test_fill_reads_the_ranges_of_the_targets_only(piece: int, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_module, "PIECE_BYTES", piece)
    stored = StoredTensors(saved)
    tensor = stored.open("model.w", weights_only=True)
    assert isinstance(tensor, StoredTensor)
    fill([(tensor, Segment(torch.zeros(1), 0, tensor.shape)), (tensor, Segment(torch.zeros(1), 2047, tensor.shape))])
    targets = [Segment(torch.zeros(100, dtype=torch.bfloat16), start, tensor.shape) for start in (0, 40, 1000)]
    reads = []
    read = stored.reader.read
    stored.reader.read = lambda *args: (reads.append(args[2]), read(*args))[1]  # type: ignore[method-assign]
    fill([(tensor, target) for target in targets])
    assert sum(reads) == 300 * 4
    assert max(reads) <= max(piece, 4)
    for target in targets:
        assert torch.equal(target.local, expected("w").view(-1)[target.start : target.stop].bfloat16())


def _save_views(path: Path) -> None:
    whole = torch.arange(24.0).view(4, 6)
    values = {"transposed": whole.t(), "part": whole[1:3, 2:5], "bool": whole > 3, "fp8": whole.to(torch.float8_e5m2)}
    with warnings.catch_warnings(action="ignore"):
        dcp.save(values, checkpoint_id=path, no_dist=True)


@pytest.mark.parametrize("piece", [8, 8 << 20])
def test_tensors_with_any_strides_and_dtypes_are_read(
    piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_module, "PIECE_BYTES", piece)
    _save_views(tmp_path / "saved")
    whole = torch.arange(24.0).view(4, 6)
    stored = StoredTensors(tmp_path / "saved")
    assert torch.equal(stored.open("transposed", weights_only=True).read(), whole.t())
    assert torch.equal(stored.open("part", weights_only=True).read(), whole[1:3, 2:5])
    assert torch.equal(stored.open("bool", weights_only=True).read(), whole > 3)
    fp8 = stored.open("fp8", weights_only=True).read()
    assert torch.equal(fp8.float(), whole.to(torch.float8_e5m2).float())


def test_a_chunk_that_is_shorter_than_its_shape_is_refused(saved: Path) -> None:
    stored = StoredTensors(saved)
    entry: Any = stored.metadata.state_dict_metadata["model.bias"]
    entry.size = entry.chunks[0].sizes = torch.Size((300_000,))
    with pytest.raises(ValueError, match=r"a tensor of shape \(300000,\) .* and there is one of shape \(3,\)"):
        stored.read([("model.bias", Segment(torch.zeros(300_000), 0, entry.size))])


# -- An index that does not fit to the files ---------------------------------------------------------------------------


def _other_shape(index: Metadata) -> None:
    entry: Any = index.state_dict_metadata["w"]
    entry.size = torch.Size((4, 3))
    entry.chunks = [ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((4, 3)))]


def _smaller(index: Metadata) -> None:
    entry: Any = index.state_dict_metadata["w"]
    entry.size = torch.Size((2, 2))
    entry.chunks = [ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((2, 2)))]


def _other_dtype(index: Metadata) -> None:
    entry: Any = index.state_dict_metadata["w"]
    entry.properties.dtype = torch.int64


def _below_zero(index: Metadata) -> None:
    entry: Any = index.state_dict_metadata["w"]
    entry.chunks = [ChunkStorageMetadata(torch.Size((-1, 0)), torch.Size((4, 4)))]
    index.storage_data = {MetadataIndex("w", torch.Size((-1, 0)), 0): next(iter(index.storage_data.values()))}


def _too_large(index: Metadata) -> None:
    entry: Any = index.state_dict_metadata["w"]
    entry.chunks = [ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((5, 4)))]


def _without_places(index: Metadata) -> None:
    index.storage_data.clear()


def _outside(index: Metadata) -> None:
    next(iter(index.storage_data.values())).relative_path = "../elsewhere.distcp"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_other_shape, r"a tensor of shape \(4, 3\) and dtype torch.float32, and there is one of shape \(3, 4\)"),
        (_smaller, r"a tensor of shape \(2, 2\) .* one of shape \(3, 4\)"),
        (_other_dtype, "dtype torch.int64, and there is one of .* torch.float32"),
        (_below_zero, r"a chunk of `w` from \(-1, 0\) to \(3, 4\), outside of its shape \(3, 4\)"),
        (_too_large, r"a chunk of `w` from \(0, 0\) to \(5, 4\), outside"),
        (_without_places, "does not say where `w` is stored"),
        (_outside, "names `../elsewhere.distcp`, which is outside of it"),
    ],
)
def test_an_index_of_other_tensors_than_those_in_the_files_reads_no_wrong_bytes(
    change: Any, said: str, tmp_path: Path
) -> None:
    with warnings.catch_warnings(action="ignore"):
        dcp.save({"w": torch.arange(12.0).view(3, 4)}, checkpoint_id=tmp_path / "saved", no_dist=True)
    path = tmp_path / "saved" / ".metadata"
    index = pickle.loads(path.read_bytes())
    change(index)
    path.write_bytes(pickle.dumps(index))
    with pytest.raises(ValueError, match=said) as caught:
        StoredTensors(tmp_path / "saved").open("w", weights_only=True).read()
    assert str(tmp_path / "saved") in str(caught.value)
