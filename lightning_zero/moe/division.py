"""Experts of a module divided over ranks: which parameters this rank keeps, and the grid of their engine."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import OptimizedModule
from torch.nn.utils.parametrize import is_parametrized

from lightning_zero.boxes import Part
from lightning_zero.grid import Grid, ParamAxes
from lightning_zero.moe.exchange import ExpertRanks
from lightning_zero.moe.experts import Experts
from lightning_zero.moe.routed import RoutedExperts

__all__ = ["ExpertLayer", "divide_experts", "divisible_layers", "expert_layers", "grid_of_experts"]

_ALL_RANKS = "all ranks"
_EXPERT_SHARDS = "ranks with the same experts"


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of one layer.

    Attributes:
        module: Has their parameters, with one row for each expert.
        experts: Can be divided.
    """

    module: nn.Module
    experts: Experts | RoutedExperts


def expert_layers(module: nn.Module) -> dict[str, ExpertLayer]:
    """Return the experts of all layers below a module, ``MoE`` and those of unmodified models, by name."""
    found = {}
    for name, child in module.named_modules():
        experts = child if isinstance(child, Experts) else RoutedExperts.of(child)
        if experts is not None:
            found[name] = ExpertLayer(child, experts)
    return found


def divide_experts(module: nn.Module, ranks: ExpertRanks, device: torch.device | None = None) -> dict[str, Part]:
    """Leave this rank its experts of every layer, with the values of the first rank of the group.

    A parameter ``[E, ...]`` is one of shape ``[E / ranks, ...]`` afterwards. Tokens travel in every forward and
    backward from then on, so all ranks run them. Collective: all ranks of the group.

    Args:
        module: With whole parameters, the same on all ranks but for their values.
        ranks: Divide the experts.
        device: On which the ranks communicate; by default that of each parameter.

    Returns:
        The part of each divided parameter that this rank has, by its first name.

    Raises:
        ValueError: There are no such layers, or one cannot be divided.
    """
    layers = divisible_layers(module, ranks.size)
    _verify(layers)
    names = {id(param): name for name, param in module.named_parameters()}
    parts: dict[str, Part] = {}
    for number, layer in enumerate(layers.values()):
        for param in layer.module.parameters():
            parts[names[id(param)]] = _divide(param, ranks, device)
        layer.experts.divide(ranks, number)
    return parts


def divisible_layers(module: nn.Module, size: int) -> dict[str, ExpertLayer]:
    """Return the experts of all layers, by name, for a number of ranks. Nothing is changed.

    Raises:
        ValueError: There are no such layers, or one cannot be divided.
    """
    layers = expert_layers(module)
    if not layers:
        raise ValueError(
            f"`expert_parallel={size}` finds no experts in `{type(module).__name__}` that can be divided: those"
            " of `lightning_zero.moe.MoE`, and modules that are called with `(hidden_states, top_k_index,"
            " top_k_weights)`, as in models of Hugging Face. Use such layers, or leave the option out."
        )
    for name, layer in layers.items():
        _refuse_computed(module, name, layer, size)
        _check(name, layer, size)
    _refuse_ties(module, layers)
    _refuse_compiled(module)
    return layers


def grid_of_experts(
    parts: Mapping[str, Part],
    shard_group: dist.ProcessGroup | None,
    data_ranks: int,
    around: Grid | None = None,
) -> Grid:
    """Return the grid for ``engine.shard(module, grid=...)``: see Note [One divisor] in ``lightning_zero.grid``.

    Args:
        parts: Of ``divide_experts``, by the names that the parameters have in the engine's module.
        shard_group: The ranks with the same experts.
        data_ranks: Number of ranks with different data: all of the engine, or its tensor groups.
        around: The grid of a module that is cut over tensor ranks too, which leaves experts whole. An expert is cut
            over the tensor ranks that have it as well, and its gradients have the factor that they had before.
    """
    before = Grid({_ALL_RANKS: None}, data_ranks) if around is None else around
    factors = {name: before.params[name].factor if name in before.params else 1.0 for name in parts}
    params = {name: ParamAxes(_EXPERT_SHARDS, factors[name], part, is_of_others=True) for name, part in parts.items()}
    groups = {**before.groups, _EXPERT_SHARDS: shard_group}
    return Grid(groups, data_ranks, {**before.params, **params}, communicates=True)


def _divide(param: nn.Parameter, ranks: ExpertRanks, device: torch.device | None) -> Part:
    number = len(param) // ranks.size
    part = Part.along(param.shape, 0, (ranks.rank * number, number))
    values = param.detach()
    if not param.is_meta:  # those wait for pretrained values; the engine refuses others
        values = values.to(param.device if device is None else device).contiguous()
        ranks.broadcast(values)
    param.data = part.read(values).to(param.device).clone(memory_format=torch.contiguous_format)
    return part


# -- Checks ------------------------------------------------------------------------------------------------------------


def _check(name: str, layer: ExpertLayer, size: int) -> None:
    """Refuse a layer that cannot be divided.

    Raises:
        ValueError: Its number of experts, or a tensor of it.
    """
    start = f"`expert_parallel={size}` cannot divide `{name}`"
    experts = layer.experts
    if experts.ranks is not None:
        raise ValueError(f"{start}, whose experts are divided over {experts.ranks.size} ranks already. Make it anew.")
    if experts.num_experts % size:
        raise ValueError(
            f"{start}, which has {experts.num_experts} experts: every rank has as many. Use a number of ranks that"
            f" divides {experts.num_experts}, or a multiple of {size} as `num_experts`."
        )
    buffer = next((key for key, _ in layer.module.named_buffers()), None)
    if buffer is not None:
        raise ValueError(
            f"{start}, whose experts have the module buffer `{buffer}`: a rank would change that of its own experts"
            " alone. Use experts without module buffers, such as layer norms in the place of batch norms, or leave the"
            " option out."
        )
    for key, param in layer.module.named_parameters():
        if param.dim() == 0 or len(param) != experts.num_experts:
            raise ValueError(
                f"{start}, whose parameter `{key}` has the shape {tuple(param.shape)} and not one row for each of"
                f" {experts.num_experts} experts. Register no parameters of your own below `experts`."
            )


def _refuse_computed(module: nn.Module, name: str, layer: ExpertLayer, size: int) -> None:
    """Refuse experts with parameters that are computed from others, which have no row for each expert of this rank.

    Raises:
        ValueError: There are some: adapters, or another parametrization.
    """
    around = [module.get_submodule(outer) for outer in _outer_names(name)]
    is_adapted = any(cls.__name__ == "ParamWrapper" for one in around for cls in type(one).__mro__)
    if is_adapted or any(is_parametrized(child) for child in layer.module.modules()):
        raise ValueError(
            f"`expert_parallel={size}` cannot divide `{name}`, whose parameters are computed from others"
            f" ({'an adapter of peft for `target_parameters`' if is_adapted else 'a parametrization'}). Adapt other"
            " modules (`target_modules`), merge the adapter or remove the parametrization before the training, or leave"
            " the option out."
        )


def _outer_names(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name


def _verify(layers: Mapping[str, ExpertLayer]) -> None:
    """Try experts of unmodified models, once for each class and shapes.

    Raises:
        ValueError: They compute something else than a weighted sum of single experts.
    """
    verified: dict[Hashable, RoutedExperts] = {}
    for name, layer in layers.items():
        if not isinstance(layer.experts, RoutedExperts):
            continue
        key = type(layer.module), tuple(tuple(param.shape) for param in layer.module.parameters())
        if key not in verified:
            layer.experts.verify(name)
            verified[key] = layer.experts
        layer.experts.left_out = verified[key].left_out


def _refuse_ties(module: nn.Module, layers: Mapping[str, ExpertLayer]) -> None:
    """Refuse parameters of experts that other modules have too.

    Raises:
        ValueError: There is one: the other module would compute with a part of it.
    """
    owner = {id(child): name for name, layer in layers.items() for child in layer.module.modules()}
    seen: dict[int, str | None] = {}
    for name, param, holder in _held(module):
        layer = owner.get(id(holder))
        if seen.setdefault(id(param), layer) != layer:
            raise ValueError(
                f"`expert_parallel` cannot divide `{name}`, which belongs to experts and to another module. Give each"
                " a parameter of its own."
            )


def _held(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, nn.Module]]:
    for path, holder in module.named_modules():
        for key, param in holder._parameters.items():
            if param is not None:
                yield f"{path}.{key}" if path else key, param, holder


def _refuse_compiled(module: nn.Module) -> None:
    """Refuse modules with experts that ``torch.compile`` compiles.

    Raises:
        ValueError: There is one.
    """
    for name, child in module.named_modules():
        is_compiled = isinstance(child, OptimizedModule) or child._compiled_call_impl is not None
        if is_compiled and expert_layers(child):
            raise ValueError(
                f"`expert_parallel` does not work with `torch.compile` of `{name or type(child).__name__}`, whose"
                " experts exchange tokens in the forward. Compile modules without experts."
            )
