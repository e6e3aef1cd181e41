"""Space between and behind parameters is zero and stays zero, whatever the sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.engine.buffers.parameter import ReleasedParameter
from tests import worlds
from tests.references import Case, Sharded, train
from tests.sampling import sample

SIZES = [(1,), (), (3,), (0,), (5, 7), (33,), (2, 3, 5), (31,), (64,)]


class Sizes(nn.Module):
    """Parameters of every awkward size."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.ParameterList([nn.Parameter(torch.randn(size)) for size in SIZES])

    def forward(self, x: Tensor) -> Tensor:
        return sum((value * x).sin().square().sum() for value in self.values)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Sizes(), Sizes()])

    def forward(self, x: Tensor) -> Tensor:
        return self.parts[1](x) + self.parts[0](x)


def _loss(module: nn.Module, rank: int, step: int) -> Tensor:
    return module(torch.tensor(1.0 + 0.1 * rank + 0.01 * step))


def _program(trainer: Any) -> None:
    train(trainer, loss=_loss, max_norm=None)


def _parity(rank: int, world: int) -> dict[str, str]:
    return Case(build=Stack, program=_program, units=("Sizes",), tolerance=0.0 if world < 3 else 1e-6).check(
        rank, world
    )


@pytest.mark.parametrize("world", sample([1, 2, 3, 4], 3))
def test_awkward_sizes_train_as_the_reference(world: int) -> None:
    assert worlds.run(_parity, world) == [{}] * world


def _padding(rank: int, world: int, stage: int) -> tuple[bool, float, float]:
    """Return whether the space around parameters and master segments is zero, the engine's norm and the true one."""
    trainer = Sharded(Stack(), rank, world, stage=stage, units=("Sizes",))
    train(trainer, loss=_loss, optimizer=lambda m: torch.optim.AdamW(m.parameters(), weight_decay=0.5, fused=True))
    clean = True
    storages: dict[int, tuple[torch.UntypedStorage, list[tuple[int, int]]]] = {}
    for record in trainer.engine.records():
        for tensor in (record.master(), record.parameter):
            if not isinstance(tensor, ReleasedParameter):
                storage = tensor.untyped_storage()
                storages.setdefault(storage._cdata, (storage, []))[1].append((tensor.storage_offset(), tensor.numel()))
    for storage, pieces in storages.values():
        values = torch.tensor([], dtype=torch.float32).set_(storage).clone()
        for offset, numel in pieces:
            values[offset : offset + numel] = 0.0
        clean = clean and bool((values == 0).all())
    with trainer.scope():
        loss = _loss(trainer.module, rank, 9)
    trainer.backward(loss)
    norm = trainer.engine.grad_norm().item()
    gradients = [trainer.full_grad(parameter) for parameter in trainer.module.parameters()]
    true = torch.cat([gradient.flatten() for gradient in gradients if gradient is not None]).double().norm().item()
    trainer.engine.close()
    return clean, norm, true


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_padding_is_zero_and_adds_nothing_to_the_norm(world: int, stage: int) -> None:
    for clean, norm, true in worlds.run(_padding, world, stage):
        assert clean
        assert norm == pytest.approx(true, rel=1e-6)
