"""Weights of a running engine as safetensors files, in the manner of Hugging Face: every rank writes its own bytes."""

from __future__ import annotations

import fnmatch
import os
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from lightning_zero.checkpoint import state
from lightning_zero.checkpoint.paths import (
    beside,
    check_replaceable,
    delete,
    local_path,
    make_folder,
    new_token,
    put_in_place,
)
from lightning_zero.checkpoint.planner import Segment
from lightning_zero.checkpoint.ranks import Ranks
from lightning_zero.checkpoint.safetensors import SafetensorsPlan, parse_size
from lightning_zero.engine.engine import ZeroEngine, engine_of
from lightning_zero.errors import nearest

__all__ = [
    "DTYPES",
    "EXPORTED",
    "DtypeName",
    "Include",
    "choose",
    "dtype_named",
    "export_average",
    "export_safetensors",
    "plan_files",
]

DtypeName = Literal["fp64", "fp32", "bf16", "fp16"]
Include = Literal["trained"] | Sequence[str] | Callable[[str], bool]

EXPORTED = ("*.safetensors", "model.safetensors.index.json")  # files of a folder

DTYPES: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def export_safetensors(
    module: nn.Module | ZeroEngine,
    path: str | os.PathLike[str],
    *,
    dtype: DtypeName | None = None,
    max_shard_size: str | int = "5GB",
    include: Include | None = None,
    prefix: str = "",
    overwrite: bool = False,
) -> None:
    """Write a module's weights into safetensors files, whichever engine holds them.

    Collective: all ranks, outside of ``gathered``. Nothing is gathered: every rank writes its own ranges, through a few
    MiB of host memory. The names are those of ``state_dict``, all names of a tied parameter among them; the values
    those that are stepped (fp32 masters). The files are published atomically by a rename.

    Args:
        module: A module, sharded or not, a part of one, or an engine.
        path: A folder for the files and their index, or one file ending in ``.safetensors``. Rank 0's is used.
        dtype: In which floating-point weights are written. The default is that of the values.
        max_shard_size: Most bytes of a file in a folder. A larger tensor has a file of its own.
        include: ``"trained"``: parameters that require gradients; or patterns of names with ``*`` and ``?``; or a
            function of the name. The default is all, buffers too.
        prefix: Write only weights whose name starts so, without it. Applies after ``include``.
        overwrite: Replace the entry at the path: a file, or a folder of safetensors files and nothing else.

    Raises:
        FileExistsError: There is something at the path, and not ``overwrite``, or a folder with other files.
        ValueError: An option is not known, no weight is included, or a value does not fit into ``dtype``.
        RuntimeError: A step was interrupted, and nothing was loaded since.
        CheckpointError: Writing failed on another rank.
    """
    export_average(
        module,
        None,
        path=path,
        dtype=dtype,
        max_shard_size=max_shard_size,
        include=include,
        prefix=prefix,
        overwrite=overwrite,
    )


def export_average(
    module: nn.Module | ZeroEngine,
    average: nn.Module | None,
    *,
    path: str | os.PathLike[str],
    dtype: DtypeName | None,
    max_shard_size: str | int,
    include: Include | None,
    prefix: str,
    overwrite: bool,
) -> None:
    """Write the average of a module's weights, or the weights where there is none. See ``export_safetensors``.

    Collective: all ranks.

    Args:
        module: The module.
        average: As in ``state.model_state``.
        path: The other arguments are those of ``export_safetensors``.
        dtype: See there.
        max_shard_size: See there.
        include: See there.
        prefix: See there.
        overwrite: See there.
    """
    engine = module if isinstance(module, ZeroEngine) else engine_of(module)
    ranks = Ranks(engine)
    target = local_path(ranks.from_first(os.fspath(path)))
    temporary = beside(target, ranks.from_first(new_token()))
    is_file = target.suffix == ".safetensors"
    if engine is not None and engine.internals.checkpoints.are_rounded and ranks.rank == 0:
        warnings.warn(state.ROUNDED, stacklevel=3)
    folder = temporary.parent if is_file else temporary
    what = f"Exporting `{target}`"
    if engine is not None:
        engine.internals.checkpoints.gather_module_buffers()
    try:
        with ranks.agree(what):
            if engine is not None and "inside a step" in engine.internals.checkpoints.progress.values():
                raise RuntimeError(
                    "a step of an optimizer was interrupted, or has not ended: some parameters have their values from"
                    " before it. Load the last checkpoint before."
                )
            if ranks.rank == 0 and os.path.lexists(target) and not overwrite:
                raise FileExistsError(f"`{target}` exists. Remove it, choose another name, or pass `overwrite=True`.")
            if ranks.rank == 0:
                check_replaceable(target, EXPORTED)
            weights = _weights(engine, module, average, include=include, prefix=prefix)
            plan = plan_files(
                weights, dtype_named(dtype), max_shard_size, file_name=temporary.name if is_file else None
            )
        sums = ranks.gather(zlib.crc32(b"".join(plan.headers.values())))
        with ranks.agree(what):
            if sums[ranks.rank] != sums[0]:
                raise RuntimeError(f"Rank {ranks.rank} has other weights than rank 0: names, shapes or dtypes differ.")
            if ranks.rank == 0:
                make_folder(folder)
                plan.create(folder)
        with ranks.agree(what):
            _write(ranks, plan, folder, weights)
        with ranks.agree(what):
            if ranks.rank == 0:
                check_replaceable(target, EXPORTED)  # again: something may have been put there meanwhile
                put_in_place(temporary, target)
    finally:
        if ranks.rank == 0:
            delete(temporary)


def _weights(
    engine: ZeroEngine | None,
    module: nn.Module | ZeroEngine,
    average: nn.Module | None,
    *,
    include: Include | None,
    prefix: str,
) -> dict[str, Any]:
    if isinstance(module, ZeroEngine):
        assert module.module is not None
        module = module.module
    values = module.state_dict() if engine is None else state.model_state(engine, module, average)
    if isinstance(include, str):
        if include != "trained":
            raise ValueError(f"`include={include!r}` is not known. Use 'trained', a list of patterns, or a function.")
        params = module.named_parameters(remove_duplicate=False)
        trained = {name for name, param in params if param.requires_grad}
        include = trained.__contains__
    weights = choose(values, include, prefix)
    others = [name for name, value in weights.items() if not isinstance(value, torch.Tensor | Segment)]
    if others and (engine is None or engine.rank == 0):
        warnings.warn(f"{', '.join(f'`{name}`' for name in others)}: no tensor, and not exported.", stacklevel=3)
    return {name: value for name, value in weights.items() if name not in others}


def _write(ranks: Ranks, plan: SafetensorsPlan, folder: Path, weights: Mapping[str, Any]) -> None:
    with plan.writer(folder) as writer:
        for name, value in weights.items():
            if isinstance(value, Segment):
                for run in value.to_save().runs():
                    writer.write(name, run.start, run.local)
            elif ranks.rank == 0:
                writer.write(name, 0, value.reshape(-1))


# -- Tensors to write --------------------------------------------------------------------------------------------------


def plan_files(
    tensors: Mapping[str, Any], dtype: torch.dtype | None, max_shard_size: str | int, *, file_name: str | None = None
) -> SafetensorsPlan:
    """Return the layout of the files of tensors, or of anything with a tensor's dtype and shape.

    Args:
        tensors: By name.
        dtype: Of floating-point tensors in the files.
        max_shard_size: Most bytes of a file.
        file_name: The one file. None makes as many as are needed, and an index.
    """
    entries = [
        (name, dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype, tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]
    return SafetensorsPlan(entries, max_shard_size=parse_size(max_shard_size), file_name=file_name)


def dtype_named(name: str | None) -> torch.dtype | None:
    """Return the dtype of ``"fp32"`` and the like.

    Raises:
        ValueError: The name is not known.
    """
    if name is None or name in DTYPES:
        return None if name is None else DTYPES[name]
    raise ValueError(f"`dtype={name!r}` is not known. Use {', '.join(repr(known) for known in DTYPES)} or None.")


def choose(
    weights: Mapping[str, Any], include: Sequence[str] | Callable[[str], bool] | None, prefix: str
) -> dict[str, Any]:
    """Return the entries whose name is included and starts with the prefix, without the prefix.

    Raises:
        ValueError: A pattern fits no name, or nothing is left.
    """
    if callable(include):
        names = [name for name in weights if include(name)]
    else:
        for pattern in include or ():
            if not fnmatch.filter(weights, pattern):
                raise ValueError(f"`include` has `{pattern}`, which fits no weight.{nearest(pattern, weights)}")
        chosen = {name for pattern in include or ["*"] for name in fnmatch.filter(weights, pattern)}
        names = [name for name in weights if name in chosen]
    kept = {name.removeprefix(prefix): weights[name] for name in names if name.startswith(prefix)}
    if not kept:
        tops = sorted({f"`{name.split('.')[0]}.`" for name in weights if "." in name}) or ["nothing with a dot"]
        raise ValueError(f"`include` and `prefix={prefix!r}` leave no weight. Names start with {', '.join(tops)}.")
    return kept
