"""Checkpoints that other strategies wrote, as directories of ours."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_zero.checkpoint import directory
from lightning_zero.checkpoint.autotp import CutRules
from lightning_zero.checkpoint.deepspeed import find_deepspeed, read_deepspeed
from lightning_zero.checkpoint.joined import Copies

__all__ = ["convert", "read_foreign"]

# Entries that a Trainer needs to resume.
EXPECTED: dict[str, Any] = {
    "pytorch-lightning_version": "2.6.0",
    "epoch": 0,
    "global_step": 0,
    "lr_schedulers": [],
}


def convert(
    checkpoint: str, out: str, tensor_plan: dict[str, Any] | str | None = None, copies: Copies = "equal"
) -> None:
    """Make a checkpoint directory of one that another strategy wrote, optimizer states included.

    Tensors are read and written one by one, and no code in the files is run. For one file of it: ``consolidate``.

    Args:
        checkpoint: A directory of DeepSpeed's ZeRO stage 1, 2 or 3, alone or under Lightning, with AutoTP or without;
            of its mixtures of experts; or a sharded checkpoint of Lightning's strategies for FSDP or of its
            ``ModelParallelStrategy``, with tensor parallelism or without.
        out: The directory to write.
        tensor_plan: For checkpoints of AutoTP that do not say how parameters are cut (before DeepSpeed 0.19.8): a YAML
            file, or a dict, with ``rules`` from name patterns to ``column``, ``row``, ``vocab``, ``whole``, ``{packed:
            sections}`` or ``{cut: dim}``.
        copies: For values that every tensor rank of AutoTP has: ``equal`` refuses those that differ between ranks,
            ``first`` takes those of the first rank.

    Raises:
        FileExistsError: There is something at ``out``.
        FileNotFoundError: There is no checkpoint.
        ValueError: It is damaged, or of another kind, or the parts of tensor ranks cannot be joined.
        TypeError: The plan is no plan.
        pickle.UnpicklingError: It names something that could run code.
    """
    if os.path.lexists(out):
        raise FileExistsError(f"`{out}` exists. Remove it, or choose another name.")
    rules = None if tensor_plan is None else CutRules(tensor_plan)
    directory.save(None, read_foreign(Path(checkpoint), rules, copies), out, full=False)


def read_foreign(path: Path, rules: CutRules | None = None, copies: Copies = "equal") -> dict[str, Any]:
    """Return a checkpoint of another strategy as a dictionary; its tensors are read when their values are used.

    Raises:
        As ``convert``.
    """
    if not path.exists():
        raise FileNotFoundError(f"There is nothing at `{path}`. Give a directory of DeepSpeed or of Lightning's FSDP.")
    if not path.is_dir():
        raise FileNotFoundError(f"`{path}` is not a directory. Single files need no conversion.")
    folder = find_deepspeed(path)
    if folder is None and rules is not None:
        raise ValueError(
            f"`{path}` is no checkpoint of DeepSpeed: it says itself how parameters are cut. Give no plan."
        )
    content = read_deepspeed(folder, rules, copies) if folder is not None else _read_lightning(path)
    progress = content.get("deepspeed", {})
    return {**EXPECTED, **_progress_of(progress), **content} if progress else {**EXPECTED, **content}


def _progress_of(progress: Mapping[str, Any]) -> dict[str, Any]:
    """Return DeepSpeed's own progress as a Trainer reads it: the number of steps and the schedule, but no epochs."""
    steps, schedule = int(progress.get("global_steps", 0)), progress.get("lr_scheduler")
    count = dict.fromkeys(("ready", "completed"), steps)
    counts = {"total": count, "current": dict.fromkeys(count, 0)}
    begun = dict.fromkeys(("total", "current"), dict.fromkeys(("ready", "started", "completed"), 0))
    fit_loop = {
        "epoch_loop.state_dict": {"_batches_that_stepped": steps},
        "epoch_loop.automatic_optimization.optim_progress": {"optimizer": {"step": counts, "zero_grad": begun}},
        "epoch_loop.manual_optimization.optim_step_progress": counts,
    }
    return {
        "global_step": steps,
        "lr_schedulers": [] if schedule is None else [schedule],
        "loops": {"fit_loop": fit_loop, "validate_loop": {}, "test_loop": {}, "predict_loop": {}},
    }


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
