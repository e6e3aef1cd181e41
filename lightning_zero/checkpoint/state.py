"""The engine's model and optimizers as dictionaries under parameter names, and back.

Saving yields ``Segment`` stand-ins over live storage; nothing is copied or gathered. Loading takes each form in
which a checkpoint holds a tensor: a tensor in a directory that is not read yet, a whole tensor, or this rank's segment.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import pickle
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zero.checkpoint.flat import by_name
from lightning_zero.checkpoint.own_state import OTHER_STATES, after_loading, before_loading, own_entries
from lightning_zero.checkpoint.placeholders import StandIn, replaced, stand_ins
from lightning_zero.checkpoint.planner import Segment
from lightning_zero.checkpoint.ranks import Ranks
from lightning_zero.checkpoint.stored import Lent, StoredTensor, fill
from lightning_zero.engine.optim.segment_states import COUNTERS, is_counter
from lightning_zero.errors import nearest
from lightning_zero.trees import tree_map

if TYPE_CHECKING:
    from lightning_zero.engine.access.records import ParameterRecord
    from lightning_zero.engine.engine import ZeroEngine

__all__ = [
    "ROUNDED",
    "copy_ranges",
    "identities",
    "load_average",
    "load_model_state",
    "load_optimizer_state",
    "model_state",
    "optimizer_state",
    "whole_model_state",
]

ROUNDED = (
    "The parameters are those of a checkpoint, rounded to 16 bits, because it was loaded to evaluate an offloaded"
    " module, which has no fp32 masters. To keep its values pass the checkpoint to `fit` as `ckpt_path`, or copy it."
)


# -- The model ---------------------------------------------------------------------------------------------------------


def model_state(engine: ZeroEngine, module: nn.Module, average: nn.Module | None = None) -> dict[str, Any]:
    """Return the module's ``state_dict`` with a ``Segment`` of the master for every parameter.

    The names of a tied parameter hold the same ``Segment``. Buffers and extra state are as the module returns them; in
    a pipeline call ``gather_module_buffers`` before.

    Args:
        engine: Shards the module.
        module: The module.
        average: Has this rank's segments and the buffers, by name, that take the place of the module's.
    """
    records = engine.records()
    wanted = _stand_ins(records)
    buffers = {} if average is None else dict(average.named_buffers())
    averaged = {id(buffer): buffers[name] for name, buffer in module.named_buffers() if name in buffers}
    with stand_ins(module, wanted), replaced(module, averaged):
        values = module.state_dict()
    local = {} if average is None else dict(average.named_parameters())
    segments = {id(wanted[id(record.parameter)]): _saved_segment(record, local.get(record.name)) for record in records}
    return {key: segments.get(id(value), value) for key, value in values.items()}


def whole_model_state(engine: ZeroEngine, module: nn.Module) -> dict[str, Any]:
    """Return the module's ``state_dict`` with whole values in host memory, on every rank. Collective: all ranks."""
    engine.internals.checkpoints.gather_module_buffers()
    params = [record.parameter for record in engine.records()]
    with replaced(module, {id(param): engine.full_param(param).cpu() for param in params}):
        return module.state_dict()


def load_model_state(engine: ZeroEngine, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> None:
    """Load a ``state_dict`` into the masters, buffers and extra state, and publish it.

    Collective: all ranks, each with the same names; a rank reads only its own ranges of tensors in a directory.

    Raises:
        RuntimeError: Names are missing or unexpected and ``strict``, or shapes differ; in the words of ``nn.Module``.
        ValueError, FileNotFoundError: A file is damaged or missing.
        CheckpointError: Another rank had an error.
    """
    with Ranks(engine).agree("Loading the model"), _names_the_file(state_dict):
        engine.internals.checkpoints.prepare_load()
        kept = Lent()
        loaded = _load_model(engine, module, kept.lend(state_dict), strict)
        kept.take_back()
    engine.internals.checkpoints.publish(loaded)


def _load_model(
    engine: ZeroEngine, module: nn.Module, state_dict: Mapping[str, Any], strict: bool
) -> list[ParameterRecord]:
    """Load the values that a ``state_dict`` has; return the records of their parameters."""
    records = engine.records()
    wanted = _stand_ins(records)
    with stand_ins(module, wanted):
        module.load_state_dict(state_dict, strict=strict)
    sources = [(record, wanted[id(record.parameter)].sources) for record in records]
    rounded = [found for record, found in sources if found and record.rounds(found[-1].dtype)]
    engine.internals.checkpoints.are_rounded = bool(rounded)
    copy_ranges([(record.name, found[-1], _master_segment(record)) for record, found in sources if found])
    return [record for record, found in sources if found]


@contextlib.contextmanager
def _names_the_file(state_dict: Mapping[str, Any]) -> Iterator[None]:
    """Add the checkpoint's path to an error that a module raises about names or shapes."""
    try:
        yield
    except RuntimeError as error:
        stored = next((value for value in state_dict.values() if isinstance(value, StoredTensor)), None)
        if stored is not None:
            error.add_note(
                f"The checkpoint is `{stored.source.directory}`. If it is of another model on purpose, set"
                " `strict_loading = False` on the module, or change the names in `on_load_checkpoint`."
            )
        raise


def load_average(engine: ZeroEngine, module: nn.Module, average: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Load an average from the state dictionary that ``model_state`` made of one. Collective: all ranks.

    Args:
        engine: Shards the module.
        module: The module; its own ``load_state_dict`` says which entry is of which tensor, and its tensors stay.
        average: Has this rank's segments and the buffers, by name.
        state_dict: The dictionary.

    Raises:
        ValueError: A parameter is missing.
        RuntimeError: A shape is another one; in the words of ``nn.Module``.
        CheckpointError: Another rank had an error.
    """
    with Ranks(engine).agree("Loading an average"):
        kept, records, local = Lent(), engine.records(), dict(average.named_parameters())
        buffers = {name: StandIn(name, buffer.shape, buffer.dtype) for name, buffer in module.named_buffers()}
        wanted = {**_stand_ins(records), **{id(one): buffers[name] for name, one in module.named_buffers()}}
        with stand_ins(module, wanted):
            module.load_state_dict(kept.lend(state_dict), strict=False)
        sources = [(record, wanted[id(record.parameter)].sources) for record in records]
        missing = next((record for record, found in sources if not found), None)
        if missing is not None:
            raise ValueError(f"The checkpoint has no average of `{missing.name}` of shape {tuple(missing.shape)}.")
        copy_ranges([(one.name, found[-1], _master_segment(one, local[one.name])) for one, found in sources])
        with torch.no_grad():
            for name, buffer in average.named_buffers():
                if name in buffers and buffers[name].sources:
                    buffer.copy_(buffers[name].sources[-1])
        kept.take_back()


def _master_segment(record: ParameterRecord, local: torch.Tensor | None = None) -> Segment:
    """Return a record's segment of the master, or of ``local`` in its place."""
    local = record.master() if local is None else local
    return _segment_of(record, local.detach())


def _segment_of(record: ParameterRecord, local: torch.Tensor) -> Segment:
    """Return the segment of a tensor over a record's own range."""
    return Segment(local, record.own_range[0], torch.Size(record.shape), record.save_range, part=record.part)


def _saved_segment(record: ParameterRecord, local: torch.Tensor | None) -> Segment:
    segment = _master_segment(record, local)
    return segment if local is not None else dataclasses.replace(segment, saved_dtype=record.shown_dtype)


def _stand_ins(records: Sequence[ParameterRecord]) -> dict[int, StandIn]:
    return {
        id(record.parameter): StandIn(record.name, record.shape, record.parameter.dtype, record.parameter)
        for record in records
    }


def copy_ranges(items: Sequence[tuple[str, Any, Segment]]) -> None:
    """Copy this rank's range of every source, given with its name, into a segment."""
    stored: list[tuple[StoredTensor, Segment]] = []
    with torch.inference_mode(False), torch.no_grad():
        for name, source, target in items:
            if isinstance(source, StoredTensor):
                stored.append((source, target))
            elif not isinstance(source, Segment):
                _copy_whole(source.detach(), target)
            elif _range_of(source) == _range_of(target):
                target.local.copy_(source.local)
            else:
                raise ValueError(
                    f"`{name}` is of an engine with another stage or number of ranks. Save it, and load the file."
                )
        fill(stored)


def _range_of(segment: Segment) -> tuple[Any, ...]:
    return segment.shape, segment.part, segment.start, segment.stop


def _copy_whole(whole: torch.Tensor, target: Segment) -> None:
    """Copy a segment's range of a whole tensor."""
    if target.part is None:
        target.local.copy_(whole.reshape(-1)[target.start : target.stop])
        return
    for box, view in target.views():
        view.copy_(whole[box.slices])


# -- Optimizers --------------------------------------------------------------------------------------------------------


def identities(state_dict: Mapping[str, Any]) -> dict[str, Hashable]:
    """Return for every name in a state dictionary a key that is equal for two names of one tensor."""
    return {name: _identity(value) for name, value in state_dict.items()}


def _identity(value: Any) -> Hashable:
    if isinstance(value, StoredTensor):
        return value.source.identity(value.key) or value.key
    has_memory = type(value) is torch.Tensor and value.layout is torch.strided and value.numel() > 0
    return value.data_ptr() if has_memory else f"at {id(value)}"


GroupPosition = tuple[int, int, int]  # of a parameter: optimizer, group, index in the group


def optimizer_state(engine: ZeroEngine, optimizer: Optimizer) -> dict[str, Any]:
    """Return ``{"state": {name: {slot: Segment or value}}, "param_groups": [{..., "params": [name, ...]}]}``.

    Plain values that the optimizer's own ``state_dict`` adds are beside them.

    Raises:
        ValueError: Its own ``state_dict`` has tensors that would be lost.
    """
    own = own_entries(optimizer)
    records = {id(record.parameter): record for record in engine.records()}
    groups = [[records[id(param)] for param in group["params"]] for group in optimizer.param_groups]
    slots = {record.name: record.state(optimizer) for group in groups for record in group}
    return {
        "state": {
            record.name: {slot: _slot_segment(record, slot, value) for slot, value in slots[record.name].items()}
            for group in groups
            for record in group
            if slots[record.name]
        },
        "param_groups": [
            {**options, "params": [record.name for record in group]}
            for options, group in zip(optimizer.param_groups, groups, strict=True)
        ],
        **own,
    }


def _slot_segment(record: ParameterRecord, slot: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        _refuse_container(record, slot, value)
        return value
    if is_counter(slot, value):
        return value
    start, stop = record.own_range
    own_shape = (stop - start,) if record.is_sharded else record.shape_here
    return _segment_of(record, value.detach().view(-1)) if value.shape == own_shape else value


def _refuse_container(record: ParameterRecord, slot: str, value: Any) -> None:
    """Refuse a state that is no tensor and contains some: each rank has its segments of them.

    Raises:
        ValueError: It is one.
    """
    if not record.keeps_whole_states and any(tensor.ndim > 0 for tensor in _tensors_in(value)):
        raise ValueError(
            f"The optimizer state `{slot}` of `{record.name}` is a {type(value).__name__} of tensors, which cannot be"
            " divided among the ranks. Keep each tensor in `optimizer.state[param]` under a name of its own"
            f" (`state['{slot}_0']`), or use `stage=0`. If they are the same on every rank, such as statistics, keep"
            " numbers or tensors without dimensions."
        )


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors that a pickle of a value would have: those in containers and attributes of objects."""
    tensors: list[torch.Tensor] = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                tensors.append(leaf)
            return len(tensors) if isinstance(leaf, torch.Tensor) else None

    with contextlib.suppress(Exception):  # the file that cannot have it says so
        Pickler(io.BytesIO()).dump(value)
    return tensors


def load_optimizer_state(
    engine: ZeroEngine,
    optimizers: Sequence[Optimizer],
    *,
    states: Sequence[Mapping[str, Any]],
    names: Sequence[Sequence[Sequence[str]]] = (),
    stored: Mapping[str, Hashable] | None = None,
) -> list[Optimizer]:
    """Load the states of all optimizers, by parameter name or, as torch saves them, by index.

    Collective: all ranks; a rank reads only its own ranges of tensors in a directory.

    Args:
        engine: Whose optimizers these are.
        optimizers: The optimizers.
        states: Results of ``optimizer_state`` or ``Optimizer.state_dict`` of each.
        names: Of states by index: names of the parameters by optimizer and group, where the checkpoint has them.
        stored: Of states by index: ``identities`` of the checkpoint's model, as it was saved.

    Returns:
        Optimizers whose groups the checkpoint has in another order.

    Raises:
        ValueError: The checkpoint has other optimizers, groups, parameters or shapes, or is damaged.
        CheckpointError: Another rank had an error.
    """
    with Ranks(engine).agree("Loading the optimizers"):
        return _load_optimizers(engine, optimizers, states=states, names=names, stored=stored or {})


def _load_optimizers(
    engine: ZeroEngine,
    optimizers: Sequence[Optimizer],
    *,
    states: Sequence[Mapping[str, Any]],
    names: Sequence[Sequence[Sequence[str]]],
    stored: Mapping[str, Hashable],
) -> list[Optimizer]:
    if len(optimizers) != len(states):
        raise ValueError(
            f"The checkpoint has the states of {len(states)} optimizers, and there are {len(optimizers)} now."
            " `configure_optimizers` must return the same optimizers as when the checkpoint was saved."
        )
    permuted = []
    positions = _positions(engine, optimizers)
    for number, (optimizer, state) in enumerate(zip(optimizers, states, strict=True)):
        saved_names = names[number] if len(names) == len(states) else []
        state = _named(state, saved_names, positions=positions, number=number, stored=stored)
        _refuse_of_others(state, positions, number)
        kept = Lent()
        if not _load_optimizer(engine, optimizer, kept.lend(state), f"optimizer {number}"):
            permuted.append(optimizer)
        kept.take_back()
    return permuted


def _load_optimizer(engine: ZeroEngine, optimizer: Optimizer, state: Mapping[str, Any], label: str) -> bool:
    """Load the state of one optimizer. Return whether the checkpoint has its groups in this order."""
    records = {id(record.parameter): record for record in engine.records()}
    groups = [[records[id(param)] for param in group["params"]] for group in optimizer.param_groups]
    slots = _slots_by_name(groups, state, label)
    saved_groups = state["param_groups"]
    state = {**state, "param_groups": _in_order_of(groups, saved_groups, label)}
    in_order = all(here is saved for here, saved in zip(state["param_groups"], saved_groups, strict=True))
    counted = before_loading(optimizer, _counted(groups, state, slots))
    slots, state = _slots_by_position(groups, counted, label), counted
    counters = _counters(groups, slots)
    items: list[tuple[str, Any, Segment]] = []
    loaded: dict[torch.Tensor, dict[str, Any]] = {}
    for options, group in zip(state["param_groups"], groups, strict=True):
        for record in group:
            if slots.get(record.name):
                loaded[record.parameter] = {
                    slot: _new_slot(
                        engine,
                        optimizer,
                        record=record,
                        slot=slot,
                        value=value,
                        is_counter=slot in counters,
                        options=options,
                        items=items,
                    )
                    for slot, value in slots[record.name].items()
                }
    copy_ranges(items)
    for record in (record for group in groups for record in group):
        optimizer.state.pop(record.parameter, None)
    optimizer.state.update(loaded)
    for mine, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        mine.update({key: copy.deepcopy(saved[key]) for key in saved.keys() - {"params", "param_names"}})
    # Optimizers bring states and options of older versions up to date there.
    optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})
    after_loading(optimizer, state)
    return in_order


def _names_of(groups: Sequence[Sequence[ParameterRecord]]) -> dict[str, str]:
    """Return the first name of every parameter by all of its names."""
    return {alias: record.name for group in groups for record in group for alias in (record.name, *record.aliases)}


def _positions(engine: ZeroEngine, optimizers: Sequence[Optimizer]) -> dict[str, list[GroupPosition]]:
    """Return where every parameter is stepped, by all of its names: several optimizers may step it, or none."""
    positions: dict[int, list[GroupPosition]] = {}
    for number, optimizer in enumerate(optimizers):
        for group_number, group in enumerate(optimizer.param_groups):
            for index, param in enumerate(group["params"]):
                positions.setdefault(id(param), []).append((number, group_number, index))
    records = engine.records()
    return {
        name: positions.get(id(record.parameter), []) for record in records for name in (record.name, *record.aliases)
    }


def _named(
    state: Mapping[str, Any],
    saved_names: Sequence[Sequence[str]],
    *,
    positions: Mapping[str, Sequence[GroupPosition]],
    number: int,
    stored: Mapping[str, Hashable],
) -> Mapping[str, Any]:
    """Return a state by name, where names were saved beside.

    It keeps its order if no name contradicts it: parameters that have other names now are known by their position.
    """
    if [len(group["params"]) for group in state["param_groups"]] != [len(group) for group in saved_names]:
        return state
    saved = {
        name: (number, group_number, index)
        for group_number, group in enumerate(saved_names)
        for index, name in enumerate(group)
    }
    return state if _are_at_positions(saved, positions, stored) else by_name(state, saved_names)


def _are_at_positions(
    saved: Mapping[str, GroupPosition], positions: Mapping[str, Sequence[GroupPosition]], stored: Mapping[str, Hashable]
) -> bool:
    """Say whether saved parameters may be those that are at their positions now.

    They are not if one of them is at another position or frozen now, or if another one of the checkpoint is there.
    """
    here: dict[GroupPosition, set[str]] = {}
    for name, places in positions.items():
        for place in places:
            here.setdefault(place, set()).add(name)
    return all(
        position in positions[name] if name in positions else _may_be(name, here.get(position, ()), stored)
        for name, position in saved.items()
    )


def _may_be(name: str, others: Collection[str], stored: Mapping[str, Hashable]) -> bool:
    """Say whether a saved parameter may have other names now: those that the checkpoint has, too, are then tied there.

    Names that are new since tell nothing.
    """
    known = [stored[other] for other in others if other in stored]
    return not known or stored.get(name) in known


def _refuse_of_others(state: Mapping[str, Any], positions: Mapping[str, Sequence[GroupPosition]], number: int) -> None:
    """Refuse the state of a parameter that only other optimizers step now.

    Raises:
        ValueError: There is one.
    """
    for name in (name for group in state["param_groups"] for name in group["params"]):
        numbers = [position[0] for position in positions.get(name, ())]
        if numbers and number not in numbers:
            raise ValueError(
                f"The checkpoint has the state of `{name}` in optimizer {number}, and optimizer {numbers[0]} steps it"
                " now. `configure_optimizers` must return the optimizers in the order of the checkpoint."
            )


def _in_order_of(
    groups: Sequence[Sequence[ParameterRecord]], saved_groups: Sequence[Mapping[str, Any]], label: str
) -> list[Mapping[str, Any]]:
    """Return saved groups in the order of the groups here that have the same parameters.

    Raises:
        ValueError: A group has other parameters.
    """
    if not all(isinstance(key, str) for saved in saved_groups for key in saved["params"]):
        return list(saved_groups)
    names = _names_of(groups)
    left = [(frozenset(names[key] for key in saved["params"]), saved) for saved in saved_groups]
    ordered = []
    for wanted in (frozenset(record.name for record in group) for group in groups):
        number = next((number for number, (found, _) in enumerate(left) if found == wanted), None)
        if number is None:
            raise ValueError(_other_groups(groups, saved_groups, label))
        ordered.append(left.pop(number)[1])
    return ordered


def _other_groups(
    groups: Sequence[Sequence[ParameterRecord]], saved_groups: Sequence[Mapping[str, Any]], label: str
) -> str:
    """Name two parameters that are in one group here or in the checkpoint, and in two in the other."""
    names = _names_of(groups)
    here = {record.name: number for number, group in enumerate(groups) for record in group}
    saved = {names[key]: number for number, group in enumerate(saved_groups) for key in group["params"]}
    first, second = next(
        (first, second)
        for first, second in combinations(here, 2)
        if (here[first] == here[second]) != (saved[first] == saved[second])
    )
    one, two = ("here", "in the checkpoint") if here[first] == here[second] else ("in the checkpoint", "here")
    return (
        f"`{first}` and `{second}` are in one parameter group of {label} {one}, and in two {two}. Options such as"
        " `weight_decay` are those of a group: `configure_optimizers` must make the groups of the checkpoint."
    )


def _counted(
    groups: Sequence[Sequence[ParameterRecord]], state: Mapping[str, Any], slots: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a saved state with the parameters counted through the groups, as hooks of optimizers know it."""
    names = [record.name for group in groups for record in group]
    numbers = iter(range(len(names)))
    known = {key for group in state["param_groups"] for key in group["params"]}
    others = {key: value for key, value in state["state"].items() if key not in known}
    return {
        **state,
        "state": {
            **others,
            **state.get(OTHER_STATES, {}),
            **{number: dict(slots[name]) for number, name in enumerate(names) if slots.get(name)},
        },
        "param_groups": [
            {**saved, "params": [next(numbers) for _ in group]}
            for saved, group in zip(state["param_groups"], groups, strict=True)
        ],
    }


_OTHER = (
    " `configure_optimizers` must give an optimizer the parameters that it had in the checkpoint. To train others, load"
    " the weights alone: `lightning_zero.load_pretrained(module, path)`."
)


def _slots_by_name(
    groups: Sequence[Sequence[ParameterRecord]], state: Mapping[str, Any], label: str
) -> Mapping[str, Any]:
    """Return the slots of every parameter under the name it has here, after checking that there are no others."""
    saved_groups = state["param_groups"]
    if len(saved_groups) != len(groups):
        raise ValueError(
            f"{label} has {len(groups)} parameter groups, and {len(saved_groups)} in the checkpoint."
            " `configure_optimizers` must make the same groups."
        )
    saved_keys = [key for group in saved_groups for key in group["params"]]
    if not all(isinstance(key, str) for key in saved_keys):
        return _slots_by_position(groups, state, label)
    names = _names_of(groups)
    unknown = next((key for key in saved_keys if key not in names), None)
    if unknown is not None:
        raise ValueError(
            f"The checkpoint has the state of `{unknown}`, which {label} does not step."
            f"{nearest(unknown, names)}{_OTHER}"
        )
    by_parameter = {names[key]: key for key in saved_keys}
    twice = next((key for key in saved_keys if by_parameter[names[key]] != key), None)
    if twice is not None:
        raise ValueError(
            f"`{twice}` and `{by_parameter[names[twice]]}` are two parameters in the checkpoint and one here, so the"
            f" state of one would be lost. Tie them in the run that saves, or leave them untied here ({label})."
        )
    slots = {names[key]: state["state"].get(key) for key in saved_keys}
    missing = next((record.name for group in groups for record in group if record.name not in slots), None)
    if missing is not None:
        raise ValueError(
            f"{label} steps `{missing}`, of which the checkpoint has no state.{nearest(missing, saved_keys)}{_OTHER}"
        )
    return slots


def _slots_by_position(
    groups: Sequence[Sequence[ParameterRecord]], state: Mapping[str, Any], label: str
) -> Mapping[str, Any]:
    slots: dict[str, Any] = {}
    for number, (group, saved) in enumerate(zip(groups, state["param_groups"], strict=True)):
        if len(group) != len(saved["params"]):
            raise ValueError(
                f"Group {number} of {label} has {len(group)} parameters, and {len(saved['params'])} in the checkpoint."
            )
        for record, index in zip(group, saved["params"], strict=True):
            slots[record.name] = state["state"].get(index)
    return slots


def _counters(groups: Sequence[Sequence[ParameterRecord]], slots: Mapping[str, Any]) -> set[str]:
    """Return the slots that are one number for each parameter; 0-dim parameters alone do not tell, but names do."""
    found: dict[str, bool] = {}
    for record in (record for group in groups for record in group if record.shape):
        for slot, value in (slots.get(record.name) or {}).items():
            is_tensor = isinstance(value, torch.Tensor | Segment)
            is_number = not is_tensor or (value.numel() == 1 and value.shape != torch.Size(record.shape))
            found[slot] = is_number and found.get(slot, True)
    return {slot for slot, is_number in {**dict.fromkeys(COUNTERS, True), **found}.items() if is_number}


def _new_slot(
    engine: ZeroEngine,
    optimizer: Optimizer,
    *,
    record: ParameterRecord,
    slot: str,
    value: Any,
    is_counter: bool,
    options: Mapping[str, Any],
    items: list[tuple[str, Any, Segment]],
) -> Any:
    """Return a new value for a slot of the optimizer's state; values to be read are added to ``items``."""
    master = record.master()
    if not isinstance(value, torch.Tensor | Segment):
        _refuse_container(record, slot, value)
        return _cast_containers(value, master)
    if is_counter and slot == "step":
        on_device = options.get("capturable") or options.get("fused")
        return value.to(torch.float32).to(master.device, copy=True) if on_device else value.clone()
    dtype = _dtype_like(value, master)
    is_by_element = value.shape == torch.Size(record.shape)
    if is_counter or (not is_by_element and (value.ndim == 0 or record.keeps_whole_states)):
        return value.to(dtype).to(master.device, copy=True)
    if not is_by_element:
        raise ValueError(
            f"`{slot}` of `{record.name}` has the shape {tuple(value.shape)} in the checkpoint, and the parameter has"
            f" {tuple(record.shape)}."
        )
    start, stop = record.own_range
    with torch.inference_mode(False):
        local = engine.internals.checkpoints.state_place(optimizer, record.parameter, slot)  # on disks
        if local is None:
            local = torch.empty(stop - start, dtype=dtype, device=master.device)
    items.append((f"{record.name}.{slot}", value, _segment_of(record, local)))
    return local if record.is_sharded else local.view(record.shape_here)


def _cast_containers(value: Any, master: torch.Tensor) -> Any:
    """Copy a value that is no tensor, with the tensors in it as those of slots are: LBFGS keeps lists of them."""

    def cast(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return copy.deepcopy(leaf)
        return leaf.to(_dtype_like(leaf, master)).to(master.device, copy=True)

    return tree_map(cast, value)


def _dtype_like(value: torch.Tensor | Segment, master: torch.Tensor) -> torch.dtype:
    return master.dtype if value.dtype.is_floating_point else value.dtype
