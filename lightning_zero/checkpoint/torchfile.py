"""Files as ``torch.save`` writes them, tensor by tensor: a tensor that is stored elsewhere is read while it is written.

The format is a zip archive without compression: ``archive/data.pkl`` is the pickled content with references in place of
storages, ``archive/data/<key>`` the bytes of a storage, at a multiple of 64 bytes, ``archive/byteorder`` their order.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from lightning_zero.checkpoint.checksums import CHECKSUMS
from lightning_zero.checkpoint.paths import beside
from lightning_zero.checkpoint.planner import Segment
from lightning_zero.checkpoint.safetensors import convert, is_safetensors, pieces
from lightning_zero.checkpoint.stored import StoredTensor

__all__ = ["load", "refuse_others", "save", "values_of"]

EXPECTED = "Give a checkpoint directory, or a file that `torch.save` or a `Trainer` has written."
ALIGN = 64  # bytes, as ``torch.save``: mapped memory can be used with wide loads


def save(path: Path, content: Any, dtypes: Mapping[int, tuple[str, torch.dtype]] | None = None) -> None:
    """Write a file that ``torch.load`` reads; it is on the disk afterwards.

    Needs memory for a piece of a tensor and for the values that are no tensors. Two names of one tensor share their
    values in the file, as they do in memory.

    Args:
        path: The file.
        content: An argument for ``torch.save``; may hold ``StoredTensor``s.
        dtypes: By ``id`` of a tensor in ``content``: its name, for errors, and the dtype in which it is written.

    Raises:
        ValueError: A finite value does not fit into a dtype.
    """
    with path.open("wb") as file:
        with zipfile.ZipFile(file, "w") as archive:
            pickled = io.BytesIO()
            pickler = _Pickler(pickled, dtypes or {})
            pickler.dump(content)
            _add(archive, file, "archive/data.pkl", iter([pickled.getvalue()]))
            _add(archive, file, "archive/byteorder", iter([sys.byteorder.encode()]))
            for storage in pickler.storages.values():
                _add(archive, file, f"archive/data/{storage.key}", _content(storage))
            _add(archive, file, "archive/version", iter([b"3\n"]))
        file.flush()
        os.fsync(file.fileno())


def load(path: Path, weights_only: bool | None = None) -> dict[str, Any]:
    """Read a dictionary that ``torch.save`` wrote; its tensors are mapped into memory.

    Raises:
        FileNotFoundError: There is nothing at the path.
        ValueError: It is something else, or damaged.
        pickle.UnpicklingError: It names something that could run code.
    """
    refuse_others(path)
    try:
        content = torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=weights_only)
    except pickle.UnpicklingError as error:
        error.add_note(f"The file is `{path}`. If you trust it, load it with `ZeroStrategy(weights_only=False)`.")
        raise
    except (OSError, MemoryError):
        raise
    except Exception as error:  # a damaged pickle raises anything
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"`{path}` is damaged, or no file of `torch.save`: {type(error).__name__}: {reason} {EXPECTED}"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"`{path}` is no checkpoint: it holds a `{type(content).__name__}`. {EXPECTED}")
    return content


def refuse_others(path: Path) -> None:
    """Refuse a file that ``torch.save`` has not written, by its first bytes.

    Raises:
        FileNotFoundError: There is nothing at the path.
        ValueError: It is something else.
    """
    if not path.exists():
        raise FileNotFoundError(f"There is nothing at `{path}`.{_left_beside(path)} {EXPECTED}")
    found = _other_kind(path)
    if found is not None:
        raise ValueError(f"`{path}` is no checkpoint: it is {found}. {EXPECTED}")


def _left_beside(path: Path) -> str:
    """Name the whole directories that killed saves have left: where names cannot be exchanged one may be the former."""
    left = sorted(f"`{found.parent}`" for found in path.parent.glob(f"{beside(path, '*').name}/{CHECKSUMS}"))
    return f" A save that was killed left {', '.join(left)} there, which is whole: rename it." if left else ""


def _other_kind(path: Path) -> str | None:
    """Name the kind of a file that ``torch.save`` has not written, by its first bytes; None if it may have."""
    with path.open("rb") as file:
        head = file.read(512)
    if not head:
        return "empty"
    if is_safetensors(path):
        return "a safetensors file, which has weights only: `lightning_zero.load_pretrained(module, path)` reads it"
    if head.startswith(b"PK"):
        if not zipfile.is_zipfile(path):
            return "cut off: the end of the archive is missing"
        with zipfile.ZipFile(path) as archive:
            is_ours = any(name.endswith("/data.pkl") for name in archive.namelist())
        return None if is_ours else "another kind of zip archive"
    is_older = head.startswith(b"\x80") or head[257:262] == b"ustar"  # formats of earlier releases of PyTorch
    return None if is_older else "another kind of file, such as text"


def values_of(tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield a tensor's values piece by piece: where a piece starts in the flattened tensor, and the piece, 1-D."""
    if not isinstance(tensor, StoredTensor):
        flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
        yield from ((lo, flat[lo:hi]) for lo, hi in pieces(0, flat.numel(), flat.element_size()))
        return
    shape, dtype = tensor.shape, tensor.dtype
    for lo, hi in pieces(0, shape.numel(), dtype.itemsize):
        piece = torch.empty(hi - lo, dtype=dtype, device="cpu")
        tensor.source.read([(tensor.key, Segment(piece, lo, shape))])
        yield lo, piece


@dataclass(frozen=True)
class _Storage:
    """The storage that a tensor has in the file: its values one behind the other."""

    key: str
    name: str
    tensor: torch.Tensor
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return self.tensor.shape.numel()


class _Pickler(pickle.Pickler):
    """Pickles tensors as references to storages, as ``torch.save`` does, and collects the storages."""

    def __init__(self, file: BinaryIO, dtypes: Mapping[int, tuple[str, torch.dtype]]) -> None:
        super().__init__(file, protocol=2)
        self.storages: dict[Any, _Storage] = {}
        self._dtypes = dtypes

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        if isinstance(value, torch.nn.Parameter):
            return torch._utils._rebuild_parameter, (value.data, value.requires_grad, OrderedDict())
        name, dtype = self._dtypes.get(id(value), ("a tensor", value.dtype))
        identity = (_identity(value), dtype)
        storage = self.storages.setdefault(identity, _Storage(str(len(self.storages)), name, value, dtype))
        shape = tuple(value.shape)
        stride = torch.empty(shape, device="meta").stride()
        arguments: tuple[Any, ...] = (storage, 0, shape, stride, value.requires_grad, OrderedDict())
        if _legacy_class(dtype) is None:
            return torch._utils._rebuild_tensor_v3, (*arguments, dtype)
        return torch._utils._rebuild_tensor_v2, arguments

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Storage):
            return None
        legacy = _legacy_class(value.dtype)
        if legacy is None:
            return "storage", torch.UntypedStorage, value.key, "cpu", value.numel * value.dtype.itemsize
        return "storage", legacy, value.key, "cpu", value.numel


def _identity(tensor: torch.Tensor) -> Any:
    """Return a key that is equal for two tensors with the same values in the same place."""
    if isinstance(tensor, StoredTensor):
        return id(tensor.source), tensor.source.identity(tensor.key)
    if tensor.numel() == 0:
        return id(tensor)
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _legacy_class(dtype: torch.dtype) -> Any:
    """Return the class that stands for a dtype in files; newer dtypes have none."""
    name = torch.storage._dtype_to_storage_type_map().get(dtype)
    return None if name is None else getattr(torch, name)


def _content(storage: _Storage) -> Iterator[memoryview]:
    for _, piece in values_of(storage.tensor):
        converted = convert(storage.name, piece, storage.dtype).cpu().contiguous()
        yield converted.view(torch.uint8).numpy().data


def _add(archive: zipfile.ZipFile, file: BinaryIO, name: str, content: Iterator[bytes | memoryview]) -> None:
    info = zipfile.ZipInfo(name)
    # The header in front of the content: fixed part, name, our field, and the one that zipfile adds for large files.
    before = file.tell() + 30 + len(name) + 4 + 20
    padding = -before % ALIGN
    info.extra = b"FB" + padding.to_bytes(2, "little") + bytes(padding)
    with archive.open(info, "w", force_zip64=True) as record:
        for piece in content:
            record.write(piece)
