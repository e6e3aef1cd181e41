"""Conversions of modules inside of a step (``module.to(x.dtype)``), whose values may be on another pipeline stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.errors import PipelineError

__all__ = ["conversions_watched"]


@contextmanager
def conversions_watched() -> Iterator[None]:
    """Let conversions that change nothing do nothing; refuse others."""
    apply: Any = nn.Module._apply

    def unchanged(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        tensors = [*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse)]
        for name, tensor in tensors:
            probe = torch.empty((0,) * tensor.dim(), dtype=tensor.dtype, device=tensor.device)
            if function(probe) is not probe:
                raise PipelineError(
                    f"The step converts a `{type(module).__name__}` (`module.to(...)`, `half()` or the like), which"
                    f" would change its `{name}` ({tensor.dtype} on {tensor.device}). Pipeline stages have modules of"
                    " other stages without values, so dtypes and devices stay as they are in a step. Convert the module"
                    " before training starts, convert its inputs (`x.to(dtype)`), or use `Trainer(precision=...)`."
                )
        return module

    try:
        nn.Module._apply = unchanged  # type: ignore[method-assign]
        yield
    finally:
        nn.Module._apply = apply  # type: ignore[method-assign]
