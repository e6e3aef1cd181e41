"""Steps over flat ranges: which optimizers, what the op is given, that PyTorch's interface stays."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.config import Communication, MixedPrecision, Offload
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.optim.flat_step import FlatStep
from lightning_zero_ops import adamw, sgd
from tests import worlds
from tests.engine.optimizers import Momentum
from tests.references import Block, Replica, TinyGPT, token_loss

STAGES = (0, 1, 2, 3)
stages = pytest.mark.parametrize("stage", STAGES)


def _engine(stage: int, **options: Any) -> tuple[ZeroEngine, nn.Module]:
    worlds.seed()
    engine = ZeroEngine(stage, units=[Block], **options)
    return engine, engine.shard(TinyGPT())


def _backward(engine: ZeroEngine, module: nn.Module, rank: int, step: int = 0) -> None:
    token_loss(module, rank, step).backward()


def _weights(engine: ZeroEngine, module: nn.Module) -> list[Tensor]:
    return [engine.full_param(param) for param in module.parameters()]


# -- Which optimizers --------------------------------------------------------------------------------------------------


class _Own(torch.optim.AdamW):
    """Somebody's own."""


OPTIMIZERS: dict[str, tuple[bool, Callable[[Any], torch.optim.Optimizer]]] = {
    "adamw": (True, lambda params: torch.optim.AdamW(params, weight_decay=0.1)),
    "adamw-fused": (True, lambda params: torch.optim.AdamW(params, fused=True)),
    "adam": (True, lambda params: torch.optim.Adam(params, weight_decay=0.1)),
    "sgd": (True, lambda params: torch.optim.SGD(params, lr=0.1)),
    "sgd-momentum": (True, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5)),
    "for-loop": (False, lambda params: torch.optim.AdamW(params, fused=False)),
    "foreach": (False, lambda params: torch.optim.AdamW(params, foreach=True)),
    "not-foreach": (False, lambda params: torch.optim.AdamW(params, foreach=False)),
    "amsgrad": (False, lambda params: torch.optim.Adam(params, amsgrad=True)),
    "maximize": (False, lambda params: torch.optim.AdamW(params, maximize=True)),
    "tensor-lr": (False, lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01))),
    "own": (False, _Own),
}


def _which(rank: int, world: int, name: str, stage: int) -> bool:
    engine, module = _engine(stage)
    optimizer = engine.attach(OPTIMIZERS[name][1](module.parameters()))
    before = _weights(engine, module)
    with (
        patch.object(adamw, "pytorch_step_", wraps=adamw.pytorch_step_) as adam_op,
        patch.object(sgd, "pytorch_step_", wraps=sgd.pytorch_step_) as sgd_op,
    ):
        _backward(engine, module, rank)
        optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, _weights(engine, module), strict=True))
    calls = adam_op.call_count + sgd_op.call_count
    assert calls <= len(engine.internals.fits.units)  # neighbouring parameters together, in each unit
    return calls > 0


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stage", [0, 2])
def test_plain_optimizers_step_a_buffer_at_once_and_others_take_their_own_step(name: str, stage: int) -> None:
    assert worlds.run(_which, 2, name, stage) == [OPTIMIZERS[name][0]] * 2


# -- PyTorch's interface -----------------------------------------------------------------------------------------------


def _interface(rank: int, world: int, stage: int) -> None:
    engine, module = _engine(stage)
    called = []
    raw = torch.optim.AdamW(module.parameters(), lr=0.1)
    raw.register_step_pre_hook(lambda *_: called.append("before"))
    raw.register_step_post_hook(lambda *_: called.append("after"))
    scheduler = torch.optim.lr_scheduler.StepLR(raw, 1, gamma=0.0)  # wraps `step`
    optimizer = engine.attach(raw)
    optimizer.register_step_pre_hook(lambda *_: called.append("late"))
    before = _weights(engine, module)
    _backward(engine, module, rank)
    optimizer.step()
    scheduler.step()
    assert called == ["before", "late", "after"], called
    after = _weights(engine, module)
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    optimizer.zero_grad()
    _backward(engine, module, rank)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(after, _weights(engine, module), strict=True))  # lr is 0


@stages
def test_hooks_are_called_and_schedulers_that_wrap_step_count(stage: int) -> None:
    worlds.run(_interface, 2, stage)


def _late_hook(rank: int, world: int, stage: int) -> None:
    engine, module = _engine(stage)
    optimizer = engine.attach(torch.optim.SGD(module.parameters(), lr=0.1))

    def clear(*_: Any) -> None:
        for param in module.parameters():
            param.grad.zero_()  # type: ignore[union-attr]

    optimizer.register_step_pre_hook(clear)
    before = _weights(engine, module)
    _backward(engine, module, rank)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, _weights(engine, module), strict=True))


@stages
def test_what_a_hook_does_to_gradients_counts(stage: int) -> None:
    worlds.run(_late_hook, 2, stage)


def _post_hook(rank: int, world: int, stage: int) -> None:
    engine, module = _engine(stage, precision=MixedPrecision(compute_dtype=torch.bfloat16))
    raw = torch.optim.AdamW(module.parameters(), lr=0.1)

    def clamp(*_: Any) -> None:
        for param in module.parameters():
            param.data.clamp_(-0.01, 0.01)

    raw.register_step_post_hook(clamp)
    optimizer = engine.attach(raw)
    with torch.autocast("cpu", torch.bfloat16):
        _backward(engine, module, rank)
    optimizer.step()
    with engine.gathered(module):
        assert all(param.abs().max() < 0.0101 for param in module.parameters())


@stages
def test_what_a_hook_writes_after_the_step_is_published(stage: int) -> None:
    worlds.run(_post_hook, 2, stage)


class _CallsSuper(Momentum):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def _limit(seen: list[Tensor], optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for param in optimizer.param_groups[0]["params"]:
        param.data.div_(param.data.norm().clamp(min=1.0))
        states = [one for key, one in optimizer.state[param].items() if key != "step" and torch.is_tensor(one)]
        seen.extend(one.norm().as_subclass(Tensor) for one in [param.grad, *states])


def _hook_norms(rank: int, world: int, optimizer_class: type[torch.optim.Optimizer], placed: dict[str, Any]) -> Any:
    found = []
    for stage in (0, 2, 3):
        engine, module = _engine(stage, **placed)
        raw = optimizer_class(module.parameters(), lr=0.1)  # type: ignore[call-arg]
        seen: list[Tensor] = []
        raw.register_step_post_hook(functools.partial(_limit, seen))
        optimizer = engine.attach(raw)
        for step in range(2):
            optimizer.zero_grad()
            _backward(engine, module, rank, step)
            optimizer.step()
        found.append((torch.stack(seen), *_weights(engine, module)))
        engine.close()
    for one in found[1:]:
        torch.testing.assert_close(one, found[0])


HOOKED: dict[str, tuple[Any, dict[str, Any]]] = {
    "Momentum": (Momentum, {}),
    "super": (_CallsSuper, {}),
    "AdamW": (torch.optim.AdamW, {}),
    "AdamW-cpu": (torch.optim.AdamW, {"offload": "cpu"}),
    "AdamW-deferred": (torch.optim.AdamW, {"step": "deferred"}),
}


@pytest.mark.parametrize("name", HOOKED)
def test_hooks_behind_a_step_see_its_values_and_norms_of_the_whole(name: str) -> None:
    worlds.run(_hook_norms, 2, *HOOKED[name])


def _state(rank: int, world: int, stage: int) -> None:
    engine, module = _engine(stage)
    optimizer = engine.attach(torch.optim.AdamW(module.parameters(), lr=0.1))
    for step in range(2):
        optimizer.zero_grad()
        _backward(engine, module, rank, step)
        optimizer.step()
    engine.internals.steps.open_window(optimizer)
    for param in module.parameters():
        state = optimizer.state[param]
        assert list(state) == ["step", "exp_avg", "exp_avg_sq"]
        assert state["step"].item() == 2.0
        assert state["exp_avg"].shape == state["exp_avg_sq"].shape == param.shape
        shown = param.detach().as_subclass(Tensor)
        for key in ("exp_avg", "exp_avg_sq"):
            assert state[key].as_subclass(Tensor).shape == shown.shape
    engine.internals.steps.close_window(optimizer)
    storages = {optimizer.state[param]["exp_avg"].untyped_storage()._cdata for param in module.parameters()}
    assert len(storages) == len(engine.internals.fits.units)
    # What is loaded is what the next step goes on from.
    saved = copy.deepcopy(optimizer.state_dict())
    engine.internals.steps.open_window(optimizer)
    weights = [param.detach().clone() for param in module.parameters()]
    engine.internals.steps.close_window(optimizer)

    def last_step() -> list[Tensor]:
        optimizer.zero_grad()
        _backward(engine, module, rank, 2)
        optimizer.step()
        return _weights(engine, module)

    expected = last_step()
    engine.internals.steps.open_window(optimizer)
    for param, value in zip(module.parameters(), weights, strict=True):
        param.data.copy_(value)
    engine.internals.steps.close_window(optimizer)
    engine.internals.checkpoints.publish()
    optimizer.load_state_dict(saved)
    assert all(torch.equal(a, b) for a, b in zip(last_step(), expected, strict=True))


@stages
def test_the_state_is_pytorchs_and_can_be_loaded(stage: int) -> None:
    worlds.run(_state, 2, stage)


def _unfused_after_fused(rank: int, world: int, stage: int) -> None:
    engine, module = _engine(stage)
    optimizer = engine.attach(torch.optim.AdamW(module.parameters(), lr=0.1, eps=1e-4))
    for step in range(4):
        optimizer.zero_grad()
        _backward(engine, module, rank, step)
        optimizer.param_groups[0]["fused"] = False if step % 2 else None
        optimizer.step()
    replica = Replica(TinyGPT(), rank, world)
    worlds.seed()
    replica = Replica(TinyGPT(), rank, world)
    plain = torch.optim.AdamW(replica.module.parameters(), lr=0.1, eps=1e-4)
    for step in range(4):
        plain.zero_grad()
        replica.backward(token_loss(replica.module, rank, step))
        plain.param_groups[0]["fused"] = not step % 2
        plain.step()
    for actual, expected in zip(_weights(engine, module), replica.module.parameters(), strict=True):
        assert torch.equal(actual, expected)


@stages
def test_steps_of_both_kinds_go_on_from_each_other(stage: int) -> None:
    worlds.run(_unfused_after_fused, 2, stage)


# -- The clip factor ---------------------------------------------------------------------------------------------------


def _clipped(rank: int, world: int, stage: int, reduce_dtype: Any) -> None:
    found = []
    for looks in (False, True):
        engine, module = _engine(stage, communication=Communication(reduce_dtype=reduce_dtype))
        optimizer = engine.attach(torch.optim.AdamW(module.parameters(), lr=0.1))
        for step in range(2):
            _backward(engine, module, rank, step)
            norm = engine.clip_grad_norm(optimizer, 0.01)
            assert norm > 0.02
            if looks:  # the factor is multiplied at once
                assert all(param.grad is not None for param in module.parameters())
                torch.testing.assert_close(engine.grad_norm(optimizer), torch.tensor(0.01), rtol=0.01, atol=0.0)
            optimizer.step()
        # There was no `zero_grad`: the second backward has added to clipped gradients.
        grads = [engine.full_grad(param) for param in module.parameters()]
        found.append([*_weights(engine, module), *grads])
        torch.testing.assert_close(engine.grad_norm(optimizer), torch.tensor(0.01), rtol=0.01, atol=0.0)
        engine.close()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@stages
@pytest.mark.parametrize("reduce_dtype", [None, "bf16"])
def test_a_clipped_gradient_is_clipped_whether_or_not_somebody_looks(stage: int, reduce_dtype: Any) -> None:
    worlds.run(_clipped, 2, stage, reduce_dtype)


def _poisoned_norm(rank: int, world: int, stage: int) -> None:
    engine, module = _engine(stage)
    optimizer = engine.attach(torch.optim.AdamW(module.parameters(), lr=0.1))
    (token_loss(module, rank, 0) * float("nan")).backward()
    assert engine.clip_grad_norm(optimizer, 1.0).isnan()
    engine.grad_norm(optimizer)
    engine.internals.steps.close_window(optimizer)
    optimizer.zero_grad()
    _backward(engine, module, rank)
    assert engine.grad_norm(optimizer).isfinite()


@stages
def test_a_norm_that_is_not_a_number_does_not_stay_in_the_padding(stage: int) -> None:
    worlds.run(_poisoned_norm, 2, stage)


def _read_twice(rank: int, world: int, stage: int) -> None:
    engine, module = _engine(stage, communication=Communication(reduce_dtype="bf16"))
    optimizer = engine.attach(torch.optim.SGD(module.parameters(), lr=0.0))
    param = next(module.parameters())
    found = []
    for step in range(2):
        _backward(engine, module, rank, step)
        engine.grad_norm(optimizer)
        found.append(engine.full_grad(param))
        optimizer.zero_grad()
    assert not torch.equal(found[0], found[1])


@stages
def test_a_16_bit_gradient_is_read_anew_after_each_backward(stage: int) -> None:
    worlds.run(_read_twice, 2, stage)


# -- Padding -----------------------------------------------------------------------------------------------------------


def _without_eps(rank: int, world: int, stage: int) -> None:
    engine, module = _engine(stage)
    optimizer = engine.attach(torch.optim.AdamW(module.parameters(), lr=0.1, eps=0.0))
    _backward(engine, module, rank)
    optimizer.step()
    for unit in engine.internals.fits.units:
        for buffer in unit.buffers:
            lo, hi = buffer.own_range.start, buffer.own_range.stop
            for start, stop in buffer.layout.gaps():
                assert not buffer.values.stepped[max(start - lo, 0) : max(min(stop, hi) - lo, 0)].any()


@stages
def test_padding_stays_zero_without_eps(stage: int) -> None:
    worlds.run(_without_eps, 2, stage)


# -- What PyTorch does not step ----------------------------------------------------------------------------------------


def _given_up(rank: int, world: int, stage: int, options: dict[str, Any]) -> None:
    ended = []
    for fails in (False, True):
        engine, module = _engine(stage, **options)
        optimizer = engine.attach(torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
        _backward(engine, module, rank)
        optimizer.step()
        optimizer.zero_grad()
        if fails:
            with patch.object(FlatStep, "plan", _failing(FlatStep.plan)):
                _backward(engine, module, rank, 7)
                with pytest.raises(MemoryError):
                    optimizer.step()
            optimizer.zero_grad()
        _backward(engine, module, rank, 1)
        optimizer.step()
        ended.append(_weights(engine, module))
        engine.close()
    assert all(torch.equal(a, b) for a, b in zip(*ended, strict=True))


def _failing(plan: Callable[..., None]) -> Callable[..., None]:
    """Return a function that plans the steps of two buffers, and fails then."""
    left = [0, 0]

    def call(*args: Any, **kwargs: Any) -> None:
        if not left:
            raise MemoryError
        left.pop()
        plan(*args, **kwargs)

    return call


@pytest.mark.parametrize(
    "options",
    [{}, {"offload": Offload(optimizer="cpu")}, {"step": "deferred"}],
    ids=["device", "cpu", "deferred"],
)
@stages
def test_an_error_while_a_step_is_planned_leaves_nothing_for_the_next_one(stage: int, options: dict[str, Any]) -> None:
    """Buffers that were planned were stepped twice then, by the gradients of the failed step."""
    worlds.run(_given_up, 2, stage, options)


def _idle(rank: int, world: int, stage: int) -> None:
    worlds.seed()
    engine = ZeroEngine(stage, units=[Block], precision=MixedPrecision(masters=False))
    module = engine.shard(TinyGPT().bfloat16())
    with pytest.raises(ValueError, match="`fused=True`: PyTorch's fused `SGD` does not step torch.bfloat16"):
        engine.attach(torch.optim.SGD(module.parameters(), lr=0.1, fused=True))


@stages
def test_fused_sgd_on_16_bit_values_is_refused_because_pytorch_leaves_them_as_they_are(stage: int) -> None:
    worlds.run(_idle, 2, stage)


def _assigned_states(rank: int, world: int, options: dict[str, Any]) -> None:
    engine, module = _engine(2)
    worlds.seed()
    replica = Replica(TinyGPT(), rank, world)
    optimizer = engine.attach(torch.optim.AdamW(module.parameters(), lr=0.1, eps=1e-4, **options))
    plain = torch.optim.AdamW(replica.module.parameters(), lr=0.1, eps=1e-4, **options or {"fused": True})
    for step in range(3):
        if step == 1:
            for one, model in ((optimizer, module), (plain, replica.module)):
                weight = model.head.weight
                one.state[weight]["exp_avg"] = torch.linspace(-1, 1, weight.numel()).view(weight.shape)
        for one in (optimizer, plain):
            one.zero_grad()
        _backward(engine, module, rank, step)
        replica.backward(token_loss(replica.module, rank, step))
        optimizer.step()
        plain.step()
    for actual, expected in zip(_weights(engine, module), replica.module.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)  # a cut ends other vectors
    optimizer.state[module.head.weight]["exp_avg"] = torch.zeros(3)
    _backward(engine, module, rank)
    with pytest.raises(RuntimeError, match=r"State `exp_avg` of `head.weight` in `AdamW` has shape \(3,\)"):
        optimizer.step()
    engine.close()


@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"amsgrad": True}], ids=str)
def test_a_whole_state_assigned_by_hand_is_cut_and_another_shape_refused(options: dict[str, Any]) -> None:
    worlds.run(_assigned_states, 2, options)
