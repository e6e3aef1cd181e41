"""Attributes of modules as the forward of each micro-batch leaves them, for its backward.

Note [Backwards that read attributes]
    On one rank the backward of a micro-batch follows its forward. A pipeline runs forwards of later micro-batches in
    between, so code that a backward runs (a function under ``torch.utils.checkpoint`` inside of a block, a hook on a
    gradient) would find the attributes of another micro-batch: ``block.mask = ...``. So attributes that forwards change
    are kept for every micro-batch, and bound again while its backward runs.

Note [Backwards that change attributes]
    A recomputation counts as its forward does, and a hook keeps a norm. An attribute that a backward changes as well is
    not kept any more: the backward works on the value of now, as forwards do. In the first backward that changes it,
    the difference to the value that was shown is added to the value of now.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.parallel.module_state import OF_MODULES, fields_of
from lightning_zero.parallel.pipeline.stages.attributes import CONSTANT, MISSING, are_same, assign, ids_of_metrics
from lightning_zero.parallel.pipeline.stages.split import Split, modules_around

__all__ = ["BackwardAttributes"]

# `id` of the module, whose own hash may change; attribute that has a dictionary or an object, or ""; key in it.
_Key = tuple[int, str, Any]
_PLAIN = (bool, int, float, str, type(None), Tensor, nn.Module, list, tuple, set)  # without attributes that change
_MOST_ITEMS = 64  # of a dictionary that is looked into


@dataclass(frozen=True)
class _Attribute:
    """An attribute, and its value at one time."""

    key: _Key
    space: dict[Any, Any]
    value: Any

    @property
    def current(self) -> _Attribute:
        """The attribute with its value of now."""
        return _Attribute(self.key, self.space, self.space.get(self.key[2], MISSING))

    def bind(self) -> None:
        """Give the attribute the value."""
        assign(self.space, self.key[2], self.value)


@dataclass
class BackwardAttributes:
    """The attributes that forwards on this stage change; not those of metrics, which count by themselves.

    Attributes:
        modules: Those that run in a chunk of this stage, and those around the blocks, by chunk.
    """

    modules: dict[int, Sequence[nn.Module]]
    _changing: dict[_Key, nn.Module] = field(default_factory=dict)  # by forwards, in the order in which they were found
    _of_backwards: set[_Key] = field(default_factory=set)  # that backwards change as well
    _alike: set[_Key] = field(default_factory=set)  # on a device, to which those of this batch assign the same again
    _kept: dict[tuple[int, int], list[_Attribute]] = field(default_factory=dict)  # by chunk and micro-batch

    @staticmethod
    def of(module: nn.Module, split: Split, stage: int) -> BackwardAttributes:
        """Return the attributes of a stage's modules."""
        metrics = ids_of_metrics(module)
        around = [child for child in modules_around(module, split) if id(child) not in metrics]
        return BackwardAttributes({
            chunk: [
                *around,
                *(
                    child
                    for place in split.places
                    if place.chunk == chunk
                    for child in module.get_submodule(place.name).modules()
                    if id(child) not in metrics
                ),
            ]
            for chunk in range(stage, split.num_chunks, split.stages)
        })  # fmt: skip

    @contextmanager
    def forward(self, chunk: int, index: int, *, looks_inside: bool) -> Iterator[None]:
        """Run the forward of a micro-batch, and keep the attributes that forwards change.

        Args:
            chunk: The chunk.
            index: The micro-batch.
            looks_inside: Also looks for new ones among items of dictionaries and attributes of objects.
        """
        before = [_Values.of(module, looks_inside=looks_inside) for module in self.modules[chunk]]
        yield
        for one in before:
            self._compare(chunk, one)
        own = set(map(id, self.modules[chunk]))
        changing = [(key, child) for key, child in self._changing.items() if key[0] in own]
        found = [_found(key, child) for key, child in changing if key not in self._of_backwards]
        distinct = {(id(one.space), one.key[2]): one for one in found if one is not None}  # modules may share an object
        self._kept[chunk, index] = list(distinct.values())

    @contextmanager
    def backward(self, chunk: int, index: int, *, is_last: bool) -> Iterator[None]:
        """Run a backward of a micro-batch with the attributes that its forward has left.

        Args:
            chunk: The chunk.
            index: The micro-batch.
            is_last: No backward of the micro-batch in this chunk follows.
        """
        kept = (self._kept.pop if is_last else self._kept.get)((chunk, index), [])
        now = [(one, one.current) for one in kept if one.key not in self._of_backwards]
        shown = [(one, was) for one, was in now if one.value is not was.value]
        orders = {id(one.space): (one.space, list(one.space)) for one, _ in shown if one.value is MISSING}
        for one, _ in shown:
            one.bind()
        try:
            yield
        finally:
            for one, was in now:
                current = one.current.value
                if current is one.value or one.key in self._alike:
                    was.bind()
                elif _is_other(current, one.value):
                    self._of_backwards.add(one.key)
                    _add_change(one, was)
                else:
                    if isinstance(current, Tensor) and current.device.type != "cpu":
                        self._alike.add(one.key)  # comparing waits for the device
                    was.bind()
            for space, order in orders.values():
                _reorder(space, order)

    def forget(self) -> None:
        """Forget the micro-batches, and items of dictionaries that are gone."""
        self._kept.clear()
        self._alike.clear()
        for key in [key for key, child in self._changing.items() if key[1] and _is_gone(_found(key, child))]:
            del self._changing[key]
            self._of_backwards.discard(key)

    def _compare(self, chunk: int, before: _Values) -> None:
        """Note the attributes that a forward has changed; micro-batches before it have left the value from before."""
        for key, old in before.changed():
            if key not in self._changing:
                self._changing[key] = before.module
                found = _found(key, before.module)
                earlier = [kept for (one, _), kept in self._kept.items() if one == chunk and found is not None]
                for kept in earlier:
                    assert found is not None
                    kept.append(_Attribute(key, found.space, old))


@dataclass(frozen=True)
class _Values:
    """The values of a module's attributes at one time.

    Attributes:
        module: The module.
        names: Of its attributes.
        values: Of its attributes.
        inside: Items of dictionaries and attributes of objects, by the attribute that has the dictionary or object.
    """

    module: nn.Module
    names: list[str]
    values: list[Any]
    inside: dict[str, dict[Any, Any]]

    @staticmethod
    def of(module: nn.Module, *, looks_inside: bool) -> _Values:
        own = vars(module)
        inside = {"_buffers": dict(module._buffers)}
        for name, value in own.items() if looks_inside else ():
            space = None if name in OF_MODULES else _space_of(value)
            if space is not None:
                inside[name] = dict(space)
        return _Values(module, list(own), list(own.values()), inside)

    def changed(self) -> Iterator[tuple[_Key, Any]]:
        """Yield the attributes that have another value by now, and their values from before."""
        own = vars(self.module)
        if not are_same(own, self.names, self.values):
            yield from self._differing("", own, dict(zip(self.names, self.values, strict=True)))
        for name, before in self.inside.items():
            space = self.module._buffers if name == "_buffers" else _space_of(own.get(name))
            if space is not None and not are_same(space, [*before], [*before.values()]):
                yield from self._differing(name, space, before)

    def _differing(self, name: str, now: dict[Any, Any], before: dict[Any, Any]) -> Iterator[tuple[_Key, Any]]:
        for key in [*before, *(key for key in now if key not in before)]:
            old = before.get(key, MISSING)
            if now.get(key, MISSING) is not old and not (name == "" and key in CONSTANT):
                yield (id(self.module), name, key), old


def _space_of(value: Any) -> dict[Any, Any] | None:
    """Return the dictionary in which a value has items or attributes; None of other values, and of large ones."""
    if isinstance(value, dict):
        return value if len(value) <= _MOST_ITEMS else None
    if isinstance(value, _PLAIN) or fields_of(value) is None:
        return None
    return getattr(value, "__dict__", None)


def _found(key: _Key, module: nn.Module) -> _Attribute | None:
    """Return an attribute with its value; None if the dictionary or object that it was in is gone, or large by now."""
    _, name, item = key
    own = vars(module)
    space = own if name == "" else module._buffers if name == "_buffers" else _space_of(own.get(name))
    return None if space is None else _Attribute(key, space, space.get(item, MISSING))


def _is_gone(found: _Attribute | None) -> bool:
    """Say whether an item is in no dictionary or object any more."""
    return found is None or found.value is MISSING


def _is_other(now: Any, before: Any) -> bool:
    """Say whether a backward has left another value: a function that runs again assigns the same one once more."""
    if isinstance(now, Tensor) and isinstance(before, Tensor):
        is_strided = now.layout is before.layout is torch.strided
        is_alike = is_strided and (now.shape, now.dtype, now.device) == (before.shape, before.dtype, before.device)
        return not (is_alike and torch.equal(now, before))
    return type(now) is not type(before) or not isinstance(now, (bool, int, float, str, type(None))) or now != before


def _add_change(shown: _Attribute, was: _Attribute) -> None:
    """Add the change that a backward has made to the value of now; where that cannot be, the backward's value stays."""
    now = shown.current.value
    if was.value is not shown.value and _can_be_summed([now, shown.value, was.value]):
        shown.space[shown.key[2]] = was.value + (now - shown.value)


def _can_be_summed(values: Sequence[Any]) -> bool:
    """Say whether values are numbers, or tensors of one shape without a graph."""
    if all(isinstance(value, (int, float)) and type(value) is not bool for value in values):
        return True
    tensors = [value for value in values if isinstance(value, Tensor)]
    kinds = {(tuple(one.shape), one.dtype, one.device, one.requires_grad) for one in tensors}
    return (
        len(tensors) == len(values)
        and len(kinds) == 1
        and not (tensors[0].requires_grad or tensors[0].dtype is torch.bool)
    )


def _reorder(space: dict[Any, Any], order: Sequence[Any]) -> None:
    """Give a dictionary the order of keys that it had."""
    if list(space)[: len(order)] != order:
        for key in [key for key in order if key in space] + [key for key in space if key not in order]:
            space[key] = space.pop(key)
