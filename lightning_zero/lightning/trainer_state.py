"""Options of optimizers (a learning rate) and ``Trainer.should_stop``, which steps may set, alike on all stages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_zero.parallel.module_state import version_of

__all__ = ["TrainerChanges", "TrainerState"]

_MISSING = object()


@dataclass(frozen=True)
class TrainerChanges:
    """The changes of a step.

    Attributes:
        options: New values, by number of the optimizer, of its parameter group, and name.
        should_stop: Of the Trainer.
    """

    options: dict[tuple[int, int, str], Any]
    should_stop: bool


class TrainerState:
    """Keeps options and ``should_stop`` of a Trainer alike on all stages: the last one decides.

    Call protocol:
        1. ``begin`` before a batch; ``put_back`` around runs that do not count.
        2. ``changes`` behind it, on the last stage, and ``take`` on the others.

    Args:
        module: The LightningModule.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._before = _Kept(None)  # the batch that is running

    def begin(self) -> None:
        """Begin a batch."""
        self._before = _Kept(self._trainer)

    @property
    def _trainer(self) -> Any:
        return getattr(self._module, "_trainer", None)

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Restore at the end."""
        trainer = self._trainer
        kept, should_stop = _Kept(trainer), getattr(trainer, "should_stop", False)
        try:
            yield
        finally:
            kept.restore()
            if trainer is not None:
                trainer.should_stop = should_stop

    def changes(self) -> TrainerChanges:
        """Return the changes of this batch, on the last stage."""
        return TrainerChanges(self._before.changed(), getattr(self._trainer, "should_stop", False))

    def take(self, changes: TrainerChanges) -> None:
        """Take over the changes of the last stage in place of those of this one."""
        self._before.restore()
        self._before.assign(changes.options)
        if changes.should_stop:
            self._trainer.should_stop = True


class _Kept:
    """The options of a Trainer's optimizers as they are now; of no Trainer: none."""

    def __init__(self, trainer: Any) -> None:
        optimizers = getattr(trainer, "optimizers", [])
        self._groups: dict[tuple[int, int], dict[str, Any]] = {
            (number, index): group
            for number, optimizer in enumerate(optimizers)
            for index, group in enumerate(optimizer.param_groups)
        }
        self._options = {
            place: {name: _Option(value) for name, value in group.items() if name != "params"}
            for place, group in self._groups.items()
        }

    def restore(self) -> None:
        """Give the options the values that they had."""
        for place, group in self._groups.items():
            options = self._options[place]
            for name in [name for name in group if name not in options and name != "params"]:
                del group[name]
            for name, option in options.items():
                option.restore(group, name)

    def changed(self) -> dict[tuple[int, int, str], Any]:
        """Return the options that have other values now, in host memory."""
        return {
            (*place, name): value.detach().cpu() if isinstance(value, Tensor) else value
            for place, group in self._groups.items()
            for name, value in group.items()
            if name != "params" and (name not in self._options[place] or self._options[place][name].differs(value))
        }

    def assign(self, options: dict[tuple[int, int, str], Any]) -> None:
        """Give options other values, tensors in place."""
        for (number, index, name), value in options.items():
            group = self._groups[number, index]
            old = group.get(name)
            if isinstance(value, Tensor) and isinstance(old, Tensor) and old.shape == value.shape:
                with torch.no_grad():
                    old.copy_(value)
            else:
                group[name] = value


class _Option:
    """The value of an option, and of a tensor a copy."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._version = version_of(value) if isinstance(value, Tensor) else 0
        self._copy = value.detach().clone() if isinstance(value, Tensor) else None

    def restore(self, group: dict[str, Any], name: str) -> None:
        if group.get(name, _MISSING) is not self._value:
            group[name] = self._value
        if self._copy is not None and version_of(self._value) != self._version:
            with torch.no_grad():
                self._value.copy_(self._copy)

    def differs(self, value: Any) -> bool:
        if isinstance(value, Tensor):
            return value is not self._value or version_of(value) != self._version
        return value is not self._value and bool(value != self._value)
