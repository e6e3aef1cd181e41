"""Fits under the strategy end with the weights that they have under ``strategy="ddp"``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import MixedPrecision

import lightning_zero
from lightning_zero.lightning.precision import LossScale
from tests.lightning_programs import STAGES, WORLD, Net, Sgd, assert_equal, loader, parity, seeded, trainer, weights
from tests.worlds import run

# -- Weights as under DDP ----------------------------------------------------------------------------------------------


def test_fit_equals_ddp() -> None:
    run(parity, WORLD)


def fit_on_three(rank: int, world: int) -> None:
    parity(rank, world, atol=1e-6, stages=(1, 3), loaders={"size": 36})


def test_fit_on_three_ranks_equals_ddp() -> None:
    run(fit_on_three, 3)


def fit_in(rank: int, world: int, precision: str, atol: float) -> None:
    make = Sgd if precision.startswith("16") else Net  # AdamW's epsilon is 0 in fp16: the reference divides by it
    ours = {"loss_scale": LossScale(init_scale=8.0)} if precision == "16-true" else {}  # so low that no step overflows
    parity(rank, world, make, atol=atol, ours=ours, precision=precision)


@pytest.mark.parametrize(
    ("precision", "atol"),
    [
        pytest.param("64-true", 0.0, marks=pytest.mark.slow),
        ("bf16-mixed", 1e-6),
        pytest.param("bf16-true", 0.05, marks=pytest.mark.slow),  # DDP steps bf16 weights, the engine fp32 masters
        ("16-true", 0.01),
    ],
)
def test_fit_in_other_precisions_equals_ddp(precision: str, atol: float) -> None:
    run(fit_in, WORLD, precision, atol)


def fit_fp16(rank: int, world: int) -> None:
    def plugins() -> list[Any]:
        return [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))]

    parity(rank, world, Sgd, atol=1e-3, plugins=plugins)


def test_fit_in_fp16_mixed_equals_ddp() -> None:
    run(fit_fp16, WORLD)


class OwnClipping(Sgd):
    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        if self.current_epoch == 1:
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


def clip(rank: int, world: int, case: str) -> None:
    if case == "overridden":
        parity(rank, world, OwnClipping, atol=1e-6)
    else:
        parity(rank, world, Sgd, atol=1e-6, gradient_clip_val=0.05, gradient_clip_algorithm=case)


@pytest.mark.parametrize("case", ["norm", "value", "overridden"])
def test_clipping_equals_ddp(case: str) -> None:
    run(clip, WORLD, case)


def accumulate(rank: int, world: int) -> None:
    parity(rank, world, atol=1e-6, accumulate_grad_batches=4, loaders={"size": 40, "batch": 2}, max_epochs=1)


def test_accumulation_equals_ddp_and_a_partial_last_window_steps() -> None:
    run(accumulate, WORLD)


def accumulate_by_schedule(rank: int, world: int) -> None:
    parity(rank, world, atol=1e-6, callbacks=lambda: GradientAccumulationScheduler({0: 1, 1: 3}))


def test_accumulation_scheduler_equals_ddp() -> None:
    run(accumulate_by_schedule, WORLD)


def own_weights(rank: int, world: int) -> None:
    for stage in STAGES:
        torch.manual_seed(100 + rank)
        module = Net()
        module.register_buffer("table", torch.full((3,), float(rank)))
        fitted = trainer(rank, world, stage, limit_train_batches=0)
        fitted.fit(module, loader(rank, world))
        torch.manual_seed(100)
        expected = dict(Net().named_parameters())
        got = weights(fitted)
        assert_equal({name: got[name] for name in expected}, expected, what=f"stage {stage}")
        assert torch.equal(module.table, torch.zeros(3))


def test_all_ranks_start_from_rank_zeros_weights_and_buffers() -> None:
    run(own_weights, WORLD)


# -- Collectives -------------------------------------------------------------------------------------------------------


def collectives(rank: int, world: int) -> None:
    fitted = trainer(rank, world, 3, max_epochs=1, limit_train_batches=1)
    fitted.fit(Net(), loader(rank, world))
    strategy = fitted.strategy
    assert strategy.broadcast({"rank": rank}) == {"rank": 0}
    assert strategy.reduce(torch.tensor(float(rank)), reduce_op="sum") == 1.0
    assert strategy.reduce(torch.tensor(float(rank))) == 0.5
    assert strategy.reduce(torch.tensor(rank + 1), reduce_op="sum") == 3
    assert strategy.reduce_boolean_decision(rank == 0, all=True) is False
    assert strategy.reduce_boolean_decision(rank == 0, all=False) is True
    tensor = torch.ones(2, requires_grad=True)
    gathered = strategy.all_gather(tensor * (rank + 1), sync_grads=True)
    assert gathered.shape == (2, 2)
    gathered.sum().backward()
    assert torch.equal(tensor.grad, torch.full((2,), 2.0 * (rank + 1)))  # type: ignore[arg-type]
    strategy.barrier()


def test_collectives_of_the_strategy_work_after_fit() -> None:
    run(collectives, WORLD)


def whole_values(rank: int, world: int) -> None:
    for stage in STAGES:
        fitted = trainer(rank, world, stage, max_epochs=1)
        module = seeded(Net)
        fitted.fit(module, loader(rank, world))
        expected = weights(fitted)
        with lightning_zero.gathered(module):
            inside = {name: p.detach().clone() for name, p in module.named_parameters()}
        assert_equal(inside, expected)
        with fitted.strategy.gathered(module.last.weight, write="rank0"):  # type: ignore[attr-defined]
            if rank == 0:
                module.last.weight.data.fill_(3.0)
        assert torch.equal(fitted.strategy.full_param(module.last.weight), torch.full((3, 6), 3.0))  # type: ignore[attr-defined]


def test_gathered_and_full_param_show_and_write_whole_values_after_fit() -> None:
    run(whole_values, WORLD)
