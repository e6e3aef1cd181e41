"""The first batch that a Trainer would give to ``training_step``."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities.combined_loader import CombinedLoader

__all__ = ["first_batch"]


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
