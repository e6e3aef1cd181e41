"""Programs that point ``data`` of parameters to other tensors and back again train as the reference."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.config import MixedPrecision
from lightning_zero.engine.engine import ZeroEngine
from tests import worlds
from tests.references import Case, TinyGPT, token_loss

DEPTH = 2


def _params(trainer: Any) -> list[nn.Parameter]:
    return list(trainer.module.parameters())


def averaged(trainer: Any, shadow: list[torch.Tensor]) -> None:
    """Read whole values while averages are swapped in."""
    params = _params(trainer)
    backup = [param.data for param in params]
    for param, average in zip(params, shadow, strict=True):
        param.data = average
    trainer.losses += [trainer.full_param(param).clone() for param in params]
    trainer.losses += [kept.clone() for kept in backup]
    for param, kept in zip(params, backup, strict=True):
        param.data = kept


def averaged_across_gathered(trainer: Any, shadow: list[torch.Tensor]) -> None:
    """What was kept in one ``gathered`` is given back in the next."""
    params = _params(trainer)
    with trainer.gathered(trainer.module, "all"):
        backup = [param.data for param in params]
        for param, average in zip(params, shadow, strict=True):
            param.data = average
    trainer.losses += [trainer.full_param(param).clone() for param in params]
    with trainer.gathered(trainer.module, "all"):
        for param, kept in zip(params, backup, strict=True):
            param.data = kept


def exchanged_in_a_unit(trainer: Any, shadow: list[torch.Tensor]) -> None:
    """The two lie in one buffer."""
    norm = trainer.module.blocks[0].norm
    norm.weight.data, norm.bias.data = norm.bias.data, norm.weight.data


def exchanged_between_units(trainer: Any, shadow: list[torch.Tensor]) -> None:
    """The two lie in different buffers."""
    one, other = trainer.module.blocks[0].up.weight, trainer.module.blocks[1].up.weight
    one.data, other.data = other.data, one.data


def exchanged_with_a_kept_one(trainer: Any, shadow: list[torch.Tensor]) -> None:
    """A view of what is kept is used, too."""
    weight = trainer.module.blocks[1].up.weight
    first_rows = weight.detach()[:2]
    weight.data = weight.data * 0.5
    trainer.losses.append(trainer.full_param(weight).clone())
    trainer.losses.append(first_rows.clone())


EDITS: dict[str, Callable[[Any, list[torch.Tensor]], None]] = {
    one.__name__.replace("_", "-"): one
    for one in (
        averaged, averaged_across_gathered, exchanged_in_a_unit, exchanged_between_units, exchanged_with_a_kept_one
    )
}  # fmt: skip
STAGES = {"open": (0, 1, 2), "gathered": (0, 1, 2, 3), "window": (0,)}  # elsewhere a segment is no whole value
CASES = [(name, where) for name in EDITS for where in STAGES if where != "gathered" or name.startswith("exchanged-b")]


def _program(edit: Callable[[Any, list[torch.Tensor]], None], where: str) -> Callable[[Any], None]:
    def program(trainer: Any) -> None:
        params = _params(trainer)
        stepper = torch.optim.AdamW(params, lr=1e-2, eps=1e-4, fused=True)
        trainer.attach(stepper)
        shadow = [torch.full(param.shape, 0.25) for param in params]

        def run(step: int) -> None:
            trainer.backward(token_loss(trainer.module, trainer.rank, step))

        for step in range(3):
            run(step)
            if where == "window":
                assert all(param.grad is not None for param in params)
                edit(trainer, shadow)
            stepper.step()
            stepper.zero_grad()
            if where != "window":
                with trainer.gathered(trainer.module, "all") if where == "gathered" else contextlib.nullcontext():
                    edit(trainer, shadow)

    return program


def _check(rank: int, world: int, name: str, where: str) -> dict[str, str]:
    stages = STAGES[where] if name != "averaged-across-gathered" else (0, 1, 2, 3)
    program = _program(EDITS[name], where)
    return Case(build=lambda: TinyGPT(depth=DEPTH), program=program, stages=stages, tolerance=1e-6).check(rank, world)


@pytest.mark.parametrize(("name", "where"), [case for case in CASES if case != ("averaged-across-gathered", "window")])
def test_data_that_is_pointed_elsewhere_leaves_kept_tensors_as_they_were(name: str, where: str) -> None:
    assert worlds.run(_check, 2, name, where) == [{}, {}]


def _keep_in_their_own_dtype(rank: int, world: int, stage: int, options: dict[str, Any]) -> bool:
    """Kept values are fp32 masters, and stay what they were, where parameters compute in 16 bits or are offloaded."""
    precision = MixedPrecision(compute_dtype=torch.bfloat16)
    engine = ZeroEngine(stage, units=["Block"], precision=precision, **options)
    module = engine.shard(TinyGPT(depth=DEPTH))
    engine.attach(torch.optim.SGD(module.parameters(), lr=0.1))
    params = list(module.parameters())
    if stage == 0:
        with torch.autocast("cpu", torch.bfloat16):
            token_loss(module, rank, 0).backward()
        assert all(param.grad is not None for param in params)
    before = [engine.full_param(param) for param in params]
    if stage == 0:  # in the step window
        assert all(param.grad is not None for param in params)
    with engine.gathered(module, "all") if stage else contextlib.nullcontext():
        kept = [param.data for param in params]
        for param in params:
            param.data = torch.zeros_like(param)
    assert all(not engine.full_param(param).any() for param in params)
    is_same = all(torch.equal(one, other) for one, other in zip(kept, before, strict=True))
    engine.close()
    return is_same


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("options", [{}, {"offload": "cpu"}], ids=["device", "cpu"])
def test_kept_data_stays_as_it_was_in_16_bits(stage: int, options: dict[str, Any]) -> None:
    assert worlds.run(_keep_in_their_own_dtype, 2, stage, options) == [True, True]
