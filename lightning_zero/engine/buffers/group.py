"""The ranks over which a flat buffer is cut; see Note [A group per buffer] in ``lightning_zero.grid``."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_zero.comm.communicator import Communicator

__all__ = ["BufferGroup"]


@dataclass(frozen=True, eq=False)
class BufferGroup:
    """The ranks over which a flat buffer is cut.

    Attributes:
        communicator: Of these ranks; they tile the buffer.
        everyone: Of all ranks, which have all elements of the model once.
        divisor: Of sums of gradients.
    """

    communicator: Communicator
    everyone: Communicator
    divisor: int

    @staticmethod
    def of_all(communicator: Communicator) -> BufferGroup:
        """Return the group of a buffer that is cut over all ranks, each of which has other data."""
        return BufferGroup(communicator, communicator, communicator.world_size)
