from __future__ import annotations

from typing import Any

import pytest

from lightning_zero.checkpoint.ranks import CheckpointError, Ranks


def test_the_error_of_a_rank_is_its_own_when_another_rank_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(ranks: Ranks, value: Any) -> list[Any]:
        raise CheckpointError("the process group was destroyed")

    monkeypatch.setattr(Ranks, "gather", gone)
    with pytest.raises(OSError, match="No space"), Ranks(None).agree("Loading"):
        raise OSError("No space")
    with pytest.raises(CheckpointError, match="destroyed"), Ranks(None).agree("Loading"):
        pass
