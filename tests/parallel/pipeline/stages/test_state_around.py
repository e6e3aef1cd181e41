"""Attributes around the blocks that stages keep alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning
import pytest
import torch
from torch import nn

from lightning_zero.config import Pipeline
from lightning_zero.parallel.pipeline.stages.split import split_module
from lightning_zero.parallel.pipeline.stages.state_around import StateAround
from lightning_zero.parallel.pipeline.stages.state_values import Appended


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
        self.count = 0
        self.losses: list[Any]
        self.seen: list[int]


@pytest.mark.parametrize(
    ("name", "is_kept"), [("count", True), ("_metric_attributes", False), ("prepare_data_per_node", False)]
)
def test_what_the_trainer_keeps_in_a_module_is_of_one_process(name: str, is_kept: bool) -> None:
    """Lightning finds logged metrics by their ``id``."""
    module = Net()
    around = StateAround(module, split_module(module, Pipeline(stages=2)), 1, torch.device("cpu"), is_repeated=True)
    assert any(key == ("", name) for key, _, _ in around._kept.items()) == is_kept


def _around(module: Net) -> StateAround:
    return StateAround(module, split_module(module, Pipeline(stages=2)), 1, torch.device("cpu"), is_repeated=True)


def test_of_a_list_that_grows_the_new_items_are_sent() -> None:
    """As Lightning's users collect losses for the end of an epoch."""
    last, first = Net(), Net()
    behind, front = _around(last), _around(first)
    for module in (last, first):
        module.losses = []

    def batch(change: Callable[[], object]) -> int:
        """Return how many items were sent."""
        behind.begin("training_step", is_new=False)
        front.begin("training_step", is_new=False)
        change()
        (told,) = behind.changes()
        front.take([told])
        assert first.losses == last.losses
        return len(told.value.items) if isinstance(told.value, Appended) else len(told.value)

    assert batch(lambda: last.losses.append(torch.tensor(0.5))) == 1
    for number in range(300):
        assert batch(lambda number=number: last.losses.append(torch.tensor(float(number)))) == 1
    assert batch(lambda: last.losses.clear()) == 0
    assert batch(lambda: last.losses.extend([1.0, 2.0, 3.0])) == 3
    assert batch(lambda: last.losses.insert(0, 4.0)) == 4
    assert batch(lambda: last.losses.extend([5.0, 6.0])) == 2


def test_items_that_all_stages_have_added_are_not_added_twice() -> None:
    last, first = Net(), Net()
    behind, front = _around(last), _around(first)
    for module in (last, first):
        module.seen = [0]
    behind.begin("training_step", is_new=False)
    front.begin("training_step", is_new=False)
    first.seen.append(1)
    last.seen.extend([1, 2])
    front.take(behind.changes())
    assert first.seen == last.seen == [0, 1, 2]
