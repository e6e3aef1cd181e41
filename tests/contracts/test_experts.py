"""Mixtures of experts train under the engine as any module, with uneven tokens and with experts that get none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.config import MixedPrecision
from lightning_zero.engine.units.lowering import Lowering
from lightning_zero.moe import MoE
from tests import worlds
from tests.references import WIDTH, Case, TinyGPT, train
from tests.sampling import sample


class Block(nn.Module):
    """A residual mixture; keeps the auxiliary loss of its last forward."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        experts = [nn.Sequential(nn.Linear(WIDTH, 9), nn.GELU(), nn.Linear(9, WIDTH)) for _ in range(4)]
        if options.pop("loops", False):
            experts = [nn.Sequential(expert, nn.LayerNorm(WIDTH)) for expert in experts]
        self.moe = MoE(WIDTH, experts, 4, **options)
        self.aux_loss = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        out, self.aux_loss, _ = self.moe(self.norm(x))
        return x + out


class Routed(TinyGPT):
    """Its mixtures see other numbers of tokens on every rank; on one rank, in some steps, none at all."""

    def __init__(self, **options: Any) -> None:
        super().__init__(blocks=[Block(**options) for _ in range(2)])


def _loss(module: nn.Module, rank: int, step: int) -> Tensor:
    num_tokens = (3 * rank + 2 * step) % 6  # 0, 2, 4 and 3, 5, 1
    generator = torch.Generator().manual_seed(100 * rank + step)
    ids = torch.randint(0, 11, (2, num_tokens), generator=generator)
    logits = module(ids).flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, ids.flatten(), reduction="sum") / 10
    return loss + sum(0.1 * block.aux_loss for block in module.blocks)  # type: ignore[union-attr]


CASES: dict[str, dict[str, Any]] = {
    "top-1": {"k": 1},
    "top-2": {"k": 2},
    "dropping": {"k": 2, "drop_tokens": True, "capacity_factor": 0.7, "min_capacity": 1},
    "residual": {"k": 1, "use_residual": True},
    "loop": {"k": 1, "loops": True},
}


def _check(rank: int, world: int, name: str, micro_batches: int = 1) -> dict[str, str]:
    case = Case(
        build=lambda: Routed(**CASES[name]),
        program=lambda trainer: train(trainer, loss=_loss, steps=6, micro_batches=micro_batches),
    )
    with worlds.slow_collectives(0.002 * rank, seed=rank):
        return case.check(rank, world)


@pytest.mark.parametrize("name", sample(CASES, "top-1", "dropping", "loop"))
def test_mixtures_train_as_the_reference(name: str) -> None:
    assert worlds.run(_check, 2, name) == [{}, {}]


@pytest.mark.slow
def test_mixtures_train_under_accumulation() -> None:
    assert worlds.run(_check, 2, "top-2", 2) == [{}, {}]


def _find_units(rank: int, world: int, units: Any) -> dict[str, str]:
    """Train a mixture that is in no block, so that its parameters are in the units that are found."""

    def build() -> nn.Module:
        return nn.Sequential(Block(k=2), nn.Linear(WIDTH, WIDTH))

    def loss(module: nn.Module, rank: int, step: int) -> Tensor:
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        return module(x).square().mean() + module[0].aux_loss  # type: ignore[index]

    return Case(build=build, program=lambda trainer: train(trainer, loss=loss), units=units).check(rank, world)


@pytest.mark.parametrize("units", [None, ("MoE",), ("Experts",)], ids=str)
def test_mixtures_are_units_or_parts_of_them(units: Any) -> None:
    assert worlds.run(_find_units, 2, units) == [{}, {}]


def test_matrices_of_linear_experts_compute_in_16_bits_and_the_router_in_fp32() -> None:
    moe = Block(k=2).moe
    lowering = Lowering(moe, MixedPrecision(compute_dtype=torch.bfloat16))
    up = moe.experts.get_submodule("0")
    assert lowering.dtype(up.get_parameter("weight"), up, "weight") == torch.bfloat16
    assert lowering.dtype(up.get_parameter("bias"), up, "bias") == torch.float32
    assert lowering.dtype(moe.router.weight, moe.router, "weight") == torch.float32
