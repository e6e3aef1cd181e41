"""Forwards of cut modules: each stands in for the ``forward`` of one module, which keeps its class and its names.

Inside of a region tensors are this rank's parts. Column layers enter it (their input is copied to the ranks), row
layers leave it (their results are summed).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from lightning_zero.parallel.tensor.collectives import (
    Ranks,
    gather_from_ranks,
    reduce_from_ranks,
    scatter_to_ranks,
)
from lightning_zero.parallel.tensor.generators import Region
from lightning_zero.parallel.tensor.plan import CutArgument
from lightning_zero.trees import tree_map_only

__all__ = [
    "ColumnForward",
    "CutArgumentsForward",
    "Divided",
    "ExpertsForward",
    "GatheredColumnForward",
    "RowForward",
    "SplitRowForward",
    "VocabForward",
    "copied",
    "is_transposed",
]


def is_transposed(module: nn.Module) -> bool:
    """Say whether a linear layer has its weight as ``(in, out)``, as the ``Conv1D`` of GPT-2 does."""
    return any(cls.__name__ == "Conv1D" for cls in type(module).__mro__) and hasattr(module, "nf")


def copied(tree: Any, ranks: Ranks, region: Region) -> Any:
    """Return arguments with the tensors that have gradients copied to the ranks."""
    return tree_map_only(Tensor, lambda one: region.copied(one, ranks) if one.requires_grad else one, tree)


class Divided:
    """Stands in for the forward of one module. Copies of the module get a copy that is theirs."""

    def __init__(self, module: nn.Module, ranks: Ranks, region: Region) -> None:
        self.module = module
        self.ranks = ranks
        self.region = region
        self.stands_in_for: Callable[..., Any] | None = module.__dict__.get("forward")
        module.forward = self

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        if self.stands_in_for is not None:
            return self.stands_in_for(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module in parts."""
        raise NotImplementedError


class ColumnForward(Divided):
    """A layer with a part of the output features."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return this rank's features."""
        args, kwargs = copied((args, kwargs), self.ranks, self.region)
        result = self.run(*args, **kwargs)
        self.region.enter(result, self.module.training)
        return result


class GatheredColumnForward(Divided):
    """A layer with a part of the output features, whose result is whole."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return all features."""
        args, kwargs = copied((args, kwargs), self.ranks, self.region)
        result = gather_from_ranks(self.run(*args, **kwargs), self.ranks)
        self.region.forget_copy()
        return result


class RowForward(Divided):
    """A layer with a part of the input features. The bias is added once, behind the sum."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the sum of the ranks' results."""
        (features,) = (*args, *kwargs.values())
        self.region.leave(features, self.module.training)
        return self.with_bias(reduce_from_ranks(self.product(features), self.ranks))

    def product(self, features: Tensor) -> Tensor:
        """Return the layer's result without its bias."""
        module = self.module
        weight: Tensor = module.weight  # type: ignore[assignment]
        if is_transposed(module):
            return features @ weight
        if type(module).forward is nn.Linear.forward and self.stands_in_for is None:
            return functional.linear(features, weight)
        bias = module._parameters.get("bias")
        if bias is None:
            return self.run(features)  # type: ignore[no-any-return]
        module._parameters["bias"] = None
        try:
            return self.run(features)  # type: ignore[no-any-return]
        finally:
            module._parameters["bias"] = bias

    def with_bias(self, result: Tensor) -> Tensor:
        """Add the bias, if there is one."""
        bias = self.module._parameters.get("bias")
        return result if bias is None else result + bias.to(result.dtype)


class SplitRowForward(RowForward):
    """A layer with a part of the input features, whose input is whole."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the sum of the ranks' results."""
        (features,) = (*args, *kwargs.values())
        return super().__call__(scatter_to_ranks(features, self.ranks))


class VocabForward(Divided):
    """An embedding with a part of the rows: rows of other ranks count as zero, and the ranks' results are summed.

    Indices outside of the vocabulary are left to the module's own forward, which raises as on one rank.

    Args:
        start: The first row that this rank has.
    """

    def __init__(self, module: nn.Module, ranks: Ranks, region: Region, start: int) -> None:
        super().__init__(module, ranks, region)
        self._start = start

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the embeddings of all indices."""
        (indices,) = (*args, *kwargs.values())
        if self.ranks.on_indices is not None:
            self.ranks.on_indices(indices)
        weight: Tensor = self.module.weight  # type: ignore[assignment]
        rows = weight.shape[0]
        local = indices - self._start
        is_elsewhere = (indices >= 0) & (indices < rows * self.ranks.size) & ((local < 0) | (local >= rows))
        local = local.masked_fill(is_elsewhere, 0)
        result = self.run(*(local for _ in args), **dict.fromkeys(kwargs, local))
        return reduce_from_ranks(result.masked_fill(is_elsewhere.unsqueeze(-1), 0), self.ranks)


class ExpertsForward(Divided):
    """A module with cut matrices of its own, for example experts: its results are summed."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the sum of the ranks' results."""
        args, kwargs = copied((args, kwargs), self.ranks, self.region)
        result = self.run(*args, **kwargs)
        self.region.forget_copy()
        return tree_map_only(Tensor, partial(reduce_from_ranks, ranks=self.ranks), result)


class CutArgumentsForward(Divided):
    """A module that is given this rank's part of some arguments.

    Args:
        rules: By name or position of the argument.
    """

    def __init__(self, module: nn.Module, ranks: Ranks, region: Region, rules: Mapping[str | int, CutArgument]) -> None:
        super().__init__(module, ranks, region)
        self._rules = rules

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        args = tuple(self._cut(position, value) for position, value in enumerate(args))
        return self.run(*args, **{name: self._cut(name, value) for name, value in kwargs.items()})

    def _cut(self, key: str | int, value: Any) -> Any:
        rule = self._rules.get(key)
        if rule is None or not isinstance(value, Tensor) or value.dim() <= rule.dim:
            return value
        length = value.shape[rule.dim]
        if length == rule.heads // self.ranks.size:
            return value  # an earlier block has computed it from its own heads
        if length % rule.heads:
            raise ValueError(
                f"Argument {key!r} of `{type(self.module).__name__}` has shape {tuple(value.shape)}, and the plan of"
                f" tensor parallelism says that its dimension {rule.dim} has {rule.heads} heads, or several times"
                " as many. Correct `TensorPlan(arguments=...)`."
            )
        shape = value.shape
        folded = value.reshape(*shape[: rule.dim], length // rule.heads, rule.heads, *shape[rule.dim + 1 :])
        return scatter_to_ranks(folded, self.ranks, rule.dim + 1).flatten(rule.dim, rule.dim + 1)
