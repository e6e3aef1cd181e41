"""The command ``estimate``: a forecast of the memory of a run, from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from lightning_zero.checkpoint.safetensors import parse_size
from lightning_zero.forecast.report import draw, json_of, table
from lightning_zero.lightning.estimate import estimate_memory
from lightning_zero.lightning.strategy import ZeroStrategy
from lightning_zero.parallel.tensor.command import built, entry_of, first_batch, named

__all__ = ["estimate"]


def estimate(
    run: Path | None = None,
    module: str | None = None,
    world: int = 1,
    *,
    memory: str | None = None,
    ranks_per_node: int | None = None,
    precision: str | None = None,
    only: bool = False,
    json: bool = False,
    plot: Path | None = None,
) -> None:
    """Forecast the memory of a training step per rank, for the setting of a run and others side by side.

    Nothing is trained, and no memory is taken for the model; no GPU is needed. Two steps run without values on one rank
    that pretends the others.

    Args:
        run: Configuration of a run, also ``--config``, as ``LightningCLI`` reads it: ``model`` with ``class_path`` and
            ``init_args``, ``data`` for the batch, ``optimizer``, and ``trainer`` with ``strategy`` and ``precision``.
        module: In place of a configuration, a class or function without arguments: ``package.module:name``.
        world: Number of ranks.
        memory: Memory of a device, such as ``80GiB``. Names the fastest setting that fits, and prints its YAML.
        ranks_per_node: Ranks of a node, for scopes of a node.
        precision: Overrides that of the configuration: ``32-true``, ``bf16-mixed`` or ``bf16-true``.
        only: Forecast the setting of the configuration alone.
        json: Print JSON, in bytes, instead of the table.
        plot: Picture to write (``.png``).
    """
    if (run is None) == (module is None):
        raise ValueError("`estimate` needs a model: give `--config=run.yaml` or `--module=package.module:name`.")
    content: Any = {} if run is None else yaml.safe_load(run.read_text())
    if not isinstance(content, dict):
        raise ValueError(f"`{run}` is no configuration of a run: it has no `model`.")
    nbytes = None if memory is None else _bytes(memory)
    trainer = content.get("trainer") or {}
    entry = {"class_path": module} if module is not None else entry_of(run, content, "model")
    forecast = estimate_memory(
        _maker(entry),
        _strategy(trainer),
        world_size=world,
        batch=first_batch(built(content["data"])) if "data" in content else None,
        optimizer=_optimizer(content.get("optimizer")),
        precision=precision or str(trainer.get("precision") or "32-true"),
        accelerator="cpu" if trainer.get("accelerator") == "cpu" else "gpu",
        ranks_per_node=ranks_per_node,
        accumulate_grad_batches=int(trainer.get("accumulate_grad_batches") or 1),
        clips=bool(trainer.get("gradient_clip_val")),
        side_by_side=not only,
    )
    if plot is not None:
        draw(forecast, plot, nbytes)
    if json:
        print(json_of(forecast, nbytes))
        return
    print(table(forecast, nbytes))
    if nbytes is not None:
        fastest = forecast.fastest(nbytes)
        print(
            f"\nNo setting fits into {memory}: use more ranks, a smaller batch, or `Offload(params='cpu')`."
            if fastest is None
            else f"\nThe fastest setting that fits into {memory}: {fastest.setting}\n\n{forecast.yaml(fastest)}",
            end="\n" if fastest is None else "",
        )


def _bytes(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ValueError(f"`--memory={text}` is not a size. Use a number of bytes, or text such as '80GiB'.") from error


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
