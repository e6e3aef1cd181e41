"""An engine is kept as long as parameters, and modules with tensors, are where they were."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torchmetrics.classification import BinaryPrecisionRecallCurve

from lightning_zero.lightning.places import places_of


def _rename(module: nn.Sequential) -> None:
    module.encoder = module[0]
    del module[0]


def _swap(module: nn.Sequential) -> None:
    module[0].weight, module[1].weight = module[1].weight, module[0].weight


def _alias(module: nn.Sequential) -> None:
    module.again = module[0]


def _set(name: str, make: Callable[[], nn.Module]) -> Callable[[nn.Module], None]:
    return lambda module: module.add_module(name, make())


MOVES: dict[str, tuple[Callable[[nn.Sequential], None], bool]] = {
    "renamed": (_rename, False),
    "swapped": (_swap, False),
    "alias": (_alias, False),
    "buffers": (_set("2", lambda: nn.BatchNorm1d(3, affine=False)), False),
    "loss": (_set("2", nn.CrossEntropyLoss), True),
    "metric": (_set("2", lambda: BinaryPrecisionRecallCurve(thresholds=5)), True),
}


@pytest.mark.parametrize(("move", "is_kept"), MOVES.values(), ids=MOVES)
def test_places_are_those_of_modules_with_tensors(move: Callable[[nn.Module], None], is_kept: bool) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    before = places_of(module)
    with torch.no_grad():
        module[0].weight.zero_()
    assert places_of(module) == before
    move(module)
    assert (places_of(module) == before) is is_kept
