"""Checkpoints on disk: a directory that all ranks write at once, or one file as single-device training writes it.

A directory (format version 1) holds

``*.distcp``, ``.metadata``  tensors and the objects beside them, in the format of ``torch.distributed.checkpoint``:
                             ``model.<name>``, ``optimizer_<i>.state.<name>.<slot>``, ``optimizer_<i>.param_groups``,
                             each tensor in the parameter's own shape; further names of a tied parameter refer to the
                             same bytes. Tensors sharded over ranks elsewhere in the dictionary: ``extra.<path>``
``meta.pt``                  everything else in the dictionary, by ``torch.save``
``format.json``              version of the format, and who wrote it
``checksums``                a CRC-32 per MiB of every other file, and one of itself
"""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import shutil
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from lightning_zero.boxes import Part, boxes_in, covers
from lightning_zero.checkpoint import torchfile
from lightning_zero.checkpoint.checksums import CHECKSUMS, EARLIER, BlockReader, block_sums, check_archive, write_sums
from lightning_zero.checkpoint.flat import FlatCheckpoint, number_parameters, rebuild
from lightning_zero.checkpoint.paths import (
    beside,
    check_replaceable,
    delete,
    local_path,
    make_folder,
    new_token,
    put_in_place,
    remove_path,
)
from lightning_zero.checkpoint.planner import (
    METADATA,
    SAME_ENTRIES,
    Deferred,
    Segment,
    SegmentSavePlanner,
    SegmentWriter,
)
from lightning_zero.checkpoint.ranks import CheckpointError, Ranks, describe
from lightning_zero.checkpoint.stored import StoredTensor, StoredTensors

if TYPE_CHECKING:
    from lightning_zero.engine.engine import ZeroEngine

__all__ = [
    "FORMAT_VERSION",
    "Prepared",
    "check_is_trainers",
    "gather_full",
    "is_directory",
    "load",
    "prepare",
    "remove",
    "save",
    "write",
    "write_file",
]

FORMAT_VERSION = 1
FORMAT = "format.json"
META = "meta.pt"
FILES = (METADATA, META, FORMAT, CHECKSUMS, "*.distcp")  # of a directory; without the first it is none


def save(engine: ZeroEngine | None, checkpoint: Mapping[str, Any], path: str | os.PathLike[str], full: bool) -> None:
    """Write a checkpoint dictionary, atomically. Collective: all ranks.

    Args:
        engine: Whose segments the dictionary holds. Without one this process writes a directory alone.
        checkpoint: May hold ``Segment``s anywhere, under the same names on every rank.
        path: Rank 0's is used. A checkpoint there is replaced at the end.
        full: Write one file with whole tensors, as single-device training does, instead of a directory.

    Raises:
        CheckpointError: Writing failed on another rank. A checkpoint at the path is untouched.
    """
    write(prepare(engine, checkpoint, path, full), Ranks(engine))


@dataclass
class Prepared:
    """A rank's part of a checkpoint. The values of a directory are the live ones until they are detached.

    Attributes:
        target: The path, the same on all ranks.
        temporary: Where it is written until it is whole.
        stage: ZeRO stage, for the note in the directory; None if no engine wrote it.
        flat: The rank's part of a directory, or None for a file.
        whole: The content of the file, on rank 0; made of copies in host memory.
    """

    target: Path
    temporary: Path
    stage: int | None
    flat: FlatCheckpoint | None
    whole: dict[str, Any]

    def detach(self, to_host: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]) -> None:
        """Make it independent of the training that goes on.

        Args:
            to_host: Returns copies of 1-D tensors in host memory.
        """
        if self.flat is not None:
            self.flat.detach(to_host)


def prepare(
    engine: ZeroEngine | None, checkpoint: Mapping[str, Any], path: str | os.PathLike[str], full: bool
) -> Prepared:
    """Take this rank's part of a checkpoint; see ``save``. Collective: all ranks."""
    ranks = Ranks(engine)
    with ranks.agree("Saving"):
        target = local_path(os.fspath(path))
    target, token = ranks.from_first((target, new_token()))
    stage = None if engine is None else engine.stage
    with ranks.agree(f"Saving `{target}`"):
        if ranks.rank == 0:
            _check_target(target)
    if full:
        assert engine is not None
        return Prepared(target, beside(target, token), stage, None, gather_full(engine, checkpoint))
    with ranks.agree(f"Saving `{target}`"):
        flat = FlatCheckpoint(engine, checkpoint)
    return Prepared(target, beside(target, token), stage, flat, {})


def write(prepared: Prepared, ranks: Ranks) -> None:
    """Write a prepared checkpoint, and give it its name at the end. Collective: all ranks."""
    target, temporary = prepared.target, prepared.temporary
    try:
        if prepared.flat is None:
            with ranks.agree(f"Saving `{target}`"):
                if ranks.rank == 0:
                    make_folder(target.parent)
                    write_file(temporary, prepared.whole)
        else:
            _write_directory(ranks, prepared.flat, target=target, temporary=temporary, stage=prepared.stage)
        with ranks.agree(f"Saving `{target}`"):
            if ranks.rank == 0:
                _check_target(target)  # again: something may have been put there meanwhile
                put_in_place(temporary, target)
    finally:
        if ranks.rank == 0:
            delete(temporary)


def _check_target(target: Path) -> None:
    """Refuse to replace a folder that is no checkpoint, or has something beside the checkpoint.

    Raises:
        FileExistsError: It has.
    """
    check_replaceable(target, FILES if (target / METADATA).is_file() else ())


def is_directory(path: str | os.PathLike[str]) -> bool:
    """Say whether a path is that of a checkpoint that is a directory."""
    return (Path(os.fspath(path)) / METADATA).is_file()


def remove(path: str | os.PathLike[str]) -> None:
    """Remove a checkpoint. Other files in its folder stay there, and a warning says so."""
    remove_path(path, FILES)


# -- A directory -------------------------------------------------------------------------------------------------------


def _write_directory(ranks: Ranks, flat: FlatCheckpoint, *, target: Path, temporary: Path, stage: int | None) -> None:
    what = f"Saving `{target}`"
    with ranks.agree(what):
        if ranks.rank == 0:
            make_folder(temporary.parent)
            temporary.mkdir()
            write_file(temporary / META, flat.meta)
            note = {"format": "lightning_zero", "version": FORMAT_VERSION, "world_size": ranks.world_size}
            (temporary / FORMAT).write_text(json.dumps({**note, "stage": stage}))
    files = _write_tensors(ranks, flat, temporary, what)
    with ranks.agree(what):
        sums = {path.name: block_sums(path) for path in temporary.glob(f"__{ranks.rank}_*.distcp")}
        if ranks.rank == 0:
            sums.update({name: block_sums(temporary / name) for name in (METADATA, META, FORMAT)})
    collected = ranks.gather(sums)
    with ranks.agree(what):
        if ranks.rank == 0:
            _check_files(temporary, files)
            write_sums(temporary, {name: one for sums in collected for name, one in sums.items()})


def _write_tensors(ranks: Ranks, flat: FlatCheckpoint, temporary: Path, what: str) -> dict[str, int]:
    """Write the ``.distcp`` files and the index. Return the bytes of each file that the index names, on rank 0."""
    ranks.check_group()
    writer = SegmentWriter(temporary, aliases=flat.aliases, order=list(flat.paths), world_size=ranks.world_size)
    try:
        with warnings.catch_warnings():
            if ranks.world_size == 1:  # of several ranks it says that the others are left out
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            state_dict_saver.save(
                {key: _deferred(value) for key, value in flat.values.items()},
                storage_writer=writer,
                planner=SegmentSavePlanner(flat.paths),
                process_group=ranks.group,
                no_dist=ranks.world_size == 1,
            )
    except CheckpointException as error:  # on every rank
        details = "; ".join(f"rank {rank}: {describe(failure[0])}" for rank, failure in error.failures.items())
        raise CheckpointError(f"{what} failed on {details}") from error
    return writer.nbytes


def _check_files(temporary: Path, files: Mapping[str, int]) -> None:
    """Check that this rank sees all bytes that the index tells of.

    Raises:
        CheckpointError: A file is missing, or too short.
    """
    for name, nbytes in files.items():
        path = temporary / name
        if not path.is_file() or path.stat().st_size < nbytes:
            raise CheckpointError(
                f"`{path}` is not there as it was written. A directory needs a file system that all ranks see. Use such"
                " a path, or `ZeroStrategy(state_dict_type='full')`, which writes one file on rank 0."
            )


def _deferred(value: Any) -> Any:
    return Deferred(value.shape, value.dtype, value.read) if isinstance(value, StoredTensor) else value


def write_file(path: Path, content: Any) -> None:
    """Save with ``torch.save`` and wait for the disk.

    Raises:
        OSError: The file could not be written.
    """
    with path.open("wb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:  # torch's writer hides the system's error
            free = shutil.disk_usage(path.parent).free
            raise OSError(f"`{path}` could not be written; {free} bytes are free on its disk: {error}") from error
        file.flush()
        os.fsync(file.fileno())


# -- One file ----------------------------------------------------------------------------------------------------------


def gather_full(engine: ZeroEngine, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dictionary as single-device training saves it, on rank 0; elsewhere an empty one.

    Everything in it is a copy. Tensors are whole and in host memory, gathered one after the other; the states of
    optimizers are under the numbers that torch gives to parameters. Collective: all ranks.

    Raises:
        CheckpointError: The ranks do not have all of a tensor.
    """
    ranks = Ranks(engine)
    with ranks.agree("Gathering a checkpoint"):
        flat = FlatCheckpoint(engine, checkpoint)
        table = {key: _Piece.of(value, ranks.rank) for key, value in flat.values.items()}
    tables = ranks.gather((table, flat.paths))
    for key in dict.fromkeys(key for table, _ in tables for key in table):
        _check_pieces(key, [table[key] for table, _ in tables if key in table])
    wholes = {
        key: _gather_whole(ranks, [table.get(key) for table, _ in tables], flat.values.get(key))
        for key in dict.fromkeys(key for table, _ in tables for key in table)
    }
    if ranks.rank != 0:
        return {}
    paths = {key: path for _, paths in tables for key, path in paths.items()}
    values = {key: wholes[flat.aliases.get(key, key)] for key in paths}
    whole = rebuild(copy.deepcopy(flat.meta), paths, values)
    if any(str(path[0]).startswith("optimizer_") for path in paths.values()):
        return number_parameters(whole)
    return whole


@dataclass(frozen=True)
class _Piece:
    """A rank's part of a value: a range of a tensor, or the value itself, which travels if it is not on rank 0."""

    dtype: torch.dtype | None = None
    shape: torch.Size | None = None
    saved: tuple[int, int] = (0, 0)
    part: Part | None = None
    is_all: bool = False
    value: Any = None

    @classmethod
    def of(cls, value: Any, rank: int) -> _Piece:
        if not isinstance(value, Segment):
            return cls(value=None if rank == 0 else _on_host(value))
        mine = value.to_save()
        is_all = value.part is None and (value.start, value.stop) == (0, value.numel())
        saved = mine.start, mine.stop
        return cls(dtype=value.dtype, shape=value.shape, saved=saved, part=value.part, is_all=is_all)


def _check_pieces(key: str, pieces: Sequence[_Piece]) -> None:
    """Check that the ranks have all of a tensor; the same on every rank.

    Raises:
        CheckpointError: They do not.
    """
    shape = pieces[0].shape
    if shape is None:
        return
    if any(piece.part is not None for piece in pieces):
        parts = [box for piece in pieces for box in boxes_in(shape, piece.part, *piece.saved)]
        is_whole = covers(parts, shape)
    else:
        ranges = [((start,), (stop - start,)) for start, stop in (piece.saved for piece in pieces)]
        is_whole = covers(ranges, [shape.numel()])
    if not is_whole:
        raise CheckpointError(f"No rank has all of `{key}`, which has the shape {tuple(shape)}. {SAME_ENTRIES}")


def _on_host(value: Any) -> Any:
    """Return a copy; of a tensor in host memory, with a storage of its own."""
    if isinstance(value, StoredTensor):
        return value.read()
    return value.detach().to("cpu", copy=True).contiguous() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _gather_whole(ranks: Ranks, pieces: Sequence[_Piece | None], mine: Any) -> Any:
    """Return a whole value on rank 0. Collective: the ranks that have a piece of it, and rank 0."""
    known = next(piece for piece in pieces if piece is not None)
    if known.shape is None or known.dtype is None:
        return _on_host(mine) if pieces[0] is not None else known.value
    if pieces[0] is not None and pieces[0].is_all:
        return _on_host(mine.local.to(known.dtype)).view(known.shape) if ranks.rank == 0 else None
    if ranks.rank != 0:
        part = mine.to_save() if isinstance(mine, Segment) else None
        if part is not None and part.local.numel():
            dist.send(part.local.detach().cpu(), group=ranks.group, group_dst=0)
        return None
    whole = torch.empty(known.shape, dtype=known.dtype, device="cpu")
    flat = whole.view(-1)
    for rank, piece in enumerate(pieces):
        if piece is None or piece.saved[0] >= piece.saved[1]:
            continue
        if rank == 0:
            values = mine.to_save().local
        elif piece.part is None:  # no second copy of a part of a large tensor
            dist.recv(flat[slice(*piece.saved)], group=ranks.group, group_src=rank)
            continue
        else:
            values = torch.empty(piece.saved[1] - piece.saved[0], dtype=known.dtype, device="cpu")
            dist.recv(values, group=ranks.group, group_src=rank)
        for run in Segment(values, piece.saved[0], known.shape, part=piece.part).runs():
            flat[run.start : run.stop].copy_(run.local)
    return whole


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
        return _read(local_path(os.fspath(path)), weights_only, 0, 1)
    ranks = Ranks(engine)
    source = local_path(ranks.from_first(os.fspath(path)))
    with ranks.agree(f"Loading `{source}`"):
        return _read(source, weights_only, ranks.rank, ranks.world_size)


def check_is_trainers(checkpoint: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Refuse a dictionary that no Trainer has saved.

    Raises:
        ValueError: It has no version of Lightning.
    """
    if "pytorch-lightning_version" not in checkpoint:
        raise ValueError(
            f"`{os.fspath(path)}` is no checkpoint of a Trainer: it has the keys {_some(checkpoint)}, and no"
            " `pytorch-lightning_version`. `lightning_zero.load_pretrained(module, path)` loads weights alone."
        )


def _some(names: Iterable[Any]) -> str:
    found = [f"`{name}`" for name in names]
    return ", ".join(found[:5]) + (", …" if len(found) > 5 else "")


def _read(path: Path, weights_only: bool | None, rank: int, world_size: int) -> dict[str, Any]:
    if not path.is_dir():
        torchfile.refuse_others(path)
        if zipfile.is_zipfile(path):
            check_archive(path, rank, world_size)
        return torchfile.load(path, weights_only)
    try:
        return _read_directory(path, weights_only)
    except pickle.UnpicklingError as error:
        error.add_note(f"If you trust `{path}`, load it with `ZeroStrategy(weights_only=False)`.")
        raise


def _read_directory(path: Path, weights_only: bool | None) -> dict[str, Any]:
    if not (path / METADATA).is_file():
        raise FileNotFoundError(f"`{path}` is not a checkpoint: it has no `{METADATA}`. {torchfile.EXPECTED}")
    reader = _open(path)
    stored = StoredTensors(path, reader, weights_only)
    meta: dict[str, Any] = {}
    if (path / META).is_file():
        meta = _read_meta(path / META, reader, weights_only)
    keys = list(stored.keys())
    values = {key: stored.open(key, weights_only=weights_only) for key in keys}
    try:
        return rebuild(meta, {key: stored.path(key) for key in keys}, values)
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise ValueError(
            f"`{path / METADATA}` is damaged: the places of its values contradict each other or `{META}`"
            f" ({type(error).__name__}: {error}). {EARLIER}"
        ) from error


def _read_meta(path: Path, reader: BlockReader, weights_only: bool | None) -> dict[str, Any]:
    content = io.BytesIO(reader.read(META))
    try:
        meta = torch.load(content, map_location="cpu", weights_only=weights_only)
    except (pickle.UnpicklingError, MemoryError):
        raise
    except Exception as error:  # a damaged pickle raises anything
        raise ValueError(f"`{path}` is damaged: {type(error).__name__}: {error} {EARLIER}") from error
    if not isinstance(meta, dict):
        raise ValueError(f"`{path}` is damaged: it holds a `{type(meta).__name__}`. {EARLIER}")
    return meta


def _open(path: Path) -> BlockReader:
    """Return the reader of a directory, after checking that this release knows its format."""
    reader = BlockReader(path)
    if not (path / FORMAT).is_file():
        return reader  # another tool's
    try:
        version = int(json.loads(reader.read(FORMAT))["version"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"`{path / FORMAT}` is damaged: it has no version of the format. {EARLIER}") from error
    if version > FORMAT_VERSION:
        raise ValueError(
            f"`{path}` has the format version {version}, and this release reads versions up to {FORMAT_VERSION}."
            " Update lightning-zero."
        )
    if not (path / CHECKSUMS).is_file():
        raise FileNotFoundError(f"`{path / CHECKSUMS}` is missing, so `{path}` is not whole. {EARLIER}")
    return reader
