"""Segments of flattened parameters in ``torch.distributed.checkpoint`` files, as boxes in the parameter's own shape.

A flat range of a row-major array of ``n`` dimensions is at most ``max(1, 2 n - 1)`` boxes, each contiguous in the flat
order: rows at the start, whole slabs, rows at the end. Saved as boxes, a parameter has its own shape in the metadata,
and every reader of the format can cut it anew: another world size, another stage, a DTensor, torch's own tools.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product, zip_longest
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
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from lightning_zero.boxes import Box, Part, boxes_of_range, covers
from lightning_zero.storage.residence import is_in_memory

__all__ = [
    "Deferred",
    "Segment",
    "SegmentSavePlanner",
    "SegmentWriter",
]

METADATA = ".metadata"
SAME_ENTRIES = "Hooks that change a checkpoint before it is saved must do so on every rank."

KeyPath = tuple[str | int, ...]


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
            The default is the range that the rank holds.
        saved_dtype: Dtype in which it is written, that of ``local`` by default.
        part: The part of the tensor whose flattened elements ``start`` and ``saved`` count, where ranks have parts of
            it; by default the whole tensor.
    """

    local: torch.Tensor
    start: int
    shape: torch.Size
    saved: tuple[int, int] | None = None
    saved_dtype: torch.dtype | None = None
    part: Part | None = None

    @property
    def stop(self) -> int:
        """End of the range in the flattened tensor."""
        return self.start + self.local.numel()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensor."""
        return self.saved_dtype or self.local.dtype

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
            return Segment(self.local[:0].to(self.dtype), 0, self.shape, part=self.part)
        local = self.local[start - self.start : stop - self.start].to(self.dtype)
        return Segment(local, start, self.shape, part=self.part)

    def views(self) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yield the boxes of the held range, each with the view of ``local`` that is its content."""
        position = 0
        for inner in boxes_of_range(self.shape if self.part is None else self.part.shape, self.start, self.stop):
            numel = prod(inner.sizes)
            view = self.local[position : position + numel].view(inner.sizes)
            position += numel
            if self.part is None:
                yield inner, view
                continue
            for place, box in self.part.places(inner):
                yield box, view.narrow(self.part.dim, place.start, place.stop - place.start)

    def runs(self) -> Iterator[Segment]:
        """Yield the ranges of the flattened whole tensor that the held range is, with views of ``local``."""
        if self.part is None:
            yield self
            return
        for (offsets, sizes), view in self.views():
            first = _first_of_run(sizes, self.shape)
            for row, index in zip(_rows(view, first), product(*map(range, sizes[:first])), strict=True):
                place = [offset + extra for offset, extra in zip_longest(offsets, index, fillvalue=0)]
                yield Segment(row, _flat_index(place, self.shape), self.shape)

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse operations on values that are not all here."""
        raise TypeError(_segment_refusal(getattr(func, "__name__", str(func))))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(_segment_refusal(name))


def _rows(view: torch.Tensor, depth: int) -> Iterator[torch.Tensor]:
    """Yield flat views of the elements of a tensor's first ``depth`` dimensions, in flat order."""
    if depth == 0:
        yield view.view(-1)
        return
    for element in view.unbind():
        yield from _rows(element, depth - 1)


def _first_of_run(sizes: Sequence[int], shape: Sequence[int]) -> int:
    """Return the first dimension from which on a box's elements are neighbours in the flattened tensor."""
    first = max(len(sizes) - 1, 0)
    while first > 0 and sizes[first] == shape[first]:
        first -= 1
    return first


def _flat_index(place: Sequence[int], shape: Sequence[int]) -> int:
    index = 0
    for one, size in zip(place, shape, strict=True):
        index = index * size + one
    return index


def _segment_refusal(operation: str) -> str:
    return (
        f"`{operation}` needs the values of a tensor that is sharded over the ranks: this is its stand-in in a"
        " checkpoint that is about to be saved. Use `strategy.full_param(param)` on every rank."
    )


@dataclasses.dataclass(frozen=True)
class Deferred:
    """A tensor that is made when it is written, and not kept."""

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]


class SegmentSavePlanner(DefaultSavePlanner):
    """Plans a flat dictionary of segments, tensors and objects.

    Every rank writes its values in the dictionary: a segment's boxes, and tensors and objects as they are. So a plain
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
                yield _tensor_item(key, value.local.view(value.shape), kind=WriteItemType.TENSOR)
            for (offsets, sizes), view in value.views():
                yield _tensor_item(key, view, kind=WriteItemType.SHARD, offsets=offsets, sizes=sizes, shape=value.shape)
        elif isinstance(value, Deferred):
            outline = torch.empty(value.shape, dtype=value.dtype, device="meta")
            yield _tensor_item(key, outline, kind=WriteItemType.TENSOR)
        elif isinstance(value, torch.Tensor):
            yield _tensor_item(key, value, kind=WriteItemType.TENSOR)
        else:
            yield WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the value of a write item of this rank's plan."""
        value = self.state_dict[index.fqn]
        if isinstance(value, Deferred):
            return value.read()
        if not isinstance(value, Segment):
            return value
        if value.numel() == 0:
            return value.local.view(value.shape)
        view = next(view for (offsets, _), view in value.views() if offsets == tuple(index.offset or ()))
        return view.clone() if not is_in_memory(view) else view  # one after the other


def _tensor_item(
    key: str,
    tensor: torch.Tensor,
    *,
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


def _check_index(metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> None:
    """Check that the chunks of an index cover every tensor, and that all of them were written.

    Raises:
        ValueError: They do not, or were not.
    """
    written = {result.index for part in results for result in part}
    for key, entry in metadata.state_dict_metadata.items():
        chunks = entry.chunks if isinstance(entry, TensorStorageMetadata) else []
        wanted = [MetadataIndex(key, chunk.offsets) for chunk in chunks] or [MetadataIndex(key)]
        missing = next((index for index in wanted if index not in written), None)
        if missing is not None:
            raise ValueError(f"`{key}` was not written from {tuple(missing.offset or ())} on.")
        if isinstance(entry, TensorStorageMetadata) and not covers(
            [(chunk.offsets, chunk.sizes) for chunk in chunks], entry.size
        ):
            raise ValueError(f"No rank has all of `{key}`, which has the shape {tuple(entry.size)}. {SAME_ENTRIES}")


class SegmentWriter(FileSystemWriter):
    """Writes ``.distcp`` files, and enters a value under several names without writing it twice.

    Args:
        path: The directory.
        aliases: Further name of a value -> the name under which it is written.
        order: Names in the order of the module; the metadata lists them in it.
        world_size: How many ranks write.

    Attributes:
        nbytes: End of the last value in each file, on the coordinator.
    """

    def __init__(self, path: Path, *, aliases: Mapping[str, str], order: Sequence[str], world_size: int) -> None:
        super().__init__(path, per_thread_copy_ahead=0)  # it would wait for the device, also with tensors of the host
        self.nbytes: dict[str, int] = {}
        self._aliases = dict(aliases)
        self._order = list(order)
        self._world_size = world_size

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write ``.metadata``. Called on the coordinator.

        Raises:
            ValueError: It would not be whole.
        """
        if len(results) != self._world_size:
            raise ValueError(
                f"The checkpoint of {self._world_size} ranks was planned by {len(results)}, as if the process group had"
                " been destroyed."
            )
        _check_index(metadata, results)
        for place in (result.storage_data for written in results for result in written):
            self.nbytes[place.relative_path] = max(self.nbytes.get(place.relative_path, 0), place.offset + place.length)
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
