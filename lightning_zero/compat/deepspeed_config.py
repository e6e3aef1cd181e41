"""A configuration of DeepSpeed as options of ``ZeroStrategy`` and of the Trainer: a pure function and its report.

Note [Three places]
    Some keys are options of the strategy: they are in ``DeepSpeedPlan.options``. Some are arguments of the Trainer
    (precision, clipping, accumulation), or are compared with it (batch sizes): the plan keeps them, and they are
    settled when there is a Trainer. The sections ``optimizer`` and ``scheduler`` are used where the module makes none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lightning_zero.compat.deepspeed_keys import (
    ALIASES,
    FEATURES,
    IGNORED,
    OBSERVERS,
    READ,
    SECTIONS,
    UNUSED,
    known_names,
)
from lightning_zero.compat.deepspeed_sections import MadeOf, optimizer_of, schedule_of
from lightning_zero.errors import nearest

__all__ = ["Batch", "DeepSpeedPlan", "NEWEST", "PrecisionRule", "Row", "plan_of", "read_config", "report"]

Status = Literal["honoured", "translated", "ignored", "not yet", "unknown", "default"]

NEWEST = "0.19.6"
"""The version whose defaults are taken unless told otherwise."""

_PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true")
_DTYPES = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "bfp16": "bf16", "float32": "fp32"}
_PARTITIONS = {"best": "parameters", "parameters": "parameters", "uniform": "uniform"}


@dataclass(frozen=True)
class Row:
    """A key of the configuration, its status, and its counterpart here.

    Args:
        key: Path of the key; in brackets: a default of DeepSpeed's for a key that is not there.
        value: Its value.
        status: One word for it.
        becomes: The option and its value, or the reason.
        option: The option of the strategy that it sets.
    """

    key: str
    value: Any
    status: Status
    becomes: str
    option: str | None = None


@dataclass(frozen=True)
class PrecisionRule:
    """Values of ``Trainer(precision=...)`` that a configuration allows.

    Args:
        fills: The value for a Trainer that has its default, ``"32-true"``; None: any.
        accepts: Values with which the configuration agrees.
        key: The key that says so, as it is named in an error.
        loss_scale: Fields of ``LossScale``, for fp16.
    """

    fills: str | None
    accepts: tuple[str, ...]
    key: str
    loss_scale: Mapping[str, Any] | None


@dataclass(frozen=True)
class Batch:
    """DeepSpeed's three batch sizes: ``train = micro * accumulation * ranks``. None: not said, or ``"auto"``."""

    train: int | None = None
    micro: int | None = None
    accumulation: int | None = None

    def accumulation_on(self, ranks: int) -> int | None:
        """Return the number of micro-batches of a step, or None where the Trainer says it.

        Raises:
            ValueError: The three do not fit together on this number of ranks.
        """
        if self.train is None:
            return self.accumulation
        if self.micro is not None and self.accumulation is not None:
            if self.train != self.micro * self.accumulation * ranks:
                raise ValueError(
                    f"`train_batch_size={self.train}` is not `train_micro_batch_size_per_gpu={self.micro}` times"
                    f" `gradient_accumulation_steps={self.accumulation}` times {ranks} rank(s). Leave one of them out."
                )
            return self.accumulation
        if self.micro is not None:
            self._check_divides(self.micro * ranks, f"`train_micro_batch_size_per_gpu={self.micro}`", ranks)
            return self.train // (self.micro * ranks)
        return self.accumulation

    def micro_on(self, ranks: int, accumulation: int) -> int | None:
        """Return the batch size of a rank's loader, or None where nothing is said of it.

        Raises:
            ValueError: The batch cannot be divided among the ranks and micro-batches.
        """
        if self.micro is not None or self.train is None:
            return self.micro
        self._check_divides(accumulation * ranks, f"`accumulate_grad_batches={accumulation}`", ranks)
        return self.train // (accumulation * ranks)

    def _check_divides(self, divisor: int, name: str, ranks: int) -> None:
        assert self.train is not None
        if self.train % divisor:
            raise ValueError(
                f"`train_batch_size={self.train}` cannot be divided by {name} times {ranks} rank(s). Change one of"
                " them, or leave one out."
            )


@dataclass(frozen=True)
class DeepSpeedPlan:
    """A configuration as options, with its report.

    Args:
        name: The file, or ``"a dict"``.
        version: The version of DeepSpeed whose defaults were taken.
        options: Arguments of ``ZeroStrategy``.
        precision: Values of ``Trainer(precision=...)``.
        clipping: ``Trainer(gradient_clip_val=...)``; None: the Trainer's.
        clipping_is_default: Whether the file does not say it.
        batch: The batch sizes.
        optimizer: The optimizer of modules that make none.
        schedule: The schedule of modules that make none.
        observers: Sections of loggers that are on, for a YAML.
        wants_monitor: Whether DeepSpeed would measure times or bytes.
        rows: The report.
    """

    name: str
    version: str
    options: Mapping[str, Any]
    precision: PrecisionRule
    clipping: float | None
    clipping_is_default: bool
    batch: Batch
    optimizer: MadeOf | None
    schedule: MadeOf | None
    observers: Mapping[str, Mapping[str, Any]]
    wants_monitor: bool
    rows: tuple[Row, ...]


def read_config(config: str | Path | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return name and content of a configuration: a dict, or a file of JSON.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is no JSON, says a key twice, or is no object.
        TypeError: It is neither a dict nor a path.
    """
    if isinstance(config, Mapping):
        return "a dict", dict(config)
    if not isinstance(config, (str, Path)):
        raise TypeError(f"`config={config!r}` is a `{type(config).__name__}`. Use a dict, or the path of a JSON file.")
    path = Path(config)
    if not path.is_file():
        raise FileNotFoundError(f"`{path}` does not exist. Give the path of DeepSpeed's JSON file, or a dict.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        raise ValueError(f"`{path}` is no JSON: line {error.lineno}, column {error.colno}: {error.msg}.") from error
    except (UnicodeDecodeError, _DuplicateError) as error:
        raise ValueError(f"`{path}` is no configuration: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"`{path}` is no configuration: it holds a `{type(content).__name__}`, not an object.")
    return str(path), content


class _DuplicateError(ValueError):
    """A key that an object has twice."""


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise _DuplicateError(f"the key `{twice}` is there twice")
    return dict(pairs)


def plan_of(
    config: str | Path | Mapping[str, Any],
    *,
    deepspeed_version: str | None = None,
    strict: bool = True,
    explicit: Collection[str] = (),
) -> DeepSpeedPlan:
    """Return the options that a configuration stands for.

    Args:
        config: DeepSpeed's configuration, or the path of its JSON file.
        deepspeed_version: The version whose defaults hold for keys that are not there; None: the newest, except for
            clipping and timeout, which Lightning's ``DeepSpeedStrategy`` does not leave to DeepSpeed.
        strict: Refuse keys that are not known, and those that do not exist here and would change the training.
        explicit: Options of the strategy that are given as arguments, and win.

    Raises:
        ValueError: A key is unknown or missing here, or its value is not allowed; named with its path.
    """
    name, content = read_config(config)
    reader = _Reader(content, version=deepspeed_version, strict=strict, explicit=explicit)
    return replace(reader.plan(), name=name, version=deepspeed_version or NEWEST)


def report(plan: DeepSpeedPlan, settled: Mapping[str, str] | None = None) -> str:
    """Return the table of all keys.

    Args:
        plan: The plan.
        settled: By key, its value in the Trainer.
    """
    rows = [replace(row, becomes=(settled or {}).get(row.key, row.becomes)) for row in plan.rows]
    cells = [(row.key, _shown(row.value), row.status, row.becomes) for row in rows]
    widths = [max((len(cell[column]) for cell in cells), default=0) for column in range(3)]
    lines = [
        "  " + "  ".join(part.ljust(width) for part, width in zip(cell, widths, strict=False)) + f"  {cell[3]}"
        for cell in cells
    ]
    return "\n".join([f"Configuration of DeepSpeed ({plan.name}), with the defaults of {plan.version}:", *lines])


class _Reader:
    """Reads one configuration; each method reads a section, and fills ``_rows`` for its keys."""

    def __init__(
        self, config: Mapping[str, Any], *, version: str | None, strict: bool, explicit: Collection[str]
    ) -> None:
        self._version = _version(version or NEWEST)
        self._is_lightning = version is None  # whose strategy says some keys itself
        self._strict = strict
        self._explicit = explicit
        self._rows: dict[str, Row] = {}  # by path as it is in the file
        self._paths: dict[str, str] = {}  # path as it is in the file, by path without aliases
        self._values: dict[str, Any] = {}  # by path without aliases
        self._options: dict[str, Any] = {}
        self._communication: dict[str, Any] = {}
        for path, value in _leaves(config):
            self._file(path, value)

    # -- Keys ----------------------------------------------------------------------------------------------------------

    def _file(self, path: str, value: Any) -> None:
        """Put a value where it is read, or say why it is not."""
        name = _canonical(path)
        if name in READ or name.startswith(("optimizer.params.", "scheduler.params.")):
            if name in self._values and self._values[name] != value:
                raise ValueError(
                    f"`{path}={value!r}` and `{self._paths[name]}={self._values[name]!r}` are two names of one key."
                    " Leave one of them out."
                )
            self._values[name], self._paths[name] = value, path
            self._rows[path] = Row(path, value, "ignored", UNUSED.get(name.rpartition(".")[0], "it has no effect"))
        elif name in SECTIONS:
            self._rows[path] = Row(path, value, "ignored", "it is empty")
        elif name in IGNORED:
            self._rows[path] = Row(path, value, "ignored", IGNORED[name])
        elif name in OBSERVERS:
            self._rows[path] = self._observer(path, value, OBSERVERS[name])
            self._values[name] = value
        elif name in FEATURES and not _is_on(value):
            self._rows[path] = Row(path, value, "ignored", "it is off")
        elif name in FEATURES:
            self._feature(path, value, FEATURES[name])
        elif self._strict:
            section, _, key = name.rpartition(".")
            raise ValueError(
                f"`{path}` is no key of DeepSpeed's configuration.{nearest(key, known_names(section))}"
                " `strict=False` leaves it out."
            )
        else:
            self._rows[path] = Row(path, value, "unknown", "left out: DeepSpeed's documentation does not know it")

    @staticmethod
    def _observer(path: str, value: Any, why: str) -> Row:
        """Return the row of a section that does not change the training."""
        if not _is_on(value):
            return Row(path, value, "ignored", "it is off")
        return Row(path, value, "ignored" if why.startswith("use ") else "not yet", why)

    def _feature(self, path: str, value: Any, why: str) -> None:
        """Refuse a key that would change the training and does not exist here, or say so in its row."""
        if self._strict:
            raise ValueError(
                f"`{path}={_shown(value)}` would change the training, and is not there yet: {why}. Take it out, or use"
                " `strict=False`, which trains without it."
            )
        self._rows[path] = Row(path, value, "not yet", why)

    def _said(self, name: str) -> bool:
        return name in self._values

    def _say(self, name: str, status: Status, becomes: str, option: str | None = None) -> None:
        path = self._paths[name]
        self._rows[path] = Row(path, self._values[name], status, becomes, option)

    def _say_default(self, name: str, value: Any, becomes: str, option: str | None = None) -> None:
        self._rows[f"({name})"] = Row(f"({name})", value, "default", becomes, option)

    def _say_lightning(self, name: str, value: Any, becomes: str, option: str | None = None) -> None:
        """Say that a key that is not there is handled as Lightning does, and not by DeepSpeed's default."""
        theirs = f"DeepSpeed's own default needs `deepspeed_version={NEWEST!r}`"
        self._say_default(name, value, f"{becomes}, as with Lightning's `DeepSpeedStrategy`; {theirs}", option)

    def _flag(self, name: str, default: bool = False) -> bool | None:
        """Return a switch; None is ``"auto"``."""
        value = self._values.get(name, default)
        if value == "auto":
            return None
        if not isinstance(value, bool):
            raise self._wrong(name, 'true, false or "auto"')
        return value

    def _number(self, name: str, *, least: float = 0.0) -> float | None:
        """Return a number; None if it is not there, null or ``"auto"``."""
        value = self._values.get(name)
        if value is None or value == "auto":
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < float("inf"):
            raise self._wrong(name, f'a number, {least:g} or more, or "auto"')
        return value

    def _integer(self, name: str, *, least: int = 1) -> int | None:
        value = self._number(name, least=least)
        if value is not None and value != int(value):
            raise self._wrong(name, f'a whole number, {least} or more, or "auto"')
        return None if value is None else int(value)

    def _wrong(self, name: str, allowed: str) -> ValueError:
        return ValueError(f"`{self._paths[name]}={self._values[name]!r}` is not allowed. Use {allowed}.")

    # -- Sections ------------------------------------------------------------------------------------------------------

    def plan(self) -> DeepSpeedPlan:
        """Return the options of all sections."""
        self._stage()
        self._prefetch()
        self._reduce_dtype()
        self._offload()
        self._activations()
        self._pipeline()
        self._parallel()
        self._timeout()
        precision = self._precision()
        clipping, is_default = self._clipping()
        batch = self._batch()
        optimizer, schedule = self._optimizer(), self._schedule()
        if self._communication:
            self._options["communication"] = self._communication
        rows = tuple(self._unless_explicit(row) for row in self._rows.values())
        return DeepSpeedPlan(
            name="",
            version="",
            options={name: value for name, value in self._options.items() if name not in self._explicit},
            precision=precision,
            clipping=clipping,
            clipping_is_default=is_default,
            batch=batch,
            optimizer=optimizer,
            schedule=schedule,
            observers={name: value for name, value in self._values.items() if name in OBSERVERS and _is_on(value)},
            wants_monitor=any(_is_on(row.value) and IGNORED.get(row.key, "").endswith("`ZeroMonitor`") for row in rows),
            rows=rows,
        )

    def _unless_explicit(self, row: Row) -> Row:
        if row.option not in self._explicit:
            return row
        return replace(row, status="ignored", becomes=f"the argument `{row.option}` is used instead")

    def _stage(self) -> None:
        if self._said("zero_optimization.stage"):
            stage = self._integer("zero_optimization.stage", least=0)
            if stage not in (0, 1, 2, 3):
                raise self._wrong("zero_optimization.stage", "0, 1, 2 or 3")
            self._say("zero_optimization.stage", "honoured", f"`stage={stage}`", "stage")
        else:
            stage = 0
            self._say_default("zero_optimization.stage", 0, "`stage=0`", "stage")
        self._options["stage"] = stage

    def _prefetch(self) -> None:
        name = "zero_optimization.stage3_prefetch_bucket_size"
        if not self._said(name):
            return
        if self._number(name) == 0:
            self._communication["prefetch"] = 0
            self._say(name, "translated", "`communication.prefetch=0`", "communication")
        else:
            self._say(name, "translated", "`communication.prefetch=1`: units are prefetched one by one")

    def _reduce_dtype(self) -> None:
        for name in ("communication_data_type", "data_types.grad_accum_dtype"):
            if self._values.get(name) is None:
                continue
            value = self._values[name]
            if value not in _DTYPES:
                raise self._wrong(name, '"fp32", "fp16" or "bf16"')
            dtype = _DTYPES[value]
            if self._communication.setdefault("reduce_dtype", dtype) != dtype:
                raise ValueError(
                    f"`{name}={value!r}` and `communication_data_type={self._values['communication_data_type']!r}`"
                    " differ: gradients are added and reduced in one dtype. Leave one of them out."
                )
            self._say(name, "translated", f"`communication.reduce_dtype={dtype!r}`", "communication")

    def _offload(self) -> None:
        """Read both sections of offloading, the old names, and ``aio``."""
        fields: dict[str, Any] = {}
        paths: list[str] = []
        for part, section, old in (
            ("optimizer", "offload_optimizer", "cpu_offload"),
            ("params", "offload_param", "cpu_offload_param"),
        ):
            device = self._offload_device(f"zero_optimization.{section}", f"zero_optimization.{old}")
            fields[part] = device
            path = self._nvme_path(f"zero_optimization.{section}.nvme_path", device)
            if path is not None and path not in paths:
                paths.append(path)
        if fields["optimizer"] is None and fields["params"] is None:
            return
        if paths:
            fields["path"] = paths[0] if len(paths) == 1 else paths
            self._disk_fields(fields)
        self._pin_memory(fields)
        ratio = self._number("zero_optimization.offload_optimizer.ratio")
        if ratio is not None:
            if ratio > 1:
                raise self._wrong("zero_optimization.offload_optimizer.ratio", "a number from 0 to 1")
            fields["fraction"] = float(ratio)
            self._say("zero_optimization.offload_optimizer.ratio", "translated", f"`fraction={ratio}`", "offload")
        self._options["offload"] = fields

    def _offload_device(self, section: str, old: str) -> str | None:
        name = f"{section}.device"
        if self._said(name):
            device = self._values[name]
            if device not in ("cpu", "nvme", "none", None):
                raise self._wrong(name, '"cpu", "nvme" or "none"')
            device = None if device == "none" else device
            part = "optimizer" if section.endswith("optimizer") else "params"
            self._say(name, "honoured", f"`Offload({part}={device!r})`", "offload")
            return device
        if self._said(old):
            is_on = self._flag(old)
            self._say(old, "translated", "`Offload(...='cpu')`" if is_on else "no offload", "offload")
            return "cpu" if is_on else None
        return None

    def _nvme_path(self, name: str, device: str | None) -> str | None:
        path = self._values.get(name)
        if device != "nvme":
            if self._said(name):
                self._say(name, "ignored", "nothing is offloaded to disks")
            return None
        if not isinstance(path, str) or not path:
            if "offload" in self._explicit:
                return None
            section = name.removesuffix(".nvme_path")
            raise ValueError(
                f"`{section}.device='nvme'` needs `{section}.nvme_path`, a directory on a local disk (got {path!r})."
            )
        self._say(name, "honoured", f"`Offload(path={path!r})`", "offload")
        return path

    def _disk_fields(self, fields: dict[str, Any]) -> None:
        size = self._integer("aio.block_size")
        if size is not None:
            fields["buffer_bytes"] = -(-size // 4096) * 4096
            self._say("aio.block_size", "translated", f"`Offload(buffer_bytes={fields['buffer_bytes']})`", "offload")
        depth, threads = self._integer("aio.queue_depth"), self._integer("aio.intra_op_parallelism")
        if depth is None and threads is None:
            return
        fields["io_threads"] = (depth or 8) * (threads or 1)
        for name in ("aio.queue_depth", "aio.intra_op_parallelism"):
            if self._said(name):
                why = f"`Offload(io_threads={fields['io_threads']})`: queue depth times threads"
                self._say(name, "translated", why, "offload")

    def _pin_memory(self, fields: dict[str, Any]) -> None:
        names = [
            f"zero_optimization.{name}"
            for name in ("offload_optimizer.pin_memory", "offload_param.pin_memory", "cpu_offload_use_pin_memory")
        ]
        said = [name for name in names if self._said(name)]
        default = self._version >= (0, 19, 5)
        fields["pin_memory"] = all(self._flag(name) is not False for name in said) if said else default
        for name in said:
            self._say(name, "honoured", f"`Offload(pin_memory={fields['pin_memory']})`", "offload")
        if not said:
            why = f"`Offload(pin_memory={default})`"
            self._say_default("zero_optimization.offload_optimizer.pin_memory", default, why, "offload")

    def _activations(self) -> None:
        """Read the sections that ask for checkpointed activations."""
        names = [f"activation_checkpointing.{key}" for key in ("cpu_checkpointing", "partition_activations")]
        on = [name for name in (*names, "gradient_checkpointing") if self._flag(name)]
        interval = "pipeline.activation_checkpoint_interval"
        if self._integer(interval, least=0):
            on.append(interval)
        for name in (*names, "gradient_checkpointing", interval):
            if self._said(name) and name not in on:
                self._say(name, "ignored", "it is off")
        if not on:
            return
        policy = "offload" if names[0] in on else "full"
        self._options["activation_checkpointing"] = {"policy": policy}
        for name in on:
            becomes = f"`ActivationCheckpointing(policy={policy!r})` of the repeated blocks"
            if name == names[1]:
                becomes += "; they are not divided among ranks"
            self._say(name, "translated", becomes, "activation_checkpointing")

    def _pipeline(self) -> None:
        stages = self._integer("pipeline.stages")
        is_on = stages is not None and stages > 1 and self._flag("pipeline.enabled", default=True) is not False
        partition = self._values.get("pipeline.partition", "parameters")
        if is_on:
            if not isinstance(partition, str) or not (partition in _PARTITIONS or partition.startswith("type:")):
                raise self._wrong("pipeline.partition", '"parameters", "uniform", "best" or "type:Regex"')
            fields = {"stages": stages, "partition": _PARTITIONS.get(partition, partition)}
            self._options["pipeline"] = fields
        for key in ("enabled", "stages", "partition"):
            if not self._said(f"pipeline.{key}"):
                continue
            if is_on:
                becomes = f"`Pipeline(stages={stages}, partition={_PARTITIONS.get(partition, partition)!r})`"
                self._say(f"pipeline.{key}", "translated", becomes, "pipeline")
            else:
                self._say(f"pipeline.{key}", "ignored", "no number of stages above 1 is said")

    def _parallel(self) -> None:
        """Refuse tensor parallelism, which is an option here, and expert parallelism, unless they are off."""
        for section, keys, why in (
            ("tensor_parallel", ("autotp_size", "tp_size"), "here it is the option `tensor_parallel=...`"),
            ("moe", ("ep_size",), "here it is the option `expert_parallel=...`"),
        ):
            sizes = [self._values[f"{section}.{key}"] for key in keys if self._said(f"{section}.{key}")]
            is_on = self._flag(f"{section}.enabled", default=bool(sizes)) is not False
            is_on = is_on and (not sizes or any(map(_is_on, sizes)))
            for name in [name for name in self._values if name.startswith(f"{section}.")]:
                if is_on:
                    self._feature(self._paths[name], self._values[name], why)
                else:
                    self._say(name, "ignored", "it is off")

    def _timeout(self) -> None:
        minutes = 10 if self._version >= (0, 19, 6) else 30
        if self._is_lightning:
            self._say_lightning("timeout", f"{minutes} min", "half an hour", "timeout")
            return
        self._options["timeout"] = 60.0 * minutes
        self._say_default("timeout", f"{minutes} min", f"`timeout={60.0 * minutes}`", "timeout")

    def _precision(self) -> PrecisionRule:
        bf16, fp16 = self._flag("bf16.enabled"), self._flag("fp16.enabled")
        autocast = self._flag("torch_autocast.enabled")
        if bf16 and fp16:
            raise ValueError("`bf16.enabled=True` and `fp16.enabled=True` exclude each other. Use one of them.")
        rule = self._autocast() if autocast and not bf16 and not fp16 else None
        if rule is None:
            rule = self._sixteen_bits(bf16, fp16)
        loss_scale = self._loss_scale(rule) if fp16 is not False or rule.fills == "16-mixed" else None
        self._switches(rule)
        self._overflow_check(rule)
        self._bf16_states(rule)
        return replace(rule, loss_scale=loss_scale)

    def _sixteen_bits(self, bf16: bool | None, fp16: bool | None) -> PrecisionRule:
        for name, kind, is_on, low in (
            ("bf16", "bf16", bf16, "bf16_master_weights_and_grads"),
            ("fp16", "16", fp16, "fp16_master_weights_and_grads"),
        ):
            has_low_masters = self._flag(f"{name}.{low}")
            if not is_on:
                continue
            key = f"`{name}.enabled=true`"
            if has_low_masters:
                self._options["masters"] = False
                self._say(
                    f"{name}.{low}",
                    "translated",
                    f"`masters=False`, with precision='{kind}-true'; gradients are reduced in fp32",
                    "masters",
                )
                return PrecisionRule(f"{kind}-true", (f"{kind}-true",), key, None)
            if self._said(f"{name}.{low}"):
                self._say(f"{name}.{low}", "honoured", "masters are kept in fp32")
            return PrecisionRule(f"{kind}-mixed", (f"{kind}-mixed", f"{kind}-true"), key, None)
        off = [kind for kind, flag in (("bf16", bf16), ("16", fp16)) if flag is False and self._was_said(kind)]
        accepts = tuple(one for one in _PRECISIONS if one.partition("-")[0] not in off)
        names = " and ".join(f"`{'fp16' if kind == '16' else 'bf16'}.enabled=false`" for kind in off)
        return PrecisionRule(None, accepts, names, None)

    def _was_said(self, kind: str) -> bool:
        return self._said("fp16.enabled" if kind == "16" else "bf16.enabled")

    def _autocast(self) -> PrecisionRule:
        dtype = self._values.get("torch_autocast.dtype", "bfloat16")
        kinds = {"bfloat16": "bf16-mixed", "float16": "16-mixed", "bf16": "bf16-mixed", "fp16": "16-mixed"}
        if dtype not in kinds:
            raise self._wrong("torch_autocast.dtype", '"bfloat16" or "float16"')
        name = "torch_autocast.lower_precision_safe_modules"
        modules = self._values.get(name) or []
        others = [one for one in modules if not str(one).startswith("torch.nn.")]
        if others:
            self._options["lowered"] = [str(one).rpartition(".")[2] for one in others]
            self._say(name, "translated", f"`lowered={self._options['lowered']}`", "lowered")
        elif self._said(name):
            self._say(name, "honoured", "matrices of PyTorch's modules compute in 16 bits")
        return PrecisionRule(kinds[dtype], (kinds[dtype],), f"`torch_autocast.dtype={dtype!r}`", None)

    def _switches(self, rule: PrecisionRule) -> None:
        for name in ("bf16.enabled", "fp16.enabled", "torch_autocast.enabled", "torch_autocast.dtype"):
            if not self._said(name):
                continue
            if self._values[name] == "auto":
                self._say(name, "translated", "as `Trainer(precision=...)` says")
            elif self._values[name] is False:
                self._say(name, "ignored", "it is off")
            elif rule.fills is not None:
                self._say(name, "translated", f"`Trainer(precision={rule.fills!r})`")

    def _overflow_check(self, rule: PrecisionRule) -> None:
        """Say that a step with infinite bf16 gradients is made here, where DeepSpeed skips it."""
        if rule.fills not in ("bf16-mixed", "bf16-true"):
            return
        name, why = "bf16.check_grad_overflow", "steps with gradients that are not finite are made, not skipped"
        if self._said(name):
            is_on = self._flag(name)
            self._say(name, "not yet" if is_on else "honoured", why)
        elif self._version >= (0, 19, 3):
            self._rows[f"({name})"] = Row(f"({name})", True, "not yet", why)

    def _bf16_states(self, rule: PrecisionRule) -> None:
        name = "bf16.bf16_optimizer_states"
        if not self._said(name):
            return
        has_masters = self._options.get("masters", True)
        if self._flag(name) and has_masters:
            raise ValueError(
                f"`{name}=True` needs `bf16.bf16_master_weights_and_grads=true`, as in DeepSpeed. Or use"
                " `ZeroStrategy(moments='bf16')`, which keeps fp32 masters."
            )
        if has_masters:
            self._say(name, "honoured", "optimizer states are in fp32")
        else:
            status: Status = "honoured" if self._flag(name) else "not yet"
            self._say(name, status, "optimizer states have the dtype of the values that are stepped, bf16")

    def _loss_scale(self, rule: PrecisionRule) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        condition = "" if rule.fills in ("16-mixed", "16-true") else ", with precision='16-mixed' or '16-true'"
        power = self._number("fp16.initial_scale_power")
        for key, field, value in (
            ("loss_scale", "static", self._number("fp16.loss_scale") or None),
            ("initial_scale_power", "init_scale", None if power is None else 2.0**power),
            ("loss_scale_window", "window", self._integer("fp16.loss_scale_window")),
            ("hysteresis", "hysteresis", self._integer("fp16.hysteresis")),
            ("consecutive_hysteresis", "consecutive_hysteresis", self._flag("fp16.consecutive_hysteresis") or None),
            ("min_loss_scale", "min_scale", self._number("fp16.min_loss_scale")),
        ):
            if value is not None:
                fields[field] = float(value) if field in ("static", "init_scale", "min_scale") else value
            if self._said(f"fp16.{key}"):
                shown = f"`LossScale({field}={fields[field]!r})`{condition}" if field in fields else "a dynamic scale"
                self._say(f"fp16.{key}", "translated", shown if key != "consecutive_hysteresis" or value else "off")
        return fields

    def _clipping(self) -> tuple[float | None, bool]:
        name = "gradient_clipping"
        if not self._said(name):
            value = 1.0 if self._version >= (0, 19, 3) else 0.0
            if self._is_lightning:
                self._say_lightning(name, value, "as `Trainer(gradient_clip_val=...)` says")
                return None, True
            self._say_default(name, value, f"`Trainer(gradient_clip_val={value})`")
            return value, True
        norm = self._number(name)
        if norm is None:
            self._say(name, "translated", "as `Trainer(gradient_clip_val=...)` says")
            return None, False
        self._say(name, "translated", f"`Trainer(gradient_clip_val={float(norm)})`")
        return float(norm), False

    def _batch(self) -> Batch:
        sizes = []
        for name, becomes in (
            ("train_batch_size", "compared with the loader, the accumulation and the ranks"),
            ("train_micro_batch_size_per_gpu", "compared with the batch size of the loader"),
            ("gradient_accumulation_steps", "`Trainer(accumulate_grad_batches={})`"),
        ):
            value = self._integer(name)
            sizes.append(value)
            if self._said(name):
                is_auto = value is None
                self._say(name, "translated", "as the Trainer and the loader say" if is_auto else becomes.format(value))
        return Batch(*sizes)

    def _params_of(self, section: str) -> dict[str, Any]:
        prefix = f"{section}.params."
        return {name.removeprefix(prefix): value for name, value in self._values.items() if name.startswith(prefix)}

    def _optimizer(self) -> MadeOf | None:
        return self._made("optimizer")

    def _schedule(self) -> MadeOf | None:
        made = self._made("scheduler")
        if made is not None:
            for name, value in made.defaults.items():
                self._say_default(f"scheduler.params.{name}", value, made.notes[name][1])
        return made

    def _made(self, section: str) -> MadeOf | None:
        params = self._params_of(section)
        if self._values.get(f"{section}.type") is None:
            if params and not self._said(f"{section}.type"):
                raise ValueError(f"`{section}.params` needs `{section}.type`, the name of a class.")
            return None
        kind = self._values[f"{section}.type"]
        if section == "optimizer":
            made = optimizer_of(kind, params)
        else:
            made = schedule_of(kind, params, highest=0.001 if self._version < (0, 17, 2) else None)
        where = f"`{made.class_path}`" if made.cls is not None else made.missing
        status: Status = "translated" if made.cls is not None else "not yet"
        self._say(f"{section}.type", status, f"{where}, where `configure_optimizers` makes none" if made.cls else where)
        for name in params:
            status, becomes = made.notes[name]  # type: ignore[assignment]
            self._say(f"{section}.params.{name}", status, becomes)
        return made


# -- Paths -------------------------------------------------------------------------------------------------------------


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of every key; sections are entered.

    Raises:
        ValueError: A section is no object.
    """
    for key, value in config.items():
        path = f"{prefix}{key}"
        name = _canonical(path)
        if name == "zero_optimization" and isinstance(value, bool):
            yield f"{path}.stage", int(value)
        elif name in SECTIONS and isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{path}.")
        elif name in SECTIONS and value is not None and value != {}:
            raise ValueError(f"`{path}={value!r}` must be an object with keys, for example `{{}}`.")
        else:
            yield path, value


def _canonical(path: str) -> str:
    """Return a path with the present names of its sections and key."""
    head, _, tail = path.partition(".")
    path = f"{ALIASES[head]}.{tail}" if tail and head in ALIASES else path
    return ALIASES.get(path, path)


def _is_on(value: Any) -> bool:
    """Say whether a value switches a feature on: a size above 1, an object that is ``enabled`` or has no switch."""
    if isinstance(value, Mapping):
        switches = list(_switches(value))
        return any(switches) if switches else bool(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value > 1
    return value not in (None, False, "", "none", "None", "mean", "auto")


def _switches(value: Any) -> Iterator[bool]:
    """Yield the values of ``enabled`` in an object, also in objects inside of it.

    DeepSpeed reads those inside whatever the outer one says, for example ``data_efficiency.data_routing.random_ltd``.
    """
    for key, item in value.items():
        if key in ("enabled", "deepcompile"):
            yield item is True
        elif isinstance(item, Mapping):
            yield from _switches(item)


def _shown(value: Any) -> str:
    """Return a value as the table shows it, at most 32 characters."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 32 else f"{text[:29]}..."


def _version(text: Any) -> tuple[int, ...]:
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"`deepspeed_version={text!r}` must be a version such as '0.17.2', or None for the newest.")
    return tuple(int(part or 0) for part in match.groups())
