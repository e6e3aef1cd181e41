"""Checkpoints on disk: a directory that all ranks write at once, or one file as single-device training writes it.

A directory (format version 1) holds

``*.distcp``, ``.metadata``  tensors and the objects beside them, in the format of ``torch.distributed.checkpoint``:
                             ``model.<name>``, ``optimizer_<i>.state.<name>.<slot>``, ``optimizer_<i>.param_groups``,
                             each tensor in the parameter's own shape; further names of a tied parameter refer to the
                             same bytes. Tensors sharded over ranks elsewhere in the dictionary: ``extra.<path>``
``meta.pt``                  everything else in the dictionary, by ``torch.save``
``format.json``              version of the format, and who wrote it
``checksums``                a CRC-32 per MiB of every other file
"""

from __future__ import annotations

import io
import json
import os
import pickle
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException

from lightning_zero.checkpoint.checksums import block_sums, write_sums
from lightning_zero.checkpoint.paths import beside, delete, local_path, new_token, put_in_place
from lightning_zero.checkpoint.planner import (
    METADATA,
    KeyPath,
    Segment,
    SegmentSavePlanner,
    SegmentWriter,
    StoredTensors,
)
from lightning_zero.checkpoint.ranks import CheckpointError, Ranks, describe

if TYPE_CHECKING:
    from lightning_zero.engine.engine import ParameterRecord, ZeroEngine

__all__ = ["FORMAT_VERSION", "CheckpointError", "by_number", "gather_full", "load", "save", "write_file"]

FORMAT_VERSION = 1
FORMAT = "format.json"
META = "meta.pt"


def save(engine: ZeroEngine, checkpoint: Mapping[str, Any], path: str | os.PathLike[str], full: bool) -> None:
    """Write a checkpoint dictionary, atomically. Collective: all ranks.

    Args:
        engine: Whose segments the dictionary holds.
        checkpoint: May hold ``Segment``s anywhere, under the same names on every rank.
        path: Rank 0's is used. What is there is replaced at the end.
        full: Write one file with whole tensors, as single-device training does, instead of a directory.

    Raises:
        CheckpointError: Writing failed on another rank. What was at the path is untouched.
    """
    ranks = Ranks(engine)
    target = local_path(ranks.from_first(os.fspath(path)))
    temporary = beside(target, ranks.from_first(new_token()))
    try:
        if full:
            whole = gather_full(engine, checkpoint)
            with ranks.agree(f"Saving `{target}`"):
                if ranks.rank == 0:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    write_file(temporary, whole)
        else:
            _write_directory(engine, ranks, checkpoint, target, temporary)
        with ranks.agree(f"Saving `{target}`"):
            if ranks.rank == 0:
                put_in_place(temporary, target)
    finally:
        if ranks.rank == 0:
            delete(temporary)


# -- The dictionary and its flat form ----------------------------------------------------------------------------------


class _Flat:
    """A checkpoint dictionary, cut into what ``.distcp`` files hold and what ``meta.pt`` holds.

    Attributes:
        values: Segments of every rank; tensors and objects of the rank that writes them.
        aliases: Further name of a segment -> its name in ``values``.
        paths: For every name its place in the nested dictionary, those of aliases included.
        meta: What is left, with a ``_Reference`` in place of each segment.
    """

    def __init__(self, engine: ZeroEngine, checkpoint: Mapping[str, Any]) -> None:
        self.values: dict[str, Any] = {}
        self.aliases: dict[str, str] = {}
        self.paths: dict[str, KeyPath] = {}
        self._rank = engine.communicator.rank
        self._names: dict[int, str] = {}  # of segments, by identity
        # Ranks that hold the first element write what is not sharded of an optimizer's state: only they surely have it.
        self._writes = {record.name for record in engine.records() if _writes_first(record, self._rank)}
        self.meta = {key: self._take(key, value) for key, value in checkpoint.items()}
        self.meta = {key: value for key, value in self.meta.items() if value is not _TAKEN}

    def _take(self, key: str, value: Any) -> Any:
        if key == "state_dict":
            for name, item in value.items():
                self._add(("model", name), item, writes=self._rank == 0)
            return _TAKEN
        if key == "optimizer_states" and value and all(_is_named(state) for state in value):
            for number, state in enumerate(value):
                self._take_optimizer(f"optimizer_{number}", state)
            return _TAKEN
        return self._without_segments((key,), value)

    def _take_optimizer(self, key: str, state: Mapping[str, Any]) -> None:
        for name, slots in state["state"].items():
            for slot, item in slots.items():
                self._add((key, "state", name, slot), item, writes=name in self._writes)
        for part, item in state.items():
            if part != "state":
                self._add((key, part), item, writes=self._rank == 0)

    def _add(self, path: KeyPath, item: Any, *, writes: bool) -> str:
        key = ".".join(str(part) for part in path)
        if isinstance(item, Segment):
            name = self._names.setdefault(id(item), key)
            if name != key:
                self.aliases[key] = name
            else:
                self.values[key] = item
            self.paths[key] = path
        elif writes:
            self.values[key] = item
            self.paths[key] = path
        return key

    def _without_segments(self, path: KeyPath, value: Any) -> Any:
        if isinstance(value, Segment):
            return {_REFERENCE: self._add(("extra", *path), value, writes=True)}
        if isinstance(value, dict):
            items = {key: self._without_segments((*path, str(key)), item) for key, item in value.items()}
            return value if all(items[key] is item for key, item in value.items()) else items
        if isinstance(value, list | tuple):
            parts = [self._without_segments((*path, str(index)), item) for index, item in enumerate(value)]
            unchanged = all(part is item for part, item in zip(parts, value, strict=True))
            return value if unchanged else (parts if isinstance(value, list) else tuple(parts))
        return value


_TAKEN = object()
_REFERENCE = "lightning_zero.tensor"  # the key of a dictionary in ``meta.pt`` that stands for a tensor


def _is_named(state: Any) -> bool:
    return (
        isinstance(state, Mapping)
        and "state" in state
        and all(isinstance(name, str) and isinstance(slots, Mapping) for name, slots in state["state"].items())
    )


def _writes_first(record: ParameterRecord, rank: int) -> bool:
    start, stop = record.save_range
    return (start == 0 and stop > 0) or (rank == 0 and prod(record.shape) == 0)


# -- A directory -------------------------------------------------------------------------------------------------------


def _write_directory(
    engine: ZeroEngine, ranks: Ranks, checkpoint: Mapping[str, Any], target: Path, temporary: Path
) -> None:
    what = f"Saving `{target}`"
    with ranks.agree(what):
        flat = _Flat(engine, checkpoint)
        if ranks.rank == 0:
            temporary.mkdir(parents=True)
            write_file(temporary / META, flat.meta)
            note = {"format": "lightning_zero", "version": FORMAT_VERSION, "world_size": ranks.world_size}
            (temporary / FORMAT).write_text(json.dumps({**note, "stage": engine.stage}))
    _write_tensors(ranks, flat, temporary, what)
    with ranks.agree(what):
        sums = {path.name: block_sums(path) for path in temporary.glob(f"__{ranks.rank}_*.distcp")}
        if ranks.rank == 0:
            sums.update({name: block_sums(temporary / name) for name in (METADATA, META, FORMAT)})
    collected = ranks.gather(sums)
    with ranks.agree(what):
        if ranks.rank == 0:
            write_sums(temporary, {name: one for sums in collected for name, one in sums.items()})


def _write_tensors(ranks: Ranks, flat: _Flat, temporary: Path, what: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            state_dict_saver.save(
                flat.values,
                storage_writer=SegmentWriter(temporary, aliases=flat.aliases, order=list(flat.paths)),
                planner=SegmentSavePlanner(flat.paths),
                process_group=ranks.group,
                no_dist=ranks.world_size == 1,
            )
    except CheckpointException as error:  # on every rank
        details = "; ".join(f"rank {rank}: {describe(failure[0])}" for rank, failure in error.failures.items())
        raise CheckpointError(f"{what} failed on {details}") from error


def write_file(path: Path, content: Any) -> None:
    """Save with ``torch.save`` and wait for the disk."""
    with path.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


# -- One file ----------------------------------------------------------------------------------------------------------


def gather_full(engine: ZeroEngine, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dictionary as single-device training saves it, on rank 0; elsewhere an empty one.

    Tensors are whole and in host memory, gathered one after the other; the states of optimizers are under the numbers
    that torch gives to parameters. Collective: all ranks.
    """
    ranks = Ranks(engine)
    with ranks.agree("Gathering a checkpoint"):
        flat = _Flat(engine, checkpoint)
        table = {key: _Piece.of(value, ranks.rank) for key, value in flat.values.items()}
    tables = ranks.gather((table, flat.paths))
    wholes = {
        key: _gather_whole(ranks, [table.get(key) for table, _ in tables], flat.values.get(key))
        for key in dict.fromkeys(key for table, _ in tables for key in table)
    }
    if ranks.rank != 0:
        return {}
    paths = {key: path for _, paths in tables for key, path in paths.items()}
    values = {key: wholes[flat.aliases.get(key, key)] for key in paths}
    whole = _rebuild(flat.meta, paths, values)
    if any(str(path[0]).startswith("optimizer_") for path in paths.values()):
        whole["optimizer_states"] = [by_number(state) for state in whole["optimizer_states"]]
    return whole


@dataclass(frozen=True)
class _Piece:
    """What a rank has of a value: a range of a tensor, or the value itself, which travels if it is not on rank 0."""

    dtype: torch.dtype | None = None
    shape: torch.Size | None = None
    saved: tuple[int, int] = (0, 0)
    is_all: bool = False
    value: Any = None

    @classmethod
    def of(cls, value: Any, rank: int) -> _Piece:
        if not isinstance(value, Segment):
            return cls(value=None if rank == 0 else _on_host(value))
        part = value.to_save()
        is_all = (value.start, value.stop) == (0, value.numel())
        return cls(dtype=value.dtype, shape=value.shape, saved=(part.start, part.stop), is_all=is_all)


def _on_host(value: Any) -> Any:
    """Return a tensor as a copy in host memory with a storage of its own, and other values as they are."""
    return value.detach().to("cpu", copy=True).contiguous() if isinstance(value, torch.Tensor) else value


def _gather_whole(ranks: Ranks, pieces: Sequence[_Piece | None], mine: Any) -> Any:
    """Return a whole value on rank 0. Collective: the ranks that have a piece of it, and rank 0."""
    known = next(piece for piece in pieces if piece is not None)
    if known.shape is None or known.dtype is None:
        return _on_host(mine) if pieces[0] is not None else known.value
    if pieces[0] is not None and pieces[0].is_all:
        return _on_host(mine.local).view(known.shape) if ranks.rank == 0 else None
    if ranks.rank != 0:
        part = mine.to_save() if isinstance(mine, Segment) else None
        if part is not None and part.local.numel():
            dist.send(part.local.detach().cpu(), group=ranks.group, group_dst=0)
        return None
    whole = torch.empty(known.shape, dtype=known.dtype)
    flat = whole.view(-1)
    for rank, piece in enumerate(pieces):
        if piece is not None and piece.saved[0] < piece.saved[1]:
            target = flat[slice(*piece.saved)]
            if rank == 0:
                target.copy_(mine.to_save().local)
            else:
                dist.recv(target, group=ranks.group, group_src=rank)
    return whole


def by_number(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state as torch saves it: parameters are counted through the groups."""
    numbers = {
        name: number for number, name in enumerate(name for group in state["param_groups"] for name in group["params"])
    }
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in state["param_groups"]]
    slots = {numbers[name]: state["state"][name] for name in numbers if name in state["state"]}
    return {**state, "state": slots, "param_groups": groups}


# -- Reading -----------------------------------------------------------------------------------------------------------


def load(engine: ZeroEngine | None, path: str | os.PathLike[str], weights_only: bool | None = None) -> dict[str, Any]:
    """Read a checkpoint dictionary: a directory of any stage and number of ranks, or a single file.

    Tensors of a directory are ``StoredTensor``s, which are read when their values are used; those of a file are mapped
    into memory. Collective: all ranks, unless there is no engine.

    Args:
        engine: Its ranks agree on rank 0's path, and on errors. None reads without communication.
        path: The directory or file.
        weights_only: As for ``torch.load``: refuse to run code that the file contains, which is the default.

    Raises:
        FileNotFoundError: There is no checkpoint at the path.
        ValueError: It is damaged, or of a newer format.
    """
    if engine is None:
        return _read(local_path(os.fspath(path)), weights_only)
    ranks = Ranks(engine)
    source = local_path(ranks.from_first(os.fspath(path)))
    with ranks.agree(f"Loading `{source}`"):
        return _read(source, weights_only)


def _read(path: Path, weights_only: bool | None) -> dict[str, Any]:
    try:
        if path.is_dir():
            return _read_directory(path, weights_only)
        mapped = zipfile.is_zipfile(path)
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", mmap=mapped, weights_only=weights_only)
        return checkpoint
    except pickle.UnpicklingError as error:
        error.add_note(f"If you trust `{path}`, load it with `ZeroStrategy(weights_only=False)`.")
        raise


def _read_directory(path: Path, weights_only: bool | None) -> dict[str, Any]:
    if not (path / METADATA).is_file():
        raise FileNotFoundError(f"`{path}` is not a checkpoint: it has no `{METADATA}`.")
    stored = StoredTensors(path)
    if (path / FORMAT).is_file():
        version = json.loads(stored.reader.read(FORMAT))["version"]
        if version > FORMAT_VERSION:
            raise ValueError(
                f"`{path}` has the format version {version}, and this release reads versions up to {FORMAT_VERSION}."
                " Update lightning-zero."
            )
    meta: dict[str, Any] = {}
    if (path / META).is_file():
        content = io.BytesIO(stored.reader.read(META))
        meta = torch.load(content, map_location="cpu", weights_only=weights_only)
    keys = list(stored.keys())
    values = {key: stored.open(key, weights_only=weights_only) for key in keys}
    return _rebuild(meta, {key: stored.path(key) for key in keys}, values)


def _rebuild(meta: Mapping[str, Any], paths: Mapping[str, KeyPath], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dictionary that was saved. The inverse of ``_Flat``."""
    nested: dict[str, Any] = {}
    for key, path in paths.items():
        set_element(nested, path, values[key])
    checkpoint = {key: _with_tensors(item, values) for key, item in meta.items()}
    checkpoint["state_dict"] = nested.get("model", {})
    optimizers = [nested[f"optimizer_{number}"] for number in range(len(nested)) if f"optimizer_{number}" in nested]
    if optimizers:
        checkpoint["optimizer_states"] = [{**state, "state": state.get("state", {})} for state in optimizers]
    return checkpoint


def _with_tensors(item: Any, values: Mapping[str, Any]) -> Any:
    """Put tensors in place of the references to them."""
    if isinstance(item, dict):
        if item.keys() == {_REFERENCE}:
            return values[item[_REFERENCE]]
        parts = {key: _with_tensors(part, values) for key, part in item.items()}
        return item if all(parts[key] is part for key, part in item.items()) else parts
    if isinstance(item, list | tuple):
        elements = [_with_tensors(part, values) for part in item]
        if all(element is part for element, part in zip(elements, item, strict=True)):
            return item
        return elements if isinstance(item, list) else tuple(elements)
    return item
