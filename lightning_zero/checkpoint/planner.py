"""Segments of flattened parameters in ``torch.distributed.checkpoint`` files, as boxes in the parameter's own shape.

A flat range of a row-major array of ``n`` dimensions is at most ``max(1, 2 n - 1)`` boxes, each contiguous in the flat
order: rows at the start, whole slabs, rows at the end. Saved as boxes, a parameter has its own shape in the metadata,
and every reader of the format can cut it anew: another world size, another stage, a DTensor, torch's own tools.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_zero.checkpoint.checksums import BlockReader
from lightning_zero.checkpoint.unpickling import read_index

__all__ = [
    "METADATA_FUNCTIONS",
    "Segment",
    "SegmentSavePlanner",
    "SegmentWriter",
    "StoredTensor",
    "StoredTensors",
    "boxes",
    "fill",
]

METADATA = ".metadata"

Box = tuple[tuple[int, ...], tuple[int, ...]]
KeyPath = tuple[str | int, ...]


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Cut the flat range ``[start, stop)`` of a row-major ``shape`` into boxes ``(offsets, sizes)``, in flat order."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:
        yield from _boxes_in_row(shape, last, start - last * row, stop - last * row)
        return
    yield from _boxes_in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    yield from _boxes_in_row(shape, last, 0, stop - last * row)


def _boxes_in_row(shape: Sequence[int], index: int, start: int, stop: int) -> Iterator[Box]:
    for offsets, sizes in boxes(shape[1:], start, stop):
        yield (index, *offsets), (1, *sizes)


@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """A flat range of a parameter-shaped tensor that this rank holds.

    Stands for the tensor in state dictionaries while its values are spread over the ranks; saving replaces it. It has
    the tensor's shape and dtype, but no values.

    Args:
        local: (stop - start,) live storage, not a copy.
        start: Where ``local`` begins in the flattened tensor.
        shape: Shape of the whole tensor.
        saved: Range of the flattened tensor that this rank writes. Over all ranks these ranges tile the tensor once.
            The default is what the rank holds.
    """

    local: torch.Tensor
    start: int
    shape: torch.Size
    saved: tuple[int, int] | None = None

    @property
    def stop(self) -> int:
        """End of the range in the flattened tensor."""
        return self.start + self.local.numel()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensor."""
        return self.local.dtype

    @property
    def device(self) -> torch.device:
        """Device of this rank's range."""
        return self.local.device

    @property
    def ndim(self) -> int:
        """Number of dimensions of the whole tensor."""
        return len(self.shape)

    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        return prod(self.shape)

    def size(self) -> torch.Size:
        """Shape of the whole tensor."""
        return self.shape

    def to_save(self) -> Segment:
        """Return the part that this rank writes."""
        start, stop = self.saved or (self.start, self.stop)
        if start >= stop:
            return Segment(self.local[:0], 0, self.shape)
        return Segment(self.local[start - self.start : stop - self.start], start, self.shape)

    def views(self) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yield the boxes of the held range, each with the view of ``local`` that is its content."""
        position = 0
        for offsets, sizes in boxes(self.shape, self.start, self.stop):
            numel = prod(sizes)
            yield (offsets, sizes), self.local[position : position + numel].view(sizes)
            position += numel

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse operations on values that are not all here."""
        raise TypeError(_segment_refusal(getattr(func, "__name__", str(func))))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(_segment_refusal(name))


def _segment_refusal(operation: str) -> str:
    return (
        f"`{operation}` needs the values of a tensor that is sharded over the ranks: this is its stand-in in a"
        " checkpoint that is about to be saved. Use `strategy.full_param(param)` on every rank."
    )


class SegmentSavePlanner(DefaultSavePlanner):
    """Plans a flat dictionary of segments, tensors and objects.

    Every rank writes what it has in the dictionary: a segment's boxes, and tensors and objects as they are. So a plain
    tensor or object must be in the dictionary of one rank only.

    Args:
        paths: For every key the place of the value in the nested dictionary that stock readers rebuild.
    """

    def __init__(self, paths: Mapping[str, KeyPath]) -> None:
        super().__init__(flatten_state_dict=True, flatten_sharded_tensors=False)
        self._paths = dict(paths)

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the dictionary as it is: it is flat."""
        del storage_meta
        self.is_coordinator = is_coordinator
        self.state_dict = {
            key: value.to_save() if isinstance(value, Segment) else value for key, value in state_dict.items()
        }

    def create_local_plan(self) -> SavePlan:
        """Return one write item per box, tensor and object."""
        items = [item for key, value in self.state_dict.items() for item in self._write_items(key, value)]
        self.plan = SavePlan(items, planner_data=self._paths)
        return self.plan

    def _write_items(self, key: str, value: Any) -> Iterator[WriteItem]:
        if isinstance(value, Segment):
            if value.numel() == 0 and self.is_coordinator:
                yield _tensor_item(key, value.local.view(value.shape), WriteItemType.TENSOR)
            for (offsets, sizes), view in value.views():
                yield _tensor_item(key, view, WriteItemType.SHARD, offsets, sizes, value.shape)
        elif isinstance(value, torch.Tensor):
            yield _tensor_item(key, value, WriteItemType.TENSOR)
        else:
            yield WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return what a write item of this rank's plan writes."""
        value = self.state_dict[index.fqn]
        if not isinstance(value, Segment):
            return value
        if value.numel() == 0:
            return value.local.view(value.shape)
        return next(view for (offsets, _), view in value.views() if offsets == tuple(index.offset or ()))


def _tensor_item(
    key: str,
    tensor: torch.Tensor,
    kind: WriteItemType,
    offsets: Sequence[int] | None = None,
    sizes: Sequence[int] | None = None,
    shape: Sequence[int] | None = None,
) -> WriteItem:
    offset = torch.Size(offsets if offsets is not None else [0] * tensor.ndim)
    chunk = ChunkStorageMetadata(offset, torch.Size(sizes if sizes is not None else tensor.shape))
    return WriteItem(
        index=MetadataIndex(key, offset),
        type=kind,
        tensor_data=TensorWriteData(
            chunk=chunk,
            properties=TensorProperties.create_from_tensor(tensor),
            size=torch.Size(shape if shape is not None else tensor.shape),
        ),
    )


class SegmentWriter(FileSystemWriter):
    """Writes ``.distcp`` files, and enters a value under several names without writing it twice.

    Args:
        path: The directory.
        aliases: Further name of a value -> the name under which it is written.
        order: Names in the order of the module; the metadata lists them in it.
    """

    def __init__(self, path: Path, *, aliases: Mapping[str, str], order: Sequence[str]) -> None:
        super().__init__(path)
        self._aliases = dict(aliases)
        self._order = list(order)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write ``.metadata``. Called on the coordinator."""
        entries = metadata.state_dict_metadata
        for alias, name in self._aliases.items():
            entries[alias] = entries[name]
        position = {name: index for index, name in enumerate(self._order)}
        metadata.state_dict_metadata = dict(
            sorted(entries.items(), key=lambda entry: position.get(entry[0], len(position)))
        )
        super().finish(metadata, [[*written, *self._alias_results(written)] for written in results])

    def _alias_results(self, written: list[WriteResult]) -> Iterator[WriteResult]:
        names: dict[str, list[str]] = {}
        for alias, name in self._aliases.items():
            names.setdefault(name, []).append(alias)
        for result in written:
            for alias in names.get(result.index.fqn, ()):
                yield dataclasses.replace(result, index=dataclasses.replace(result.index, fqn=alias))


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
        self._places: dict[MetadataIndex, Any] = self.metadata.storage_data

    def keys(self) -> Iterator[str]:
        """Yield the names of all tensors and objects."""
        yield from self.metadata.state_dict_metadata

    def path(self, key: str) -> KeyPath:
        """Return the place of a value in the nested dictionary that was saved."""
        paths: Mapping[str, KeyPath] = self.metadata.planner_data or {}
        return paths.get(key, (key,))

    def open(self, key: str, *, weights_only: bool | None) -> Any:
        """Return a tensor as a ``StoredTensor``; read an object or a 0-dim tensor."""
        entry = self.metadata.state_dict_metadata[key]
        if isinstance(entry, TensorStorageMetadata):
            tensor = StoredTensor(self, key, entry)
            return tensor if entry.size else tensor.read()
        return self._load(MetadataIndex(key), weights_only=weights_only)

    def read(self, targets: Sequence[tuple[str, Segment]]) -> None:
        """Fill the local part of segments, converting to their dtype and device.

        Each stored chunk that overlaps a target is read once, in the order of the files.
        """
        views: list[dict[Any, torch.Tensor]] = []
        requests: dict[MetadataIndex, list[ReadItem]] = {}
        for number, (key, target) in enumerate(targets):
            parts = list(target.views())
            views.append({torch.Size(offsets): view for (offsets, _), view in parts})
            chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for (offsets, sizes), _ in parts]
            entry = self.metadata.state_dict_metadata[key]
            assert isinstance(entry, TensorStorageMetadata)
            for item in create_read_items_for_chunk_list(key, entry, chunks):
                item = dataclasses.replace(item, dest_index=dataclasses.replace(item.dest_index, index=number))
                requests.setdefault(item.storage_index, []).append(item)
        for index in sorted(requests, key=lambda index: self._range(index)):
            chunk = self._load(index, weights_only=True)
            for item in requests[index]:
                view = views[item.dest_index.index or 0][item.dest_index.offset]
                _narrow(view, item.dest_offsets, item.lengths).copy_(_narrow(chunk, item.storage_offsets, item.lengths))

    def _range(self, index: MetadataIndex) -> tuple[str, int, int]:
        place = self._places[index]
        if getattr(place, "transform_descriptors", None):
            raise ValueError(
                f"`{self.directory}` was written with the stream transforms {place.transform_descriptors}, which are"
                " not supported."
            )
        return place.relative_path, place.offset, place.length

    def _load(self, index: MetadataIndex, *, weights_only: bool | None) -> Any:
        try:
            content = io.BytesIO(self.reader.read(*self._range(index)))
        except (ValueError, OSError) as error:
            raise type(error)(f"{error} It holds `{index.fqn}`.") from error
        return torch.load(content, map_location="cpu", weights_only=weights_only)


def _narrow(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


class StoredTensor(torch.Tensor):
    """A tensor in a checkpoint directory that is read when its values are used.

    Any operation works on it and reads the whole tensor each time, except those that would write into it; shape and
    dtype are known without reading. What loads a part of it calls ``fill``.
    """

    source: StoredTensors
    key: str

    @staticmethod
    def __new__(cls, source: StoredTensors, key: str, entry: TensorStorageMetadata) -> StoredTensor:
        """Make the stand-in of an entry of the metadata."""
        stored: StoredTensor = torch.Tensor._make_wrapper_subclass(
            cls, entry.size, dtype=entry.properties.dtype, device=torch.device("cpu")
        )
        stored.source, stored.key = source, key
        return stored

    def __init__(self, source: StoredTensors, key: str, entry: TensorStorageMetadata) -> None:
        super().__init__()

    def read(self) -> torch.Tensor:
        """Return the whole tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            shape, dtype = self.shape, self.dtype
        whole = torch.empty(shape, dtype=dtype)
        self.source.read([(self.key, Segment(whole.view(-1), 0, shape))])
        return whole

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Read the tensors among the arguments, except to tell shape and dtype."""
        kwargs = kwargs or {}
        if func in METADATA_FUNCTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if _writes(func) and any(isinstance(leaf, StoredTensor) for leaf in tree_leaves(args[:1])):
            # not TypeError: Python would take it as a hint to compute `a = a + b` for `a += b`
            raise RuntimeError(
                f"`{func.__name__}` would write into a tensor of a checkpoint. Write into a `.clone()` of it."
            )
        args, kwargs = tree_map_only(StoredTensor, StoredTensor.read, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Read the tensors among the arguments."""
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


def _writes(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    return name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__"))


def fill(pairs: Sequence[tuple[StoredTensor, Segment]]) -> None:
    """Read this rank's ranges of many tensors."""
    sources = {id(stored.source): stored.source for stored, _ in pairs}
    for identity, source in sources.items():
        source.read([(stored.key, target) for stored, target in pairs if id(stored.source) == identity])
