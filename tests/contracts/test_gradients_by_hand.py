"""Programs that assign, edit, drop, read and scale gradients themselves train as the reference."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.config import Communication, MixedPrecision
from lightning_zero.engine.buffers.sharded_gradient import ShardedGradient
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.errors import ShardedGradientError
from tests import worlds
from tests.references import Case, Sharded, TinyGPT, adamw, difference, token_loss, tokens, train_zero
from tests.sampling import sample

DEPTH = 2
Program = Callable[[Any], None]


class Skipping(TinyGPT):
    """Runs the first block only."""

    def body(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks[0](x)
        return out


def _params(trainer: Any) -> list[nn.Parameter]:
    return list(trainer.module.parameters())


def _averaged(grads: Any) -> list[Tensor]:
    found = []
    for grad in grads:
        total = grad.detach().clone()
        dist.all_reduce(total)
        found.append(total.div_(dist.get_world_size()))
    return found


def _noise(step: int) -> list[Tensor]:
    """Return a whole gradient of every parameter, the same on all ranks."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(param.shape, generator=generator) for param in TinyGPT(depth=DEPTH).parameters()]


def _grads_of(trainer: Any, step: int) -> list[Tensor]:
    loss = token_loss(trainer.module, trainer.rank, step)
    return _averaged(torch.autograd.grad(loss, _params(trainer)))


def _assign(params: list[nn.Parameter], grads: list[Tensor]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad


def _log(trainer: Any, optimizer: Any) -> None:
    """Compare norms and whole gradients."""
    grads = [trainer.full_grad(param) for param in _params(trainer)]
    trainer.losses += [torch.zeros(1) if grad is None else grad.clone() for grad in grads]
    trainer.losses.append(torch.tensor([grad is None for grad in grads]))
    if isinstance(trainer, Sharded):
        trainer.losses.append(trainer.engine.grad_norm(optimizer))
    else:
        norms = [torch.linalg.vector_norm(p.grad.double()) for group in optimizer.param_groups
                 for p in group["params"] if p.grad is not None]  # fmt: skip
        trainer.losses.append(torch.linalg.vector_norm(torch.stack(norms)).float() if norms else torch.zeros(()))


def _loop(body: Callable[[Any, Any, int], None], optimizer: Any = adamw, steps: int = 3) -> Program:
    """Return a program that calls ``body(trainer, optimizer, step)`` and steps."""

    def program(trainer: Any) -> None:
        stepper = optimizer(trainer.module)
        trainer.attach(stepper)
        for step in range(steps):
            body(trainer, stepper, step)
            stepper.step()
            stepper.zero_grad()

    return program


def _backward(trainer: Any, step: int) -> None:
    trainer.backward(token_loss(trainer.module, trainer.rank, step))


# -- Programs ----------------------------------------------------------------------------------------------------------


def autograd_grad(trainer: Any, optimizer: Any, step: int) -> None:
    _assign(_params(trainer), _grads_of(trainer, step))


def evolution(trainer: Any, optimizer: Any, step: int) -> None:
    _assign(_params(trainer), _noise(step))


def assigned_and_clipped(trainer: Any, optimizer: Any, step: int) -> None:
    _assign(_params(trainer), _noise(step))
    _log(trainer, optimizer)
    trainer.losses.append(trainer.clip_grad_norm(optimizer, 0.5))
    _log(trainer, optimizer)
    trainer.clip_grad_value(optimizer, 0.01)
    _log(trainer, optimizer)


def some_are_assigned(trainer: Any, optimizer: Any, step: int) -> None:
    params = _params(trainer)
    _backward(trainer, step)
    for index, grad in enumerate(_noise(step)):
        if index % 3 == 0:
            params[index].grad = grad
    if step % 2:
        _log(trainer, optimizer)
    trainer.losses.append(trainer.clip_grad_norm(optimizer, 0.5))


def assigned_in_the_window(trainer: Any, optimizer: Any, step: int) -> None:
    params = _params(trainer)
    _backward(trainer, step)
    trainer.clip_grad_norm(optimizer, 0.5)
    for index, grad in enumerate(_noise(step)):
        if index % 3 == 0:
            params[index].grad = grad
    if step % 2:
        _log(trainer, optimizer)
        trainer.clip_grad_norm(optimizer, 0.3)


def halved(trainer: Any, optimizer: Any, step: int) -> None:
    params = _params(trainer)
    _backward(trainer, step)
    for index, param in enumerate(params):
        if index % 3 == 0 and param.grad is not None:
            param.grad = param.grad * 0.5
        elif index % 3 == 1:
            param.grad = None
    _log(trainer, optimizer)
    if step % 2:
        trainer.losses.append(trainer.clip_grad_norm(optimizer, 0.1))
        _log(trainer, optimizer)


def edited_in_place(trainer: Any, optimizer: Any, step: int) -> None:
    params = _params(trainer)
    _backward(trainer, step)
    grads = [param.grad for param in params if param.grad is not None]
    torch._foreach_mul_(grads, 0.5)
    grads[0].add_(1.0)
    _log(trainer, optimizer)
    trainer.losses.append(trainer.clip_grad_norm(optimizer, 0.1))


def backward_adds_to_what_was_assigned(trainer: Any, optimizer: Any, step: int) -> None:
    params = _params(trainer)
    _assign(params, _noise(step))
    _backward(trainer, step)
    _log(trainer, optimizer)


def read_before_the_backward(trainer: Any, optimizer: Any, step: int) -> None:
    params = _params(trainer)
    _assign(params, _noise(step))
    _log(trainer, optimizer)
    _backward(trainer, step)
    _log(trainer, optimizer)


def accumulated_after_an_edit(trainer: Any, optimizer: Any, step: int) -> None:
    params = _params(trainer)
    _backward(trainer, 2 * step)
    for param in params[::2]:
        if param.grad is not None:
            param.grad = param.grad * 0.5
    params[1].grad = None
    _backward(trainer, 2 * step + 1)
    params[3].grad = None
    _log(trainer, optimizer)


def scaled_and_accumulated(trainer: Any, optimizer: Any, step: int) -> None:
    _backward(trainer, 2 * step)
    trainer.clip_grad_norm(optimizer, 0.1)
    _backward(trainer, 2 * step + 1)
    for param in _params(trainer):
        if param.grad is not None:
            param.grad += param.grad
    trainer.clip_grad_norm(optimizer, 0.2)
    _log(trainer, optimizer)


def zeroed_in_place(trainer: Any, optimizer: Any, step: int) -> None:
    params = _params(trainer)
    params[0].grad = torch.ones_like(_noise(0)[0])
    optimizer.zero_grad(set_to_none=False)
    _log(trainer, optimizer)
    _backward(trainer, step)
    optimizer.zero_grad()
    params[-1].grad = _noise(step)[-1]
    _log(trainer, optimizer)


def zeroed_as_of_old(trainer: Any, optimizer: Any, step: int) -> None:
    """As ``zero_grad`` did once: also an autograd view could not be detached in place."""
    _backward(trainer, 2 * step)
    for param in _params(trainer):
        if param.grad is not None:
            param.grad.detach_()
            param.grad.zero_()
    _backward(trainer, 2 * step + 1)
    _log(trainer, optimizer)


def several_micro_batches(trainer: Any, optimizer: Any, step: int) -> None:
    params = _params(trainer)
    params[0].grad = _noise(step)[0]
    for index in range(3):
        with trainer.microbatch(last=index == 2):
            _backward(trainer, 3 * step + index)
    params[2].grad = _noise(step)[2]
    _log(trainer, optimizer)


def written_in_the_window(trainer: Any, optimizer: Any, step: int) -> None:
    params = _params(trainer)
    _backward(trainer, 2 * step)
    for param in params:
        if param.grad is not None:
            param.grad.zero_()
    _write(params)
    _backward(trainer, 2 * step + 1)
    _log(trainer, optimizer)
    assert params[0].grad is not None
    if step == 1:
        params[0].data = 0.9 * params[0].data
    _write(params)


def _write(params: list[nn.Parameter]) -> None:
    for param in params[::3]:
        param.data.mul_(0.9)
    with torch.no_grad():
        torch._foreach_mul_(params[1::3], 0.8)
        for param in params[1::3]:
            param.mul_(0.9)
    nn.init.constant_(params[2], 0.1)


def pointed_elsewhere(trainer: Any, optimizer: Any, step: int) -> None:
    """``p.grad.data = ...``: the object stays, its memory does not."""
    params = _params(trainer)
    _backward(trainer, step)
    for param in params[::2]:
        if param.grad is not None:
            param.grad.data = param.grad.data * 3
    if step % 2:
        _log(trainer, optimizer)
        params[0].grad.data = params[0].grad.data + 1.0


def saved_and_given_back(trainer: Any, optimizer: Any, step: int) -> None:
    """As projections of gradients do (PCGrad)."""
    params = _params(trainer)
    _backward(trainer, 2 * step)
    saved = [None if param.grad is None else param.grad.clone() for param in params]
    optimizer.zero_grad()
    if step == 1:
        _backward(trainer, 2 * step + 1)
        saved = [grad if param.grad is None else grad + param.grad for grad, param in zip(saved, params, strict=True)]
        optimizer.zero_grad()
    for param, grad in zip(params, saved, strict=True):
        param.grad = grad
    _log(trainer, optimizer)


def masked(trainer: Any, optimizer: Any, step: int) -> None:
    """Masks and penalties have the shape of the parameter, as in sparse training and elastic weight consolidation."""
    params = _params(trainer)
    _backward(trainer, step)
    used = [(param, noise) for param, noise in zip(params, _noise(step), strict=True) if param.grad is not None]
    for number, (param, noise) in enumerate(used):
        kind = number % 5
        if kind == 0:
            param.grad *= noise > 0
        elif kind == 1:
            param.grad.add_(noise, alpha=0.1).masked_fill_(noise > 1, 0.25)
        elif kind == 2:
            param.grad = torch.where(noise > 0, param.grad, noise)
        elif kind == 3:
            param.grad[:1] = 0.5
            param.grad[noise < -1] = noise[noise < -1]
        else:
            param.grad[param.grad < 0] = 0.0
            param.grad[:] = param.grad * 0.5
        with torch.random.fork_rng():
            torch.manual_seed(step)
            param.grad.add_(torch.randn_like(param.grad), alpha=0.1)
            param.grad.add_(param.grad.clone().uniform_(-0.1, 0.1))
    grads = [param.grad for param, _ in used]
    torch._foreach_mul_(grads, [noise.abs() for _, noise in used])
    halves = torch._foreach_mul(grads, 0.5)
    for (param, noise), half in zip(used, halves, strict=True):
        param.grad = half - noise
    _log(trainer, optimizer)


def ruled_by_shapes(trainer: Any, optimizer: Any, step: int) -> None:
    """Matrices are decayed, scaled by their fan, and get noise of their shape."""
    _backward(trainer, step)
    for number, param in enumerate(_params(trainer)):
        if param.grad is None:
            continue
        shape = (param, param.grad, param.data, param.detach())[number % 4].shape
        if param.ndim > 1 and param.grad.dim() > 1:
            param.grad.add_(param.data, alpha=0.1).mul_(2.0 / param.size(0))
        if len(param.grad.size()) == 1:
            param.grad.mul_(param.grad.shape[0] / param.stride()[0])
        param.grad.add_(torch.randn(shape, generator=torch.Generator().manual_seed(step)), alpha=0.1)
    _log(trainer, optimizer)


def assigned_zeros(trainer: Any, optimizer: Any, step: int) -> None:
    params = _params(trainer)
    if step == 1:
        for param in params:
            param.grad = torch.zeros_like(param)
    _backward(trainer, step)
    if step == 2:
        _log(trainer, optimizer)
    params[0].grad = torch.zeros_like(params[0])
    optimizer.zero_grad()
    if step == 2:
        params[-1].grad = torch.ones_like(params[-1])
        _log(trainer, optimizer)
        params[0].grad = torch.zeros_like(params[0])
    _log(trainer, optimizer)


def assigned_behind_a_failed_backward(trainer: Any, optimizer: Any, step: int) -> None:
    params = _params(trainer)

    def fail(grad: Tensor) -> None:
        raise ArithmeticError("in a hook")

    handle = params[3].register_hook(fail)
    with pytest.raises(ArithmeticError):
        _backward(trainer, step)
    handle.remove()
    if step % 2:
        optimizer.zero_grad()
    _assign(params, _noise(step))
    _log(trainer, optimizer)


def changed_behind_clipping(trainer: Any, optimizer: Any, step: int) -> None:
    """What was assigned is clipped, and made zero, as the gradient that it is."""
    grads = _noise(step)
    _assign(_params(trainer), grads)
    trainer.clip_grad_norm(optimizer, 0.5)
    torch._foreach_mul_(grads[::2], 2.0)
    _log(trainer, optimizer)
    trainer.clip_grad_value(optimizer, 0.01)
    grads[0].add_(0.1)
    trainer.losses += [grad.clone() for grad in grads]
    if step == 1:
        optimizer.zero_grad(set_to_none=False)
        torch._foreach_add_(grads[1:3], 0.01)
    _log(trainer, optimizer)


def exchanged(trainer: Any, optimizer: Any, step: int) -> None:
    """Parameters of one shape take each other's gradients, within a unit and between two; one as a chain."""
    params = _params(trainer)
    _backward(trainer, step)
    _log(trainer, optimizer)
    by_shape: dict[Any, list[nn.Parameter]] = {}
    for param, whole in zip(params, _noise(0), strict=True):
        if param.grad is not None:
            by_shape.setdefault(whole.shape, []).append(param)
    for number, same in enumerate(one for one in by_shape.values() if len(one) > 1):
        if number % 2:
            same[0].grad, same[1].grad = same[1].grad, same[0].grad
        else:
            first = same[0].grad
            for mine, other in itertools.pairwise(same):
                mine.grad = other.grad
            same[-1].grad = first * 2
    _log(trainer, optimizer)


def views_of_one_buffer(trainer: Any, optimizer: Any, step: int) -> None:
    """Gradients are views of a static buffer, which is filled again, clipped with them and changed."""
    params, noise = _params(trainer), _noise(step)
    if step == 0:
        trainer.flat = torch.zeros(sum(one.numel() for one in noise))
    start = 0
    for param, one in zip(params, noise, strict=True):
        param.grad = trainer.flat[start : start + one.numel()].view(one.shape)
        start += one.numel()
    trainer.flat.copy_(torch.cat([one.reshape(-1) for one in noise]))
    _log(trainer, optimizer)
    trainer.clip_grad_norm(optimizer, 0.5)
    trainer.losses.append(trainer.flat.clone())
    trainer.flat.mul_(0.5)
    _log(trainer, optimizer)


def written_without_a_trace(trainer: Any, optimizer: Any, step: int) -> None:
    """Static gradients are written through ``data`` and NumPy, which no version counter shows."""
    if step == 0:
        trainer.static = _noise(step)
    _assign(_params(trainer), trainer.static)
    _log(trainer, optimizer)
    for number, (static, noise) in enumerate(zip(trainer.static, _noise(step + 1), strict=True)):
        if number % 2:
            static.data.copy_(noise)
        else:
            static.numpy()[...] = noise.numpy()
    _log(trainer, optimizer)


def one_for_two(trainer: Any, optimizer: Any, step: int) -> None:
    """One tensor is the gradient of two parameters, so clipping multiplies it twice."""
    params, noise = _params(trainer), _noise(step)
    _assign(params, noise)
    shapes = [one.shape for one in noise]
    first = next(index for index, shape in enumerate(shapes) if shapes.count(shape) > 1)
    second = shapes.index(shapes[first], first + 1)
    params[second].grad = noise[first]
    trainer.clip_grad_value(optimizer, 0.5)
    trainer.clip_grad_norm(optimizer, 0.1)
    _log(trainer, optimizer)


def made_in_inference_mode(trainer: Any, optimizer: Any, step: int) -> None:
    with torch.inference_mode():
        grads = _noise(step)
    _assign(_params(trainer), grads)
    _log(trainer, optimizer)


def changed_behind_the_step(trainer: Any, optimizer: Any, step: int) -> None:
    grads = _noise(step)
    _backward(trainer, step)
    trainer.clip_grad_norm(optimizer, 0.5)
    _assign(_params(trainer), grads)
    optimizer.step()
    torch._foreach_mul_(grads, 0.5)


def _kept(trainer: Any) -> list[Tensor]:
    return [param.grad for param in _params(trainer) if param.grad is not None]


def kept_and_changed_behind_the_step(trainer: Any, optimizer: Any, step: int) -> None:
    _backward(trainer, step)
    grads = _kept(trainer)
    optimizer.step()
    for grad in grads:
        grad.mul_(-0.5)


def states_changed_behind_the_step(trainer: Any, optimizer: Any, step: int) -> None:
    _backward(trainer, step)
    states = [value for state in optimizer.state.values() for value in state.values()]
    states = [value for value in states if torch.is_tensor(value) and value.dim()]
    optimizer.step()
    for value in states[::2]:
        value.mul_(0.5)
    for value in states[1::2]:
        value.view(-1).mul_(0.5)


def kept_over_a_backward(trainer: Any, optimizer: Any, step: int) -> None:
    _backward(trainer, 2 * step)
    grads = _kept(trainer)
    _backward(trainer, 2 * step + 1)
    for grad in grads:
        grad.mul_(0.25)
    _log(trainer, optimizer)


def kept_over_zeros(trainer: Any, optimizer: Any, step: int) -> None:
    _backward(trainer, 2 * step)
    grads = _kept(trainer)
    optimizer.zero_grad(set_to_none=False)
    _backward(trainer, 2 * step + 1)
    for grad in grads:
        grad.mul_(0.25)


def kept_clipped_and_edited(trainer: Any, optimizer: Any, step: int) -> None:
    _backward(trainer, step)
    grads = _kept(trainer)
    with torch.no_grad():
        token_loss(trainer.module, trainer.rank, step)
    trainer.losses.append(trainer.clip_grad_norm(optimizer, 0.05))
    for grad in grads:
        grad.clamp_(-0.005, 0.005)


def edited_between_micro_batches(trainer: Any, optimizer: Any, step: int) -> None:
    for index in range(3):
        with trainer.microbatch(last=index == 2):
            _backward(trainer, 3 * step + index)
        for param in _params(trainer):
            if param.grad is not None:
                param.grad *= 0.5
    _log(trainer, optimizer)


def a_group_is_taken_out(trainer: Any, optimizer: Any, step: int) -> None:
    _backward(trainer, step)
    if step == 0:
        params = optimizer.param_groups[0]["params"]
        optimizer.param_groups[0]["params"] = params[: len(params) // 2]
    trainer.losses.append(trainer.clip_grad_norm(optimizer, 0.1))
    trainer.losses += [torch.tensor(param.grad is None) for param in _params(trainer)]


def written_and_taken_out(trainer: Any, optimizer: Any, step: int) -> None:
    _backward(trainer, step)
    with torch.no_grad():
        for param in _params(trainer):
            if param.grad is not None:
                param.sub_(param.grad, alpha=0.01)
    if step == 1:
        params = optimizer.param_groups[0]["params"]
        optimizer.param_groups[0]["params"] = params[: len(params) // 2]


PROGRAMS: dict[str, Callable[[Any, Any, int], None]] = {
    one.__name__.replace("_", "-"): one
    for one in (
        autograd_grad, evolution, assigned_and_clipped, some_are_assigned, assigned_in_the_window, halved,
        edited_in_place, backward_adds_to_what_was_assigned, read_before_the_backward, accumulated_after_an_edit,
        scaled_and_accumulated, zeroed_in_place, zeroed_as_of_old, several_micro_batches,
        written_in_the_window, pointed_elsewhere, saved_and_given_back, masked, ruled_by_shapes,
        assigned_zeros, assigned_behind_a_failed_backward, changed_behind_clipping, views_of_one_buffer,
        written_without_a_trace, one_for_two, made_in_inference_mode, changed_behind_the_step,
        kept_and_changed_behind_the_step, states_changed_behind_the_step, kept_over_a_backward, kept_over_zeros,
        kept_clipped_and_edited, edited_between_micro_batches, a_group_is_taken_out,
        written_and_taken_out,
    )
}  # fmt: skip

BY_HAND = [name for name in PROGRAMS if name != "autograd-grad"]

OPTIMIZERS = {
    "adamw": adamw,
    "rmsprop": lambda module: torch.optim.RMSprop(module.parameters(), lr=1e-2, eps=1e-3),
    "sgd": lambda module: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9),
}


def _check_exchanged(rank: int, world: int, stages: list[int]) -> dict[str, str]:
    program = _loop(exchanged, OPTIMIZERS["sgd"])
    case = Case(build=lambda: Skipping(depth=DEPTH), program=program, tolerance=1e-5, stages=stages)
    return case.check(rank, world)


def test_gradients_that_parameters_exchange_are_those_that_are_stepped() -> None:
    assert worlds.run(_check_exchanged, 2, [0]) == [{}, {}]
    assert worlds.run(_check_exchanged, 1, [0, 1, 3]) == [{}]


def _exchanged_segments(rank: int, world: int, how: str) -> str:
    engine = ZeroEngine(3, units=["Block"])
    module = engine.shard(TinyGPT(depth=DEPTH))
    engine.attach(torch.optim.SGD(module.parameters(), lr=0.1))
    token_loss(module, rank, 0).backward()
    up, down = module.blocks[0].up.bias, module.blocks[1].norm.weight
    first, second = module.blocks[0].norm.weight, module.blocks[0].down.bias
    assert up.grad is not None
    try:
        if how == "assigned":
            first.grad = second.grad
            up.grad = down.grad
        else:
            torch._foreach_add_([first.grad, up.grad], [second.grad, up.grad])
    except ShardedGradientError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("how", ["assigned", "added"])
def test_segments_of_other_elements_are_refused(how: str) -> None:
    found = worlds.run(_exchanged_segments, 2, how)
    assert any("they are not of the same elements" in one for one in found)


def _assigned_sparse(rank: int, world: int, stage: int) -> float:
    engine = ZeroEngine(stage, units=["Block"])
    module = engine.shard(TinyGPT(depth=1))
    optimizer = engine.attach(torch.optim.SGD(module.parameters(), lr=1.0))
    weight = module.embedding.weight
    before = engine.full_param(weight).clone()
    grad = torch.eye(*before.shape)
    weight.grad = grad.to_sparse()
    optimizer.step()
    return float((engine.full_param(weight) - (before - grad)).abs().max())


@pytest.mark.parametrize("stage", [0, 3])
def test_a_sparse_gradient_may_be_assigned(stage: int) -> None:
    assert worlds.run(_assigned_sparse, 2, stage) == [0.0, 0.0]


def _check(
    rank: int, world: int, name: str, optimizer: str = "adamw", model: type[TinyGPT] = Skipping, **options: Any
) -> dict[str, str]:
    case = Case(
        build=lambda: model(depth=DEPTH),
        program=_loop(PROGRAMS[name], OPTIMIZERS[optimizer]),
        tolerance=1e-5,  # norms over shards, and what Adam makes of their last bits
        options=options,
    )
    return case.check(rank, world)


def _check_with(rank: int, world: int, name: str, optimizer: str, options: dict[str, Any]) -> dict[str, str]:
    return _check(rank, world, name, optimizer, **options)


@pytest.mark.parametrize("name", sample(BY_HAND, *BY_HAND[::3]))  # the others wherever they are, in the slow set
def test_gradients_that_a_program_assigns_or_edits_are_those_that_are_stepped(name: str) -> None:
    assert worlds.run(_check, 2, name) == [{}, {}]


def _check_autograd_grad(rank: int, world: int) -> dict[str, str]:
    return _check(rank, world, "autograd-grad", model=TinyGPT)


def test_gradients_of_autograd_grad_train_at_every_stage() -> None:
    assert worlds.run(_check_autograd_grad, 2) == [{}, {}]


PLACES: dict[str, dict[str, Any]] = {
    "cpu": {"offload": "cpu"},
    "cpu-now": {"offload": "cpu", "step": "now"},
    "deferred": {"step": "deferred"},
    "device": {},
}
MATRIX = [
    pytest.param(name, optimizer, place, id=f"{name}-{optimizer}-{place}")
    for name in PROGRAMS
    for optimizer in OPTIMIZERS
    for place in PLACES
]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(("name", "optimizer", "place"), MATRIX)
def test_gradients_by_hand_wherever_they_are(name: str, optimizer: str, place: str, world: int) -> None:
    assert worlds.run(_check_placed, world, name, optimizer, place) == [{}] * world


def _check_placed(rank: int, world: int, name: str, optimizer: str, place: str) -> dict[str, str]:
    model = TinyGPT if name == "autograd-grad" else Skipping
    return _check(rank, world, name, optimizer, model, **PLACES[place])


# -- What was assigned, changed in place -------------------------------------------------------------------------------

ORDERS = {"gradient": 0.5, "assigned": 2.0, "gradient-assigned": 1.5, "assigned-gradient": 1.0}


def _changed_in_place(rank: int, world: int, stage: int, in_window: bool, order: str) -> tuple[float, float] | str:
    engine = ZeroEngine(stage, units=["Block"])
    module = engine.shard(TinyGPT(depth=1))
    engine.attach(torch.optim.SGD(module.parameters(), lr=0.1))
    weight = module.blocks[0].up.weight
    assigned = torch.ones(weight.shape)
    if in_window:
        token_loss(module, rank, 0).backward()
        assert weight.grad is not None
    weight.grad = assigned
    for what in order.split("-"):
        if what == "gradient":
            weight.grad.mul_(0.5)
        else:
            assigned.add_(1.0)
    try:
        found = engine.full_grad(weight)
    except RuntimeError as error:
        return str(error)
    assert found is not None
    return float(found.min()), float(found.max())


@pytest.mark.parametrize("in_window", [False, True], ids=["before", "in-the-window"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("stage", sample([0, 1, 3], 0, 3))
def test_what_is_done_in_place_to_a_gradient_that_was_assigned_counts(stage: int, order: str, in_window: bool) -> None:
    found = worlds.run(_changed_in_place, 2, stage, in_window, order)
    if stage and in_window and order == "gradient-assigned":  # `p.grad` shows a copy there
        assert all("changed both in the tensor that was assigned and in `p.grad`" in str(one) for one in found)
    else:
        assert found == [(ORDERS[order], ORDERS[order])] * 2


# -- Writes into values in the open window ----------------------------------------------------------------------------


def _written(trainer: Any, way: str, lowered: bool) -> None:
    """Write parameters between two forwards: in the window, or with a method that has nothing to do with it."""
    params = _params(trainer)
    stepper = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    trainer.attach(stepper)

    def run(step: int) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=lowered):
            loss = token_loss(trainer.module, trainer.rank, step)
        trainer.backward(loss)

    for step in range(3):
        run(step)
        if way == "gathered":
            with trainer.gathered(trainer.module, "all"):
                _write(params)
        else:
            assert params[0].grad is not None
            _write(params)
        if step == 1:
            stepper.zero_grad()
        run(step + 10)
        stepper.step()
        stepper.zero_grad()


def _check_written(rank: int, world: int, stage: int, options: dict[str, Any]) -> list[str]:
    found = []
    for precision in (MixedPrecision(), MixedPrecision(compute_dtype=torch.bfloat16)):
        lowered = precision.compute_dtype is not None
        outcomes = [
            train_zero(
                lambda: TinyGPT(depth=DEPTH),
                lambda trainer, way=way, lowered=lowered: _written(trainer, way, lowered),
                rank,
                world,
                stage=stage,
                units=["Block"],
                precision=precision,
                **options,
            )
            for way in ("window", "gathered")
        ]
        found.append(difference(*outcomes))
    return found


@pytest.mark.parametrize("stage", sample([0, 1, 2, 3], 1, 3))
@pytest.mark.parametrize(
    "place", [pytest.param(place, marks=[] if place == "device" else pytest.mark.slow) for place in PLACES]
)
def test_what_is_written_in_the_open_window_is_what_the_next_forward_computes_with(stage: int, place: str) -> None:
    for found in worlds.run(_check_written, 2, stage, PLACES[place]):
        assert not any(found), found


# -- Several optimizers ------------------------------------------------------------------------------------------------


def _backwards_of_some(rank: int, world: int, stage: int, place: str) -> float:
    """Return the largest difference of weights after steps whose backwards name their inputs."""
    worlds.seed()
    module = TinyGPT(depth=DEPTH)
    plain = copy.deepcopy(module)
    engine = ZeroEngine(stage=stage, **PLACES[place])
    engine.shard(module)
    optimizer, reference = adamw(module), adamw(plain)
    engine.attach(optimizer)
    for step in range(4):
        for chosen in (slice(-3, None), slice(2, 5)) if step % 2 else (slice(None),):
            token_loss(module, rank, step).backward(inputs=list(module.parameters())[chosen])
            for other in range(world):
                loss = token_loss(plain, other, step) / world
                loss.backward(inputs=list(plain.parameters())[chosen])
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()
    pairs = zip(module.parameters(), plain.parameters(), strict=True)
    largest = max(float((engine.full_param(own) - whole).detach().abs().max()) for own, whole in pairs)
    engine.close()
    return largest


@pytest.mark.parametrize("place", ["device", "cpu"])
@pytest.mark.parametrize("stage", sample([0, 1, 2, 3], 0, 3))
def test_a_backward_of_some_parameters_trains_these(stage: int, place: str) -> None:
    assert max(worlds.run(_backwards_of_some, 2, stage, place)) < 1e-6


def _optimizers(module: nn.Module, kind: str) -> list[torch.optim.Optimizer]:
    params = list(module.parameters())
    groups = {
        "two": [params[::2], params[1::2]],
        "three": [params[::3], params[1::3], params[2::3]],
        "shared": [params[: len(params) // 2 + 3], params[len(params) // 2 :]],
    }[kind]
    makers = [
        lambda group: torch.optim.SGD(group, lr=0.05, momentum=0.9),
        lambda group: torch.optim.AdamW(group, lr=1e-2, eps=1e-3, fused=True),
        lambda group: torch.optim.RMSprop(group, lr=1e-2, eps=1e-2),
    ]
    return [make(group) for make, group in zip(makers, groups, strict=False)]


def _clip(trainer: Any, optimizer: Any, number: int) -> None:
    trainer.losses.append(trainer.clip_grad_norm(optimizer, 0.3 + 0.1 * number))


def _halve(trainer: Any, optimizer: Any, number: int) -> None:
    for param in optimizer.param_groups[0]["params"][::2]:
        if param.grad is not None:
            param.grad.mul_(0.5)


def _negate(trainer: Any, optimizer: Any, number: int) -> None:
    for param in optimizer.param_groups[0]["params"][1::2]:
        if param.grad is not None:
            param.grad = -param.grad


def _drop_one(trainer: Any, optimizer: Any, number: int) -> None:
    optimizer.param_groups[0]["params"][number % 2].grad = None


def _assign_one(trainer: Any, optimizer: Any, number: int) -> None:
    params = list(trainer.module.parameters())
    place = next(i for i, p in enumerate(params) if p is optimizer.param_groups[0]["params"][number % 3])
    params[place].grad = _noise(number)[place]


def _halve_all(trainer: Any, optimizer: Any, number: int) -> None:
    grads = [param.grad for param in trainer.module.parameters()]
    torch._foreach_mul_([grad for grad in grads if grad is not None], 0.5)


def _clip_value(trainer: Any, optimizer: Any, number: int) -> None:
    trainer.clip_grad_value(optimizer, 0.05)


ACTIONS: dict[str, Callable[[Any, Any, int], Any]] = {
    "assign": _assign_one,
    "backward": lambda trainer, optimizer, number: _backward(trainer, number),
    "clip": _clip,
    "clip-value": _clip_value,
    "drop": _drop_one,
    "halve": _halve,
    "halve-all": _halve_all,
    "log": lambda trainer, optimizer, number: _log(trainer, optimizer),
    "negate": _negate,
    "step": lambda trainer, optimizer, number: optimizer.step(),
    "zero": lambda trainer, optimizer, number: optimizer.zero_grad(),
    "zero-in-place": lambda trainer, optimizer, number: optimizer.zero_grad(set_to_none=False),
}


def _order(seed: int, kind: str, length: int = 24) -> list[tuple[str, int]]:
    chosen = random.Random(seed)
    number = 3 if kind == "three" else 2
    weights = [3 if name in ("backward", "clip", "step") else 1 for name in ACTIONS]
    names = chosen.choices(list(ACTIONS), weights, k=length)
    return [("backward", 0), *((name, chosen.randrange(number)) for name in names)]


def _several(order: list[tuple[str, int]], kind: str) -> Program:
    def program(trainer: Any) -> None:
        optimizers = _optimizers(trainer.module, kind)
        trainer.attach(*optimizers)
        for number, (name, index) in enumerate(order):
            ACTIONS[name](trainer, optimizers[index], number)

    return program


def _check_several(
    rank: int, world: int, order: list[tuple[str, int]], kind: str, options: dict[str, Any], stages: Any = (0, 1, 2, 3)
) -> dict[str, str]:
    case = Case(
        build=lambda: Skipping(depth=DEPTH),
        program=_several(order, kind),
        tolerance=1e-4,  # as above; sums of several steps
        options=options,
        stages=stages,
    )
    return case.check(rank, world)


@pytest.mark.parametrize("kind", ["two", "shared"])
def test_windows_of_optimizers_that_share_a_unit_are_open_at_once(kind: str) -> None:
    order = [("backward", 0), ("clip", 0), ("clip", 1), ("step", 0), ("step", 1), ("zero", 0), ("zero", 1)]
    assert worlds.run(_check_several, 2, order * 3, kind, {}) == [{}, {}]


@pytest.mark.parametrize("seed", range(4))
def test_several_optimizers_over_one_buffer_in_any_order(seed: int) -> None:
    kind = ["two", "three", "shared"][seed % 3]
    options = list(PLACES.values())[seed % len(PLACES)]
    assert worlds.run(_check_several, 2, _order(seed, kind), kind, options) == [{}, {}]


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["two", "three", "shared"])
@pytest.mark.parametrize("seed", range(4, 14))
def test_several_optimizers_in_many_orders(seed: int, kind: str, place: str) -> None:
    world = 2 + seed % 2
    assert worlds.run(_check_several, world, _order(seed, kind), kind, PLACES[place]) == [{}] * world


# -- Ranks that disagree -----------------------------------------------------------------------------------------------


def _assign_differently(rank: int, world: int, stage: int, how: str) -> str:
    module = TinyGPT(depth=DEPTH)
    engine = ZeroEngine(stage, units=("Block",), communication=Communication(timeout_s=2.0))
    engine.shard(module)
    optimizer = engine.attach(torch.optim.SGD(module.parameters(), lr=0.1))
    if how == "values":
        _assign(list(module.parameters()), [grad + 0.1 * rank for grad in _noise(0)])
    elif how == "names":
        list(module.parameters())[rank].grad = _noise(0)[rank]
    elif how == "create-graph":
        token_loss(module, rank, 0).backward(create_graph=True)
    elif rank == 0:
        _assign(list(module.parameters()), _noise(0))
    try:
        optimizer.step()
        text = ""
    except RuntimeError as error:
        text = str(error)
    if how == "one-rank":  # the other one goes on, and waits for this one
        return text
    engine.close()
    return text


@pytest.mark.parametrize("stage", sample([0, 1, 2, 3], 1, 3))
@pytest.mark.parametrize("how", ["values", "names", "create-graph"])
def test_ranks_that_assign_different_gradients_are_told(stage: int, how: str) -> None:
    expected = {
        "values": "rank(s) [1] have assigned another one than rank 0",
        "names": "was assigned by hand on rank(s) [0] and not on rank(s) [1]",
        "create-graph": "left there by `backward(create_graph=True)`",
    }[how]
    for text in worlds.run(_assign_differently, 2, stage, how):
        assert expected in text
        assert "torch.distributed.all_reduce(grad)" in text


@pytest.mark.slow
def test_a_rank_that_assigns_gradients_alone_is_told() -> None:
    texts = worlds.run(_assign_differently, 2, 3, "one-rank")
    assert "`embedding.weight` first, were assigned by hand on this rank, and not all ranks compared" in texts[0]
    worlds.close()


# -- Loss scaling by hand ----------------------------------------------------------------------------------------------


def _scaled(trainer: Any, optimizer: Callable[[nn.Module], torch.optim.Optimizer], is_unscaled: bool) -> None:
    stepper = optimizer(trainer.module)
    trainer.attach(stepper)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for step in range(6):
        with trainer.scope():
            loss = token_loss(trainer.module, trainer.rank, step)
            if step == 3 and trainer.rank == 1:  # only the rank that has the segment can find it
                loss = loss + trainer.module.norm.bias[0] * float("inf")
        trainer.backward(scaler.scale(loss))
        trainer.losses[-1] = trainer.losses[-1].nan_to_num(0.0)
        if is_unscaled:
            scaler.unscale_(stepper)
            torch.nn.utils.clip_grad_norm_(trainer.module.parameters(), 0.5)
        scaler.step(stepper)
        scaler.update()
        trainer.losses.append(torch.tensor(scaler.get_scale()))
        stepper.zero_grad()


SCALED = {
    "adamw": lambda module: torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-4),
    "adamw-fused": adamw,
    "sgd-fused": lambda module: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, fused=True),
}


def _check_scaled(rank: int, world: int, optimizer: str, is_unscaled: bool, options: dict[str, Any]) -> dict[str, str]:
    case = Case(
        build=lambda: TinyGPT(depth=DEPTH),
        program=lambda trainer: _scaled(trainer, SCALED[optimizer], is_unscaled),
        tolerance=1e-5,
        options=options,
    )
    return case.check(rank, world)


@pytest.mark.parametrize(("optimizer", "is_unscaled", "place"), [
    ("adamw", True, "device"), ("adamw-fused", False, "cpu"), ("sgd-fused", True, "deferred"),
])  # fmt: skip
def test_grad_scaler_skips_a_step_on_all_ranks_or_none(optimizer: str, is_unscaled: bool, place: str) -> None:
    assert worlds.run(_check_scaled, 2, optimizer, is_unscaled, PLACES[place]) == [{}, {}]


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("is_unscaled", [False, True])
@pytest.mark.parametrize("optimizer", SCALED)
def test_grad_scaler_everywhere(optimizer: str, is_unscaled: bool, place: str) -> None:
    assert worlds.run(_check_scaled, 3, optimizer, is_unscaled, PLACES[place]) == [{}] * 3


# -- Gradients that a program keeps -----------------------------------------------------------------------------------

KEEP: dict[str, Callable[[Tensor], Tensor]] = {"itself": lambda grad: grad, "a-view": lambda grad: grad.detach()}
DROP: dict[str, Callable[[Any, list[nn.Parameter]], None]] = {
    "zero_grad": lambda stepper, params: stepper.zero_grad(),
    "some": lambda stepper, params: [setattr(param, "grad", None) for param in params[::2]],
    "behind-a-step": lambda stepper, params: [stepper.step(), stepper.zero_grad()],
}


def _kept_gradients(rank: int, world: int, stage: int, drop: str, optimizer: str, options: dict[str, Any]) -> list[str]:
    found = []
    for how, keep in KEEP.items():
        if how == "a-view" and drop == "some":
            continue
        engine = ZeroEngine(stage, units=["Block"], **options)
        module = engine.shard(TinyGPT(depth=DEPTH))
        stepper = OPTIMIZERS[optimizer](module)
        engine.attach(stepper)
        params = list(module.parameters())
        for step in range(2):
            stepper.zero_grad()
            token_loss(module, rank, step).backward()
            kept = [keep(param.grad) for param in params]
            module(tokens(rank, step))  # closes the step window
            assert how == "a-view" or all(param.grad is one for param, one in zip(params, kept, strict=True))
            copies = [one.clone() for one in kept]
            DROP[drop](stepper, params)
            if drop == "some":
                kept, copies = kept[::2], copies[::2]
            token_loss(module, rank, step + 10).backward()
            is_same = [bool((one == other).as_subclass(Tensor).all()) for one, other in zip(kept, copies, strict=True)]
            is_segment = [isinstance(one, ShardedGradient) == (stage > 0) for one in kept]
            if not all(is_same + is_segment):
                found.append(f"{how} in step {step}: {is_same} {is_segment}")
        engine.close()
    return found


@pytest.mark.parametrize("stage", sample([0, 1, 2, 3], 0, 3))
@pytest.mark.parametrize("drop", DROP)
def test_a_gradient_that_a_program_keeps_stays_as_it_was(stage: int, drop: str) -> None:
    optimizer = "rmsprop" if drop == "behind-a-step" else "adamw"  # PyTorch steps it
    assert worlds.run(_kept_gradients, 2, stage, drop, optimizer, {}) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("drop", DROP)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("place", PLACES)
def test_a_gradient_that_a_program_keeps_stays_as_it_was_wherever(
    stage: int, drop: str, optimizer: str, place: str
) -> None:
    assert worlds.run(_kept_gradients, 2, stage, drop, optimizer, PLACES[place]) == [[], []]


def _assigned_in_the_window(rank: int, world: int, how: str) -> list[str]:
    """Change what was assigned behind a read of it; return errors."""
    plain = TinyGPT(depth=1).blocks[0].up
    communication = Communication(timeout_s=2.0, reduce_dtype="bf16" if how == "rounded" else None)
    engine = ZeroEngine(1, units=["Block"], communication=communication)
    module = engine.shard(TinyGPT(depth=1))
    optimizer = engine.attach(torch.optim.SGD(module.parameters(), lr=0.1))
    token_loss(module, rank, 0).backward()
    name = "bias" if how == "of-one-dimension" else "weight"
    param = module.blocks[0].up.get_parameter(name)
    assert param.grad is not None
    assigned = torch.full(plain.get_parameter(name).shape, 1 / 3)
    if how == "not-a-number":
        assigned.view(-1)[0] = float("nan")
    param.grad = assigned
    if how == "not-a-number":
        torch.nan_to_num_(param.grad, nan=0.0)
    elif how == "of-one-dimension":
        param.grad.mul_(0.5)
        assigned.add_(1.0)
    else:
        assert param.grad is not None
        engine.internals.steps.close_window(optimizer)
        assigned.add_(1.0)
    try:
        engine.full_grad(param)
    except RuntimeError as error:
        return [str(error)]
    return []


def test_what_was_assigned_is_refused_where_it_was_changed_twice_and_only_there() -> None:
    found = worlds.run(_assigned_in_the_window, 2, "of-one-dimension")
    assert any("changed both" in one for errors in found for one in errors)
    assert worlds.run(_assigned_in_the_window, 2, "not-a-number") == [[], []]
    assert worlds.run(_assigned_in_the_window, 2, "rounded") == [[], []]


def _with_a_hook(trainer: Any) -> None:
    """A hook of the optimizer's step decays matrices, through their gradients."""
    optimizer = torch.optim.RMSprop(trainer.module.parameters(), lr=1e-2, eps=1e-3)
    trainer.attach(optimizer)

    def decay(*_: Any) -> None:
        for param in _params(trainer):
            if param.grad is not None and param.ndim > 1:
                param.grad.add_(param.data, alpha=0.1)
                trainer.losses.append(param.grad.norm())

    optimizer.register_step_pre_hook(decay)
    for step in range(3):
        _backward(trainer, step)
        optimizer.step()
        optimizer.zero_grad()


def _check_hook(rank: int, world: int) -> dict[str, str]:
    return Case(build=lambda: TinyGPT(depth=DEPTH), program=_with_a_hook, tolerance=1e-5).check(rank, world)


def test_hooks_of_a_step_see_gradients_as_before_it() -> None:
    assert worlds.run(_check_hook, 2) == [{}, {}]


def _assigned_and_outdated(rank: int, world: int, stage: int) -> str:
    """Change what was assigned behind a backward that has added to it."""
    module, engine, optimizer = _tiny(stage)
    grads = [torch.ones_like(param) for param in TinyGPT(depth=1).parameters()]
    _assign(list(module.parameters()), grads)
    token_loss(module, rank, 0).backward()
    grads[0].mul_(2.0)
    return _refusal(optimizer.step)


def _assigned_anew(rank: int, world: int, stage: int) -> str:
    """Assign another tensor behind such a backward, and use the first one for something else."""
    module, engine, optimizer = _tiny(stage)
    params = list(module.parameters())
    grads = [torch.ones_like(param) for param in TinyGPT(depth=1).parameters()]
    _assign(params, grads)
    token_loss(module, rank, 0).backward()
    assert params[-1].grad is not None
    _assign(params, [torch.ones_like(grad) for grad in grads])
    for grad in grads:
        grad.zero_()
    return _refusal(optimizer.step)


def _assigned_before_the_last(rank: int, world: int, stage: int) -> str:
    """Assign a gradient while micro-batches wait to be added to an earlier average."""
    module, engine, optimizer = _tiny(stage)
    token_loss(module, rank, 0).backward()
    with engine.microbatch(last=False):
        token_loss(module, rank, 1).backward()
    grads = [torch.ones_like(param) for param in TinyGPT(depth=1).parameters()]
    return _refusal(lambda: _assign(list(module.parameters()), grads))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_gradient_that_is_assigned_anew_is_not_compared_with_the_one_before(stage: int) -> None:
    assert worlds.run(_assigned_anew, 2, stage) == ["", ""]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_gradient_may_be_assigned_while_sums_wait(stage: int) -> None:
    assert worlds.run(_assigned_before_the_last, 2, stage) == ["", ""]


def _norm_of_waiting(rank: int, world: int, stage: int) -> str:
    module, engine, optimizer = _tiny(stage)
    with engine.microbatch(last=False):
        token_loss(module, rank, 0).backward()
    return _refusal(lambda: engine.clip_grad_norm(optimizer, 1.0))


def _tiny(stage: int) -> tuple[Any, ZeroEngine, Any]:
    engine = ZeroEngine(stage, units=["Block"], communication=Communication(timeout_s=5.0))
    module = engine.shard(TinyGPT(depth=1))
    return module, engine, engine.attach(torch.optim.SGD(module.parameters(), lr=0.1))


def _refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", [0, 3])
def test_what_was_assigned_and_does_not_show_a_later_backward_may_not_be_changed(stage: int) -> None:
    for refusal in worlds.run(_assigned_and_outdated, 2, stage):
        assert "was changed after a backward that has added to the gradient" in refusal


@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_that_wait_are_not_clipped(stage: int) -> None:
    for refusal in worlds.run(_norm_of_waiting, 2, stage):
        assert "wait on every rank for the last micro-batch" in refusal


def _changed_behind_a_forward(rank: int, world: int, stage: int, options: dict[str, Any]) -> list[float]:
    engine = ZeroEngine(stage, units=["Block"], **options)
    module = engine.shard(TinyGPT(depth=1))
    engine.attach(torch.optim.SGD(module.parameters(), lr=0.1))
    token_loss(module, rank, 0).backward()
    weight = module.blocks[0].up.weight
    kept = weight.grad
    assert kept is not None
    module(tokens(rank, 0))  # closes the step window
    kept.zero_()
    found = engine.full_grad(weight)
    assert found is not None
    return [float(found.abs().max()), float(weight.grad is kept)]


@pytest.mark.parametrize("place", ["device", "cpu"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_what_is_done_behind_a_forward_to_a_gradient_that_a_program_keeps_counts(stage: int, place: str) -> None:
    assert worlds.run(_changed_behind_a_forward, 2, stage, PLACES[place]) == [[0.0, 1.0]] * 2
