"""Selective checkpointing: results of matrix products and attention are kept, everything else is computed again.

Note [Results that are written]
    PyTorch keeps a result itself, not a copy of it. Code of the checkpointed module that adds to a result in place
    (``out = x @ w; out.add_(bias)``, as experts of transformers do) changes the kept one too, and a recomputation would
    add again: PyTorch refuses the backward. So a result is copied before the first write into its memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachingTorchDispatchMode,
    create_selective_checkpoint_contexts,
)

from lightning_zero.trees import tree_flatten

__all__ = ["is_product", "keep_products"]

_PRODUCTS = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "linear",
        "convolution",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
        "_scaled_mm",
        "_grouped_mm",
        "_scaled_grouped_mm",
    )
    if hasattr(torch.ops.aten, name)
)


def is_product(function: Any) -> bool:
    """Say whether an operation's results are kept."""
    return function in _PRODUCTS


def keep_products() -> Any:
    """Return the contexts of a forward and of its recomputation, for ``torch.utils.checkpoint.checkpoint``."""
    keeping, replaying = create_selective_checkpoint_contexts(_policy_of)  # type: ignore[no-untyped-call]
    is_compiling = torch.compiler.is_compiling()  # compiled code writes nothing in place
    return keeping if is_compiling else _CopiedBeforeWrites(keeping.policy_fn, keeping.storage), replaying


def _policy_of(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_product(function) else CheckpointPolicy.PREFER_RECOMPUTE


class _CopiedBeforeWrites(_CachingTorchDispatchMode):  # type: ignore[no-untyped-call]
    """PyTorch's mode that keeps results, which copies those that are written: see the note above.

    Args:
        policy: Says which results are kept.
        storage: Gets them, wrapped with their versions.
    """

    supports_higher_order_operators = True

    def __init__(self, policy: Any, storage: Any) -> None:
        super().__init__(policy, storage)
        self._memories: set[int] = set()  # of results; each is alive in the storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operation."""
        if self._memories and isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
            self._copy_results({_memory(one) for one in _written(func, args, kwargs or {})} & self._memories)
        result = super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if is_product(func):
            self._memories |= {_memory(one) for one in tree_flatten(result)[0] if isinstance(one, Tensor)}
        return result

    def _copy_results(self, memories: set[int]) -> None:
        """Let the recomputation have copies of the results in some memory."""
        if not memories:
            return
        self._memories -= memories
        for kept in _wrappers(self.storage):
            if isinstance(kept.val, Tensor) and _memory(kept.val) in memories:
                with _disable_current_modes():  # the mode would count this operation
                    kept.val = kept.val.clone(memory_format=torch.preserve_format)
                kept.version = kept.val._version


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operation writes."""
    given = {**dict(zip((one.name for one in func._schema.arguments), args, strict=False)), **kwargs}
    names = [one.name for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    leaves = tree_flatten([given.get(name) for name in names])[0]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _wrappers(storage: Any) -> list[Any]:
    """Return the wrapped results in lists and dictionaries of a mode of PyTorch."""
    if isinstance(storage, dict):
        storage = list(storage.values())
    if isinstance(storage, list | tuple):
        return [one for entry in storage for one in _wrappers(entry)]
    return [storage] if hasattr(storage, "val") and hasattr(storage, "version") else []


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)
