"""Writes what DeepSpeed's ZeRO writes, from a model and an optimizer of one process.

After ``state_dict`` of ``runtime/zero/stage_1_and_2.py`` and ``stage3.py`` and ``_save_checkpoint`` of
``runtime/engine.py``: flat groups, padding, file names, and objects of DeepSpeed's classes among the tensors.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import re
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["Cuts", "affine_info", "deepspeed_classes", "part", "write", "write_parts"]

SUB_GROUP = 3  # parameters in a flat group of stage 3


class ZeroStageEnum(int, enum.Enum):
    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


class DynamicLossScaler:
    def __init__(self) -> None:
        self.cur_scale = 2**16
        self.cur_iter = 7
        self.last_overflow_iter = 2
        self.cur_hysteresis = 1
        self.scale_factor = 2.0
        self.scale_window = 1000
        self.raise_error = True


class fragment_address:
    def __init__(self, numel: int, start: int) -> None:
        self.numel = numel
        self.start = start


CLASSES = {
    "deepspeed.runtime.zero.config": ZeroStageEnum,
    "deepspeed.runtime.fp16.loss_scaler": DynamicLossScaler,
    "deepspeed.utils.tensor_fragment": fragment_address,
}


@contextlib.contextmanager
def deepspeed_classes() -> Iterator[None]:
    """Let the classes above be pickled under DeepSpeed's names."""
    was = {cls: cls.__module__ for cls in CLASSES.values()}
    try:
        for module, cls in CLASSES.items():
            parts = module.split(".")
            for depth in range(1, len(parts) + 1):
                sys.modules.setdefault(".".join(parts[:depth]), types.ModuleType(".".join(parts[:depth])))
            setattr(sys.modules[module], cls.__name__, cls)
            cls.__module__ = module
        yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "deepspeed"]:
            del sys.modules[name]
        for cls, module in was.items():
            cls.__module__ = module


# By parameter name the dimension, and of every section along it the extent that each tensor rank has.
Cuts = Mapping[str, tuple[int, Sequence[Sequence[int]]]]


def write(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer,
    stage: int,
    world: int,
    client: dict[str, Any] | None = None,
    tensor_rank: int = 0,
) -> None:
    """Write ``<folder>/global_step3`` and ``latest``; with a client state in Lightning's folder ``checkpoint``."""
    tag = "global_step3" if client is None else "checkpoint"
    (folder / tag).mkdir(parents=True, exist_ok=tensor_rank > 0)
    (folder / "latest").write_text(tag)
    mp_rank = f"mp_rank_{tensor_rank:02d}"
    with deepspeed_classes():
        for rank in range(world):
            if rank == 0 or stage == 3:
                prefix = f"zero_pp_rank_{rank}_" if stage == 3 else ""
                content = {**_model_states(model, optimizer, stage, world, rank), **(client or {})}
                torch.save(content, folder / tag / f"{prefix}{mp_rank}_model_states.pt")
            content = {"optimizer_state_dict": _optimizer_states(optimizer, stage, world, rank), "ds_version": "0.17.0"}
            torch.save(content, folder / tag / f"bf16_zero_pp_rank_{rank}_{mp_rank}_optim_states.pt")


# -- AutoTP ------------------------------------------------------------------------------------------------------------


def write_parts(
    folder: Path, model: nn.Module, optimizer: Optimizer, stage: int, *, world: int, cuts: Cuts, client: dict[str, Any]
) -> None:
    """Write the files of every tensor rank, each with its parts, as after ``tensor_parallel.autotp_size``.

    After ``TensorParallel_Layer._tp_partition`` of ``module_inject/layers.py``: parts are the data of the parameters.
    """
    num_ranks = len(next(iter(cuts.values()))[1][0])
    axes = {"mp_world_size": num_ranks, "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": num_ranks}}
    for rank in range(num_ranks):
        local, its_optimizer = copy.deepcopy((model, optimizer))
        for name, param in local.named_parameters():
            for slot, value in its_optimizer.state.get(param, {}).items():
                if value.ndim > 0:
                    its_optimizer.state[param][slot] = part(value, cuts.get(name), rank)
            param.data = part(param.data, cuts.get(name), rank)
            if name in cuts and param.numel() == 0:
                _leave_out(its_optimizer, param)
        write(folder, local, its_optimizer, stage, world, client={**axes, **client}, tensor_rank=rank)


def _leave_out(optimizer: Optimizer, param: nn.Parameter) -> None:
    """Take a parameter without elements out of its group, as DeepSpeed does."""
    for group in optimizer.param_groups:
        group["params"] = [one for one in group["params"] if one is not param]
    optimizer.state.pop(param, None)


def part(whole: Tensor, cut: tuple[int, Sequence[Sequence[int]]] | None, rank: int) -> Tensor:
    """Return a rank's part of a tensor, as ``_partition_logical_tensor``."""
    if cut is None:
        return whole.clone()
    dim, widths = cut
    sections = whole.split([sum(section) for section in widths], dim)
    return torch.cat(
        [one.split(list(section), dim)[rank] for one, section in zip(sections, widths, strict=True)], dim
    ).clone()


def affine_info(model: nn.Module, cuts: Cuts) -> dict[str, Any]:
    """Return what ``collect_autotp_universal_checkpoint_info`` of DeepSpeed 0.19.8 publishes: the affine maps.

    Beside them are lists of name patterns, which older converters read.
    """
    num_ranks = len(next(iter(cuts.values()))[1][0])
    params = {
        rf"^{re.escape(name)}$": _affine_map(tuple(param.shape), cuts.get(name), num_ranks)
        for name, param in model.named_parameters()
    }
    whole = [rf"^{re.escape(name)}$" for name, _ in model.named_parameters() if name not in cuts]
    return {
        "universal_checkpoint_version": 0.4,
        "parameter_with_row_parallelism_patterns": [],
        "tp_replicated_parameter_patterns": whole,
        "vocabulary_parameter_patterns": [],
        "parameter_with_sub_params": [],
        "autotp_unsupported_parameter_patterns": {},
        "affine_map": {"version": 1, "params": params},
    }


def _affine_map(shape: tuple[int, ...], cut: Any, num_ranks: int) -> dict[str, Any]:
    """Return ``ParamAffineMap.to_dict()`` of ``replicated_map``, ``contiguous_split_map`` or ``sub_param_map``."""
    strides = list(torch.empty(shape, device="meta").stride())
    if cut is None:
        place = [0, strides]
        piece = {"shape": list(shape), "source": place, "dest": place, "locations": list(range(num_ranks))}
        return {
            "logical_shape": list(shape),
            "ranks": {rank: {"shard_shape": list(shape), "pieces": [piece]} for rank in range(num_ranks)},
        }
    dim, widths = cut
    ranks: dict[int, Any] = {}
    for rank in range(num_ranks):
        shard = [*shape[:dim], sum(section[rank] for section in widths), *shape[dim + 1 :]]
        inner = list(torch.empty(shard, device="meta").stride())
        pieces, begin, end = [], 0, 0
        for section in widths:
            extent = section[rank]
            pieces.append(
                {
                    "shape": [*shape[:dim], extent, *shape[dim + 1 :]],
                    "source": [(begin + sum(section[:rank])) * strides[dim], strides],
                    "dest": [end * inner[dim], inner],
                    "locations": [rank],
                }
            )
            begin += sum(section)
            end += extent
        ranks[rank] = {"shard_shape": shard, "pieces": pieces}
    return {"logical_shape": list(shape), "ranks": ranks}


def _flat_groups(optimizer: Optimizer, stage: int) -> list[list[Tensor]]:
    groups = [group["params"] for group in optimizer.param_groups]
    if stage < 3:
        return groups
    return [group[start : start + SUB_GROUP] for group in groups for start in range(0, len(group), SUB_GROUP)]


def _part(values: Sequence[Tensor], stage: int, world: int, rank: int, padded: bool) -> Tensor:
    """Return a rank's vector of a flat group."""
    if stage == 3:
        return torch.cat([_cut(value.detach().reshape(-1), world, world, rank) for value in values])
    flat = torch.cat([value.detach().reshape(-1) for value in values])
    part = _cut(flat, 2 * world, world, rank)
    lean = part.numel() - (-flat.numel() % (2 * world)) if rank == world - 1 and not padded else part.numel()
    return part[:lean].clone()


def _cut(flat: Tensor, align: int, world: int, rank: int) -> Tensor:
    padded = torch.cat([flat, flat.new_full((-flat.numel() % align,), float("nan"))])
    return padded.chunk(world)[rank].clone() if padded.numel() else padded


def _optimizer_states(optimizer: Optimizer, stage: int, world: int, rank: int) -> dict[str, Any]:
    flat = _flat_groups(optimizer, stage)
    state = {
        number: {
            "step": 7,
            **{
                slot: _part([optimizer.state[param][slot] for param in params], stage, world, rank, padded=True)
                for slot in ("exp_avg", "exp_avg_sq")
            },
        }
        for number, params in enumerate(flat)
    }
    numbers = iter(range(len(flat)))
    per_group = [1 if stage < 3 else -(-len(group["params"]) // SUB_GROUP) for group in optimizer.param_groups]
    groups = [
        {"bias_correction": True, **group, "params": [next(numbers) for _ in range(count)]}
        for group, count in zip(optimizer.param_groups, per_group, strict=True)
    ]
    base = {"state": state, "param_groups": groups}
    masters = [_part(params, stage, world, rank, padded=False) for params in flat]
    common = {"loss_scaler": DynamicLossScaler(), "dynamic_loss_scale": True, "overflow": False}
    if stage == 3:
        return {
            **common, "zero_stage": ZeroStageEnum.weights, "partition_count": world,
            "optimizer_state_dict": base, "fp32_flat_groups": masters,
        }  # fmt: skip
    return {
        **common, "zero_stage": ZeroStageEnum(stage), "partition_count": [world] * len(flat),
        "base_optimizer_state": base, "single_partition_of_fp32_groups": masters, "group_paddings": [0] * len(flat),
        "param_slice_mappings": [OrderedDict(weight=fragment_address(3, 0))], "clip_grad": 0.0, "ds_version": "0.17.0",
    }  # fmt: skip


def _model_states(model: nn.Module, optimizer: Optimizer, stage: int, world: int, rank: int) -> dict[str, Any]:
    names = {id(param): name for name, param in reversed([*model.named_parameters(remove_duplicate=False)])}
    aliases = {
        name: names[id(param)]
        for name, param in model.named_parameters(remove_duplicate=False)
        if names[id(param)] != name
    }
    frozen = {name: param for name, param in model.named_parameters() if not param.requires_grad}
    lowered = {id(param): param.detach().bfloat16() for param in model.parameters()}
    module: dict[str, Any] = OrderedDict(model.state_dict(keep_vars=True))
    for name, value in module.items():
        if isinstance(value, nn.Parameter):
            module[name] = lowered[id(value)] if stage < 3 else torch.empty(0, dtype=torch.bfloat16)
    keeps_frozen = stage > 1
    fragments = {
        name: lowered[id(param)] if stage < 3 else _cut(lowered[id(param)].reshape(-1), world, world, rank)
        for name, param in frozen.items()
    }
    return {
        "module": module,
        "buffer_names": [name for name, _ in model.named_buffers()],
        "optimizer": None,
        "param_shapes": [
            OrderedDict((names[id(param)], param.shape) for param in params)
            for params in _flat_groups(optimizer, stage)
        ],
        "frozen_param_shapes": {name: param.shape for name, param in frozen.items()} if keeps_frozen else None,
        "shared_params": aliases,
        "frozen_param_fragments": fragments if keeps_frozen else None,
        "lr_scheduler": None,
        "sparse_tensor_module_names": set(),
        "skipped_steps": 0,
        "global_steps": 3,
        "global_samples": 24,
        "dp_world_size": world,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": {"zero_optimization": {"stage": stage}},
        "ds_version": "0.17.0",
    }
