"""Opponents of the engine; every one trains the same model with the same fused AdamW."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["Clock", "Side", "fused_adamw"]


class Clock:
    """Adds up the seconds of one step's phases. Ranks enter a phase together."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body as (a part of) phase ``name``. Collective: all ranks."""
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start


class Side(Protocol):
    """One of the two that are compared.

    Protocol: 1. ``step`` any number of times, with the same batches on either side. 2. ``weights`` at any time between
    steps. 3. ``close`` once.
    """

    def step(self, batch: Tensor, clock: Clock) -> Tensor:
        """Train on this rank's batch, inside phases of the clock; return the local loss. Collective: all ranks."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of all parameters by name. Collective: all ranks."""
        ...

    def close(self) -> None:
        """Give up hooks and buffers."""
        ...


SideBuilder = Callable[[nn.Module], Side]


def fused_adamw(parameters: Iterable[Tensor]) -> torch.optim.AdamW:
    """Build the optimizer that every side uses."""
    return torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.1, fused=True)
