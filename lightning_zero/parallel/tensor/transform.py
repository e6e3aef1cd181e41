"""Cuts a module in place: local parameters, forwards that stand in, integers of the local size."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from torch import nn

from lightning_zero.parallel.tensor.attention import AttentionForward
from lightning_zero.parallel.tensor.collectives import Ranks
from lightning_zero.parallel.tensor.cuts import ParamRecord
from lightning_zero.parallel.tensor.forwards import (
    ColumnForward,
    CutArgumentsForward,
    ExpertsForward,
    GatheredColumnForward,
    RowForward,
    SplitRowForward,
    VocabForward,
    is_transposed,
)
from lightning_zero.parallel.tensor.generators import Region, refuse_draws_inside
from lightning_zero.parallel.tensor.plan import CutArgument, Packed, Rule, TensorPlan
from lightning_zero.parallel.tensor.resolution import Resolution, resolve
from lightning_zero.parallel.tensor.sequence import (
    DividedSequence,
    SequenceBlockForward,
    SequenceEnds,
    SequenceRegionForward,
    SequenceRowForward,
)

__all__ = ["cut_module"]

_FORWARDS = {
    "column": ColumnForward,
    "column_gather": GatheredColumnForward,
    "row": RowForward,
    "row_split": SplitRowForward,
    "experts": ExpertsForward,
}


def cut_module(module: nn.Module, plan: TensorPlan, ranks: Ranks) -> dict[str, ParamRecord]:
    """Give a module this rank's part of the parameters that a plan cuts, with the whole ones' values.

    Every parameter is an ordinary one of the local shape afterwards. Modules keep their names, parameters and hooks. No
    collective runs.

    Returns:
        By name, where the values of each parameter lie in the whole one.

    Raises:
        ValueError: The plan does not fit the module, or the number of ranks its sizes.
        TypeError: A rule is for another kind of module or parameter.
    """
    resolution = resolve(module, plan, ranks.size)
    region = Region(module, ranks, in_sequence=bool(resolution.streams))
    records = _records(module, resolution, ranks)
    _replace_params(module, records)
    modules = dict(module.named_modules(remove_duplicate=False))
    replaced: set[nn.Module] = set()
    for name, rule in resolution.forwards.items():
        child = modules[name]
        if child not in replaced:
            replaced.add(child)
            _fit_attributes(child, rule)
            if resolution.is_in_stream(name):
                _stand_in_for_sequence(child, rule, ranks, region)
            else:
                _stand_in(child, rule, ranks, region)
    _divide(modules, resolution.divided, ranks.size)
    _cut_arguments(modules, resolution.arguments, ranks, region)
    _cut_sequences(modules, resolution, ranks, region)
    if not resolution.streams:
        refuse_draws_inside(module, region)
    return records


def _records(module: nn.Module, resolution: Resolution, ranks: Ranks) -> dict[str, ParamRecord]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    records = {}
    for param, tied in names.items():
        sections = resolution.sections.get(tied[0])
        is_partial = any(name in resolution.partial for name in tied)
        records[tied[0]] = ParamRecord(
            names=tuple(tied),
            shape=tuple(param.shape),
            kind="cut" if sections is not None else "partial" if is_partial else "whole",
            sections=sections,
            rank=ranks.rank,
            size=ranks.size,
        )
    return records


def _replace_params(module: nn.Module, records: Mapping[str, ParamRecord]) -> None:
    for record in records.values():
        if record.part is not None:
            param = module.get_parameter(record.name)
            param.data = record.local(param)


def _fit_attributes(module: nn.Module, rule: Rule) -> None:
    """Give a layer's own sizes their local values."""
    weight = module._parameters.get("weight")
    if weight is None:
        return
    if is_transposed(module):
        module.nx, module.nf = weight.shape  # type: ignore[assignment]
    elif isinstance(module, nn.Linear):
        module.out_features, module.in_features = weight.shape
    elif isinstance(module, nn.Embedding):
        module.num_embeddings = weight.shape[0]


def _stand_in(module: nn.Module, rule: Rule, ranks: Ranks, region: Region) -> None:
    if rule == "attention":
        assert isinstance(module, nn.MultiheadAttention)
        AttentionForward(module, ranks, region)
    elif rule == "vocab":
        assert isinstance(module, nn.Embedding)
        rows = module.num_embeddings
        if module.padding_idx is not None:
            local = module.padding_idx - ranks.rank * rows
            module.padding_idx = local if 0 <= local < rows else None
        VocabForward(module, ranks, region, ranks.rank * rows)
    else:
        assert not isinstance(rule, tuple)
        _FORWARDS["column" if isinstance(rule, Packed) else str(rule)](module, ranks, region)


def _stand_in_for_sequence(module: nn.Module, rule: Rule, ranks: Ranks, region: Region) -> None:
    if rule == "row":
        SequenceRowForward(module, ranks, region)
    elif rule != "column" and not isinstance(rule, Packed):
        _stand_in(module, rule, ranks, region)


def _cut_sequences(modules: Mapping[str, nn.Module], resolution: Resolution, ranks: Ranks, region: Region) -> None:
    for name, words in resolution.sequence.items():
        if "gather" in words.values():
            SequenceRegionForward(modules[name], ranks, region, words)
    lists: dict[str, list[str]] = {}
    for name in modules:  # in the order of the model
        if name in resolution.streams:
            lists.setdefault(name.rpartition(".")[0], []).append(name)
    for blocks in lists.values():
        sequence = DividedSequence([modules[name] for name in blocks])
        for name in blocks:
            ends = SequenceEnds(is_first=name == blocks[0], is_last=name == blocks[-1], sequence=sequence)
            SequenceBlockForward(modules[name], ranks, region=region, words=resolution.sequence[name], ends=ends)


def _divide(modules: Mapping[str, nn.Module], divided: Mapping[str, tuple[str, ...]], size: int) -> None:
    """Divide integers of modules, and of configurations, of which a module gets a copy of its own."""
    for name, attributes in divided.items():
        module = modules[name]
        configs: set[str] = set()
        for attribute in attributes:
            path, _, leaf = attribute.rpartition(".")
            if path and path not in configs:
                configs.add(path)
                if hasattr(module, path):
                    setattr(module, path, copy.copy(getattr(module, path)))
            owner = getattr(module, path, None) if path else module
            value = getattr(owner, leaf, None)
            if type(value) is not int or value % size:
                raise ValueError(
                    f"`TensorPlan(divided={{{name!r}: [{attribute!r}]}})`: `{type(module).__name__}.{attribute}` is"
                    f" {value!r}, and must be a number that {size} ranks divide. Use another size of tensor"
                    " parallelism, or correct the plan."
                )
            setattr(owner, leaf, value // size)


def _cut_arguments(
    modules: Mapping[str, nn.Module],
    arguments: Mapping[str, Mapping[str | int, CutArgument]],
    ranks: Ranks,
    region: Region,
) -> None:
    for name, rules in arguments.items():
        for rule in rules.values():
            if rule.heads % ranks.size:
                raise ValueError(
                    f"`TensorPlan(arguments={{{name!r}: ...}})` names {rule.heads} heads, which {ranks.size} ranks do"
                    " not divide. Use another size of tensor parallelism."
                )
        CutArgumentsForward(modules[name], ranks, region, rules)
