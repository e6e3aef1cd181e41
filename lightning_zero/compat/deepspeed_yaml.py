"""A configuration of DeepSpeed as the YAML of a ``LightningCLI``: the command ``convert-config``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lightning_zero.compat.deepspeed_config import DeepSpeedPlan, plan_of, report
from lightning_zero.compat.deepspeed_sections import MadeOf

__all__ = ["convert_config", "yaml_of"]

_LOGGERS = "lightning.pytorch.loggers"
# Class of the logger, and its arguments by DeepSpeed's keys.
_LOGGER_OF: dict[str, tuple[str, dict[str, str]]] = {
    "tensorboard": ("TensorBoardLogger", {"output_path": "save_dir", "job_name": "name"}),
    "csv_monitor": ("CSVLogger", {"output_path": "save_dir", "job_name": "name"}),
    "wandb": ("WandbLogger", {"project": "project", "team": "entity", "group": "group"}),
    "comet": ("CometLogger", {"workspace": "workspace", "project": "project"}),
}
# Rows of the table that a run of `from_deepspeed` compares, and a YAML cannot.
_SETTLED = {
    "train_batch_size": "the number of ranks times the accumulation and the `batch_size` of the loader",
    "train_micro_batch_size_per_gpu": "the `batch_size` of the loader: set it in `data`",
}


def convert_config(
    source: Path, deepspeed_version: str | None = None, strict: bool = True, ranks: int | None = None
) -> None:
    """Print the YAML for ``LightningCLI`` that a JSON file of DeepSpeed stands for, with a table of its keys.

    Args:
        source: DeepSpeed's JSON file.
        deepspeed_version: Version of DeepSpeed whose defaults hold for keys that are not there; by default the newest,
            and clipping and timeout as in Lightning's strategy for DeepSpeed.
        strict: Refuse keys that are not known, or would change the training and do not exist here.
        ranks: Number of processes that have a copy of the model, for an accumulation that follows from batch sizes.

    Raises:
        ValueError: ``ranks`` is below 1, or the configuration has a key that is not allowed.
    """
    if ranks is not None and ranks < 1:
        raise ValueError(f"`--ranks={ranks}` must be a number of processes, 1 or more.")
    print(yaml_of(plan_of(source, deepspeed_version=deepspeed_version, strict=strict), ranks=ranks), end="")


def yaml_of(plan: DeepSpeedPlan, *, ranks: int | None = None) -> str:
    """Return the YAML of a plan, with its report in comments.

    Args:
        plan: The plan.
        ranks: Number of copies of the model; None: not known.
    """
    content: dict[str, Any] = {}
    notes = []
    if plan.optimizer is not None or plan.schedule is not None:
        notes.append(
            "`optimizer` and `lr_scheduler` replace `configure_optimizers` of the module: leave them out if it"
        )
        notes.append("has one.")
    for key, made in (("optimizer", plan.optimizer), ("lr_scheduler", plan.schedule)):
        section, note = _section(key, made)
        content.update(section)
        notes.extend(note)
    content["trainer"] = _trainer(plan, ranks)
    if plan.batch.train is not None and ranks is None and plan.batch.accumulation is None:
        notes.append("`accumulate_grad_batches` follows from the batch sizes and the number of ranks: give `--ranks`.")
    scale = plan.precision.loss_scale if plan.precision.fills is None else None
    if scale:
        notes.append("The configuration leaves the precision open: with `precision: 16-mixed` or `16-true`, take")
        notes.append("`loss_scale`, at the end, in.")
    lines = [*report(plan, _SETTLED).splitlines(), *(["", *notes] if notes else [])]
    comment = "".join(f"# {line}".rstrip() + "\n" for line in lines)
    text: str = yaml.safe_dump(content, sort_keys=False, width=120)
    return (
        comment
        + text
        + (f"      # loss_scale: {yaml.safe_dump(dict(scale), default_flow_style=True)}" if scale else "")
    )


def _trainer(plan: DeepSpeedPlan, ranks: int | None) -> dict[str, Any]:
    trainer: dict[str, Any] = {}
    if plan.precision.fills is not None:
        trainer["precision"] = plan.precision.fills
    if plan.clipping:
        trainer["gradient_clip_val"] = plan.clipping
    accumulation = plan.batch.accumulation if ranks is None else plan.batch.accumulation_on(ranks)
    if accumulation is not None:
        trainer["accumulate_grad_batches"] = accumulation
    loggers = [_logger(name, section) for name, section in plan.observers.items() if name in _LOGGER_OF]
    if loggers:
        trainer["logger"] = loggers
    if plan.wants_monitor:
        trainer["callbacks"] = [{"class_path": "lightning_zero.ZeroMonitor"}]
    options = dict(plan.options)
    if plan.precision.loss_scale and plan.precision.fills in ("16-mixed", "16-true"):
        options["loss_scale"] = dict(plan.precision.loss_scale)
    trainer["strategy"] = {"class_path": "lightning_zero.ZeroStrategy", "init_args": options}
    return trainer


def _logger(name: str, section: Mapping[str, Any]) -> dict[str, Any]:
    kind, names = _LOGGER_OF[name]
    args = {names[key]: value for key, value in section.items() if key in names and value is not None}
    if "save_dir" in names.values():
        args.setdefault("save_dir", ".")
    return {"class_path": f"{_LOGGERS}.{kind}", "init_args": args}


def _section(key: str, made: MadeOf | None) -> tuple[dict[str, Any], list[str]]:
    """Return a section of the YAML, and remarks for its head."""
    if made is None:
        return {}, []
    if made.cls is None:
        return {}, [f"{made.missing} Make it in `configure_optimizers`."]
    if made.class_path.startswith("torch.optim.lr_scheduler."):
        return {}, [
            f"`LightningCLI` would step `{made.class_path}` once an epoch, and DeepSpeed does at every step: make",
            'it in `configure_optimizers`, with `"interval": "step"`.',
        ]
    open_values = [name for name, value in made.args.items() if value == "auto" and name != "total_num_steps"]
    args = {name: None if name in open_values else _plain(value) for name, value in made.args.items()}
    notes = [f"Say `{key}.init_args.{name}`: the configuration leaves it open." for name in open_values]
    return {key: {"class_path": made.class_path, "init_args": args}}, notes


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
