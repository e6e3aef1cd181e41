"""The index of a checkpoint directory is read without running code, whichever Python wrote it."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MemoryFormat
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from lightning_zero.checkpoint.unpickling import read_index


class _EarlyPickler(pickle.Pickler):
    """Writes the members of an enum as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (MemoryFormat, value.name)) if isinstance(value, MemoryFormat) else NotImplemented


class _Attribute:
    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __reduce__(self) -> Any:
        return getattr, self.arguments


def _index() -> Metadata:
    weight = TensorStorageMetadata(TensorProperties.create_from_tensor(torch.ones(2)), torch.Size([2]), [])
    return Metadata({"weight": weight})


def test_an_index_of_an_early_python_is_read() -> None:
    written = io.BytesIO()
    _EarlyPickler(written).dump(_index())
    assert b"getattr" in written.getvalue()
    assert read_index(written.getvalue(), Path(".metadata"), None) == _index()


@pytest.mark.parametrize("arguments", [(Metadata, "__init__"), (MemoryFormat, "__reduce__"), (torch.Size, "numel")])
def test_other_attributes_are_refused(arguments: tuple[Any, str]) -> None:
    with pytest.raises(pickle.UnpicklingError, match=r"`.metadata`: the index names .*could run code"):
        read_index(pickle.dumps(_Attribute(*arguments)), Path(".metadata"), None)
