"""A checkpoint as other programs read it: safetensors files, or one file of ``torch.save``; without a process group."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_zero.checkpoint import directory, torchfile
from lightning_zero.checkpoint.export import EXPORTED, DtypeName, choose, dtype_named, plan_files
from lightning_zero.checkpoint.flat import number_parameters
from lightning_zero.checkpoint.paths import (
    beside,
    check_replaceable,
    delete,
    local_path,
    make_folder,
    new_token,
    put_in_place,
)

__all__ = ["consolidate"]


def consolidate(
    checkpoint: str,
    out: str,
    *,
    format: Literal["safetensors", "ckpt"] = "safetensors",
    dtype: DtypeName | None = None,
    max_shard_size: str = "5GB",
    include: list[str] | str | None = None,
    prefix: str = "",
    overwrite: bool = False,
    weights_only: bool = True,
) -> None:
    """Make files that other programs read of a checkpoint, tensor by tensor.

    Needs memory for the largest tensor at most, for checkpoints of any size.

    Args:
        checkpoint: A checkpoint directory, or a file of a single device.
        out: The path to write: a folder, a file ending in ``.safetensors``, or for ``ckpt`` a file.
        format: ``safetensors``: the weights, in the manner of Hugging Face. ``ckpt``: everything, as a single device
            saves it, for ``load_from_checkpoint`` and for resuming.
        dtype: In which floating-point weights are written. The default is that of the checkpoint.
        max_shard_size: Most bytes of a file in a folder, such as ``5GB``. A larger tensor has a file of its own.
        include: Name of the weights to write, with ``*`` and ``?`` as wildcards, such as ``*.weight``, or a list of
            them: ``[*.weight,*.bias]``. The default is all.
        prefix: Write only weights whose name starts so, without it, such as ``model.``. Applies after ``include``.
        overwrite: Replace the entry at ``out``: a file, or a folder of safetensors files and nothing else.
        weights_only: Refuse to run code that the checkpoint contains. ``false`` is for checkpoints you trust.

    Raises:
        FileExistsError: There is something at ``out``, and not ``overwrite``, or a folder with other files.
        ValueError: ``out`` is, has or lies in the checkpoint; that is damaged; no weight is included; or a value does
            not fit into ``dtype``.
    """
    target = local_path(out)
    if os.path.lexists(target) and not overwrite:
        raise FileExistsError(f"`{out}` exists. Remove it, choose another name, or use `--overwrite=true`.")
    content = _read(checkpoint, weights_only)
    _refuse_source(Path(checkpoint), target)
    check_replaceable(target, EXPORTED)
    weights = choose(content["state_dict"], [include] if isinstance(include, str) else include, prefix)
    make_folder(target.parent)
    temporary = beside(target, new_token())
    try:
        if format == "ckpt":
            _write_file(temporary, content, weights, dtype_named(dtype))
        else:
            is_file = target.suffix == ".safetensors"
            _write_safetensors(temporary, weights, dtype_named(dtype), max_shard_size, is_file=is_file)
        check_replaceable(target, EXPORTED)  # again: something may have been put there meanwhile
        put_in_place(temporary, target)
    finally:
        delete(temporary)


def _refuse_source(checkpoint: Path, target: Path) -> None:
    """Refuse to write over the checkpoint, around it or into it.

    Raises:
        ValueError: That is where ``target`` is.
    """
    source, out = checkpoint.resolve(), target.resolve()
    if source == out or source in out.parents or out in source.parents:
        raise ValueError(f"`{target}` is, has or lies in the checkpoint `{checkpoint}`. Choose another name for `out`.")


def _read(checkpoint: str, weights_only: bool) -> dict[str, Any]:
    try:
        content = directory.load(None, checkpoint, weights_only)
    except pickle.UnpicklingError as error:
        error.__notes__ = [f"If you trust `{checkpoint}`, use `--weights_only=false`: code in it will run."]
        raise
    values, optimizers = content.get("state_dict"), content.get("optimizer_states", [])
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise ValueError(f"`{checkpoint}` is not a checkpoint: it has no `state_dict` of values by name.")
    if not isinstance(optimizers, list) or not all(
        isinstance(state, Mapping)
        and isinstance(state.get("state"), Mapping)
        and isinstance(state.get("param_groups"), list)
        and all(isinstance(group, Mapping) and "params" in group for group in state["param_groups"])
        for state in optimizers
    ):
        raise ValueError(f"`{checkpoint}` is not a checkpoint: its `optimizer_states` are not those of optimizers.")
    return content


def _write_file(
    temporary: Path, content: Mapping[str, Any], weights: Mapping[str, Any], dtype: torch.dtype | None
) -> None:
    whole = number_parameters({**content, "state_dict": dict(weights)})
    tensors = {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)}
    floats = {name: value for name, value in tensors.items() if value.is_floating_point()}
    torchfile.save(
        temporary, whole, {} if dtype is None else {id(value): (name, dtype) for name, value in floats.items()}
    )


def _write_safetensors(
    temporary: Path, weights: Mapping[str, Any], dtype: torch.dtype | None, max_shard_size: str, *, is_file: bool
) -> None:
    tensors = {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)}
    for name in weights.keys() - tensors.keys():
        print(f"`{name}` is not a tensor, and not written.")
    plan = plan_files(tensors, dtype, max_shard_size, file_name=temporary.name if is_file else None)
    folder = temporary.parent if is_file else temporary
    folder.mkdir(exist_ok=True)
    plan.create(folder)
    with plan.writer(folder) as writer:
        for name, tensor in tensors.items():
            for start, values in torchfile.values_of(tensor):
                writer.write(name, start, values)
