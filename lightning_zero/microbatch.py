"""Where a micro-batch stands before the optimizer's step: decides when its gradients are reduced."""

from __future__ import annotations

from enum import Enum

__all__ = ["Microbatch"]


class Microbatch(Enum):
    """The position of a micro-batch among those of one step.

    LAST:             The optimizer's step follows. Gradients are reduced.
    EARLIER:          Further micro-batches follow. Stages 0 and 1 sum gradients on each rank (ADR 0008), stages 2 and 3
                      reduce them.
    IN_FLIGHT:        Backwards of forwards that have run follow, as in a pipeline. Stage 2 sums too, stage 3 reduces.
    IN_FLIGHT_SUMMED: The same, and stage 3 sums whole gradients too, until the last of these backwards.
    """

    LAST = "last"
    EARLIER = "earlier"
    IN_FLIGHT = "in flight"
    IN_FLIGHT_SUMMED = "in flight, summed"

    @property
    def has_more_backwards(self) -> bool:
        """Whether backwards of forwards that have run follow."""
        return self in (Microbatch.IN_FLIGHT, Microbatch.IN_FLIGHT_SUMMED)
