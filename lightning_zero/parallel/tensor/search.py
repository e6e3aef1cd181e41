"""Finds a plan for a block: regions that can be computed in parts, and the integers that must be divided with them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import nn

from lightning_zero.parallel.tensor.blocks import NUMBERS
from lightning_zero.parallel.tensor.check import BlockCheck, check_block, random_copy
from lightning_zero.parallel.tensor.examples import Arguments, call_block, replay
from lightning_zero.parallel.tensor.plan import TensorPlan
from lightning_zero.parallel.tensor.regions import FoundRegion, find_regions
from lightning_zero.parallel.tensor.resolution import is_linear

__all__ = ["FoundPlan", "find_plan", "integers_of", "reads_its_number"]

_MOST_NAMES = 3  # integers of different names that are divided together
_MOST_TRIES = 40

_CheckBlock = Callable[[nn.Module, Arguments, TensorPlan, int], BlockCheck]


@dataclass(frozen=True)
class FoundPlan:
    """A plan with names relative to the block, and its check."""

    plan: TensorPlan
    check: BlockCheck


def find_plan(
    block: nn.Module,
    arguments: Arguments,
    size: int,
    model_plan: TensorPlan | None = None,
    *,
    all_whole: bool = False,
    without: Collection[str] = (),
) -> FoundPlan:
    """Find a plan for a block that is verified; in the worst case it cuts nothing.

    Args:
        block: Is not changed.
        arguments: Of a call, from ``capture``.
        size: Number of ranks.
        model_plan: The plan that the model brings, relative to the block; used for the modules for which none is found.
        all_whole: All results of the block must be whole.
        without: Names of modules that stay whole, with the regions that they are in.
    """
    regions = [one for one in find_regions(block, arguments, size) if not _cuts_any(one.plan(), without)]
    check = partial(check_block, explain=False, all_whole=all_whole)
    if model_plan is not None and model_plan.on_names(without).rules:
        model_plan = None
    found = _plan_of([region.plan() for region in regions])
    candidates = [found]
    if model_plan is not None:
        rest = _rest(model_plan, found)
        candidates = [found.merged(rest), found, model_plan] if rest.rules else [found, model_plan]
    for candidate in candidates:
        result = _divide(block, arguments, plan=candidate, size=size, check_plan=check)
        if result is not None:
            return result
    return _find_in_part(block, arguments, regions=regions, size=size, check_plan=check)


def _cuts_any(plan: TensorPlan, names: Collection[str]) -> bool:
    return any(not name or rule == name or rule.startswith(f"{name}.") for rule in plan.rules for name in names)


def _find_in_part(
    block: nn.Module, arguments: Arguments, *, regions: Sequence[FoundRegion], size: int, check_plan: _CheckBlock
) -> FoundPlan:
    """Keep the regions that verify alone, as they are or with whole tensors between their layers."""
    plan = TensorPlan({})
    check = check_plan(block, arguments, plan, size)
    for region in regions:
        for candidate in (region.plan(), region.gathered_plan()):
            if not candidate.rules:
                continue
            merged = plan.merged(candidate)
            result = _divide(block, arguments, plan=merged, size=size, check_plan=check_plan)
            if result is not None:
                plan, check = result.plan, result.check
                break
    return FoundPlan(plan, check)


def _plan_of(plans: Sequence[TensorPlan]) -> TensorPlan:
    result = TensorPlan({})
    for one in plans:
        arguments = {"": {**result.arguments.get("", {}), **one.arguments.get("", {})}}
        result = result.merged(one)
        if arguments[""]:
            result = TensorPlan(result.rules, divided=result.divided, arguments=arguments)
    return result


def _rest(model_plan: TensorPlan, found: TensorPlan) -> TensorPlan:
    """Return the model's rules for modules outside of the regions that were found."""
    roots = {name.rpartition(".")[0] for name in found.rules}
    return TensorPlan(
        {
            name: rule
            for name, rule in model_plan.rules.items()
            if name not in found.rules and not any(name == root or name.startswith(f"{root}.") for root in roots)
        }
    )


def _divide(
    block: nn.Module, arguments: Arguments, *, plan: TensorPlan, size: int, check_plan: _CheckBlock
) -> FoundPlan | None:
    """Divide integers that the forward reads, subset by subset, until the block computes the same."""
    for tries, divided in enumerate(_subsets(block, arguments, size)):
        if tries == _MOST_TRIES:
            break
        merged = {**plan.divided}
        for name, attributes in divided.items():
            merged[name] = tuple(dict.fromkeys((*merged.get(name, ()), *attributes)))
        candidate = TensorPlan(plan.rules, divided=merged, arguments=plan.arguments)
        try:
            check = check_plan(block, arguments, candidate, size)
        except ValueError:
            return None
        if check.is_right:
            return FoundPlan(candidate, check)
        if isinstance(check.failure, ValueError | TypeError) and "tensor_parallel" in str(check.failure):
            return None
    return None


def _subsets(block: nn.Module, arguments: Arguments, size: int) -> Iterator[dict[str, list[str]]]:
    """Yield integers to divide, by module; those with the same name together, numbers of heads first."""
    yield {}
    places: dict[str, list[str]] = {}
    for module, name in integers_of(block, arguments, size):
        places.setdefault(name, []).append(module)
    names = sorted(places, key=_rank_of_name)
    for count in range(1, _MOST_NAMES + 1):
        for chosen in combinations(names, count):
            divided: dict[str, list[str]] = {}
            for name in chosen:
                for module in places[name]:
                    divided.setdefault(module, []).append(name)
            yield divided


def _rank_of_name(name: str) -> tuple[bool, str]:
    is_count = "head" in name and not any(word in name for word in ("dim", "size", "group"))
    return not is_count, name


def integers_of(block: nn.Module, arguments: Arguments, size: int) -> list[tuple[str, str]]:
    """Return the integers that ``size`` divides and that a forward reads: name of the module, name of the attribute."""
    watched = random_copy(block, torch.float32)
    seen: dict[tuple[str, str], int] = {}
    for name, child in list(watched.named_modules()):
        if is_linear(child) or isinstance(child, (nn.Embedding, nn.LayerNorm, nn.MultiheadAttention)):
            continue
        if "config" in vars(child):
            child.config = copy.copy(child.config)
            _watch(child.config, name, "config.", seen)
        _watch(child, name, "", seen)
    call_block(watched, replay(arguments, torch.float32))
    return [place for place, value in seen.items() if value > 1 and value % size == 0]


def reads_its_number(block: nn.Module, arguments: Arguments) -> bool:
    """Say whether a block's forward reads its number in the list of blocks, so that others may compute other things."""
    if not any(NUMBERS & vars(child).keys() for child in block.modules()):
        return False
    watched = random_copy(block, torch.float32)
    seen: dict[tuple[str, str], int] = {}
    for name, child in list(watched.named_modules()):
        if NUMBERS & vars(child).keys():
            _watch(child, name, "", seen)
    try:
        for is_training in (True, False):
            call_block(watched.train(is_training), replay(arguments, torch.float32))
    except Exception:
        return True
    return any(attribute in NUMBERS for _, attribute in seen)


def _watch(owner: Any, module: str, prefix: str, seen: dict[tuple[str, str], int]) -> None:
    """Note every integer that is read from an object from now on."""
    cls: Any = type(owner)

    def read(self: Any, name: str) -> Any:
        value = cls.__getattribute__(self, name)
        if type(value) is int and not name.startswith("_"):
            seen.setdefault((module, prefix + name), value)
        return value

    try:
        owner.__class__ = type(cls.__name__, (cls,), {"__getattribute__": read, "__module__": cls.__module__})
    except TypeError:  # an object with slots
        return
