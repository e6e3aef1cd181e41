"""A checkpoint dictionary as named tensors and the remaining values, and back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint._traverse import set_element

from lightning_zero.checkpoint.own_state import OTHER_STATES
from lightning_zero.checkpoint.planner import KeyPath, Segment
from lightning_zero.checkpoint.stored import StoredTensor

if TYPE_CHECKING:
    from lightning_zero.engine.engine import ZeroEngine

__all__ = ["PARAMETER_NAMES", "FlatCheckpoint", "by_name", "number_parameters", "rebuild"]

PARAMETER_NAMES = "parameter_names"  # key of a file: names of the parameters, by optimizer and group


class FlatCheckpoint:
    """A checkpoint dictionary, cut into the values of ``.distcp`` files and the rest in ``meta.pt``.

    Args:
        engine: Whose segments the dictionary holds. Without one this process writes everything.
        checkpoint: May hold ``Segment``s anywhere.

    Attributes:
        values: Segments of every rank; tensors and objects of the rank that writes them.
        aliases: Further name of a segment -> its name in ``values``.
        paths: For every name its place in the nested dictionary, those of aliases included.
        meta: The remaining values, with a ``_Reference`` in place of each segment.
    """

    def __init__(self, engine: ZeroEngine | None, checkpoint: Mapping[str, Any]) -> None:
        self.values: dict[str, Any] = {}
        self.aliases: dict[str, str] = {}
        self.paths: dict[str, KeyPath] = {}
        self._rank = 0 if engine is None else engine.internals.world_communicator.rank
        self._names: dict[Any, str] = {}  # of segments and tensors of another checkpoint, by identity
        # Ranks that hold the first element write unsharded optimizer states: only they surely have them.
        self._writes = None if engine is None else _written_first(engine, self._rank)  # None: all names
        self.meta = {key: self._take(key, value) for key, value in checkpoint.items()}
        self.meta = {key: value for key, value in self.meta.items() if value is not _TAKEN}

    def detach(self, to_host: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]) -> None:
        """Put copies in place of all values, so that training may go on. ``to_host`` copies 1-D tensors."""
        segments = {key: value.to_save() for key, value in self.values.items() if isinstance(value, Segment)}
        copies = to_host([segment.local for segment in segments.values()])
        staged = {
            key: Segment(local, segment.start, segment.shape, part=segment.part)
            for (key, segment), local in zip(segments.items(), copies, strict=True)
        }
        self.values = {key: staged[key] if key in staged else _copy(value) for key, value in self.values.items()}
        self.meta = copy.deepcopy(self.meta)

    def _take(self, key: str, value: Any) -> Any:
        if key == "state_dict":
            for name, item in value.items():
                self._add(("model", name), item, writes=self._rank == 0)
            return _TAKEN
        if key == "optimizer_states" and value and all(_is_named(state) for state in value):
            for number, state in enumerate(value):
                self._take_optimizer(f"optimizer_{number}", state)
            return _TAKEN
        return self._without_segments((key,), value)

    def _take_optimizer(self, key: str, state: Mapping[str, Any]) -> None:
        for name, slots in state["state"].items():
            for slot, item in slots.items():
                self._add((key, "state", name, slot), item, writes=self._writes is None or name in self._writes)
        for part, item in state.items():
            if part != "state":
                self._add((key, part), item, writes=self._rank == 0)

    def _add(self, path: KeyPath, item: Any, *, writes: bool) -> str:
        key = ".".join(str(part) for part in path)
        if isinstance(item, Segment) or (isinstance(item, StoredTensor) and writes):
            name = self._names.setdefault(_identity(item), key)
            if name != key:
                self.aliases[key] = name
            else:
                self.values[key] = item
            self.paths[key] = path
        elif writes:
            self.values[key] = item
            self.paths[key] = path
        return key

    def _without_segments(self, path: KeyPath, value: Any) -> Any:
        if isinstance(value, Segment):
            return {_REFERENCE: self._add(("extra", *path), value, writes=True)}
        if isinstance(value, dict):
            items = {key: self._without_segments((*path, str(key)), item) for key, item in value.items()}
            return value if all(items[key] is item for key, item in value.items()) else items
        if isinstance(value, list | tuple):
            parts = [self._without_segments((*path, str(index)), item) for index, item in enumerate(value)]
            unchanged = all(part is item for part, item in zip(parts, value, strict=True))
            return value if unchanged else (parts if isinstance(value, list) else tuple(parts))
        return value


def _identity(value: Segment | StoredTensor) -> Any:
    """Return a key that is equal for two names of one tensor."""
    return (id(value.source), value.source.identity(value.key)) if isinstance(value, StoredTensor) else id(value)


_TAKEN = object()
_REFERENCE = "lightning_zero.tensor"  # the key of a dictionary in ``meta.pt`` that stands for a tensor


def _copy(value: Any) -> Any:
    if isinstance(value, StoredTensor):
        return value.read()
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _is_named(state: Any) -> bool:
    return (
        isinstance(state, Mapping)
        and "state" in state
        and all(isinstance(name, str) and isinstance(slots, Mapping) for name, slots in state["state"].items())
    )


def _written_first(engine: ZeroEngine, rank: int) -> set[str]:
    """Return the names of the parameters whose first element a rank writes; of those without elements it is rank 0."""
    spans = {
        record.name: (record.save_range, prod(record.shape))
        for record in engine.records()
        if record.part is None or record.part.has_first
    }
    return {
        name
        for name, ((start, stop), numel) in spans.items()
        if (start == 0 and stop > 0) or (rank == 0 and numel == 0)
    }


def rebuild(meta: Mapping[str, Any], paths: Mapping[str, KeyPath], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dictionary that was saved. The inverse of ``FlatCheckpoint``."""
    nested: dict[str, Any] = {}
    for key, path in paths.items():
        set_element(nested, path, values[key])
    checkpoint = {key: _with_tensors(item, values) for key, item in meta.items()}
    # "state_dict": Lightning's strategy for FSDP2
    checkpoint["state_dict"] = nested.get("model", nested.get("state_dict", {}))
    optimizers = [nested[f"optimizer_{number}"] for number in range(len(nested)) if f"optimizer_{number}" in nested]
    if optimizers:
        checkpoint["optimizer_states"] = [{**state, "state": state.get("state", {})} for state in optimizers]
    return checkpoint


def _with_tensors(item: Any, values: Mapping[str, Any]) -> Any:
    """Put tensors in place of the references to them."""
    if isinstance(item, dict):
        if item.keys() == {_REFERENCE}:
            return values[item[_REFERENCE]]
        parts = {key: _with_tensors(part, values) for key, part in item.items()}
        return item if all(parts[key] is part for key, part in item.items()) else parts
    if isinstance(item, list | tuple):
        elements = [_with_tensors(part, values) for part in item]
        if all(element is part for element, part in zip(elements, item, strict=True)):
            return item
        return elements if isinstance(item, list) else tuple(elements)
    return item


def number_parameters(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint whose optimizers have parameters by number, as torch saves them, and the names beside."""
    if "optimizer_states" not in checkpoint:
        return dict(checkpoint)
    states = checkpoint["optimizer_states"]
    names = [[list(group["params"]) for group in state["param_groups"]] for state in states]
    numbered = {**checkpoint, "optimizer_states": [_by_number(state) for state in states]}
    if all(isinstance(name, str) for groups in names for group in groups for name in group):
        numbered[PARAMETER_NAMES] = names
    return numbered


def by_name(state: Mapping[str, Any], names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return an optimizer's state with the names that ``number_parameters`` left. The inverse of ``_by_number``."""
    groups = [group["params"] for group in state["param_groups"]]
    known = {
        number: name
        for numbers, group in zip(groups, names, strict=True)
        for number, name in zip(numbers, group, strict=True)
    }
    return {
        **state,
        "state": {known.get(number, number): slots for number, slots in state["state"].items()},
        "param_groups": [
            {**group, "params": list(own)} for group, own in zip(state["param_groups"], names, strict=True)
        ],
    }


def _by_number(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state as torch saves it: parameters are counted through the groups.

    Entries of no parameter have their own keys beside them.
    """
    numbers = {
        name: number for number, name in enumerate(name for group in state["param_groups"] for name in group["params"])
    }
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in state["param_groups"]]
    others = {key: value for key, value in state["state"].items() if key not in numbers}
    slots = {number: state["state"][name] for name, number in numbers.items() if name in state["state"]}
    rest = {key: value for key, value in state.items() if key != OTHER_STATES}
    return {**rest, "state": {**others, **state.get(OTHER_STATES, {}), **slots}, "param_groups": groups}
