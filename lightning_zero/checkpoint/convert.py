"""Checkpoints that other strategies wrote, as directories of ours."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

from lightning_zero.checkpoint import directory
from lightning_zero.checkpoint.deepspeed import find_deepspeed, read_deepspeed

__all__ = ["convert", "read_foreign"]

# Entries that a Trainer needs to resume.
EXPECTED: dict[str, Any] = {
    "pytorch-lightning_version": "2.6.0",
    "epoch": 0,
    "global_step": 0,
    "lr_schedulers": [],
}


def convert(checkpoint: str, out: str) -> None:
    """Make a checkpoint directory of one that another strategy wrote, optimizer states included.

    Tensors are read and written one by one, and no code in the files is run. For one file of it: ``consolidate``.

    Args:
        checkpoint: A directory of DeepSpeed's ZeRO stage 1, 2 or 3, alone or under Lightning, or a sharded checkpoint
            of Lightning's strategies for FSDP or of its ``ModelParallelStrategy``, with tensor parallelism or without.
        out: The directory to write.

    Raises:
        FileExistsError: There is something at ``out``.
        FileNotFoundError: There is no checkpoint.
        ValueError: It is damaged, or of another kind.
        pickle.UnpicklingError: It names something that could run code.
    """
    if os.path.lexists(out):
        raise FileExistsError(f"`{out}` exists. Remove it, or choose another name.")
    directory.save(None, read_foreign(Path(checkpoint)), out, full=False)


def read_foreign(path: Path) -> dict[str, Any]:
    """Return a checkpoint of another strategy as a dictionary; its tensors are read when their values are used.

    Raises:
        As ``convert``.
    """
    if not path.exists():
        raise FileNotFoundError(f"There is nothing at `{path}`. Give a directory of DeepSpeed or of Lightning's FSDP.")
    if not path.is_dir():
        raise FileNotFoundError(f"`{path}` is not a directory. Single files need no conversion.")
    folder = find_deepspeed(path)
    content = read_deepspeed(folder) if folder is not None else _read_lightning(path)
    steps = content.get("deepspeed", {}).get("global_steps", 0)
    return {**EXPECTED, "global_step": steps, **content}


def _read_lightning(path: Path) -> dict[str, Any]:
    if (path / directory.FORMAT).is_file():
        raise ValueError(f"`{path}` is a checkpoint of this package: it needs no conversion.")
    try:
        content = directory.load(None, path)
    except pickle.UnpicklingError as error:
        error.__notes__ = [f"`convert` runs no code of `{path}`. Save it again without the objects that are named."]
        raise
    if not content["state_dict"]:
        raise ValueError(
            f"`{path}` has no entry `model` or `state_dict`: it is not a checkpoint of Lightning's strategies for FSDP."
        )
    return content
