"""Low-rank adapters: what is trained beside frozen weights (LoRA, arXiv:2106.09685)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["AdaptedLinear", "Adapters", "LowRank", "add_adapters"]


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """Which linear layers get adapters, and how large these are.

    Args:
        rank: Width of an adapter.
        alpha: The adapter's output is multiplied by ``alpha / rank``.
        modules: Last parts of the names of the linear layers.
    """

    rank: int = 8
    alpha: float = 16.0
    modules: tuple[str, ...] = ("q_proj", "v_proj")

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"`rank={self.rank}` must be 1 or more.")


class LowRank(nn.Module):
    """A linear map of low rank that starts as zero."""

    def __init__(self, in_features: int, out_features: int, config: Adapters) -> None:
        super().__init__()
        self.scale = config.alpha / config.rank
        self.down = nn.Parameter(torch.empty(config.rank, in_features))
        self.up = nn.Parameter(torch.empty(out_features, config.rank))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial values; on the meta device the strategy calls this when it makes the module real."""
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))
        nn.init.zeros_(self.up)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in features) → (..., out features)."""
        return nn.functional.linear(nn.functional.linear(x, self.down), self.up) * self.scale


class AdaptedLinear(nn.Linear):
    """A linear layer plus an adapter. Its own parameters keep their names, so that pretrained weights fit."""

    def __init__(self, linear: nn.Linear, config: Adapters) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        with linear.weight.device:
            self.adapter = LowRank(linear.in_features, linear.out_features, config)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in features) → (..., out features)."""
        return super().forward(x) + self.adapter(x)


def add_adapters(model: nn.Module, config: Adapters) -> None:
    """Freeze a model and put adapters into it.

    Raises:
        ValueError: A name in ``modules`` is that of no linear layer.
    """
    model.requires_grad_(False)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for last in config.modules:
        chosen = [name for name in linears if name.rpartition(".")[2] == last]
        if not chosen:
            known = ", ".join(sorted({name.rpartition(".")[2] for name in linears}))
            raise ValueError(f"`modules` has `{last}`, and no linear layer has that name. There are: {known}.")
        for name in chosen:
            model.set_submodule(name, AdaptedLinear(linears[name], config))
