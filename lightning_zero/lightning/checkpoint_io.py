"""Our checkpoint directories under other strategies of Lightning, and without a Trainer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.core import saving
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities.migration.utils import migrate_checkpoint

from lightning_zero.checkpoint import directory, torchfile
from lightning_zero.checkpoint.flat import number_parameters
from lightning_zero.checkpoint.stored import Lent

__all__ = ["ZeroCheckpointIO", "load_from_checkpoint", "name_the_reader_of_directories"]

M = TypeVar("M", bound=LightningModule | LightningDataModule)


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
            if "://" not in str(path):
                torchfile.refuse_others(Path(path))
            return super().load_checkpoint(path, map_location, weights_only)
        checkpoint = directory.load(None, path, weights_only)
        return number_parameters(checkpoint)

    def remove_checkpoint(self, path: _PATH) -> None:
        """Remove a directory, a file or a link."""
        directory.remove(path)


def load_from_checkpoint(
    module_class: type[M],
    path: str | Path,
    *,
    map_location: torch.device | str | None = None,
    hparams_file: str | Path | None = None,
    strict: bool | None = None,
    weights_only: bool | None = None,
    **kwargs: Any,
) -> M:
    """Make a module, or a data module, of a checkpoint, as its ``load_from_checkpoint`` does, also of a directory.

    The tensors of a directory are read one by one, straight into the module.

    Args:
        module_class: The class, called with the saved hyper-parameters.
        path: A checkpoint directory or file, also of Lightning's strategies for FSDP.
        map_location: Device of the module; by default where its class puts it.
        hparams_file: A ``.yaml`` or ``.csv`` file of hyper-parameters, in place of the saved ones.
        strict: Whether names must match; by default ``strict_loading`` of the module.
        weights_only: As for ``torch.load``.
        kwargs: Replace saved hyper-parameters.

    Raises:
        FileNotFoundError: There is no checkpoint at the path.
        ValueError: It is damaged, or of a newer format.
        RuntimeError: Names or shapes differ.
        TypeError: ``module_class`` is no such class, or ``map_location`` no device.
    """
    if not (isinstance(module_class, type) and issubclass(module_class, LightningModule | LightningDataModule)):
        raise TypeError(
            f"`module_class={module_class!r}` is not a class of a `LightningModule` or `LightningDataModule`. Call"
            " `load_from_checkpoint(MyModule, path)`."
        )
    strictness = {"strict": strict} if issubclass(module_class, LightningModule) else {}
    if not Path(path).is_dir():
        if "://" not in str(path):
            content = torchfile.load(Path(path), weights_only)
            if "state_dict" not in content:
                raise ValueError(
                    f"`{path}` is no checkpoint of a Trainer: it has no `state_dict`. {torchfile.EXPECTED}"
                )
            directory.check_is_trainers(content, path)
        read: Callable[..., M] = cast(Any, module_class).load_from_checkpoint
        return read(path, map_location, hparams_file, weights_only=weights_only, **strictness, **kwargs)
    if not isinstance(map_location, torch.device | str | int | None):
        raise TypeError(
            f"`map_location={map_location!r}` is not a device. The tensors of a directory are read into host memory, so"
            " give the module's device, such as 'cuda:0', or leave it out."
        )
    checkpoint = directory.load(None, path, weights_only)
    directory.check_is_trainers(checkpoint, path)
    checkpoint, _ = migrate_checkpoint(checkpoint)
    key = module_class.CHECKPOINT_HYPER_PARAMS_KEY
    saved = checkpoint.get(key, {}) if hparams_file is None else _read_hparams(Path(hparams_file))
    checkpoint[key] = {**saved, **kwargs}
    kept = Lent()
    made = cast(M, saving._load_state(cast(Any, module_class), kept.lend(checkpoint), **strictness, **kwargs))
    kept.take_back()
    if map_location is not None and isinstance(made, LightningModule):
        made.to(map_location)
    return made


def _read_hparams(path: Path) -> dict[str, Any]:
    if path.suffix == ".csv":
        return dict(saving.load_hparams_from_tags_csv(path))
    if path.suffix in (".yaml", ".yml"):
        return dict(saving.load_hparams_from_yaml(path))
    raise ValueError(f"`hparams_file='{path}'` is neither a `.yaml` nor a `.csv` file.")


def name_the_reader_of_directories() -> None:
    """Let ``LightningModule.load_from_checkpoint`` say which function reads a directory (ADR 0040).

    It fails on every directory, with an ``IsADirectoryError`` that says no more than its name. The error stays, and
    gets the name of the function. Files are read as before.
    """
    read = vars(saving).get("pl_load")
    if read is None or hasattr(read, "__wrapped__"):
        return

    @functools.wraps(read)
    def read_file(path_or_url: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return read(path_or_url, *args, **kwargs)
        except IsADirectoryError as error:
            raise IsADirectoryError(
                f"`{path_or_url}` is a directory, and `LightningModule.load_from_checkpoint` reads single files."
                " `lightning_zero.load_from_checkpoint(Module, path)` reads a checkpoint directory."
            ) from error

    vars(saving)["pl_load"] = read_file
