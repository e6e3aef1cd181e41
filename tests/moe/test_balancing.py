from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_zero.moe import MoE, balance_experts
from tests import worlds

H, E = 6, 4


def _layer() -> MoE:
    torch.manual_seed(0)
    return MoE(H, nn.Linear(H, H), E, k=2, bias_balancing=True)


def _bias(moe: MoE) -> torch.Tensor:
    assert moe.router.expert_bias is not None
    return moe.router.expert_bias


def test_biases_move_against_the_load() -> None:
    moe = _layer()
    _, _, counts = moe(torch.randn(50, H))
    balance_experts(nn.Sequential(moe), rate=0.25)
    assert torch.equal(_bias(moe), 0.25 * (counts.double().mean() - counts).sign().float())
    balance_experts(moe)  # nothing since
    assert _bias(moe).abs().max() == 0.25


def test_loads_become_even() -> None:
    moe, x = _layer(), torch.randn(400, H) + 1.0
    shares = []
    for _ in range(300):
        shares.append(moe(x)[2] / 800)
        balance_experts(moe, rate=0.01)
    assert shares[0].max() - shares[0].min() > 0.3
    assert shares[-1].max() - shares[-1].min() < 0.1


def test_evaluation_and_layers_without_a_bias_count_nothing() -> None:
    moe = _layer().eval()
    moe(torch.randn(50, H))
    balance_experts(moe)
    assert not _bias(moe).any()
    balance_experts(MoE(H, nn.Linear(H, H), E))


def _balance(rank: int, world: int) -> tuple[list[float], list[int]]:
    moe = _layer()
    counts = moe(torch.randn(20 * rank, H, generator=torch.Generator().manual_seed(rank)))[2]
    balance_experts(moe, rate=1.0)
    dist.all_reduce(counts)
    return _bias(moe).tolist(), counts.tolist()


def test_tokens_of_all_ranks_count() -> None:
    results = worlds.run(_balance, 2)
    assert results[0] == results[1]
    bias, counts = results[0]
    mean = sum(counts) / E
    assert bias == [float((count < mean) - (count > mean)) for count in counts]


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_biases_of_other_dtypes_move_too(kind: torch.dtype) -> None:
    moe = _layer().to(kind)
    moe(torch.randn(50, H).to(kind))
    balance_experts(moe, rate=0.25)
    assert _bias(moe).any()
