"""Floating-point operations of operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import MixtralConfig, MixtralForCausalLM

from lightning_zero.flop_formulas import FlopTotal, flops_of
from lightning_zero.lightning.flops import FlopCount
from lightning_zero_ops import linear_cross_entropy
from lightning_zero_ops.grouped import empty_grouped_mm, grouped_linear

_aten = torch.ops.aten


def _products(x: Tensor) -> Tensor:
    return F.linear(F.conv1d(x, x.new_ones(4, 4, 3), padding=1), x.new_ones(8, x.shape[-1])).square().sum()


def test_operations_are_those_of_the_counter_of_pytorch() -> None:
    x = torch.ones(2, 4, 16, requires_grad=True)
    with FlopCounterMode(display=False) as expected:
        _products(x).backward()
    with FlopTotal() as found:
        _products(x).backward()
    assert found.flops == expected.get_total_flops() > 0


@pytest.mark.parametrize("name", ["flash_attention", "efficient_attention", "cudnn_attention"])
def test_attention_with_fewer_heads_of_keys_counts_those_of_the_queries(name: str) -> None:
    q, k = torch.ones(2, 4, 16, 8), torch.ones(2, 2, 16, 8)
    forward = getattr(_aten, f"_scaled_dot_product_{name}").default
    backward = getattr(_aten, f"_scaled_dot_product_{name}_backward").default
    product = 2 * (2 * 4) * 16 * 16 * 8
    assert flops_of(forward, (q, k, k), {}, q) == 2 * product
    assert flops_of(backward, (q, q, k, k), {}, q) == 5 * product


def test_attention_of_the_cpu_counts_as_that_of_other_devices() -> None:
    q, k, v = (torch.ones(2, 3, 16, 8, requires_grad=True) for _ in range(3))
    with FlopTotal() as found:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    product = 2 * (2 * 3) * 16 * 16 * 8
    assert found.flops == (2 + 5) * product


def test_a_formula_that_fails_warns_and_counts_nothing() -> None:
    with pytest.warns(RuntimeWarning, match="The operations of `mm` are not counted"):
        assert flops_of(_aten.mm.default, (torch.ones(2), torch.ones(2)), {}, None) == 0


def test_experts_of_a_mixtral_count_their_products() -> None:
    config = MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    ids = torch.arange(24).view(2, 12) % 32
    experts, whole = FlopTotal(), FlopTotal()
    with whole:
        loss = model(ids, labels=ids, use_cache=False).loss
    mlp = model.model.layers[0].mlp
    hidden = torch.randn(2, 12, 16, requires_grad=True)
    with experts:
        out = mlp(hidden)
        forward = experts.flops
        (out[0] if isinstance(out, tuple) else out).sum().backward()
    router, rows = 2 * 24 * 16 * 4, 24 * 2
    assert forward == router + 2 * rows * 3 * 16 * 32
    assert experts.flops == 3 * forward
    assert whole.flops > forward
    assert loss.isfinite()


def test_this_package_s_ops_count_their_products() -> None:
    x, weight = torch.ones(6, 4, requires_grad=True), torch.ones(2, 8, 4, requires_grad=True)
    with FlopTotal() as found:
        grouped_linear(x, weight, None, torch.tensor([2, 6], dtype=torch.int32)).sum().backward()
    assert found.flops == 3 * 2 * 6 * 4 * 8
    head = torch.ones(10, 4, requires_grad=True)
    with FlopTotal() as found:
        linear_cross_entropy(x, head, torch.zeros(6, dtype=torch.long)).backward()
    assert found.flops == 3 * 2 * 6 * 4 * 10
    with FlopTotal() as found, torch.no_grad():
        linear_cross_entropy(x, head, torch.zeros(6, dtype=torch.long))
    assert found.flops == 2 * 6 * 4 * 10


def test_recurrent_layers_count_their_products() -> None:
    layer = nn.LSTM(4, 8, num_layers=2, bidirectional=True, batch_first=True)
    x = torch.ones(3, 5, 4)
    weights = [param for param in layer.parameters() if param.dim() == 2]
    forward = 2 * 15 * sum(weight.numel() for weight in weights)
    with FlopTotal() as found:
        layer(x)[0].sum().backward()
    assert found.flops == pytest.approx(3 * forward, rel=0.2)  # the first state and the input have no gradients
    settings = (2, 8, 0, 2, True, 0.0, True, True, [], None)
    arguments: tuple[Any, ...] = (x, list(layer.parameters()), 4, None, torch.ones(4, 3, 8), None, *settings)
    assert flops_of(_aten._cudnn_rnn.default, arguments, {}, x) == forward


@pytest.mark.parametrize("make", [FlopTotal, FlopCount])
def test_products_in_inference_mode_are_counted(make: Any) -> None:
    layer, x = nn.Linear(4, 8), torch.ones(3, 4)
    with make() as found, torch.inference_mode():
        layer(x).softmax(-1).relu()
    assert (found.flops if make is FlopTotal else found.forward + found.other) == 2 * 3 * 4 * 8


def test_a_grouped_product_has_rows_columns_or_matrices_in_groups() -> None:
    offs = torch.tensor([2, 6])
    rows, columns, experts = torch.empty(6, 4), torch.empty(4, 6), torch.empty(2, 4, 8)
    assert empty_grouped_mm(rows, experts, offs).shape == (6, 8)
    assert empty_grouped_mm(columns, torch.empty(6, 8), offs=offs).shape == (2, 4, 8)
    assert empty_grouped_mm(torch.empty(2, 3, 4), experts).shape == (2, 3, 8)
    grouped = _aten._grouped_mm.default
    assert flops_of(grouped, (rows, experts, offs), {}, None) == 2 * 6 * 4 * 8
    assert flops_of(grouped, (columns, torch.empty(6, 8), offs), {}, None) == 2 * 4 * 6 * 8
    assert flops_of(grouped, (torch.empty(2, 3, 4), experts), {}, None) == 2 * 2 * 3 * 4 * 8
