"""Tensors in files, read when their values are used: a rank reads the ranges that it holds and nothing else."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import operator
import pickle
import sys
import weakref
import zipfile
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from lightning_zero.boxes import Box, covers
from lightning_zero.checkpoint.checksums import EARLIER, BlockReader
from lightning_zero.checkpoint.planner import METADATA, KeyPath, Segment
from lightning_zero.checkpoint.unpickling import read_index
from lightning_zero.trees import tree_leaves, tree_map_only

__all__ = ["METADATA_FUNCTIONS", "Lent", "StoredTensor", "StoredTensors", "TensorSource", "fill"]

PIECE_BYTES = 8 << 20  # how much of a tensor is read at once
SMALL_BYTES = 1 << 18  # chunks up to this size are read in one go to learn their contents


class StoredTensors:
    """The tensors and objects in the ``.distcp`` files of a directory. Every rank opens and reads it on its own.

    Args:
        directory: The checkpoint.
        reader: Reads its files.
        weights_only: As for ``torch.load``: whether to refuse an index that could run code.
    """

    def __init__(self, directory: Path, reader: BlockReader | None = None, weights_only: bool | None = None) -> None:
        self.directory = directory
        self.reader = reader or BlockReader(directory)
        self.metadata: Metadata = read_index(self.reader.read(METADATA), directory / METADATA, weights_only)
        # chunk of a tensor, or object -> file and byte range
        self._places: dict[MetadataIndex, Any] = self.metadata.storage_data or {}
        self._chunks: dict[MetadataIndex, _Chunk] = {}  # those whose header was read

    def keys(self) -> Iterator[str]:
        """Yield the names of all tensors and objects."""
        yield from self.metadata.state_dict_metadata

    def path(self, key: str) -> KeyPath:
        """Return the place of a value in the nested dictionary that was saved."""
        paths: Mapping[str, KeyPath] = self.metadata.planner_data or {}
        return paths.get(key, (key,))

    def open(self, key: str, *, weights_only: bool | None) -> Any:
        """Return a tensor as a ``StoredTensor``; read an object, a 0-dim tensor or the extra state of a module.

        A module keeps its extra state as it is given, and in-place operations must work on it.
        """
        entry = self.metadata.state_dict_metadata[key]
        if isinstance(entry, TensorStorageMetadata):
            tensor = StoredTensor(self, key, entry.size, entry.properties.dtype)
            return tensor if entry.size and not key.endswith(_EXTRA_STATE_KEY_SUFFIX) else tensor.read()
        return self._load(MetadataIndex(key), weights_only=weights_only)

    def identity(self, key: str) -> Any:
        """Return a key that is equal for two names of the same bytes."""
        entry = self.metadata.state_dict_metadata[key]
        chunks = entry.chunks if isinstance(entry, TensorStorageMetadata) else []
        return tuple(self._range(MetadataIndex(key, chunk.offsets)) for chunk in chunks)

    def read(self, targets: Sequence[tuple[str, Segment]]) -> None:
        """Fill the local part of segments, converting to their dtype and device.

        Of each stored chunk the range is read that a target covers, piece by piece, in the order of the files.

        Raises:
            ValueError: The index does not cover a target, or a file that it names is damaged.
        """
        views: list[dict[Any, torch.Tensor]] = []
        requests: dict[MetadataIndex, list[ReadItem]] = {}
        for number, (key, target) in enumerate(targets):
            parts = list(target.views())
            views.append({torch.Size(offsets): view for (offsets, _), view in parts})
            chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for (offsets, sizes), _ in parts]
            entry = self.metadata.state_dict_metadata[key]
            assert isinstance(entry, TensorStorageMetadata)
            items = create_read_items_for_chunk_list(key, entry, chunks)
            self._check_covered(key, entry, parts, items)
            for item in items:
                item = dataclasses.replace(item, dest_index=dataclasses.replace(item.dest_index, index=number))
                requests.setdefault(item.storage_index, []).append(item)
        for index in sorted(requests, key=lambda index: self._range(index)):
            for part, values in self._pieces(index, requests[index], views):
                part.copy_(values)  # an error of it is none of the files: the device may have no memory left

    def _pieces(
        self, index: MetadataIndex, items: Sequence[ReadItem], views: Sequence[Mapping[Any, torch.Tensor]]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield parts of targets with a chunk's values for them."""
        with self._names(index):
            chunk = self._chunk(index)
            for item in items:
                view = views[item.dest_index.index or 0][item.dest_index.offset]
                target = _narrow(view, item.dest_offsets, item.lengths)
                yield from chunk.pieces(item.storage_offsets, item.lengths, target)

    def _check_covered(
        self, key: str, entry: TensorStorageMetadata, parts: Sequence[tuple[Box, Any]], items: Sequence[ReadItem]
    ) -> None:
        """Refuse to leave elements of a target as they are, because no file has them."""
        for chunk in entry.chunks:
            ends = [offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)]
            if any(offset < 0 for offset in chunk.offsets) or any(map(operator.gt, ends, entry.size)):
                raise ValueError(
                    f"`{self.directory}` is damaged: its index has a chunk of `{key}` from {tuple(chunk.offsets)} to"
                    f" {tuple(ends)}, outside of its shape {tuple(entry.size)}. {EARLIER}"
                )
        found: dict[Sequence[int], list[Box]] = {torch.Size(offsets): [] for (offsets, _), _ in parts}
        for item in items:
            found[item.dest_index.offset or torch.Size()].append(Box(tuple(item.dest_offsets), tuple(item.lengths)))
        if not all(covers(found[torch.Size(offsets)], sizes) for (offsets, sizes), _ in parts):
            raise ValueError(
                f"`{self.directory}` is not whole: its chunks do not cover `{key}`, which has the shape"
                f" {tuple(entry.size)}. A rank's part was not saved. {EARLIER}"
            )

    def _chunk(self, index: MetadataIndex) -> _Chunk:
        if index not in self._chunks:
            chunk = _Chunk(self.reader, *self._range(index))
            self._check_chunk(index, chunk)
            self._chunks[index] = chunk
        return self._chunks[index]

    def _check_chunk(self, index: MetadataIndex, chunk: _Chunk) -> None:
        """Refuse a stored tensor that is another one than the index says."""
        entry = self.metadata.state_dict_metadata[index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        sizes = next(tuple(one.sizes) for one in entry.chunks if one.offsets == index.offset)
        if (chunk.shape, chunk.dtype) != (sizes, entry.properties.dtype):
            raise ValueError(
                f"`{self.directory}` is damaged: its index says that `{self._range(index)[0]}` has a tensor of shape"
                f" {sizes} and dtype {entry.properties.dtype}, and there is one of shape {chunk.shape} and dtype"
                f" {chunk.dtype}. {EARLIER}"
            )

    def _range(self, index: MetadataIndex) -> tuple[str, int, int]:
        place = self._places.get(index)
        if place is None:
            raise ValueError(
                f"`{self.directory / METADATA}` is damaged: it does not say where `{index.fqn}` is stored."
            )
        if Path(place.relative_path).is_absolute() or ".." in Path(place.relative_path).parts:
            raise ValueError(f"`{self.directory / METADATA}` names `{place.relative_path}`, which is outside of it.")
        if getattr(place, "transform_descriptors", None):
            raise ValueError(
                f"`{self.directory}` was written with the stream transforms {place.transform_descriptors}, which are"
                " not supported."
            )
        return place.relative_path, place.offset, place.length

    def _load(self, index: MetadataIndex, *, weights_only: bool | None) -> Any:
        with self._names(index):
            content = io.BytesIO(self.reader.read(*self._range(index)))
            return torch.load(content, map_location="cpu", weights_only=weights_only)

    @contextlib.contextmanager
    def _names(self, index: MetadataIndex) -> Iterator[None]:
        """Let every error of the files say which tensor or object it is about, and where it lies.

        Raises:
            ValueError: It is damaged.
            pickle.UnpicklingError: It is damaged, or names something that could run code.
            OSError: It could not be read.
        """
        holds = f"It holds `{index.fqn}`."
        try:
            yield
        except MemoryError:
            raise
        except OSError as error:
            raise type(error)(f"{error} {holds}") from error
        except Exception as error:  # a damaged file raises anything
            if type(error) is ValueError and str(self.directory) in str(error):
                raise ValueError(f"{error} {holds}") from error
            path = self.directory / str(getattr(self._places.get(index), "relative_path", METADATA))
            if isinstance(error, pickle.UnpicklingError):
                raise pickle.UnpicklingError(f"`{path}` is damaged or could run code. {holds} {error}") from error
            raise ValueError(f"`{path}` is damaged. {holds} {EARLIER} ({type(error).__name__}: {error})") from error


class _Chunk:
    """A tensor that ``torch.save`` wrote into a range of a file; its elements are read without reading all of it.

    Raises:
        ValueError: The entry is not one tensor.
    """

    def __init__(self, reader: BlockReader, name: str, offset: int, length: int) -> None:
        is_small = length <= SMALL_BYTES
        window = io.BytesIO(reader.read(name, offset, length)) if is_small else _Window(reader, name, offset, length)
        tensor = torch.load(window, map_location="meta", weights_only=True)
        window.seek(0)
        archive: Any = torch._C.PyTorchFileReader(window)
        order = archive.get_record("byteorder") if archive.has_record("byteorder") else sys.byteorder.encode()
        is_plain = isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided
        if not is_plain or order.decode() != sys.byteorder:
            raise ValueError(f"`{reader.directory / name}` has something else than a tensor at {offset}.")
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype
        self._reader = reader
        self._name = name
        self._stride = tensor.stride()
        self._start = self._stop = offset  # of the elements in the file; without elements there is nothing to read
        if tensor.numel():
            begin = offset + archive.get_record_offset("data/0")
            self._start = begin + tensor.storage_offset() * self.dtype.itemsize
            self._stop = begin + _sizes(window)["data/0"]

    def pieces(
        self, offsets: Sequence[int], sizes: Sequence[int], target: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield parts of a tensor with the values of a box of the chunk, which has the tensor's sizes."""
        extents = [(size - 1) * stride for size, stride in zip(sizes, self._stride, strict=True)]
        nbytes = (1 + sum(extents)) * self.dtype.itemsize
        if 0 in sizes:
            return
        if nbytes > PIECE_BYTES and max(sizes, default=1) > 1:
            yield from self._halves(extents.index(max(extents)), list(offsets), list(sizes), target)
            return
        first = sum(offset * stride for offset, stride in zip(offsets, self._stride, strict=True))
        start = self._start + first * self.dtype.itemsize
        if start + nbytes > self._stop:
            raise ValueError(f"`{self._reader.directory / self._name}` is damaged: a tensor is shorter than its shape.")
        content = self._reader.read(self._name, start, nbytes)
        values = torch.frombuffer(content, dtype=torch.uint8).view(self.dtype)
        yield target, values.as_strided(tuple(sizes), self._stride)

    def _halves(
        self, dim: int, offsets: list[int], sizes: list[int], target: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        half = sizes[dim] // 2
        for start, size in ((0, half), (half, sizes[dim] - half)):
            moved = [*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :]]
            yield from self.pieces(moved, [*sizes[:dim], size, *sizes[dim + 1 :]], target.narrow(dim, start, size))


def _sizes(window: io.BufferedIOBase) -> dict[str, int]:
    """Return the bytes of the records of an archive, which is inside of a folder in it."""
    with zipfile.ZipFile(window) as archive:
        return {info.filename.partition("/")[2]: info.file_size for info in archive.infolist()}


class _Window(io.BufferedReader):
    """A range of a file of a checkpoint as a file of its own."""

    def __init__(self, reader: BlockReader, name: str, offset: int, length: int) -> None:
        super().__init__(_Range(reader, name, offset, length))


class _Range(io.RawIOBase):
    def __init__(self, reader: BlockReader, name: str, offset: int, length: int) -> None:
        super().__init__()
        self._reader = reader
        self._name = name
        self._offset = offset
        self._length = length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = max(min(len(buffer), self._length - self._position), 0)
        if count:
            buffer[:count] = self._reader.read(self._name, self._offset + self._position, count)
        self._position += count
        return count


def _narrow(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


class TensorSource(Protocol):
    """The files of a directory in which stored tensors lie."""

    directory: Path

    def read(self, targets: Sequence[tuple[str, Segment]]) -> None:
        """Fill the local part of segments of the tensors with these names."""
        ...

    def identity(self, key: str) -> Any:
        """Return a key that is equal for two names of the same bytes."""
        ...


class Lent:
    """Lends stored tensors to code that may keep some of them: those are plain tensors afterwards.

    Such code may be a hook, or a ``load_state_dict`` of a user's. Tensors that it keeps must outlive the files.
    """

    def __init__(self) -> None:
        self._lent: list[weakref.ref[StoredTensor]] = []

    def lend(self, values: Any) -> Any:
        """Return a nested dictionary with copies of the stored tensors in it; nothing is read."""
        if isinstance(values, StoredTensor):
            stored = StoredTensor(values.source, values.key, values.shape, values.dtype)
            self._lent.append(weakref.ref(stored))
            return stored
        if not isinstance(values, dict):
            return values
        lent = copy.copy(values)
        lent.update({key: self.lend(value) for key, value in values.items()})
        return lent

    def take_back(self) -> None:
        """Make plain the lent tensors that are still referred to. Whoever was to give them back has done so."""
        for reference in self._lent:
            stored = reference()
            if isinstance(stored, StoredTensor):  # not plain already
                stored.make_plain()
        self._lent.clear()


class StoredTensor(torch.Tensor):
    """A tensor in a file that is read when its values are used.

    Any operation works on it and reads the whole tensor each time; shape and dtype are known without reading. Code that
    loads a part of it calls ``fill``. An operation that writes into it, or returns a view of it, makes it plain.
    """

    source: TensorSource
    key: str

    @staticmethod
    def __new__(cls, source: TensorSource, key: str, shape: torch.Size, dtype: torch.dtype) -> StoredTensor:
        """Make the stand-in of a tensor."""
        stored: StoredTensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=torch.device("cpu"))
        stored.source, stored.key = source, key
        return stored

    def __init__(self, source: TensorSource, key: str, shape: torch.Size, dtype: torch.dtype) -> None:
        super().__init__()

    def read(self) -> torch.Tensor:
        """Return the whole tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            shape, dtype = self.shape, self.dtype
        with torch.inference_mode(False):
            whole = torch.empty(shape, dtype=dtype, device="cpu")
            self.source.read([(self.key, Segment(whole.view(-1), 0, shape))])
        return whole

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Read the tensor. As a function of torch it would read all in the memo, too."""
        return self.read()

    def make_plain(self) -> None:
        """Read the whole tensor, and become it: this object is an ordinary tensor then, whoever refers to it."""
        plain = self.read()
        with torch._C.DisableTorchFunctionSubclass():
            self.__class__ = torch.Tensor  # type: ignore[assignment]
            vars(self).clear()
            torch._C._swap_tensor_impl(self, plain)  # as in `torch.utils.swap_tensors`; weak references may be

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Read the tensors among the arguments, except to tell shape and dtype."""
        kwargs = kwargs or {}
        if func in METADATA_FUNCTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for stored in _written(func, args, kwargs):
            stored.make_plain()
        copies: list[tuple[StoredTensor, torch.Tensor]] = []

        def read(stored: StoredTensor) -> torch.Tensor:
            copies.append((stored, stored.read()))
            return copies[-1][1]

        result = func(*tree_map_only(StoredTensor, read, args), **tree_map_only(StoredTensor, read, kwargs))
        arguments = {id(leaf) for leaf in tree_leaves((args, kwargs))}
        shared = [stored for stored, values in copies if _shares(result, values, arguments)]
        if not shared:
            return result
        for stored in shared:  # writes into the result are writes into the tensor
            if isinstance(stored, StoredTensor):  # one may be given twice
                stored.make_plain()
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Read the tensors among the arguments.

        Raises:
            RuntimeError: It would write into one.
        """
        schema: Any = func._schema  # type: ignore[attr-defined]
        if schema.is_mutable and any(isinstance(leaf, StoredTensor) for leaf in tree_leaves(args[:1])):
            raise RuntimeError(f"`{func}` would write into a tensor of a checkpoint. Write into a `.clone()` of it.")
        args, kwargs = tree_map_only(StoredTensor, StoredTensor.read, (args, kwargs or {}))
        return func(*args, **kwargs)


METADATA_FUNCTIONS: set[Any] = {
    getattr(torch.Tensor, name).__get__
    for name in (
        "shape",
        "dtype",
        "device",
        "layout",
        "ndim",
        "requires_grad",
        "is_meta",
        "is_cuda",
        "is_cpu",
        "is_sparse",
        "is_leaf",
        "is_quantized",
        "itemsize",
    )
} | {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.is_floating_point,
    torch.is_floating_point,
    torch.Tensor.__len__,
}


_NO_MEMORY = (bool, int, float, complex, str, type(None), torch.Size, torch.dtype, torch.device, torch.layout)


def _written(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[StoredTensor]:
    """Return the stored tensors that a function writes into, as its name and arguments tell."""
    name = getattr(func, "__name__", "")
    is_in_place = name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__"))
    targets = [kwargs.get("out"), args[:1] if is_in_place else ()]
    return [leaf for leaf in tree_leaves(targets) if isinstance(leaf, StoredTensor)]


def _shares(result: Any, values: torch.Tensor, arguments: Container[int]) -> bool:
    """Say whether a result may have the memory of a tensor; one that is neither tensor nor number may.

    A tensor of a subclass that does not tell its memory may, too, unless it was an argument.
    """
    return any(
        _may_share(leaf, values, id(leaf) in arguments)
        if isinstance(leaf, torch.Tensor)
        else not isinstance(leaf, _NO_MEMORY)
        for leaf in tree_leaves(result)
    )


def _may_share(leaf: torch.Tensor, values: torch.Tensor, is_argument: bool) -> bool:
    memory = values.untyped_storage().data_ptr()
    try:
        return leaf.untyped_storage().data_ptr() == memory
    except (RuntimeError, NotImplementedError):
        return leaf.layout is torch.strided and not is_argument


def fill(pairs: Sequence[tuple[StoredTensor, Segment]]) -> None:
    """Read this rank's ranges of many tensors."""
    sources = {id(stored.source): stored.source for stored, _ in pairs}
    for identity, source in sources.items():
        source.read([(stored.key, target) for stored, target in pairs if id(stored.source) == identity])
