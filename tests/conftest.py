"""Marks, seeds and poisoned memory for all tests."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests import worlds
from tests.sampling import COSTS, within_time


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark cases slow that the quick set has no time for."""
    quick = {item.nodeid: item for item in items if not any(map(item.get_closest_marker, ("slow", "gpu", "alone")))}
    for name in quick.keys() - within_time(list(quick), json.loads(COSTS.read_text())):
        if not quick[name].get_closest_marker("always"):
            quick[name].add_marker("slow")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")


def pytest_collection_finish() -> None:
    """Let collections pass over thousands of cases: an engine that is made beside others collects garbage."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = sum("needs a GPU" in str(report.longrepr) for report in terminalreporter.getreports("skipped"))
    if skipped:
        terminalreporter.write_line(f"{skipped} tests were skipped for want of a GPU")


def pytest_sessionfinish() -> None:
    worlds.close()
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _fresh_randomness() -> None:
    worlds.seed()


@pytest.fixture(autouse=True)
def _nothing_left_for_other_processes() -> Iterator[None]:
    """End what a Trainer in this process began: programs that are started later would take its port."""
    before = dict(os.environ)
    yield
    for key in set(os.environ) - set(before):
        del os.environ[key]
    os.environ.update(before)
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    with worlds.poisoned_memory():
        yield
