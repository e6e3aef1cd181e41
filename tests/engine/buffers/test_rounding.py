"""What a step rounds arrives before anybody uses it."""

from __future__ import annotations

from typing import Any

import torch

from lightning_zero.engine.buffers.rounding import Rounding
from lightning_zero.storage.copies import Copies, Landing
from lightning_zero.storage.host import StagingSlot


class _Noted(Landing):
    def __init__(self) -> None:
        super().__init__()
        self.was_waited_for = self.was_finished = False

    def wait(self) -> None:
        self.was_waited_for = True

    def finish(self) -> None:
        self.was_finished = True


class _NotedCopies(Copies):
    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.started: list[_Noted] = []

    def up(self, *args: Any) -> Landing:
        self.started.append(_Noted())
        return self.started[-1]


def test_a_slot_that_another_buffer_has_filled_is_filled_when_its_copies_have_ended() -> None:
    """A second group of the first buffer wrote over values of the second buffer, which were still to be copied."""
    copies, slot = _NotedCopies(), StagingSlot(torch.empty(16, dtype=torch.uint8))
    first, second = (Rounding(torch.empty(8, dtype=torch.bfloat16), copies, slot) for _ in range(2))
    for rounding, lo in ((first, 0), (second, 0), (first, 4), (second, 4)):
        sent = list(copies.started)
        for call in rounding.around(lambda: None, lo, lo + 4)[:2]:
            call()
        assert all(landing.was_finished for landing in sent)
        rounding._send(lo, lo + 4)
    first.around(lambda: None, 6, 8)[0]()
    assert copies.started[-1].was_finished
    copies.started[-1].was_finished = False
    first.around(lambda: None, 6, 8)[0]()
    assert not copies.started[-1].was_finished  # its own


def test_a_step_that_fills_the_slot_again_takes_no_copy_from_who_waits_for_it() -> None:
    copies, slot = _NotedCopies(), StagingSlot(torch.empty(16, dtype=torch.uint8))
    first = Rounding(torch.empty(8, dtype=torch.bfloat16), copies, slot)
    for lo in (0, 4):
        for call in first.around(lambda: None, lo, lo + 4):
            call()
    slot.wait()  # the next step's thread, which may still be waiting for the host
    first.land()
    assert [landing.was_waited_for for landing in copies.started] == [True, True]
