from __future__ import annotations

import pytest
from torch import nn

from lightning_zero.parallel.tensor.model_plan import model_plan
from lightning_zero.parallel.tensor.plan import Cut, TensorPlan
from tests.parallel.tensor.families import make


def test_plans_of_transformers_are_read() -> None:
    plan = model_plan(make("qwen3")[0])
    assert plan is not None
    assert plan.rules["model.layers.*.self_attn.q_proj"] == "column"
    assert plan.rules["model.layers.*.self_attn.q_norm"] == "partial"
    assert plan.rules["lm_head"] == "column_gather"


def test_matrices_of_experts_are_parameters() -> None:
    plan = model_plan(make("mixtral")[0])
    assert plan is not None
    assert plan.rules["model.layers.*.mlp.experts"] == "experts"
    assert plan.rules["model.layers.*.mlp.experts.gate_up_proj"] == Cut(-2, 2)
    assert plan.rules["model.layers.*.mlp.experts.down_proj"] == Cut(-1)


def test_a_plan_is_found_inside_of_a_module_around_the_model() -> None:
    around = nn.Module()
    around.net = make("llama")[0]
    plan = model_plan(around)
    assert plan is not None
    assert "net.model.layers.*.mlp.down_proj" in plan.rules


def test_a_model_without_a_plan_has_none() -> None:
    assert model_plan(make("hand-packed")[0]) is None


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.other = nn.Linear(2, 2), nn.Linear(2, 2)
        self._tp_plan = {"fc": "colwise", "other": "diagonal", "absent": "rowwise"}


def test_a_style_without_a_counterpart_is_refused_or_left_out() -> None:
    with pytest.raises(ValueError, match="has `other: 'diagonal'`, which has no counterpart here. Use `TensorParallel"):
        model_plan(Unknown())
    assert model_plan(Unknown(), skip_unknown=True) == TensorPlan({"fc": "column"})
