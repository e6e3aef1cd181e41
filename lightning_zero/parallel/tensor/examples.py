"""Arguments of a call, kept to call a module with the like of them again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.trees import tree_leaves, tree_map, tree_map_only

__all__ = [
    "Arguments",
    "call_block",
    "described_inputs",
    "keep",
    "replay",
    "run_example",
    "tensors_of",
    "with_own_activations",
]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class _Kept:
    """A tensor of a call; ``values`` is on meta where its values are not known, or do not matter."""

    values: Tensor
    needs_grad: bool


def keep(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Return the arguments of a call as they are now, without caches of keys and values."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            needs_grad = leaf.requires_grad and leaf.is_floating_point()
            values = leaf.detach()
            return _Kept(values.to("meta") if needs_grad else values.clone(), needs_grad)
        return None if "Cache" in type(leaf).__name__ else leaf

    kept: Arguments = tree_map(one, (args, kwargs))
    return kept


def replay(arguments: Arguments, dtype: torch.dtype, seed: int = 1) -> Arguments:
    """Return arguments in ``dtype`` on the CPU: activations are random, the same ones for the same seed."""
    generator = torch.Generator().manual_seed(seed)

    def one(leaf: _Kept) -> Tensor:
        values = leaf.values
        if leaf.needs_grad:
            return torch.randn(values.shape, generator=generator).to(dtype).requires_grad_()
        if values.device.type == "meta":
            return _like(values, generator, dtype)
        values = values.cpu()
        return values.to(dtype) if values.is_floating_point() else values.clone()

    args, kwargs = tree_map_only(_Kept, one, arguments)
    return args, kwargs


def with_own_activations(arguments: Arguments) -> Arguments:
    """Return arguments with copies of the activations, which a call may change in place, and of the containers."""
    args, kwargs = tree_map_only(Tensor, lambda one: one.clone() if one.requires_grad else one, arguments)
    return args, kwargs


def call_block(block: nn.Module, arguments: Arguments) -> Any:
    """Call a block with activations of its own."""
    args, kwargs = with_own_activations(arguments)
    return block(*args, **kwargs)


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors with gradients in results or arguments, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.requires_grad]


def run_example(model: nn.Module, example: Any) -> Any:
    """Call a model with its `example_input_array`."""
    if isinstance(example, dict):
        return model(**example)
    return model(*example) if isinstance(example, tuple) else model(example)


def described_inputs(module: nn.Module) -> dict[str, Tensor]:
    """Return inputs of a Hugging Face model, from its own description."""
    config = getattr(module, "config", None)
    if getattr(module, "main_input_name", None) == "pixel_values" and hasattr(config, "image_size"):
        edge = config.image_size  # type: ignore[union-attr]
        height, width = edge if isinstance(edge, (list, tuple)) else (edge, edge)
        return {"pixel_values": torch.randn(2, getattr(config, "num_channels", 3), height, width)}
    inputs = getattr(module, "dummy_inputs", None)
    return inputs if isinstance(inputs, dict) else {}


def _like(values: Tensor, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    if values.is_floating_point():
        return torch.randn(values.shape, generator=generator).to(dtype)
    if values.dtype == torch.bool:
        return torch.rand(values.shape, generator=generator) < 0.7
    return torch.zeros(values.shape, dtype=values.dtype)
