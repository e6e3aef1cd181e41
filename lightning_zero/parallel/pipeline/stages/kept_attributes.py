"""The attributes around the blocks, and those of blocks that code behind them changes, as they were before a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.parallel.module_state import OF_MODULES, fields_of, unregistered_modules
from lightning_zero.parallel.pipeline.stages.attribute_reads import Key
from lightning_zero.parallel.pipeline.stages.attributes import Written, ids_of_metrics, is_metric
from lightning_zero.parallel.pipeline.stages.split import Split
from lightning_zero.parallel.pipeline.stages.state_marks import NUMBERS, Mark, fingerprint, mark

__all__ = ["KeptAttributes"]

_FRAMEWORKS = ("lightning", "pytorch_lightning")


def _of_framework(cls: type[nn.Module]) -> frozenset[str]:
    """Return the attributes that belong to the Trainer: their values hold for this process only."""
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] in _FRAMEWORKS and issubclass(base, nn.Module):
            return frozenset(vars(base()))
    return frozenset()


class KeptAttributes:
    """The attributes of modules that are kept alike, now and as they were before the batch.

    Args:
        module: The root.
        split: The cut of the module.
        stage: Of this rank.

    Attributes:
        around: The modules around the blocks, by name.
        all: These, and modules with a place that other stages run.
        ignored: Names of attributes that are not looked at.
        reset: Keys of modules with a place that code behind the blocks changes.
        put_back: Of these, those that it gives the values from before the batch.
        before: Values before the batch, and their marks.
    """

    def __init__(self, module: nn.Module, split: Split, stage: int) -> None:
        last = split.num_chunks - 1
        behind = [place for place in split.places if place.block is None and place.chunk == last]  # the head
        inside = {id(child) for place in split.places if place not in behind
                  for child in module.get_submodule(place.name).modules()}  # fmt: skip
        inside |= ids_of_metrics(module)
        self.around = {name: child for name, child in module.named_modules() if id(child) not in inside}
        self.around |= _modules_in_containers(module, split)
        self._placed = _modules_elsewhere(module, split, stage)
        self.all = {**self._placed, **self.around}
        self.ignored = OF_MODULES.union(*map(_of_framework, {type(child) for child in self.around.values()}))
        self.reset: set[Key] = set()
        self.put_back: set[Key] = set()
        self.before: dict[Key, tuple[Any, Any]] = {}

    def begin(self, *, is_new: bool) -> None:
        """Mark all values; also those of modules with a place, if it is the first batch of a kind."""
        items = self.items_of(self.all) if is_new else self.items()
        self.before = {key: (value, mark(value, is_kept=True)) for key, _, value in items}

    def items(self) -> Iterator[tuple[Key, bool, Any]]:
        """Yield keys, whether they are module buffers, and values of everything that is kept alike."""
        yield from self.items_of(self.around)
        for one in self.items_of({name: self._placed[name] for name, _ in self.reset if name in self._placed}):
            if one[0] in self.reset:
                yield one

    def items_of(self, modules: Mapping[str, nn.Module]) -> Iterator[tuple[Key, bool, Any]]:
        """Yield keys, whether they are module buffers, and values of modules."""
        for name, child in modules.items():
            for key, value in vars(child).items():
                if key not in self.ignored and not (callable(value) and fields_of(value) is None):
                    yield (name, key), False, value
            for key, value in child._buffers.items():
                yield (name, key), True, value

    def space(self, key: Key, *, is_buffer: bool) -> dict[str, Any]:
        """Return the dictionary that an attribute lies in."""
        child = self.all[key[0]]
        buffers: dict[str, Any] = child._buffers
        return buffers if is_buffer or key[1] in buffers else vars(child)

    def value_of(self, key: Key) -> Any:
        """Return a value as it is now."""
        child = self.all.get(key[0])
        return Mark.MISSING if child is None else child._buffers.get(key[1], vars(child).get(key[1], Mark.MISSING))

    def has_changed(self, key: Key) -> bool:
        """Say whether a value is another one than before the batch, or has changed in place; numbers by their value."""
        value = self.value_of(key)
        before = self.before.get(key)
        if before is None:
            return value is not Mark.MISSING
        is_other = before[0] is not value and not isinstance(value, NUMBERS)
        return is_other or before[1] != mark(value)

    def changed(self) -> set[Key]:
        """Return the keys of all values that have changed."""
        return {key for key in {key for key, _, _ in self.items()} | self.before.keys() if self.has_changed(key)}

    def all_keys(self) -> set[Key]:
        """Return the keys that are kept alike, now or before the batch."""
        before = {key for key in self.before if key[0] in self.around} | self.reset
        return before | {key for key, _, _ in self.items()}

    def changed_in_places(self, written: Written | None) -> dict[Key, Any]:
        """Return the fingerprints of the values that the batch has changed in modules that run on other stages.

        Args:
            written: The attributes that were changed behind the calls of their modules; None: all changes count.
        """
        found = {
            key: fingerprint(value) for key, _, value in self.items_of(self._placed) if self.is_written(key, written)
        }
        deleted = {key for key in self.before if key[0] in self._placed}
        deleted |= {
            (name, key)
            for name, child in self._placed.items()
            for space, key in written or ()
            if space == id(vars(child)) and key not in self.ignored
        }
        gone = [key for key in deleted if self.value_of(key) is Mark.MISSING and self.is_written(key, written)]
        return found | {key: fingerprint(Mark.MISSING) for key in gone}

    def put_back_in_places(self, written: Written | None) -> dict[Key, Any]:
        """Return the fingerprints of values in such modules that are those from before the batch, and were others."""
        spaces = {id(space): name for name, child in self._placed.items() for space in (vars(child), child._buffers)}
        keys = {(spaces[space], key) for space, key in written or () if space in spaces and key not in self.ignored}
        return {key: fingerprint(self.value_of(key)) for key in keys if not self.is_written(key, written)}

    def is_written(self, key: Key, written: Written | None) -> bool:
        """Say whether a value in a module with a place was changed behind the module's call.

        A value that is the one from before the batch counts if the module has changed it in between, or if its own
        stage is known to keep another one: the step sets it in front of the blocks, and puts it back behind them.
        """
        if written is None:
            return self.has_changed(key)
        child, value = self.all[key[0]], self.value_of(key)
        if isinstance(value, dict) and any(space == id(value) for space, _ in written):
            return True
        if key not in self.put_back and not isinstance(value, (*NUMBERS, Tensor, Mark)):
            return self.has_changed(key)  # it may have changed inside
        found = [written.get((id(space), key[1])) for space in (vars(child), child._buffers)]
        writes = [one for one in found if one is not None]
        counts = key in self.put_back or any(one.is_of_module for one in writes)
        return bool(writes) and (counts or self.has_changed(key))


def _modules_in_containers(module: nn.Module, split: Split) -> dict[str, nn.Module]:
    """Return the modules in plain lists, dictionaries and objects around the blocks, with their submodules."""
    places = [module.get_submodule(place.name) for place in split.places]
    inside = {id(child) for place in places for _, held in unregistered_modules(place) for child in held.modules()}
    found: dict[str, nn.Module] = {}
    for number, (name, held) in enumerate(unregistered_modules(module)):
        for key, child in held.named_modules(prefix=f"{name.partition('.')[2]}[{number}]"):
            if id(child) not in inside and not isinstance(child, torch.jit.ScriptModule) and not is_metric(child):
                found[key] = child
    return found


def _modules_elsewhere(module: nn.Module, split: Split, stage: int) -> dict[str, nn.Module]:
    """Return the modules of places that another stage than the last one runs; of the others, those of the last."""
    last = split.num_chunks - 1
    is_last = stage == last % split.stages
    found = {}
    for place in split.places:
        runs_here = is_last and place.chunk % split.stages == stage
        if not runs_here and (place.block is not None or place.chunk != last):
            for name, child in module.get_submodule(place.name).named_modules(prefix=place.name):
                if not is_metric(child):
                    found[name] = child
    return found
