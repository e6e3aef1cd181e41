"""The steps that one optimizer has made in a backward, before ``step`` was called (ADR 0027)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_zero.engine.buffers.buffer import FlatBuffer
from lightning_zero.engine.buffers.update import Update

__all__ = ["StepsMadeEarly"]


class StepsMadeEarly:
    """The buffers that were stepped in the backward, and the options of these steps.

    Call protocol: ``begin`` before each, ``add`` behind it; ``refuse_moved_options`` and ``take`` when ``step`` is
    called, or ``finish`` when it never is.
    """

    def __init__(self) -> None:
        self._steps: dict[int, tuple[FlatBuffer, Update | None]] = {}  # the update of a step that may still be running
        self._options: list[dict[str, Any]] = []  # of the groups, when the first step was made

    @property
    def is_empty(self) -> bool:
        """Whether no step is ahead."""
        return not self._steps

    def begin(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take note of the options of the first step."""
        if self.is_empty:
            self._options = [_options(group) for group in groups]

    def add(self, buffer: FlatBuffer, update: Update | None) -> None:
        """Take note of a step that was made, or that ``update`` is making."""
        self._steps[id(buffer)] = buffer, update

    def is_running(self, buffer: FlatBuffer) -> bool:
        """Say whether the step of a buffer may still be running."""
        return self._steps.get(id(buffer), (buffer, None))[1] is not None

    def refuse_moved_options(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Refuse options that are not those that the steps had.

        Raises:
            RuntimeError: One was changed.
        """
        for before, group in zip(self._options, groups, strict=True) if self._steps else ():
            for name, value in _options(group).items():
                if before.get(name) != value:
                    raise RuntimeError(
                        f"`{name}` was changed from {before.get(name)} to {value} between backward and"
                        " `optimizer.step()`, but `step='backward'` has made steps in the backward. Change it"
                        " before the backward, or use `step='auto'`."
                    )

    def take(self) -> dict[int, Update]:
        """Return the updates that may still be running, by buffer: ``step`` was called."""
        steps, self._steps = self._steps, {}
        for buffer, _ in steps.values():
            buffer.gradients.is_ahead = False
        return {key: update for key, (_, update) in steps.items() if update is not None}

    def finish(self) -> None:
        """Return when all of them are made: the run has ended in a backward."""
        for buffer, update in self._steps.values():
            if update is not None:
                update.finish()
            buffer.home.give_back_lent()
        self._steps.clear()


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
