"""After a fit in mixed precision the module is as DDP leaves it: parameters in their own dtype, with their values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.lightning_programs import STAGES, WORLD, Net, assert_equal, data, loader, seeded, trainer, weights
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


def _fit_converted(rank: int, world: int, stage: int, dtype: torch.dtype) -> None:
    batches = TensorDataset(*(tensor.to(dtype) for tensor in data().tensors))
    module, plain = seeded(Net), seeded(Net)
    first = trainer(rank, world, stage, max_epochs=1)
    first.fit(module, loader(rank, world))
    plain.load_state_dict(weights(first))
    del first
    ended = []
    for one in (module, plain):
        again = trainer(rank, world, stage, max_epochs=1)
        again.fit(one.to(dtype), loader(rank, world, dataset=batches))
        ended.append(weights(again))
        assert {param.dtype for param in one.parameters()} == {dtype}
    assert_equal(*ended)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stage", STAGES[:3])
def test_a_module_that_is_converted_between_two_runs_trains_in_its_new_dtype(stage: int, dtype: torch.dtype) -> None:
    """The engine that the module kept copied the values back into its own dtype, in silence."""
    run(_fit_converted, WORLD, stage, dtype)


class _CastingBias(nn.Linear):
    """Casts its bias for good, as layers of bitsandbytes do."""

    def forward(self, input: Tensor) -> Tensor:
        if self.bias.dtype != input.dtype:
            self.bias.data = self.bias.data.to(input.dtype)
        return nn.functional.linear(input, self.weight.to(input.dtype), self.bias)


class _Casting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(_CastingBias(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x.to(torch.bfloat16)).float() if isinstance(block, _CastingBias) else block(x)
        return self.last(x)


def _fit_casting(rank: int, world: int) -> list[int]:
    module, kept = seeded(_Casting), []
    for _ in range(4):
        one = trainer(rank, world, 1, max_epochs=1)
        one.fit(module, loader(rank, world), loader(rank, world))
        kept.append(one.strategy.engine)
        assert module.blocks[2].bias.dtype == torch.bfloat16
        assert module.blocks[2].weight.dtype == torch.float32
    return [kept.index(engine) for engine in kept]


def test_a_layer_that_casts_its_bias_is_sharded_anew_once() -> None:
    """As under DDP its bias stays as the layer has cast it; the engine of the second run is kept."""
    assert run(_fit_casting, 1) == [[0, 1, 1, 1]]
