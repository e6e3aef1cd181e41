"""Moments in bf16 and int8: what they need, that losses stay, that nobody but the step sees them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_zero.checkpoint import directory
from lightning_zero.checkpoint.state import load_model_state, load_optimizer_state, model_state, optimizer_state
from lightning_zero.config import MixedPrecision, Moments
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.lightning.strategy import ZeroStrategy
from tests import worlds
from tests.references import Block, TinyGPT, token_loss
from tests.sampling import sample

STAGES = (0, 1, 2, 3)
BYTES = {"fp32": 8.0, "bf16": 4.0, "int8": 2 + 8 / 256}


def _engine(stage: int, moments: Moments, **options: Any) -> tuple[ZeroEngine, nn.Module]:
    worlds.seed()
    engine = ZeroEngine(stage, units=[Block], moments=moments, **options)
    return engine, engine.shard(TinyGPT())


def _steps(engine: ZeroEngine, module: nn.Module, optimizer: Any, rank: int, numbers: range) -> None:
    for number in numbers:
        token_loss(module, rank, number).backward()
        engine.clip_grad_norm(optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _weights(engine: ZeroEngine, module: nn.Module) -> list[Tensor]:
    return [engine.full_param(param) for param in module.parameters()]


# -- Losses ------------------------------------------------------------------------------------------------------------


def _losses(rank: int, world: int, stage: int, moments: Moments, num_steps: int) -> Tensor:
    """Train a small GPT on bytes of this project's source; return the losses, averaged over the ranks."""
    from examples.gpt.model import GPT, GPTConfig
    from examples.gpt.model import Block as Layer

    text = torch.tensor(list(Path(directory.__file__).read_bytes()))
    worlds.seed()
    engine = ZeroEngine(stage, units=[Layer], moments=moments)
    module = engine.shard(GPT(GPTConfig(width=64, depth=2, heads=2)))
    optimizer = engine.attach(torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.1))
    losses = []
    generator = torch.Generator().manual_seed(rank)
    for _ in range(num_steps):
        starts = torch.randint(len(text) - 33, (4, 1), generator=generator)
        batch = text[starts + torch.arange(33)]
        loss = F.cross_entropy(module(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.world(2)
@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [40, 200])
@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_loss_is_within_one_percent_of_fp32_moments(moments: Moments, num_steps: int) -> None:
    """The mean of the last 20 losses; both runs see the same batches."""
    ends = [
        torch.stack(worlds.run(_losses, 2, 3, setting, num_steps))[:, -20:].mean().item()
        for setting in ("fp32", moments)
    ]
    print(ends)
    assert ends[1] != ends[0]
    assert abs(ends[1] / ends[0] - 1) <= 0.01


# -- Memory ------------------------------------------------------------------------------------------------------------


def _bytes(rank: int, world: int, stage: int, moments: Moments) -> tuple[int, int]:
    engine = ZeroEngine(
        stage, units=["Linear"], moments=moments, precision=MixedPrecision(compute_dtype=torch.bfloat16)
    )
    module = engine.shard(nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False)))
    optimizer = engine.attach(torch.optim.AdamW(module.parameters()))
    with torch.autocast("cpu", torch.bfloat16):
        loss = module(torch.ones(1, 256)).sum()
    loss.backward()
    before = engine.stats().memory["optimizer"]
    optimizer.step()
    return before, engine.stats().memory["optimizer"]


@pytest.mark.parametrize("moments", BYTES)
@pytest.mark.parametrize("stage", sample(STAGES, 1, 3))
def test_memory_of_the_optimizer_is_that_of_the_setting(stage: int, moments: Moments) -> None:
    own = 2 * 256 * 256 / (2 if stage else 1)
    for masters, whole in worlds.run(_bytes, 2, stage, moments):
        assert masters == 4 * own
        assert abs(whole - (4 + BYTES[moments]) * own) <= 64  # numbers of steps


# -- What others see ---------------------------------------------------------------------------------------------------


def _state_dict(rank: int, world: int, stage: int, moments: Moments, deferred: bool) -> None:
    engine, module = _engine(stage, moments, step="deferred" if deferred else "now")
    optimizer = engine.attach(torch.optim.AdamW(module.parameters(), lr=0.01))
    _steps(engine, module, optimizer, rank, range(3))
    saved = optimizer.state_dict()
    assert {key for state in saved["state"].values() for key in state} == {"step", "exp_avg", "exp_avg_sq"}
    dtypes = {state[key].dtype for state in saved["state"].values() for key in ("exp_avg", "exp_avg_sq")}
    assert dtypes == {torch.float32}
    kept = {optimizer.state[param]["exp_avg"].dtype for param in module.parameters()}
    assert kept == {{"bf16": torch.bfloat16, "int8": torch.int8}[moments]}
    expected, weights = copy.deepcopy(saved), copy.deepcopy(_weights(engine, module))
    _steps(engine, module, optimizer, rank, range(3, 5))
    after = _weights(engine, module)
    # Back to where it was saved: the same bits again.
    for record, value in zip(engine.records(), weights, strict=True):
        record.master().copy_(value.reshape(-1)[slice(*record.own_range)])
    engine.internals.checkpoints.publish()
    optimizer.load_state_dict(expected)
    _steps(engine, module, optimizer, rank, range(3, 5))
    assert all(torch.equal(one, other) for one, other in zip(after, _weights(engine, module), strict=True))
    engine.internals.fits.detach()
    assert {value.dtype for state in optimizer.state.values() for value in state.values()} == {torch.float32}


@pytest.mark.parametrize("deferred", [False, True], ids=["at-once", "deferred"])
@pytest.mark.parametrize("moments", ["bf16", "int8"])
@pytest.mark.parametrize("stage", sample(STAGES, 3))
def test_state_dict_and_a_detached_optimizer_have_fp32_moments(stage: int, moments: Moments, deferred: bool) -> None:
    worlds.run(_state_dict, 2, stage, moments, deferred)


def _resume(rank: int, world: int, stage: int, path: str, moments: Moments, other: Moments) -> None:
    engine, module = _engine(stage, moments)
    optimizer = engine.attach(torch.optim.AdamW(module.parameters(), lr=0.01))
    _steps(engine, module, optimizer, rank, range(3))
    checkpoint = {
        "state_dict": model_state(engine, module),
        "optimizer_states": [optimizer_state(engine, optimizer)],
    }
    directory.save(engine, checkpoint, path, full=False)
    _steps(engine, module, optimizer, rank, range(3, 5))
    expected = _weights(engine, module)
    for setting in (moments, other):
        again, copied = _engine(stage, setting)
        stepper = again.attach(torch.optim.AdamW(copied.parameters(), lr=0.01))
        loaded = directory.load(again, path)
        load_model_state(again, copied, loaded["state_dict"])
        load_optimizer_state(again, [stepper], states=loaded["optimizer_states"])
        _steps(again, copied, stepper, rank, range(3, 5))
        found = _weights(again, copied)
        if setting == moments:
            assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))
        for one, two in zip(found, expected, strict=True):
            torch.testing.assert_close(one, two, rtol=0.05, atol=0.005)  # half of one step of lr


@pytest.mark.parametrize(("moments", "other"), [("int8", "fp32"), ("bf16", "int8"), ("fp32", "int8")])
@pytest.mark.parametrize("stage", sample(STAGES, 3))
def test_a_checkpoint_resumes_with_the_same_bits_and_loads_with_every_setting(
    stage: int, moments: Moments, other: Moments, tmp_path: Path
) -> None:
    worlds.run(_resume, 2, stage, str(tmp_path / "saved.ckpt"), moments, other)


def _unused(rank: int, world: int, stage: int) -> None:
    """A parameter without a gradient stays, and its neighbours' moments do not depend on it."""
    engine, module = _engine(stage, "int8")
    optimizer = engine.attach(torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.5))
    _steps(engine, module, optimizer, rank, range(1))
    frozen = module.blocks[0].norm.weight  # type: ignore[index, union-attr]
    before = engine.full_param(frozen)
    token_loss(module, rank, 1).backward()
    frozen.grad = None
    optimizer.step()
    assert torch.equal(engine.full_param(frozen), before)
    assert optimizer.state[frozen]["step"] == 1


@pytest.mark.parametrize("stage", sample(STAGES, 2))
def test_parameters_of_one_buffer_may_be_at_different_steps(stage: int) -> None:
    worlds.run(_unused, 2, stage)


# -- What is refused ---------------------------------------------------------------------------------------------------


class _Own(torch.optim.AdamW):
    """Somebody's own."""


REFUSED: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], str]] = {
    "sgd": (
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        "got `SGD`. Change that, or use",
    ),
    "own": (_Own, "got `_Own`. Use one of them, or `moments='fp32'`"),
    "for-loop": (lambda params: torch.optim.AdamW(params, fused=False), "`fused=False`"),
    "foreach": (lambda params: torch.optim.Adam(params, foreach=True), "`foreach=True`"),
    "amsgrad": (lambda params: torch.optim.Adam(params, amsgrad=True), "`amsgrad=True`"),
    "tensor-lr": (lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.1)), r"`lr=tensor\(0.1000\)`"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_optimizers_whose_moments_are_not_ours_are_refused(make: Any, message: str) -> None:
    engine, module = _engine(1, "int8")
    with pytest.raises(ValueError, match=message):
        engine.attach(make(module.parameters()))


def test_16_bit_values_that_are_stepped_are_refused() -> None:
    engine = ZeroEngine(1, moments="bf16", precision=MixedPrecision(masters=False))
    module = engine.shard(nn.Linear(4, 4).bfloat16())
    with pytest.raises(ValueError, match="`moments='bf16'` is for .* got torch.bfloat16 values of unit"):
        engine.attach(torch.optim.AdamW(module.parameters()))


def test_an_option_that_is_changed_later_is_refused_at_the_step() -> None:
    engine, module = _engine(1, "int8")
    optimizer = engine.attach(torch.optim.AdamW(module.parameters()))
    optimizer.param_groups[0]["amsgrad"] = True
    token_loss(module, 0, 0).backward()
    with pytest.raises(ValueError, match="`moments='int8'` is for .*`amsgrad=True`"):
        optimizer.step()


@pytest.mark.parametrize("make", [ZeroEngine, ZeroStrategy])
def test_a_setting_that_is_not_known_is_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="`moments='int4'` is not known. Use 'fp32', 'bf16' or 'int8'"):
        make(1, moments="int4")


def test_the_strategy_passes_the_setting_on_and_the_plan_says_it() -> None:
    assert ZeroStrategy(1, moments="int8").moments == "int8"
    engine, _ = _engine(1, "int8")
    assert any("moments int8" in line for line in engine.plan())
