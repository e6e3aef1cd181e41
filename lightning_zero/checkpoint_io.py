"""Our checkpoint directories under other strategies of Lightning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins.io import TorchCheckpointIO

from lightning_zero.checkpoint import directory, paths
from lightning_zero.checkpoint.flat import by_number

__all__ = ["ZeroCheckpointIO"]


class ZeroCheckpointIO(TorchCheckpointIO):
    """Reads a directory that ``ZeroStrategy`` saved into a run on one device or under ``ddp``.

    Use::

        Trainer(strategy="ddp", plugins=[ZeroCheckpointIO()]).fit(model, ckpt_path="runs/epoch=3.ckpt")

    Tensors are read one by one as the module and its optimizers copy them. Files are read and written as by
    ``TorchCheckpointIO``. ``ZeroStrategy`` needs no plugin.
    """

    def load_checkpoint(
        self,
        path: _PATH,
        map_location: Callable[..., Any] | None = lambda storage, loc: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a directory, or a file."""
        if not Path(path).is_dir():
            return super().load_checkpoint(path, map_location, weights_only)
        checkpoint = directory.load(None, path, weights_only)
        if "optimizer_states" in checkpoint:
            checkpoint["optimizer_states"] = [by_number(state) for state in checkpoint["optimizer_states"]]
        return checkpoint

    def remove_checkpoint(self, path: _PATH) -> None:
        """Remove a directory, a file or a link."""
        paths.remove(path)
