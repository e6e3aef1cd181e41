"""Finds the regions of a block that ranks can compute in parts, by following gradients.

Note [Following gradients]
    For every linear layer as a row layer, one backward per rank starts from the rank's slice of the layer's input.
    Output features of an earlier linear layer that reach this slice alone are that rank's: the earlier layer is a
    column layer, whatever its layout (packed, interleaved, grouped queries). A second forward, with the results of
    column layers detached, tells the rest of the region: parameters and arguments that only one slice depends on
    are cut, parameters that several depend on have partial gradients. A feature that a ReLU has switched off reaches
    nobody, so several draws of the parameters are followed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.parallel.tensor.check import random_copy
from lightning_zero.parallel.tensor.cuts import sections_of
from lightning_zero.parallel.tensor.examples import Arguments, call_block, replay
from lightning_zero.parallel.tensor.plan import Cut, CutArgument, Packed, Rule, TensorPlan
from lightning_zero.parallel.tensor.resolution import is_linear

__all__ = ["FoundRegion", "find_regions"]

_DRAWS = 4


@dataclass
class FoundRegion:
    """A row layer with the column layers in front of it, and the parameters and arguments between.

    Attributes:
        row: Name of the row layer.
        columns: By name of a column layer, the sections of its output features.
        params: By name of a parameter in the region, its rule.
        arguments: By name or position, the arguments of the block that are cut.
        attention: Name of an ``nn.MultiheadAttention`` that is a region of its own; there is no row layer then.
    """

    row: str = ""
    columns: dict[str, tuple[int, ...]] = field(default_factory=dict)
    params: dict[str, Rule] = field(default_factory=dict)
    arguments: dict[str | int, CutArgument] = field(default_factory=dict)
    attention: str = ""

    def plan(self) -> TensorPlan:
        """Return the plan that cuts the region."""
        if self.attention:
            return TensorPlan({self.attention: "attention"})
        columns: dict[str, Rule] = {
            name: "column" if len(sections) == 1 else Packed(_as_count(sections))
            for name, sections in self.columns.items()
        }
        arguments = {"": self.arguments} if self.arguments else {}
        return TensorPlan({**columns, **self.params, self.row: "row"}, arguments=arguments)

    def gathered_plan(self) -> TensorPlan:
        """Return the plan that cuts the matrices, and computes between them with whole tensors."""
        if self.attention:
            return TensorPlan({})
        columns: dict[str, Rule] = dict.fromkeys(self.columns, "column_gather")
        return TensorPlan({**columns, self.row: "row_split"})


def find_regions(block: nn.Module, arguments: Arguments, size: int) -> list[FoundRegion]:
    """Return the regions of a block for ``size`` ranks, in the order of the forward."""
    dtype = torch.float64
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            regions = _follow(block, arguments, size, dtype)
    except (RuntimeError, NotImplementedError):  # an operator without fp64
        dtype = torch.float32
        regions = _follow(block, arguments, size, dtype)
    _add_insides(block, arguments, size=size, dtype=dtype, regions=regions)
    attentions = [
        FoundRegion(attention=name)
        for name, child in block.named_modules()
        if isinstance(child, nn.MultiheadAttention) and child.num_heads % size == 0
    ]
    return attentions + regions


def _as_count(sections: tuple[int, ...]) -> int | tuple[int, ...]:
    return len(sections) if len(set(sections)) == 1 else sections


def _linears(block: nn.Module) -> dict[str, nn.Module]:
    attentions = tuple(f"{name}." for name, child in block.named_modules() if isinstance(child, nn.MultiheadAttention))
    return {
        name: child
        for name, child in block.named_modules()
        if is_linear(child) and not f"{name}.".startswith(attentions or ("\0",))
    }


def _inputs(arguments: Arguments, dtype: torch.dtype, seed: int) -> Arguments:
    """Return arguments of which all floating-point tensors have gradients."""
    args, kwargs = replay(arguments, dtype, seed)
    for value in [*args, *kwargs.values()]:
        if isinstance(value, Tensor) and value.is_floating_point():
            value.requires_grad_()
    return args, kwargs


# -- Columns and rows --------------------------------------------------------------------------------------------------


class _Forward:
    """One forward: inputs and results of the linear layers, in order. Layers that run twice are not among them."""

    def __init__(self, block: nn.Module, arguments: Arguments) -> None:
        self.order: list[str] = []
        self.inputs: dict[str, Tensor] = {}
        self.results: dict[str, Tensor] = {}
        handles = [
            child.register_forward_hook(lambda _, args, result, name=name: self._note(name, args, result))
            for name, child in _linears(block).items()
        ]
        call_block(block, arguments)
        for handle in handles:
            handle.remove()
        self.order = [name for name in self.order if self.order.count(name) == 1]

    def _note(self, name: str, args: tuple[Any, ...], result: Tensor) -> None:
        if args:
            self.order.append(name)
            self.inputs[name], self.results[name] = args[0], result


def _follow(block: nn.Module, arguments: Arguments, size: int, dtype: torch.dtype) -> list[FoundRegion]:
    found: dict[str, FoundRegion] = {}
    masks: dict[tuple[str, str, int], Tensor] = {}  # row, column, rank: the features that reach the rank's slice
    taken: set[str] = set()
    for draw in range(_DRAWS):
        forward = _Forward(random_copy(block, dtype, draw), _inputs(arguments, dtype, draw + 1))
        has_dead_features = False
        for position, row in enumerate(forward.order):
            earlier = [name for name in forward.order[:position] if name not in found and _differ(forward, name, row)]
            if row in taken or row in found or not earlier or forward.inputs[row].shape[-1] % size:
                continue
            _reach(forward, row, earlier=earlier, size=size, masks=masks)
            columns = {}
            for name in earlier:
                shares = [masks.get((row, name, rank)) for rank in range(size)]
                present = [share for share in shares if share is not None]
                if len(present) < size:
                    continue
                sections = _sections(present)
                if sections is not None:
                    columns[name] = sections
                has_dead_features |= _has_dead(present)
            if columns:
                found[row] = FoundRegion(row=row, columns=columns)
                taken.update(columns)
        if not has_dead_features:
            break
    return list(found.values())


def _differ(forward: _Forward, column: str, row: str) -> bool:
    return forward.results[column] is not forward.inputs[row]


def _reach(
    forward: _Forward, row: str, *, earlier: Sequence[str], size: int, masks: dict[tuple[str, str, int], Tensor]
) -> None:
    """Note the output features of earlier layers on which each rank's slice of a layer's input depends."""
    features = forward.inputs[row]
    if not features.requires_grad:
        return
    weighted = features * torch.randn_like(features)
    for rank, part in enumerate(weighted.chunk(size, -1)):
        results = [forward.results[name] for name in earlier]
        grads = torch.autograd.grad(part.sum(), results, retain_graph=True, allow_unused=True)
        for name, grad in zip(earlier, grads, strict=True):
            if grad is not None:
                mask = _support(grad, grad.dim() - 1)
                key = row, name, rank
                masks[key] = masks[key] | mask if key in masks else mask


def _support(grad: Tensor, dim: int) -> Tensor:
    """Return which positions along a dimension have a gradient."""
    others = [axis for axis in range(grad.dim()) if axis != dim]
    return grad.abs().sum(others) > 0 if others else grad != 0


def _sections(masks: Sequence[Tensor]) -> tuple[int, ...] | None:
    """Return the sections of a dimension whose positions each belong to one rank, or None."""
    stacked = torch.stack([*masks])
    if not bool((stacked.sum(0) == 1).all()):
        return None
    return sections_of(stacked.int().argmax(0).tolist(), len(masks))


def _has_dead(masks: Sequence[Tensor]) -> bool:
    count = torch.stack([*masks]).sum(0)
    return bool((count <= 1).all() and (count == 0).any() and (count > 0).any())


# -- The inside of regions ---------------------------------------------------------------------------------------------


def _add_insides(
    block: nn.Module, arguments: Arguments, *, size: int, dtype: torch.dtype, regions: Sequence[FoundRegion]
) -> None:
    """Add the parameters and arguments that the inputs of row layers depend on, past the column layers."""
    if not regions:
        return
    copy = random_copy(block, dtype)
    inputs: dict[str, Tensor] = {}
    for region in regions:
        for column in region.columns:
            copy.get_submodule(column).register_forward_hook(_cut_off)
        row = copy.get_submodule(region.row)
        row.register_forward_pre_hook(_noting(inputs, region.row))
        row.register_forward_hook(_cut_off)
    args, kwargs = _inputs(arguments, dtype, 1)
    call_block(copy, (args, kwargs))
    params = list(copy.named_parameters())
    keyed: list[tuple[str | int, Any]] = [*enumerate(args), *kwargs.items()]
    named = [(key, value) for key, value in keyed if isinstance(value, Tensor) and value.requires_grad]
    targets = [tensor for _, tensor in [*params, *named]]
    for region in regions:
        features = inputs[region.row]
        if not features.requires_grad:
            continue
        weighted = features * torch.randn_like(features)
        grads = [
            torch.autograd.grad(part.sum(), targets, retain_graph=True, allow_unused=True)
            for part in weighted.chunk(size, -1)
        ]
        for number, (name, _) in enumerate(params):
            shares = [one[number] for one in grads]
            if any(share is not None for share in shares):
                region.params[name] = _rule_of(shares)
        for number, (key, _) in enumerate(named, start=len(params)):
            rule = _argument_rule([one[number] for one in grads])
            if rule is not None:
                region.arguments[key] = rule


def _cut_off(module: nn.Module, args: Any, result: Tensor) -> Tensor:
    return result.detach().requires_grad_().clone()  # not a leaf, so that it may be changed in place


def _noting(inputs: dict[str, Tensor], name: str) -> Callable[[nn.Module, Any], None]:
    def note(module: nn.Module, args: Any) -> None:
        inputs[name] = args[0]

    return note


def _rule_of(shares: Sequence[Tensor | None]) -> Rule:
    present = [share for share in shares if share is not None]
    if len(present) == len(shares):
        for dim in reversed(range(present[0].dim())):
            sections = _sections([_support(share, dim) for share in present])
            if sections is not None:
                return Cut(dim, _as_count(sections))
    return "partial"


def _argument_rule(shares: Sequence[Tensor | None]) -> CutArgument | None:
    present = [share for share in shares if share is not None]
    if len(present) < len(shares):
        return None
    for dim in range(present[0].dim()):
        sections = _sections([_support(share, dim) for share in present])
        if sections is not None and len(set(sections)) == 1:
            return CutArgument(dim, sections[0])
    return None
