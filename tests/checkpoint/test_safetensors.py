from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from lightning_zero.checkpoint import stored
from lightning_zero.checkpoint.planner import Segment
from lightning_zero.checkpoint.safetensors import DTYPES, SafetensorsFile, SafetensorsPlan, parse_size


def _tensors() -> dict[str, torch.Tensor]:
    return {
        "matrix": torch.randn(7, 11),
        "half": torch.randn(5, 3).bfloat16(),
        "odd": torch.arange(3).to(torch.uint8),
        "fp8": torch.randn(9).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "nothing": torch.empty(0, 4),
        "long": torch.arange(4),
        "flag": torch.tensor([True, False]),
    }


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _write(folder: Path, tensors: dict[str, torch.Tensor], **options: Any) -> SafetensorsPlan:
    plan = SafetensorsPlan([(name, value.dtype, value.shape) for name, value in tensors.items()], **options)
    plan.create(folder)
    with plan.writer(folder) as writer:
        for name, value in tensors.items():
            half = value.numel() // 2
            writer.write(name, half, value.reshape(-1)[half:])
            writer.write(name, 0, value.reshape(-1)[:half])
    return plan


@pytest.mark.parametrize("piece", [16, 8 << 20])
def test_the_library_reads_what_was_written(piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_zero.checkpoint.safetensors.PIECE_BYTES", piece)
    tensors = _tensors()
    _write(tmp_path, tensors)
    loaded = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, value in tensors.items():
        assert (loaded[name].dtype, loaded[name].shape) == (value.dtype, value.shape)
        assert torch.equal(_bits(loaded[name]), _bits(value))


@pytest.mark.parametrize("piece", [16, 8 << 20])
def test_any_range_of_what_the_library_wrote_is_read(
    piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_zero.checkpoint.safetensors.PIECE_BYTES", piece)
    tensors = _tensors()
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "x.safetensors")
    for name, value in file.tensors().items():
        assert type(value) is stored.StoredTensor
        assert (value.shape, value.dtype) == (tensors[name].shape, tensors[name].dtype)
        assert torch.equal(_bits(value.read()), _bits(tensors[name]))
    for start in range(0, 77, 9):
        for stop in range(start, 77, 7):
            local = torch.empty(stop - start, dtype=torch.float64)
            file.read([("matrix", Segment(local, start, torch.Size((7, 11))))])
            assert torch.equal(local, tensors["matrix"].view(-1)[start:stop].double())


def test_every_dtype_has_the_librarys_name(tmp_path: Path) -> None:
    tensors = {name: torch.zeros(8, dtype=torch.uint8).view(dtype) for name, dtype in DTYPES.items()}
    _write(tmp_path, tensors)
    loaded = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert {name: value.dtype for name, value in loaded.items()} == DTYPES


def test_files_are_no_larger_than_asked_and_the_index_names_them(tmp_path: Path) -> None:
    tensors = {name: torch.randn(100) for name in "abcde"}
    _write(tmp_path, tensors, max_shard_size=900)
    files = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*files, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 2000}
    assert [index["weight_map"][name] for name in "abcde"] == [files[0], files[0], files[1], files[1], files[2]]
    for name, file in index["weight_map"].items():
        assert torch.equal(safetensors.torch.load_file(tmp_path / file)[name], tensors[name])


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("200 MB", 2 * 10**8), ("1GiB", 2**30), ("10kb", 10_000), (77, 77)]
)
def test_a_size_is_a_number_with_a_unit(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["large", "", "-1GB", "0", "1.5GB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size. Use a number of bytes, or text such as '5GB'"):
        parse_size(text)


def test_a_dtype_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match="`x` has the dtype torch.complex128, which safetensors files cannot hold"):
        SafetensorsPlan([("x", torch.complex128, (2,))])


def _header(table: Any) -> bytes:
    text = json.dumps(table).encode()
    return len(text).to_bytes(8, "little") + text


GOOD = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "does not start with the length of a header"),
        (b"PK\x03\x04" + bytes(40), "does not start with the length of a header"),
        (_header([1]), "header cannot be read"),
        ((5).to_bytes(8, "little") + b"hello", "header cannot be read"),
        (_header({"a": {"dtype": "F32", "shape": [2]}}) + bytes(8), "header cannot be read"),
        (_header(GOOD) + bytes(7), "its header tells of"),
        (_header(GOOD) + bytes(9), "its header tells of"),
        (_header({"a": {**GOOD["a"], "shape": [3]}}) + bytes(8), "place of `a` does not fit"),
        (_header({**GOOD, "b": GOOD["a"]}) + bytes(8), "place of `b` does not fit"),
        (_header({"a": {**GOOD["a"], "dtype": "F4"}}) + bytes(8), "`a` in .* has the dtype 'F4', which is not known"),
    ],
)
def test_a_damaged_file_is_refused_by_name(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"x.safetensors.*{message}|{message}"):
        SafetensorsFile(path)


def test_a_file_that_was_cut_off_after_it_was_opened_is_refused(tmp_path: Path) -> None:
    safetensors.torch.save_file({"a": torch.randn(100)}, tmp_path / "x.safetensors")
    tensor = SafetensorsFile(tmp_path / "x.safetensors").tensors()["a"]
    with (tmp_path / "x.safetensors").open("r+b") as file:
        file.truncate(300)
    with pytest.raises(ValueError, match="it ends within `a`"):
        tensor.read()
