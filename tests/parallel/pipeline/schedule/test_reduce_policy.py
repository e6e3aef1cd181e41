"""When a pipeline stage reduces its gradients."""

from __future__ import annotations

import pytest
import torch

from lightning_zero.parallel.pipeline.schedule.reduce_policy import device_bytes, reduces_once


def test_auto_reduces_once_where_whole_gradients_are_a_small_part_of_the_memory() -> None:
    assert reduces_once("auto", 10, 100.0)
    assert not reduces_once("auto", 11, 100.0)


@pytest.mark.parametrize(("option", "once"), [("step", True), ("microbatch", False)])
def test_what_is_said_is_done(option: str, once: bool) -> None:
    assert reduces_once(option, 1000, 1.0) is once  # type: ignore[arg-type]
    assert reduces_once(option, 1, 1000.0) is once  # type: ignore[arg-type]


def test_ranks_on_cpus_share_the_memory_of_the_host() -> None:
    assert device_bytes(torch.device("cpu"), 4) == device_bytes(torch.device("cpu"), 1) / 4 > 2**20
