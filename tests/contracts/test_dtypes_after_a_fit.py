"""After a fit in mixed precision the module is as DDP leaves it: parameters in their own dtype, with their values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.lightning_programs import STAGES, WORLD, Net, loader, seeded, trainer, weights
from tests.worlds import run


class _Watched(Net):
    """Notes what its hooks see."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_fit_end(self) -> None:
        self.seen.append({param.dtype for param in self.parameters()})


def _is_as_saved(module: torch.nn.Module, of: Any, stage: int) -> bool:
    saved = weights(of)
    with of.strategy.gathered(module):
        state = {name: param.detach().clone() for name, param in module.named_parameters()}
    whole = stage == 3 or all(torch.equal(param, saved[name]) for name, param in module.named_parameters())
    return whole and all(torch.equal(value, saved[name]) for name, value in state.items())


def _after(rank: int, world: int, stage: int) -> None:
    from lightning_zero.lightning.strategy import ZeroStrategy

    def make(precision: str) -> Any:
        return trainer(rank, world, ZeroStrategy(stage=stage), precision=precision)

    module = seeded(_Watched)
    first = make("bf16-mixed")
    first.fit(module, loader(rank, world))
    fp32 = {torch.float32}
    assert module.seen == [fp32]
    assert {param.dtype for param in module.parameters()} == fp32
    assert _is_as_saved(module, first, stage)
    batch = next(iter(loader(rank, world)))
    plain = seeded(_Watched)
    plain.load_state_dict(weights(first), strict=False)
    assert torch.equal(module(batch[0]), plain(batch[0]))
    first.validate(module, loader(rank, world))
    assert {param.dtype for param in module.parameters()} == fp32
    second = make("bf16-mixed")
    second.fit(module, loader(rank, world))
    assert {param.dtype for param in module.parameters()} == fp32
    third = make("32-true")
    third.fit(module, loader(rank, world))
    make("bf16-mixed").validate(module, loader(rank, world))
    make("bf16-mixed").predict(module, loader(rank, world))
    assert {param.dtype for param in module.parameters()} == fp32


@pytest.mark.parametrize("stage", STAGES)
def test_a_module_has_its_own_dtype_after_a_run_of_the_trainer(stage: int) -> None:
    run(_after, WORLD, stage)
