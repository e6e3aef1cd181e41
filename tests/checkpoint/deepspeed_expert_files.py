"""Writes the files of a program with ``deepspeed.moe.layer.MoE`` as DeepSpeed does, from a model with all experts.

Every function names the one of DeepSpeed 0.19.8 that makes the key or the tensor.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from tests.checkpoint.deepspeed_files import DynamicLossScaler, ZeroStageEnum, deepspeed_classes, fragment_address

__all__ = ["Layout", "Mixture", "layers", "write"]

INSIDE = ".deepspeed_moe.experts.deepspeed_experts."


class _Part(nn.Module):
    """A module with the submodules and parameters of its arguments."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)


class Mixture(nn.Module):
    """``MoE`` of ``deepspeed/moe/layer.py`` on one rank, without dropped tokens: its names, and its result.

    ``MoE.__init__``: ``deepspeed_moe``, ``mlp``, ``coefficient``. ``MOELayer.__init__``: ``gate``, ``experts``.
    ``TopKGate.__init__``: ``wg``. ``Experts.__init__``: ``deepspeed_experts``.
    """

    def __init__(self, width: int, experts: Sequence[nn.Module], k: int, residual: nn.Module | None = None) -> None:
        super().__init__()
        gate = _Part(wg=nn.Linear(width, len(experts), bias=False))
        self.deepspeed_moe = _Part(gate=gate, experts=_Part(deepspeed_experts=nn.ModuleList(experts)))
        self.k = k
        if residual is not None:
            self.mlp = residual
            self.coefficient = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        experts = self.deepspeed_moe.experts.deepspeed_experts
        rows = x.reshape(-1, x.shape[-1])
        scores = self.deepspeed_moe.gate.wg(rows).softmax(-1)  # type: ignore[operator]
        top, chosen = scores.topk(self.k)
        shares = top if self.k == 1 else top / top.sum(-1, keepdim=True)
        every = torch.stack([expert(rows) for expert in experts], 1)
        out = (every.gather(1, chosen[..., None].expand(-1, -1, rows.shape[-1])) * shares[..., None]).sum(1)
        counts = F.one_hot(chosen[:, 0], len(experts)).to(scores).mean(0)
        aux = len(experts) * (scores.mean(0) * counts).sum()
        if hasattr(self, "mlp"):
            mix = self.coefficient(rows).softmax(-1)
            out = out * mix[:, :1] + self.mlp(rows) * mix[:, 1:]
        return out.view_as(x), aux


def layers(model: nn.Module) -> dict[str, Mixture]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Mixture)}


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a run was: its stage and ranks, and ``ep_size`` of every layer."""

    stage: int
    world: int
    sizes: Mapping[str, int]
    data_first: bool = False  # use_data_before_expert_parallelism
    dtype: torch.dtype = torch.bfloat16
    max_group_size: int = 178956971
    alignment: int = 1  # of parameters: elements
    keeps_config: bool = True  # as a dict; otherwise its path

    def expert_rank(self, layer: str, rank: int) -> int:
        """``_create_expert_and_data_parallel`` of ``utils/groups.py``: ranks with the same experts, E + D or D + E."""
        size = self.sizes[layer]
        return rank // (self.world // size) if self.data_first else rank % size

    def part(self, layer: str, rank: int) -> int:
        """Its number among the ranks with the same experts."""
        size = self.sizes[layer]
        return rank % (self.world // size) if self.data_first else rank // size


def write(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer,
    layout: Layout,
    client: dict[str, Any] | None = None,
    tag: str = "global_step3",
) -> Path:
    """``save_checkpoint`` of ``runtime/engine.py`` on all ranks; return the folder of the tag."""
    out = folder / tag
    out.mkdir(parents=True)
    (folder / "latest").write_text(tag)
    with deepspeed_classes():
        _write_experts(out, model, layout)
        for rank in range(layout.world):
            if layout.stage == 0:
                _write_optimizer(out, model, optimizer, layout, rank)
            else:  # _get_zero_ckpt_prefix, _save_zero_checkpoint
                kind = "bf16_" if layout.dtype is torch.bfloat16 else ""
                content = {
                    "optimizer_state_dict": _optimizer_states(model, optimizer, layout, rank),
                    "ds_config": _config(layout),
                    "ds_version": "0.19.8",
                }
                torch.save(content, out / f"{kind}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        content = {**_model_states(model, optimizer, layout), **(client or {})}
        torch.save(_cloned(content), out / "mp_rank_00_model_states.pt")
    return out


def _config(layout: Layout) -> Any:
    config = {"use_data_before_expert_parallelism": layout.data_first, "zero_optimization": {"stage": layout.stage}}
    return config if layout.keeps_config else "ds_config.json"


def _cloned(item: Any) -> Any:
    """``clone_tensors_for_torch_save`` of ``checkpoint/utils.py``: ties are lost."""
    if isinstance(item, Tensor):
        return item.detach().clone()
    if isinstance(item, dict):
        return type(item)({key: _cloned(value) for key, value in item.items()})
    return [_cloned(one) for one in item] if isinstance(item, list) else item


def _write_experts(out: Path, model: nn.Module, layout: Layout) -> None:
    """The loop over modules in ``_save_moe_checkpoint``, ``_get_expert_ckpt_name``."""
    for number, (name, layer) in enumerate(layers(model).items()):
        found: dict[int, dict[str, Tensor]] = {}
        for key, value in layer.state_dict().items():
            if "expert" in key and "moe.gate.wg.weight" not in key:
                expert = int(f".{key}".removeprefix(INSIDE).split(".")[0])
                value = value.to(layout.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
                found.setdefault(expert, {})[f"{name}.{key}"] = value.clone().detach()
        for expert, tensors in found.items():
            torch.save(tensors, out / f"layer_{number}_expert_{expert}_mp_rank_00_model_states.pt")


def _local(model: nn.Module, layout: Layout, rank: int) -> dict[str, nn.Parameter]:
    """``MoE.__init__``, ``Experts.__init__``: a rank's parameters, experts under their local numbers."""
    return {
        local: param
        for name, param in model.named_parameters()
        if (local := _local_name(name, model, layout, rank)) is not None
    }


def _local_name(name: str, model: nn.Module, layout: Layout, rank: int) -> str | None:
    layer, inside, rest = name.partition(INSIDE)
    if not inside:
        return name
    number, _, tensor = rest.partition(".")
    experts = model.get_submodule(f"{layer}{INSIDE}".strip("."))
    count = len(experts) // layout.sizes[layer]  # type: ignore
    local = int(number) - layout.expert_rank(layer, rank) * count
    return f"{layer}{inside}{local}.{tensor}" if 0 <= local < count else None


def _groups(model: nn.Module, optimizer: Optimizer, layout: Layout, rank: int) -> list[dict[str, Any]]:
    """``split_params_into_different_moe_groups_for_optimizer`` of ``moe/utils.py``; groups of pairs (name, parameter).

    ``_configure_optimizer`` of ``runtime/engine.py`` takes out groups without parameters.
    """
    names = {id(param): name for name, param in _local(model, layout, rank).items()}
    dense, moe = [], []
    for number, group in enumerate(optimizer.param_groups):
        own = [(names[id(param)], param) for param in group["params"] if id(param) in names and param.requires_grad]
        dense.append({**group, "name": f"group{number}", "params": [pair for pair in own if INSIDE not in pair[0]]})
        for key in sorted({f"ep_size_{size}" for size in layout.sizes.values()}):
            held = [pair for pair in own if INSIDE in pair[0] and f"ep_size_{_size(pair[0], layout)}" == key]
            for params in _chunks(held, layout.max_group_size):
                moe.append({**group, "name": key, "moe": True, "params": params})
    return [group for group in [*dense, *moe] if group["params"]]


def _size(name: str, layout: Layout) -> int:
    return layout.sizes[name.partition(INSIDE)[0]]


def _chunks(pairs: Sequence[Any], most: int) -> Iterator[list[Any]]:
    chunk: list[Any] = []
    for pair in pairs:
        if chunk and sum(param.numel() for _, param in chunk) + pair[1].numel() > most:
            yield chunk
            chunk = []
        chunk.append(pair)
    if chunk:
        yield chunk


def _paddings(pairs: Sequence[Any], layout: Layout) -> list[int]:
    """``param_padding`` in ``DeepSpeedZeroOptimizer.__init__`` of ``runtime/zero/stage_1_and_2.py``."""
    offset, found = 0, []
    for number, (_, param) in enumerate(pairs):
        offset += param.numel()
        found.append(0 if number == len(pairs) - 1 else -offset % layout.alignment)
        offset += found[-1]
    return found


def _part(pairs: Sequence[Any], values: Sequence[Tensor], layout: Layout, rank: int, padded: bool) -> Tensor:
    """``flatten_dense_tensors_aligned``, ``get_data_parallel_partitions``, ``_get_groups_without_padding``."""
    first = pairs[0][0]
    is_expert = INSIDE in first
    world = layout.world // _size(first, layout) if is_expert else layout.world
    part = layout.part(first.partition(INSIDE)[0], rank) if is_expert else rank
    pieces = [
        torch.cat([value.detach().reshape(-1), value.new_zeros(padding)])
        for value, padding in zip(values, _paddings(pairs, layout), strict=True)
    ]
    flat = torch.cat(pieces)
    numel = -(-flat.numel() // (2 * world)) * 2 * world
    own = torch.cat([flat, flat.new_full((numel - flat.numel(),), float("nan"))]).chunk(world)[part]
    start = part * own.numel()
    lean = max(0, min(own.numel(), flat.numel() - start))
    return own[: own.numel() if padded else lean].clone()


def _optimizer_states(model: nn.Module, optimizer: Optimizer, layout: Layout, rank: int) -> dict[str, Any]:
    """``state_dict`` of ``runtime/zero/stage_1_and_2.py``."""
    groups = _groups(model, optimizer, layout, rank)
    state = {}
    for number, group in enumerate(groups):
        pairs = group["params"]
        slots = {
            slot: _part(pairs, [optimizer.state[param][slot] for _, param in pairs], layout, rank, padded=True)
            for slot in ("exp_avg", "exp_avg_sq")
        }
        state[number] = {"step": optimizer.state[pairs[0][1]]["step"].clone(), **slots}
    base = {"state": state, "param_groups": [{**group, "params": [number]} for number, group in enumerate(groups)]}
    sizes = [_size(group["params"][0][0], layout) if group.get("moe") else 1 for group in groups]
    return {
        "loss_scaler": DynamicLossScaler(),
        "dynamic_loss_scale": True,
        "overflow": False,
        "clip_grad": 0.0,
        "base_optimizer_state": base,
        "single_partition_of_fp32_groups": [
            _part(group["params"], [param for _, param in group["params"]], layout, rank, padded=False)
            for group in groups
        ],
        "zero_stage": ZeroStageEnum(layout.stage),
        "group_paddings": [0] * len(groups),
        "param_alignment_paddings": [_paddings(group["params"], layout) for group in groups],
        "partition_count": [layout.world // size for size in sizes],  # _configure_moe_settings
        "ds_version": "0.19.8",
        "param_slice_mappings": [OrderedDict(weight=fragment_address(3, 0))],
    }


def _write_optimizer(out: Path, model: nn.Module, optimizer: Optimizer, layout: Layout, rank: int) -> None:
    """``_save_moe_checkpoint`` without ZeRO, ``_get_optimizer_ckpt_name``: by numbers, of ranks with other experts."""
    largest = max(layout.sizes, key=lambda layer: layout.sizes[layer])
    if layout.part(largest, rank):
        return
    groups = _groups(model, optimizer, layout, rank)
    params = [param for group in groups for _, param in group["params"]]
    numbers = iter(range(len(params)))
    content = {
        "state": {number: optimizer.state[param] for number, param in enumerate(params)},
        "param_groups": [{**group, "params": [next(numbers) for _ in group["params"]]} for group in groups],
    }
    path = out / f"expp_rank_{layout.expert_rank(largest, rank)}_mp_rank_00_optim_states.pt"
    torch.save(_cloned({"optimizer": content}), path)


def _model_states(model: nn.Module, optimizer: Optimizer, layout: Layout) -> dict[str, Any]:
    """``_common_checkpoint_state`` and the end of ``_save_moe_checkpoint``, on data rank 0."""
    lowered = copy.deepcopy(model)
    for param in lowered.parameters():
        param.data = param.data.to(layout.dtype)
    state = lowered.state_dict().items()
    module = OrderedDict(
        (own, value) for name, value in state if (own := _local_name(name, model, layout, 0)) is not None
    )
    for name in layers(model):  # _get_non_moe_state_dict
        for key in [key for key in module if key.startswith(f"{name}.") and "expert" in key]:
            if "moe.gate.wg.weight" not in key:
                del module[key]
    names = {id(param): name for name, param in model.named_parameters()}
    shared = {  # _get_shared_params
        _local_name(name, model, layout, 0): _local_name(names[id(param)], model, layout, 0)
        for name, param in model.named_parameters(remove_duplicate=False)
        if names[id(param)] != name and _local_name(name, model, layout, 0) is not None
    }
    every = model.named_buffers(remove_duplicate=False)  # _get_buffer_names
    buffers = [_local_name(name, model, layout, 0) for name, _ in every]
    frozen = {name: param for name, param in _local(model, layout, 0).items() if not param.requires_grad}
    keeps = layout.stage == 2  # zero_optimization_partition_gradients
    groups = _groups(model, optimizer, layout, 0)
    return {
        "module": module,
        "buffer_names": [name for name in buffers if name is not None],
        "optimizer": None if layout.stage else optimizer.state_dict(),
        "param_shapes": [OrderedDict((name, param.shape) for name, param in group["params"]) for group in groups]
        if layout.stage
        else None,
        "frozen_param_shapes": {name: param.shape for name, param in frozen.items()} if keeps else None,
        "shared_params": shared if layout.stage else None,
        "frozen_param_fragments": {name: param.to(layout.dtype) for name, param in frozen.items()} if keeps else None,
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": 3,
        "global_samples": 24,
        "dp_world_size": layout.world,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": _config(layout),
        "ds_version": "0.19.8",
        "num_experts": [len(layer.deepspeed_moe.experts.deepspeed_experts) for layer in layers(model).values()],  # type: ignore
        "ds_autoep_layers": None,
    }
