"""Experts of DeepSpeed's ``MoE``, of which each has a file, as the stacked parameters of ``lightning_zero.moe.MoE``.

Note [Layout]
    A layer ``p`` has its router at ``p.deepspeed_moe.gate.wg.weight``, and expert e at
    ``p.deepspeed_moe.experts.deepspeed_experts.<e>``. ``layer_<l>_expert_<e>_mp_rank_00_model_states.pt`` has the
    parameters and buffers of an expert, under its number on all ranks together; early releases wrote
    ``expert_<e>_mp_rank_00_model_states.pt`` with those of all layers. ``num_experts`` of the model file has the number
    of each layer, and ``module`` all tensors that are not in an expert.

    A group of R = ``ep_size`` ranks has E / R experts per rank, in order, which count from 0 on each of them. So the
    groups of an optimizer hold other experts on other ranks, under the names of rank 0 in ``param_shapes``. ZeRO cuts
    them over the W / R ranks that have the same experts: every R-th one of W, or W / R neighbours with
    ``use_data_before_expert_parallelism``. Without ZeRO ``expp_rank_<r>_mp_rank_00_optim_states.pt`` has the states
    of such ranks, by number, not by name.

    As ``_save_moe_checkpoint`` and ``load_moe_state_dict`` of ``runtime/engine.py`` and
    ``_create_expert_and_data_parallel`` of ``utils/groups.py`` have it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from lightning_zero.checkpoint.joined import JoinedTensors, Layout, flat_range, same
from lightning_zero.checkpoint.stored import StoredTensor
from lightning_zero.checkpoint.unpickling import load_deepspeed, require_first_name

__all__ = [
    "NOT_ONE_SAVE",
    "ExpertName",
    "Layer",
    "expert_name",
    "expert_ranks",
    "further_names",
    "is_of_experts",
    "merged_groups",
    "other_values",
    "our_name",
    "possible_orders",
    "read_layers",
    "refuse_tensor_ranks",
    "regroup",
    "regroup_schedule",
    "stack",
]

EXPERT_FILE = re.compile(r"(?:layer_(\d+)_)?expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
OPTIMIZER_FILE = re.compile(r"expp_rank_\d+_mp_rank_\d+_optim_states\.pt")
ROUTER = re.compile(r"(.*\.)?deepspeed_moe\.gate\.wg\.weight")
IN_EXPERT = re.compile(r"(.*\.)?deepspeed_moe\.experts\.deepspeed_experts\.(\d+)\.(.+)")
DATA_FIRST = "use_data_before_expert_parallelism"
SAMPLE = 4096  # elements that are compared
NOT_ONE_SAVE = "The files are not of one save."
MARKS = frozenset({"params", "name", "moe"})  # of a group; DeepSpeed's split of a group changes them
NOT_BY_GROUP = frozenset({"_milestones", "_schedule_phases"})  # lists in schedules' states


# -- Names -------------------------------------------------------------------------------------------------------------


class ExpertName(NamedTuple):
    """The name of a tensor in an expert.

    Attributes:
        layer: Name of the ``MoE``, with a dot at its end; empty if it is the whole model.
        number: Of the expert.
        name: In the expert's module.
    """

    layer: str
    number: int
    name: str

    @property
    def stacked(self) -> str:
        """The name of the parameter here that has all experts' tensors of this name."""
        return f"{self.layer}experts.{self.name}"


def expert_name(name: str) -> ExpertName | None:
    """Return the parts of DeepSpeed's name for a tensor in an expert; None for other names."""
    found = IN_EXPERT.fullmatch(name.removeprefix("."))  # the name of a model that is itself the layer is empty
    return None if found is None else ExpertName(found[1] or "", int(found[2]), found[3])


def our_name(name: str) -> str:
    """Return the name here of a tensor outside of experts: another one for routers alone."""
    found = ROUTER.fullmatch(name)
    return name if found is None else f"{found[1] or ''}router.weight"


def is_of_experts(path: Path) -> bool:
    """Say whether a file has the parameters of an expert, or the optimizer states of ranks with the same experts."""
    return any(pattern.fullmatch(path.name) for pattern in (EXPERT_FILE, OPTIMIZER_FILE))


# -- Files -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Layer:
    """The experts of a layer.

    Attributes:
        name: As in ``ExpertName``.
        files: Of every expert.
        tensors: Of every expert, by name in the expert's module.
    """

    name: str
    files: Sequence[Path]
    tensors: Mapping[str, Sequence[Tensor]]

    @property
    def num_experts(self) -> int:
        """Number of experts on all ranks together."""
        return len(self.files)

    @property
    def shown(self) -> str:
        """The name in errors."""
        return _shown(self.name)


def _shown(layer: str) -> str:
    return layer.rstrip(".") or "the model"


def read_layers(folder: Path, model: Mapping[str, Any]) -> dict[str, Layer]:
    """Read the files of experts, mapped into memory.

    Args:
        folder: The files of a tag.
        model: Content of the model file.

    Returns:
        Layers by their name; none if the model has none.

    Raises:
        ValueError: A file is missing, of another save, of another program or damaged.
        pickle.UnpicklingError: A file names something that could run code.
    """
    paths = sorted(path for path in folder.glob("*expert_*_model_states.pt") if EXPERT_FILE.fullmatch(path.name))
    found: dict[str, dict[int, tuple[Path, Mapping[str, Tensor]]]] = {}
    for path in paths:
        for layer, number, tensors in _read_expert(path):
            others = found.setdefault(layer, {})
            if number in others:
                raise ValueError(
                    f"`{others[number][0]}` and `{path}` both have expert {number} of `{_shown(layer)}`. One of"
                    " them was left from another save: remove it."
                )
            others[number] = path, tensors
    sizes = _sizes_of_layers(folder, model, found)
    _refuse_dropped(folder, model, sizes)
    return {layer: _layer(folder, layer, sizes[layer], held) for layer, held in found.items()}


def further_names(model: Mapping[str, Any], layers: Container[str]) -> dict[str, str]:
    """Return the further names of layers that a model has under several; they have no files.

    Args:
        model: Content of the model file.
        layers: Names of the layers that have files.
    """
    shared = model.get("shared_params") or {}
    routers = [(ROUTER.fullmatch(alias), ROUTER.fullmatch(name)) for alias, name in shared.items()]
    names = {alias[1] or "": name[1] or "" for alias, name in routers if alias and name}
    return {alias: name for alias, name in names.items() if alias not in layers}


def refuse_tensor_ranks(folder: Path, path: Path) -> NoReturn:
    """Refuse experts beside several tensor ranks.

    Args:
        folder: The checkpoint.
        path: A file of another tensor rank than the first.

    Raises:
        ValueError: Always.
    """
    raise ValueError(
        f"`{path}` is of another tensor rank, and `{folder}` has files of experts: experts beside tensor ranks cannot"
        " be converted, because DeepSpeed does not write down how they are cut. Save whole weights in the program that"
        " trains them, with `torch.save(state_dict, path)`, and load them with `lightning_zero.load_pretrained`. If"
        " there was one tensor rank, the file was left from another save: remove it."
    )


def _read_expert(path: Path) -> list[tuple[str, int, Mapping[str, Tensor]]]:
    """Return the layers in a file, each with the expert's number and tensors."""
    require_first_name(path)
    content = load_deepspeed(path)
    found: dict[str, dict[str, Tensor]] = {}
    wanted = int(EXPERT_FILE.fullmatch(path.name)[2])  # type: ignore[index]
    for key, value in content.items() if isinstance(content, dict) else [(type(content).__name__, content)]:
        place = expert_name(key)
        if place is None or not isinstance(value, Tensor):
            raise ValueError(
                f"`{path}` has `{key}`, which is no tensor of an expert of `deepspeed.moe.layer.MoE`. Other experts"
                " (AutoEP), and extra state of modules, cannot be converted."
            )
        if place.number != wanted:
            raise ValueError(
                f"`{path}` has the parameters of expert {place.number} (`{key}`): it is the file of another expert."
                " Give every file its first name."
            )
        found.setdefault(place.layer, {})[place.name] = value
    return [(layer, wanted, tensors) for layer, tensors in found.items()]


def _sizes_of_layers(folder: Path, model: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of experts of every layer, as routers have it; not of further names of a layer."""
    further = further_names(model, found)
    routers = {
        layer: value.shape[0]
        for name, value in model["module"].items()
        if (match := ROUTER.fullmatch(name)) and (layer := match[1] or "") not in further
    }
    written = model.get("num_experts")
    numbers = [written] if isinstance(written, int) else list(written or [])
    for layer in routers.keys() ^ found.keys():
        shown = _shown(layer)
        if layer in routers:
            raise ValueError(
                f"`{folder}` has a router of `{shown}`, and no file of its experts. {NOT_ONE_SAVE} A layer that a model"
                " has under two names is converted from checkpoints of ZeRO alone."
            )
        path = next(iter(found[layer].values()))[0]
        if len(numbers) > len(routers):
            raise ValueError(
                f"`{path}` has an expert of `{shown}`, whose router is not in the model file: it is frozen, and the"
                " checkpoint was saved with `exclude_frozen_parameters=True`. Save it without this argument."
            )
        raise ValueError(
            f"`{path}` has an expert of `{shown}`, which has no router in the model file. The file was left from"
            " another save: remove it."
        )
    if routers and set(numbers) != set(routers.values()):
        raise ValueError(
            f"`{folder}` was written with {numbers} experts per layer, and its routers choose among"
            f" {list(routers.values())}. {NOT_ONE_SAVE}"
        )
    return routers


def _refuse_dropped(folder: Path, model: Mapping[str, Any], layers: Mapping[str, Any]) -> None:
    """Refuse buffers that DeepSpeed took for those of experts, because of their names, and wrote nowhere."""
    for name in model.get("buffer_names", ()) if layers else ():
        if "expert" in name and expert_name(name) is None and name not in model["module"]:
            raise ValueError(
                f"`{folder}` does not have the buffer `{name}`: DeepSpeed leaves out tensors inside of a `MoE` whose"
                " names contain `expert`. In the program that trains, rename the module or the attribute that brings it"
                " into the name, and save the checkpoint again."
            )


def _layer(folder: Path, layer: str, count: int, held: Mapping[int, tuple[Path, Mapping[str, Tensor]]]) -> Layer:
    shown = _shown(layer)
    for number in range(count):
        if number not in held:
            path = next(iter(held.values()))[0]
            absent = re.sub(r"expert_\d+", f"expert_{number}", path.name)
            raise ValueError(
                f"`{folder}` lacks `{absent}`, expert {number} of the {count} of `{shown}`. Copy the files of all ranks"
                " into one folder: on several nodes each may have written its own."
            )
    other = next((number for number in held if number >= count), None)
    if other is not None:
        raise ValueError(
            f"`{held[other][0]}` has expert {other}, and `{shown}` has {count} experts. The file was left from another"
            " save: remove it."
        )
    first = _kinds(held[0][1])
    for path, tensors in held.values():
        different = dict(first.items() ^ _kinds(tensors).items())
        if different:
            raise ValueError(
                f"`{held[0][0]}` and `{path}` have different tensors: `{next(iter(different))}`. Experts of a layer"
                f" have one structure. {NOT_ONE_SAVE}"
            )
    experts = [held[number] for number in range(count)]
    return Layer(layer, [path for path, _ in experts], {name: [own[name] for _, own in experts] for name in first})


def _kinds(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (value.shape, value.dtype) for name, value in tensors.items()}


# -- Ranks -------------------------------------------------------------------------------------------------------------


def expert_ranks(layer: Layer, num_local: int, world_size: int, is_data_first: bool) -> list[list[int]]:
    """Return, by expert, the data ranks that have it, in the order of their parts.

    Args:
        layer: The layer.
        num_local: Number of its experts on a rank.
        world_size: Number of data ranks.
        is_data_first: Whether neighbours have the same experts, not those R ranks apart.

    Raises:
        ValueError: The numbers do not divide.
    """
    size = layer.num_experts // num_local
    if size * num_local != layer.num_experts or world_size % size:
        raise ValueError(
            f"`{layer.files[0].parent}`: {num_local} experts per rank, {layer.num_experts} experts of"
            f" `{layer.shown}` and {world_size} ranks do not divide. {NOT_ONE_SAVE}"
        )
    part = world_size // size
    ranks = list(range(world_size))
    owners = [ranks[one * part : (one + 1) * part] if is_data_first else ranks[one::size] for one in range(size)]
    return [owners[number // num_local] for number in range(layer.num_experts)]


def possible_orders(config: Any) -> list[bool]:
    """Return the values that ``is_data_first`` of ``expert_ranks`` may have.

    Args:
        config: DeepSpeed's configuration as a checkpoint has it: its entries, or the path of a file.
    """
    return [bool(config.get(DATA_FIRST, False))] if isinstance(config, Mapping) else [False, True]


def other_values(layer: Layer, name: str, masters: Sequence[Tensor]) -> Path | None:
    """Return the first file whose weight is not the rounded master: one of them is of another save, or of other ranks.

    The first elements are compared.

    Args:
        layer: The layer.
        name: In an expert's module.
        masters: Of every expert, each with a first dimension of 1.
    """
    for path, weight, master in zip(layer.files, layer.tensors[name], masters, strict=True):
        count = min(SAMPLE, weight.numel())
        if master.shape[1:] != weight.shape:
            return path
        if not same(flat_range(weight, 0, count), flat_range(master, 0, count).to(weight.dtype)):
            return path
    return None


def stack(source: JoinedTensors, key: str, parts: Sequence[Tensor]) -> StoredTensor:
    """Return the experts' tensors, each with a first dimension of 1, as one; it is read when its values are used."""
    layout = Layout.cut([len(parts), *parts[0].shape[1:]], 0, [[1] * len(parts)])
    return source.add(key, layout, parts)


# -- Parameter groups --------------------------------------------------------------------------------------------------


def merged_groups(groups: Sequence[Mapping[str, Any]], stacked: Iterable[str]) -> list[list[int]]:
    """Return the numbers of DeepSpeed's groups that are one group here: experts go back to that with their options.

    If several groups have the experts' options, or none, the experts are a group of their own.

    Args:
        groups: With names as ``params``.
        stacked: Names of the experts' parameters.
    """
    experts = set(stacked)
    filled = [number for number, group in enumerate(groups) if group["params"]]
    split = [number for number in filled if experts.issuperset(groups[number]["params"])]
    kept = [[number] for number in filled if number not in split]
    own: list[list[int]] = []
    for number in split:
        alike = [one for one in kept if _have_same_options(groups[one[0]], groups[number])]
        target = (
            alike if len(alike) == 1 else [one for one in own if _have_same_options(groups[one[0]], groups[number])]
        )
        if target:
            target[0].append(number)
        else:
            own.append([number])
    return [*kept, *own]


def regroup(groups: Sequence[Mapping[str, Any]], merged: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Undo DeepSpeed's split of parameter groups, given the result of ``merged_groups``."""
    result = []
    for numbers in merged:
        first = groups[numbers[0]]
        options = {key: value for key, value in first.items() if not (first.get("moe") and key in MARKS)}
        result.append({**options, "params": [name for number in numbers for name in groups[number]["params"]]})
    return result


def regroup_schedule(state: Any, merged: Sequence[Sequence[int]], num_groups: int) -> Any:
    """Return a schedule's state whose lists have an entry per group here, in the place of one per DeepSpeed's group.

    Args:
        state: As ``LRScheduler.state_dict`` returns it.
        merged: Result of ``merged_groups``.
        num_groups: Number of DeepSpeed's groups.

    Raises:
        ValueError: Groups that are one here have other values.
    """
    if not isinstance(state, Mapping):
        return state
    result = dict(state)
    for key, value in state.items():
        if key == "_schedulers":  # of SequentialLR, ChainedScheduler
            result[key] = [regroup_schedule(one, merged, num_groups) for one in value]
        elif isinstance(value, list) and len(value) == num_groups and key not in NOT_BY_GROUP:
            other = next((run for run in merged if not all(same(value[run[0]], value[number]) for number in run)), None)
            if other is not None:
                raise ValueError(
                    f"`{key}` of a schedule has other values for DeepSpeed's parameter groups {other}, which have the"
                    f" same options and are one group here: {[value[number] for number in other]}. Load the checkpoint"
                    " in DeepSpeed with a schedule that treats these groups alike, and save it again."
                )
            result[key] = [value[run[0]] for run in merged]
    return result


def _have_same_options(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    mine, theirs = ({key: value for key, value in group.items() if key not in MARKS} for group in (one, other))
    return same(mine, theirs)
