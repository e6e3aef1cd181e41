from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from lightning_zero.parallel.tensor.cuts import Sections
from lightning_zero.parallel.tensor.plan import Cut, Packed, Rule, TensorPlan
from lightning_zero.parallel.tensor.resolution import resolve


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(12, 6)
        self.qkv = nn.Linear(6, 18)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 12)
        self.head.weight = self.emb.weight


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        ({"qvk": "column"}, ValueError, "`TensorPlan` names `qvk`, but no module or parameter has a name like it. Did"),
        ({"norm": "column"}, TypeError, "`TensorPlan` has `norm: 'column'`, and `norm` is a `LayerNorm`. This rule is"),
        ({"qkv": "vocab"}, TypeError, "This rule is for an `nn.Embedding`"),
        ({"qkv": "attention"}, TypeError, "This rule is for an `nn.MultiheadAttention`"),
        ({"qkv": Cut(0)}, TypeError, "name a parameter to cut one of another module"),
        ({"qkv.weight": "row"}, TypeError, r"is a parameter of shape \(18, 6\). Use 'partial', or `Cut\(dim\)`"),
        ({"qkv.bias": Cut(1)}, TypeError, "with one of its dimensions"),
        ({"qkv": Packed([6, 6])}, ValueError, r"sections of \[6, 6\], 12 together, and it has 18 features"),
        ({"qkv": Packed(4)}, ValueError, "cuts `qkv` into 4 equal sections, and it has 18 features"),
        (
            {"head": "column_gather"},
            ValueError,
            r"cuts a tied parameter differently under its names: `emb.weight` \(wh",
        ),
    ],
)
def test_plans_that_do_not_fit_are_refused(rules: dict[str, Rule], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        resolve(Model(), TensorPlan(rules), 2)


def test_a_size_that_does_not_divide_is_refused() -> None:
    message = (
        r"`tensor_parallel` of size 4 cannot divide `qkv.weight` of shape \(18, 6\): its dimension 0 has sections of"
    )
    with pytest.raises(ValueError, match=message):
        resolve(Model(), TensorPlan({"qkv": Packed(3)}), 4)


def test_tied_parameters_are_cut_on_both_sides() -> None:
    found = resolve(Model(), TensorPlan({"emb": "vocab", "head": "column_gather"}), 2)
    assert found.sections["emb.weight"] == found.sections["head.weight"] == Sections(0, (12,))


def test_the_last_matching_pattern_counts() -> None:
    found = resolve(Model(), TensorPlan({"*": "partial", "qkv": "row"}), 2)
    assert found.sections == {"qkv.weight": Sections(1, (6,))}
    assert "norm.weight" in found.partial


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
@pytest.mark.parametrize("rule", ["column", "row"])
def test_a_weight_that_is_computed_is_refused_by_name(norm: Any, rule: Any) -> None:
    module = nn.ModuleDict({"up": norm(nn.Linear(4, 4))})
    with pytest.raises(ValueError, match="`TensorPlan` names `up`, whose `weight` is computed"):
        resolve(module, TensorPlan({"up": rule}), 2)
