from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.forecast.dry_run import DryRun
from lightning_zero.lightning.tensor_training import TensorTraining
from lightning_zero.lightning.trials import trials_with_values
from lightning_zero.moe.routed import RoutedExperts

MANY = 4096


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(MANY))
        self.table = torch.ones(MANY)
        self.weight = nn.Parameter(torch.ones(MANY))


def test_plans_are_made_with_values_and_counted_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(training: Any, module: Any, whole: Any) -> list[float]:
        return [float(torch.full((MANY,), 3.0).sum()), float(module.mask.sum()), float(module.table.sum())]

    monkeypatch.setattr(TensorTraining, "_agreed_plan", plan)
    counter = DryRun()
    plans: list[Any] = []
    with trials_with_values(counter, plans), counter:
        module: Any = Masked()
        assert float(module.mask.sum()) == 0  # it has no values
        live = counter.live
        total, mask, table = TensorTraining._agreed_plan(Mock(), module, ())
        assert counter.live == live
        assert TensorTraining._agreed_plan(Mock(), Mock(), ()) is plans[0]  # again, without a trial
    assert total == 3 * MANY
    assert 0 < mask < MANY
    assert 0 < table < MANY
    assert TensorTraining._agreed_plan is plan


class Normed(nn.Module):
    """Experts whose result is no sum of those of single ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 64, 64))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        chosen = self.weight[top_k_index] * top_k_weights[..., None, None]
        return nn.functional.normalize(torch.einsum("th,tkhd->td", hidden_states, chosen))


def test_experts_are_tried_with_values() -> None:
    counter = DryRun()
    with trials_with_values(counter, []), counter:
        experts = RoutedExperts.of(Normed())
        assert experts is not None
        with pytest.raises(ValueError, match="its result is not the sum of the results of single experts"):
            experts.verify("mlp.experts")
