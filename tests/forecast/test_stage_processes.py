"""Processes of the stages of a simulated pipeline."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

import pytest
import torch

from lightning_zero.forecast.stage_processes import run_stages


def test_stages_run_at_the_same_time_and_return_in_their_order() -> None:
    def run(stage: int, store: Any) -> tuple[int, str]:
        store.set(str(stage), f"from {stage}")
        return stage, store.get(str(1 - stage)).decode()

    assert run_stages(2, run) == [(0, "from 1"), (1, "from 0")]


class _Odd(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_the_first_error_of_a_stage_ends_the_others() -> None:
    def run(stage: int, store: Any) -> None:
        if stage == 1:
            raise ValueError("`option=1` is wrong")
        store.get("never")

    with pytest.raises(ValueError, match="`option=1` is wrong") as caught:
        run_stages(2, run)
    assert "In the process of pipeline stage 1" in str(caught.value.__cause__)


def test_errors_that_do_not_pickle_are_told_in_words() -> None:
    def run(stage: int, store: Any) -> None:
        raise _Odd(1, 2)

    with pytest.raises(RuntimeError, match="_Odd: 1 and 2"):
        run_stages(1, run)


def test_a_process_that_is_ended_is_named() -> None:
    def run(stage: int, store: Any) -> None:
        if stage == 1:
            os._exit(9)
        store.get("never")

    with pytest.raises(RuntimeError, match="simulates pipeline stage 1 was ended, with exit code 9"):
        run_stages(2, run)


def test_systems_that_do_not_fork_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    with pytest.raises(RuntimeError, match="this system has no fork"):
        run_stages(2, lambda stage, store: None)


def test_a_fork_behind_a_backward_is_told_where_to_run() -> None:
    def run(stage: int, store: Any) -> None:
        raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing.")

    with pytest.raises(
        RuntimeError, match="in a process of their own, with `python -m lightning_zero estimate`"
    ) as caught:
        run_stages(1, run)
    assert "Unable to handle autograd" in str(caught.value.__cause__)


@pytest.mark.gpu
def test_autograd_still_has_the_error_of_a_fork_behind_a_backward() -> None:
    torch.ones(2, requires_grad=True, device="cuda").sum().backward()

    def run(stage: int, store: Any) -> None:
        torch.ones(2, requires_grad=True).sum().backward()

    with pytest.raises(RuntimeError, match="in a process of their own"):
        run_stages(1, run)
