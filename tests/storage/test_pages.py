"""Pages: memory whose address stays, and whose content does not."""

from __future__ import annotations

import pytest
import torch

from lightning_zero.storage.pages import PAGE_BYTES, Pages


@pytest.mark.parametrize("nbytes", [0, 1, PAGE_BYTES, PAGE_BYTES + 1, 5 << 20])
def test_dropped_pages_are_zero_at_the_same_address(nbytes: int) -> None:
    pages = Pages(nbytes)
    content = pages.content
    assert content.numel() == max(-(-nbytes // PAGE_BYTES), 1) * PAGE_BYTES
    assert content.data_ptr() % PAGE_BYTES == 0
    assert not content.any()
    view = content[7:19]
    content.fill_(3)
    assert view.sum() == 36
    pages.drop()
    assert not content.any()
    view.fill_(1)
    assert content.sum() == 12


def test_dropped_pages_are_given_back() -> None:
    pages = Pages(64 << 20)
    before = _resident()
    pages.content.fill_(1)
    assert _resident() - before > 60 << 20
    pages.drop()
    assert _resident() - before < 4 << 20


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE_BYTES


def test_memory_outlives_the_object_that_made_it() -> None:
    content = Pages(100).content
    content.fill_(2)
    assert torch.equal(content, torch.full_like(content, 2))


def test_the_end_of_the_last_tensor_is_told() -> None:
    told: list[object] = []
    pages = Pages(100)
    pages.when_freed(told.append)
    view = pages.content[3:5]
    del pages
    assert not told
    assert torch.equal(view.fill_(7), torch.tensor([7, 7], dtype=torch.uint8))
    del view
    assert len(told) == 1
