"""The loss scales by which the gradients of one flat buffer are multiplied."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["LossScales"]


class LossScales:
    """The loss scale of each slot's gradient, and whether it overflowed.

    A gradient has the scale of the backward that brought it until ``unscaled``, then 1. One that the program has
    assigned has no entry: it was made of scaled gradients, as under ``torch.amp``. The scale is None where a backward
    was not told one, for example by ``loss.backward()`` in a LightningModule.

    Call protocol: ``begin`` when a backward begins; ``changes`` before it adds to gradients; ``note`` for those that it
    brings; ``forget`` for those that are dropped.
    """

    def __init__(self) -> None:
        self._current: float | None = None  # of the backward that is running, or was last
        self.is_begun = False  # and has not added to gradients yet
        self._by_slot: dict[int, float | None] = {}
        self._overflowed: set[int] = set()

    def begin(self, scale: float | None) -> None:
        """Take note of a backward that begins, with the scale of its loss."""
        self._current, self.is_begun = scale, True

    def changes(self, slots: Iterable[int]) -> dict[float, set[int]]:
        """Return the factors that bring earlier gradients to the scale of this backward, once per backward.

        Args:
            slots: Those that have a gradient, to which the backward may add.
        """
        factors: dict[float, set[int]] = {}
        if self.is_begun and self._current is not None:
            for slot in slots:
                scale = self._by_slot.get(slot, self._current)
                if scale is not None and scale != self._current:
                    factors.setdefault(self._current / scale, set()).add(slot)
                    self._by_slot[slot] = self._current
        self.is_begun = False
        return factors

    def note(self, slots: Iterable[int]) -> None:
        """Take note of slots to which this backward has brought gradients."""
        for slot in slots:
            if self._by_slot.get(slot, self._current) is None:
                self._by_slot[slot] = None  # a sum of two scales
            else:
                self._by_slot[slot] = self._current

    def of(self, slot: int, *, assigned: float) -> float | None:
        """Return the scale of a slot's gradient; ``assigned`` is that of a gradient which the program has assigned."""
        return self._by_slot.get(slot, assigned)

    def unscaled(self, slots: Iterable[int], *, overflow: bool) -> None:
        """Take note of gradients that were divided by their scales."""
        for slot in slots:
            self._by_slot[slot] = 1.0
            if overflow:
                self._overflowed.add(slot)

    def has_overflowed(self, slot: int) -> bool:
        """Say whether a gradient was divided by its scale, and was not finite on some rank."""
        return slot in self._overflowed

    def forget(self, slots: Iterable[int]) -> None:
        """Forget the scales of gradients that are dropped, or made zero."""
        for slot in slots:
            self._by_slot.pop(slot, None)
            self._overflowed.discard(slot)
