"""The optimizer and the schedule that a configuration of DeepSpeed names, as classes of PyTorch and of this package."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_zero import schedules
from lightning_zero.errors import nearest

__all__ = ["MadeOf", "Note", "optimizer_of", "schedule_of"]

_SCHEDULES = {name: getattr(schedules, name) for name in schedules.__all__ if name != "Schedule"}
_OWN_OF_DEEPSPEED = ("lamb", "lion", "muon", "onebitadam", "onebitlamb", "zerooneadam", "muadam", "muadamw", "musgd")
_AUTO_OPTIMIZER = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0}
_AUTO_SCHEDULE: dict[str, Any] = {"warmup_min_lr": 0.0, "warmup_max_lr": None}
# Where a module keeps values that its configuration leaves to it.
_HINTS = {
    "lr": ("lr", "learning_rate"),
    "warmup_num_steps": ("warmup_num_steps", "warmup_steps", "num_warmup_steps"),
}
_FEWEST = 2  # steps of a warm-up, whatever is said
_CYCLED = "`cycle_momentum='deepspeed'`: `betas` are cycled, with 0.99 as the second one; other momentum stays as it is"

Note = tuple[str, str]
"""The status of a parameter, and its translation."""


@dataclass(frozen=True)
class MadeOf:
    """An optimizer or a schedule: its class and arguments.

    Args:
        section: ``"optimizer"`` or ``"scheduler"``.
        cls: The class; None: it does not exist here.
        args: Arguments beside the parameters or the optimizer; ``"auto"`` for values that the module gives.
        missing: Why there is none.
        notes: By parameter, its status and translation.
        defaults: DeepSpeed's values of parameters that are not given; ``notes`` have their translations.
    """

    section: str
    cls: type | None
    args: Mapping[str, Any] = field(default_factory=dict)
    missing: str = ""
    notes: Mapping[str, Note] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def class_path(self) -> str:
        """The path that a YAML names."""
        assert self.cls is not None
        if self.cls.__module__ == schedules.__name__:
            return f"lightning_zero.{self.cls.__name__}"
        room = "torch.optim.lr_scheduler" if self.section == "scheduler" else "torch.optim"
        return f"{room}.{self.cls.__name__}"

    def make(self, first: Iterable[Tensor] | Optimizer, hint: Callable[[str], Any]) -> Any:
        """Return the optimizer of parameters, or the schedule of an optimizer.

        Args:
            first: The parameters, or the optimizer.
            hint: Returns the value of an attribute or hyperparameter of the module, or None.

        Raises:
            ValueError: The class does not exist here, or nothing says the value of ``"auto"``.
        """
        if self.cls is None:
            raise ValueError(f"{self.missing} Make it in `configure_optimizers`, which is used instead.")
        args = {name: _whole(name, self._filled(name, value, hint)) for name, value in self.args.items()}
        return self.cls(first, **args)

    def _filled(self, name: str, value: Any, hint: Callable[[str], Any]) -> Any:
        if value != "auto" or name == "total_num_steps":
            return value
        names = _HINTS.get(name, (name,))
        found = next((one for one in map(hint, names) if one is not None), None)
        if found is None:
            raise ValueError(
                f"`{self.section}.params.{name}='auto'`: the Trainer does not know it, and the module has no attribute"
                f" or hyperparameter {' or '.join(f'`{one}`' for one in names)}. Say the number in the configuration."
            )
        return found


def optimizer_of(kind: Any, params: Mapping[str, Any]) -> MadeOf:
    """Return the optimizer of ``{"type": kind, "params": params}``.

    Raises:
        ValueError: The type or a parameter is not known.
    """
    name = _name(kind, "optimizer")
    if "max_grad_norm" in params:
        raise ValueError("`optimizer.params.max_grad_norm` is no parameter of an optimizer. Use `gradient_clipping`.")
    if name.lower() in _OWN_OF_DEEPSPEED:
        return MadeOf(
            "optimizer",
            None,
            missing=f"`optimizer.type={kind!r}` does not exist here yet.",
            notes=dict.fromkeys(params, ("not yet", "the optimizer does not exist here")),
        )
    if name.lower() in ("adam", "adamw"):
        return _adam(name, params)
    known = {one: cls for one, cls in vars(torch.optim).items() if _is_class(cls, Optimizer)}
    cls = known.get({"adagrad": "Adagrad", "sgd": "SGD"}.get(name.lower(), name))
    if cls is None:
        raise ValueError(
            f"`optimizer.type={kind!r}` is not known.{nearest(name, known)} Use 'Adam', 'AdamW', or the name of a class"
            " in `torch.optim`."
        )
    return _of_class("optimizer", cls, params, auto=_AUTO_OPTIMIZER)


def _adam(name: str, params: Mapping[str, Any]) -> MadeOf:
    """Return DeepSpeed's Adam: it decays weights as AdamW does unless told otherwise, and by 0 unless told."""
    params = dict(params)
    is_torch = bool(params.pop("torch_adam", False))
    is_decoupled = bool(params.pop("adam_w_mode", True)) or name.lower() == "adamw"
    has_correction = params.pop("bias_correction", True)
    notes: dict[str, Note] = {
        "torch_adam": ("ignored", "the optimizer is PyTorch's"),
        "adam_w_mode": ("translated", f"`torch.optim.{'AdamW' if is_decoupled else 'Adam'}`"),
        "bias_correction": ("honoured", "always"),
        "set_grad_none": ("ignored", "gradients are set to None"),
    }
    params.pop("set_grad_none", None)
    if not has_correction:
        missing = "`optimizer.params.bias_correction=False` does not exist in PyTorch's Adam."
        return MadeOf("optimizer", None, missing=missing, notes={"bias_correction": ("not yet", missing), **notes})
    if not is_torch:
        params.setdefault("weight_decay", 0.0)
    cls = torch.optim.AdamW if is_decoupled else torch.optim.Adam
    made = _of_class("optimizer", cls, params, auto=_AUTO_OPTIMIZER)
    return MadeOf("optimizer", made.cls, made.args, notes={**notes, **made.notes})


def schedule_of(kind: Any, params: Mapping[str, Any], *, highest: float | None) -> MadeOf:
    """Return the schedule of ``{"type": kind, "params": params}``.

    Args:
        kind: A schedule of DeepSpeed, or the name of a class in ``torch.optim.lr_scheduler``.
        params: Its parameters.
        highest: ``warmup_max_lr`` of ``WarmupLR`` where it is not given; None: the optimizer's own rate.

    Raises:
        ValueError: The type or a parameter is not known.
    """
    name = _name(kind, "scheduler")
    known = {one: cls for one, cls in vars(torch.optim.lr_scheduler).items() if _is_class(cls, LRScheduler)}
    cls = _SCHEDULES.get(name) or known.get(name)
    if cls is None:
        raise ValueError(
            f"`scheduler.type={kind!r}` is not known.{nearest(name, [*_SCHEDULES, *known])} Use"
            f" {', '.join(map(repr, _SCHEDULES))}, or the name of a class in `torch.optim.lr_scheduler`."
        )
    if name not in _SCHEDULES:
        return _of_class("scheduler", cls, params, auto={})
    defaults = {one: value for one, value in _defaults(cls, highest).items() if one not in params}
    given = {**params, **defaults}
    params = {one: _whole(one, value) for one, value in given.items()}
    notes: dict[str, Note] = {}
    if params.get("warmup_type", "log") not in ("log", "linear"):
        notes["warmup_type"] = ("translated", "`warmup_type='log'`, as in DeepSpeed, for a word that is not known")
        params["warmup_type"] = "log"
    if params.get("warmup_num_steps") != given.get("warmup_num_steps"):
        notes["warmup_num_steps"] = ("translated", f"`warmup_num_steps={_FEWEST}`, the fewest of DeepSpeed")
    if params.get("cycle_momentum") is True:
        notes["cycle_momentum"] = ("translated", _CYCLED)
        params["cycle_momentum"] = "deepspeed"
    if params.get("warmup_max_lr", 0.0) is None:
        notes["warmup_max_lr"] = ("translated", "the optimizer's rate")
    made = _of_class("scheduler", cls, params, auto=_AUTO_SCHEDULE)
    return MadeOf("scheduler", made.cls, made.args, notes={**made.notes, **notes}, defaults=defaults)


def _defaults(cls: type, highest: float | None) -> dict[str, Any]:
    """Return DeepSpeed's defaults that differ from those of the class."""
    if cls is schedules.OneCycle:
        return {"cycle_momentum": True}
    if cls is schedules.WarmupDecayLR:
        return {"warmup_max_lr": 0.001}
    return {"warmup_max_lr": highest} if cls is schedules.WarmupLR else {}


def _of_class(section: str, cls: type, params: Mapping[str, Any], *, auto: Mapping[str, Any]) -> MadeOf:
    known = [name for name in inspect.signature(cls).parameters if name not in ("params", "optimizer")]
    args: dict[str, Any] = {}
    notes: dict[str, Note] = {}
    for name, value in params.items():
        if name not in known:
            raise ValueError(
                f"`{section}.params.{name}` is no parameter of `{cls.__name__}`.{nearest(name, known)} The parameters"
                f" are {', '.join(known)}."
            )
        args[name] = auto.get(name, value) if value == "auto" else value
        if isinstance(args[name], list) and name == "betas":
            args[name] = tuple(args[name])
        notes[name] = ("honoured", f"`{name}={args[name]!r}`")
        if value == "auto":
            notes[name] = ("translated", notes[name][1] if name in auto else _filled_from(name))
    return MadeOf(section, cls, args, notes=notes)


def _filled_from(name: str) -> str:
    if name == "total_num_steps":
        return "the number of steps of the Trainer"
    return f"the module's {' or '.join(f'`{one}`' for one in _HINTS.get(name, (name,)))}"


def _whole(name: str, value: Any) -> Any:
    """Return a number of steps as an integer (JSON may say ``1e3``), and that of a warm-up as DeepSpeed takes it."""
    is_count = name.endswith(("_steps", "_size", "_count"))
    if is_count and isinstance(value, float) and value.is_integer():
        value = int(value)
    return _FEWEST if name == "warmup_num_steps" and isinstance(value, int) and value < 1 else value


def _name(kind: Any, section: str) -> str:
    if not isinstance(kind, str) or not kind:
        raise ValueError(f"`{section}.type={kind!r}` must be the name of a class, for example 'AdamW' or 'WarmupLR'.")
    return kind


def _is_class(value: Any, base: type) -> bool:
    return isinstance(value, type) and issubclass(value, base) and value is not base
