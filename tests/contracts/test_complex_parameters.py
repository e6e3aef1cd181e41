"""Complex parameters train as on a replica: both parts of their gradients are reduced, normed and stepped."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.engine.engine import ZeroEngine
from tests import worlds
from tests.references import Case, train
from tests.sampling import highest_stages

WIDTH = 4


class Block(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=dtype))
        self.shift = nn.Parameter(torch.randn(WIDTH, dtype=dtype))
        self.frozen = nn.Parameter(torch.randn(WIDTH, dtype=dtype), requires_grad=False)
        self.real = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = (x.to(self.mix.dtype) * self.frozen) @ self.mix + self.shift
        return torch.tanh(self.real(x)) + mixed.abs().to(x.dtype)


def _loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * rank + step)
    loss: torch.Tensor = module(torch.randn(3, WIDTH, generator=generator)).square().mean()
    return loss


def _adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-4)


def _sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=1e-2, momentum=0.9)


def _case(dtype: torch.dtype = torch.complex64, options: dict[str, Any] | None = None, **kwargs: Any) -> Case:
    return Case(
        build=lambda: nn.Sequential(Block(dtype), Block(dtype)),
        program=lambda trainer: train(trainer, loss=_loss, **{"optimizer": _adamw, **kwargs}),
        units=("Block",),
        tolerance=1e-6,
        options=options or {},
    )


CASES = {
    "adamw": _case(),
    "sgd": _case(optimizer=_sgd),
    "complex128": _case(torch.complex128),
    "accumulated": _case(micro_batches=2),
    "clipped": _case(max_norm=0.3),
    "deferred": _case(options={"step": "deferred"}),
    "cpu": _case(options={"offload": "cpu"}),
}


def _check(rank: int, world: int, name: str, stages: tuple[int, ...], options: dict[str, Any]) -> dict[str, str]:
    case = CASES[name]
    return dataclasses.replace(case, stages=stages, options={**case.options, **options}).check(rank, world)


@pytest.mark.parametrize(("name", "stages"), highest_stages(CASES))
def test_complex_parameters_train_as_on_a_replica(name: str, stages: tuple[int, ...]) -> None:
    assert worlds.run(_check, 2, name, stages, {}) == [{}] * 2


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("name", ["adamw", "clipped"])
def test_complex_parameters_train_on_any_number_of_ranks(name: str, world: int) -> None:
    assert worlds.run(_check, world, name, (0, 1, 2, 3), {}) == [{}] * world


def _on_disk(rank: int, world: int, folder: str) -> None:
    engine = ZeroEngine(3, units=("Block",), offload={"optimizer": "nvme", "path": folder})
    module = engine.shard(nn.Sequential(Block(torch.complex64)))
    with pytest.raises(ValueError, match=r"nvme.*torch.complex64 values.*Offload\(optimizer='cpu'\)"):
        engine.attach(_adamw(module))
    engine.close()


def test_steps_of_complex_parameters_on_disks_are_refused_by_name(tmp_path: Path) -> None:
    worlds.run(_on_disk, 2, str(tmp_path))
