"""A configuration of ``LightningCLI``, as the commands read it that run nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import plugins
from lightning.pytorch.plugins import environments
from torch import nn

from lightning_zero.lightning.run_sections import RunSections, named
from lightning_zero.lightning.strategy import ZeroStrategy

__all__ = ["RunConfig"]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The parts of a configuration that a step depends on.

    Attributes:
        make: Makes the model.
        strategy: The strategy; by default stage 3.
        batch: The first batch of ``data``; None without it.
        optimizer: Makes the optimizer from parameters; None: the module does.
        precision: As in the Trainer; None: the strategy's.
        accelerator: ``"gpu"``, or ``"cpu"``.
        accumulate_grad_batches: As in the Trainer.
        gradient_clip_val: As in the Trainer.
        gradient_clip_algorithm: As in the Trainer.
        sync_batchnorm: As in the Trainer.
        devices: Ranks of a node; None: the configuration has no number.
        num_nodes: As in the Trainer.
    """

    make: Callable[[], nn.Module]
    strategy: ZeroStrategy
    batch: Any
    optimizer: Callable[..., torch.optim.Optimizer] | None
    precision: str | None
    accelerator: str
    accumulate_grad_batches: int
    gradient_clip_val: float | None
    gradient_clip_algorithm: str | None
    sync_batchnorm: bool
    devices: int | None
    num_nodes: int

    @classmethod
    def read(cls, command: str, run: Path | None, *, module: str | None, data: str | None) -> RunConfig:
        """Read a configuration, or take a module in its place; see ``RunSections.read``.

        Raises:
            ValueError: There is no model, its arguments are wrong, the strategy is not this package's, or a plugin of
                the Trainer may change the step.
        """
        sections = RunSections.read(command, run, module=module, data=data)
        trainer = sections.section("trainer")
        _refuse_plugins(command, trainer.get("plugins"))
        devices = 1 if run is None else trainer.get("devices")
        return cls(
            make=sections.model(),
            strategy=_strategy(sections, trainer.get("strategy")),
            batch=sections.batch(),
            optimizer=_optimizer(sections),
            precision=None if trainer.get("precision") is None else str(trainer["precision"]),
            accelerator="cpu" if trainer.get("accelerator") == "cpu" else "gpu",
            accumulate_grad_batches=int(trainer.get("accumulate_grad_batches") or 1),
            gradient_clip_val=trainer.get("gradient_clip_val"),
            gradient_clip_algorithm=trainer.get("gradient_clip_algorithm"),
            sync_batchnorm=bool(trainer.get("sync_batchnorm")),
            devices=len(devices) if isinstance(devices, list) else devices if _is_count(devices) else None,
            num_nodes=int(trainer.get("num_nodes") or 1),
        )

    def world(self, given: int | None, ranks_per_node: int | None) -> tuple[int, int | None]:
        """Return the number of ranks, and of those of a node, by default the Trainer's.

        Raises:
            ValueError: Nobody says how many there are.
        """
        if given is not None:
            return given, ranks_per_node
        if self.devices is None:
            raise ValueError(
                "`trainer.devices` of the configuration is no number of ranks. Add `--world=8`, or another."
            )
        return self.devices * self.num_nodes, ranks_per_node or self.devices

    def arguments(self, *, world: int | None, ranks_per_node: int | None, precision: str | None) -> dict[str, Any]:
        """Return the arguments that ``estimate_memory`` and ``simulate_step`` share, besides module and strategy.

        Args:
            world: Number of ranks; None: that of the configuration.
            ranks_per_node: As in ``estimate_memory``; None: that of the configuration, if it says the ranks too.
            precision: Overrides that of the configuration; None: it does not.

        Raises:
            ValueError: Nobody says how many ranks there are.
        """
        num_ranks, node = self.world(world, ranks_per_node)
        return {
            "world_size": num_ranks,
            "ranks_per_node": node,
            "precision": precision or self.precision,
            "batch": self.batch,
            "optimizer": self.optimizer,
            "accelerator": self.accelerator,
            "accumulate_grad_batches": self.accumulate_grad_batches,
        }


def _is_count(devices: Any) -> bool:
    return isinstance(devices, int) and not isinstance(devices, bool) and devices > 0


def _refuse_plugins(command: str, given: Any) -> None:
    """Refuse plugins of a Trainer but environments of clusters and checkpoint IO, which a step does not see.

    Raises:
        ValueError: There is one.
    """
    for plugin in given if isinstance(given, list) else [] if given is None else [given]:
        path = str(plugin.get("class_path") if isinstance(plugin, Mapping) else plugin)
        short = next((one for one in (plugins, environments) if hasattr(one, path)), None)
        found = named(path) if short is None else getattr(short, path)
        if not (isinstance(found, type) and issubclass(found, (ClusterEnvironment, CheckpointIO))):
            raise ValueError(
                f"`{command}` does not read `plugins: {path}` of the Trainer. Name a precision with"
                " `trainer.precision`, and leave other plugins out for this command."
            )


def _strategy(sections: RunSections, given: Any) -> ZeroStrategy:
    """Return the strategy of a configuration; by default stage 3.

    Raises:
        ValueError: It is another one.
    """
    if given is None or given == "auto":
        return ZeroStrategy()
    if isinstance(given, str) and given.startswith("zero_") and given[5:] in ("0", "1", "2", "3"):
        return ZeroStrategy(stage=int(given[5:]))  # type: ignore[arg-type]
    entry = {"class_path": given} if isinstance(given, str) else given
    if isinstance(entry, Mapping) and str(entry.get("class_path")).rpartition(".")[2] == "ZeroStrategy":
        return sections.maker("strategy", {**entry, "class_path": "lightning_zero.ZeroStrategy"})()  # type: ignore[no-any-return]
    raise ValueError(
        f"`strategy: {given}` is not forecast. Use `lightning_zero.ZeroStrategy`, or `zero_0` to `zero_3`."
    )


def _optimizer(sections: RunSections) -> Callable[..., torch.optim.Optimizer] | None:
    entry = sections.content.get("optimizer")
    if entry is None:
        return None
    entry = {"class_path": entry} if isinstance(entry, str) else entry
    if not isinstance(entry, Mapping) or "class_path" not in entry:
        raise ValueError(f"`optimizer: {entry}` has no `class_path`, for example `torch.optim.AdamW`.")
    path = str(entry["class_path"])
    entry = {**entry, "class_path": path if "." in path else f"torch.optim.{path}"}
    return sections.maker("optimizer", entry, skip=frozenset({"params"}))
