"""Targets into which a step casts the master: the parameters, or page-locked memory on its way to them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from lightning_zero.storage.copies import Copies, Landing
from lightning_zero.storage.host import StagingSlot

__all__ = ["Rounding"]


class Rounding:
    """The rounded values of one step of one buffer.

    Call protocol:

    1. ``out`` is given to the step, range by range; ``around`` returns the calls for each.
    2. When the step is made, ``land`` lets the device wait for the values.

    Args:
        target: The parameters: (own range,) in the dtype in which they compute.
        copies: The streams of the device.
        slot: Page-locked memory on the way, if the step cannot write the parameters.
    """

    def __init__(self, target: torch.Tensor, copies: Copies, slot: StagingSlot | None) -> None:
        self.out = target if slot is None else slot.view(target.numel(), target.dtype)
        self._behind = Landing() if slot is None else copies.mark()  # operations that still read the old values
        self._target = target
        self._copies = copies
        self._slot = slot
        self._token = object()  # stands for this one in the slot
        self._landings: list[Landing] = []  # of this step; the slot forgets them when the next one wants to fill it

    def around(self, call: Callable[[], None], lo: int, hi: int) -> list[Callable[[], None]]:
        """Return the calls that make the step of ``[lo, hi)`` and send its parameters, in order."""
        if self._slot is None:
            return [call]
        return [partial(self._slot.take, self._token), call, partial(self._send, lo, hi)]

    def _send(self, lo: int, hi: int) -> None:
        assert self._slot is not None
        landing = self._copies.up(self._target[lo:hi], self.out[lo:hi], self._behind)
        self._landings.append(landing)
        self._slot.landings.append(landing)

    def land(self) -> None:
        """Let the device wait for the values. The step is made."""
        for landing in self._landings:
            landing.wait()
