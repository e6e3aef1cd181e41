"""Attributes of modules that were passed over, as they are shown until a run ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_zero.errors import PipelineError
from lightning_zero.parallel.pipeline.stages.attributes import MISSING, Write, Written, assign, attribute_spaces
from lightning_zero.parallel.pipeline.stages.sources import is_fake
from lightning_zero.parallel.pipeline.stages.state_marks import mark
from lightning_zero.trees import tree_leaves

__all__ = ["ShownAttributes"]


@dataclass(frozen=True)
class _Shown:
    """An attribute of a module that was passed over.

    Attributes:
        space: The dictionary that has it.
        name: Its key there.
        before: The value that comes back, unless the program gives the attribute another one.
        value: The one that it shows.
        version: Of this, if it is a tensor.
    """

    space: dict[str, Any]
    name: str
    before: Any
    value: Any
    version: int

    @property
    def current(self) -> Any:
        """The value of now."""
        return self.space.get(self.name, MISSING)

    @property
    def is_changed(self) -> bool:
        """Whether the program has given the attribute another value, or has written into the tensor."""
        return self.current is not self.value or _version(self.value) != self.version

    def end(self) -> None:
        """Give the attribute back its value from before, unless the program has given it one with values."""
        if not self.is_changed or any(map(is_fake, tree_leaves(self.current))):
            assign(self.space, self.name, self.before)


@dataclass(frozen=True)
class _Reached:
    """The attributes in a dictionary of a module when it was called, and marks of tensors among them."""

    space: dict[str, Any]
    before: dict[str, Any]
    marks: dict[str, Any]

    def changed(self) -> Iterator[str]:
        """Yield the names of those that have changed since."""
        for name in self.before.keys() | self.space.keys():
            value = self.space.get(name, MISSING)
            if value is not self.before.get(name, MISSING) or (name in self.marks and self.marks[name] != mark(value)):
                yield name


class ShownAttributes:
    """The attributes that modules show in a run.

    Args:
        modules: Those that may be passed over.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._shown: list[_Shown] = []
        self._lost: list[str] = []  # names of those that the program has given values of another stage, in the last run
        self._reached: list[_Reached] = []
        self._left: list[tuple[dict[str, Any], str, Any]] = []  # values that the last run has shown at its end
        self._written: Written = {}  # those that it has changed behind their modules, in all runs

    def show(self, space: dict[str, Any], name: str, value: Any) -> None:
        """Let an attribute have a value until the run ends."""
        self._shown.append(_Shown(space, name, space.get(name, MISSING), value, _version(value)))
        assign(space, name, value)

    def note_reached(self, module: nn.Module) -> None:
        """Keep the attributes of a module that is called now, to find those that change behind the call."""
        for space in attribute_spaces(module).values():
            marks = {name: mark(value, is_kept=True) for name, value in space.items() if isinstance(value, Tensor)}
            self._reached.append(_Reached(space, dict(space), marks))

    @property
    def values(self) -> list[Any]:
        """Their values of now, in the order in which they were shown."""
        return [one.current for one in self._shown]

    def _latest(self) -> list[_Shown]:
        """Return each attribute once: its value from before the run, and the one that was shown last."""
        found: dict[tuple[int, str], _Shown] = {}
        for one in self._shown:
            key = (id(one.space), one.name)
            found[key] = replace(one, before=found[key].before) if key in found else one
        return list(found.values())

    @property
    def assigned(self) -> list[Any]:
        """The values without numbers that the program has given attributes of modules, in this run."""
        latest = self._latest()
        left = {id(one.value) for one in latest if not one.is_changed}  # by the modules themselves
        kept = [
            value for module in self._modules for space in attribute_spaces(module).values() for value in space.values()
        ]
        leaves = [leaf for value in kept if isinstance(value, (Tensor, tuple, list)) for leaf in tree_leaves(value)]
        return [one.current for one in latest if one.is_changed] + [
            leaf for leaf in leaves if is_fake(leaf) and id(leaf) not in left
        ]

    @contextmanager
    def shown_by(self, show: Callable[[], None]) -> Iterator[None]:
        """Show the attributes that ``show`` does for a while; those that are shown inside stay until the run ends."""
        before = len(self._shown)
        show()
        shown = self._shown[before:]
        del self._shown[before:]
        try:
            yield
        finally:
            for one in reversed(shown):
                one.end()

    def showing(self) -> Callable[[], AbstractContextManager[None]]:
        """Return a function that makes a context in which modules show the attributes of now, for a recomputation."""
        return partial(_showing, [(one.space, one.name, one.current) for one in self._shown])

    def showing_again(self) -> Callable[[], AbstractContextManager[None]] | None:
        """Return such a function for the values that the last run has shown at its end; None if there were none."""
        left, self._left = self._left, []
        return partial(_showing, left) if left else None

    def end(self) -> None:
        """Give the attributes back their values, but those that the program has assigned."""
        latest = self._latest()
        changed = [one for one in latest if one.is_changed]
        self._left = [
            (one.space, one.name, one.current) for one in latest if not any(map(is_fake, tree_leaves(one.current)))
        ]
        self._lost = [one.name for one in changed if any(map(is_fake, tree_leaves(one.current)))]
        self._written |= {(id(one.space), one.name): Write(one.space, True) for one in changed}
        self._shown.clear()
        for one in latest:
            one.end()
        for reached in self._reached:
            for name in reached.changed():
                self._written.setdefault((id(reached.space), name), Write(reached.space, False))
        self._reached.clear()

    def take_written(self) -> Written:
        """Return the attributes that were changed behind calls since the last time."""
        written, self._written = self._written, {}
        return written

    def require_kept(self) -> None:
        """Refuse values of an earlier stage that the program has given attributes in the last run.

        Raises:
            PipelineError: There are some.
        """
        for name in self._lost:
            raise PipelineError(
                f"The step gives the attribute `{name}` of a module of another pipeline stage a value that an earlier"
                " stage computes, and it could not be told before the step that it is needed. Compute it in the module,"
                " or in every batch."
            )


@contextmanager
def _showing(values: Sequence[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    before = [(space, name, space.get(name, MISSING)) for space, name, _ in values]
    try:
        for one in values:
            assign(*one)
        yield
    finally:
        for one in before:
            assign(*one)


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0
