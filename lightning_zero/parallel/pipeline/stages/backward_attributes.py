"""Attributes of modules as the forward of each micro-batch leaves them, for its backward.

Note [Backwards that read attributes]
    On one rank the backward of a micro-batch follows its forward. A pipeline runs forwards of later micro-batches in
    between, so code that a backward runs (a function under ``torch.utils.checkpoint`` inside of a block, a hook on a
    gradient) would find the attributes of another micro-batch: ``block.mask = ...``. So attributes that forwards change
    are kept for every micro-batch, and bound again while its backward runs. If the backward changes one, the value
    stays; to a number, which is taken for a count, the difference is added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_zero.parallel.pipeline.stages.attributes import OF_MODULES, own_spaces
from lightning_zero.parallel.pipeline.stages.split import Split, modules_around

__all__ = ["BackwardAttributes"]

_Key = tuple[nn.Module, str, Any]  # module, dictionary among its attributes, and key
_MISSING = object()
_CONSTANT = OF_MODULES - {"training"}  # attributes of every module, which hold its parts


@dataclass(frozen=True)
class _Attribute:
    """An attribute, and its value at one time."""

    space: dict[Any, Any]
    name: Any
    value: Any

    @property
    def current(self) -> _Attribute:
        """The attribute with its value of now."""
        return _Attribute(self.space, self.name, self.space.get(self.name, _MISSING))

    def bind(self) -> None:
        """Give the attribute the value."""
        if self.value is _MISSING:
            self.space.pop(self.name, None)
        else:
            self.space[self.name] = self.value


@dataclass
class BackwardAttributes:
    """The attributes that forwards on this stage change.

    Attributes:
        modules: Those that run in a chunk of this stage, and those around the blocks, by chunk.
    """

    modules: dict[int, Sequence[nn.Module]]
    _changing: dict[_Key, None] = field(default_factory=dict)  # in the order in which they were found
    _kept: dict[tuple[int, int], list[_Attribute]] = field(default_factory=dict)  # by chunk and micro-batch

    @staticmethod
    def of(module: nn.Module, split: Split, stage: int) -> BackwardAttributes:
        """Return the attributes of a stage's modules."""
        around = list(modules_around(module, split))
        return BackwardAttributes({
            chunk: [
                *around,
                *(
                    child
                    for place in split.places
                    if place.chunk == chunk
                    for child in module.get_submodule(place.name).modules()
                ),
            ]
            for chunk in range(stage, split.num_chunks, split.stages)
        })  # fmt: skip

    @contextmanager
    def forward(self, chunk: int, index: int, *, looks_at_all: bool) -> Iterator[None]:
        """Run the forward of a micro-batch, and keep the attributes that forwards change.

        Args:
            chunk: The chunk.
            index: The micro-batch.
            looks_at_all: Also looks for attributes that are new among these.
        """
        before = self._values(chunk) if looks_at_all else {}
        yield
        if looks_at_all:
            self._compare(chunk, before, self._values(chunk))
        own = set(map(id, self.modules[chunk]))
        found = [_found(*key) for key in self._changing if id(key[0]) in own]
        self._kept[chunk, index] = [one for one in found if one is not None]

    @contextmanager
    def backward(self, chunk: int, index: int, *, is_last: bool) -> Iterator[None]:
        """Run a backward of a micro-batch with the attributes that its forward has left.

        Args:
            chunk: The chunk.
            index: The micro-batch.
            is_last: No backward of the micro-batch in this chunk follows.
        """
        kept = (self._kept.pop if is_last else self._kept.get)((chunk, index), [])
        now = [(one, one.current) for one in kept]
        shown = [(one, was) for one, was in now if one.value is not was.value]
        for one, _ in shown:
            one.bind()
        try:
            yield
        finally:
            for one, was in shown:
                _leave(one, was)

    def forget(self) -> None:
        """Forget the micro-batches."""
        self._kept.clear()

    def _compare(self, chunk: int, before: dict[_Key, Any], after: dict[_Key, Any]) -> None:
        """Note the attributes that a forward has changed; micro-batches before it have left the value from before."""
        for key in before.keys() | after.keys():
            old = before.get(key, _MISSING)
            if old is not after.get(key, _MISSING) and key not in self._changing:
                self._changing[key] = None
                found = _found(*key)
                if found is not None:
                    earlier = [kept for (one, _), kept in self._kept.items() if one == chunk]
                    for kept in earlier:
                        kept.append(_Attribute(found.space, found.name, old))

    def _values(self, chunk: int) -> dict[_Key, Any]:
        return {
            (module, kept, name): value
            for module in self.modules[chunk]
            for kept, space in own_spaces(module).items()
            for name, value in space.items()
            if kept or name not in _CONSTANT
        }


def _found(module: nn.Module, kept: str, name: Any) -> _Attribute | None:
    """Return an attribute with its value; None if the dictionary that it was in is gone."""
    space = own_spaces(module).get(kept) if kept else vars(module)
    return None if space is None else _Attribute(space, name, space.get(name, _MISSING))


def _leave(shown: _Attribute, was: _Attribute) -> None:
    """Bind the value from before a backward, unless the backward has bound another one."""
    now = shown.current.value
    if now is shown.value:
        was.bind()
    elif all(isinstance(value, (int, float)) and type(value) is not bool for value in (now, shown.value, was.value)):
        shown.space[shown.name] = was.value + (now - shown.value)
