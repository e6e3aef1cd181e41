"""Parameters that are DTensors: refused by name, with the plan of tensor parallelism that cuts them in the same way.

DTensors are recognised by the name of their class, so that nothing is imported for modules that have none.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

__all__ = ["equal_options", "refuse_dtensors"]

_TENSOR_AXES = ("tensor_parallel", "tp", "tensor")  # names of a mesh's axis: Lightning's, torchtitan's
_LAYERS = {nn.Linear: {0: "column", 1: "row"}, nn.Embedding: {0: "vocab"}}  # by the dimension that a weight is cut in
_WITH_WHOLE_TENSORS = {"column": "column_gather", "row": "row_split"}  # outside of the layer


def refuse_dtensors(module: nn.Module) -> None:
    """Refuse a module with DTensors among its parameters, and say which options do the same. No collective.

    Raises:
        ValueError: It has some.
    """
    names = [name for name, param in module.named_parameters() if _is_dtensor(param)]
    if not names:
        return
    options = equal_options(module)
    sentences = [
        f"Parameter `{names[0]}` is a DTensor, which another form of parallelism has placed"
        f"{f', and so are {len(names) - 1} more' if len(names) > 1 else ''}. The engine shards plain tensors only: give"
        " it the module before `parallelize_module`, `distribute_tensor` or `fully_shard`."
    ]
    if _fully_sharded(module):
        sentences.append("What `fully_shard` does is `ZeroStrategy(stage=3)`.")
    if options is not None:
        sentences.append(
            f"The same cuts are, as an option of `ZeroStrategy`:\n\n    tensor_parallel={options!r}\n\nThe plan is"
            " verified before training. If the module divides attributes such as `num_heads` itself, leave them as they"
            " are, and name them in `divided`."
        )
    raise ValueError(" ".join(sentences))


def equal_options(module: nn.Module) -> dict[str, Any] | None:
    """Return the option ``tensor_parallel`` that cuts a module as its DTensors are; None if they are not cut.

    A parameter that ``fully_shard`` has cut over data ranks is not cut over tensor ranks.
    """
    params = dict(module.named_parameters(remove_duplicate=False))
    sharded = _fully_sharded(module)
    placed = {}
    for name, param in params.items():
        axis = _tensor_axis(param, is_fully_sharded=any(_is_in(name, one) for one in sharded))
        if axis is not None:
            placed[name] = (param.device_mesh.size(axis), param.placements[axis])  # type: ignore[attr-defined]
    cuts = {name: placement.dim for name, (_, placement) in placed.items() if hasattr(placement, "dim")}
    if not cuts:
        return None
    modules = dict(module.named_modules(remove_duplicate=False))
    options = {
        "size": max(placed[name][0] for name in cuts),
        "plan": _with_stars(_rules(modules, cuts), modules, params),
    }
    norms = [name for name in placed.keys() - cuts.keys() if _is_norm(modules[name.rpartition(".")[0]])]
    return {**options, "sequence": True} if norms else options  # `SequenceParallel` makes those of norms DTensors


def _is_dtensor(param: Tensor) -> bool:
    return any(cls.__name__ == "DTensor" and "distributed" in cls.__module__ for cls in type(param).__mro__)


def _fully_sharded(module: nn.Module) -> list[str]:
    """Return the names of modules that ``fully_shard`` has changed."""
    return [
        name
        for name, child in module.named_modules()
        if any(cls.__name__ == "FSDPModule" and "distributed" in cls.__module__ for cls in type(child).__mro__)
    ]


def _is_in(name: str, module: str) -> bool:
    return not module or name.startswith(f"{module}.")


def _tensor_axis(param: Any, *, is_fully_sharded: bool) -> int | None:
    """Return the axis of a parameter's mesh over whose ranks layers are cut; None if there is none."""
    if not _is_dtensor(param):
        return None
    mesh = param.device_mesh
    names = mesh.mesh_dim_names or ()
    found = next((axis for axis, name in enumerate(names) if name in _TENSOR_AXES), None)
    if found is None and mesh.ndim == 1 and not is_fully_sharded:
        return 0
    return found


def _is_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__


# -- Rules -------------------------------------------------------------------------------------------------------------


def _rules(modules: Mapping[str, nn.Module], cuts: Mapping[str, int]) -> dict[str, Any]:
    """Return the rules of a plan by name of a module or parameter, in the order of the model.

    Args:
        modules: By name.
        cuts: By name of a parameter, the dimension in which it is cut.
    """
    rules: dict[str, Any] = {}
    attentions = [name for name, module in modules.items() if isinstance(module, nn.MultiheadAttention)]
    for name, dim in cuts.items():
        owner, _, leaf = name.rpartition(".")
        attention = next((one for one in attentions if _is_in(name, one)), None)
        words = next((words for kind, words in _LAYERS.items() if isinstance(modules[owner], kind)), None)
        if attention is not None:
            rules[attention] = "attention"
        elif words is None:
            rules[name] = {"cut": dim}
        elif leaf == "weight" and dim in words:
            word = words[dim]
            rules[owner] = _WITH_WHOLE_TENSORS.get(word, word) if _has_whole_tensors(modules[owner], word) else word
        # The bias goes with its weight. An embedding that is cut by features stays whole, which is right as well.
    return rules


def _has_whole_tensors(module: nn.Module, word: str) -> bool:
    """Say whether the hooks of ``parallelize_module`` gather a column layer's result, or cut a row layer's input."""
    hooks = module._forward_hooks if word == "column" else module._forward_pre_hooks
    return any(placement.is_replicate() for hook in hooks.values() for placement in _placements(hook))


def _placements(hook: Any) -> Iterator[Any]:
    """Yield the placements that a hook gives the arguments or the result of its module."""
    for cell in getattr(hook, "__closure__", None) or ():
        if isinstance(cell.cell_contents, functools.partial) and cell.cell_contents.args:
            layouts = cell.cell_contents.args[0]
            yield from (one for one in layouts if hasattr(one, "is_replicate")) if isinstance(layouts, tuple) else ()


def _with_stars(
    rules: Mapping[str, Any], modules: Mapping[str, nn.Module], params: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return rules with ``*`` for the numbers of blocks, where all blocks have the same."""
    starred: dict[str, Any] = {}
    for name, rule in rules.items():
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
        expression = re.escape(pattern).replace(r"\*", r"\d+")
        named = [one for one in (*modules, *params) if re.fullmatch(expression, one)]
        alike = all(rules.get(one) == rule for one in named)
        starred[pattern if alike else name] = rule
    return starred
