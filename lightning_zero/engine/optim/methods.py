"""Methods of an optimizer beside ``step`` (``train`` and ``eval`` of schedule-free ones), run on segments (ADR 0035).

Note [Methods see segments]
    A method that reads or writes parameters, or its states of them, must see this rank's segments, as ``step`` does.
    So the parameters of the optimizer are watched while a method runs. When it asks about one of them, the step window
    opens; when it uses values, these are made the parameters' when it returns. A method that touches no parameter, such
    as one that returns a learning rate, costs nothing and may be called by one rank alone. Norms of states, as those of
    parameters, are finished over the ranks: all of them call it. In properties and private methods, which are not
    watched, states are those that the program sees between steps.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from types import FrameType, FunctionType
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from lightning_zero.engine.buffers.parameter import WatchedParameter, has_class, swap_class, unwatch, watch
from lightning_zero.engine.buffers.segment_parameter import SegmentParameter

__all__ = [
    "MethodCalls",
    "RunningStep",
    "are_engines",
    "defines_zero_grad",
    "has_pre_hooks",
    "keeps_states_plain",
    "may_use_closure",
    "methods_on_segments",
    "needs_closure",
]

_OWN = frozenset({"step", "zero_grad", "add_param_group", "state_dict", "load_state_dict", "share_memory"})


def defines_zero_grad(cls: type[Optimizer]) -> bool:
    """Say whether a class has another ``zero_grad`` than PyTorch's."""
    return not all(_is_pytorchs(function) for function in _functions_of(cls.zero_grad))


def needs_closure(optimizer: Optimizer) -> bool:
    """Say whether an optimizer cannot be stepped without a closure, as LBFGS."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def may_use_closure(optimizer: Optimizer) -> bool:
    """Say whether an optimizer may do something else with a closure than call it first: its step is not PyTorch's.

    Not if the step takes none.
    """
    if all(_is_pytorchs(function) for function in _functions_of(optimizer.step)):
        return needs_closure(optimizer)
    options = inspect.signature(optimizer.step).parameters
    return "closure" in options or any(one.kind is inspect.Parameter.VAR_KEYWORD for one in options.values())


def has_pre_hooks(optimizer: Optimizer) -> bool:
    """Say whether the program has hooks that run before a step, in front of its closure."""
    return not are_engines(optimizer._optimizer_step_pre_hooks, _global_optimizer_pre_hooks)


def are_engines(*hooks: Mapping[int, Any]) -> bool:
    """Say whether none of the hooks around a step is the program's."""
    found = [hook for some in hooks for hook in some.values()]
    return all(getattr(hook, "__module__", "").startswith("lightning_zero.engine.") for hook in found)


def keeps_states_plain(frame: FrameType | None, optimizer: Optimizer) -> bool:
    """Say whether states are read for a ``state_dict``, a pickle and the like, by the optimizer's own code."""
    while frame is not None and frame.f_locals.get("self") is optimizer:
        name = frame.f_code.co_name
        if name in _OWN or (name.startswith("__") and name.endswith("__")):
            return True
        frame = frame.f_back
    return False


def _functions_of(method: Any) -> Iterator[Any]:
    """Yield a method's function and those that it wraps: hooks, counters of schedulers, the step itself."""
    while method is not None:
        yield getattr(method, "__func__", method)
        method = getattr(method, "__wrapped__", None)


def _is_pytorchs(function: Any) -> bool:
    """Say whether PyTorch defines a function; ``wraps`` gives a wrapper the module of the wrapped one."""
    return str(getattr(function, "__globals__", {}).get("__name__", "")).startswith("torch.")


class RunningStep:
    """Knows whether code runs inside ``Optimizer.step``, also after a step that has raised."""

    def __init__(self) -> None:
        self._frame: FrameType | None = None  # of the function that has called the hook
        self._is_suspended = False
        self.is_in_hooks = False  # behind the step, which are the program's

    def begin(self) -> None:
        """Note that a step begins; called by a hook in front of it."""
        self._frame, self.is_in_hooks = sys._getframe(2), False

    @property
    def is_outermost(self) -> bool:
        """Whether the hook that asks is called by the same call of ``step``, and not by one inside it (``super()``)."""
        return sys._getframe(2) is self._frame

    def end(self) -> None:
        """Note that it has ended."""
        self._frame, self.is_in_hooks = None, False

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Run the closure of a step, which is code of the program."""
        self._is_suspended = True
        try:
            yield
        finally:
            self._is_suspended = False

    def __bool__(self) -> bool:
        is_step = self._frame is not None and not self._is_suspended
        frame = sys._getframe(1) if is_step else None
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None


class Segments(Protocol):
    """The parts of ``ShardedOptimizer`` that are used here."""

    @property
    def params(self) -> Iterable[nn.Parameter]:
        """The optimizer's parameters."""
        ...

    def open(self) -> None:
        """Open the step window."""
        ...

    def close(self) -> None:
        """Close it."""
        ...

    def accept_values(self) -> None:
        """Make the segments in the window the parameters' values. Collective at stages 1 and 2: all ranks."""
        ...

    def end_methods(self) -> None:
        """Make states plain tensors again behind a method."""
        ...


class MethodCalls:
    """Watches the parameters of an optimizer while one of its methods runs; see Note [Methods see segments].

    Args:
        segments: The sharded optimizer.
        running_step: A method that ``step`` calls needs nothing of this.
    """

    def __init__(self, segments: Segments, running_step: RunningStep) -> None:
        self._segments = segments
        self._running_step = running_step
        self._classes: dict[nn.Parameter, type] | None = None  # of the parameters while they are watched or used
        self._is_open = False
        self._are_used = False

    @property
    def are_running(self) -> bool:
        """Whether a method runs."""
        return self._classes is not None

    @contextmanager
    def call(self) -> Iterator[None]:
        """Run a method inside."""
        if self._classes is not None or self._running_step:
            yield
            return
        self._segments.close()
        self._is_open = self._are_used = False
        self._watch()
        try:
            yield
            self._segments.end_methods()
            if self._are_used:
                self._segments.accept_values()
        finally:
            self._segments.end_methods()
            self._end_watch()
            self._classes = None
            if self._is_open:
                self._segments.close()

    def begin_again(self) -> None:
        """Watch all parameters, also new ones, if a method runs: the window was closed in it."""
        if self.are_running:
            self._end_watch()
            self._is_open = False
            self._watch()

    def _watch(self) -> None:
        self._classes = {param: type(param) for param in self._segments.params}
        for param in self._classes:
            swap_class(param, WatchedParameter)
            watch(param, self._touched)

    def _end_watch(self) -> None:
        for param, cls in (self._classes or {}).items():
            unwatch(param)
            if has_class(param, WatchedParameter):
                param.__class__ = cls

    def _touched(self, uses_values: bool) -> None:
        """Open the window at the first question about a parameter; let go of all of them when values are used."""
        if not self._is_open:
            self._end_watch()
            self._segments.open()
            self._is_open = True
            self._watch()
        if uses_values:
            self._end_watch()
            self._are_used = True
            for param in self._segments.params:
                if isinstance(param, SegmentParameter):
                    param.__class__ = type(param).in_methods


def methods_on_segments(base: type[Optimizer], calls: MethodCalls) -> dict[str, Callable[..., Any]]:
    """Return the public methods that users' classes have added to an optimizer, each run on segments."""
    theirs = [
        cls for cls in base.__mro__ if issubclass(cls, Optimizer) and not cls.__module__.startswith("torch.optim.")
    ]
    names = {name for cls in theirs for name, value in vars(cls).items() if isinstance(value, FunctionType)}
    return {
        name: _on_segments(getattr(base, name), calls)
        for name in sorted(names - _OWN)
        if not name.startswith("_") and isinstance(getattr(base, name), FunctionType)
    }


def _on_segments(method: Callable[..., Any], calls: MethodCalls) -> Callable[..., Any]:
    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with calls.call():
            return method(*args, **kwargs)

    return run
