"""Which forwards count, and the values that are made of them."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from lightning_zero.moe import MoE
from lightning_zero.moe.loads import ExpertLoads, LayerLoad

WIDTH, EXPERTS, TOKENS = 6, 4, 10


def layer(**options: Any) -> MoE:
    torch.manual_seed(0)
    experts = [nn.Sequential(nn.Linear(WIDTH, 5), nn.GELU(), nn.Linear(5, WIDTH)) for _ in range(EXPERTS)]
    return MoE(WIDTH, experts, EXPERTS, **{"k": 2, **options})


def counting(module: nn.Module) -> ExpertLoads:
    loads = ExpertLoads(module, lambda mine: [mine])
    loads.is_counting = True
    return loads


def read(loads: ExpertLoads) -> dict[str, LayerLoad]:
    return loads.read(lambda total: total, torch.device("cpu"))


class Routed(nn.Module):
    """Experts that are called as those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        found = torch.einsum("th,tkho->tko", hidden_states, self.weight[top_k_index.clamp(0, EXPERTS - 1)])
        return (found * top_k_weights.unsqueeze(-1)).sum(1)


def test_sums_of_forwards_are_loads_shares_and_means() -> None:
    load = LayerLoad.of([6.0, 2.0, 0.0, 0.0, 7.0, 4.0, 4 * math.log(2), 2.0, 2.5])
    assert load is not None
    assert load.load == [3.0, 1.0, 0.0, 0.0]
    assert load.max_over_mean == 3.0
    assert load.dropped == pytest.approx(1 / 8)
    assert load.router_entropy == pytest.approx(math.log(2))
    assert load.aux_loss == 1.25
    assert LayerLoad.of([0.0] * 9) is None


def test_a_layer_counts_its_tokens_as_it_returns_them() -> None:
    moe = layer(drop_tokens=True, capacity_factor=0.5, min_capacity=0)
    loads = counting(moe)
    _, aux_loss, counts = moe(torch.randn(TOKENS, WIDTH))
    (found,) = read(loads).values()
    assert list(found.load) == pytest.approx((counts / counts.float().mean()).tolist())
    assert found.aux_loss == pytest.approx(aux_loss.item())
    capacity = math.ceil(0.5 * 2 * TOKENS / EXPERTS)
    assert found.dropped == pytest.approx(float((counts - capacity).clamp(min=0).sum()) / (2 * TOKENS))
    assert found.dropped > 0
    assert read(loads) == {}


def test_unused_tokens_do_not_count() -> None:
    moe, x = layer(), torch.randn(TOKENS, WIDTH)
    loads = counting(moe)
    moe(x, torch.arange(TOKENS) < 4)
    found = read(loads)[""]
    moe(x[:4])
    expected = read(loads)[""]
    assert found.load == expected.load
    assert found.router_entropy == pytest.approx(expected.router_entropy)
    moe(x, torch.zeros(TOKENS))
    moe(x[:0])
    assert read(loads) == {}


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_forward_counts_once(reentrant: bool) -> None:
    moe = layer()
    loads = counting(moe)
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    checkpoint(lambda one: moe(one)[0], x, use_reentrant=reentrant).sum().backward()
    sums = loads._layers[""].sums
    assert sums is not None
    assert sums[:EXPERTS].sum() == sums[EXPERTS] == 2 * TOKENS


def test_only_forwards_that_are_to_count_do() -> None:
    moe = layer()
    loads = counting(moe)
    loads.is_counting = False
    moe(torch.randn(TOKENS, WIDTH))
    loads.is_counting = True
    copy.deepcopy(moe)(torch.randn(TOKENS, WIDTH))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        copy.deepcopy(moe)
        loads._layers[""].count_routing(moe.router, (), moe.router(mode.from_tensor(torch.randn(TOKENS, WIDTH))))
    assert read(loads) == {}
    loads.remove()
    assert not [hook for child in moe.modules() for hook in (*child._forward_hooks, *child._forward_pre_hooks)]


def test_compiled_layers_count_outside_of_their_graphs() -> None:
    moe, x = layer(), torch.randn(TOKENS, WIDTH)
    loads = counting(moe)
    moe(x)
    expected = read(loads)
    compiled = torch.compile(moe, backend="eager")
    compiled(x)
    assert read(loads) == expected
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="`ZeroMonitor` counts choices of experts there. Leave out"):
        torch.compile(moe, backend="eager", fullgraph=True)(x)


def test_experts_of_unmodified_models_count_choices_that_are_experts() -> None:
    model = nn.ModuleDict({"mlp": Routed()})
    loads = counting(model)
    choices = torch.tensor([[0, 1], [0, 3], [-1, EXPERTS]])
    model["mlp"](torch.randn(3, WIDTH), top_k_index=choices, top_k_weights=torch.rand(3, 2))
    assert read(loads) == {"mlp": LayerLoad([2.0, 1.0, 0.0, 1.0])}


def test_layers_of_other_ranks_are_read_by_all() -> None:
    moe = layer()
    loads = ExpertLoads(nn.ModuleDict({"mine": moe}), lambda mine: [{"other": 3}, mine])
    loads.is_counting = True
    moe(torch.randn(TOKENS, WIDTH))
    other = torch.tensor([1.0, 2.0, 3.0] + [0.0] * 5)
    found = loads.read(lambda total: total + nn.functional.pad(other, (0, len(total) - 8)), torch.device("cpu"))
    assert found["other"] == LayerLoad([0.5, 1.0, 1.5])
    assert sum(found["mine"].load) == pytest.approx(EXPERTS)


def test_a_module_without_experts_makes_no_collective() -> None:
    loads = counting(nn.Linear(2, 2))
    assert loads.read(lambda total: pytest.fail("a collective"), torch.device("cpu")) == {}
