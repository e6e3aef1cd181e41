"""One file of a checkpoint directory, without a process group."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from lightning_zero.checkpoint import directory
from lightning_zero.checkpoint.flat import by_number

__all__ = ["consolidate"]


def consolidate(checkpoint: str, out: str, *, format: Literal["ckpt"] = "ckpt") -> None:
    """Make a single file of a checkpoint directory.

    Args:
        checkpoint: The directory.
        out: The file to write.
        format: ``ckpt``: what a single device saves, for ``load_from_checkpoint`` and for resuming.

    Raises:
        FileExistsError: There is something at ``out``.
    """
    if os.path.lexists(out):
        raise FileExistsError(f"`{out}` exists. Remove it, or choose another name.")
    content = directory.load(None, checkpoint)
    if "optimizer_states" in content:
        content["optimizer_states"] = [by_number(state) for state in content["optimizer_states"]]
    directory.write_file(Path(out), content)
