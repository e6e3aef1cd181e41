"""Whether a pipeline stage at ZeRO stage 3 keeps whole gradients between micro-batches, and reduces once."""

from __future__ import annotations

import os

import torch

from lightning_zero.config import ReduceTime
from lightning_zero.storage.copies import memory_of

__all__ = ["SHARE", "device_bytes", "reduces_once"]

SHARE = 0.1  # of a device's memory that whole gradients may take; a number, so that every run decides alike


def reduces_once(option: ReduceTime, needed_bytes: int, memory_bytes: float) -> bool:
    """Say whether gradients are reduced once per batch.

    Args:
        option: ``Pipeline.reduce``.
        needed_bytes: Of the stage's gradients while they are whole.
        memory_bytes: Of the device.
    """
    return option == "step" or (option == "auto" and needed_bytes <= SHARE * memory_bytes)


def device_bytes(device: torch.device, ranks: int) -> float:
    """Return the memory of a device in all, free or not; on CPUs a rank's share of it, all of them on one host."""
    if device.type == "cuda":
        return float(memory_of(device).total)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks
