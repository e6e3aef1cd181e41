"""Calls for rank 0 in steps of a pipeline: recorded on the last stage, which is never rank 0, and made there later.

Note [Code for rank 0]
    Only the last stage runs code behind the blocks, and rank 0 is on the first one. ``self.print`` and ``log_metrics``
    of loggers are recorded per micro-batch, like ``self.log``. A step that asks by itself whether it runs on rank 0,
    uses ``logger.experiment`` or calls other methods of loggers cannot be served in this way: nothing happens on rank
    0, and a warning says so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from inspect import getattr_static
from pathlib import Path
from types import FunctionType
from typing import Any

import lightning.fabric.loggers.logger as fabric_loggers
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_zero.errors import PipelineError
from lightning_zero.parallel.module_state import LIBRARIES
from lightning_zero.parallel.pipeline.schedule.microbatches import leaves_of, rebuilt
from lightning_zero.parallel.pipeline.stages.sources import is_fake

__all__ = ["RankZeroCalls", "RankZeroMessage", "replaced"]

_MISSING = object()


@dataclass(frozen=True)
class _Call:
    """A call of a method: of the logger with a number, or of the module."""

    logger: int | None
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class RankZeroMessage:
    """Calls of a step, and uses of rank 0 that cannot be recorded, with the lines that make them."""

    calls: list[_Call]
    uses: set[tuple[str, str]]

    def behind(self, front: RankZeroMessage) -> RankZeroMessage:
        """Return this behind the calls of a step's first part."""
        return RankZeroMessage(front.calls + self.calls, front.uses | self.uses)


class RankZeroCalls:
    """Records calls that rank 0 is to make.

    Args:
        module: The LightningModule.
        metrics_of: Returns what the program gets for a dictionary of the Trainer's logged values.
    """

    def __init__(self, module: Any, metrics_of: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._module = module
        self._calls: dict[int, list[_Call]] = {}  # by micro-batch
        self._index = 0  # of the micro-batch that runs
        self._uses: set[tuple[str, str]] = set()  # by steps on this rank, with their lines
        self._has_warned = False
        self._class_of = cache(partial(_asked, self._note, metrics_of))  # of trainers
        self._strategy_class_of = cache(partial(_asked, self._note, None))
        self._logger_class_of = cache(partial(_called, self._note))
        self._experiment = _experiment(self._note)  # of loggers on other ranks than 0

    def begin(self, index: int) -> None:
        """Begin a run of a micro-batch, which makes all calls of earlier ones again."""
        self._index = index
        self._calls[index] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record instead of calling."""
        self._calls, self._index = {}, 0
        trainer = getattr(self._module, "_trainer", None)
        loggers = [] if trainer is None else trainer.loggers
        with ExitStack() as stack:
            stack.enter_context(replaced(self._module, "print", partial(self._record, None, "print")))
            for number, logger in enumerate(loggers):
                record = partial(self._record, number, "log_metrics")
                stack.enter_context(replaced(logger, "log_metrics", record))
                stack.enter_context(_of_class(logger, self._logger_class_of))
            if trainer is not None:
                stack.enter_context(_of_class(trainer, self._class_of))
                stack.enter_context(_of_class(trainer.strategy, self._strategy_class_of))
            stack.enter_context(replaced(fabric_loggers, "_DummyExperiment", self._experiment))
            yield

    def _record(self, logger: int | None, method: str, *args: Any, **kwargs: Any) -> None:
        if method == "print":
            args = tuple(map(str, args))
        call = _Call(logger, method, _changed(args, _as_it_is), _changed(kwargs, _as_it_is))
        self._calls.setdefault(self._index, []).append(call)

    def _note(self, name: str, depth: int) -> None:
        frame = sys._getframe(depth)
        if frame.f_globals.get("__name__", "").partition(".")[0] not in LIBRARIES:
            self._uses.add((name, f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"))

    def told(self) -> RankZeroMessage:
        """Return the calls of a step, on the last stage.

        Raises:
            PipelineError: One has a value that an earlier stage computes.
        """
        calls = [call for index in sorted(self._calls) for call in self._calls[index]]
        for call in calls:
            if any(is_fake(leaf) for _, leaf in leaves_of((call.args, call.kwargs), "")):
                raise PipelineError(
                    f"`{call.method}` is given a value of an earlier pipeline stage, which the last stage does not"
                    " have. Use `self.log`, which gives all stages such values."
                )
        calls = [_Call(one.logger, one.method, *_changed((one.args, one.kwargs), Tensor.cpu)) for one in calls]
        return RankZeroMessage(calls, set(self._uses))

    def make(self, message: RankZeroMessage) -> None:
        """Make the calls of the last stage; methods of Lightning do nothing on other ranks than 0."""
        for call in message.calls:
            of = self._module if call.logger is None else self._module.trainer.loggers[call.logger]
            getattr(of, call.method)(*call.args, **call.kwargs)
        self._warn(message.uses - self._uses)

    def _warn(self, uses: set[tuple[str, str]]) -> None:
        """Say once which code for rank 0 is not reached there."""
        if uses and not self._has_warned:
            self._has_warned = True
            found = ", ".join(f"`{name}` ({line})" for name, line in sorted(uses))
            rank_zero_warn(
                f"A step uses {found} where only the last pipeline stage runs it, which is not rank 0: code for rank 0"
                " does nothing there, and the loggers of rank 0 are not called. `self.log`, `self.print` and"
                " `self.logger.log_metrics` work. For the rest keep the value in an attribute of the LightningModule,"
                " and use it in `on_train_batch_end` or `on_validation_batch_end`, which run on all ranks."
            )


@contextmanager
def replaced(value: Any, name: str, by: Any) -> Iterator[None]:
    """Give an object an attribute for a while."""
    before = vars(value).get(name, _MISSING)
    vars(value)[name] = by
    try:
        yield
    finally:
        if before is _MISSING:
            del vars(value)[name]
        else:
            vars(value)[name] = before


@contextmanager
def _of_class(value: Any, cls: Callable[[type], type]) -> Iterator[None]:
    """Give an object another class for a while, made of its own, if its class allows that."""
    before = type(value)
    try:
        value.__class__ = cls(before)
    except TypeError:  # it has slots, or is final
        yield
        return
    try:
        yield
    finally:
        value.__class__ = before


def _asked(note: Callable[[str, int], None], metrics_of: Any, cls: type) -> type:
    """Return a class of trainers and strategies that call ``note`` where a program asks them for the rank.

    Args:
        note: Is called with the name, and the depth of the frame that asks.
        metrics_of: Returns what a program gets for a dictionary of logged values; None for a strategy.
        cls: Their own class.
    """

    def property_of(name: str) -> Any:
        def read(trainer: Any) -> Any:
            is_of_module = sys._getframe(1).f_code.co_name == name  # `LightningModule.global_rank` asks the trainer
            note(name, 3 if is_of_module else 2)
            return getattr(super(found, trainer), name)

        return property(read)

    def metrics(name: str) -> Any:
        return property(lambda trainer: metrics_of(getattr(super(found, trainer), name)))

    names = {name: property_of(name) for name in ("is_global_zero", "global_rank", "local_rank") if hasattr(cls, name)}
    if metrics_of is not None:
        names |= {name: metrics(name) for name in ("callback_metrics", "logged_metrics", "progress_bar_metrics")}
    found = type(cls.__name__, (cls,), {**names, "__module__": cls.__module__, "__qualname__": cls.__qualname__})
    return found


def _called(note: Callable[[str, int], None], cls: type) -> type:
    """Return a class of loggers that call ``note`` where a program calls one of their methods."""

    def method_of(name: str) -> Any:
        def call(logger: Any, *args: Any, **kwargs: Any) -> Any:
            note(f"logger.{name}", 2)
            return getattr(super(found, logger), name)(*args, **kwargs)

        return call

    public = (name for name in dir(cls) if not name.startswith("_"))
    names = {name: method_of(name) for name in public if isinstance(getattr_static(cls, name), FunctionType)}
    found = type(cls.__name__, (cls,), {**names, "__module__": cls.__module__, "__qualname__": cls.__qualname__})
    return found


def _experiment(note: Callable[[str, int], None]) -> type:
    """Return a class of experiments of loggers on other ranks than 0, which calls ``note``."""
    dummy: Any = fabric_loggers._DummyExperiment

    class Noting(dummy):  # type: ignore[misc]
        def __getattr__(self, name: str) -> Any:
            note(f"logger.experiment.{name}", 2)
            return super().__getattr__(name)

    return Noting


def _as_it_is(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor that a later write does not change."""
    return tensor if is_fake(tensor) else tensor.detach().clone()


def _changed(value: Any, of_tensor: Callable[[Tensor], Tensor]) -> Any:
    return of_tensor(value) if isinstance(value, Tensor) else rebuilt(value, partial(_changed, of_tensor=of_tensor))
