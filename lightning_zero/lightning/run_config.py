"""A configuration of ``LightningCLI``, as the commands read it that run nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_zero.lightning.strategy import ZeroStrategy
from lightning_zero.parallel.tensor.command import built, data_of, entry_of, first_batch, named, read_yaml, section_of

__all__ = ["RunConfig"]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The parts of a configuration that a step depends on.

    Attributes:
        make: Makes the model.
        strategy: The strategy; by default stage 3.
        batch: The first batch of ``data``; None without it.
        optimizer: Makes the optimizer from parameters; None: the module does.
        precision: As in the Trainer.
        accelerator: ``"gpu"``, or ``"cpu"``.
        accumulate_grad_batches: As in the Trainer.
        gradient_clip_val: As in the Trainer.
        gradient_clip_algorithm: As in the Trainer.
        sync_batchnorm: As in the Trainer.
    """

    make: Callable[[], nn.Module]
    strategy: ZeroStrategy
    batch: Any
    optimizer: Callable[..., torch.optim.Optimizer] | None
    precision: str
    accelerator: str
    accumulate_grad_batches: int
    gradient_clip_val: float | None
    gradient_clip_algorithm: str | None
    sync_batchnorm: bool

    @classmethod
    def read(cls, command: str, run: Path | None, module: str | None) -> RunConfig:
        """Read a configuration, or take a module in its place.

        Args:
            command: Name of the command, for errors.
            run: The configuration.
            module: A class or function without arguments, ``package.module:name``.

        Raises:
            ValueError: There is no model, or the strategy is not this package's.
        """
        if (run is None) == (module is None):
            raise ValueError(f"`{command}` needs a model: give `--config=run.yaml` or `--module=package.module:name`.")
        content = {} if run is None else read_yaml(run)
        if not isinstance(content, dict):
            raise ValueError(f"`{run}` is no configuration of a run: it has no `model`.")
        trainer = section_of(content, "trainer")
        data = data_of(run, content)
        entry = {"class_path": module} if module is not None else entry_of(run, content, "model")
        return cls(
            make=_maker(entry),
            strategy=_strategy(trainer),
            batch=None if data is None else first_batch(data),
            optimizer=_optimizer(content.get("optimizer")),
            precision=str(trainer.get("precision") or "32-true"),
            accelerator="cpu" if trainer.get("accelerator") == "cpu" else "gpu",
            accumulate_grad_batches=int(trainer.get("accumulate_grad_batches") or 1),
            gradient_clip_val=trainer.get("gradient_clip_val"),
            gradient_clip_algorithm=trainer.get("gradient_clip_algorithm"),
            sync_batchnorm=bool(trainer.get("sync_batchnorm")),
        )


def _maker(entry: Mapping[str, Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = built(entry)
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"`{entry['class_path']}` gives a `{type(model).__name__}`. Name one that gives an `nn.Module`."
            )
        return model

    return make


def _strategy(trainer: Mapping[str, Any]) -> ZeroStrategy:
    """Return the strategy of a configuration; by default stage 3.

    Raises:
        ValueError: It is another one.
    """
    given = trainer.get("strategy")
    if given is None or given == "auto":
        return ZeroStrategy()
    if isinstance(given, str) and given.startswith("zero_") and given[5:] in ("0", "1", "2", "3"):
        return ZeroStrategy(stage=int(given[5:]))  # type: ignore[arg-type]
    if isinstance(given, Mapping) and str(given.get("class_path")).rpartition(".")[2] == "ZeroStrategy":
        return ZeroStrategy(**{name: built(value) for name, value in (given.get("init_args") or {}).items()})
    raise ValueError(
        f"`strategy: {given}` is not forecast. Use `lightning_zero.ZeroStrategy`, or `zero_0` to `zero_3`."
    )


def _optimizer(entry: Any) -> Callable[..., torch.optim.Optimizer] | None:
    if entry is None:
        return None
    if not isinstance(entry, Mapping) or "class_path" not in entry:
        raise ValueError(f"`optimizer: {entry}` has no `class_path`, for example `torch.optim.AdamW`.")
    path = str(entry["class_path"])
    make = named(path if "." in path else f"torch.optim.{path}")
    return partial(make, **{name: built(value) for name, value in (entry.get("init_args") or {}).items()})
