"""Settings that a forecast compares, and the bytes of a rank with each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from lightning_zero.config import ActivationCheckpointing, Offload
from lightning_zero.parallel.tensor.plan import TensorPlan
from lightning_zero.sharding import Sharding

__all__ = ["PERSISTENT", "MemoryForecast", "Setting", "SettingForecast", "plain"]

PERSISTENT = ("parameters", "gradients", "optimizer")  # kinds of bytes that stay through a step


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The options that settings differ in.

    Attributes:
        sharding: The option ``stage``.
        offload: As in ``ZeroStrategy``.
        activation_checkpointing: As in ``ZeroStrategy``.
    """

    sharding: Sharding
    offload: Offload | None = None
    activation_checkpointing: ActivationCheckpointing | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The options as in YAML, without those that are not set."""
        stage = self.sharding.option
        options: dict[str, Any] = {"stage": plain(stage)}
        if self.offload is not None:
            options["offload"] = "cpu" if self.offload == _TO_HOST else plain(self.offload)
        if self.activation_checkpointing is not None:
            is_plain = self.activation_checkpointing == ActivationCheckpointing()
            options["activation_checkpointing"] = True if is_plain else plain(self.activation_checkpointing)
        return options

    @property
    def cost(self) -> tuple[int, float, bool, int]:
        """Work that a setting adds: recomputation, steps on the CPU and disks, each more than the last; messages.

        Of two that offload, the one adds less that offloads a smaller fraction: "auto" as little as fits; or keeps the
        parameters on the device.
        """
        offloads = 0 if self.offload is None else 2 if not self.offload.uses_disks else 4
        fraction = 0 if self.offload is None or self.offload.fraction == "auto" else self.offload.fraction
        moves_params = self.offload is not None and self.offload.params is not None
        return offloads + (self.activation_checkpointing is not None), fraction, moves_params, self.sharding.stage

    def __str__(self) -> str:
        """Return the options in words."""
        return ", ".join(f"{_WORDS.get(name, name)} {_in_words(value)}".strip() for name, value in self.options.items())


_TO_HOST = Offload(optimizer="cpu")
_WORDS = {"activation_checkpointing": "checkpointing"}


def plain(option: Any) -> Any:
    """Return an option as in YAML: a dict of the fields that are set, for one that has fields."""
    if isinstance(option, (list, tuple)):
        return [plain(one) for one in option]
    if isinstance(option, type):
        return option.__name__
    if isinstance(option, Path):
        return str(option)
    if isinstance(option, TensorPlan):
        return option.as_yaml
    if not is_dataclass(option):
        return option
    values = {one.name: getattr(option, one.name) for one in fields(option)}
    default = {one.name: one.default for one in fields(option)}
    return {name: plain(value) for name, value in values.items() if value != default[name]}


def _in_words(option: Any) -> str:
    if option is True:
        return ""
    if isinstance(option, Mapping):
        return " ".join(f"{name}={value}" for name, value in option.items())
    return str(option)


@dataclass(frozen=True, kw_only=True)
class SettingForecast:
    """Bytes of a rank with one setting.

    Attributes:
        setting: The setting.
        is_own: Whether it is that of the strategy as it was given.
        device: Bytes that stay on the device through a step, by kind: ``parameters``, ``gradients``, ``optimizer``
            (masters and states), ``buffers`` (of modules).
        host: Of these kinds in host memory; also ``windows``, through which those on disks are read and written, and
            ``activations``, which checkpointing offloads: that many at most.
        disk: Of these kinds on disks.
        peak_bytes: Most bytes on the device at once.
        at_peak: Bytes at that moment, by kind; also ``gathered`` (whole parameters), ``activations``, and ``workspace``
            if it is in the optimizer's step.
        phase: The part of a step at that moment: ``"forward"``, ``"backward"`` or ``"step"``.
        module: The innermost module that ran then, or whose backward did.
        sent_bytes: Bytes that a rank sends per step.
        sent_across_nodes: Those of them that are sent by calls between nodes; None where no scope of a node says which.
        pipeline_stage: The stage that all these are of, the one with the highest peak; None without a pipeline.
        peak_by_stage: The peaks of all stages of a pipeline.
        persistent_by_stage: The bytes of each of them that stay through a step: those of the device by kind, and of the
            host as ``host_<kind>``.
    """

    setting: Setting
    is_own: bool
    device: dict[str, int]
    host: dict[str, int]
    disk: dict[str, int] = field(default_factory=dict)
    peak_bytes: int
    at_peak: dict[str, int]
    phase: str
    module: str
    sent_bytes: int
    sent_across_nodes: int | None
    pipeline_stage: int | None = None
    peak_by_stage: Sequence[int] = ()
    persistent_by_stage: Sequence[Mapping[str, int]] = ()

    @property
    def persistent_bytes(self) -> int:
        """Bytes that stay on the device through a step."""
        return sum(self.device.values())

    @property
    def of_rank_0(self) -> dict[str, int]:
        """The bytes of rank 0, which is in stage 0 of a pipeline: ``peak``, and kinds as in ``persistent_by_stage``."""
        if self.persistent_by_stage:
            return {**self.persistent_by_stage[0], "peak": self.peak_by_stage[0]}
        away = {"host": self.host, "disk": self.disk}
        others = {f"{place}_{kind}": nbytes for place, held in away.items() for kind, nbytes in held.items()}
        return {**self.device, **others, "peak": self.peak_bytes}


@dataclass(frozen=True, kw_only=True)
class MemoryForecast:
    """Bytes per rank with several settings.

    Attributes:
        world_size: Number of ranks.
        precision: As in the Trainer.
        settings: The forecasts.
        base: Options of the strategy that all settings have, ``state_dict_type`` always.
        trainer: Arguments of the Trainer that a strategy of ``from_deepspeed`` sets.
        left_out: The parts of its run that ``yaml`` does not have, in words, each with a remedy.
        notes: Sentences about the module and the assumptions.
    """

    world_size: int
    precision: str
    settings: Sequence[SettingForecast]
    base: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    left_out: Sequence[str] = ()
    notes: Sequence[str] = ()

    @property
    def own(self) -> SettingForecast:
        """The forecast of the strategy as it was given."""
        return next(one for one in self.settings if one.is_own)

    def fastest(self, memory: int) -> SettingForecast | None:
        """Return the fastest setting whose peak fits; None if none does.

        Settings are not timed. Of two that fit, the one comes first that computes nothing again and offloads nothing;
        recomputation comes before offloading, host memory before disks, a smaller fraction before a larger one,
        parameters on the device before offloaded ones, a lower stage before a higher one, and the strategy's own
        setting before another that is equal so far.

        Args:
            memory: Bytes of the device.
        """
        fitting = [one for one in self.settings if one.peak_bytes <= memory]
        return min(fitting, key=lambda one: (one.setting.cost, not one.is_own, one.peak_bytes), default=None)

    def yaml(self, forecast: SettingForecast) -> str:
        """Return a setting as a part of a configuration of ``LightningCLI``."""
        files = "sharded" if forecast.setting.sharding.stage == 3 else "full"  # the default, as in `ZeroStrategy`
        base = {name: value for name, value in self.base.items() if (name, value) != ("state_dict_type", files)}
        strategy = {
            "class_path": "lightning_zero.ZeroStrategy",
            "init_args": {**base, **forecast.setting.options},
        }
        content = {"trainer": {"precision": self.precision, **self.trainer, "strategy": strategy}}
        text: str = yaml.safe_dump(content, sort_keys=False, default_flow_style=False)
        head = [f"# Without {one}.\n" for one in self.left_out]
        return "".join([*head, text])

    def as_dict(self) -> dict[str, Any]:
        """Return the forecasts as numbers and names, for JSON."""
        rows = [
            {one.name: getattr(row, one.name) for one in fields(row)} | {"setting": row.setting.options}
            for row in self.settings
        ]
        head = {"world_size": self.world_size, "precision": self.precision}
        return {**head, "settings": rows, "notes": list(self.notes)}
