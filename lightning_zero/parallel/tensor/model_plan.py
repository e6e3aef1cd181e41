"""Plans that models of Hugging Face bring, in this package's words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from lightning_zero.parallel.tensor.plan import Cut, Packed, Rule, TensorPlan, matches

__all__ = ["model_plan"]

_STYLES: dict[str, Rule] = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "column_gather",
    "colwise_rep": "column_gather",
    "rowwise_split_input": "row_split",
    "rowwise_rep": "row_split",
    "replicated_with_grad_allreduce": "partial",
    "packed_colwise": Packed(2),
    "embedding_rowwise": "vocab",
    "moe_tp_experts": "experts",
}
_OF_PARAMS = {"colwise": (-2, 1), "rowwise": (-1, 1), "packed_colwise": (-2, 2), "packed_rowwise": (-1, 2)}
_WITHOUT_RULE = ("replicate", "local_params")


def model_plan(module: nn.Module, *, skip_unknown: bool = False) -> TensorPlan | None:
    """Return the plan of the Hugging Face models in a module, or None if there is none.

    Entries that name nothing are left out, because models share plans with layers that they may not have.

    Args:
        module: The model, or a module that has it.
        skip_unknown: Leave out entries whose style has no counterpart here.

    Raises:
        ValueError: An entry has such a style.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    params = dict(module.named_parameters(remove_duplicate=False))
    rules: dict[str, Rule] = {}
    found = False
    for pattern, style in _entries(module):
        found = True
        if any(matches(pattern, name) for name in modules):
            rule = _STYLES.get(style)
        else:
            dims = {param.dim() for name, param in params.items() if matches(pattern, name)}
            if not dims:
                continue
            rule = _param_rule(style, min(dims))
        if rule is not None:
            rules[pattern] = rule
        elif style not in _WITHOUT_RULE and not skip_unknown:
            raise ValueError(
                f"The model's plan of tensor parallelism has `{pattern}: {style!r}`, which has no counterpart here. Use"
                " `TensorParallel(plan='auto')`, or a `TensorPlan`."
            )
    return TensorPlan(rules) if found else None


def _entries(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield patterns and styles of the outermost modules that have a plan; transformers joins those of inner ones."""
    inside: list[str] = []
    for name, child in module.named_modules():
        plan: Any = getattr(child, "_tp_plan", None)
        if not isinstance(plan, dict) or not plan or any(name.startswith(outer) for outer in inside):
            continue
        inside.append(f"{name}." if name else "")
        for pattern, style in plan.items():
            yield f"{name}.{pattern}".lstrip("."), style


def _param_rule(style: str, dims: int) -> Rule | None:
    """Return the rule of a parameter. Its last two dimensions are those of a matrix; a vector has output features."""
    if style == "replicated_with_grad_allreduce":
        return "partial"
    if style not in _OF_PARAMS:
        return None
    dim, sections = _OF_PARAMS[style]
    return Cut(dim if dims > 1 else 0, sections)
