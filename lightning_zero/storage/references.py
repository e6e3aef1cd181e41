"""Counts of the tensors that see a memory: PyTorch counts references to storages."""

from __future__ import annotations

from functools import cache

import torch

__all__ = ["num_tensors_in"]


def num_tensors_in(tensor: torch.Tensor) -> int:
    """Return how many tensors lie in the memory of a tensor: itself, views, those that ``detach`` and graphs hold."""
    return _references(tensor) - _own_references()


def _references(tensor: torch.Tensor) -> int:
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


@cache
def _own_references() -> int:
    """Return how many references PyTorch has to the storage of a tensor of which nobody has made a view."""
    return _references(torch.empty(1, device="cpu")) - 1
