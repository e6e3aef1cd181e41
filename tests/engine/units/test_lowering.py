"""Which parameters compute in 16 bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from lightning_zero.config import MixedPrecision
from lightning_zero.engine.units.lowering import Lowering, is_lowered

BF16 = MixedPrecision(compute_dtype=torch.bfloat16)


class _MyLinear(nn.Linear):
    """Computes as its base."""


class _Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.weight.norm()


class _Conv(nn.Conv2d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight / weight.norm(), bias)


class _Wide(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.extra = nn.Parameter(torch.zeros(2, 2))


@pytest.mark.parametrize(
    ("module", "key", "expected"),
    [
        (nn.Linear(2, 2), "weight", True), (_MyLinear(2, 2), "weight", True), (_Scaled(2, 2), "weight", False),
        (_Wide(), "weight", True), (_Wide(), "extra", False), (nn.Embedding(2, 2), "weight", True),
        (nn.Embedding(2, 2, max_norm=1.0), "weight", False), (nn.Embedding(2, 2, sparse=True), "weight", False),
        (nn.EmbeddingBag(2, 2), "weight", False), (nn.Conv2d(1, 1, 1), "weight", True),
        (nn.ConvTranspose1d(1, 1, 1), "weight", True), (_Conv(1, 1, 1), "weight", False),
        (nn.MultiheadAttention(2, 1), "in_proj_weight", True),
        (nn.MultiheadAttention(2, 1, add_bias_kv=True), "bias_k", False), (nn.LayerNorm((2, 2)), "weight", False),
        (nn.LSTM(2, 2), "weight_ih_l0", False), (nn.GRUCell(2, 2), "weight_ih", False),
        (nn.Bilinear(2, 2, 2), "weight", False),
        (parametrizations.orthogonal(nn.Linear(2, 2)).parametrizations.weight, "original", False),  # type: ignore[union-attr]
    ],
)  # fmt: skip
def test_what_is_known_to_go_into_a_lowered_operation_is_lowered(module: nn.Module, key: str, expected: bool) -> None:
    assert is_lowered(module, key) is expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_only_fp32_matrices_are_lowered(dtype: torch.dtype) -> None:
    module = nn.Linear(2, 2)
    assert Lowering(module, BF16).dtype(module.weight, module, "weight") == torch.bfloat16
    assert Lowering(module, BF16).dtype(module.bias, module, "bias") == torch.float32
    assert Lowering(module.to(dtype), BF16).dtype(module.weight, module, "weight") == dtype


def test_a_tied_matrix_is_lowered_if_it_is_in_all_of_its_modules() -> None:
    module = nn.Sequential(nn.Embedding(2, 2), nn.Linear(2, 2), _Scaled(2, 2))
    module[1].weight = module[0].weight
    assert Lowering(module, BF16).dtype(module[0].weight, module[0], "weight") == torch.bfloat16
    module[2].weight = module[0].weight
    lowering = Lowering(module, BF16)
    assert lowering.dtype(module[0].weight, module[0], "weight") == torch.float32
    assert lowering.kept == {"Embedding": 4}
