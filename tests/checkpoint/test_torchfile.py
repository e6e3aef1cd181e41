from __future__ import annotations

import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.checkpoint import torchfile
from lightning_zero.checkpoint.stored import StoredTensors
from tests import worlds
from tests.checkpoint.segments import expected, save

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.int64, torch.int8, torch.uint8, torch.uint16, torch.bool,
]  # fmt: skip


def _content() -> dict[str, Any]:
    tied = torch.randn(5, 7)
    return {
        "tied": [tied, tied],
        "view": tied.t()[1:3],
        "dtypes": {str(dtype): torch.arange(9).to(dtype) for dtype in DTYPES},
        "scalar": torch.tensor(3.5),
        "nothing": torch.empty(0, 3),
        "parameter": nn.Parameter(torch.ones(2), requires_grad=False),
        "ordered": OrderedDict(lr=1e-3, betas=(0.9, 0.95)),
        "shape": torch.Size((1, 2)),
        "dtype": torch.bfloat16,
    }


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        same_kind = (type(one), one.dtype, one.shape) == (type(other), other.dtype, other.shape)
        return same_kind and torch.equal(one.contiguous().view(-1).view(torch.uint8), _bytes(other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return all(_same(a, b) for a, b in zip(one, other, strict=True))
    return type(one) is type(other) and one == other


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_loads_what_was_written(mmap: bool, tmp_path: Path) -> None:
    content = _content()
    torchfile.save(tmp_path / "file.pt", content)
    loaded = torch.load(tmp_path / "file.pt", weights_only=True, mmap=mmap)
    assert _same(content, loaded)
    assert loaded["tied"][0].data_ptr() == loaded["tied"][1].data_ptr()


def test_the_archive_is_sound_and_its_tensors_are_aligned(tmp_path: Path) -> None:
    torchfile.save(tmp_path / "file.pt", _content())
    with zipfile.ZipFile(tmp_path / "file.pt") as archive:
        assert archive.testzip() is None
    archive: Any = torch._C.PyTorchFileReader(str(tmp_path / "file.pt"))
    offsets = [archive.get_record_offset(name) for name in archive.get_all_records() if name.startswith("data/")]
    assert len(offsets) > 10
    assert all(offset % 64 == 0 for offset in offsets)


def test_stored_tensors_are_read_while_they_are_written(tmp_path: Path) -> None:
    worlds.run(save, 2, str(tmp_path / "saved"))
    stored = StoredTensors(tmp_path / "saved")
    content = {name: stored.open(f"model.{name}", weights_only=True) for name in ("w", "tied", "conv", "nothing")}
    torchfile.save(tmp_path / "file.pt", content, {id(content["conv"]): ("conv", torch.bfloat16)})
    loaded = torch.load(tmp_path / "file.pt", weights_only=True)
    assert torch.equal(loaded["w"], expected("w"))
    assert torch.equal(loaded["conv"], expected("conv").bfloat16())
    assert loaded["nothing"].shape == (0, 4)
    assert loaded["w"].data_ptr() == loaded["tied"].data_ptr()


def test_a_value_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    large = torch.tensor([1.0, 1e6])
    with pytest.raises(ValueError, match=r"`name` has values up to 1e\+06, which do not fit into float16"):
        torchfile.save(tmp_path / "file.pt", [large], {id(large): ("name", torch.float16)})
