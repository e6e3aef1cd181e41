"""The first batch that a Trainer would give to ``training_step``, and the arguments of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

__all__ = ["first_batch", "step_arguments"]


def first_batch(loader: Any) -> Any:
    """Return the first batch of a loader, or of a collection of loaders, combined as in ``Trainer.fit``.

    Raises:
        ValueError: There is none.
    """
    combined = loader if isinstance(loader, CombinedLoader) else CombinedLoader(loader, "max_size_cycle")
    try:
        batch, *_ = next(iter(combined))
    except StopIteration:
        raise ValueError("the training data has no batch.") from None
    return batch


def step_arguments(step: Callable[..., Any], batch: Any) -> tuple[Any, ...]:
    """Return the arguments with which a Trainer calls a step on its first batch: ``batch_idx`` if the step takes it."""
    return (batch, 0) if is_param_in_hook_signature(step, "batch_idx", min_args=2) else (batch,)
