"""A plan resolved for a module: the sections of every parameter, the forwards that are replaced. Nothing is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from lightning_zero.parallel.tensor.cuts import Sections
from lightning_zero.parallel.tensor.forwards import is_transposed
from lightning_zero.parallel.tensor.plan import Cut, CutArgument, Packed, Rule, SequenceWord, TensorPlan, matches

__all__ = ["Resolution", "is_linear", "names_of", "params_cut_apart", "resolve"]

_COLUMNS = ("column", "column_gather")
_ROWS = ("row", "row_split")


@dataclass
class Resolution:
    """A plan, pattern by pattern, on the names of one module.

    Attributes:
        sections: By parameter name, its cut.
        partial: Names of parameters whose gradients are sums over the ranks.
        forwards: By module name, the rule that replaces its forward.
        divided: By module name, its integers that are divided.
        arguments: By module name, its arguments that are cut.
        sequence: By module name, its arguments of sequence parallelism.
    """

    sections: dict[str, Sections] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)
    forwards: dict[str, Rule] = field(default_factory=dict)
    divided: dict[str, tuple[str, ...]] = field(default_factory=dict)
    arguments: dict[str, Mapping[str | int, CutArgument]] = field(default_factory=dict)
    sequence: dict[str, Mapping[str | int, SequenceWord]] = field(default_factory=dict)

    def is_gathered(self, name: str) -> bool:
        """Say whether a module lies in a region that gathers its sequence."""
        return any(
            "gather" in given.values() and (not outer or name == outer or name.startswith(f"{outer}."))
            for outer, given in self.sequence.items()
        )

    @property
    def streams(self) -> list[str]:
        """Names of the blocks between which every rank has a part of the sequence."""
        return [name for name, given in self.sequence.items() if "scatter" in given.values()]

    def is_in_stream(self, name: str) -> bool:
        """Say whether a module lies in such a block."""
        return any(not block or name == block or name.startswith(f"{block}.") for block in self.streams)


def resolve(module: nn.Module, plan: TensorPlan, size: int) -> Resolution:
    """Find the modules and parameters that a plan names. The last matching pattern counts.

    Raises:
        ValueError: A pattern names nothing, a size cannot be divided, or tied parameters are cut in one place only.
        TypeError: A rule is for another kind of module.
    """
    found = _resolve(module, plan)
    params = dict(module.named_parameters(remove_duplicate=False))
    _require_sequence_rules(found)
    _require_divisible(found, params, size)
    _require_tied_alike(found, params)
    return found


def params_cut_apart(module: nn.Module, plan: TensorPlan) -> list[str]:
    """Return the names under which tied parameters are cut, of those that are not cut alike under all their names."""
    sections = _resolve(module, plan).sections
    params = dict(module.named_parameters(remove_duplicate=False))
    apart = [names for names in names_of(params) if len({sections.get(name) for name in names}) > 1]
    return [name for names in apart for name in names if name in sections]


def _resolve(module: nn.Module, plan: TensorPlan) -> Resolution:
    modules = dict(module.named_modules(remove_duplicate=False))
    params = dict(module.named_parameters(remove_duplicate=False))
    plan.require_names([*modules, *params])
    found = Resolution()
    for pattern, rule in plan.rules.items():
        for name, child in modules.items():
            if matches(pattern, name):
                _add_module(found, name, child, rule)
        for name, param in params.items():
            if matches(pattern, name):
                _add_param(found, name, param, rule)
    for pattern, names in plan.divided.items():
        found.divided.update({name: tuple(names) for name in modules if matches(pattern, name)})
    for pattern, arguments in plan.arguments.items():
        found.arguments.update({name: arguments for name in modules if matches(pattern, name)})
    for pattern, given in plan.sequence.items():
        found.sequence.update({name: given for name in modules if matches(pattern, name)})
    found.partial.update(name for name in params if name not in found.sections and found.is_in_stream(name))
    return found


def is_linear(module: nn.Module) -> bool:
    """Say whether a module is a linear layer that can be cut by features."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def _add_module(found: Resolution, name: str, module: nn.Module, rule: Rule) -> None:
    prefix = f"{name}." if name else ""
    for param_name in [one for one in found.sections if one.startswith(prefix)]:
        if name in found.forwards:  # an earlier pattern's
            del found.sections[param_name]
    found.forwards.pop(name, None)
    if rule == "partial":
        found.partial.update(prefix + one for one, _ in module.named_parameters())
        return
    found.forwards[name] = rule
    for param_name, sections in _cuts(name, module, rule).items():
        found.sections[prefix + param_name] = sections


def _cuts(name: str, module: nn.Module, rule: Rule) -> dict[str, Sections]:
    """Return the cuts of a module's own parameters."""
    if rule == "experts":
        return {}
    if rule == "attention":
        return _attention_cuts(name, module)
    if rule == "vocab":
        if not isinstance(module, nn.Embedding):
            raise _wrong_kind(name, module, rule, "an `nn.Embedding`")
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            raise ValueError(
                f"`{name}` is cut as 'vocab' by the plan of tensor parallelism, and has `max_norm`,"
                " `scale_grad_by_freq` or `sparse`. Leave it out of the plan (`vocabulary=False`)."
            )
        return {"weight": _sections(_own_weight(name, module), 0, 1)}
    if not is_linear(module) or isinstance(rule, Cut):
        raise _wrong_kind(name, module, rule, "a linear layer; name a parameter to cut one of another module")
    weight = _own_weight(name, module)
    out_dim = 1 if is_transposed(module) else 0
    if rule in _ROWS:
        return {"weight": _sections(weight, 1 - out_dim, 1)}
    assert isinstance(rule, Packed) or rule in _COLUMNS, rule
    sections = rule.sections if isinstance(rule, Packed) else 1
    cuts = {"weight": _sections(weight, out_dim, sections, name)}
    bias = module._parameters.get("bias")
    if bias is not None:
        cuts["bias"] = _sections(bias, 0, sections, name)
    return cuts


def _own_weight(name: str, module: nn.Module) -> Tensor:
    """Return the weight of a layer.

    Raises:
        ValueError: It is no parameter.
    """
    weight = module._parameters.get("weight")
    if weight is None:
        raise ValueError(
            f"`TensorPlan` names `{name}`, whose `weight` is computed from other parameters (`weight_norm` or another"
            " parametrization) and cannot be cut. Leave it out of the plan, or remove the parametrization."
        )
    return weight


def _attention_cuts(name: str, module: nn.Module) -> dict[str, Sections]:
    if not isinstance(module, nn.MultiheadAttention):
        raise _wrong_kind(name, module, "attention", "an `nn.MultiheadAttention`")
    packed = {"in_proj_weight": (0, 3), "in_proj_bias": (0, 3), "out_proj.weight": (1, 1)}
    separate = {f"{letter}_proj_weight": (0, 1) for letter in "qkv"}
    params = dict(module.named_parameters())
    return {name: _sections(params[name], *where) for name, where in {**packed, **separate}.items() if name in params}


def _wrong_kind(name: str, module: nn.Module, rule: Rule, expected: str) -> TypeError:
    return TypeError(
        f"`TensorPlan` has `{name}: {rule!r}`, and `{name}` is a `{type(module).__name__}`. This rule is for"
        f" {expected}."
    )


def _add_param(found: Resolution, name: str, param: Tensor, rule: Rule) -> None:
    if rule == "partial":
        found.partial.add(name)
    elif isinstance(rule, Cut) and -param.dim() <= rule.dim < param.dim():
        found.sections[name] = _sections(param, rule.dim, rule.sections, name)
    else:
        raise TypeError(
            f"`TensorPlan` has `{name}: {rule!r}`, and `{name}` is a parameter of shape {tuple(param.shape)}. Use"
            " 'partial', or `Cut(dim)` with one of its dimensions."
        )


def _sections(param: Tensor, dim: int, sections: int | Sequence[int], name: str = "") -> Sections:
    length = param.shape[dim]
    if isinstance(sections, int):
        if length % sections:
            raise ValueError(
                f"`TensorPlan` cuts `{name}` into {sections} equal sections, and it has {length} features."
            )
        sections = (length // sections,) * sections
    if sum(sections) != length:
        raise ValueError(
            f"`TensorPlan` cuts `{name}` into sections of {list(sections)}, {sum(sections)} together, and it has"
            f" {length} features."
        )
    return Sections(dim % param.dim(), tuple(sections))


def _require_sequence_rules(found: Resolution) -> None:
    for name, rule in found.forwards.items():
        if found.is_in_stream(name) and rule in ("column_gather", "row_split", "attention", "experts"):
            raise ValueError(
                f"`TensorParallel(sequence=True)` does not exist for `{name}: {rule!r}`. Use sequence=False, or leave"
                " the module out of the plan."
            )


def _require_divisible(found: Resolution, params: Mapping[str, Tensor], size: int) -> None:
    for name, sections in found.sections.items():
        if not sections.divides(size):
            raise ValueError(
                f"`tensor_parallel` of size {size} cannot divide `{name}` of shape {tuple(params[name].shape)}: its"
                f" dimension {sections.dim} has sections of {list(sections.sizes)}. Use a size that divides them, or"
                " leave the module out of the plan."
            )


def names_of(params: Mapping[str, Tensor]) -> list[list[str]]:
    """Return the names of every parameter."""
    names: dict[int, list[str]] = {}
    for name, param in params.items():
        names.setdefault(id(param), []).append(name)
    return list(names.values())


def _require_tied_alike(found: Resolution, params: Mapping[str, Tensor]) -> None:
    for tied in names_of(params):
        if len({found.sections.get(name) for name in tied}) > 1:
            shown = ", ".join(f"`{name}` ({'cut' if name in found.sections else 'whole'})" for name in tied)
            raise ValueError(
                f"The plan of tensor parallelism cuts a tied parameter differently under its names: {shown}. Cut it"
                " in the same way under all of them, or under none."
            )
