from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero import LayerSpec, Pipeline, ZeroStrategy
from lightning_zero.moe import MoE, balance_experts
from tests import worlds
from tests.lightning_programs import Net, loader, seeded, trainer

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


# -- In a pipeline -----------------------------------------------------------------------------------------------------


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(H)
        self.moe = MoE(H, nn.Linear(H, H), E, k=2, bias_balancing=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.moe(self.norm(x))[0]
        return out


class Balanced(Net):
    """Keeps the biases behind each step."""

    def __init__(self, is_specified: bool) -> None:
        super().__init__(H)
        self.blocks = nn.ModuleList([LayerSpec(Mixture) if is_specified else Mixture() for _ in range(2)])
        self.biases: list[Tensor] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02)  # AdamW makes steps of rounding errors, and choices differ

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        balance_experts(self, rate=0.01)
        self.biases.append(torch.cat([_bias(block.moe).clone() for block in self.blocks]))  # type: ignore[arg-type]


def _biases(rank: int, world: int, pipeline: Pipeline | None, is_specified: bool) -> Tensor:
    module = seeded(lambda: Balanced(is_specified))
    trainer(rank, world, ZeroStrategy(stage=1, pipeline=pipeline), max_epochs=2).fit(module, loader(0, 1, size=16))
    return torch.stack(module.biases)


@pytest.mark.parametrize("is_specified", [False, True], ids=["blocks", "specified"])
def test_stages_balance_their_experts_as_a_whole_model(is_specified: bool) -> None:
    """A stage read the load of experts that another one had run, and was refused."""
    (expected,) = worlds.run(_biases, 1, None, is_specified)
    assert expected[-1].abs().max() > 0.01
    for found in worlds.run(_biases, 2, Pipeline(stages=2, microbatches=2, schedule="1f1b"), is_specified):
        assert torch.equal(found, expected)
