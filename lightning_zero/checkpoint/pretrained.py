"""Pretrained weights: every rank reads the bytes of its own segments, straight into its masters.

Note [When values arrive]
    ``load_pretrained`` may be called at any time, and the values are those that ``load_state_dict`` gives to the whole
    module: rounded to the dtype in which the user made the parameter.

    * After ``shard``: at once, into the masters.
    * Before, on the meta device: when the module is sharded. Modules whose tensors are all in the
      file are not initialised, so they need no ``reset_parameters``.
    * Before, on a real device: at once, whole, on the rank that calls. A module that is made on the meta device reads
      less.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_zero.checkpoint.placeholders import StandIn, stand_ins
from lightning_zero.checkpoint.planner import Segment
from lightning_zero.checkpoint.ranks import Ranks
from lightning_zero.checkpoint.state import copy_ranges
from lightning_zero.checkpoint.weightfiles import open_weights
from lightning_zero.engine.access.records import ParameterRecord
from lightning_zero.engine.engine import ZeroEngine, engine_of
from lightning_zero.engine.units.deferred_init import Registration, defer_values

__all__ = ["IncompatibleKeys", "Rename", "load_pretrained"]

Rename = Mapping[str, str] | Callable[[str], str | None]

NAMED = 5  # how many names an error lists


class IncompatibleKeys(NamedTuple):
    """Names that were not loaded; both lists are empty unless ``strict=False``."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_pretrained(
    module: nn.Module | ZeroEngine,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    rename: Rename | None = None,
) -> IncompatibleKeys:
    """Load weights of a file or folder into a module, sharded or not; see Note [When values arrive].

    Collective if the module is sharded: all ranks, outside of ``gathered``; rank 0's path is used. A rank reads the
    headers and the bytes of its own segments. A parameter with several names needs one of them in the file.

    Args:
        module: A module, a part of one, or an engine.
        path: A ``.safetensors`` file; a folder in the manner of Hugging Face, with or without an index; a checkpoint
            directory of this package; a file of ``torch.save`` (``.bin``, ``.ckpt``, ``.pt``) that holds a state
            dictionary, itself or under ``"state_dict"``: it is mapped into memory.
        strict: Refuse names that the module or the file does not have.
        rename: From names in the file to names in the module: a function, which returns None for names to leave out, or
            prefixes and their replacements, such as ``{"transformer.": "model."}``.

    Returns:
        The names that were not loaded.

    Raises:
        FileNotFoundError: There is nothing at the path, or a file that the index names is not there.
        ValueError: A file is damaged; names or shapes do not fit; a value does not fit into a parameter's dtype.
        RuntimeError: The module is whole inside of ``gathered`` or of a step.
        CheckpointError: Another rank had an error.
    """
    engine = module if isinstance(module, ZeroEngine) else engine_of(module)
    if isinstance(module, ZeroEngine):
        engine, module = module, _module_of(module)
    ranks = Ranks(engine)
    source: str = ranks.from_first(os.fspath(path))
    with ranks.agree(f"Loading `{source}`"), torch.device("cpu"):
        if engine is not None:
            _check_is_sharded(engine)
        found, keys = _match(module, source, strict=strict, rename=_renaming(rename), wholes=_whole_shapes(engine))
    values = PretrainedValues(source, tuple(found))
    if engine is not None:
        values.load(engine)
    elif any(place.tensor is not None and place.tensor.is_meta for place in values.places):
        defer_values(module, values)
    else:
        values.load_whole()
    return keys


def _module_of(engine: ZeroEngine) -> nn.Module:
    if engine.module is None:
        raise RuntimeError("The engine holds no module yet. Call `engine.shard(module)` first, or pass the module.")
    return engine.module


def _check_is_sharded(engine: ZeroEngine) -> None:
    for unit in engine.internals.fits.units:
        if unit.is_busy:
            raise RuntimeError(
                f"`load_pretrained` was called while unit `{unit.name}` is in use. Call it outside of `gathered` and of"
                " steps."
            )


# -- Values that were found --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PretrainedValues:
    """The parameters and buffers that a file has values for, with their names in it.

    Attributes:
        path: The file or folder.
        found: A place of the module, and the names in the file that hold its value: several where the file has several
            names of a tied parameter.
    """

    path: str
    found: tuple[tuple[Registration, tuple[str, ...]], ...]

    @property
    def places(self) -> Sequence[Registration]:
        """The parameters and buffers that get values."""
        return [place for place, _ in self.found]

    def load(self, engine: ZeroEngine) -> None:
        """Read this rank's ranges into the masters, and publish them. Collective: all ranks."""
        checkpoints, loaded = engine.internals.checkpoints, []
        with Ranks(engine).agree(f"Loading `{self.path}`"), torch.inference_mode(False), torch.no_grad():
            checkpoints.prepare_load()
            records = {id(record.parameter): record for record in engine.records()}
            for place, sources in self._sources(_whole_shapes(engine)):
                record = records.get(id(place.tensor))
                if record is None:
                    _load_whole(place, sources)
                else:
                    _load_range(record, sources, record.save_range if checkpoints.is_whole else record.own_range)
                    loaded.append(record)
        checkpoints.complete_masters()
        checkpoints.publish(loaded)

    def load_whole(self) -> None:
        """Read everything into the tensors of this process."""
        with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
            for place, sources in self._sources({}):
                _load_whole(place, sources)

    def _sources(self, wholes: Mapping[int, tuple[int, ...]]) -> Iterator[tuple[Registration, list[Any]]]:
        """Yield every place with the tensors that have its value; ``wholes``: shapes of whole parameters, by ``id``."""
        weights = open_weights(Path(self.path))
        for place, names in self.found:
            tensor = place.tensor
            sources = [weights[name] for name in names]
            shape = None if tensor is None else wholes.get(id(tensor), tuple(tensor.shape))
            if any(tuple(source.shape) != shape for source in sources):
                raise ValueError(
                    f"`{place.name}` has the shape {shape} now, and {tuple(sources[0].shape)} in `{self.path}`. Call"
                    " `load_pretrained` after changing the module."
                )
            yield place, sources


def _load_range(record: ParameterRecord, sources: Sequence[Any], wanted: tuple[int, int]) -> None:
    """Read a range of a parameter into its master. Pipeline stages that share it each read their own range."""
    start, stop = wanted
    base = record.own_range[0]
    if start == stop:
        return
    values = torch.empty(stop - start, dtype=record.dtype, device="cpu")
    _read(record.name, sources, Segment(values, start, torch.Size(record.shape), part=record.part))
    record.master()[start - base : stop - base].copy_(values)


def _load_whole(place: Registration, sources: Sequence[Any]) -> None:
    tensor = place.tensor
    assert tensor is not None
    if tensor.is_contiguous() and len(sources) == 1:
        copy_ranges([(place.name, sources[0], Segment(tensor.detach().view(-1), 0, tensor.shape))])
    else:
        values = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu")
        _read(place.name, sources, Segment(values, 0, tensor.shape))
        tensor.copy_(values.view(tensor.shape))


def _read(name: str, sources: Sequence[Any], target: Segment) -> None:
    """Read a range of a tensor into host memory; all its sources must agree."""
    copy_ranges([(name, sources[0], target)])
    for source in sources[1:]:
        again = dataclasses.replace(target, local=torch.empty_like(target.local))
        copy_ranges([(name, source, again)])
        if not torch.equal(again.local, target.local):
            raise ValueError(
                f"`{name}` has several names in the module, and different values under them in the file. Leave all but"
                " one out with `rename=`, or do not tie the parameter."
            )


def _whole_shapes(engine: ZeroEngine | None) -> dict[int, tuple[int, ...]]:
    """Return the shapes of whole parameters, by ``id``, where ranks have parts of them."""
    records = [] if engine is None else engine.records()
    return {id(record.parameter): tuple(record.shape) for record in records if record.part is not None}


# -- Which name goes where ---------------------------------------------------------------------------------------------


def _match(
    module: nn.Module,
    path: str,
    *,
    strict: bool,
    rename: Callable[[Mapping[str, Any]], dict[str, str]],
    wholes: Mapping[int, tuple[int, ...]],
) -> tuple[list[tuple[Registration, tuple[str, ...]]], IncompatibleKeys]:
    """Return which names of a file hold the values of which part of the module. Reads headers only.

    Args:
        module: The module.
        path: The file.
        strict: Refuse names that the module or the file does not have.
        rename: Returns a table from names in the module to names in the file.
        wholes: Shapes of the whole parameters of which the module has parts, by ``id``.
    """
    weights = open_weights(Path(path))
    names = rename(weights)  # in the module -> in the file
    tensors = {name: weights[file_name] for name, file_name in names.items()}
    tensors.update(_tied(module, tensors))
    file_names = {id(value): name for name, value in weights.items()}
    wanted = {
        id(tensor): StandIn(name, wholes.get(id(tensor), tensor.shape), tensor.dtype)
        for group in (module.named_buffers(), module.named_parameters())
        for name, tensor in group
    }
    places: dict[int, Registration] = {}
    for place in _places(module):
        places.setdefault(id(place.tensor), place)
    with stand_ins(module, wanted):
        try:
            missing, unexpected = module.load_state_dict(tensors, strict=False)
        except RuntimeError as error:
            raise ValueError(f"`{path}` does not fit. {error}") from error
    first_names = {name for name, _ in module.named_parameters()} | {name for name, _ in module.named_buffers()}
    missing = [name for name in missing if name in first_names]
    if strict and (missing or unexpected):
        raise ValueError(_misfit(module, path, missing, unexpected))
    found = []
    for key, stand_in in wanted.items():
        if any(id(source) not in file_names for source in stand_in.sources):
            raise ValueError(
                f"`load_state_dict` of the module computes `{stand_in.fqn}` from values of the file, or assigns a new"
                " parameter, so that they cannot be read in parts. Convert the file; only names may change in the"
                " module's hooks, and `assign=True` is not needed."
            )
        sources = tuple(dict.fromkeys(file_names[id(source)] for source in stand_in.sources))
        if sources:
            found.append((places[key], sources))
    return found, IncompatibleKeys(list(missing), list(unexpected))


def _places(module: nn.Module) -> Iterator[Registration]:
    for prefix, submodule in module.named_modules():
        for tensors in (submodule._parameters, submodule._buffers):
            for key, tensor in tensors.items():
                if tensor is not None:
                    yield Registration(f"{prefix}.{key}".lstrip("."), submodule, key)


def _tied(module: nn.Module, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names that a file leaves out because it has another name of the same parameter."""
    aliases: dict[int, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(param), []).append(name)
    added = {}
    for names in aliases.values():
        first = next((name for name in names if name in tensors), None)
        if first is not None:
            added.update({name: tensors[first] for name in names if name not in tensors})
    return added


def _misfit(module: nn.Module, path: str, missing: Sequence[str], unexpected: Sequence[str]) -> str:
    lines = [f"`{path}` does not fit `{type(module).__name__}`."]
    if missing:
        lines.append(f"Not in the file: {_listed(missing, unexpected)}.")
    if unexpected:
        lines.append(f"Not in the module: {_listed(unexpected, missing)}.")
    return " ".join([*lines, "Map names with `rename=`, or pass `strict=False` to load the rest."])


def _listed(names: Sequence[str], others: Sequence[str]) -> str:
    """Return the first names, each with the one that it may be over there."""
    shown = []
    for name in names[:NAMED]:
        close = difflib.get_close_matches(name, others, n=1)
        shown.append(f"`{name}`" + (f" (there is `{close[0]}`)" if close else ""))
    return ", ".join(shown) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def _renaming(rename: Rename | None) -> Callable[[Mapping[str, Any]], dict[str, str]]:
    """Return a function from the names of a file to a table: name in the module -> name in the file."""

    def table(weights: Mapping[str, Any]) -> dict[str, str]:
        if isinstance(rename, Mapping):
            for prefix in rename:
                if not any(name.startswith(prefix) for name in weights):
                    raise ValueError(f"`rename` has the prefix `{prefix}`, and no name in the file starts so.")
        names: dict[str, str] = {}
        for file_name in weights:
            name = _renamed(file_name, rename)
            if name is not None and names.setdefault(name, file_name) != file_name:
                raise ValueError(f"`rename` makes `{name}` of both `{names[name]}` and `{file_name}`.")
        return names

    return table


def _renamed(name: str, rename: Rename | None) -> str | None:
    if rename is None:
        return name
    if not isinstance(rename, Mapping):
        return rename(name)
    prefix = max((prefix for prefix in rename if name.startswith(prefix)), key=len, default=None)
    return name if prefix is None else rename[prefix] + name.removeprefix(prefix)
