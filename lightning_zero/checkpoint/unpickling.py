"""Pickles that are read without running code: only names on a list are looked up."""

from __future__ import annotations

import collections
import io
import pathlib
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata

from lightning_zero.checkpoint.checksums import EARLIER

__all__ = ["DynamicScale", "load_deepspeed", "read_index", "require_first_name"]


class _RefusedName(pickle.UnpicklingError):
    """An index names something that could run code; other errors of this class are those of a damaged file."""


def read_index(content: bytes | bytearray, path: Path, weights_only: bool | None) -> Metadata:
    """Return the index of a ``torch.distributed.checkpoint`` directory.

    Args:
        content: The bytes of ``.metadata``.
        path: Its path, for the errors.
        weights_only: As for ``torch.load``. False runs code that the file contains.

    Raises:
        pickle.UnpicklingError: It names something that an index does not need.
        ValueError: It is no index.
    """
    try:
        unpickler = pickle.Unpickler if weights_only is False else _IndexUnpickler
        index = unpickler(io.BytesIO(content)).load()
    except _RefusedName as error:
        raise pickle.UnpicklingError(f"`{path}`: {error}") from error
    except Exception as error:  # a damaged pickle raises anything
        raise ValueError(f"`{path}` is damaged or no index: {type(error).__name__}: {error}") from error
    if not isinstance(index, Metadata):
        raise ValueError(f"`{path}` is no index of a checkpoint: it holds a `{type(index).__name__}`.")
    try:
        is_sound = _is_sound(index)
    except (AttributeError, TypeError):
        is_sound = False
    if not is_sound:
        raise ValueError(f"`{path}` is damaged: a part of the index has the wrong type. {EARLIER}")
    return index


def _is_sound(index: Metadata) -> bool:
    """Say whether the parts of an index that are used have their types: a damaged pickle has anything there."""
    places, paths = (index.storage_data or {}).values(), (index.planner_data or {}).values()
    return (
        all(isinstance(key, str) and _is_sound_entry(entry) for key, entry in index.state_dict_metadata.items())
        and all(isinstance(place.relative_path, str) and _are_sizes(place.offset, place.length) for place in places)
        and all(isinstance(path, tuple) for path in paths)
    )


def _is_sound_entry(entry: Any) -> bool:
    if not isinstance(entry, metadata.TensorStorageMetadata):
        return isinstance(entry, metadata.BytesStorageMetadata)
    return (
        isinstance(entry.properties.dtype, torch.dtype)
        and isinstance(entry.size, tuple)
        and _are_sizes(*entry.size)
        and all(
            len(numbers) == len(entry.size) and all(isinstance(number, int) for number in numbers)
            for chunk in entry.chunks
            for numbers in (chunk.offsets, chunk.sizes)
        )
    )


def _are_sizes(*numbers: Any) -> bool:
    return all(isinstance(number, int) and number >= 0 for number in numbers)


def _memory_format(enum: Any, name: str) -> Any:
    """Stands for ``getattr``, by which Python 3.11.0 to 3.11.3 pickle the members of an enum."""
    if enum is not metadata._MEM_FORMAT_ENCODING or name not in enum.__members__:
        raise _RefusedName(f"the index names `getattr(..., {name!r})`, which could run code when it is read.")
    return enum[name]


_INDEX_NAMES: dict[tuple[str, str], Any] = {
    **{("torch.distributed.checkpoint.metadata", name): getattr(metadata, name) for name in metadata.__all__},
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): metadata._MEM_FORMAT_ENCODING,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("builtins", "getattr"): _memory_format,
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): collections.OrderedDict,
    # where the writer kept its files; not used
    **{(module, "PosixPath"): pathlib.PurePosixPath for module in ("pathlib", "pathlib._local")},
    **{(module, "WindowsPath"): pathlib.PureWindowsPath for module in ("pathlib", "pathlib._local")},
}


class _IndexUnpickler(pickle.Unpickler):
    """Knows the names of ``_INDEX_NAMES`` and torch's dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the object that a name stands for."""
        if (module, name) in _INDEX_NAMES:
            return _INDEX_NAMES[module, name]
        if module == "torch" and isinstance(value := getattr(torch, name, None), torch.dtype):
            return value
        raise _RefusedName(f"the index names `{module}.{name}`, which could run code when it is read.")


# -- DeepSpeed ---------------------------------------------------------------------------------------------------------


class _Inert:
    """Stands for an object of DeepSpeed that holds no tensors; it takes any state and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs


class DynamicScale(_Inert):
    """Stands for ``DynamicLossScaler``; it has the attributes that were saved."""


class _Stage(int):
    """Stands for ``ZeroStageEnum``."""

    MEMBERS = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3}


def _member(enum: Any, name: str) -> Any:
    """Stands for ``getattr``, by which some versions of Python pickle the members of an enum."""
    if enum is not _Stage or name not in _Stage.MEMBERS:
        raise pickle.UnpicklingError(f"`getattr(..., {name!r})` could run code when it is read.")
    return _Stage(_Stage.MEMBERS[name])


_DEEPSPEED_NAMES: dict[str, Any] = {
    "builtins.getattr": _member,
    "deepspeed.runtime.zero.config.ZeroStageEnum": _Stage,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": _Inert,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": DynamicScale,
    "deepspeed.runtime.config.DeepSpeedConfig": _Inert,
    "deepspeed.utils.tensor_fragment.fragment_address": _Inert,
}


def load_deepspeed(path: Path) -> Any:
    """Return the content of a file of DeepSpeed, mapped into memory.

    Objects of its own classes are stand-ins without meaning, but for a ``DynamicScale``.

    Raises:
        pickle.UnpicklingError: It names something else that could run code.
        ValueError: It is damaged.
    """
    stand_ins: list[Any] = [(stand_in, name) for name, stand_in in _DEEPSPEED_NAMES.items()]
    with torch.serialization.safe_globals(stand_ins):
        try:
            unknown = torch.serialization.get_unsafe_globals_in_checkpoint(path)
            if not unknown:
                mapped = zipfile.is_zipfile(path)
                return torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
        except Exception as error:  # a damaged file raises anything
            raise ValueError(f"`{path}` is damaged or no file of torch: {error}") from error
    raise pickle.UnpicklingError(
        f"`{path}` names `{'`, `'.join(unknown)}`, which could run code when it is read. Load it where you trust it,"
        " take these entries out, and save it again."
    )


def require_first_name(path: Path) -> None:
    """Refuse a file of a rank that has another name than it was written with.

    Raises:
        ValueError: It has.
    """
    written = _written_as(path)
    if "mp_rank_" in written and written != path.stem:
        raise ValueError(
            f"`{path}` was written as `{written}{path.suffix}`: it is the file of another rank. Give every file its"
            " first name."
        )


def _written_as(path: Path) -> str:
    """Return the name, without its ending, that a file was written with: ``torch.save`` gives it to a folder inside."""
    if not zipfile.is_zipfile(path):
        return ""
    with zipfile.ZipFile(path) as archive:
        return next(iter(archive.namelist()), "").split("/")[0]
