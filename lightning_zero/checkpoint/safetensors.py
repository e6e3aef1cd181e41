"""The safetensors format: reading ranges of tensors, and laying out files that many ranks write at once.

A file is eight bytes with the length of the header, the header in JSON, and the tensors' bytes one behind the other,
row by row, little-endian. So a range of a flattened tensor is a range of bytes of the file. Folders in the manner of
Hugging Face hold several such files and an index that says which one has which name.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from lightning_zero.checkpoint.planner import Segment
from lightning_zero.checkpoint.stored import PIECE_BYTES, StoredTensor

__all__ = ["DTYPES", "Entry", "SafetensorsFile", "SafetensorsPlan", "is_safetensors", "parse_size"]

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library
HEADER_ALIGN = 8  # tensors start at a multiple of this many bytes


@dataclass(frozen=True)
class Entry:
    """A tensor of a file: bytes ``[start, stop)``, counted from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


# -- Reading -----------------------------------------------------------------------------------------------------------


def is_safetensors(path: Path) -> bool:
    """Say whether a file begins as one of this format does; its name does not matter."""
    with path.open("rb") as file:
        head = file.read(9)
    return head[8:] == b"{" and int.from_bytes(head[:8], "little") <= min(path.stat().st_size - 8, MAX_HEADER_BYTES)


class SafetensorsFile:
    """The header of a file, and its tensors, read where they are asked for. Every rank opens it on its own.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is not a safetensors file, it is damaged or cut off, or it has a dtype that is not known.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.directory = path.parent
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(8)
            length = int.from_bytes(head, "little")
            if len(head) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise self._damaged("it does not start with the length of a header")
            header = file.read(length)
        self.entries = self._parse(header, 8 + length, size)

    def tensors(self) -> dict[str, StoredTensor]:
        """Return the tensors; each is read when its values are used."""
        return {
            name: StoredTensor(self, name, torch.Size(entry.shape), entry.dtype) for name, entry in self.entries.items()
        }

    def identity(self, key: str) -> Any:
        """Return a key that is equal for two names of the same bytes."""
        return self.path, self.entries[key].start, self.entries[key].shape

    def read(self, targets: Sequence[tuple[str, Segment]]) -> None:
        """Fill the local part of segments, converting to their dtype and device; no other byte is read."""
        runs = [(name, run) for name, target in targets for run in target.runs()]
        with self.path.open("rb", buffering=0) as file:
            for name, target in sorted(runs, key=lambda pair: self.entries[pair[0]].start + pair[1].start):
                self._read(file.fileno(), name, target)

    def _read(self, file: int, name: str, target: Segment) -> None:
        entry = self.entries[name]
        size = entry.dtype.itemsize
        for lo, hi in pieces(target.start, target.stop, size):
            buffer = bytearray((hi - lo) * size)
            done = 0
            while done < len(buffer):
                count = os.preadv(file, [memoryview(buffer)[done:]], entry.start + lo * size + done)
                if not count:
                    raise self._damaged(f"it ends within `{name}`")
                done += count
            values = torch.frombuffer(buffer, dtype=torch.uint8).view(entry.dtype)
            target.local[lo - target.start : hi - target.start].copy_(convert(name, values, target.dtype))

    def _parse(self, header: bytes, base: int, size: int) -> dict[str, Entry]:
        try:
            table = json.loads(header)
            items = [(name, value) for name, value in table.items() if name != "__metadata__"]
            entries = {name: self._entry(name, value, base) for name, value in items}
        except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise self._damaged(f"its header cannot be read ({error})") from error
        position = base
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
            if entry.start != position or entry.stop - entry.start != prod(entry.shape) * entry.dtype.itemsize:
                raise self._damaged(f"the place of `{name}` does not fit to its shape and its neighbours")
            position = entry.stop
        if position != size:
            raise self._damaged(f"it has {size} bytes, and its header tells of {position}")
        return entries

    def _entry(self, name: str, value: Mapping[str, Any], base: int) -> Entry:
        dtype = DTYPES.get(value["dtype"])
        if dtype is None:
            raise ValueError(f"`{name}` in `{self.path}` has the dtype {value['dtype']!r}, which is not known.")
        start, stop = value["data_offsets"]
        return Entry(dtype, tuple(int(extent) for extent in value["shape"]), base + int(start), base + int(stop))

    def _damaged(self, what: str) -> ValueError:
        return ValueError(f"`{self.path}` is damaged, or not a safetensors file: {what}. Copy or download it again.")


def pieces(start: int, stop: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """Cut ``[start, stop)`` elements into ranges of at most ``PIECE_BYTES`` bytes."""
    step = PIECE_BYTES // itemsize
    for lo in range(start, stop, step):
        yield lo, min(lo + step, stop)


# -- Writing -----------------------------------------------------------------------------------------------------------


def parse_size(text: str | int) -> int:
    """Return the bytes of ``"5GB"``, ``"200MB"``, ``"1GiB"``, or of a number.

    Raises:
        ValueError: The text is not a size, or not positive.
    """
    match = re.fullmatch(r"\s*(\d+)\s*([KMGT]?)(i?)B?\s*", str(text), flags=re.IGNORECASE)
    size = 0
    if match is not None:
        number, prefix, binary = match.groups()
        size = int(number) * (1024 if binary else 1000) ** ("KMGT".index(prefix.upper()) + 1 if prefix else 0)
    if size <= 0:
        raise ValueError(f"`max_shard_size={text!r}` is not a size. Use a number of bytes, or text such as '5GB'.")
    return size


class SafetensorsPlan:
    """The file and the byte range of every tensor; the same on every rank that makes it from the same tensors.

    Args:
        tensors: Name, dtype and shape of every tensor; the order is kept.
        max_shard_size: Most bytes of tensors in a file. A tensor that is larger gets a file of its own.
        file_name: Write everything into one file of this name, and no index.

    Raises:
        ValueError: A dtype has no name in the format.
    """

    def __init__(
        self,
        tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]],
        *,
        max_shard_size: int = 5 * 10**9,
        file_name: str | None = None,
    ) -> None:
        for name, dtype, _ in tensors:
            if dtype not in NAMES:
                raise ValueError(f"`{name}` has the dtype {dtype}, which safetensors files cannot hold.")
        groups = [list(tensors)] if file_name is not None else _groups(tensors, max_shard_size)
        self.total_bytes = sum(_nbytes(dtype, shape) for _, dtype, shape in tensors)
        self.headers: dict[str, bytes] = {}  # file -> its first bytes
        self.sizes: dict[str, int] = {}  # file -> its length
        self.places: dict[str, tuple[str, Entry]] = {}  # tensor -> file and bytes
        for number, group in enumerate(groups, start=1):
            self._add_file(file_name or _file_name(number, len(groups)), group)
        self.index = None if len(groups) == 1 else self._index()

    def _add_file(self, file: str, group: Sequence[tuple[str, torch.dtype, Sequence[int]]]) -> None:
        # Tensors of the widest dtype first: each starts at a multiple of its size.
        ordered = sorted(group, key=lambda item: -item[1].itemsize)
        table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        position = 0
        for name, dtype, shape in ordered:
            stop = position + _nbytes(dtype, shape)
            table[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [position, stop]}
            position = stop
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % HEADER_ALIGN)
        header = self.headers[file] = len(text).to_bytes(8, "little") + text
        self.sizes[file] = len(header) + position
        for name, dtype, shape in ordered:
            start, stop = table[name]["data_offsets"]
            self.places[name] = (file, Entry(dtype, tuple(shape), len(header) + start, len(header) + stop))

    def _index(self) -> bytes:
        weight_map = {name: file for name, (file, _) in sorted(self.places.items())}
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
        return (json.dumps(index, indent=2) + "\n").encode()

    def create(self, folder: Path) -> None:
        """Make the files in their full length, with headers and index. One rank does."""
        for file, header in self.headers.items():
            with (folder / file).open("wb") as opened:
                opened.write(header)
                opened.truncate(self.sizes[file])
        if self.index is not None:
            (folder / "model.safetensors.index.json").write_bytes(self.index)

    @contextmanager
    def writer(self, folder: Path) -> Iterator[SafetensorsWriter]:
        """Write into the files; they are on the disk afterwards."""
        writer = SafetensorsWriter(self, folder)
        try:
            yield writer
            writer.sync()
        finally:
            writer.close()


class SafetensorsWriter:
    """Writes ranges of tensors at their places. Ranks may write at once, each its own ranges."""

    def __init__(self, plan: SafetensorsPlan, folder: Path) -> None:
        self._plan = plan
        self._folder = folder
        self._files: dict[str, int] = {}

    def write(self, name: str, start: int, values: torch.Tensor) -> None:
        """Write 1-D values as the elements from ``start`` on, converted piece by piece.

        Raises:
            ValueError: A finite value does not fit into the dtype of the file.
        """
        file, entry = self._plan.places[name]
        for lo, hi in pieces(0, values.numel(), max(entry.dtype.itemsize, values.element_size())):
            piece = values[lo:hi].detach()
            converted = convert(name, piece, entry.dtype).cpu().contiguous()
            self._write(file, converted, entry.start + (start + lo) * entry.dtype.itemsize)

    def _write(self, file: str, values: torch.Tensor, offset: int) -> None:
        if file not in self._files:
            self._files[file] = os.open(self._folder / file, os.O_WRONLY)
        content = memoryview(values.view(torch.uint8).numpy().data)
        while content:
            count = os.pwrite(self._files[file], content, offset)
            content, offset = content[count:], offset + count

    def sync(self) -> None:
        """Wait until everything is on the disk."""
        for file in self._files.values():
            os.fsync(file)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()


def convert(name: str, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return values in another dtype.

    Raises:
        ValueError: A finite value does not fit: it would be infinite, or not a number.
    """
    if values.dtype == dtype:
        return values
    converted = values.to(dtype)
    if _narrows(values.dtype, dtype) and not torch.equal(_is_finite(converted), _is_finite(values)):
        largest = values[values.isfinite()].abs().max().item()
        raise ValueError(
            f"`{name}` has values up to {largest:.4g}, which do not fit into {str(dtype).removeprefix('torch.')}."
            " Choose another `dtype`."
        )
    return converted


def _narrows(source: torch.dtype, target: torch.dtype) -> bool:
    """Say whether a finite value of one dtype may be infinite in another."""
    if not target.is_floating_point:
        return False
    return not source.is_floating_point or torch.finfo(target).max < torch.finfo(source).max


def _is_finite(values: torch.Tensor) -> torch.Tensor:
    return (values.float() if values.element_size() == 1 else values).isfinite()


def _groups(
    tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]], max_shard_size: int
) -> list[list[tuple[str, torch.dtype, Sequence[int]]]]:
    groups: list[list[tuple[str, torch.dtype, Sequence[int]]]] = [[]]
    held = 0
    for item in tensors:
        nbytes = _nbytes(*item[1:])
        if groups[-1] and held + nbytes > max_shard_size:
            groups.append([])
            held = 0
        groups[-1].append(item)
        held += nbytes
    return groups


def _nbytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return prod(shape) * dtype.itemsize


def _file_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
