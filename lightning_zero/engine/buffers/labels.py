"""Labels of the engine's work in the traces of ``torch.profiler``: ``zero: gather blocks.0``."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

__all__ = ["label"]

_NO_LABEL = nullcontext()


def label(work: Literal["gather", "wait for", "reduce", "step", "publish"], unit: str) -> AbstractContextManager[Any]:
    """Return a context whose work is labelled with the name of its unit while a profiler runs."""
    if not torch._C._autograd._profiler_enabled():
        return _NO_LABEL
    return torch.profiler.record_function(f"zero: {work} {unit}")
